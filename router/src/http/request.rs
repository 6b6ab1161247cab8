//! What `/v1/chat/completions` and `/v1/completions` have in common, read and checked once.
//!
//! Reading is pure: bytes in, a typed request or a refusal out, with no model at hand. What needs the model
//! (token ids against the vocabulary, lengths against the context) is checked when the prompt becomes tokens.

use super::error::{ApiError, shown};
use super::fields::{Fields, integer, wrong_type};
use super::sampling::SamplingWish;
use serde_json::Value;
use tidemill_core::{TokenId, bounds};

/// Most choices for one prompt.
pub(super) const CHOICES_MAX: u32 = 8;
/// Most stop strings.
pub(super) const STOPS_MAX: usize = 4;
/// Longest stop string.
pub(super) const STOP_BYTES_MAX: usize = 256;
/// Longest model name.
const MODEL_BYTES_MAX: usize = 256;

/// The fields of both endpoints.
#[derive(Clone, PartialEq, Debug)]
pub struct Common {
    /// The model asked for; `None`: the one that is served.
    pub model: Option<String>,
    /// Answer by server-sent events.
    pub stream: bool,
    /// Close the stream with a chunk that holds the usage.
    pub include_usage: bool,
    /// Choices for each prompt, 1 to `CHOICES_MAX`.
    pub n: u32,
    /// Most output tokens; `None`: the endpoint's default.
    pub max_tokens: Option<u32>,
    /// No stop token before so many output tokens.
    pub min_tokens: u32,
    /// Sampling, where the client has a wish.
    pub sampling: SamplingWish,
    /// Stop strings, none of them empty.
    pub stop: Vec<String>,
    /// More stop tokens than the model's own.
    pub stop_token_ids: Vec<TokenId>,
    /// Do not end at the model's own stop tokens.
    pub ignore_eos: bool,
}

impl Common {
    pub(super) fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        let stream = fields.bool("stream")?.unwrap_or(false);
        Ok(Self {
            model: read_model(fields)?,
            stream,
            include_usage: read_stream_options(fields, stream)?,
            n: match fields.integer("n", 1..=i128::from(CHOICES_MAX))? {
                Some(n) => u32::try_from(n).expect("at most CHOICES_MAX"),
                None => 1,
            },
            max_tokens: read_max_tokens(fields)?,
            min_tokens: fields
                .count("min_tokens", bounds::SEQUENCE_TOKENS_MAX)?
                .unwrap_or(0),
            sampling: SamplingWish::read(fields)?,
            stop: read_stop(fields)?,
            stop_token_ids: read_stop_token_ids(fields)?,
            ignore_eos: fields.bool("ignore_eos")?.unwrap_or(false),
        })
    }
}

fn read_model(fields: &Fields<'_>) -> Result<Option<String>, ApiError> {
    match fields.text("model")? {
        Some(model) if model.len() > MODEL_BYTES_MAX => Err(ApiError::invalid(
            "model",
            format!(
                "model has {} bytes; at most {MODEL_BYTES_MAX} are allowed",
                model.len()
            ),
        )),
        model => Ok(model.map(str::to_owned)),
    }
}

fn read_stream_options(fields: &Fields<'_>, stream: bool) -> Result<bool, ApiError> {
    let Some(options) = fields.object("stream_options")? else {
        return Ok(false);
    };
    if !stream {
        return Err(ApiError::invalid(
            "stream_options",
            "stream_options is allowed only with \"stream\": true",
        ));
    }
    Ok(options.bool("include_usage")?.unwrap_or(false))
}

fn read_max_tokens(fields: &Fields<'_>) -> Result<Option<u32>, ApiError> {
    let max = bounds::SEQUENCE_TOKENS_MAX;
    let old = fields.count("max_tokens", max)?;
    let new = fields.count("max_completion_tokens", max)?;
    match (old, new) {
        (Some(old), Some(new)) if old != new => Err(ApiError::invalid(
            "max_completion_tokens",
            format!(
                "max_completion_tokens is {new} and max_tokens is {old}; give one of them, or the same value"
            ),
        )),
        (old, new) => Ok(new.or(old)),
    }
}

/// The name under which the client gave `max_tokens`.
pub(super) fn max_tokens_field(fields: &Fields<'_>) -> &'static str {
    match fields.get("max_completion_tokens") {
        Some(_) => "max_completion_tokens",
        None => "max_tokens",
    }
}

fn read_stop(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let values = match fields.get("stop") {
        Some(one @ Value::String(_)) => std::slice::from_ref(one),
        _ => fields.array("stop", STOPS_MAX)?.unwrap_or_default(),
    };
    values.iter().map(read_stop_string).collect()
}

fn read_stop_string(value: &Value) -> Result<String, ApiError> {
    let Value::String(stop) = value else {
        return Err(wrong_type("stop", "a string or an array of strings", value));
    };
    if (1..=STOP_BYTES_MAX).contains(&stop.len()) {
        return Ok(stop.clone());
    }
    let message = format!(
        "stop holds {}, which has {} bytes; 1 to {STOP_BYTES_MAX} are allowed",
        shown(stop),
        stop.len()
    );
    Err(ApiError::invalid("stop", message))
}

fn read_stop_token_ids(fields: &Fields<'_>) -> Result<Vec<TokenId>, ApiError> {
    let values = fields
        .array("stop_token_ids", bounds::STOP_TOKENS_MAX)?
        .unwrap_or_default();
    read_token_ids(values, "stop_token_ids")
}

/// Token ids; whether the vocabulary has them is checked later.
pub(super) fn read_token_ids(values: &[Value], path: &str) -> Result<Vec<TokenId>, ApiError> {
    let allowed = 0..=i128::from(TokenId::MAX);
    let ids = values.iter().map(|value| {
        let id = integer(value, path, allowed.clone())?;
        Ok(TokenId::try_from(id).expect("within the range"))
    });
    ids.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(body: Value) -> Result<Common, ApiError> {
        Common::read(&Fields::of(&body, String::new())?)
    }

    fn param(body: Value) -> String {
        let error = read(body).expect_err("refused");
        error.param.expect("names its field")
    }

    #[test]
    fn b110_the_number_of_choices_and_of_tokens() {
        for (field, bad) in [
            ("n", json!(0)),
            ("n", json!(9)),
            ("min_tokens", json!(-1)),
            ("min_tokens", json!(1.5)),
            ("min_tokens", json!(1_u64 << 32)),
        ] {
            assert_eq!(param(json!({field: bad})), field);
        }
        // Held against max_tokens when that is known.
        assert_eq!(read(json!({"min_tokens": 9})).expect("yet").min_tokens, 9);
        assert_eq!(read(json!({})).expect("none").min_tokens, 0);
    }

    #[test]
    fn b108_stop_strings_are_bounded() {
        let many = vec!["x".repeat(10_000); 10_000];
        assert_eq!(param(json!({"stop": many})), "stop");
        assert_eq!(param(json!({"stop": ["a", "b", "c", "d", "e"]})), "stop");
        assert_eq!(param(json!({"stop": "x".repeat(257)})), "stop");
        assert_eq!(param(json!({"stop": ""})), "stop");
        assert_eq!(param(json!({"stop": [1]})), "stop");
        assert_eq!(param(json!({"stop": {"a": 1}})), "stop");
        assert_eq!(read(json!({"stop": "a"})).expect("one").stop, ["a"]);
        assert_eq!(
            read(json!({"stop": ["a", "b"]})).expect("two").stop,
            ["a", "b"]
        );
        assert!(read(json!({"stop": null})).expect("none").stop.is_empty());
    }

    #[test]
    fn the_two_names_of_max_tokens_must_agree() {
        let max = |body| read(body).map(|common| common.max_tokens);
        assert_eq!(max(json!({"max_tokens": 5})), Ok(Some(5)));
        assert_eq!(max(json!({"max_completion_tokens": 6})), Ok(Some(6)));
        assert_eq!(
            max(json!({"max_tokens": 5, "max_completion_tokens": 5})),
            Ok(Some(5))
        );
        assert!(max(json!({"max_tokens": 5, "max_completion_tokens": 6})).is_err());
        for bad in [
            json!(-1),
            json!(1_u64 << 31),
            json!(1_u64 << 63),
            json!(1.5),
            json!("10"),
        ] {
            assert_eq!(param(json!({"max_tokens": bad})), "max_tokens");
        }
    }

    #[test]
    fn stream_options_need_a_stream() {
        let body = json!({"stream": true, "stream_options": {"include_usage": true}});
        assert!(read(body).expect("allowed").include_usage);
        assert_eq!(param(json!({"stream_options": {}})), "stream_options");
    }

    #[test]
    fn b022_stop_token_ids_are_bounded() {
        assert_eq!(param(json!({"stop_token_ids": [-1]})), "stop_token_ids");
        assert_eq!(
            param(json!({"stop_token_ids": vec![1; 65]})),
            "stop_token_ids"
        );
        let common = read(json!({"stop_token_ids": [1, 2]})).expect("allowed");
        assert_eq!(common.stop_token_ids, [1, 2]);
    }
}
