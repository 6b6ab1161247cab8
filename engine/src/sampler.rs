//! From logits to a token.
//!
//! Every row is drawn by itself: the result depends on its logits, its parameters and (seed, output index), not on
//! company, order or machine. All arithmetic is f64 in a fixed order with our own exp and ln, since those of two
//! C libraries differ in the last bit. The order of filters is temperature, top-k, top-p; equal logits go to the
//! lower id. A row without usable numbers is an error of that row, never a silent guess.

mod philox;
mod real;
#[cfg(test)]
mod tests;

use crate::executor::{PromptLogprob, SampleSpec};
use std::cmp::Ordering;
use tidemill_core::{Failure, FailureCode, SampledToken, SamplingParams, TokenId, TokenLogprob};
use xxhash_rust::xxh3::Xxh3;

/// How many candidates a nucleus is looked for in at first; grows eightfold until it is found.
const NUCLEUS_FIRST: usize = 64;

/// One token that may be drawn. `weight` is its probability times a constant.
#[derive(Clone, Copy)]
struct Candidate {
    token: usize,
    weight: f64,
}

/// Draws one token. `logits` has one entry for each token of the vocabulary; negative infinity bars a token.
///
/// # Errors
/// `NumericFault` when a logit is NaN or positive infinity, or when every token is barred.
pub fn sample(logits: &[f32], spec: &SampleSpec) -> Result<SampledToken, Failure> {
    let best = best_token(logits)?;
    let token = if spec.params.is_greedy() {
        best
    } else {
        let uniform = philox::uniform(spec.params.seed, spec.output_idx);
        draw(logits, logits[best], &spec.params, uniform)
    };
    let mut sampled = SampledToken {
        token: id(token),
        output_idx: spec.output_idx,
        logprob: None,
        top: Vec::new(),
        logits_digest: spec.logprobs.logits_digest.then(|| digest(logits)),
    };
    if let Some(n_top) = spec.logprobs.output_top {
        let raw = LogDistribution::new(logits, logits[best]);
        sampled.logprob = Some(raw.logprob(logits[token]));
        sampled.top = raw.top(logits, n_top as usize);
    }
    Ok(sampled)
}

/// Log-probability of a token that is already known.
///
/// # Errors
/// `NumericFault` as for `sample`; `InvalidRequest` when the vocabulary has no such token.
pub fn prompt_logprob(
    logits: &[f32],
    target: TokenId,
    n_top: u32,
) -> Result<PromptLogprob, Failure> {
    let best = best_token(logits)?;
    let Some(&logit) = logits.get(target as usize) else {
        return Err(Failure::new(
            FailureCode::InvalidRequest,
            format!(
                "prompt holds token id {target}; the vocabulary has ids below {}",
                logits.len()
            ),
        ));
    };
    let raw = LogDistribution::new(logits, logits[best]);
    Ok(PromptLogprob {
        logprob: raw.logprob(logit),
        top: raw.top(logits, n_top as usize),
    })
}

/// The most likely token; the lowest id among equals.
fn best_token(logits: &[f32]) -> Result<usize, Failure> {
    let mut best: Option<(usize, f32)> = None;
    for (token, &logit) in logits.iter().enumerate() {
        if logit.is_nan() || logit == f32::INFINITY {
            return Err(Failure::new(
                FailureCode::NumericFault,
                format!("logit {token} is {logit}; only finite values and -inf have a probability"),
            ));
        }
        if logit > best.map_or(f32::NEG_INFINITY, |(_, logit)| logit) {
            best = Some((token, logit));
        }
    }
    best.map(|(token, _)| token).ok_or_else(|| {
        Failure::new(
            FailureCode::NumericFault,
            format!(
                "none of {} logits is above -inf: no token can be drawn",
                logits.len()
            ),
        )
    })
}

/// Draws from the filtered distribution; `uniform` lies in [0, 1).
fn draw(logits: &[f32], max: f32, params: &SamplingParams, uniform: f64) -> usize {
    let mut tokens: Vec<usize> = (0..logits.len()).collect();
    let top_k = params.top_k as usize;
    if top_k > 0 && top_k < tokens.len() {
        sort_best(&mut tokens, logits, top_k);
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
    if params.top_p < 1.0 {
        keep_nucleus(&mut candidates, logits, f64::from(params.top_p));
    }
    pick(&candidates, uniform)
}

/// More likely first; of equals the lower id first. By logit, since weights may underflow to equal zeros.
fn by_likelihood(logits: &[f32], a: usize, b: usize) -> Ordering {
    let order = logits[b].partial_cmp(&logits[a]);
    order.expect("NaN was refused before").then(a.cmp(&b))
}

/// Puts the `n_best` most likely items first, in order.
fn sort_best<T: Copy + Into<usize>>(items: &mut [T], logits: &[f32], n_best: usize) {
    let compare = |a: &T, b: &T| by_likelihood(logits, (*a).into(), (*b).into());
    if n_best < items.len() {
        items.select_nth_unstable_by(n_best, compare);
    }
    let n_best = n_best.min(items.len());
    items[..n_best].sort_unstable_by(compare);
}

impl From<Candidate> for usize {
    fn from(candidate: Candidate) -> Self {
        candidate.token
    }
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
    let mut n_sorted = NUCLEUS_FIRST;
    loop {
        sort_best(candidates, logits, n_sorted);
        let mut sum = 0.0;
        for (idx, candidate) in candidates.iter().take(n_sorted).enumerate() {
            sum += candidate.weight;
            if sum >= wanted {
                candidates.truncate(idx + 1);
                return;
            }
        }
        if n_sorted >= candidates.len() {
            // Rounding kept the sum below: all of them are wanted.
            return;
        }
        n_sorted *= 8;
    }
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
    last.expect("the most likely token has weight 1")
}

/// The raw distribution, before temperature and filters, by its logarithm.
struct LogDistribution {
    max: f64,
    log_total: f64,
}

impl LogDistribution {
    fn new(logits: &[f32], max: f32) -> Self {
        let max = f64::from(max);
        let weights = logits
            .iter()
            .map(|&logit| real::exp(f64::from(logit) - max));
        Self {
            max,
            log_total: real::ln(weights.sum()),
        }
    }

    /// Natural log of the probability; negative infinity for a barred token.
    #[expect(clippy::cast_possible_truncation, reason = "reported in f32")]
    fn logprob(&self, logit: f32) -> f32 {
        (f64::from(logit) - self.max - self.log_total) as f32
    }

    /// The most likely tokens, best first.
    fn top(&self, logits: &[f32], n_top: usize) -> Vec<TokenLogprob> {
        let n_top = n_top.min(logits.len());
        // A short sorted list: `n_top` is at most 20, the vocabulary is long.
        let mut top: Vec<usize> = Vec::with_capacity(n_top + 1);
        for token in 0..logits.len() {
            let is_full = top.len() == n_top;
            if is_full && top.last().is_none_or(|&last| logits[token] <= logits[last]) {
                continue;
            }
            let place = top.partition_point(|&other| logits[other] >= logits[token]);
            top.insert(place, token);
            top.truncate(n_top);
        }
        let named = top.into_iter().map(|token| TokenLogprob {
            token: id(token),
            logprob: self.logprob(logits[token]),
        });
        named.collect()
    }
}

/// xxh3 of the row's bytes, little endian.
fn digest(logits: &[f32]) -> u64 {
    let mut hasher = Xxh3::new();
    let mut bytes = [0_u8; 256];
    for run in logits.chunks(bytes.len() / 4) {
        for (target, logit) in bytes.chunks_exact_mut(4).zip(run) {
            target.copy_from_slice(&logit.to_le_bytes());
        }
        hasher.update(&bytes[..run.len() * 4]);
    }
    hasher.digest()
}

fn id(token: usize) -> TokenId {
    TokenId::try_from(token).expect("a vocabulary is counted in u32")
}
