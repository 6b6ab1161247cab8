//! Rotary position embedding (Su et al. 2021), with the pairs in halves: element `i` turns with element `i + head_dim / 2`.
//!
//! `x' = fma(x, cos, -(y sin))`, `y' = fma(x, sin, y cos)`. Angles are `position * theta^(-2i / head_dim)`; their sine and
//! cosine are tabulated once, from double precision and our own series, so that no C library has a say. Files
//! whose pairs are interleaved get their rows put in this order when they are packed.

use crate::cpu::isa::{Isa, dispatch};
use crate::cpu::real;
use crate::cpu::shards::Shards;
use crate::cpu::team::Team;

/// Sines and cosines of all positions.
#[derive(Debug)]
pub struct RopeTable {
    half: usize,
    n_positions: usize,
    /// `[n_positions, 2, half]`: cosines, then sines.
    values: Vec<f32>,
}

impl RopeTable {
    /// A table for `n_positions` positions.
    ///
    /// # Panics
    /// When `head_dim` is odd or zero, or `theta` is not above 0.
    pub fn new(head_dim: usize, theta: f64, n_positions: usize) -> Self {
        assert!(
            head_dim > 0 && head_dim.is_multiple_of(2),
            "pairs of elements turn"
        );
        assert!(theta > 0.0, "the base of the angles is positive");
        let half = head_dim / 2;
        let log_theta = real::ln(theta);
        let frequencies: Vec<f64> = (0..half)
            .map(|i| real::exp(-log_theta * (2 * i) as f64 / head_dim as f64))
            .collect();
        let mut values = vec![0.0; n_positions * head_dim];
        for (position, row) in values.chunks_exact_mut(head_dim).enumerate() {
            let (cosines, sines) = row.split_at_mut(half);
            for (i, frequency) in frequencies.iter().enumerate() {
                let (sine, cosine) = real::sin_cos(position as f64 * frequency);
                cosines[i] = cosine as f32;
                sines[i] = sine as f32;
            }
        }
        Self {
            half,
            n_positions,
            values,
        }
    }

    /// Positions that the table covers.
    pub fn n_positions(&self) -> usize {
        self.n_positions
    }

    /// Turns the first `n_heads` heads of every row; row `r` is at `positions[r]`.
    ///
    /// # Panics
    /// When the rows do not fit, or a position lies beyond the table.
    pub fn apply(
        &self,
        isa: Isa,
        team: &mut Team,
        (rows, n_heads): (&mut [f32], usize),
        positions: &[u32],
    ) {
        if positions.is_empty() {
            return;
        }
        assert!(
            rows.len().is_multiple_of(positions.len()),
            "one position for each row"
        );
        let stride = rows.len() / positions.len();
        let n_turned = n_heads * self.half * 2;
        assert!(n_turned <= stride, "a row holds its heads");
        let shards = Shards::new(rows);
        team.run_ranges(positions.len(), 8, &|part| {
            for row in part {
                let position = positions[row] as usize;
                assert!(position < self.n_positions, "the position is in the table");
                let angles = &self.values[position * 2 * self.half..(position + 1) * 2 * self.half];
                // SAFETY: each row is turned by the one part that holds it.
                let heads = unsafe { shards.range(row * stride..row * stride + n_turned) };
                for head in heads.chunks_exact_mut(2 * self.half) {
                    dispatch!(isa, scalar(head, angles), avx2::turn(head, angles));
                }
            }
        });
    }
}

fn scalar(head: &mut [f32], angles: &[f32]) {
    let half = head.len() / 2;
    let (first, second) = head.split_at_mut(half);
    let (cosines, sines) = angles.split_at(half);
    turn_pairs(first, second, cosines, sines);
}

fn turn_pairs(first: &mut [f32], second: &mut [f32], cosines: &[f32], sines: &[f32]) {
    for (i, (a, b)) in first.iter_mut().zip(second).enumerate() {
        let (x, y) = (*a, *b);
        *a = x.mul_add(cosines[i], -(y * sines[i]));
        *b = x.mul_add(sines[i], y * cosines[i]);
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use crate::cpu::lanes::avx2::{load8, store8};
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn turn(head: &mut [f32], angles: &[f32]) {
        let half = head.len() / 2;
        let (first, second) = head.split_at_mut(half);
        let (cosines, sines) = angles.split_at(half);
        let whole = half / 8 * 8;
        for i in (0..whole).step_by(8) {
            let (x, y) = (load8(&first[i..]), load8(&second[i..]));
            let (cosine, sine) = (load8(&cosines[i..]), load8(&sines[i..]));
            store8(
                _mm256_fmsub_ps(x, cosine, _mm256_mul_ps(y, sine)),
                &mut first[i..],
            );
            store8(
                _mm256_fmadd_ps(x, sine, _mm256_mul_ps(y, cosine)),
                &mut second[i..],
            );
        }
        super::turn_pairs(
            &mut first[whole..],
            &mut second[whole..],
            &cosines[whole..],
            &sines[whole..],
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::test_data::floats;

    #[test]
    fn variants_agree_and_are_close_to_exact() {
        for head_dim in [2, 16, 20, 64] {
            let table = RopeTable::new(head_dim, 10_000.0, 50);
            let stride = head_dim * 3 + 5;
            let positions: Vec<u32> = (0..11).map(|r| (r * 17) % 50).collect();
            let rows = floats(head_dim as u64, stride * 11);
            let run = |isa, threads| {
                let mut turned = rows.clone();
                let mut team = Team::new(threads).expect("threads start");
                table.apply(isa, &mut team, (&mut turned, 3), &positions);
                turned
            };
            let wanted = run(Isa::Scalar, 1);
            for isa in Isa::available() {
                assert_eq!(run(isa, 2), wanted);
            }
            for (r, position) in positions.iter().enumerate() {
                for i in 0..head_dim / 2 {
                    let angle =
                        f64::from(*position) * 10_000_f64.powf(-2.0 * i as f64 / head_dim as f64);
                    let at = r * stride + i;
                    let (x, y) = (f64::from(rows[at]), f64::from(rows[at + head_dim / 2]));
                    let exact = x * angle.cos() - y * angle.sin();
                    assert!((f64::from(wanted[at]) - exact).abs() < 1e-6);
                }
                let rest = r * stride + 3 * head_dim..(r + 1) * stride;
                assert_eq!(wanted[rest.clone()], rows[rest]);
            }
        }
    }
}
