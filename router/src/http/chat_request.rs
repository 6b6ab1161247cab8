//! The body of `/v1/chat/completions`.
//!
//! Content is text: a string or a list of text parts. Anything that would have to be fetched or decoded (images,
//! audio, files) is refused, so a request can never make this server open a connection. Roles that only make sense
//! with tools are refused as long as tools are.

use super::error::{ApiError, shown};
use super::fields::{Fields, check_length, wrong_type};
use super::json::parse_object;
use super::request::{Common, max_tokens_field};
use super::unsupported;
use crate::text::prompt::{Message, Role};
use serde_json::Value;
use tidemill_core::bounds;

/// Most messages of a chat.
pub(super) const MESSAGES_MAX: usize = 2048;
/// Most parts of one message.
pub(super) const PARTS_MAX: usize = 256;

/// A chat request whose every field is within its bound.
#[derive(Clone, PartialEq, Debug)]
pub struct ChatRequest {
    /// What both endpoints have.
    pub common: Common,
    /// The conversation, at least one message.
    pub messages: Vec<Message>,
    /// Report log-probabilities, each with this many rivals.
    pub logprobs: Option<u32>,
}

/// Reads a chat request. Pure, whatever the bytes.
///
/// # Errors
/// 400, with the field, the value and the bound.
pub fn parse_chat(body: &[u8]) -> Result<ChatRequest, ApiError> {
    let map = parse_object(body)?;
    let fields = Fields::new(&map);
    unsupported::check_chat(&fields)?;
    let common = Common::read(&fields)?;
    if common.max_tokens == Some(0) {
        let field = max_tokens_field(&fields);
        return Err(ApiError::invalid(
            field,
            format!(
                "{field} is 0; a chat needs 1 to {}",
                bounds::SEQUENCE_TOKENS_MAX
            ),
        ));
    }
    Ok(ChatRequest {
        common,
        messages: read_messages(&fields)?,
        logprobs: read_logprobs(&fields)?,
    })
}

fn read_logprobs(fields: &Fields<'_>) -> Result<Option<u32>, ApiError> {
    let is_asked = fields.bool("logprobs")?.unwrap_or(false);
    let top = fields.count("top_logprobs", bounds::TOP_LOGPROBS_MAX)?;
    match (is_asked, top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(top)) => Err(ApiError::invalid(
            "top_logprobs",
            format!("top_logprobs is {top}; it needs \"logprobs\": true"),
        )),
    }
}

fn read_messages(fields: &Fields<'_>) -> Result<Vec<Message>, ApiError> {
    let values = fields.array("messages", MESSAGES_MAX)?.unwrap_or_default();
    if values.is_empty() {
        return Err(ApiError::invalid(
            "messages",
            format!("messages is missing or empty; 1 to {MESSAGES_MAX} are allowed"),
        ));
    }
    let messages = values.iter().enumerate().map(|(i, value)| {
        let message = Fields::of(value, format!("messages[{i}]"))?;
        read_message(&message)
    });
    messages.collect()
}

fn read_message(message: &Fields<'_>) -> Result<Message, ApiError> {
    for name in [
        "name",
        "tool_calls",
        "tool_call_id",
        "function_call",
        "refusal",
        "audio",
    ] {
        let is_empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
        if message.get(name).is_some_and(|value| !is_empty(value)) {
            let path = message.path(name);
            let text = format!("{path} is not supported yet; leave it out");
            return Err(ApiError::unsupported(path, text));
        }
    }
    let role = read_role(message)?;
    let path = message.path("content");
    let content = match message.get("content") {
        None => {
            let text = format!("{path} is missing; a string is needed");
            return Err(ApiError::invalid(path, text));
        }
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            check_length(parts.len(), PARTS_MAX, &path)?;
            let parts = parts.iter().enumerate();
            parts
                .map(|(i, part)| read_part(&Fields::of(part, format!("{path}[{i}]"))?))
                .collect::<Result<String, ApiError>>()?
        }
        Some(other) => return Err(wrong_type(&path, "a string or an array of parts", other)),
    };
    Ok(Message { role, content })
}

fn read_role(message: &Fields<'_>) -> Result<Role, ApiError> {
    let path = message.path("role");
    match message.text("role")? {
        Some("system" | "developer") => Ok(Role::System),
        Some("user") => Ok(Role::User),
        Some("assistant") => Ok(Role::Assistant),
        Some(role @ ("tool" | "function")) => {
            let text = format!("{path} is {role:?}; tools are not supported yet");
            Err(ApiError::unsupported(path, text))
        }
        role => {
            let role = role.map_or_else(|| "missing".to_owned(), shown);
            let text = format!("{path} is {role}; system, developer, user or assistant is allowed");
            Err(ApiError::invalid(path, text))
        }
    }
}

fn read_part<'a>(part: &Fields<'a>) -> Result<&'a str, ApiError> {
    match part.text("type")? {
        Some("text") => part.text("text")?.ok_or_else(|| {
            let path = part.path("text");
            let text = format!("{path} is missing; a string is needed");
            ApiError::invalid(path, text)
        }),
        kind => {
            let path = part.path("type");
            let kind = kind.map_or_else(|| "missing".to_owned(), shown);
            let text = format!("{path} is {kind}; only \"text\" is supported");
            Err(ApiError::unsupported(path, text))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(body: &Value) -> Result<ChatRequest, ApiError> {
        parse_chat(body.to_string().as_bytes())
    }

    fn with_message(message: Value) -> Result<ChatRequest, ApiError> {
        parse(&json!({"messages": [message]}))
    }

    fn param(result: Result<ChatRequest, ApiError>) -> String {
        result.expect_err("refused").param.expect("names its field")
    }

    #[test]
    fn roles_and_content_are_read() {
        let body = json!({"model": "m", "messages": [
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c", "refusal": null, "tool_calls": []},
        ]});
        let request = parse(&body).expect("allowed");
        let read: Vec<_> = request
            .messages
            .iter()
            .map(|message| (message.role.name(), message.content.as_str()))
            .collect();
        assert_eq!(
            read,
            [("system", "be kind"), ("user", "ab"), ("assistant", "c")]
        );
    }

    #[test]
    fn what_is_not_text_is_refused_by_place() {
        let url = json!({"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}});
        let message = json!({"role": "user", "content": [{"type": "text", "text": "a"}, url]});
        assert_eq!(param(with_message(message)), "messages[0].content[1].type");
        let cases = [
            (json!({"role": "tool", "content": "x"}), "messages[0].role"),
            (json!({"role": "king", "content": "x"}), "messages[0].role"),
            (json!({"content": "x"}), "messages[0].role"),
            (json!({"role": "user"}), "messages[0].content"),
            (
                json!({"role": "user", "content": null}),
                "messages[0].content",
            ),
            (json!({"role": "user", "content": 5}), "messages[0].content"),
            (
                json!({"role": "user", "content": "x", "name": "n"}),
                "messages[0].name",
            ),
            (json!("hi"), "messages[0]"),
        ];
        for (message, field) in cases {
            assert_eq!(param(with_message(message)), field);
        }
    }

    #[test]
    fn b108_huge_arrays_are_refused() {
        let message = json!({"role": "user", "content": "x"});
        assert_eq!(
            param(parse(&json!({"messages": vec![message; 100_000]}))),
            "messages"
        );
        assert_eq!(param(parse(&json!({"messages": []}))), "messages");
        assert_eq!(param(parse(&json!({}))), "messages");
        let part = json!({"type": "text", "text": "x"});
        let message = json!({"role": "user", "content": vec![part; 257]});
        assert_eq!(param(with_message(message)), "messages[0].content");
    }

    #[test]
    fn b110_logprobs_are_bounded() {
        let read = |logprobs: Value, top: Value| {
            let message = json!({"role": "user", "content": "x"});
            let body = json!({"messages": [message], "logprobs": logprobs, "top_logprobs": top});
            parse(&body).map(|request| request.logprobs)
        };
        assert_eq!(read(json!(true), json!(null)), Ok(Some(0)));
        assert_eq!(read(json!(true), json!(20)), Ok(Some(20)));
        assert_eq!(read(json!(null), json!(null)), Ok(None));
        assert_eq!(read(json!(false), json!(0)), Ok(None));
        for (logprobs, top) in [
            (json!(true), json!(21)),
            (json!(false), json!(1)),
            (json!(5), json!(null)),
        ] {
            assert!(read(logprobs, top).is_err());
        }
    }

    #[test]
    fn b018_a_chat_of_no_tokens_is_refused() {
        let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0});
        assert_eq!(param(parse(&body)), "max_tokens");
        let body =
            json!({"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0});
        assert_eq!(param(parse(&body)), "max_completion_tokens");
    }
}
