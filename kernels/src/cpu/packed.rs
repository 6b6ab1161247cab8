//! Weights in the order in which the matrix product reads them.
//!
//! Outputs are taken eight at a time (a *panel*), one per vector lane, and stored interleaved along the reduced
//! dimension, so that one load feeds eight outputs and no sum ever crosses lanes. Quantised panels keep the groups of
//! 32 with their f16 scales as they are in the file: `[8 scales][8 minima, if any][4 bytes of each output, ...]`.
//! Float panels are `[input][8 outputs]`. Missing outputs of the last panel are zero.

use crate::cpu::buffer::AlignedBytes;
use half::{bf16, f16};

/// Outputs of a panel.
pub(crate) const PANEL_OUTPUTS: usize = 8;
/// Inputs of a quantisation group.
pub(crate) const GROUP_INPUTS: usize = 32;

/// How the numbers of a matrix lie in a model file. The block types are GGUF's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WeightFormat {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// The upper half of an IEEE single.
    Bf16,
    /// f16 scale, 32 nibbles less 8.
    Q4_0,
    /// f16 scale, f16 minimum, 32 nibbles.
    Q4_1,
    /// f16 scale, 32 high bits, 32 nibbles; less 16.
    Q5_0,
    /// f16 scale, f16 minimum, 32 high bits, 32 nibbles.
    Q5_1,
    /// f16 scale, 32 signed bytes.
    Q8_0,
}

impl WeightFormat {
    /// Elements stored together, and their bytes.
    fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q4_0 => (GROUP_INPUTS, 18),
            Self::Q4_1 => (GROUP_INPUTS, 20),
            Self::Q5_0 => (GROUP_INPUTS, 22),
            Self::Q5_1 => (GROUP_INPUTS, 24),
            Self::Q8_0 => (GROUP_INPUTS, 34),
        }
    }

    fn packing(self) -> Packing {
        match self {
            Self::F32 => Packing::F32,
            Self::F16 => Packing::F16,
            Self::Bf16 => Packing::Bf16,
            Self::Q4_0 => Packing::Nibbles,
            Self::Q4_1 => Packing::NibblesMin,
            Self::Q5_0 | Self::Q8_0 => Packing::Bytes,
            Self::Q5_1 => Packing::BytesMin,
        }
    }
}

/// How a panel is laid out, which decides the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Packing {
    F32,
    F16,
    Bf16,
    /// Unsigned nibbles, less 8.
    Nibbles,
    /// Unsigned nibbles, and a minimum.
    NibblesMin,
    /// Signed bytes.
    Bytes,
    /// Signed bytes, and a minimum.
    BytesMin,
}

impl Packing {
    pub(crate) fn is_quantised(self) -> bool {
        !matches!(self, Self::F32 | Self::F16 | Self::Bf16)
    }

    pub(crate) fn has_min(self) -> bool {
        matches!(self, Self::NibblesMin | Self::BytesMin)
    }

    /// Bytes before the numbers of a group.
    fn head_bytes(self) -> usize {
        if self.has_min() { 32 } else { 16 }
    }

    /// Bytes of one group of a quantised panel, or of one input of a float panel.
    pub(crate) fn unit_bytes(self) -> usize {
        match self {
            Self::F32 => 32,
            Self::F16 | Self::Bf16 => 16,
            Self::Nibbles | Self::NibblesMin => self.head_bytes() + 128,
            Self::Bytes | Self::BytesMin => self.head_bytes() + 256,
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
    panels: AlignedBytes,
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
        let n_units = match packing.is_quantised() {
            true => raw.n_inputs / GROUP_INPUTS,
            false => raw.n_inputs,
        };
        let unit_bytes = packing.unit_bytes();
        let panel_bytes = n_units * unit_bytes;
        let n_panels = raw.n_outputs.div_ceil(PANEL_OUTPUTS);
        let mut panels = AlignedBytes::zeroed(n_panels * panel_bytes);
        for (panel, target) in panels.bytes_mut().chunks_exact_mut(panel_bytes).enumerate() {
            let first = panel * PANEL_OUTPUTS;
            for output in first..(first + PANEL_OUTPUTS).min(raw.n_outputs) {
                let row = row_of(output);
                assert!(row < raw.n_outputs, "a row map stays within the matrix");
                let source = &raw.bytes[row * row_bytes..(row + 1) * row_bytes];
                let units = source.chunks_exact(row_bytes / n_units);
                for (unit, from) in target.chunks_exact_mut(unit_bytes).zip(units) {
                    pack_unit(raw.format, from, output - first, unit);
                }
            }
        }
        Ok(Self {
            packing,
            n_outputs: raw.n_outputs,
            n_inputs: raw.n_inputs,
            panels,
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
        self.panels.bytes().len()
    }

    pub(crate) fn n_panels(&self) -> usize {
        self.n_outputs.div_ceil(PANEL_OUTPUTS)
    }

    pub(crate) fn panel(&self, panel: usize) -> &[u8] {
        let n_bytes = self.n_bytes() / self.n_panels();
        &self.panels.bytes()[panel * n_bytes..(panel + 1) * n_bytes]
    }

    /// Writes row `output` as numbers; for the embedding look-up.
    ///
    /// # Panics
    /// When there is no such row, or `target` has not `n_inputs` elements.
    pub fn row_to_f32(&self, output: usize, target: &mut [f32]) {
        assert!(output < self.n_outputs, "the row exists");
        assert_eq!(target.len(), self.n_inputs, "one element for each input");
        let lane = output % PANEL_OUTPUTS;
        let units = self.panel(output / PANEL_OUTPUTS);
        let units = units.chunks_exact(self.packing.unit_bytes());
        if self.packing.is_quantised() {
            for (unit, group) in units.zip(target.chunks_exact_mut(GROUP_INPUTS)) {
                let group_of = Group::read(self.packing, unit, lane);
                for (value, quant) in group.iter_mut().zip(group_of.quants) {
                    *value = f32::from(quant) * group_of.scale + group_of.min;
                }
            }
        } else {
            for (unit, value) in units.zip(target) {
                *value = float_at(self.packing, unit, lane);
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
    let packing = format.packing();
    if !packing.is_quantised() {
        let n = from.len();
        unit[lane * n..(lane + 1) * n].copy_from_slice(from);
        return;
    }
    let head = packing.head_bytes();
    unit[lane * 2..lane * 2 + 2].copy_from_slice(&from[..2]);
    let mut body = &from[2..];
    if packing.has_min() {
        unit[16 + lane * 2..16 + lane * 2 + 2].copy_from_slice(&body[..2]);
        body = &body[2..];
    }
    let mut bytes = [0_u8; GROUP_INPUTS];
    let bytes = match format {
        WeightFormat::Q5_0 | WeightFormat::Q5_1 => {
            let less = if packing.has_min() { 0 } else { 16 };
            let high = u32::from_le_bytes([body[0], body[1], body[2], body[3]]);
            for (i, byte) in bytes.iter_mut().enumerate() {
                let nibble = (body[4 + i % 16] >> (i / 16 * 4)) & 15;
                let quant = nibble | (((high >> i) & 1) as u8) << 4;
                *byte = quant.wrapping_sub(less);
            }
            &bytes[..]
        }
        _ => body,
    };
    for (j, four) in bytes.chunks_exact(4).enumerate() {
        let at = head + j * 32 + lane * 4;
        unit[at..at + 4].copy_from_slice(four);
    }
}

/// One group of one output, unpacked.
pub(crate) struct Group {
    pub(crate) scale: f32,
    /// 0 when the packing has none.
    pub(crate) min: f32,
    /// -128 to 127.
    pub(crate) quants: [i16; GROUP_INPUTS],
}

impl Group {
    pub(crate) fn read(packing: Packing, unit: &[u8], lane: usize) -> Self {
        let half_at = |at: usize| f16::from_le_bytes([unit[at], unit[at + 1]]).to_f32();
        let min = if packing.has_min() {
            half_at(16 + lane * 2)
        } else {
            0.0
        };
        let body = &unit[packing.head_bytes()..];
        let mut quants = [0_i16; GROUP_INPUTS];
        for (i, quant) in quants.iter_mut().enumerate() {
            let byte_of = |i: usize| body[i / 4 * 32 + lane * 4 + i % 4];
            *quant = match packing {
                Packing::Nibbles => i16::from((byte_of(i % 16) >> (i / 16 * 4)) & 15) - 8,
                Packing::NibblesMin => i16::from((byte_of(i % 16) >> (i / 16 * 4)) & 15),
                _ => i16::from(byte_of(i) as i8),
            };
        }
        Self {
            scale: half_at(lane * 2),
            min,
            quants,
        }
    }
}

/// One float of a panel's unit.
pub(crate) fn float_at(packing: Packing, unit: &[u8], lane: usize) -> f32 {
    match packing {
        Packing::F32 => {
            let at = lane * 4;
            f32::from_le_bytes([unit[at], unit[at + 1], unit[at + 2], unit[at + 3]])
        }
        Packing::F16 => f16::from_le_bytes([unit[lane * 2], unit[lane * 2 + 1]]).to_f32(),
        _ => bf16::from_le_bytes([unit[lane * 2], unit[lane * 2 + 1]]).to_f32(),
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
