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
    let (block_elements, block_bytes) = format.block();
    for _ in 0..n_elements / block_elements {
        let value = stream.float();
        match format {
            F::F32 => bytes.extend(value.to_le_bytes()),
            F::F16 => bytes.extend(f16::from_f32(value).to_le_bytes()),
            F::Bf16 => bytes.extend(bf16::from_f32(value).to_le_bytes()),
            _ => {
                // Byte 0x80 (a weight of -128) is among them.
                let mut block: Vec<u8> = (0..block_bytes).map(|_| stream.next() as u8).collect();
                let mut put = |at: usize, value: f32| {
                    block[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
                };
                match format {
                    F::Q4K | F::Q5K => put(0, value * 0.002),
                    F::Q6K => put(208, value * 0.002),
                    _ => put(0, value * 0.05),
                }
                match format {
                    F::Q4K | F::Q5K => put(2, stream.float() * 0.01),
                    F::Q4_1 | F::Q5_1 => put(2, stream.float() * 0.2),
                    _ => {}
                }
                bytes.extend(block);
            }
        }
    }
    bytes
}
