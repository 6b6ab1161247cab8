//! From logits to a token. This is the one place that states the order of the pipeline:
//!
//! 1. `adjust`: repetition penalty (it looks at a logit's sign, so it comes before anything is added), presence and frequency
//!    penalty, bias (the client's last word about a token), then barred tokens (a bias cannot bring one back). On logits, since
//!    that is where OpenAI's and the paper's formulas are.
//! 2. Temperature: it changes every share, and the filters below judge shares. Below 1e-4 the most likely token is taken here.
//! 3. Top-k, typical, top-p, min-p: each judges what the one before has left, the cheap cut by count first and the cut
//!    relative to the best of the rest last. Each keeps at least one token.
//! 4. The draw.
//!
//! Every row is drawn by itself: the result depends on its logits, its parameters, the tokens given so far and (seed, output
//! index), not on company, order or machine. All arithmetic is f64 in a fixed order with our own exp and ln, since those of two
//! C libraries differ in the last bit. Equal logits go to the lower id. Log-probabilities are of the raw distribution,
//! before step 1. A row without usable numbers is an error of that row, never a silent guess.

mod adjust;
mod filter;
mod philox;
mod real;
#[cfg(test)]
mod reference_tests;
#[cfg(test)]
mod tests;

use crate::executor::{PromptLogprob, SampleSpec};
use tidemill_core::{Failure, FailureCode, SampledToken, TokenId, TokenLogprob};
use xxhash_rust::xxh3::Xxh3;

/// Draws one token. `logits` has one entry for each token of the vocabulary; negative infinity bars a token.
///
/// # Errors
/// `NumericFault` when a logit is NaN or positive infinity, or when every token is barred. `InvalidRequest` when what
/// the client asked for leaves no token, or names one that the vocabulary lacks.
pub fn sample(logits: &[f32], spec: &SampleSpec) -> Result<SampledToken, Failure> {
    let best = best_token(logits)?;
    let token = match adjust::adjusted(logits, spec)? {
        Some(adjusted) => {
            let best = best_token(&adjusted).map_err(|_| nothing_left(spec))?;
            choose(&adjusted, best, spec)
        }
        None => choose(logits, best, spec),
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

/// Steps 2 to 4.
fn choose(logits: &[f32], best: usize, spec: &SampleSpec) -> usize {
    if spec.params.is_greedy() {
        return best;
    }
    let uniform = philox::uniform(spec.params.seed, spec.output_idx);
    filter::draw(logits, logits[best], &spec.params, uniform)
}

fn nothing_left(spec: &SampleSpec) -> Failure {
    Failure::new(
        FailureCode::InvalidRequest,
        format!(
            "min_tokens bars {} stop tokens before it, and output token {} has no other to be; ask for less",
            spec.barred.len(),
            spec.output_idx
        ),
    )
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

/// The raw distribution, before penalties, bias, temperature and filters, by its logarithm.
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
