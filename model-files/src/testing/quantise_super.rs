//! Numbers to blocks of 256: Q4_K, Q5_K and Q6_K, each group by its extremes.

use super::quantise::ratio;
use half::f16;

/// Elements of a group with a minimum.
const GROUP: usize = 32;
/// Elements that share a scale in Q6_K.
const HALF: usize = 16;

/// What each group needs, as small numbers of a shared f16: the f16, and the numbers.
fn shared<const N: usize>(wanted: [f32; N], top: f32) -> (f16, [i8; N]) {
    let largest = wanted.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
    let scale = f16::from_f32(largest / top);
    let small = wanted.map(|wanted| ratio(wanted, scale.to_f32()).round().clamp(-top, top) as i8);
    (scale, small)
}

fn level(value: f32, scale: f32, offset: f32, top: f32) -> u8 {
    (ratio(value, scale) + offset).round().clamp(0.0, top) as u8
}

/// Q4_K or Q5_K.
pub(super) fn push_with_minimum(values: &[f32], n_bits: u32, bytes: &mut Vec<u8>) {
    let top = ((1 << n_bits) - 1) as f32;
    let groups = values.as_chunks::<GROUP>().0;
    let least: [f32; 8] =
        std::array::from_fn(|g| groups[g].iter().copied().fold(0.0_f32, f32::min));
    let range: [f32; 8] = std::array::from_fn(|g| {
        let largest = groups[g].iter().copied().fold(0.0_f32, f32::max);
        (largest - least[g]) / top
    });
    let (scale, scales) = shared(range, 63.0);
    let (minimum, minima) = shared(least.map(|least| -least), 63.0);
    bytes.extend(scale.to_le_bytes());
    bytes.extend(minimum.to_le_bytes());
    push_small(
        scales.map(i8::cast_unsigned),
        minima.map(i8::cast_unsigned),
        bytes,
    );
    let levels: [[u8; GROUP]; 8] = std::array::from_fn(|g| {
        let scale = scale.to_f32() * f32::from(scales[g]);
        let minimum = minimum.to_f32() * f32::from(minima[g]);
        groups[g].map(|value| level(value + minimum, scale, 0.0, top))
    });
    if n_bits == 5 {
        bytes.extend((0..GROUP).map(|idx| {
            let bit = |g: usize| levels[g][idx] >> 4 << g;
            (0..8).fold(0, |byte, g| byte | bit(g))
        }));
    }
    for [low, high] in levels.as_chunks::<2>().0 {
        bytes.extend(
            low.iter()
                .zip(high)
                .map(|(low, high)| low & 0xf | high << 4),
        );
    }
}

/// Eight scales and eight minima of 6 bits in 12 bytes: the upper bits of the last four lie above the first four.
fn push_small(scales: [u8; 8], minima: [u8; 8], bytes: &mut Vec<u8>) {
    for small in [scales, minima] {
        bytes.extend((0..4).map(|g| small[g] | small[g + 4] >> 4 << 6));
    }
    bytes.extend((4..8).map(|g| scales[g] & 0xf | minima[g] << 4));
}

/// Q6_K.
pub(super) fn push_six_bits(values: &[f32], bytes: &mut Vec<u8>) {
    let halves = values.as_chunks::<HALF>().0;
    let wanted: [f32; 16] = std::array::from_fn(|h| {
        let larger = |a: f32, b: &f32| if b.abs() > a.abs() { *b } else { a };
        halves[h].iter().fold(0.0, larger) / -32.0
    });
    let (scale, scales) = shared(wanted, 127.0);
    let levels: Vec<u8> = values
        .iter()
        .enumerate()
        .map(|(idx, value)| {
            let scale = scale.to_f32() * f32::from(scales[idx / HALF]);
            level(*value, scale, 32.0, 63.0)
        })
        .collect();
    for half in levels.chunks_exact(128) {
        bytes.extend((0..64).map(|idx| half[idx] & 0xf | half[64 + idx] << 4));
    }
    for half in levels.chunks_exact(128) {
        let two = |idx: usize, g: usize| half[g * GROUP + idx] >> 4 << (2 * g);
        bytes.extend((0..GROUP).map(|idx| (0..4).fold(0, |byte, g| byte | two(idx, g))));
    }
    bytes.extend(scales.map(i8::cast_unsigned));
    bytes.extend(scale.to_le_bytes());
}
