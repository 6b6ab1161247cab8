//! Which tokens may be drawn, and the draw.
//!
//! A filter keeps the best of what the one before has left, by a total order (equal ones: the lower id), so what is kept and
//! how it is ordered depends on the row alone. Nothing sorts a whole vocabulary unless all of it may be drawn: the best few are
//! selected, and more only when those do not reach. A filter at its neutral value touches nothing.

use super::real;
use std::cmp::Ordering;
use tidemill_core::SamplingParams;

/// How many candidates a share is looked for in at first; grows eightfold until it is found.
const SHARE_FIRST: usize = 64;

/// One token that may be drawn. `weight` is its probability times a constant.
#[derive(Clone, Copy)]
struct Candidate {
    token: usize,
    weight: f64,
}

/// Draws from the filtered distribution; `uniform` lies in [0, 1).
pub(super) fn draw(logits: &[f32], max: f32, params: &SamplingParams, uniform: f64) -> usize {
    let mut tokens: Vec<usize> = (0..logits.len()).collect();
    let top_k = params.top_k as usize;
    if top_k > 0 && top_k < tokens.len() {
        sort_first(&mut tokens, top_k, |a, b| by_likelihood(logits, *a, *b));
        tokens.truncate(top_k);
    }
    let temperature = f64::from(params.temperature);
    // The maximum goes off before the division, so that a small temperature makes no infinity.
    let weigh = |token: usize| real::exp((f64::from(logits[token]) - f64::from(max)) / temperature);
    let candidates = tokens.into_iter().map(|token| Candidate {
        token,
        weight: weigh(token),
    });
    let mut candidates: Vec<Candidate> = candidates.collect();
    if params.typical_p < 1.0 {
        let surprise = |token: usize| (f64::from(max) - f64::from(logits[token])) / temperature;
        candidates = keep_typical(&candidates, f64::from(params.typical_p), surprise);
    }
    if params.top_p < 1.0 {
        keep_nucleus(&mut candidates, logits, f64::from(params.top_p));
    }
    if params.min_p > 0.0 {
        keep_near_best(&mut candidates, f64::from(params.min_p));
    }
    pick(&candidates, uniform)
}

/// More likely first; of equals the lower id first. By logit, since weights may underflow to equal zeros.
fn by_likelihood(logits: &[f32], a: usize, b: usize) -> Ordering {
    let order = logits[b].partial_cmp(&logits[a]);
    order.expect("NaN was refused before").then(a.cmp(&b))
}

/// Puts the `n_first` first items first, in order.
fn sort_first<T>(items: &mut [T], n_first: usize, compare: impl Fn(&T, &T) -> Ordering) {
    if n_first < items.len() {
        items.select_nth_unstable_by(n_first, &compare);
    }
    let n_first = n_first.min(items.len());
    items[..n_first].sort_unstable_by(compare);
}

/// Keeps the fewest most likely candidates whose share of the weight reaches `top_p`; at least one.
#[expect(clippy::cast_precision_loss, reason = "a vocabulary is counted in u32")]
fn keep_nucleus(candidates: &mut Vec<Candidate>, logits: &[f32], top_p: f64) {
    let total = total(candidates);
    let wanted = top_p * total;
    // All candidates this light weigh less together than what may be missing, so none of them is in the nucleus
    // and the sort is short. Half of the bound leaves room for rounding.
    let light = 0.5 * (1.0 - top_p) * total / candidates.len() as f64;
    candidates.retain(|candidate| candidate.weight >= light);
    let weight = |candidate: &Candidate| candidate.weight;
    keep_share(candidates, wanted, weight, |a, b| {
        by_likelihood(logits, a.token, b.token)
    });
}

/// Locally typical sampling (Meister, Pimentel, Wiher, Cotterell: "Locally typical sampling", TACL 2023): keeps the
/// candidates whose surprise is nearest to the expected one, as many as reach `typical_p` of the weight; at least one.
/// `surprise` is relative to that of the most likely token, which cancels in the distance.
fn keep_typical(
    candidates: &[Candidate],
    typical_p: f64,
    surprise: impl Fn(usize) -> f64,
) -> Vec<Candidate> {
    // Without weight there is nothing to draw, and the surprise may be infinite.
    let weighty = || candidates.iter().filter(|candidate| candidate.weight > 0.0);
    let total: f64 = weighty().map(|candidate| candidate.weight).sum();
    let expected: f64 = weighty()
        .map(|candidate| candidate.weight * surprise(candidate.token))
        .sum();
    let expected = expected / total;
    let mut distant: Vec<(f64, Candidate)> = weighty()
        .map(|&candidate| ((surprise(candidate.token) - expected).abs(), candidate))
        .collect();
    let weight = |(_, candidate): &(f64, Candidate)| candidate.weight;
    keep_share(&mut distant, typical_p * total, weight, |a, b| {
        // Of two equally far ones the more likely comes first, then the lower id.
        let by_weight = b.1.weight.total_cmp(&a.1.weight);
        let order = a.0.total_cmp(&b.0).then(by_weight);
        order.then(a.1.token.cmp(&b.1.token))
    });
    distant
        .into_iter()
        .map(|(_, candidate)| candidate)
        .collect()
}

/// Keeps the fewest first items whose weight reaches `wanted`; all when rounding keeps the sum below it.
fn keep_share<T>(
    items: &mut Vec<T>,
    wanted: f64,
    weight: impl Fn(&T) -> f64,
    compare: impl Fn(&T, &T) -> Ordering,
) {
    let (mut n_sorted, mut n_wanted) = (0, SHARE_FIRST);
    let mut sum = 0.0;
    while n_sorted < items.len() {
        // What is sorted already comes before all the rest.
        sort_first(&mut items[n_sorted..], n_wanted - n_sorted, &compare);
        let end = n_wanted.min(items.len());
        for idx in n_sorted..end {
            sum += weight(&items[idx]);
            if sum >= wanted {
                items.truncate(idx + 1);
                return;
            }
        }
        (n_sorted, n_wanted) = (end, n_wanted * 8);
    }
}

/// Keeps the candidates that weigh at least `min_p` of the heaviest one that is left.
fn keep_near_best(candidates: &mut Vec<Candidate>, min_p: f64) {
    let weights = candidates.iter().map(|candidate| candidate.weight);
    let least = min_p * weights.fold(0.0, f64::max);
    candidates.retain(|candidate| candidate.weight >= least);
}

fn total(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|candidate| candidate.weight).sum()
}

/// The candidate at `uniform` of the total weight. One without weight is never picked.
fn pick(candidates: &[Candidate], uniform: f64) -> usize {
    let target = uniform * total(candidates);
    let mut sum = 0.0;
    let mut last = None;
    for candidate in candidates.iter().filter(|candidate| candidate.weight > 0.0) {
        sum += candidate.weight;
        last = Some(candidate.token);
        if sum > target {
            break;
        }
    }
    last.expect("every filter keeps a candidate with weight")
}
