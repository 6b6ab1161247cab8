//! The product with one panel of float weights. The definition is in the parent module.
//!
//! Halves widen exactly, so f16, bf16 and f32 weights differ in the load only.

use super::RowBlock;
use crate::cpu::isa::{Isa, dispatch};
use crate::cpu::packed::{PANEL_OUTPUTS, Packing, float_at};

/// `rows` holds R rows, one after another.
pub(super) fn multiply<const R: usize>(
    isa: Isa,
    packing: Packing,
    panel: &[u8],
    rows: &[f32],
) -> RowBlock<R> {
    let n_inputs = rows.len() / R;
    // The vector form reads by pointer: these lengths are all that it relies on.
    assert_eq!(rows.len(), R * n_inputs, "R whole rows");
    assert_eq!(
        panel.len(),
        n_inputs * packing.unit_bytes(),
        "a unit for each input"
    );
    dispatch!(
        isa,
        scalar(packing, panel, rows),
        avx2::multiply(packing, panel, rows)
    )
}

fn scalar<const R: usize>(packing: Packing, panel: &[u8], rows: &[f32]) -> RowBlock<R> {
    let n_inputs = rows.len() / R;
    let mut products = [[0.0_f32; PANEL_OUTPUTS]; R];
    for (i, unit) in panel.chunks_exact(packing.unit_bytes()).enumerate() {
        for lane in 0..PANEL_OUTPUTS {
            let weight = float_at(packing, unit, lane);
            for (r, products) in products.iter_mut().enumerate() {
                products[lane] = weight.mul_add(rows[r * n_inputs + i], products[lane]);
            }
        }
    }
    products
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{Packing, RowBlock};
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn multiply<const R: usize>(
        packing: Packing,
        panel: &[u8],
        rows: &[f32],
    ) -> RowBlock<R> {
        match packing {
            Packing::F32 => rows_of_panel::<R, 32>(panel, rows, false),
            Packing::F16 => rows_of_panel::<R, 16>(panel, rows, false),
            _ => rows_of_panel::<R, 16>(panel, rows, true),
        }
    }

    /// Eight weights.
    ///
    /// # Safety
    /// `UNIT` bytes can be read at `at`.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unit<const UNIT: usize>(at: *const u8, is_bf16: bool) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe {
            if UNIT == 32 {
                return _mm256_loadu_ps(at.cast());
            }
            let halves = _mm_loadu_si128(at.cast());
            if is_bf16 {
                let wide = _mm256_cvtepu16_epi32(halves);
                return _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide));
            }
            _mm256_cvtph_ps(halves)
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn rows_of_panel<const R: usize, const UNIT: usize>(
        panel: &[u8],
        rows: &[f32],
        is_bf16: bool,
    ) -> RowBlock<R> {
        let n_inputs = rows.len() / R;
        let mut sums = [_mm256_setzero_ps(); R];
        for i in 0..n_inputs {
            // SAFETY: the caller, `super::multiply`, checked that the panel has a unit for each input and that there
            // are R rows of `n_inputs`.
            unsafe {
                let weights = unit::<UNIT>(panel.as_ptr().add(i * UNIT), is_bf16);
                for (r, sum) in sums.iter_mut().enumerate() {
                    let x = _mm256_set1_ps(*rows.get_unchecked(r * n_inputs + i));
                    *sum = _mm256_fmadd_ps(weights, x, *sum);
                }
            }
        }
        let mut products = [[0.0; 8]; R];
        for (sums, products) in sums.iter().zip(&mut products) {
            // SAFETY: the array holds 8 floats.
            unsafe { _mm256_storeu_ps(products.as_mut_ptr(), *sums) };
        }
        products
    }
}
