//! The gate of a feed-forward layer: `out[i] = silu(gate[i]) * up[i]`, `silu(x) = x / (1 + e^-x)`.

use crate::cpu::activations::Activations;
use crate::cpu::exp::{exp, exp_wide};
use crate::cpu::isa::{Isa, dispatch};
use crate::cpu::team::Team;
use crate::cpu::wide::{Wide, WideKernel};

/// Rows of `input` hold `n` gate values, then `n` up values; `output` gets rows of `n` and their int8 form.
///
/// # Panics
/// When `input` is not whole rows.
pub fn silu_mul(isa: Isa, team: &mut Team, input: &[f32], n: usize, output: &mut Activations) {
    output.fill_gated(isa, team, (input, n), |gate, up, target| {
        dispatch!(
            isa,
            scalar(gate, up, target),
            avx2::gate(gate, up, target),
            Gate { gate, up, target }
        );
    });
}

fn scalar(gate: &[f32], up: &[f32], target: &mut [f32]) {
    for ((target, gate), up) in target.iter_mut().zip(gate).zip(up) {
        *target = gate / (1.0 + exp(-gate)) * up;
    }
}

/// One row, sixteen lanes at a time.
struct Gate<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    target: &'a mut [f32],
}

impl WideKernel for Gate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<W: Wide>(self, w: W) {
        let (gates, rest_gate) = self.gate.as_chunks::<16>();
        let (ups, rest_up) = self.up.as_chunks::<16>();
        let (targets, rest_target) = self.target.as_chunks_mut::<16>();
        for ((target, gate), up) in targets.iter_mut().zip(gates).zip(ups) {
            // SAFETY: the arrays hold 16 floats.
            unsafe {
                let gate = w.load(gate.as_ptr());
                let below = w.add(w.splat(1.0), exp_wide(w, w.neg(gate)));
                let gated = w.mul(w.div(gate, below), w.load(up.as_ptr()));
                w.store(gated, target.as_mut_ptr());
            }
        }
        scalar(rest_gate, rest_up, rest_target);
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use crate::cpu::exp::avx2::exp8;
    use crate::cpu::lanes::avx2::{load8, store8};
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn gate(gate: &[f32], up: &[f32], target: &mut [f32]) {
        let (gates, rest_gate) = gate.as_chunks::<8>();
        let (ups, rest_up) = up.as_chunks::<8>();
        let (targets, rest_target) = target.as_chunks_mut::<8>();
        for ((target, gate), up) in targets.iter_mut().zip(gates).zip(ups) {
            let gate = load8(gate);
            let negative = _mm256_xor_ps(gate, _mm256_set1_ps(-0.0));
            let below = _mm256_add_ps(_mm256_set1_ps(1.0), exp8(negative));
            store8(_mm256_mul_ps(_mm256_div_ps(gate, below), load8(up)), target);
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
                *x *= [1.0, 10.0, 100.0][i % 3];
            }
            let run = |isa, threads| {
                let mut output = Activations::new(false);
                let mut team = Team::new(threads).expect("threads start");
                silu_mul(isa, &mut team, &input, n, &mut output);
                output.values().to_vec()
            };
            let wanted = run(Isa::Scalar, 1);
            for isa in Isa::available() {
                assert_eq!(run(isa, 3), wanted);
            }
            for i in 0..n {
                let (gate, up) = (f64::from(input[i]), f64::from(input[n + i]));
                let exact = gate / (1.0 + (-gate).exp()) * up;
                assert!((f64::from(wanted[i]) - exact).abs() <= exact.abs() * 1e-6 + 1e-30);
            }
        }
    }
}
