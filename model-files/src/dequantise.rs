//! One row of any weight type as f32: the definition that faster code is tested against.
//!
//! It serves embedding look-up and tests, not matrix products. The arithmetic is that of the format: integer
//! times scale, plus minimum, each step rounded to f32 (no fused multiply-add).
//! Source: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md> and the block structs it names.

mod super_blocks;

use half::{bf16, f16};

use crate::tensors::{TensorView, WeightType};
use super_blocks::{six_bits, with_minimum};

/// Elements of a block; the first half of them are the low nibbles.
const BLOCK: usize = 32;

impl TensorView<'_> {
    /// The bytes of one row.
    ///
    /// # Panics
    /// When `row` is no row of this tensor.
    pub fn row_bytes(&self, row: usize) -> &[u8] {
        let [rows, cols] = self.shape;
        assert!(row < rows, "row {row} of a tensor of {rows} rows");
        let n_bytes = cols / self.dtype.block_elements() * self.dtype.block_bytes();
        &self.bytes[row * n_bytes..][..n_bytes]
    }

    /// Writes one row, dequantised, to `out`, which holds exactly one row.
    ///
    /// # Panics
    /// When `row` is no row of this tensor, or `out` is not of its length.
    pub fn row_to_f32(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.shape[1], "the output holds one row");
        to_f32(self.dtype, self.row_bytes(row), out);
    }
}

/// Dequantises whole blocks: `bytes` and `out` hold equally many.
pub(crate) fn to_f32(dtype: WeightType, bytes: &[u8], out: &mut [f32]) {
    let blocks = bytes
        .chunks_exact(dtype.block_bytes())
        .zip(out.chunks_exact_mut(dtype.block_elements()));
    for (bytes, out) in blocks {
        match dtype {
            WeightType::F32 => {
                out[0] = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            }
            WeightType::F16 => out[0] = half_at(bytes, 0),
            WeightType::BF16 => out[0] = bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            WeightType::Q8_0 => {
                let scale = half_at(bytes, 0);
                for (out, byte) in out.iter_mut().zip(&bytes[2..]) {
                    *out = f32::from(byte.cast_signed()) * scale;
                }
            }
            WeightType::Q4_0 => nibbles(&bytes[2..], 0, (half_at(bytes, 0), 8, None), out),
            WeightType::Q4_1 => {
                let minimum = Some(half_at(bytes, 2));
                nibbles(&bytes[4..], 0, (half_at(bytes, 0), 0, minimum), out);
            }
            WeightType::Q5_0 => {
                nibbles(
                    &bytes[6..],
                    word_at(bytes, 2),
                    (half_at(bytes, 0), 16, None),
                    out,
                );
            }
            WeightType::Q4K => with_minimum(bytes, None, &bytes[16..], out),
            WeightType::Q5K => with_minimum(bytes, Some(&bytes[16..48]), &bytes[48..], out),
            WeightType::Q6K => six_bits(bytes, out),
            WeightType::Q5_1 => {
                let minimum = Some(half_at(bytes, 2));
                nibbles(
                    &bytes[8..],
                    word_at(bytes, 4),
                    (half_at(bytes, 0), 0, minimum),
                    out,
                );
            }
        }
    }
}

/// 32 elements from 16 bytes of nibbles and a word of fifth bits; `scale` is scale, offset and minimum.
fn nibbles(bytes: &[u8], fifth_bits: u32, scale: (f32, i32, Option<f32>), out: &mut [f32]) {
    let (scale, offset, minimum) = scale;
    for (idx, out) in out.iter_mut().enumerate() {
        let byte = bytes[idx % (BLOCK / 2)];
        let low = if idx < BLOCK / 2 {
            byte & 0xf
        } else {
            byte >> 4
        };
        let high = (fifth_bits >> idx & 1) << 4;
        let value = ((u32::from(low) | high).cast_signed() - offset) as f32 * scale;
        *out = minimum.map_or(value, |minimum| value + minimum);
    }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

fn word_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[cfg(test)]
mod tests;
