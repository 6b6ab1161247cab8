//! Eight lanes: each panel of a pair in a register of its own.

use super::super::RowBlock;
use crate::cpu::wide::{Element, Stored};
use std::arch::x86_64::*;

/// Eight weights.
///
/// # Safety
/// They can be read at `at`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn eight<T: Stored>(at: *const u8) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        match T::ELEMENT {
            Element::F32 => _mm256_loadu_ps(at.cast()),
            Element::F16 => _mm256_cvtph_ps(_mm_loadu_si128(at.cast())),
            Element::Bf16 => {
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
            }
        }
    }
}

/// Lengths are those that the parent's `multiply` checks.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn multiply<const R: usize, const P: usize, T: Stored>(
    pairs: [&[u8]; P],
    rows: &[f32],
) -> RowBlock<R, P> {
    let n_inputs = rows.len() / R;
    let unit_bytes = 8 * T::ELEMENT.bytes();
    let mut sums = [[[_mm256_setzero_ps(); 2]; P]; R];
    for i in 0..n_inputs {
        for (p, pair) in pairs.iter().enumerate() {
            for half in 0..2 {
                // SAFETY: `multiply` checked that every pair has sixteen weights for each input, and that there are R rows.
                unsafe {
                    let weights = eight::<T>(pair.as_ptr().add((2 * i + half) * unit_bytes));
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let x = _mm256_set1_ps(*rows.get_unchecked(r * n_inputs + i));
                        sums[p][half] = _mm256_fmadd_ps(weights, x, sums[p][half]);
                    }
                }
            }
        }
    }
    let mut products = [[[0.0; 16]; P]; R];
    for (sums, products) in sums.iter().zip(&mut products) {
        for (sums, products) in sums.iter().zip(products) {
            // SAFETY: the array holds 16 floats.
            unsafe {
                _mm256_storeu_ps(products.as_mut_ptr(), sums[0]);
                _mm256_storeu_ps(products.as_mut_ptr().add(8), sums[1]);
            }
        }
    }
    products
}
