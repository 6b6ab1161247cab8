//! How the next token is drawn, as plain values with their bounds.
//!
//! Each field has a neutral value at which it does nothing, so that a request which does not name it draws what it
//! would have drawn without the field. `check` is the part of the shared check that concerns them: the router runs it at
//! its edge, and nodes run it again. The order in which the fields act is stated where they act, in the engine's sampler.

use crate::bounds;
use crate::failure::Failure;
use crate::ids::TokenId;
use crate::request::invalid;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// What the client adds to one token's logit.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TokenBias {
    /// Which token.
    pub token: TokenId,
    /// -100 to 100.
    pub bias: f32,
}

/// How the next token is drawn from the logits.
#[derive(Clone, PartialEq, Debug)]
pub struct SamplingParams {
    /// 0 to 2; below 1e-4 greedy.
    pub temperature: f32,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of most likely tokens whose probability reaches this; above 0 to 1.
    pub top_p: f32,
    /// Keep tokens at least this likely, relative to the most likely one; 0 to 1, 0 keeps all.
    pub min_p: f32,
    /// Keep the smallest set of most typical tokens whose probability reaches this; above 0 to 1, 1 keeps all.
    pub typical_p: f32,
    /// Divides positive logits of tokens of prompt and output, multiplies negative ones; 0.01 to 10, neutral at 1.
    pub repetition_penalty: f32,
    /// Goes off the logit of each token of the output; -2 to 2.
    pub presence_penalty: f32,
    /// Goes off the logit of each token of the output, once for each time that it is there; -2 to 2.
    pub frequency_penalty: f32,
    /// Added to logits; at most 1024, in ascending order of tokens.
    pub logit_bias: Arc<[TokenBias]>,
    /// Seed of the counter-based generator; always set (the router draws one when the client gave none).
    pub seed: u64,
}

impl SamplingParams {
    /// The most likely token, always.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Arc::default(),
            seed: 0,
        }
    }

    /// True when no randomness is used.
    pub fn is_greedy(&self) -> bool {
        self.temperature < bounds::TEMPERATURE_GREEDY_BELOW
    }

    /// True when the tokens given so far change what is drawn.
    #[expect(clippy::float_cmp, reason = "the neutral values themselves")]
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }

    pub(crate) fn check(&self, vocab_size: u32) -> Result<(), Failure> {
        within(
            "temperature",
            self.temperature,
            0.0..=bounds::TEMPERATURE_MAX,
        )?;
        above_zero("top_p", self.top_p)?;
        within("min_p", self.min_p, 0.0..=1.0)?;
        above_zero("typical_p", self.typical_p)?;
        within(
            "repetition_penalty",
            self.repetition_penalty,
            bounds::REPETITION_PENALTY_MIN..=bounds::REPETITION_PENALTY_MAX,
        )?;
        let penalty = -bounds::PENALTY_MAX..=bounds::PENALTY_MAX;
        within("presence_penalty", self.presence_penalty, penalty.clone())?;
        within("frequency_penalty", self.frequency_penalty, penalty)?;
        self.check_bias(vocab_size)
    }

    fn check_bias(&self, vocab_size: u32) -> Result<(), Failure> {
        let entries = &self.logit_bias;
        if entries.len() > bounds::LOGIT_BIASES_MAX {
            return Err(invalid(format!(
                "logit_bias has {} entries; at most {} are allowed",
                entries.len(),
                bounds::LOGIT_BIASES_MAX
            )));
        }
        for &TokenBias { token, bias } in entries.iter() {
            if token >= vocab_size {
                return Err(invalid(format!(
                    "logit_bias holds token id {token}; the vocabulary has ids below {vocab_size}"
                )));
            }
            if !(-bounds::LOGIT_BIAS_MAX..=bounds::LOGIT_BIAS_MAX).contains(&bias) {
                return Err(invalid(format!(
                    "logit_bias is {bias} for token id {token}; -{max} to {max} is allowed",
                    max = bounds::LOGIT_BIAS_MAX
                )));
            }
        }
        match entries.windows(2).find(|two| two[0].token >= two[1].token) {
            Some(two) => Err(invalid(format!(
                "logit_bias holds token id {} after {}; each token once, in ascending order, is allowed",
                two[1].token, two[0].token
            ))),
            None => Ok(()),
        }
    }
}

fn within(field: &str, value: f32, allowed: RangeInclusive<f32>) -> Result<(), Failure> {
    if allowed.contains(&value) {
        return Ok(());
    }
    Err(invalid(format!(
        "{field} is {value}; {} to {} is allowed",
        allowed.start(),
        allowed.end()
    )))
}

fn above_zero(field: &str, value: f32) -> Result<(), Failure> {
    if value > 0.0 && value <= 1.0 {
        return Ok(());
    }
    Err(invalid(format!(
        "{field} is {value}; above 0 up to 1 is allowed"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(field: &str, value: f32) -> SamplingParams {
        let mut params = SamplingParams::greedy();
        *match field {
            "temperature" => &mut params.temperature,
            "top_p" => &mut params.top_p,
            "min_p" => &mut params.min_p,
            "typical_p" => &mut params.typical_p,
            "repetition_penalty" => &mut params.repetition_penalty,
            "presence_penalty" => &mut params.presence_penalty,
            _ => &mut params.frequency_penalty,
        } = value;
        params
    }

    #[test]
    fn every_number_has_bounds_and_nan_is_refused_by_name() {
        let nan = f32::NAN;
        let inf = f32::INFINITY;
        for (field, good, bad) in [
            ("temperature", [0.0, 2.0], [nan, -0.1, 2.000_1, inf]),
            ("top_p", [1e-45, 1.0], [nan, 0.0, 1.000_000_1, -1.0]),
            ("min_p", [0.0, 1.0], [nan, -1e-9, 1.000_000_1, inf]),
            ("typical_p", [1e-45, 1.0], [nan, 0.0, 1.000_000_1, -inf]),
            ("repetition_penalty", [0.01, 10.0], [nan, 0.0, 10.1, -1.0]),
            ("presence_penalty", [-2.0, 2.0], [nan, -2.1, 2.1, inf]),
            ("frequency_penalty", [-2.0, 2.0], [nan, -2.1, 2.1, -inf]),
        ] {
            for value in good {
                assert_eq!(set(field, value).check(10), Ok(()), "{field} {value}");
            }
            for value in bad {
                let error = set(field, value).check(10).expect_err(field);
                assert!(error.message.starts_with(field), "{error}");
            }
        }
    }

    fn biased(entries: &[(TokenId, f32)]) -> Result<(), Failure> {
        let entries = entries.iter();
        let entries = entries.map(|&(token, bias)| TokenBias { token, bias });
        SamplingParams {
            logit_bias: entries.collect(),
            ..SamplingParams::greedy()
        }
        .check(2000)
    }

    #[test]
    fn b021_biases_lie_in_the_vocabulary_and_within_their_bound() {
        assert_eq!(biased(&[(0, -100.0), (1999, 100.0)]), Ok(()));
        let many: Vec<_> = (0..1025).map(|token| (token, 1.0)).collect();
        assert_eq!(biased(&many[..1024]), Ok(()));
        for bad in [
            &many[..],
            &[(2000, 1.0)],
            &[(u32::MAX, 1.0)],
            &[(1, f32::NAN)],
            &[(1, f32::INFINITY)],
            &[(1, 100.1)],
            &[(1, -1e38)],
            &[(2, 1.0), (2, 1.0)],
            &[(2, 1.0), (1, 1.0)],
        ] {
            let error = biased(bad).expect_err("refused");
            assert!(error.message.starts_with("logit_bias"), "{error}");
        }
    }

    #[test]
    fn only_penalties_look_at_what_was_given() {
        assert!(!SamplingParams::greedy().has_penalties());
        for field in [
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ] {
            assert!(set(field, 0.5).has_penalties());
        }
        assert!(!set("min_p", 0.5).has_penalties());
    }
}
