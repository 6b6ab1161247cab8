//! Rotary position embedding (Su et al. 2021), with the pairs in halves: element `i` turns with element `i + head_dim / 2`.
//!
//! `x' = fma(x, cos, -(y sin))`, `y' = fma(x, sin, y cos)`. Angles are `position * theta^(-2i / head_dim)`; their sine and
//! cosine are made once for a batch, from double precision and our own series, so that no C library has a say. Files
//! whose pairs are interleaved get their rows put in this order when they are packed.

use crate::cpu::isa::{Isa, dispatch};
use crate::cpu::real;
use crate::cpu::shards::Shards;
use crate::cpu::team::Team;
use crate::cpu::wide::{Wide, WideKernel};

/// How fast each pair turns.
#[derive(Clone, Debug)]
pub struct Rope {
    /// Radians per position, `[head_dim / 2]`.
    frequencies: Vec<f64>,
    /// Sines and cosines are multiplied with this; 1 but for YaRN.
    magnitude: f64,
}

/// Sines and cosines of the rows of one batch; made once, used by every layer.
#[derive(Debug, Default)]
pub struct RopeAngles {
    half: usize,
    /// `[n_rows, 2, half]`: cosines, then sines.
    values: Vec<f32>,
}

impl Rope {
    /// Heads of `head_dim` elements, base `theta`.
    ///
    /// # Panics
    /// When `head_dim` is odd or zero, or `theta` is not above 0.
    pub fn new(head_dim: usize, theta: f64) -> Self {
        assert!(
            head_dim > 0 && head_dim.is_multiple_of(2),
            "pairs of elements turn"
        );
        assert!(theta > 0.0, "the base of the angles is positive");
        let log_theta = real::ln(theta);
        let frequency = |i| real::exp(-log_theta * f64::from(2 * i) / head_dim as f64);
        let n_pairs = u32::try_from(head_dim / 2).expect("a head is counted in u32");
        Self {
            frequencies: (0..n_pairs).map(frequency).collect(),
            magnitude: 1.0,
        }
    }

    /// Pairs that turn as told. See [`Rope::scaled`].
    pub(crate) fn with(frequencies: Vec<f64>, magnitude: f64) -> Self {
        Self {
            frequencies,
            magnitude,
        }
    }

    /// Radians per position of every pair.
    pub(crate) fn frequencies(&self) -> &[f64] {
        &self.frequencies
    }

    /// What sines and cosines are multiplied with.
    #[cfg(test)]
    pub(crate) fn magnitude(&self) -> f64 {
        self.magnitude
    }
}

impl RopeAngles {
    /// Computes the angles of rows at `positions`.
    pub fn fill(&mut self, rope: &Rope, positions: &[u32]) {
        self.half = rope.frequencies.len();
        self.values.resize(positions.len() * 2 * self.half, 0.0);
        let rows = self.values.chunks_exact_mut(2 * self.half);
        for (row, position) in rows.zip(positions) {
            let (cosines, sines) = row.split_at_mut(self.half);
            for (i, frequency) in rope.frequencies.iter().enumerate() {
                let (sine, cosine) = real::sin_cos(f64::from(*position) * frequency);
                cosines[i] = (cosine * rope.magnitude) as f32;
                sines[i] = (sine * rope.magnitude) as f32;
            }
        }
    }

    /// Turns the first `n_heads` heads of every row.
    ///
    /// # Panics
    /// When the rows are not those that the angles were filled for.
    pub fn turn(&self, isa: Isa, team: &mut Team, rows: &mut [f32], n_heads: usize) {
        if self.values.is_empty() {
            return;
        }
        let n_rows = self.values.len() / (2 * self.half);
        assert!(rows.len().is_multiple_of(n_rows), "whole rows to turn");
        let stride = rows.len() / n_rows;
        let n_turned = n_heads * self.half * 2;
        assert!(n_turned <= stride, "a row holds its heads");
        let shards = Shards::new(rows);
        team.run_ranges(n_rows, 8, &|part| {
            for row in part {
                let angles = &self.values[row * 2 * self.half..(row + 1) * 2 * self.half];
                // SAFETY: each row is turned by the one part that holds it.
                let heads = unsafe { shards.range(row * stride..row * stride + n_turned) };
                for head in heads.chunks_exact_mut(2 * self.half) {
                    dispatch!(
                        isa,
                        scalar(head, angles),
                        avx2::turn(head, angles),
                        Turn(head, angles)
                    );
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

/// One head and its angles, sixteen pairs at a time.
struct Turn<'a>(&'a mut [f32], &'a [f32]);

impl WideKernel for Turn<'_> {
    type Output = ();

    #[inline(always)]
    fn run<W: Wide>(self, w: W) {
        let half = self.0.len() / 2;
        let (first, second) = self.0.split_at_mut(half);
        let (cosines, sines) = self.1.split_at(half);
        let (firsts, rest_first) = first.as_chunks_mut::<16>();
        let (seconds, rest_second) = second.as_chunks_mut::<16>();
        let (all_cosines, rest_cosines) = cosines.as_chunks::<16>();
        let (all_sines, rest_sines) = sines.as_chunks::<16>();
        let angles = all_cosines.iter().zip(all_sines);
        for ((first, second), (cosine, sine)) in firsts.iter_mut().zip(seconds).zip(angles) {
            // SAFETY: the arrays hold 16 floats.
            unsafe {
                let (x, y) = (w.load(first.as_ptr()), w.load(second.as_ptr()));
                let (cosine, sine) = (w.load(cosine.as_ptr()), w.load(sine.as_ptr()));
                w.store(w.fms(x, cosine, w.mul(y, sine)), first.as_mut_ptr());
                w.store(w.fma(x, sine, w.mul(y, cosine)), second.as_mut_ptr());
            }
        }
        turn_pairs(rest_first, rest_second, rest_cosines, rest_sines);
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
            let rope = Rope::new(head_dim, 10_000.0);
            let stride = head_dim * 3 + 5;
            let positions: Vec<u32> = (0..11).map(|r| (r * 17) % 50).collect();
            let rows = floats(head_dim as u64, stride * 11);
            let run = |isa, threads| {
                let mut turned = rows.clone();
                let mut team = Team::new(threads).expect("threads start");
                let mut angles = RopeAngles::default();
                angles.fill(&rope, &positions);
                angles.turn(isa, &mut team, &mut turned, 3);
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
