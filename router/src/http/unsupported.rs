//! Fields that would change the output and that this server does not do (yet).
//!
//! Unknown fields are ignored, because clients of OpenAI's interface send all sorts of extras; but a field that we
//! know to change what comes out is never ignored in silence. Each has the values that ask for nothing, which are
//! accepted; any other value is refused by name.

use super::error::ApiError;
use super::fields::{Fields, brief};
use serde_json::Value;

/// What a field may hold and still ask for nothing.
#[derive(Clone, Copy)]
enum Neutral {
    /// Only null.
    Null,
    /// Null or this number.
    Number(f64),
    /// Null or false.
    False,
    /// Null, or an empty array, object or string.
    Empty,
    /// Null or one of these strings.
    Text(&'static [&'static str]),
}

use Neutral::{Empty, False, Null, Number, Text};

/// Of both endpoints.
const BOTH: &[(&str, Neutral)] = &[
    ("length_penalty", Number(1.0)),
    ("use_beam_search", False),
    ("bad_words", Empty),
    ("allowed_token_ids", Null),
    ("logits_processors", Empty),
    ("prompt_logprobs", Null),
    ("truncate_prompt_tokens", Null),
    ("include_stop_str_in_output", False),
    ("guided_json", Null),
    ("guided_regex", Null),
    ("guided_choice", Null),
    ("guided_grammar", Null),
    ("structured_outputs", Null),
    ("grammar", Empty),
    ("json_schema", Null),
    ("lora", Empty),
    ("lora_request", Null),
];

/// Of `/v1/chat/completions` alone.
const CHAT: &[(&str, Neutral)] = &[
    ("tools", Empty),
    ("functions", Empty),
    ("tool_choice", Text(&["none", "auto"])),
    ("function_call", Text(&["none", "auto"])),
    ("audio", Null),
    ("web_search_options", Null),
    ("reasoning_effort", Text(&["none"])),
    ("verbosity", Text(&["medium"])),
    ("chat_template", Null),
    ("chat_template_kwargs", Empty),
    ("continue_final_message", False),
    ("documents", Empty),
    ("echo", False),
    ("best_of", Number(1.0)),
];

/// Of `/v1/completions` alone.
const COMPLETIONS: &[(&str, Neutral)] = &[
    ("suffix", Empty),
    ("prompt_embeds", Null),
    ("top_logprobs", Null),
];

/// Refuses a chat request that asks for what we do not do.
///
/// # Errors
/// 400 with the first such field.
pub(super) fn check_chat(fields: &Fields<'_>) -> Result<(), ApiError> {
    check_response_format(fields)?;
    check_modalities(fields)?;
    check(fields, BOTH)?;
    check(fields, CHAT)
}

/// Refuses a completion request that asks for what we do not do.
///
/// # Errors
/// 400 with the first such field.
pub(super) fn check_completion(fields: &Fields<'_>) -> Result<(), ApiError> {
    check_response_format(fields)?;
    check(fields, BOTH)?;
    check(fields, COMPLETIONS)
}

fn check(fields: &Fields<'_>, table: &[(&str, Neutral)]) -> Result<(), ApiError> {
    for (name, neutral) in table {
        match fields.get(name) {
            Some(value) if !is_neutral(value, *neutral) => {
                return Err(refusal(fields, name, value));
            }
            _ => {}
        }
    }
    Ok(())
}

fn is_neutral(value: &Value, neutral: Neutral) -> bool {
    match (neutral, value) {
        (Number(number), value) => value.as_f64() == Some(number),
        (False, Value::Bool(is_set)) => !is_set,
        (Empty, Value::Array(values)) => values.is_empty(),
        (Empty, Value::Object(map)) => map.is_empty(),
        (Empty, Value::String(text)) => text.is_empty(),
        (Text(texts), Value::String(text)) => texts.contains(&text.as_str()),
        _ => false,
    }
}

fn check_response_format(fields: &Fields<'_>) -> Result<(), ApiError> {
    let Some(format) = fields.object("response_format")? else {
        return Ok(());
    };
    match format.text("type")? {
        Some("text") => Ok(()),
        _ => Err(ApiError::unsupported(
            "response_format",
            "response_format is not supported yet; only {\"type\": \"text\"} is",
        )),
    }
}

fn check_modalities(fields: &Fields<'_>) -> Result<(), ApiError> {
    match fields.array("modalities", 16)? {
        None => Ok(()),
        Some(values) if values.iter().all(|value| value == "text") => Ok(()),
        Some(_) => Err(ApiError::unsupported(
            "modalities",
            "modalities other than \"text\" are not supported",
        )),
    }
}

fn refusal(fields: &Fields<'_>, name: &str, value: &Value) -> ApiError {
    let path = fields.path(name);
    let message = format!(
        "{path} is {}; this is not supported yet, leave it out",
        brief(value)
    );
    ApiError::unsupported(path, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn refused(body: Value) -> Option<String> {
        let fields = Fields::of(&body, String::new()).expect("an object");
        let error = check_chat(&fields).err()?;
        assert_eq!(error.code, "unsupported_parameter");
        error.param
    }

    #[test]
    fn what_changes_the_output_is_refused_by_name() {
        for (name, value) in [
            ("tools", json!([{"type": "function"}])),
            ("tool_choice", json!("required")),
            ("response_format", json!({"type": "json_object"})),
            ("length_penalty", json!(0.1)),
            ("length_penalty", json!("1")),
            ("use_beam_search", json!(true)),
            ("bad_words", json!(["x"])),
            ("allowed_token_ids", json!([1])),
            ("modalities", json!(["text", "audio"])),
            ("best_of", json!(2)),
            ("guided_regex", json!("(")),
        ] {
            assert_eq!(refused(json!({ name: value })).as_deref(), Some(name));
        }
    }

    #[test]
    fn what_asks_for_nothing_is_accepted() {
        let body = json!({
            "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "bad_words": [],
            "length_penalty": 1, "allowed_token_ids": null,
            "modalities": ["text"], "best_of": 1, "guided_json": null, "use_beam_search": false,
            "user": "u", "metadata": {"a": "b"}, "store": true, "service_tier": "auto", "never_heard_of": [1],
        });
        assert_eq!(refused(body), None);
    }
}
