//! The gate of Gemma's feed-forward layers: `out[i] = gelu(gate[i]) * up[i]` with the tanh form of GELU (Hendrycks and
//! Gimpel 2016).
//!
//! `gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`, which is `x / (1 + e^-z)` with
//! `z = x * fma(x^2, 0.0713548163, 1.5957691216)`: one exponential, and no difference of nearly equal numbers. The AVX2 form
//! serves where wider registers exist.

use crate::cpu::activations::Activations;
use crate::cpu::exp::exp;
use crate::cpu::isa::{Isa, dispatch};
use crate::cpu::team::Team;

/// 2 sqrt(2 / pi)
const LINEAR: f32 = 1.595_769_2;
/// 0.044715 times that.
const CUBIC: f32 = 0.071_354_814;

/// Rows of `input` hold `n` gate values, then `n` up values; `output` gets rows of `n` and their int8 form.
///
/// # Panics
/// When `input` is not whole rows.
pub fn gelu_mul(isa: Isa, team: &mut Team, input: &[f32], n: usize, output: &mut Activations) {
    output.fill_gated(isa, team, (input, n), |gate, up, target| {
        dispatch!(isa, scalar(gate, up, target), avx2::gate(gate, up, target));
    });
}

fn scalar(gate: &[f32], up: &[f32], target: &mut [f32]) {
    for ((target, x), up) in target.iter_mut().zip(gate).zip(up) {
        let z = x * (x * x).mul_add(CUBIC, LINEAR);
        *target = x / (1.0 + exp(-z)) * up;
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{CUBIC, LINEAR};
    use crate::cpu::exp::avx2::exp8;
    use crate::cpu::lanes::avx2::{load8, store8};
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn gate(gate: &[f32], up: &[f32], target: &mut [f32]) {
        let (gates, rest_gate) = gate.as_chunks::<8>();
        let (ups, rest_up) = up.as_chunks::<8>();
        let (targets, rest_target) = target.as_chunks_mut::<8>();
        let (cubic, linear) = (_mm256_set1_ps(CUBIC), _mm256_set1_ps(LINEAR));
        for ((target, gate), up) in targets.iter_mut().zip(gates).zip(ups) {
            let x = load8(gate);
            let z = _mm256_mul_ps(x, _mm256_fmadd_ps(_mm256_mul_ps(x, x), cubic, linear));
            let negative = _mm256_xor_ps(z, _mm256_set1_ps(-0.0));
            let below = _mm256_add_ps(_mm256_set1_ps(1.0), exp8(negative));
            store8(_mm256_mul_ps(_mm256_div_ps(x, below), load8(up)), target);
        }
        super::scalar(rest_gate, rest_up, rest_target);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::test_data::floats;

    #[test]
    fn variants_agree_and_are_close_to_exact() {
        for n in [1, 8, 13, 96] {
            let mut input = floats(n as u64, 2 * n * 19);
            for (i, x) in input.iter_mut().enumerate() {
                *x *= [1.0, 5.0, 100.0][i % 3];
            }
            let run = |isa, threads| {
                let mut output = Activations::new(false);
                let mut team = Team::new(threads).expect("threads start");
                gelu_mul(isa, &mut team, &input, n, &mut output);
                output.values().to_vec()
            };
            let wanted = run(Isa::Scalar, 1);
            for isa in Isa::available() {
                assert_eq!(run(isa, 3), wanted);
            }
            for i in 0..n {
                let (x, up) = (f64::from(input[i]), f64::from(input[n + i]));
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
                let exact = x / 2.0 * (1.0 + inner.tanh()) * up;
                let bound = (x * up).abs() * 2e-6 + 1e-30;
                assert!((f64::from(wanted[i]) - exact).abs() <= bound, "{x}");
            }
        }
    }

    #[test]
    fn the_ends_stay_numbers() {
        for isa in Isa::available() {
            let input: Vec<f32> = [[1e20_f32, -1e20], [1.0, 1.0]].concat();
            let mut output = Activations::new(false);
            let mut team = Team::new(1).expect("threads start");
            gelu_mul(isa, &mut team, &input, 2, &mut output);
            assert_eq!(output.values()[0], 1e20);
            assert!(output.values()[1].abs() < 1e-10);
        }
    }
}
