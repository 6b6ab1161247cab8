//! Elements of K and V: rounding to the pool's type (to nearest even), and back (exact).

use crate::cpu::isa::{Isa, dispatch};
use crate::cpu::wide::{F16, Wide, WideKernel, sixteen};
use half::{bf16, f16};
use tidemill_core::KvDtype;

/// Rounds `source` into `target`, which has its elements' bytes.
pub(crate) fn narrow(isa: Isa, dtype: KvDtype, source: &[f32], target: &mut [u8]) {
    assert_eq!(
        target.len(),
        source.len() * dtype.bytes(),
        "room for each element"
    );
    match dtype {
        KvDtype::F16 => dispatch!(
            isa,
            narrow_f16(source, target),
            avx2::narrow_f16(source, target),
            Narrow(source, target)
        ),
        KvDtype::Bf16 => {
            for (target, value) in target.as_chunks_mut::<2>().0.iter_mut().zip(source) {
                *target = bf16::from_f32(*value).to_le_bytes();
            }
        }
        KvDtype::F32 => {
            for (target, value) in target.as_chunks_mut::<4>().0.iter_mut().zip(source) {
                *target = value.to_le_bytes();
            }
        }
    }
}

/// Widens `source` into `target`.
pub(crate) fn widen(isa: Isa, dtype: KvDtype, source: &[u8], target: &mut [f32]) {
    assert_eq!(
        source.len(),
        target.len() * dtype.bytes(),
        "bytes of each element"
    );
    match dtype {
        KvDtype::F16 => dispatch!(
            isa,
            widen_f16(source, target),
            avx2::widen_f16(source, target),
            Widen(source, target)
        ),
        KvDtype::Bf16 => {
            for (value, source) in target.iter_mut().zip(source.as_chunks::<2>().0) {
                *value = bf16::from_le_bytes(*source).to_f32();
            }
        }
        KvDtype::F32 => {
            for (value, source) in target.iter_mut().zip(source.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*source);
            }
        }
    }
}

fn narrow_f16(source: &[f32], target: &mut [u8]) {
    for (target, value) in target.as_chunks_mut::<2>().0.iter_mut().zip(source) {
        *target = f16::from_f32(*value).to_le_bytes();
    }
}

fn widen_f16(source: &[u8], target: &mut [f32]) {
    for (value, source) in target.iter_mut().zip(source.as_chunks::<2>().0) {
        *value = f16::from_le_bytes(*source).to_f32();
    }
}

/// To f16, sixteen at a time.
struct Narrow<'a>(&'a [f32], &'a mut [u8]);

impl WideKernel for Narrow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<W: Wide>(self, w: W) {
        let (whole, rest) = self.0.as_chunks::<16>();
        let (targets, rest_target) = self.1.as_chunks_mut::<32>();
        for (target, values) in targets.iter_mut().zip(whole) {
            // SAFETY: 16 floats, and 32 bytes for them.
            unsafe { w.store_f16(w.load(values.as_ptr()), target.as_mut_ptr()) };
        }
        narrow_f16(rest, rest_target);
    }
}

/// From f16, sixteen at a time.
struct Widen<'a>(&'a [u8], &'a mut [f32]);

impl WideKernel for Widen<'_> {
    type Output = ();

    #[inline(always)]
    fn run<W: Wide>(self, w: W) {
        let (whole, rest) = self.0.as_chunks::<32>();
        let (targets, rest_target) = self.1.as_chunks_mut::<16>();
        for (target, source) in targets.iter_mut().zip(whole) {
            // SAFETY: 32 bytes of 16 elements, and room for them.
            unsafe { w.store(sixteen::<W, F16>(w, source.as_ptr()), target.as_mut_ptr()) };
        }
        widen_f16(rest, rest_target);
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use crate::cpu::lanes::avx2::{load8, store8};
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn narrow_f16(source: &[f32], target: &mut [u8]) {
        let (whole, rest) = source.as_chunks::<8>();
        let (targets, rest_target) = target.as_chunks_mut::<16>();
        for (target, values) in targets.iter_mut().zip(whole) {
            let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(load8(values));
            // SAFETY: the array has exactly 16 bytes.
            unsafe { _mm_storeu_si128(target.as_mut_ptr().cast(), halves) };
        }
        super::narrow_f16(rest, rest_target);
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn widen_f16(source: &[u8], target: &mut [f32]) {
        let (whole, rest) = source.as_chunks::<16>();
        let (targets, rest_target) = target.as_chunks_mut::<8>();
        for (target, source) in targets.iter_mut().zip(whole) {
            // SAFETY: the array has exactly 16 bytes.
            let halves = unsafe { _mm_loadu_si128(source.as_ptr().cast()) };
            store8(_mm256_cvtph_ps(halves), target);
        }
        super::widen_f16(rest, rest_target);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::test_data::floats;

    #[test]
    fn variants_agree_and_rounding_happens_once() {
        let mut values = floats(4, 1003);
        values[0] = 65_520.0;
        values[1] = f32::INFINITY;
        values[2] = 1e-8;
        values[3] = -0.0;
        values[4] = 2049.0;
        for dtype in [KvDtype::F16, KvDtype::Bf16, KvDtype::F32] {
            let mut wanted = vec![0; values.len() * dtype.bytes()];
            narrow(Isa::Scalar, dtype, &values, &mut wanted);
            for isa in Isa::available() {
                let mut found = vec![0; wanted.len()];
                narrow(isa, dtype, &values, &mut found);
                assert_eq!(found, wanted, "{dtype:?}");
                let mut wide = vec![0.0; values.len()];
                widen(isa, dtype, &found, &mut wide);
                let mut again = vec![0; wanted.len()];
                narrow(isa, dtype, &wide, &mut again);
                assert_eq!(again, wanted);
                let bound = [1e-3, 1e-2, 0.0][match dtype {
                    KvDtype::F16 => 0,
                    KvDtype::Bf16 => 1,
                    KvDtype::F32 => 2,
                }];
                for (wide, value) in wide.iter().zip(&values).skip(3) {
                    assert!((wide - value).abs() <= bound * value.abs());
                }
            }
        }
    }
}
