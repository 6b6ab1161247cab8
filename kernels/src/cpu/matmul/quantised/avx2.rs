//! Eight lanes: one panel of a pair.
//!
//! Activations are signed bytes of at most 127 in magnitude. Levels are unsigned, so `maddubs` takes them as they are, and
//! sums of a few steps fit 16 bits: eight of at most 2 * 15 * 127, four of 2 * 31 * 127, two of 2 * 63 * 127. Signed bytes go in as
//! magnitudes with their sign moved to the activation; that way round is exact for -128 too, and one step (2 * 128 *
//! 127) just fits.

use super::super::RowBlock;
use super::Rows;
use crate::cpu::packed::{Body, GROUP_INPUTS, Grouped, Head, PAIR_OUTPUTS, PANEL_OUTPUTS};
use std::arch::x86_64::*;

/// The activations of one group: those of row `r` start `r * stride` on.
#[derive(Clone, Copy)]
struct Quants {
    at: *const i8,
    stride: usize,
}

impl Quants {
    /// The four of one step of a row in every lane.
    ///
    /// # Safety
    /// They can be read.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn four(self, r: usize, step: usize) -> __m256i {
        // SAFETY: the caller's promise.
        let at = unsafe { self.at.add(r * self.stride + 4 * step) };
        // SAFETY: as above.
        _mm256_set1_epi32(unsafe { at.cast::<i32>().read_unaligned() })
    }
}

/// Eight halves as floats.
///
/// # Safety
/// 16 bytes can be read at `at`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn halves(at: *const u8) -> __m256 {
    // SAFETY: the caller's promise.
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(at.cast()) })
}

/// Eight bytes as floats.
///
/// # Safety
/// They can be read.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn small(at: *const u8, is_signed: bool) -> __m256 {
    // SAFETY: the caller's promise.
    let bytes = unsafe { _mm_loadl_epi64(at.cast()) };
    _mm256_cvtepi32_ps(if is_signed {
        _mm256_cvtepi8_epi32(bytes)
    } else {
        _mm256_cvtepu8_epi32(bytes)
    })
}

/// The scales of both halves, and the minimum, of a group in its unit.
///
/// # Safety
/// They exist.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn head<L: Grouped>(unit: *const u8, group: *const u8) -> ([__m256; 2], __m256) {
    // SAFETY: the parts of a unit are those that `packed::layout` describes.
    unsafe {
        let scale = halves(unit);
        match L::LAYOUT.head {
            Head::Scale => ([scale; 2], scale),
            Head::ScaleMin => ([scale; 2], halves(unit.add(2 * PANEL_OUTPUTS))),
            Head::Super => {
                let min = halves(unit.add(2 * PANEL_OUTPUTS));
                let min = _mm256_mul_ps(min, small(group.add(PANEL_OUTPUTS), false));
                let scale = _mm256_mul_ps(scale, small(group, false));
                ([scale; 2], _mm256_xor_ps(min, _mm256_set1_ps(-0.0)))
            }
            Head::SuperHalves => {
                let first = _mm256_mul_ps(scale, small(group, true));
                let second = _mm256_mul_ps(scale, small(group.add(PANEL_OUTPUTS), true));
                ([first, second], scale)
            }
        }
    }
}

/// One vector of bytes.
///
/// # Safety
/// 32 bytes can be read.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn vector(at: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_loadu_si256(at.cast()) }
}

/// Steps `j` and `j + 4` of a body of nibbles, without further bits.
///
/// # Safety
/// The body exists.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn two_steps(body: *const u8, j: usize) -> [__m256i; 2] {
    let fifteen = _mm256_set1_epi8(15);
    // SAFETY: the caller's promise.
    let both = unsafe { vector(body.add(32 * j)) };
    let high = _mm256_srli_epi16::<4>(both);
    [
        _mm256_and_si256(both, fifteen),
        _mm256_and_si256(high, fifteen),
    ]
}

/// The dot products of R rows.
///
/// # Safety
/// The body of nibbles exists, and so does the group of each row.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn nibbles<const R: usize>(body: *const u8, x: Quants) -> [__m256i; R] {
    let mut short = [_mm256_setzero_si256(); R];
    for j in 0..4 {
        // SAFETY: the caller's promise.
        unsafe {
            let [low, high] = two_steps(body, j);
            for (r, short) in short.iter_mut().enumerate() {
                let pair = _mm256_add_epi16(
                    _mm256_maddubs_epi16(low, x.four(r, j)),
                    _mm256_maddubs_epi16(high, x.four(r, j + 4)),
                );
                *short = _mm256_add_epi16(*short, pair);
            }
        }
    }
    let ones = _mm256_set1_epi16(1);
    let mut dots = short;
    for dot in &mut dots {
        *dot = _mm256_madd_epi16(*dot, ones);
    }
    dots
}

/// # Safety
/// As for `nibbles`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn fives<const R: usize>(body: *const u8, x: Quants) -> [__m256i; R] {
    let (ones, sixteen) = (_mm256_set1_epi16(1), _mm256_set1_epi8(16));
    let mut dots = [_mm256_setzero_si256(); R];
    // SAFETY: the caller's promise.
    unsafe {
        // Bits of the first four steps go up to bit 4 and come down by one for each; those of the last four are there.
        let mut high_bits = vector(body.add(128));
        let mut low_bits = _mm256_slli_epi16::<4>(high_bits);
        for first in [0, 2] {
            let mut short = [_mm256_setzero_si256(); R];
            for j in first..first + 2 {
                let [low, high] = two_steps(body, j);
                let low = _mm256_or_si256(low, _mm256_and_si256(low_bits, sixteen));
                let high = _mm256_or_si256(high, _mm256_and_si256(high_bits, sixteen));
                low_bits = _mm256_srli_epi16::<1>(low_bits);
                high_bits = _mm256_srli_epi16::<1>(high_bits);
                for (r, short) in short.iter_mut().enumerate() {
                    let pair = _mm256_add_epi16(
                        _mm256_maddubs_epi16(low, x.four(r, j)),
                        _mm256_maddubs_epi16(high, x.four(r, j + 4)),
                    );
                    *short = _mm256_add_epi16(*short, pair);
                }
            }
            for (dot, short) in dots.iter_mut().zip(short) {
                *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(short, ones));
            }
        }
    }
    dots
}

/// Half `half` of a group: four steps.
///
/// # Safety
/// As for `nibbles`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn sixes<const R: usize>(body: *const u8, half: usize, x: Quants) -> [__m256i; R] {
    let (ones, mask) = (_mm256_set1_epi16(1), _mm256_set1_epi8(0x30));
    let mut dots = [_mm256_setzero_si256(); R];
    // SAFETY: the caller's promise.
    unsafe {
        let bits = vector(body.add(128 + 32 * half));
        // The fields of steps 0 and 1 go up into place, those of 2 and 3 are there or above.
        for (first, mut bits) in [(0, _mm256_slli_epi16::<4>(bits)), (2, bits)] {
            let mut short = [_mm256_setzero_si256(); R];
            for j in first..first + 2 {
                let level = two_steps(body, j)[half];
                let level = _mm256_or_si256(level, _mm256_and_si256(bits, mask));
                bits = _mm256_srli_epi16::<2>(bits);
                for (r, short) in short.iter_mut().enumerate() {
                    let pair = _mm256_maddubs_epi16(level, x.four(r, 4 * half + j));
                    *short = _mm256_add_epi16(*short, pair);
                }
            }
            for (dot, short) in dots.iter_mut().zip(short) {
                *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(short, ones));
            }
        }
    }
    dots
}

/// # Safety
/// As for `nibbles`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn bytes<const R: usize>(body: *const u8, x: Quants) -> [__m256i; R] {
    let ones = _mm256_set1_epi16(1);
    let mut dots = [_mm256_setzero_si256(); R];
    for step in 0..8 {
        // SAFETY: the caller's promise.
        unsafe {
            let signed = vector(body.add(32 * step));
            let magnitude = _mm256_abs_epi8(signed);
            for (r, dot) in dots.iter_mut().enumerate() {
                let short =
                    _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x.four(r, step), signed));
                *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(short, ones));
            }
        }
    }
    dots
}

/// The products of R rows with a pair of panels. Lengths are those that `multiply` checks. Few rows leave room for the sums of
/// both panels, which are then read in one go.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn pair<const R: usize, L: Grouped>(pair: &[u8], rows: &Rows<'_>) -> RowBlock<R, 1> {
    if R <= 2 {
        return stored(panels::<R, 2, L>(pair, 0, rows));
    }
    let [first] = panels::<R, 1, L>(pair, 0, rows);
    let [second] = panels::<R, 1, L>(pair, 1, rows);
    stored([first, second])
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn stored<const R: usize>(sums: [[__m256; R]; 2]) -> RowBlock<R, 1> {
    let mut products = [[[0.0; PAIR_OUTPUTS]; 1]; R];
    for (half, sums) in sums.iter().enumerate() {
        for (sums, [products]) in sums.iter().zip(&mut products) {
            // SAFETY: the array holds 16 floats.
            unsafe { _mm256_storeu_ps(products.as_mut_ptr().add(half * PANEL_OUTPUTS), *sums) };
        }
    }
    products
}

/// The sums of N panels of the pair from number `first` on.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn panels<const R: usize, const N: usize, L: Grouped>(
    pair: &[u8],
    first: usize,
    rows: &Rows<'_>,
) -> [[__m256; R]; N] {
    let layout = L::LAYOUT;
    assert!(first + N <= 2, "a pair has two panels");
    let mut all_sums = [[_mm256_setzero_ps(); R]; N];
    for g in 0..rows.n_groups {
        let (unit, within) = (g / layout.unit_groups(), g % layout.unit_groups());
        for (panel, sums) in all_sums.iter_mut().enumerate() {
            // SAFETY: `multiply` checked that both panels have `n_groups` groups and each of R rows as many.
            unsafe {
                let unit = (2 * unit + first + panel) * layout.unit_bytes();
                add_group::<R, L>(sums, pair.as_ptr().add(unit), within, (rows, g));
            }
        }
    }
    all_sums
}

/// Adds group `within` of a unit to the sums of all rows.
///
/// # Safety
/// The unit exists, and so does group `g` of every row.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_group<const R: usize, L: Grouped>(
    sums: &mut [__m256; R],
    unit: *const u8,
    within: usize,
    (rows, g): (&Rows<'_>, usize),
) {
    let layout = L::LAYOUT;
    // SAFETY: the caller's promise; all reads stay within the unit and within group `g`.
    unsafe {
        let group = unit.add(layout.unit_head() + within * layout.group_bytes());
        let body = group.add(layout.group_head());
        let (scales, min) = head::<L>(unit, group);
        let x = Quants {
            at: rows.quants.as_ptr().add(g * GROUP_INPUTS),
            stride: rows.n_groups * GROUP_INPUTS,
        };
        if layout.has_halves() {
            for (half, scale) in scales.into_iter().enumerate() {
                let dots = sixes::<R>(body, half, x);
                add::<R, L>(sums, dots, [scale, min], (rows, g, half));
            }
        } else {
            let dots = match layout.body {
                Body::Nibbles => nibbles::<R>(body, x),
                Body::Fives => fives::<R>(body, x),
                Body::Sixes | Body::Bytes => bytes::<R>(body, x),
            };
            add::<R, L>(sums, dots, [scales[0], min], (rows, g, 0));
        }
    }
}

/// Adds the dot products of a group, or of half of it, to the sums of all rows.
///
/// # Safety
/// Group `g` exists in every row.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add<const R: usize, L: Grouped>(
    sums: &mut [__m256; R],
    dots: [__m256i; R],
    [scale, min]: [__m256; 2],
    (rows, g, half): (&Rows<'_>, usize, usize),
) {
    let offset = i32::from(L::LAYOUT.offset);
    for (r, sum) in sums.iter_mut().enumerate() {
        let at = r * rows.n_groups + g;
        let mut dot = dots[r];
        // SAFETY: the caller's promise.
        let (scale_x, sum_x) = unsafe {
            let sum_x = match L::LAYOUT.has_halves() {
                true => *rows.half_sums.get_unchecked(2 * at + half),
                false => *rows.sums.get_unchecked(at),
            };
            (_mm256_set1_ps(*rows.scales.get_unchecked(at)), sum_x)
        };
        if offset != 0 {
            dot = _mm256_sub_epi32(dot, _mm256_set1_epi32(offset * sum_x as i32));
        }
        let dot = _mm256_cvtepi32_ps(dot);
        *sum = _mm256_fmadd_ps(_mm256_mul_ps(scale, scale_x), dot, *sum);
        if L::LAYOUT.has_min() {
            let sum_x = _mm256_set1_ps(sum_x);
            *sum = _mm256_fmadd_ps(_mm256_mul_ps(min, scale_x), sum_x, *sum);
        }
    }
}
