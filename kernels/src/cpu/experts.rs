//! A mixture of experts (Shazeer et al. 2017): which experts a row goes to, and how their answers are added.
//!
//! `p = softmax(scores)` in f32 (`e^(score - largest)`, summed in index order); the experts with the largest p are taken, the
//! lower index first among equals; p may be divided by their sum, added in that order. A row's answers are added in the
//! order of the experts' indices. Nothing here depends on which rows share a batch; the work is small and runs on one thread.

use crate::cpu::activations::Activations;
use crate::cpu::exp::exp;

/// One row's use of one expert.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Share {
    /// Of the batch.
    pub row: usize,
    /// What the expert's answer is multiplied with.
    pub weight: f32,
}

/// Chooses `n_used` experts for every row of `scores` (`[n_rows, n_experts]`) and lists, for each expert, its rows in
/// ascending order. A row whose scores are not numbers goes to the first experts with weight NaN.
///
/// # Panics
/// When `scores` is not whole rows, or more experts are used than there are.
pub fn route(scores: &[f32], n_experts: usize, n_used: usize, normalise: bool) -> Vec<Vec<Share>> {
    assert!(
        n_experts > 0 && scores.len().is_multiple_of(n_experts),
        "one score for each expert"
    );
    assert!((1..=n_experts).contains(&n_used), "some experts are used");
    let mut shares = vec![Vec::new(); n_experts];
    let mut chances = vec![0.0_f32; n_experts];
    let mut ranked: Vec<usize> = Vec::with_capacity(n_experts);
    for (row, scores) in scores.chunks_exact(n_experts).enumerate() {
        softmax(scores, &mut chances);
        ranked.clear();
        ranked.extend(0..n_experts);
        ranked.sort_by(|a, b| chances[*b].total_cmp(&chances[*a]).then(a.cmp(b)));
        let chosen = &ranked[..n_used];
        let total: f32 = match normalise {
            true => chosen.iter().map(|expert| chances[*expert]).sum(),
            false => 1.0,
        };
        for expert in chosen {
            let weight = chances[*expert] / total;
            shares[*expert].push(Share { row, weight });
        }
    }
    shares
}

fn softmax(scores: &[f32], chances: &mut [f32]) {
    let larger = |a: f32, b: &f32| if a > *b { a } else { *b };
    let max = scores.iter().fold(f32::NEG_INFINITY, larger);
    let mut total = 0.0;
    for (chance, score) in chances.iter_mut().zip(scores) {
        *chance = exp(score - max);
        total += *chance;
    }
    for chance in chances {
        *chance /= total;
    }
}

impl Activations {
    /// Copies some rows, with their int8 form, to `target`.
    ///
    /// # Panics
    /// When there is no such row.
    pub fn gather(&self, shares: &[Share], target: &mut Self) {
        assert!(
            self.is_quantised() || !target.is_quantised(),
            "an int8 form is copied, not made"
        );
        let n = self.n_columns();
        target.resize(shares.len(), n);
        for (to, Share { row, .. }) in shares.iter().enumerate() {
            copy_row(&self.values, &mut target.values, (*row, to), n);
            if target.is_quantised() {
                let n_groups = self.scales.len() / self.n_rows();
                copy_row(&self.quants, &mut target.quants, (*row, to), n);
                copy_row(&self.scales, &mut target.scales, (*row, to), n_groups);
                copy_row(&self.sums, &mut target.sums, (*row, to), n_groups);
            }
        }
    }
}

fn copy_row<T: Copy>(from: &[T], to: &mut [T], (source, target): (usize, usize), n: usize) {
    to[target * n..(target + 1) * n].copy_from_slice(&from[source * n..(source + 1) * n]);
}

/// Adds an expert's answers (`[shares.len(), n]`) to the sums of their rows: `sum = fma(weight, answer, sum)`.
///
/// # Panics
/// When there is no such row.
pub fn add_shares(shares: &[Share], answers: &[f32], n: usize, sums: &mut [f32]) {
    for (Share { row, weight }, answers) in shares.iter().zip(answers.chunks_exact(n)) {
        for (sum, answer) in sums[row * n..(row + 1) * n].iter_mut().zip(answers) {
            *sum = weight.mul_add(*answer, *sum);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::Isa;
    use crate::cpu::norm::rms_norm;
    use crate::cpu::team::Team;
    use crate::cpu::test_data::floats;

    #[test]
    fn the_best_experts_are_taken_with_their_chances() {
        let scores = [0.0, 2.0, 1.0, 2.0, 5.0, 5.0, 5.0, -9.0];
        let shares = route(&scores, 4, 2, true);
        let rows = |expert: usize| shares[expert].iter().map(|s| s.row).collect::<Vec<_>>();
        assert_eq!(
            [rows(0), rows(1), rows(2), rows(3)],
            [vec![1], vec![0, 1], vec![], vec![0]]
        );
        assert!(shares.iter().flatten().all(|share| share.weight == 0.5));
        let plain = route(&scores[..4], 4, 2, false);
        let total: f32 = [0.0_f32, 2.0, 1.0, 2.0].iter().map(|s| s.exp()).sum();
        assert!((plain[3][0].weight - 2.0_f32.exp() / total).abs() < 1e-6);
    }

    #[test]
    fn a_row_alone_is_routed_as_in_a_batch() {
        let scores = floats(3, 8 * 20);
        let all = route(&scores, 8, 3, true);
        for row in 0..20 {
            let alone = route(&scores[row * 8..(row + 1) * 8], 8, 3, true);
            for (all, alone) in all.iter().zip(&alone) {
                let found = all.iter().find(|share| share.row == row).map(|s| s.weight);
                assert_eq!(found, alone.first().map(|s| s.weight));
            }
        }
    }

    #[test]
    fn scores_that_are_no_numbers_spoil_their_row_only() {
        let shares = route(&[f32::NAN, 1.0, 0.5, 0.1, 3.0, 0.2], 3, 1, true);
        let weights: Vec<_> = shares
            .iter()
            .flatten()
            .map(|s| (s.row, s.weight.is_nan()))
            .collect();
        assert_eq!(weights.len(), 2);
        assert!(weights.contains(&(0, true)) && weights.contains(&(1, false)));
    }

    #[test]
    fn gathered_rows_are_whole_and_answers_are_added_with_their_weights() {
        let mut team = Team::new(1).expect("threads start");
        let (mut all, mut some) = (Activations::new(true), Activations::new(true));
        let rows = floats(1, 64 * 5);
        rms_norm(Isa::Scalar, &mut team, &rows, (&[1.0; 64], 1e-5), &mut all);
        let shares = [
            Share {
                row: 4,
                weight: 0.5,
            },
            Share {
                row: 1,
                weight: 2.0,
            },
        ];
        all.gather(&shares, &mut some);
        assert_eq!(some.n_rows(), 2);
        assert_eq!(some.values()[..64], all.values()[256..]);
        assert_eq!(some.quants[64..], all.quants[64..128]);
        assert_eq!(
            (&some.scales[..2], &some.sums[2..]),
            (&all.scales[8..], &all.sums[2..4])
        );
        let mut sums = vec![1.0; 64 * 5];
        add_shares(&shares, some.values(), 64, &mut sums);
        assert_eq!(sums[64], all.values()[64].mul_add(2.0, 1.0));
        assert_eq!(sums[0], 1.0);
    }
}
