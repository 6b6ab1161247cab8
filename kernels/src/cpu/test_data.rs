//! Numbers for tests: the same for the same seed, everywhere.

/// A stream of 64-bit numbers (SplitMix64, Steele et al. 2014).
pub(crate) struct Stream(pub(crate) u64);

impl Stream {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// -1 to 1.
    pub(crate) fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

/// `n` numbers in -1..1.
pub(crate) fn floats(seed: u64, n: usize) -> Vec<f32> {
    let mut stream = Stream(seed);
    (0..n).map(|_| stream.float()).collect()
}

/// Random weights as a model file holds them.
pub(crate) fn weight_bytes(
    seed: u64,
    format: crate::cpu::packed::WeightFormat,
    n_elements: usize,
) -> Vec<u8> {
    use crate::cpu::packed::WeightFormat as F;
    use half::{bf16, f16};
    let mut stream = Stream(seed);
    let mut bytes = Vec::new();
    let n_blocks = match format {
        F::F32 | F::F16 | F::Bf16 => n_elements,
        _ => n_elements / 32,
    };
    for _ in 0..n_blocks {
        let value = stream.float();
        let scale = f16::from_f32(value * 0.05).to_le_bytes();
        let min = f16::from_f32(stream.float() * 0.2).to_le_bytes();
        let n_random = match format {
            F::F32 => {
                bytes.extend(value.to_le_bytes());
                0
            }
            F::F16 => {
                bytes.extend(f16::from_f32(value).to_le_bytes());
                0
            }
            F::Bf16 => {
                bytes.extend(bf16::from_f32(value).to_le_bytes());
                0
            }
            F::Q4_0 => 16,
            F::Q4_1 => 16,
            F::Q5_0 | F::Q5_1 => 20,
            F::Q8_0 => 32,
        };
        if n_random > 0 {
            bytes.extend(scale);
            if matches!(format, F::Q4_1 | F::Q5_1) {
                bytes.extend(min);
            }
            // Byte 0x80 (a weight of -128) is among them.
            bytes.extend((0..n_random).map(|_| stream.next() as u8));
        }
    }
    bytes
}
