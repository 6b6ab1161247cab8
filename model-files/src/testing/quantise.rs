//! Numbers to the bytes of a weight type: the plain scheme of each format, without search for better scales.
//!
//! The inverse of `dequantise`, to within half a quantisation step. Tests of kernels take their weights from here.

use half::{bf16, f16};

use super::quantise_super;
use crate::tensors::WeightType;

/// The bytes that store `values` in this type.
///
/// # Panics
/// When the values are no whole number of blocks.
pub fn quantise(dtype: WeightType, values: &[f32]) -> Vec<u8> {
    let block = dtype.block_elements();
    assert!(
        values.len().is_multiple_of(block),
        "{} values are no whole number of {dtype:?} blocks",
        values.len()
    );
    let mut bytes = Vec::with_capacity(values.len() / block * dtype.block_bytes());
    for values in values.chunks_exact(block) {
        match dtype {
            WeightType::F32 => bytes.extend(values[0].to_le_bytes()),
            WeightType::F16 => bytes.extend(f16::from_f32(values[0]).to_le_bytes()),
            WeightType::BF16 => bytes.extend(bf16::from_f32(values[0]).to_le_bytes()),
            WeightType::Q8_0 => push_q8(values, &mut bytes),
            WeightType::Q4_0 => push_symmetric(values, 4, &mut bytes),
            WeightType::Q5_0 => push_symmetric(values, 5, &mut bytes),
            WeightType::Q4_1 => push_with_minimum(values, 4, &mut bytes),
            WeightType::Q5_1 => push_with_minimum(values, 5, &mut bytes),
            WeightType::Q4K => quantise_super::push_with_minimum(values, 4, &mut bytes),
            WeightType::Q5K => quantise_super::push_with_minimum(values, 5, &mut bytes),
            WeightType::Q6K => quantise_super::push_six_bits(values, &mut bytes),
        }
    }
    bytes
}

/// `value / scale`, or 0 in a block of zeros.
pub(super) fn ratio(value: f32, scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { value / scale }
}

fn push_q8(values: &[f32], bytes: &mut Vec<u8>) {
    let largest = values
        .iter()
        .fold(0.0_f32, |largest, value| largest.max(value.abs()));
    let scale = f16::from_f32(largest / 127.0);
    bytes.extend(scale.to_le_bytes());
    for value in values {
        let level = ratio(*value, scale.to_f32()).round().clamp(-127.0, 127.0);
        bytes.push((level as i8).cast_unsigned());
    }
}

/// Levels from -2^(bits-1); the value of largest magnitude gets exactly that level.
fn push_symmetric(values: &[f32], n_bits: u32, bytes: &mut Vec<u8>) {
    let offset = (1 << (n_bits - 1)) as f32;
    let extreme = values.iter().fold(0.0_f32, |extreme, value| {
        if value.abs() > extreme.abs() {
            *value
        } else {
            extreme
        }
    });
    let scale = f16::from_f32(extreme / -offset);
    bytes.extend(scale.to_le_bytes());
    push_levels(
        values,
        n_bits,
        |value| ratio(value, scale.to_f32()) + offset,
        bytes,
    );
}

/// Levels from the block's minimum up.
fn push_with_minimum(values: &[f32], n_bits: u32, bytes: &mut Vec<u8>) {
    let least = values.iter().copied().fold(f32::INFINITY, f32::min);
    let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let scale = f16::from_f32((largest - least) / ((1 << n_bits) - 1) as f32);
    let minimum = f16::from_f32(least);
    bytes.extend(scale.to_le_bytes());
    bytes.extend(minimum.to_le_bytes());
    let level = |value: f32| ratio(value - minimum.to_f32(), scale.to_f32());
    push_levels(values, n_bits, level, bytes);
}

/// The word of fifth bits, if there is one, and the nibbles: element `i` low and element `i + 16` high in byte `i`.
fn push_levels(values: &[f32], n_bits: u32, level: impl Fn(f32) -> f32, bytes: &mut Vec<u8>) {
    let top = ((1 << n_bits) - 1) as f32;
    let levels: Vec<u8> = values
        .iter()
        .map(|value| level(*value).round().clamp(0.0, top) as u8)
        .collect();
    if n_bits == 5 {
        let fifth_bits = levels.iter().enumerate().fold(0_u32, |word, (idx, level)| {
            word | u32::from(level >> 4) << idx
        });
        bytes.extend(fifth_bits.to_le_bytes());
    }
    let (low, high) = levels.split_at(levels.len() / 2);
    for (low, high) in low.iter().zip(high) {
        bytes.push((low & 0xf) | (high & 0xf) << 4);
    }
}
