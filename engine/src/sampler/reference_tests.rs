//! The sampler against the distribution that its documentation promises, computed by another, straightforward way: whole
//! sorts, probabilities that are normalised after every filter, the library's exp and ln, and none of the sampler's code.

use super::sample;
use crate::executor::{GivenTokens, SampleSpec};
use std::collections::HashMap;
use std::sync::Arc;
use tidemill_core::{LogprobSpec, SamplingParams, TokenBias, TokenId};

/// Draws of each case.
const N_DRAWS: u32 = 4_000;
/// Draws of a case that looks wrong, from a stream of its own: what a wrong share adds to the statistic grows with the
/// draws, what bad luck added does not come again. (Case 58 is such a one: 64 of 22 degrees in its first 4,000 draws, 27 in
/// 2,000,000.)
const N_DRAWS_AGAIN: u32 = 40_000;
/// Standard normal quantile of one in thirty thousand.
const QUANTILE: f64 = 4.0;
/// Cases that may look wrong at first; the seeds are fixed, so their number is, too.
const N_SUSPECTS_MAX: u32 = 1;

/// SplitMix64, so that every case is the same everywhere.
struct Dice(u64);

impl Dice {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1_u32 << 24) as f32
    }

    fn between(&mut self, from: f32, to: f32) -> f32 {
        from + (to - from) * self.unit()
    }

    fn below(&mut self, n: u32) -> u32 {
        (self.bits() % u64::from(n)) as u32
    }

    /// `value` in one of three cases, else `neutral`.
    fn maybe<T>(&mut self, neutral: T, value: impl FnOnce(&mut Self) -> T) -> T {
        if self.below(3) == 0 {
            value(self)
        } else {
            neutral
        }
    }

    fn tokens(&mut self, n: u32, vocab_size: u32) -> Vec<TokenId> {
        (0..n).map(|_| self.below(vocab_size)).collect()
    }
}

fn random_case(dice: &mut Dice) -> (Vec<f32>, SampleSpec) {
    let vocab_size = 3 + dice.below(60);
    let spread = dice.between(0.5, 6.0);
    let mut logits: Vec<f32> = (0..vocab_size)
        .map(|_| dice.between(-spread, spread))
        .collect();
    // Some are barred by the model, some are equal.
    for idx in 1..logits.len() {
        match dice.below(12) {
            0 => logits[idx] = f32::NEG_INFINITY,
            1 => logits[idx] = logits[idx - 1],
            _ => {}
        }
    }
    logits[0] = dice.between(0.0, spread);
    let n_biases = dice.maybe(0, |dice| 1 + dice.below(4));
    let mut biased = dice.tokens(n_biases, vocab_size);
    biased.sort_unstable();
    biased.dedup();
    let bias = biased.into_iter().map(|token| TokenBias {
        token,
        bias: dice.between(-4.0, 4.0),
    });
    let logit_bias: Arc<[TokenBias]> = bias.collect();
    let params = SamplingParams {
        temperature: dice.between(0.2, 2.0),
        top_k: dice.maybe(0, |dice| 1 + dice.below(vocab_size + 3)),
        top_p: dice.maybe(1.0, |dice| dice.between(0.05, 1.0)),
        min_p: dice.maybe(0.0, |dice| dice.between(0.0, 0.6)),
        typical_p: dice.maybe(1.0, |dice| dice.between(0.05, 1.0)),
        repetition_penalty: dice.maybe(1.0, |dice| dice.between(0.5, 2.0)),
        presence_penalty: dice.maybe(0.0, |dice| dice.between(-2.0, 2.0)),
        frequency_penalty: dice.maybe(0.0, |dice| dice.between(-2.0, 2.0)),
        logit_bias,
        seed: dice.bits(),
    };
    let (n_prompt, n_output) = (1 + dice.below(8), dice.below(8));
    let n_barred = dice.maybe(0, |_| 1);
    let spec = SampleSpec {
        params,
        output_idx: 0,
        given: GivenTokens {
            prompt: dice.tokens(n_prompt, vocab_size),
            output: dice.tokens(n_output, vocab_size),
        },
        barred: dice.tokens(n_barred, vocab_size - 1),
        logprobs: LogprobSpec::default(),
    };
    // Token 0 is never barred, so something is left.
    let barred = spec.barred.iter().map(|token| token + 1).collect();
    (logits, SampleSpec { barred, ..spec })
}

fn adjusted(logits: &[f32], spec: &SampleSpec) -> Vec<f64> {
    let params = &spec.params;
    let mut n_output: HashMap<u32, f64> = HashMap::new();
    for &token in &spec.given.output {
        *n_output.entry(token).or_default() += 1.0;
    }
    let is_given = |token| spec.given.prompt.contains(&token) || n_output.contains_key(&token);
    let row = logits.iter().enumerate().map(|(idx, &logit)| {
        let token = idx as u32;
        let mut logit = f64::from(logit);
        if is_given(token) {
            let penalty = f64::from(params.repetition_penalty);
            logit = [logit * penalty, logit / penalty][usize::from(logit > 0.0)];
        }
        if let Some(n) = n_output.get(&token) {
            logit -= f64::from(params.frequency_penalty) * n + f64::from(params.presence_penalty);
        }
        let bias = params.logit_bias.iter().find(|bias| bias.token == token);
        logit += bias.map_or(0.0, |bias| f64::from(bias.bias));
        if spec.barred.contains(&token) {
            logit = f64::NEG_INFINITY;
        }
        logit
    });
    row.collect()
}

fn normalise(shares: &mut [f64]) {
    let total: f64 = shares.iter().sum();
    shares.iter_mut().for_each(|share| *share /= total);
}

/// Leaves the tokens of `order` up to the one with which their shares reach `enough`.
fn keep_share(shares: &mut [f64], order: &[usize], enough: f64) {
    let mut sum = 0.0;
    for &token in order {
        if sum >= enough {
            shares[token] = 0.0;
        }
        sum += shares[token];
    }
    normalise(shares);
}

fn probabilities(logits: &[f32], spec: &SampleSpec) -> Vec<f64> {
    let row = adjusted(logits, spec);
    let params = &spec.params;
    let weights = row.iter();
    let weights = weights.map(|logit| (logit / f64::from(params.temperature)).exp());
    let mut shares: Vec<f64> = weights.collect();
    normalise(&mut shares);
    let mut likely: Vec<usize> = (0..row.len()).collect();
    likely.sort_by(|&a, &b| row[b].partial_cmp(&row[a]).expect("no NaN"));
    if params.top_k > 0 {
        let beyond = likely.iter().skip(params.top_k as usize);
        beyond.for_each(|&token| shares[token] = 0.0);
        normalise(&mut shares);
    }
    if params.typical_p < 1.0 {
        let surprise = |share: f64| -share.ln();
        let possible = shares.iter().filter(|&&share| share > 0.0);
        let entropy: f64 = possible.map(|&share| share * surprise(share)).sum();
        let far = |token: usize| match shares[token] {
            share if share > 0.0 => (surprise(share) - entropy).abs(),
            _ => f64::INFINITY,
        };
        let mut typical = likely.clone();
        // Equal logits are equally far in the sampler; here they may differ in the last bit.
        typical.sort_by(|&a, &b| match (far(a) - far(b)).abs() < 1e-9 {
            true => std::cmp::Ordering::Equal,
            false => far(a).partial_cmp(&far(b)).expect("no NaN"),
        });
        keep_share(&mut shares, &typical, f64::from(params.typical_p));
    }
    if params.top_p < 1.0 {
        keep_share(&mut shares, &likely, f64::from(params.top_p));
    }
    let best = shares.iter().copied().fold(0.0, f64::max);
    let least = best * f64::from(params.min_p);
    for share in &mut shares {
        *share *= f64::from(u8::from(*share >= least));
    }
    normalise(&mut shares);
    shares
}

/// What chi-square with so many degrees of freedom exceeds about once in thirty thousand cases (Wilson and Hilferty).
fn chi_square_max(n_degrees: f64) -> f64 {
    let step = 2.0 / (9.0 * n_degrees);
    n_degrees * (1.0 - step + QUANTILE * step.sqrt()).powi(3)
}

/// How often each token comes in `n` draws; none may come that has no share.
fn count_draws(logits: &[f32], shares: &[f64], spec: &SampleSpec, n: u32) -> Vec<u32> {
    let mut counts = vec![0_u32; logits.len()];
    for output_idx in 0..n {
        let spec = SampleSpec {
            output_idx,
            ..spec.clone()
        };
        let token = sample(logits, &spec).expect("a good row").token as usize;
        assert!(shares[token] > 0.0, "token {token} has no share: {spec:?}");
        counts[token] += 1;
    }
    counts
}

/// Pearson's statistic and its degrees of freedom; rare tokens share a cell.
fn chi_square(counts: &[u32], shares: &[f64]) -> (f64, f64) {
    let n_draws = f64::from(counts.iter().sum::<u32>());
    let (mut statistic, mut n_cells) = (0.0, 0.0);
    let mut rare = (0.0, 0.0);
    let mut add = |found: f64, expected: f64| {
        statistic += (found - expected).powi(2) / expected;
        n_cells += 1.0;
    };
    for (&count, share) in counts.iter().zip(shares) {
        let (found, expected) = (f64::from(count), share * n_draws);
        if expected < 5.0 {
            rare = (rare.0 + found, rare.1 + expected);
        } else {
            add(found, expected);
        }
    }
    if rare.1 > 1.0 {
        add(rare.0, rare.1);
    }
    (statistic, n_cells - 1.0)
}

#[test]
fn draws_follow_the_exact_distribution_whatever_the_parameters() {
    let mut dice = Dice(2024);
    let (mut n_proper, mut n_cut, mut n_suspects) = (0, 0, 0);
    for case in 0..150 {
        let (logits, mut spec) = random_case(&mut dice);
        let shares = probabilities(&logits, &spec);
        n_cut += u32::from(shares.contains(&0.0));
        let counts = count_draws(&logits, &shares, &spec, N_DRAWS);
        let (statistic, n_degrees) = chi_square(&counts, &shares);
        if n_degrees < 1.0 {
            continue;
        }
        n_proper += 1;
        if statistic <= chi_square_max(n_degrees) {
            continue;
        }
        n_suspects += 1;
        spec.params.seed = !spec.params.seed;
        let counts = count_draws(&logits, &shares, &spec, N_DRAWS_AGAIN);
        let (statistic, n_degrees) = chi_square(&counts, &shares);
        let max = chi_square_max(n_degrees);
        assert!(
            statistic <= max,
            "case {case}: chi-square {statistic} of {n_degrees} degrees is above {max}: {spec:?}"
        );
    }
    assert!(
        n_suspects <= N_SUSPECTS_MAX,
        "{n_suspects} cases look wrong"
    );
    // The cases have to be such that both a wrong share and a wrong cut show.
    assert!(n_proper > 90 && n_cut > 60, "{n_proper} {n_cut}");
}

#[test]
fn greedy_takes_the_best_after_penalties_and_bias() {
    let mut dice = Dice(77);
    for _ in 0..500 {
        let (logits, mut spec) = random_case(&mut dice);
        spec.params.temperature = 0.0;
        let row = adjusted(&logits, &spec);
        let token = sample(&logits, &spec).expect("a good row").token as usize;
        let best = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        assert!(
            row[token] > best - 1e-5,
            "{} of {best}: {spec:?}",
            row[token]
        );
    }
}
