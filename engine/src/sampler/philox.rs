//! Randomness without state: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as
//! 1, 2, 3", SC 2011). The output token's place is the counter and the seed is the key, so a sequence that is
//! resumed, preempted or moved draws exactly what it would have drawn.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const N_ROUNDS: usize = 10;

/// A number in [0, 1) with 53 random bits, a function of its two arguments alone.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "the seed is split in halves; 53 bits are exact in f64"
)]
pub(super) fn uniform(seed: u64, output_idx: u32) -> f64 {
    let words = philox([output_idx, 0, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = (u64::from(words[1]) << 32) | u64::from(words[0]);
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..N_ROUNDS {
        let (high_0, low_0) = multiply(MULTIPLIERS[0], counter[0]);
        let (high_1, low_1) = multiply(MULTIPLIERS[1], counter[2]);
        counter = [
            high_1 ^ counter[1] ^ key[0],
            low_1,
            high_0 ^ counter[3] ^ key[1],
            low_0,
        ];
        for (word, step) in key.iter_mut().zip(KEY_STEPS) {
            *word = word.wrapping_add(step);
        }
    }
    counter
}

#[expect(clippy::cast_possible_truncation, reason = "the two halves of 64 bits")]
fn multiply(a: u32, b: u32) -> (u32, u32) {
    let product = u64::from(a) * u64::from(b);
    ((product >> 32) as u32, product as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The authors' known answers (Random123, kat_vectors).
    #[test]
    fn it_gives_the_published_answers() {
        assert_eq!(
            philox([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox(
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn numbers_lie_in_the_unit_interval_and_average_to_a_half() {
        let n = 4096;
        let mut sum = 0.0;
        for output_idx in 0..n {
            let number = uniform(u64::MAX, output_idx);
            assert!((0.0..1.0).contains(&number), "{number}");
            sum += number;
        }
        assert!((sum / f64::from(n) - 0.5).abs() < 0.02);
    }

    #[test]
    fn both_halves_of_the_seed_count() {
        assert_ne!(uniform(1, 0).to_bits(), uniform(1 << 32, 0).to_bits());
        assert_ne!(uniform(1, 0).to_bits(), uniform(1, 1).to_bits());
    }
}
