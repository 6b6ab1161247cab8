//! Root-mean-square normalisation of each head of q and k, in place (Qwen 3, Gemma 3; Henry et al. 2020 for the idea).
//!
//! The definition is that of `norm` with a head as the row: squares are added in 16 lanes with fused multiply-adds, then
//! `x * (1 / sqrt(mean + epsilon)) * weight`. The vector form is the same source, 16 lanes at a time, compiled for AVX2,
//! which also serves where wider registers exist.

use crate::cpu::isa::{Isa, dispatch};
use crate::cpu::lanes::{N_LANES, add_lanes};
use crate::cpu::shards::Shards;
use crate::cpu::team::Team;
use std::ops::Range;

/// Rows of one part.
const PART_ROWS: usize = 8;

/// Normalises the heads `heads` (counted from the row's start, each of the weight's length) of every row.
///
/// # Panics
/// When `rows` is not whole rows of `stride`, or a row does not hold the heads.
pub fn norm_heads(
    isa: Isa,
    team: &mut Team,
    (rows, stride): (&mut [f32], usize),
    heads: Range<usize>,
    (weight, epsilon): (&[f32], f32),
) {
    let n = weight.len();
    assert!(
        stride > 0 && rows.len().is_multiple_of(stride),
        "whole rows to normalise"
    );
    assert!(
        n > 0 && n.is_multiple_of(N_LANES) && heads.end * n <= stride,
        "a row holds its heads"
    );
    let n_rows = rows.len() / stride;
    let rows = Shards::new(rows);
    team.run_ranges(n_rows, PART_ROWS, &|part| {
        for row in part {
            let start = row * stride;
            // SAFETY: each row is changed by the one part that holds it.
            let heads = unsafe { rows.range(start + heads.start * n..start + heads.end * n) };
            for head in heads.chunks_exact_mut(n) {
                dispatch!(
                    isa,
                    norm(head, weight, epsilon),
                    avx2::norm(head, weight, epsilon)
                );
            }
        }
    });
}

#[inline(always)]
fn norm(head: &mut [f32], weight: &[f32], epsilon: f32) {
    let mut lanes = [0.0_f32; N_LANES];
    for sixteen in head.as_chunks::<N_LANES>().0 {
        for (lane, x) in lanes.iter_mut().zip(sixteen) {
            *lane = x.mul_add(*x, *lane);
        }
    }
    let inverse = 1.0 / (add_lanes(&lanes) / head.len() as f32 + epsilon).sqrt();
    for (x, weight) in head.iter_mut().zip(weight) {
        *x = *x * inverse * weight;
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn norm(head: &mut [f32], weight: &[f32], epsilon: f32) {
        super::norm(head, weight, epsilon);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::activations::Activations;
    use crate::cpu::norm::rms_norm;
    use crate::cpu::test_data::floats;

    #[test]
    fn it_equals_the_norm_of_a_row_and_leaves_the_rest_alone() {
        for n in [16, 64, 128, 256] {
            let stride = 5 * n + 3;
            let (rows, weight) = (floats(n as u64, stride * 19), floats(4, n));
            for isa in Isa::available() {
                for threads in [1, 3] {
                    let mut team = Team::new(threads).expect("threads start");
                    let mut found = rows.clone();
                    norm_heads(isa, &mut team, (&mut found, stride), 1..4, (&weight, 1e-6));
                    for (found, row) in found.chunks(stride).zip(rows.chunks(stride)) {
                        let mut wanted = Activations::new(false);
                        let norm = (&weight[..], 1e-6);
                        rms_norm(isa, &mut team, &row[n..4 * n], norm, &mut wanted);
                        assert_eq!(found[n..4 * n], *wanted.values());
                        assert_eq!(found[..n], row[..n]);
                        assert_eq!(found[4 * n..], row[4 * n..]);
                    }
                }
            }
        }
    }
}
