//! One block of a model file, taken apart. Block types are GGUF's, of 32 elements (one group) or 256 (eight).
//!
//! Source: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md> and the block structs it names.

use super::{GROUP_INPUTS, SUPER_GROUPS, WeightFormat};

/// Levels and scales of one block of one output. A group's levels are as stored: no offset taken off.
pub(super) struct Block {
    /// f16 scale of the block, and f16 scale of its minima; or scale and minimum.
    pub(super) scale: [u8; 2],
    pub(super) min: [u8; 2],
    /// Small scales of each group: scale and minimum, or the scales of both halves.
    pub(super) small: [[u8; 2]; SUPER_GROUPS],
    /// The block's groups; one or eight are in use.
    pub(super) levels: [[u8; GROUP_INPUTS]; SUPER_GROUPS],
}

impl Block {
    /// `from` is one block.
    pub(super) fn read(format: WeightFormat, from: &[u8]) -> Self {
        let mut block = Self {
            scale: [from[0], from[1]],
            min: [from[2], from[3]],
            small: [[0; 2]; SUPER_GROUPS],
            levels: [[0; GROUP_INPUTS]; SUPER_GROUPS],
        };
        let first = &mut block.levels[0];
        match format {
            WeightFormat::Q4_0 => nibbles(first, &from[2..], 0),
            WeightFormat::Q4_1 => nibbles(first, &from[4..], 0),
            WeightFormat::Q5_0 => nibbles(first, &from[6..], word(&from[2..])),
            WeightFormat::Q5_1 => nibbles(first, &from[8..], word(&from[4..])),
            WeightFormat::Q8_0 => first.copy_from_slice(&from[2..]),
            WeightFormat::Q4K => {
                block.small = std::array::from_fn(|group| small_scales(&from[4..16], group));
                block.nibbles_k(&from[16..144], None);
            }
            WeightFormat::Q5K => {
                block.small = std::array::from_fn(|group| small_scales(&from[4..16], group));
                block.nibbles_k(&from[48..176], Some(&from[16..48]));
            }
            WeightFormat::Q6K => {
                block.scale = [from[208], from[209]];
                let scales = &from[192..208];
                block.small = std::array::from_fn(|g| [scales[2 * g], scales[2 * g + 1]]);
                block.sixes(&from[..128], &from[128..192]);
            }
            WeightFormat::F32 | WeightFormat::F16 | WeightFormat::Bf16 => {
                unreachable!("floats have no blocks")
            }
        }
        block
    }

    /// Groups 2 j and 2 j + 1 are the low and the high nibbles of 32 bytes; bit `g` of a high byte belongs to group `g`.
    fn nibbles_k(&mut self, bytes: &[u8], high: Option<&[u8]>) {
        for (group, levels) in self.levels.iter_mut().enumerate() {
            let bytes = &bytes[group / 2 * 32..];
            for (i, level) in levels.iter_mut().enumerate() {
                let fifth = high.map_or(0, |high| high[i] >> group & 1);
                *level = (bytes[i] >> (group % 2 * 4)) & 15 | fifth << 4;
            }
        }
    }

    /// Each half of 128 elements has 64 bytes of nibbles, low ones first, and 32 bytes of two high bits for each group.
    fn sixes(&mut self, low: &[u8], high: &[u8]) {
        for (group, levels) in self.levels.iter_mut().enumerate() {
            let (half, at) = (group / 4, group % 4);
            for (i, level) in levels.iter_mut().enumerate() {
                let nibble = low[half * 64 + at % 2 * 32 + i] >> (at / 2 * 4) & 15;
                let two = high[half * 32 + i] >> (at * 2) & 3;
                *level = nibble | two << 4;
            }
        }
    }
}

/// Low nibbles first; bit `i` of the word is the fifth bit of element `i`.
fn nibbles(levels: &mut [u8; GROUP_INPUTS], bytes: &[u8], fifths: u32) {
    for (i, level) in levels.iter_mut().enumerate() {
        let nibble = bytes[i % 16] >> (i / 16 * 4) & 15;
        *level = nibble | ((fifths >> i & 1) as u8) << 4;
    }
}

fn word(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// Scale and minimum, 6 bits each, of a group: the first four lie in bytes 0 to 3 and 4 to 7, whose upper two bits hold those of
/// the last four; their lower bits are the nibbles of bytes 8 to 11.
fn small_scales(packed: &[u8], group: usize) -> [u8; 2] {
    if group < 4 {
        return [packed[group] & 63, packed[group + 4] & 63];
    }
    let low = packed[group + 4];
    [
        low & 15 | packed[group - 4] >> 6 << 4,
        low >> 4 | packed[group] >> 6 << 4,
    ]
}
