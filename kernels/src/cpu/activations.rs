//! Rows of activations, and their int8 form.
//!
//! A product with quantised weights reads activations as int8 in groups of 32: scale = largest magnitude / 127, quant =
//! round(value * 127 / largest), to nearest even. The sums of each group's quants and of each half's go along, because
//! weights with a minimum or an offset need them. A group that holds NaN or infinity gets scale NaN, so that the fault shows in the
//! whole row and in no other.

use crate::cpu::isa::{Isa, dispatch};
use crate::cpu::packed::GROUP_INPUTS;
use crate::cpu::shards::Shards;
use crate::cpu::team::Team;
use crate::cpu::wide::{Wide, WideKernel};

/// Elements of one part of a row-wise operation: some microseconds, well above the cost of a claim.
const PART_ELEMENTS: usize = 4096;
/// Elements that share a half sum.
const HALF_INPUTS: usize = GROUP_INPUTS / 2;
const QUANT_MAX: f32 = 127.0;
/// Bit patterns of magnitudes from here on are infinity and NaN.
const INFINITY_BITS: u32 = 0x7f80_0000;

/// Rows `[n_rows, n_columns]` of f32, with their int8 form when a product needs it.
#[derive(Debug, Default)]
pub struct Activations {
    n_rows: usize,
    n_columns: usize,
    quantised: bool,
    pub(crate) values: Vec<f32>,
    /// `[n_rows, n_columns]`
    pub(crate) quants: Vec<i8>,
    /// `[n_rows, n_columns / 32]`
    pub(crate) scales: Vec<f32>,
    /// `[n_rows, n_columns / 32]`, whole numbers.
    pub(crate) sums: Vec<f32>,
    /// `[n_rows, n_columns / 16]`, whole numbers.
    pub(crate) half_sums: Vec<f32>,
}

/// One row to quantise, and where its int8 form goes.
pub(crate) struct QuantRow<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) quants: &'a mut [i8],
    pub(crate) scales: &'a mut [f32],
    pub(crate) sums: &'a mut [f32],
    pub(crate) half_sums: &'a mut [f32],
}

impl Activations {
    /// No rows yet. `quantised` says that a product with quantised weights will read them.
    pub fn new(quantised: bool) -> Self {
        Self {
            quantised,
            ..Self::default()
        }
    }

    /// Makes room for `n_rows` rows of `n_columns`; what was in them is unspecified.
    ///
    /// # Panics
    /// When the int8 form is wanted and `n_columns` is no multiple of 32.
    pub fn resize(&mut self, n_rows: usize, n_columns: usize) {
        self.n_rows = n_rows;
        self.n_columns = n_columns;
        self.values.resize(n_rows * n_columns, 0.0);
        if self.quantised {
            assert!(
                n_columns.is_multiple_of(GROUP_INPUTS),
                "quantised products take whole groups of 32"
            );
            let n_groups = n_rows * n_columns / GROUP_INPUTS;
            self.quants.resize(n_rows * n_columns, 0);
            self.scales.resize(n_groups, 0.0);
            self.sums.resize(n_groups, 0.0);
            self.half_sums.resize(2 * n_groups, 0.0);
        }
    }

    /// Rows.
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// Elements of a row.
    pub fn n_columns(&self) -> usize {
        self.n_columns
    }

    /// True when the int8 form is kept.
    pub fn is_quantised(&self) -> bool {
        self.quantised
    }

    /// All rows, one after another.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// All rows, to be written; [`Self::quantise`] afterwards.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// Has every row filled by `fill(row, values)` and makes its int8 form, rows in parallel.
    pub(crate) fn fill_rows(
        &mut self,
        isa: Isa,
        team: &mut Team,
        fill: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) {
        let (n, n_rows, quantised) = (self.n_columns, self.n_rows, self.quantised);
        let n_groups = n / GROUP_INPUTS;
        let values = Shards::new(&mut self.values);
        let quants = Shards::new(&mut self.quants);
        let scales = Shards::new(&mut self.scales);
        let sums = Shards::new(&mut self.sums);
        let half_sums = Shards::new(&mut self.half_sums);
        let grain = PART_ELEMENTS.div_ceil(n.max(1));
        team.run_ranges(n_rows, grain, &|rows| {
            for row in rows {
                // SAFETY: each row is filled by the one part that holds it.
                let values = unsafe { values.range(row * n..(row + 1) * n) };
                fill(row, values);
                if quantised {
                    let groups = row * n_groups..(row + 1) * n_groups;
                    let halves = 2 * groups.start..2 * groups.end;
                    // SAFETY: as above.
                    let row = unsafe {
                        QuantRow {
                            values,
                            quants: quants.range(row * n..(row + 1) * n),
                            scales: scales.range(groups.clone()),
                            sums: sums.range(groups),
                            half_sums: half_sums.range(halves),
                        }
                    };
                    quantise_row(isa, row);
                }
            }
        });
    }

    /// [`Self::fill_rows`] for a gate: rows of `input` hold `n` gate values, then `n` up values, and
    /// `fill(gate, up, values)` makes a row of `n` out of them.
    pub(crate) fn fill_gated(
        &mut self,
        isa: Isa,
        team: &mut Team,
        (input, n): (&[f32], usize),
        fill: impl Fn(&[f32], &[f32], &mut [f32]) + Sync,
    ) {
        assert!(
            n > 0 && input.len().is_multiple_of(2 * n),
            "whole rows of gate and up"
        );
        self.resize(input.len() / (2 * n), n);
        self.fill_rows(isa, team, &|row, values| {
            let (gate, up) = input[row * 2 * n..(row + 1) * 2 * n].split_at(n);
            fill(gate, up, values);
        });
    }

    /// Makes the int8 form of all rows, where one is kept.
    pub fn quantise(&mut self, isa: Isa) {
        if !self.quantised {
            return;
        }
        let row = QuantRow {
            values: &self.values,
            quants: &mut self.quants,
            scales: &mut self.scales,
            sums: &mut self.sums,
            half_sums: &mut self.half_sums,
        };
        quantise_row(isa, row);
    }
}

/// Quantises whole groups.
pub(crate) fn quantise_row(isa: Isa, row: QuantRow<'_>) {
    dispatch!(isa, scalar(row), avx2::quantise(row), Quantise(row));
}

fn scalar(row: QuantRow<'_>) {
    let groups = row.values.as_chunks::<GROUP_INPUTS>().0;
    let quants = row.quants.as_chunks_mut::<GROUP_INPUTS>().0;
    for (g, (values, quants)) in groups.iter().zip(quants).enumerate() {
        let magnitude = |v: &f32| v.to_bits() & 0x7fff_ffff;
        let largest = values.iter().map(magnitude).max().unwrap_or(0);
        let (scale, inverse) = scale_of(largest);
        row.scales[g] = scale;
        let mut sums = [0_i32; 2];
        for (i, (quant, value)) in quants.iter_mut().zip(values).enumerate() {
            *quant = (value * inverse).round_ties_even() as i8;
            sums[i / HALF_INPUTS] += i32::from(*quant);
        }
        row.half_sums[2 * g] = sums[0] as f32;
        row.half_sums[2 * g + 1] = sums[1] as f32;
        row.sums[g] = (sums[0] + sums[1]) as f32;
    }
}

/// Scale and its inverse out of the bits of the largest magnitude.
#[inline]
fn scale_of(largest_bits: u32) -> (f32, f32) {
    let largest = f32::from_bits(largest_bits);
    if largest_bits >= INFINITY_BITS {
        return (f32::NAN, 0.0);
    }
    let inverse = QUANT_MAX / largest;
    if !inverse.is_finite() {
        // All zero, or so small that the inverse overflows: such a group counts as zero.
        return (0.0, 0.0);
    }
    (largest / QUANT_MAX, inverse)
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{GROUP_INPUTS, QuantRow, scale_of};
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn quantise(row: QuantRow<'_>) {
        let groups = row.values.as_chunks::<GROUP_INPUTS>().0;
        let quants = row.quants.as_chunks_mut::<GROUP_INPUTS>().0;
        for (g, (values, quants)) in groups.iter().zip(quants).enumerate() {
            let at = values.as_ptr();
            // SAFETY: four loads of 8 floats cover exactly the array's 32.
            let v = unsafe {
                [
                    _mm256_loadu_ps(at),
                    _mm256_loadu_ps(at.add(8)),
                    _mm256_loadu_ps(at.add(16)),
                    _mm256_loadu_ps(at.add(24)),
                ]
            };
            let (scale, inverse) = scale_of(largest_bits(v));
            row.scales[g] = scale;
            let inverse_all = _mm256_set1_ps(inverse);
            let zero_all = inverse == 0.0;
            let whole = v.map(|v| {
                if zero_all {
                    _mm256_setzero_si256()
                } else {
                    _mm256_cvtps_epi32(_mm256_mul_ps(v, inverse_all))
                }
            });
            let low = _mm256_packs_epi32(whole[0], whole[1]);
            let high = _mm256_packs_epi32(whole[2], whole[3]);
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            let bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
            // SAFETY: the array has exactly 32 bytes.
            unsafe { _mm256_storeu_si256(quants.as_mut_ptr().cast(), bytes) };
            let ones = _mm256_set1_epi16(1);
            let [first, second] = sums(_mm256_madd_epi16(low, ones), _mm256_madd_epi16(high, ones));
            row.half_sums[2 * g] = first as f32;
            row.half_sums[2 * g + 1] = second as f32;
            row.sums[g] = (first + second) as f32;
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    fn largest_bits(v: [__m256; 4]) -> u32 {
        let mask = _mm256_set1_epi32(0x7fff_ffff);
        let m = v.map(|v| _mm256_and_si256(_mm256_castps_si256(v), mask));
        let m = _mm256_max_epi32(_mm256_max_epi32(m[0], m[1]), _mm256_max_epi32(m[2], m[3]));
        let m = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256::<1>(m));
        let m = _mm_max_epi32(m, _mm_shuffle_epi32::<0b01_00_11_10>(m));
        let m = _mm_max_epi32(m, _mm_shuffle_epi32::<0b10_11_00_01>(m));
        _mm_cvtsi128_si32(m) as u32
    }

    /// The sums of both.
    #[target_feature(enable = "avx2,fma,f16c")]
    fn sums(a: __m256i, b: __m256i) -> [i32; 2] {
        let fours = _mm256_hadd_epi32(a, b);
        let s = _mm_add_epi32(
            _mm256_castsi256_si128(fours),
            _mm256_extracti128_si256::<1>(fours),
        );
        let s = _mm_hadd_epi32(s, s);
        [_mm_cvtsi128_si32(s), _mm_extract_epi32::<1>(s)]
    }
}

/// Whole groups, sixteen lanes at a time.
struct Quantise<'a>(QuantRow<'a>);

impl WideKernel for Quantise<'_> {
    type Output = ();

    #[inline(always)]
    fn run<W: Wide>(self, w: W) {
        let row = self.0;
        let groups = row.values.as_chunks::<GROUP_INPUTS>().0;
        let quants = row.quants.as_chunks_mut::<GROUP_INPUTS>().0;
        let magnitude = w.splat_int(0x7fff_ffff);
        for (g, (values, quants)) in groups.iter().zip(quants).enumerate() {
            // SAFETY: two loads of 16 floats cover exactly the array's 32.
            let (low, high) = unsafe {
                let at = values.as_ptr();
                (w.load(at), w.load(at.add(HALF_INPUTS)))
            };
            let largest = w.max_int(
                w.and(w.bits(low), magnitude),
                w.and(w.bits(high), magnitude),
            );
            let (scale, inverse) = scale_of(w.largest_int(largest).cast_unsigned());
            row.scales[g] = scale;
            let mut halves = [w.splat_int(0); 2];
            if inverse != 0.0 {
                let inverse = w.splat(inverse);
                halves = [
                    w.to_int(w.mul(low, inverse)),
                    w.to_int(w.mul(high, inverse)),
                ];
            }
            // SAFETY: two stores of 16 bytes cover exactly the array's 32.
            unsafe {
                let at = quants.as_mut_ptr();
                w.store_low_bytes(halves[0], at);
                w.store_low_bytes(halves[1], at.add(HALF_INPUTS));
            }
            let [first, second] = w.sums_int(halves[0], halves[1]);
            row.half_sums[2 * g] = first as f32;
            row.half_sums[2 * g + 1] = second as f32;
            row.sums[g] = (first + second) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::test_data::floats;

    fn quantised(isa: Isa, values: &[f32]) -> Activations {
        let mut rows = Activations::new(true);
        rows.resize(1, values.len());
        rows.values_mut().copy_from_slice(values);
        rows.quantise(isa);
        rows
    }

    #[test]
    fn every_variant_gives_the_same_bits() {
        for seed in 0..50 {
            let mut values = floats(seed, 96);
            values[40] *= 1e-30;
            values[70] = [f32::NAN, f32::INFINITY, 0.0, 1e38, -1e-45][seed as usize % 5];
            if seed % 7 == 0 {
                values[..32].fill(-0.0);
            }
            let wanted = quantised(Isa::Scalar, &values);
            for isa in Isa::available() {
                let found = quantised(isa, &values);
                assert_eq!(found.quants, wanted.quants);
                assert_eq!(found.sums, wanted.sums);
                assert_eq!(found.half_sums, wanted.half_sums);
                let bits =
                    |a: &Activations| a.scales.iter().map(|s| s.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&found), bits(&wanted));
            }
        }
    }

    #[test]
    fn values_are_kept_to_half_a_step_and_faults_stay_in_their_group() {
        let mut values = floats(3, 64);
        values[33] = f32::NEG_INFINITY;
        let rows = quantised(Isa::detect(), &values);
        for (value, quant) in values.iter().zip(&rows.quants).take(32) {
            let back = f32::from(*quant) * rows.scales[0];
            assert!((back - value).abs() <= rows.scales[0] * 0.5001);
        }
        assert!(rows.scales[1].is_nan());
        assert!(!rows.scales[0].is_nan());
    }
}
