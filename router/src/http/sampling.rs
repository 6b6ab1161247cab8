//! The fields that say how tokens are drawn, and what they become for the nodes.
//!
//! A client names a few of them; the rest comes from the model's recommendation, else from the neutral value. Bounds are
//! those of core's shared check, which runs on the result as well; here they are held against the number as the client
//! wrote it, so that a refusal repeats that number. Whether the vocabulary has a token is checked there alone.

use super::error::{ApiError, shown};
use super::fields::{Fields, wrong_type};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use tidemill_core::{SamplingParams, TokenBias, TokenId, bounds};
use tidemill_model_files::text::GenerationDefaults;

/// Sampling parameters that the client gave; the rest comes from the model's defaults.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct SamplingWish {
    /// 0 to 2.
    pub temperature: Option<f32>,
    /// Above 0 to 1.
    pub top_p: Option<f32>,
    /// 0 keeps all.
    pub top_k: Option<u32>,
    /// 0 to 1.
    pub min_p: Option<f32>,
    /// Above 0 to 1.
    pub typical_p: Option<f32>,
    /// 0.01 to 10.
    pub repetition_penalty: Option<f32>,
    /// -2 to 2.
    pub presence_penalty: Option<f32>,
    /// -2 to 2.
    pub frequency_penalty: Option<f32>,
    /// At most 1024, each -100 to 100, in ascending order of tokens.
    pub logit_bias: Vec<TokenBias>,
    /// Any 64 bits.
    pub seed: Option<u64>,
}

impl SamplingWish {
    pub(super) fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        let share = |name| fields.number(name, "above 0 up to 1", |p| p > 0.0 && p <= 1.0);
        let penalty = -bounds::PENALTY_MAX..=bounds::PENALTY_MAX;
        let repetition = bounds::REPETITION_PENALTY_MIN..=bounds::REPETITION_PENALTY_MAX;
        let top_k = fields.integer("top_k", -1..=i128::from(u32::MAX))?;
        let seed = fields.integer("seed", i128::from(i64::MIN)..=i128::from(u64::MAX))?;
        // A value too small for f32 keeps the one first token, as it would in f64.
        let above_zero = |share: f64| (share as f32).max(f32::MIN_POSITIVE);
        Ok(Self {
            temperature: within(fields, "temperature", 0.0..=bounds::TEMPERATURE_MAX)?,
            top_p: share("top_p")?.map(above_zero),
            top_k: top_k.map(|k| u32::try_from(k.max(0)).expect("within the range")),
            min_p: within(fields, "min_p", 0.0..=1.0)?,
            typical_p: share("typical_p")?.map(above_zero),
            repetition_penalty: within(fields, "repetition_penalty", repetition)?,
            presence_penalty: within(fields, "presence_penalty", penalty.clone())?,
            frequency_penalty: within(fields, "frequency_penalty", penalty)?,
            logit_bias: read_logit_bias(fields)?,
            // Two's complement: -1 is the seed 2^64 - 1.
            seed: seed.map(|seed| seed as u64),
        })
    }

    /// The wish, completed. Without a seed it is 0: each choice gets its own.
    pub(super) fn params(&self, defaults: &GenerationDefaults) -> SamplingParams {
        let neutral = SamplingParams::greedy();
        let or = |wish: Option<f32>, neutral| wish.unwrap_or(neutral);
        SamplingParams {
            temperature: or(self.temperature.or(defaults.temperature), 1.0),
            top_k: self.top_k.or(defaults.top_k).unwrap_or(neutral.top_k),
            top_p: or(self.top_p.or(defaults.top_p), neutral.top_p),
            min_p: or(self.min_p, neutral.min_p),
            typical_p: or(self.typical_p, neutral.typical_p),
            repetition_penalty: or(self.repetition_penalty, neutral.repetition_penalty),
            presence_penalty: or(self.presence_penalty, neutral.presence_penalty),
            frequency_penalty: or(self.frequency_penalty, neutral.frequency_penalty),
            logit_bias: self.logit_bias.as_slice().into(),
            seed: self.seed.unwrap_or(0),
        }
    }
}

/// A number that the nodes hold as f32.
fn within(
    fields: &Fields<'_>,
    name: &str,
    allowed: RangeInclusive<f32>,
) -> Result<Option<f32>, ApiError> {
    let words = format!("{} to {}", allowed.start(), allowed.end());
    // Rounded to f32 after the check, a number within the bounds stays within them.
    let wide = f64::from(*allowed.start())..=f64::from(*allowed.end());
    let number = fields.number(name, &words, |number| wide.contains(&number))?;
    // Adding zero turns -0 into 0.
    Ok(number.map(|number| number as f32 + 0.0))
}

/// OpenAI's form: an object from token ids, which JSON has to write as strings, to numbers.
fn read_logit_bias(fields: &Fields<'_>) -> Result<Vec<TokenBias>, ApiError> {
    const NAME: &str = "logit_bias";
    let path = fields.path(NAME);
    let map = match fields.get(NAME) {
        None => return Ok(Vec::new()),
        Some(Value::Object(map)) => map,
        // Some languages write an empty map so.
        Some(Value::Array(values)) if values.is_empty() => return Ok(Vec::new()),
        Some(other) => {
            let expected = "an object from token ids to numbers";
            return Err(wrong_type(&path, expected, other));
        }
    };
    if map.len() > bounds::LOGIT_BIASES_MAX {
        let message = format!(
            "{path} has {} entries; at most {} are allowed",
            map.len(),
            bounds::LOGIT_BIASES_MAX
        );
        return Err(ApiError::invalid(path, message));
    }
    let entries = map.iter().map(|(key, value)| {
        let token = read_token_key(key, &path)?;
        Ok((token, read_bias(token, value, &path)?))
    });
    let entries = entries.collect::<Result<BTreeMap<_, _>, ApiError>>()?;
    let entries = entries.into_iter();
    Ok(entries
        .map(|(token, bias)| TokenBias { token, bias })
        .collect())
}

/// Digits as they are printed: two spellings of one id could contradict each other.
fn read_token_key(key: &str, path: &str) -> Result<TokenId, ApiError> {
    let token: Option<TokenId> = key.parse().ok();
    match token.filter(|token| token.to_string() == key) {
        Some(token) => Ok(token),
        None => Err(ApiError::invalid(
            path,
            format!(
                "{path} has the key {}; token ids in plain digits are allowed",
                shown(key)
            ),
        )),
    }
}

fn read_bias(token: TokenId, value: &Value, path: &str) -> Result<f32, ApiError> {
    let Some(bias) = value.as_f64() else {
        let member = format!("{path}.{token}");
        let error = wrong_type(&member, "a number", value);
        return Err(ApiError::invalid(path, error.message));
    };
    let max = f64::from(bounds::LOGIT_BIAS_MAX);
    if (-max..=max).contains(&bias) {
        return Ok(bias as f32);
    }
    Err(ApiError::invalid(
        path,
        format!("{path} is {value} for token id {token}; -{max} to {max} is allowed"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(body: Value) -> Result<SamplingWish, ApiError> {
        SamplingWish::read(&Fields::of(&body, String::new())?)
    }

    fn wish(body: Value) -> SamplingWish {
        read(body).expect("allowed")
    }

    fn refusal(body: Value) -> ApiError {
        read(body).expect_err("refused")
    }

    #[test]
    fn b110_edge_values_of_sampling() {
        for (field, bad) in [
            ("top_p", json!(0)),
            ("top_p", json!(1.000_000_1)),
            ("top_p", json!(-0.1)),
            ("top_k", json!(-2)),
            ("top_k", json!(1_u64 << 32)),
            ("top_k", json!(1.5)),
            ("temperature", json!(2.0001)),
            ("temperature", json!(-0.1)),
            ("temperature", json!("1")),
            ("min_p", json!(-1e-9)),
            ("min_p", json!(1.000_000_1)),
            ("typical_p", json!(0)),
            ("typical_p", json!(1.1)),
            ("repetition_penalty", json!(0)),
            ("repetition_penalty", json!(0.009)),
            ("repetition_penalty", json!(10.001)),
            ("presence_penalty", json!(-2.000_1)),
            ("presence_penalty", json!("0")),
            ("frequency_penalty", json!(2.000_1)),
            ("frequency_penalty", json!([])),
            ("seed", json!(18_446_744_073_709_551_616.0)),
            ("seed", json!(0.5)),
        ] {
            let error = refusal(json!({field: bad}));
            assert_eq!(error.param.as_deref(), Some(field));
            assert!(error.message.starts_with(field), "{error}");
        }
        assert_eq!(wish(json!({"top_p": 1})).top_p, Some(1.0));
        assert_eq!(wish(json!({"top_p": 1e-60})).top_p, Some(f32::MIN_POSITIVE));
        assert_eq!(
            wish(json!({"typical_p": 1e-60})).typical_p,
            Some(f32::MIN_POSITIVE)
        );
        assert_eq!(wish(json!({"top_k": -1})).top_k, Some(0));
        assert_eq!(
            wish(json!({"top_k": 4_000_000_000_u32})).top_k,
            Some(4_000_000_000)
        );
        assert_eq!(wish(json!({"min_p": 1})).min_p, Some(1.0));
        assert_eq!(wish(json!({"min_p": 0})).min_p, Some(0.0));
        assert_eq!(
            wish(json!({"repetition_penalty": 0.01})).repetition_penalty,
            Some(0.01)
        );
        assert_eq!(
            wish(json!({"presence_penalty": -2})).presence_penalty,
            Some(-2.0)
        );
        assert_eq!(wish(json!({"seed": -1})).seed, Some(u64::MAX));
        assert_eq!(wish(json!({"seed": u64::MAX})).seed, Some(u64::MAX));
        assert_eq!(wish(json!({"temperature": null})).temperature, None);
        let zero = wish(json!({"temperature": -0.0})).temperature;
        assert_eq!(zero.expect("given").to_bits(), 0);
        assert_eq!(
            wish(json!({"temperature": 1e-45})).temperature,
            Some(f32::from_bits(1))
        );
    }

    #[test]
    fn whatever_is_accepted_here_holds_for_the_shared_check() {
        for body in [
            json!({}),
            json!({"temperature": 2, "top_p": 1e-300, "top_k": 4_294_967_295_u32, "min_p": 1e-300, "typical_p": 5e-324}),
            json!({"repetition_penalty": 0.01, "presence_penalty": -2, "frequency_penalty": 2, "min_p": 1.0}),
            json!({"repetition_penalty": 10.0, "logit_bias": {"9": -100, "0": 100, "3": 1e-300}}),
        ] {
            let prompt = wish(body).params(&GenerationDefaults::default());
            let spec = tidemill_core::SequenceSpec {
                request_id: tidemill_core::RequestId(1),
                prompt: vec![1],
                emitted: vec![],
                namespace: String::new(),
                block_hashes: vec![],
                sampling: prompt,
                stop: tidemill_core::StopConditions {
                    max_tokens: 1,
                    min_tokens: 1,
                    stop_token_ids: vec![],
                },
                logprobs: tidemill_core::LogprobSpec::default(),
                deadline: tidemill_core::Timestamp(1),
                traceparent: String::new(),
            };
            assert_eq!(spec.check(10, 10), Ok(()));
        }
    }

    #[test]
    fn b021_biases_are_read_in_openais_form() {
        let bias = |token, bias| TokenBias { token, bias };
        assert_eq!(
            wish(json!({"logit_bias": {"50256": -100, "7": 1.5, "10": 100}})).logit_bias,
            [bias(7, 1.5), bias(10, 100.0), bias(50256, -100.0)]
        );
        for nothing in [json!(null), json!({}), json!([])] {
            assert!(wish(json!({"logit_bias": nothing})).logit_bias.is_empty());
        }
        let many = |n: u32| (0..n).map(|token| (token.to_string(), json!(1)));
        let most: serde_json::Map<_, _> = many(1024).collect();
        assert_eq!(wish(json!({"logit_bias": most})).logit_bias.len(), 1024);
        let more: serde_json::Map<_, _> = many(1025).collect();
        for bad in [
            json!(more),
            json!({"-1": 1}),
            json!({"abc": 1}),
            json!({"": 1}),
            json!({"+1": 1}),
            json!({"01": 1}),
            json!({"1.0": 1}),
            json!({"4294967296": 1}),
            json!({"1": 1e9}),
            json!({"1": 1e308}),
            json!({"1": -100.001}),
            json!({"1": "1"}),
            json!({"1": null}),
            json!({"1": true}),
            json!([1]),
            json!("x"),
            json!(5),
        ] {
            let error = refusal(json!({"logit_bias": bad}));
            assert_eq!(error.param.as_deref(), Some("logit_bias"), "{error}");
        }
        let long = refusal(json!({"logit_bias": {"x".repeat(10_000): 1}}));
        assert!(long.message.len() < 300);
    }
}
