//! Blocks of 256 elements: eight groups of 32 whose scales are small numbers, scaled in turn by the block's f16.

use super::half_at;

/// Elements of a group.
const GROUP: usize = 32;

/// Q4_K and Q5_K: `value = (d * scale) * level - dmin * minimum`, scale and minimum of 6 bits for each group. `high` holds bit `g` of
/// each byte as the fifth bit of group `g`.
pub(super) fn with_minimum(bytes: &[u8], high: Option<&[u8]>, levels: &[u8], out: &mut [f32]) {
    let (scale, minimum) = (half_at(bytes, 0), half_at(bytes, 2));
    for (group, out) in out.chunks_exact_mut(GROUP).enumerate() {
        let [small_scale, small_minimum] = small_scales(&bytes[4..16], group).map(f32::from);
        let (scale, minimum) = (scale * small_scale, minimum * small_minimum);
        // Two groups share 32 bytes: the low and the high nibbles.
        let nibbles = &levels[group / 2 * GROUP..];
        for (idx, out) in out.iter_mut().enumerate() {
            let nibble = nibbles[idx] >> (group % 2 * 4) & 0xf;
            let fifth = high.map_or(0, |high| (high[idx] >> group & 1) << 4);
            *out = scale * f32::from(nibble | fifth) - minimum;
        }
    }
}

/// The 6 bits of scale and minimum of a group, out of 12 bytes.
fn small_scales(packed: &[u8], group: usize) -> [u8; 2] {
    match group {
        0..4 => [packed[group] & 63, packed[group + 4] & 63],
        _ => {
            let low = packed[group + 4];
            let high = [packed[group - 4] >> 6, packed[group] >> 6];
            [low & 0xf | high[0] << 4, low >> 4 | high[1] << 4]
        }
    }
}

/// Q6_K: `value = (d * scale) * (level - 32)`, a signed scale for each 16. Of each half of 128 elements 64 bytes hold the nibbles and 32
/// bytes two further bits of every group.
pub(super) fn six_bits(bytes: &[u8], out: &mut [f32]) {
    let (nibbles, rest) = bytes.split_at(128);
    let (high, rest) = rest.split_at(64);
    let scale = half_at(rest, 16);
    for (idx, out) in out.iter_mut().enumerate() {
        let (half, group, at) = (idx / 128, idx / GROUP % 4, idx % GROUP);
        let nibble = nibbles[half * 64 + group % 2 * GROUP + at] >> (group / 2 * 4) & 0xf;
        let two = high[half * GROUP + at] >> (group * 2) & 3;
        let level = i32::from(nibble | two << 4) - 32;
        *out = scale * f32::from(rest[idx / 16].cast_signed()) * level as f32;
    }
}
