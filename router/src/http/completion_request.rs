//! The body of `/v1/completions`.
//!
//! A prompt is text or token ids, one or a list. Text may spell control tokens here: the one who writes a raw prompt
//! writes the whole of what the model sees. `echo` with `max_tokens: 0` and `logprobs` scores a prompt without
//! generating anything.

use super::error::ApiError;
use super::fields::{Fields, check_length, wrong_type};
use super::json::parse_object;
use super::request::{Common, max_tokens_field, read_token_ids};
use super::unsupported;
use crate::text::prompt::Prompt;
use serde_json::Value;
use tidemill_core::bounds;

/// Most prompts of one request.
pub(super) const PROMPTS_MAX: usize = 128;
/// Most choices of one request: prompts times `n`.
pub(super) const REQUEST_CHOICES_MAX: usize = 128;
/// Most candidates for one prompt, as with OpenAI.
pub(super) const BEST_OF_MAX: u32 = 20;
/// Output tokens when `max_tokens` is absent, as with OpenAI.
pub(super) const MAX_TOKENS_DEFAULT: u32 = 16;

/// A completion request whose every field is within its bound.
#[derive(Clone, PartialEq, Debug)]
pub struct CompletionRequest {
    /// What both endpoints have.
    pub common: Common,
    /// At least one.
    pub prompts: Vec<Prompt>,
    /// Candidates for each prompt, of which the `n` best are answered; at least `n`.
    pub best_of: u32,
    /// Give the prompt back before the output.
    pub echo: bool,
    /// Report log-probabilities, each with this many rivals.
    pub logprobs: Option<u32>,
}

/// Reads a completion request. Pure, whatever the bytes.
///
/// # Errors
/// 400, with the field, the value and the bound.
pub fn parse_completion(body: &[u8]) -> Result<CompletionRequest, ApiError> {
    let map = parse_object(body)?;
    let fields = Fields::new(&map);
    unsupported::check_completion(&fields)?;
    let common = Common::read(&fields)?;
    let echo = fields.bool("echo")?.unwrap_or(false);
    if common.max_tokens == Some(0) && !echo {
        let field = max_tokens_field(&fields);
        return Err(ApiError::invalid(
            field,
            format!("{field} is 0; without \"echo\": true at least 1 is needed"),
        ));
    }
    let prompts = read_prompts(&fields)?;
    let best_of = read_best_of(&fields, &common)?;
    let n_choices = prompts.len() * best_of as usize;
    if n_choices > REQUEST_CHOICES_MAX {
        let field = if best_of > common.n { "best_of" } else { "n" };
        return Err(ApiError::invalid(
            field,
            format!(
                "{} prompts with {field} {best_of} make {n_choices} choices; at most {REQUEST_CHOICES_MAX} are allowed",
                prompts.len()
            ),
        ));
    }
    Ok(CompletionRequest {
        common,
        prompts,
        best_of,
        echo,
        logprobs: fields.count("logprobs", bounds::TOP_LOGPROBS_MAX)?,
    })
}

fn read_best_of(fields: &Fields<'_>, common: &Common) -> Result<u32, ApiError> {
    let n = common.n;
    let allowed = i128::from(n)..=i128::from(BEST_OF_MAX);
    let best_of = match fields.integer("best_of", allowed)? {
        Some(best_of) => u32::try_from(best_of).expect("at most BEST_OF_MAX"),
        None => n,
    };
    if common.stream && best_of > n {
        return Err(ApiError::invalid(
            "best_of",
            format!(
                "best_of is {best_of} and n is {n}; which candidates are best is known at the end, so with \"stream\": true they must be equal"
            ),
        ));
    }
    Ok(best_of)
}

fn read_prompts(fields: &Fields<'_>) -> Result<Vec<Prompt>, ApiError> {
    let values = match fields.get("prompt") {
        None => return Err(ApiError::invalid("prompt", "prompt is missing")),
        Some(Value::String(text)) => return Ok(vec![Prompt::Text(text.clone())]),
        Some(Value::Array(values)) => values,
        Some(other) => {
            return Err(wrong_type(
                "prompt",
                "a string, token ids, or a list of them",
                other,
            ));
        }
    };
    if values.is_empty() {
        return Err(ApiError::invalid(
            "prompt",
            "prompt is an empty list; it needs at least one prompt or token id",
        ));
    }
    if values[0].is_number() {
        return Ok(vec![read_tokens(values, "prompt")?]);
    }
    check_length(values.len(), PROMPTS_MAX, "prompt")?;
    let prompts = values.iter().enumerate().map(|(i, value)| match value {
        Value::String(text) => Ok(Prompt::Text(text.clone())),
        Value::Array(tokens) => read_tokens(tokens, &format!("prompt[{i}]")),
        other => Err(wrong_type(
            &format!("prompt[{i}]"),
            "a string or token ids",
            other,
        )),
    });
    prompts.collect()
}

fn read_tokens(values: &[Value], path: &str) -> Result<Prompt, ApiError> {
    check_length(values.len(), bounds::SEQUENCE_TOKENS_MAX as usize, path)?;
    read_token_ids(values, path).map(Prompt::Tokens)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(body: &Value) -> Result<CompletionRequest, ApiError> {
        parse_completion(body.to_string().as_bytes())
    }

    fn param(body: &Value) -> String {
        let error = parse(body).expect_err("refused");
        error.param.expect("names its field")
    }

    #[test]
    fn every_form_of_prompt_is_read() {
        let prompts = |prompt: Value| parse(&json!({"prompt": prompt})).map(|r| r.prompts);
        let text = |text: &str| Prompt::Text(text.to_owned());
        assert_eq!(prompts(json!("a")), Ok(vec![text("a")]));
        assert_eq!(prompts(json!(["a", "b"])), Ok(vec![text("a"), text("b")]));
        assert_eq!(prompts(json!([1, 2])), Ok(vec![Prompt::Tokens(vec![1, 2])]));
        assert_eq!(
            prompts(json!([[1], [2, 3]])),
            Ok(vec![Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])])
        );
    }

    #[test]
    fn prompts_of_other_forms_are_refused() {
        for (prompt, field) in [
            (json!(null), "prompt"),
            (json!([]), "prompt"),
            (json!({"a": 1}), "prompt"),
            (json!([1, "a"]), "prompt"),
            (json!([1, -1]), "prompt"),
            (json!([1, 1_u64 << 32]), "prompt"),
            (json!([1, 1.5]), "prompt"),
            (json!(["a", 1]), "prompt[1]"),
            (json!([[1], ["a"]]), "prompt[1]"),
            (json!(vec!["a"; 10_000]), "prompt"),
        ] {
            assert_eq!(param(&json!({"prompt": prompt})), field);
        }
    }

    #[test]
    fn b018_no_tokens_need_an_echo() {
        let body = json!({"prompt": "a", "max_tokens": 0, "echo": true, "logprobs": 1});
        let request = parse(&body).expect("allowed");
        assert_eq!(
            (request.common.max_tokens, request.logprobs),
            (Some(0), Some(1))
        );
        assert_eq!(
            param(&json!({"prompt": "a", "max_tokens": 0})),
            "max_tokens"
        );
    }

    #[test]
    fn candidates_are_at_least_as_many_as_choices() {
        let best_of = |body: Value| parse(&body).map(|request| request.best_of);
        assert_eq!(best_of(json!({"prompt": "a", "n": 3})), Ok(3));
        assert_eq!(best_of(json!({"prompt": "a", "n": 3, "best_of": 3})), Ok(3));
        assert_eq!(best_of(json!({"prompt": "a", "best_of": 20})), Ok(20));
        let body = json!({"prompt": "a", "n": 3, "best_of": 3, "stream": true});
        assert_eq!(best_of(body), Ok(3));
        for bad in [
            json!({"prompt": "a", "best_of": 0}),
            json!({"prompt": "a", "best_of": 21}),
            json!({"prompt": "a", "best_of": 1.5}),
            json!({"prompt": "a", "n": 3, "best_of": 2}),
            json!({"prompt": "a", "best_of": 2, "stream": true}),
            json!({"prompt": vec!["a"; 65], "best_of": 2}),
        ] {
            assert_eq!(param(&bad), "best_of");
        }
    }

    #[test]
    fn the_number_of_choices_is_bounded() {
        assert_eq!(param(&json!({"prompt": vec!["a"; 20], "n": 8})), "n");
        assert!(parse(&json!({"prompt": vec!["a"; 16], "n": 8})).is_ok());
        assert_eq!(param(&json!({"prompt": "a", "suffix": "b"})), "suffix");
        assert_eq!(param(&json!({"prompt": "a", "logprobs": 21})), "logprobs");
    }
}
