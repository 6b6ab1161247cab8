//! Root-mean-square normalisation of rows (Zhang and Sennrich 2019).
//!
//! `out[i] = (x[i] * (1 / sqrt(mean of squares + epsilon))) * weight[i]`; the squares are added in 16 lanes with fused
//! multiply-adds. Square root and division are the IEEE operations.

use crate::cpu::activations::Activations;
use crate::cpu::isa::{Isa, dispatch};
use crate::cpu::lanes::{N_LANES, add_lanes};
use crate::cpu::team::Team;
use crate::cpu::wide::{Wide, WideKernel};

/// Normalises the rows of `input` (`[n_rows, n]`, with `n` the length of `weight`) into `output`, which gets their number
/// and their int8 form.
///
/// # Panics
/// When `input` is not whole rows.
pub fn rms_norm(
    isa: Isa,
    team: &mut Team,
    input: &[f32],
    (weight, epsilon): (&[f32], f32),
    output: &mut Activations,
) {
    let n = weight.len();
    assert!(
        n > 0 && input.len().is_multiple_of(n),
        "whole rows to normalise"
    );
    output.resize(input.len() / n, n);
    output.fill_rows(isa, team, &|row, target| {
        let x = &input[row * n..(row + 1) * n];
        dispatch!(
            isa,
            scalar(x, weight, epsilon, target),
            avx2::norm(x, weight, epsilon, target),
            Norm {
                x,
                weight,
                epsilon,
                target
            }
        );
    });
}

/// One over the root of the mean square.
fn inverse_rms(lanes: &[f32; N_LANES], n: usize, epsilon: f32) -> f32 {
    1.0 / (add_lanes(lanes) / n as f32 + epsilon).sqrt()
}

fn scalar(x: &[f32], weight: &[f32], epsilon: f32, target: &mut [f32]) {
    let mut lanes = [0.0_f32; N_LANES];
    for (i, x) in x.iter().enumerate() {
        lanes[i % N_LANES] = x.mul_add(*x, lanes[i % N_LANES]);
    }
    let inverse = inverse_rms(&lanes, x.len(), epsilon);
    for ((target, x), weight) in target.iter_mut().zip(x).zip(weight) {
        *target = x * inverse * weight;
    }
}

/// One row, sixteen lanes at a time.
struct Norm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    epsilon: f32,
    target: &'a mut [f32],
}

impl WideKernel for Norm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<W: Wide>(self, w: W) {
        let mut squares = w.splat(0.0);
        let (whole, rest) = self.x.as_chunks::<N_LANES>();
        for x in whole {
            // SAFETY: the array holds 16 floats.
            let x = unsafe { w.load(x.as_ptr()) };
            squares = w.fma(x, x, squares);
        }
        let mut lanes = w.array(squares);
        for (lane, x) in lanes.iter_mut().zip(rest) {
            *lane = x.mul_add(*x, *lane);
        }
        let inverse = inverse_rms(&lanes, self.x.len(), self.epsilon);
        let all = w.splat(inverse);
        let (weights, rest_weights) = self.weight.as_chunks::<N_LANES>();
        let (targets, rest_targets) = self.target.as_chunks_mut::<N_LANES>();
        for ((target, x), weight) in targets.iter_mut().zip(whole).zip(weights) {
            // SAFETY: as above.
            unsafe {
                let scaled = w.mul(w.load(x.as_ptr()), all);
                w.store(w.mul(scaled, w.load(weight.as_ptr())), target.as_mut_ptr());
            }
        }
        for ((target, x), weight) in rest_targets.iter_mut().zip(rest).zip(rest_weights) {
            *target = x * inverse * weight;
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{N_LANES, inverse_rms};
    use crate::cpu::lanes::avx2::{load8, store8, stored};
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn norm(x: &[f32], weight: &[f32], epsilon: f32, target: &mut [f32]) {
        let mut low = _mm256_setzero_ps();
        let mut high = _mm256_setzero_ps();
        let (whole, rest) = x.as_chunks::<N_LANES>();
        for sixteen in whole {
            let (a, b) = (load8(&sixteen[..8]), load8(&sixteen[8..]));
            low = _mm256_fmadd_ps(a, a, low);
            high = _mm256_fmadd_ps(b, b, high);
        }
        let mut lanes = stored(low, high);
        for (lane, x) in lanes.iter_mut().zip(rest) {
            *lane = x.mul_add(*x, *lane);
        }
        let inverse = inverse_rms(&lanes, x.len(), epsilon);
        let all = _mm256_set1_ps(inverse);
        let (whole, rest) = x.as_chunks::<8>();
        let (weights, rest_weights) = weight.as_chunks::<8>();
        let (targets, rest_targets) = target.as_chunks_mut::<8>();
        for ((target, x), weight) in targets.iter_mut().zip(whole).zip(weights) {
            store8(
                _mm256_mul_ps(_mm256_mul_ps(load8(x), all), load8(weight)),
                target,
            );
        }
        for ((target, x), weight) in rest_targets.iter_mut().zip(rest).zip(rest_weights) {
            *target = x * inverse * weight;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::test_data::floats;

    fn normed(isa: Isa, threads: usize, input: &[f32], weight: &[f32]) -> Vec<f32> {
        let mut output = Activations::new(false);
        let mut team = Team::new(threads).expect("threads start");
        rms_norm(isa, &mut team, input, (weight, 1e-5), &mut output);
        output.values().to_vec()
    }

    #[test]
    fn variants_agree_and_are_close_to_exact() {
        for n in [1, 7, 16, 17, 31, 64, 576] {
            let (x, weight) = (floats(n as u64, n * 21), floats(99, n));
            let wanted = normed(Isa::Scalar, 1, &x, &weight);
            for isa in Isa::available() {
                assert_eq!(normed(isa, 1, &x, &weight), wanted);
                assert_eq!(normed(isa, 3, &x, &weight), wanted);
                assert_eq!(normed(isa, 1, &x[..n], &weight), wanted[..n]);
            }
            let squares: f64 = x[..n].iter().map(|x| f64::from(*x).powi(2)).sum();
            let inverse = 1.0 / (squares / n as f64 + 1e-5).sqrt();
            for i in 0..n {
                let exact = f64::from(x[i]) * inverse * f64::from(weight[i]);
                assert!((f64::from(wanted[i]) - exact).abs() < 1e-5);
            }
        }
    }
}
