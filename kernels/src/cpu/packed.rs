//! Weights in the order in which the matrix product reads them.
//!
//! Outputs are taken eight at a time (a *panel*), one per vector lane, and stored interleaved along the reduced
//! dimension, so that one load feeds eight outputs and no sum ever crosses lanes. Quantised panels keep the groups of
//! 32 with their scales as they are in the file, in about as many bytes ([`layout`] says how); float panels are
//! `[input][8 outputs]`. Two panels form a *pair*, a unit of one and a unit of the other by turns: whoever takes both at once
//! reads one stream, which from memory is up to three times as fast as two. Missing outputs of the last pair are zero.

mod block;
mod format;
mod layout;

pub use format::WeightFormat;
pub(crate) use layout::{
    Body, Bytes, Fives, FivesK, FivesMin, Grouped, Head, Layout, Nibbles, NibblesK, NibblesMin,
    SUPER_GROUPS, SixesK,
};

use crate::cpu::buffer::AlignedBytes;
use crate::cpu::wide::Element;
use block::Block;
use half::{bf16, f16};

/// Outputs of a panel.
pub(crate) const PANEL_OUTPUTS: usize = 8;
/// Outputs of a pair of panels.
pub(crate) const PAIR_OUTPUTS: usize = 2 * PANEL_OUTPUTS;
/// Inputs of a quantisation group.
pub(crate) const GROUP_INPUTS: usize = 32;

/// How a panel is laid out, which decides the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Packing {
    /// Floats, as in the file.
    Floats(Element),
    /// Groups of small integers with their scales.
    Groups(Layout),
}

impl Packing {
    pub(crate) fn is_quantised(self) -> bool {
        matches!(self, Self::Groups(_))
    }

    /// Inputs that are stored together, and the bytes of those inputs in a panel.
    pub(crate) fn unit(self) -> (usize, usize) {
        match self {
            Self::Floats(element) => (1, PANEL_OUTPUTS * element.bytes()),
            Self::Groups(layout) => (layout.unit_groups() * GROUP_INPUTS, layout.unit_bytes()),
        }
    }
}

/// A matrix as it lies in a model file: `[n_outputs, n_inputs]`, row-major.
#[derive(Clone, Copy, Debug)]
pub struct RawMatrix<'a> {
    /// How the numbers are stored.
    pub format: WeightFormat,
    /// Rows.
    pub n_outputs: usize,
    /// Columns.
    pub n_inputs: usize,
    /// The file's bytes.
    pub bytes: &'a [u8],
}

/// Why a matrix was refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PackError {
    /// A dimension is zero, or not whole blocks.
    #[error("{field} is {value}; a positive multiple of {multiple} is allowed for {format:?}")]
    Shape {
        /// `n_outputs` or `n_inputs`.
        field: &'static str,
        /// What it was.
        value: usize,
        /// What it must be a multiple of.
        multiple: usize,
        /// The storage.
        format: WeightFormat,
    },
    /// More or fewer bytes than the shape needs.
    #[error("{given} bytes of weights; the shape needs {wanted}")]
    Length {
        /// Bytes given.
        given: usize,
        /// Bytes wanted.
        wanted: usize,
    },
}

/// A weight matrix `[n_outputs, n_inputs]`, ready for [`crate::cpu::matmul`].
pub struct PackedMatrix {
    pub(crate) packing: Packing,
    n_outputs: usize,
    n_inputs: usize,
    pairs: AlignedBytes,
}

impl std::fmt::Debug for PackedMatrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (rows, columns) = (self.n_outputs, self.n_inputs);
        write!(f, "PackedMatrix({:?} [{rows}, {columns}])", self.packing)
    }
}

impl PackedMatrix {
    /// Packs a matrix. Output `i` of the result is row `row_of(i)` of the file, which is how rope's interleaved
    /// pairs are put into halves, once, at load.
    ///
    /// # Errors
    /// When shape and bytes do not belong together.
    ///
    /// # Panics
    /// When `row_of` names a row that the matrix does not have.
    pub fn pack(raw: &RawMatrix<'_>, row_of: impl Fn(usize) -> usize) -> Result<Self, PackError> {
        let row_bytes = check(raw)?;
        let packing = raw.format.packing();
        let (unit_inputs, unit_bytes) = packing.unit();
        let n_units = raw.n_inputs / unit_inputs;
        let pair_bytes = n_units * 2 * unit_bytes;
        let n_pairs = raw.n_outputs.div_ceil(PAIR_OUTPUTS);
        let mut pairs = AlignedBytes::zeroed(n_pairs * pair_bytes);
        for (pair, target) in pairs.bytes_mut().chunks_exact_mut(pair_bytes).enumerate() {
            let first = pair * PAIR_OUTPUTS;
            for output in first..(first + PAIR_OUTPUTS).min(raw.n_outputs) {
                let row = row_of(output);
                assert!(row < raw.n_outputs, "a row map stays within the matrix");
                let source = &raw.bytes[row * row_bytes..(row + 1) * row_bytes];
                let units = source.chunks_exact(row_bytes / n_units);
                let of_panel = target.chunks_exact_mut(unit_bytes);
                let of_panel = of_panel.skip((output - first) / PANEL_OUTPUTS).step_by(2);
                for (unit, from) in of_panel.zip(units) {
                    pack_unit(raw.format, from, output % PANEL_OUTPUTS, unit);
                }
            }
        }
        Ok(Self {
            packing,
            n_outputs: raw.n_outputs,
            n_inputs: raw.n_inputs,
            pairs,
        })
    }

    /// Rows: elements of the product.
    pub fn n_outputs(&self) -> usize {
        self.n_outputs
    }

    /// Columns: elements of what is multiplied.
    pub fn n_inputs(&self) -> usize {
        self.n_inputs
    }

    /// True when the product reads int8 activations.
    pub fn is_quantised(&self) -> bool {
        self.packing.is_quantised()
    }

    /// Bytes held, which is what one product with a single row reads.
    pub fn n_bytes(&self) -> usize {
        self.pairs.bytes().len()
    }

    pub(crate) fn n_pairs(&self) -> usize {
        self.n_outputs.div_ceil(PAIR_OUTPUTS)
    }

    pub(crate) fn pair(&self, pair: usize) -> &[u8] {
        let n_bytes = self.n_bytes() / self.n_pairs();
        &self.pairs.bytes()[pair * n_bytes..(pair + 1) * n_bytes]
    }

    /// Writes row `output` as numbers; for the embedding look-up.
    ///
    /// # Panics
    /// When there is no such row, or `target` has not `n_inputs` elements.
    pub fn row_to_f32(&self, output: usize, target: &mut [f32]) {
        assert!(output < self.n_outputs, "the row exists");
        assert_eq!(target.len(), self.n_inputs, "one element for each input");
        let lane = output % PANEL_OUTPUTS;
        let (unit_inputs, unit_bytes) = self.packing.unit();
        let units = self.pair(output / PAIR_OUTPUTS).chunks_exact(unit_bytes);
        let units = units.skip(output % PAIR_OUTPUTS / PANEL_OUTPUTS).step_by(2);
        for (unit, values) in units.zip(target.chunks_exact_mut(unit_inputs)) {
            match self.packing {
                Packing::Floats(element) => values[0] = float_at(element, unit, lane),
                Packing::Groups(layout) => {
                    for (g, values) in values.chunks_exact_mut(GROUP_INPUTS).enumerate() {
                        layout.group(unit, g, lane).to_f32(values);
                    }
                }
            }
        }
    }
}

fn check(raw: &RawMatrix<'_>) -> Result<usize, PackError> {
    let (block_elements, block_bytes) = raw.format.block();
    for (field, value, multiple) in [
        ("n_outputs", raw.n_outputs, 1),
        ("n_inputs", raw.n_inputs, block_elements),
    ] {
        if value == 0 || !value.is_multiple_of(multiple) {
            return Err(PackError::Shape {
                field,
                value,
                multiple,
                format: raw.format,
            });
        }
    }
    let row_bytes = raw.n_inputs / block_elements * block_bytes;
    let wanted = row_bytes.saturating_mul(raw.n_outputs);
    if raw.bytes.len() != wanted {
        return Err(PackError::Length {
            given: raw.bytes.len(),
            wanted,
        });
    }
    Ok(row_bytes)
}

/// Puts one block (or one float) of a row into its lane of a unit.
fn pack_unit(format: WeightFormat, from: &[u8], lane: usize, unit: &mut [u8]) {
    match format.packing() {
        Packing::Floats(_) => {
            let n = from.len();
            unit[lane * n..(lane + 1) * n].copy_from_slice(from);
        }
        Packing::Groups(layout) => layout.put(&Block::read(format, from), lane, unit),
    }
}

/// One float of a panel's unit.
pub(crate) fn float_at(element: Element, unit: &[u8], lane: usize) -> f32 {
    let at = lane * element.bytes();
    match element {
        Element::F32 => f32::from_le_bytes([unit[at], unit[at + 1], unit[at + 2], unit[at + 3]]),
        Element::F16 => f16::from_le_bytes([unit[at], unit[at + 1]]).to_f32(),
        Element::Bf16 => bf16::from_le_bytes([unit[at], unit[at + 1]]).to_f32(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn q4_1_row(quants: &[u8; 32], scale: f32, min: f32) -> Vec<u8> {
        let mut row = Vec::new();
        row.extend(f16::from_f32(scale).to_le_bytes());
        row.extend(f16::from_f32(min).to_le_bytes());
        row.extend((0..16).map(|i| quants[i] | quants[i + 16] << 4));
        row
    }

    #[test]
    fn rows_come_back_in_the_order_of_the_map() {
        let mut bytes = Vec::new();
        for row in 0..11_u8 {
            let quants = std::array::from_fn(|i| (i as u8 + row) % 16);
            bytes.extend(q4_1_row(&quants, 0.5, -1.0));
        }
        let raw = RawMatrix {
            format: WeightFormat::Q4_1,
            n_outputs: 11,
            n_inputs: 32,
            bytes: &bytes,
        };
        let packed = PackedMatrix::pack(&raw, |i| 10 - i).expect("valid");
        let mut row = [0.0; 32];
        for output in 0..11 {
            packed.row_to_f32(output, &mut row);
            for (i, value) in row.iter().enumerate() {
                let quant = (i + 10 - output) % 16;
                assert_eq!(*value, quant as f32 * 0.5 - 1.0);
            }
        }
    }

    #[test]
    fn five_bits_are_put_together() {
        let mut bytes = f16::from_f32(2.0).to_le_bytes().to_vec();
        bytes.extend(0xffff_0001_u32.to_le_bytes());
        bytes.extend([0x21; 16]);
        let raw = RawMatrix {
            format: WeightFormat::Q5_0,
            n_outputs: 1,
            n_inputs: 32,
            bytes: &bytes,
        };
        let packed = PackedMatrix::pack(&raw, |i| i).expect("valid");
        let mut row = [0.0; 32];
        packed.row_to_f32(0, &mut row);
        assert_eq!(row[0], 2.0 * (17.0 - 16.0));
        assert_eq!(row[1], 2.0 * (1.0 - 16.0));
        assert_eq!(row[16], 2.0 * (18.0 - 16.0));
    }

    #[test]
    fn shapes_that_do_not_hold_are_named() {
        let raw = |n_outputs, n_inputs, bytes| RawMatrix {
            format: WeightFormat::Q8_0,
            n_outputs,
            n_inputs,
            bytes,
        };
        let error = PackedMatrix::pack(&raw(1, 31, &[0; 34]), |i| i).expect_err("31");
        assert!(error.to_string().contains("n_inputs is 31"), "{error}");
        let error = PackedMatrix::pack(&raw(0, 32, &[]), |i| i).expect_err("0");
        assert!(error.to_string().contains("n_outputs is 0"), "{error}");
        let error = PackedMatrix::pack(&raw(2, 32, &[0; 67]), |i| i).expect_err("67");
        assert!(error.to_string().contains("67") && error.to_string().contains("68"));
    }
}
