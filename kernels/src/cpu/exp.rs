//! e to the power of x in single precision, for softmax and SiLU.
//!
//! `x = n ln 2 + r`, |r| <= 0.35, with ln 2 in two parts and fused multiply-adds, then the Taylor polynomial of degree 7 in
//! Horner form (relative error about 1e-7), then the exponent. Below -87.3 the result is exactly 0; above 88.3 it stays
//! at the value of 88.3, so that no infinity arises; NaN stays NaN.

use crate::cpu::wide::Wide;

const LOW: f32 = -87.3;
const HIGH: f32 = 88.3;
const LN_2_HIGH: f32 = 0.693_359_4;
const LN_2_LOW: f32 = -2.121_944_4e-4;
/// 1/7!, 1/6!, ... 1/1!, 1/0!
const TAYLOR: [f32; 8] = [
    1.0 / 5040.0,
    1.0 / 720.0,
    1.0 / 120.0,
    1.0 / 24.0,
    1.0 / 6.0,
    0.5,
    1.0,
    1.0,
];

pub(crate) fn exp(x: f32) -> f32 {
    if x < LOW {
        return 0.0;
    }
    let x = if HIGH < x { HIGH } else { x };
    let n = (x * std::f32::consts::LOG2_E).round_ties_even();
    let r = (-n).mul_add(LN_2_HIGH, x);
    let r = (-n).mul_add(LN_2_LOW, r);
    let mut sum = TAYLOR[0];
    for coefficient in &TAYLOR[1..] {
        sum = sum.mul_add(r, *coefficient);
    }
    sum * f32::from_bits(((n as i32 + 127) as u32) << 23)
}

/// The same for sixteen numbers.
#[inline(always)]
pub(crate) fn exp_wide<W: Wide>(w: W, x: W::F) -> W::F {
    // The second operand wins when one is NaN.
    let bounded = w.min(w.splat(HIGH), x);
    let n = w.round(w.mul(bounded, w.splat(std::f32::consts::LOG2_E)));
    let r = w.fnma(n, w.splat(LN_2_HIGH), bounded);
    let r = w.fnma(n, w.splat(LN_2_LOW), r);
    let mut sum = w.splat(TAYLOR[0]);
    for coefficient in &TAYLOR[1..] {
        sum = w.fma(sum, r, w.splat(*coefficient));
    }
    w.zero_below(w.mul(sum, w.power_of_two(n)), x, LOW)
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2 {
    use super::{HIGH, LN_2_HIGH, LN_2_LOW, LOW, TAYLOR};
    use std::arch::x86_64::*;

    /// The same for eight numbers.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(crate) fn exp8(x: __m256) -> __m256 {
        let too_low = _mm256_cmp_ps::<_CMP_LT_OQ>(x, _mm256_set1_ps(LOW));
        // The second operand wins when one is NaN.
        let x = _mm256_min_ps(_mm256_set1_ps(HIGH), x);
        let n = _mm256_mul_ps(x, _mm256_set1_ps(std::f32::consts::LOG2_E));
        let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(n);
        let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(LN_2_HIGH), x);
        let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(LN_2_LOW), r);
        let mut sum = _mm256_set1_ps(TAYLOR[0]);
        for coefficient in &TAYLOR[1..] {
            sum = _mm256_fmadd_ps(sum, r, _mm256_set1_ps(*coefficient));
        }
        let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
        let power = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent));
        _mm256_andnot_ps(too_low, _mm256_mul_ps(sum, power))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::{Isa, dispatch};
    use crate::cpu::wide::WideKernel;

    struct Exps<'a>(&'a [f32; 8]);

    impl WideKernel for Exps<'_> {
        type Output = [f32; 8];

        #[inline(always)]
        fn run<W: Wide>(self, w: W) -> [f32; 8] {
            let twice = [*self.0, *self.0];
            // SAFETY: twice eight floats.
            let found = w.array(exp_wide(w, unsafe {
                w.load(twice.as_flattened().as_ptr())
            }));
            std::array::from_fn(|i| found[i + 8])
        }
    }

    fn exps(isa: Isa, x: &[f32; 8]) -> [f32; 8] {
        dispatch!(
            isa,
            x.map(exp),
            {
                let mut out = [0.0; 8];
                crate::cpu::lanes::avx2::store8(
                    avx2::exp8(crate::cpu::lanes::avx2::load8(x)),
                    &mut out,
                );
                out
            },
            Exps(x)
        )
    }

    #[test]
    fn it_is_accurate_and_the_same_in_all_variants() {
        for step in -90_000..90_000 {
            let first = step as f32 * 0.001;
            let x = std::array::from_fn(|i| first + i as f32 * 1e-4);
            let wanted = x.map(exp);
            for (x, found) in x.iter().zip(wanted) {
                let exact = f64::from(x.clamp(-200.0, HIGH)).exp();
                if *x >= LOW {
                    assert!((f64::from(found) / exact - 1.0).abs() < 2.5e-7, "{x}");
                }
            }
            for isa in Isa::available() {
                assert_eq!(exps(isa, &x).map(f32::to_bits), wanted.map(f32::to_bits));
            }
        }
    }

    #[test]
    fn the_ends_are_defined() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        for isa in Isa::available() {
            let found = exps(isa, &[-inf, inf, nan, 0.0, -0.0, -87.4, 1e9, -1e9]);
            assert_eq!(found[0], 0.0);
            assert!(found[1].is_finite() && found[1] > 1e38);
            assert!(found[2].is_nan());
            assert_eq!(found[3..6], [1.0, 1.0, 0.0]);
            assert_eq!(found[6], found[1]);
            assert_eq!(found[7], 0.0);
        }
    }
}
