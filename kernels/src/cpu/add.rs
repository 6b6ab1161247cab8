//! Adding: one row to every row (a bias), or rows to rows (a residual), and scaling rows by one number.
//!
//! Each element is one IEEE operation, so the vector form is the same source compiled for wider registers: its bits cannot
//! differ. AVX2 serves where wider registers exist, since memory is the limit.

use crate::cpu::isa::{Isa, dispatch};
use crate::cpu::shards::Shards;
use crate::cpu::team::Team;

/// Elements of one part.
const PART_ELEMENTS: usize = 16 * 1024;

/// `rows[r][i] += bias[i]`, for rows of the bias's length.
///
/// # Panics
/// When `rows` is not whole rows.
pub fn add_bias(isa: Isa, team: &mut Team, rows: &mut [f32], bias: &[f32]) {
    let n = bias.len();
    assert!(
        n > 0 && rows.len().is_multiple_of(n),
        "whole rows to add to"
    );
    let n_rows = rows.len() / n;
    let rows = Shards::new(rows);
    team.run_ranges(n_rows, PART_ELEMENTS.div_ceil(n), &|part| {
        for row in part {
            // SAFETY: each row is changed by the one part that holds it.
            let row = unsafe { rows.range(row * n..(row + 1) * n) };
            dispatch!(isa, add(row, bias), avx2::add(row, bias));
        }
    });
}

/// `sums[i] += rows[i]`.
///
/// # Panics
/// When the lengths differ.
pub fn add_rows(isa: Isa, team: &mut Team, sums: &mut [f32], rows: &[f32]) {
    assert_eq!(sums.len(), rows.len(), "as many sums as terms");
    let n_parts = sums.len().div_ceil(PART_ELEMENTS);
    let n = sums.len();
    let sums = Shards::new(sums);
    team.run(n_parts, &|part| {
        let range = part * PART_ELEMENTS..((part + 1) * PART_ELEMENTS).min(n);
        // SAFETY: the parts' ranges do not overlap.
        let sums = unsafe { sums.range(range.clone()) };
        dispatch!(isa, add(sums, &rows[range]), avx2::add(sums, &rows[range]));
    });
}

/// `values[i] *= factor`.
pub fn scale(values: &mut [f32], factor: f32) {
    for value in values {
        *value *= factor;
    }
}

#[inline(always)]
fn add(sums: &mut [f32], terms: &[f32]) {
    for (sum, term) in sums.iter_mut().zip(terms) {
        *sum += term;
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn add(sums: &mut [f32], terms: &[f32]) {
        super::add(sums, terms);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::test_data::floats;

    #[test]
    fn a_bias_is_added_to_every_row() {
        for n in [1, 7, 64, 200] {
            let (rows, bias) = (floats(n as u64, n * 301), floats(5, n));
            for isa in Isa::available() {
                for threads in [1, 3] {
                    let mut found = rows.clone();
                    let mut team = Team::new(threads).expect("threads start");
                    add_bias(isa, &mut team, &mut found, &bias);
                    for (i, sum) in found.iter().enumerate() {
                        assert_eq!(*sum, rows[i] + bias[i % n]);
                    }
                }
            }
        }
    }

    #[test]
    fn rows_are_added_to_rows() {
        let n = PART_ELEMENTS + 37;
        let (rows, terms) = (floats(1, n), floats(2, n));
        for isa in Isa::available() {
            let mut found = rows.clone();
            let mut team = Team::new(2).expect("threads start");
            add_rows(isa, &mut team, &mut found, &terms);
            assert!((0..n).all(|i| found[i] == rows[i] + terms[i]));
        }
    }

    #[test]
    fn scaling_multiplies_each_number() {
        let mut values = vec![1.0, -2.5, 0.0];
        scale(&mut values, 3.0);
        assert_eq!(values, [3.0, -7.5, 0.0]);
    }
}
