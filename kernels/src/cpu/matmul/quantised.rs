//! The product with one panel of quantised weights. The definition is in the parent module.
//!
//! AVX2: activations are signed bytes of at most 127 in magnitude. Nibbles are unsigned, so `maddubs` takes them as they
//! are, and a whole group (8 steps of at most 2 * 15 * 127) fits 16 bits. Signed bytes go in as magnitudes with their
//! sign moved to the activation; that way round is exact for -128 too, and one step (2 * 128 * 127) just fits.

use super::RowBlock;
use crate::cpu::activations::Activations;
use crate::cpu::isa::{Isa, dispatch};
use crate::cpu::packed::{GROUP_INPUTS, Group, PANEL_OUTPUTS, Packing};

/// The int8 form of some consecutive rows.
pub(super) struct Rows<'a> {
    n_groups: usize,
    /// `[rows, n_groups * 32]`
    quants: &'a [i8],
    /// `[rows, n_groups]`
    scales: &'a [f32],
    /// `[rows, n_groups]`
    sums: &'a [f32],
}

impl<'a> Rows<'a> {
    pub(super) fn new(input: &'a Activations, first: usize, n_rows: usize) -> Self {
        let n = input.n_columns();
        let n_groups = n / GROUP_INPUTS;
        Self {
            n_groups,
            quants: &input.quants[first * n..(first + n_rows) * n],
            scales: &input.scales[first * n_groups..(first + n_rows) * n_groups],
            sums: &input.sums[first * n_groups..(first + n_rows) * n_groups],
        }
    }
}

pub(super) fn multiply<const R: usize>(
    isa: Isa,
    packing: Packing,
    panel: &[u8],
    rows: &Rows<'_>,
) -> RowBlock<R> {
    // The vector forms read by pointer: these three lengths are all that they rely on.
    assert_eq!(
        panel.len(),
        rows.n_groups * packing.unit_bytes(),
        "a panel of whole groups"
    );
    assert_eq!(
        rows.quants.len(),
        R * rows.n_groups * GROUP_INPUTS,
        "R rows of quants"
    );
    assert!(rows.scales.len() == R * rows.n_groups && rows.sums.len() == R * rows.n_groups);
    match packing {
        Packing::Nibbles => dispatch!(
            isa,
            scalar(packing, panel, rows),
            avx2::nibbles::<R, false>(panel, rows)
        ),
        Packing::NibblesMin => dispatch!(
            isa,
            scalar(packing, panel, rows),
            avx2::nibbles::<R, true>(panel, rows)
        ),
        Packing::BytesMin => dispatch!(
            isa,
            scalar(packing, panel, rows),
            avx2::bytes::<R, true>(panel, rows)
        ),
        _ => dispatch!(
            isa,
            scalar(packing, panel, rows),
            avx2::bytes::<R, false>(panel, rows)
        ),
    }
}

fn scalar<const R: usize>(packing: Packing, panel: &[u8], rows: &Rows<'_>) -> RowBlock<R> {
    let mut products = [[0.0; PANEL_OUTPUTS]; R];
    let units = panel.chunks_exact(packing.unit_bytes());
    for (g, unit) in units.enumerate() {
        for lane in 0..PANEL_OUTPUTS {
            let group = Group::read(packing, unit, lane);
            for (r, products) in products.iter_mut().enumerate() {
                let at = r * rows.n_groups + g;
                let quants = &rows.quants[at * GROUP_INPUTS..(at + 1) * GROUP_INPUTS];
                let dot: i32 = quants
                    .iter()
                    .zip(&group.quants)
                    .map(|(x, w)| i32::from(*x) * i32::from(*w))
                    .sum();
                let sum = &mut products[lane];
                *sum = (group.scale * rows.scales[at]).mul_add(dot as f32, *sum);
                if packing.has_min() {
                    *sum = (group.min * rows.scales[at]).mul_add(rows.sums[at], *sum);
                }
            }
        }
    }
    products
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{GROUP_INPUTS, Packing, RowBlock, Rows};
    use std::arch::x86_64::*;

    /// Four activations, for all lanes.
    ///
    /// # Safety
    /// Four bytes can be read at `at`.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn four(at: *const i8) -> __m256i {
        // SAFETY: the caller's promise.
        _mm256_set1_epi32(unsafe { at.cast::<i32>().read_unaligned() })
    }

    /// Eight halves as singles.
    ///
    /// # Safety
    /// 16 bytes can be read at `at`.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn halves(at: *const u8) -> __m256 {
        // SAFETY: the caller's promise.
        _mm256_cvtph_ps(unsafe { _mm_loadu_si128(at.cast()) })
    }

    /// Adds one group's integer dot products to the sums of all rows.
    ///
    /// # Safety
    /// `head` is the first byte of group `g`, which exists in every row.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn add_group<const R: usize, const MIN: bool>(
        sums: &mut [__m256; R],
        dots: [__m256i; R],
        (head, rows, g): (*const u8, &Rows<'_>, usize),
    ) {
        // SAFETY: a group starts with 8 f16 scales and, with a minimum, 8 f16 minima.
        let (scale, min) = unsafe {
            let min = if MIN {
                halves(head.add(16))
            } else {
                _mm256_setzero_ps()
            };
            (halves(head), min)
        };
        for r in 0..R {
            let at = r * rows.n_groups + g;
            // SAFETY: `multiply` checked that there are `n_groups` scales and sums for each of R rows.
            let (scale_x, sum_x) =
                unsafe { (*rows.scales.get_unchecked(at), *rows.sums.get_unchecked(at)) };
            let scale_x = _mm256_set1_ps(scale_x);
            let dot = _mm256_cvtepi32_ps(dots[r]);
            sums[r] = _mm256_fmadd_ps(_mm256_mul_ps(scale, scale_x), dot, sums[r]);
            if MIN {
                let sum_x = _mm256_set1_ps(sum_x);
                sums[r] = _mm256_fmadd_ps(_mm256_mul_ps(min, scale_x), sum_x, sums[r]);
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn stored<const R: usize>(sums: [__m256; R]) -> RowBlock<R> {
        let mut products = [[0.0; 8]; R];
        for (sums, products) in sums.iter().zip(&mut products) {
            // SAFETY: the array holds 8 floats.
            unsafe { _mm256_storeu_ps(products.as_mut_ptr(), *sums) };
        }
        products
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn nibbles<const R: usize, const MIN: bool>(
        panel: &[u8],
        rows: &Rows<'_>,
    ) -> RowBlock<R> {
        let packing = if MIN {
            Packing::NibblesMin
        } else {
            Packing::Nibbles
        };
        let (unit_bytes, head_bytes) = (packing.unit_bytes(), if MIN { 32 } else { 16 });
        let row_quants = rows.n_groups * GROUP_INPUTS;
        let mask = _mm256_set1_epi8(15);
        let ones = _mm256_set1_epi16(1);
        let mut sums = [_mm256_setzero_ps(); R];
        for g in 0..rows.n_groups {
            // SAFETY: `multiply` checked that the panel holds `n_groups` units and each of R rows as many groups;
            // all reads stay within unit `g` and group `g`.
            unsafe {
                let head = panel.as_ptr().add(g * unit_bytes);
                let quants = rows.quants.as_ptr().add(g * GROUP_INPUTS);
                let mut short = [_mm256_setzero_si256(); R];
                for j in 0..4 {
                    let both = _mm256_loadu_si256(head.add(head_bytes + 32 * j).cast());
                    let low = _mm256_and_si256(both, mask);
                    let high = _mm256_and_si256(_mm256_srli_epi16::<4>(both), mask);
                    for (r, short) in short.iter_mut().enumerate() {
                        let x = quants.add(r * row_quants + 4 * j);
                        let pair = _mm256_add_epi16(
                            _mm256_maddubs_epi16(low, four(x)),
                            _mm256_maddubs_epi16(high, four(x.add(16))),
                        );
                        *short = _mm256_add_epi16(*short, pair);
                    }
                }
                let mut dots = short.map(|s| _mm256_madd_epi16(s, ones));
                if !MIN {
                    for (r, dot) in dots.iter_mut().enumerate() {
                        let eight = 8 * *rows.sums.get_unchecked(r * rows.n_groups + g) as i32;
                        *dot = _mm256_sub_epi32(*dot, _mm256_set1_epi32(eight));
                    }
                }
                add_group::<R, MIN>(&mut sums, dots, (head, rows, g));
            }
        }
        stored(sums)
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn bytes<const R: usize, const MIN: bool>(
        panel: &[u8],
        rows: &Rows<'_>,
    ) -> RowBlock<R> {
        let packing = if MIN {
            Packing::BytesMin
        } else {
            Packing::Bytes
        };
        let (unit_bytes, head_bytes) = (packing.unit_bytes(), if MIN { 32 } else { 16 });
        let row_quants = rows.n_groups * GROUP_INPUTS;
        let ones = _mm256_set1_epi16(1);
        let mut sums = [_mm256_setzero_ps(); R];
        for g in 0..rows.n_groups {
            // SAFETY: as in `nibbles`.
            unsafe {
                let head = panel.as_ptr().add(g * unit_bytes);
                let quants = rows.quants.as_ptr().add(g * GROUP_INPUTS);
                let mut dots = [_mm256_setzero_si256(); R];
                for j in 0..8 {
                    let signed = _mm256_loadu_si256(head.add(head_bytes + 32 * j).cast());
                    let magnitude = _mm256_abs_epi8(signed);
                    for (r, dot) in dots.iter_mut().enumerate() {
                        let x = _mm256_sign_epi8(four(quants.add(r * row_quants + 4 * j)), signed);
                        let short = _mm256_maddubs_epi16(magnitude, x);
                        *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(short, ones));
                    }
                }
                add_group::<R, MIN>(&mut sums, dots, (head, rows, g));
            }
        }
        stored(sums)
    }
}
