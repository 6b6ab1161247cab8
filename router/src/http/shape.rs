//! The two shapes of an answer, whole and in chunks.
//!
//! Both endpoints tell the same events; only the words around them differ, and all of those are here. A chunk has
//! every key that its schema has, with null where there is nothing; text and finish reason never share a chunk, since
//! some clients drop the text of a chunk that ends.

use super::choice::Ended;
use crate::text::output::{Piece, ScoredToken};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use tidemill_core::{FinishReason, RequestId, TokenId};
use tidemill_model_files::text::Vocabulary;

/// What stands for a log-probability of minus infinity, which JSON cannot say.
const LOGPROB_MIN: f32 = -9999.0;

/// Which endpoint is answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Endpoint {
    Chat,
    Completions,
}

/// What all chunks of one answer have in common.
pub(super) struct Shape {
    pub(super) endpoint: Endpoint,
    pub(super) id: RequestId,
    pub(super) created_s: u64,
    pub(super) model: String,
    pub(super) vocabulary: Arc<Vocabulary>,
    /// Every chunk has a `usage` key.
    pub(super) include_usage: bool,
    /// Log-probabilities were asked for.
    pub(super) has_logprobs: bool,
}

/// Token counts of a whole request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Usage {
    pub(super) n_prompt_tokens: u64,
    pub(super) n_output_tokens: u64,
    pub(super) n_cached_tokens: u64,
}

/// A choice that has ended, for an answer in one piece.
pub(super) struct WholeChoice {
    pub(super) text: String,
    pub(super) tokens: Vec<ScoredToken>,
    pub(super) ended: Ended,
}

impl Usage {
    fn json(self) -> Value {
        json!({
            "prompt_tokens": self.n_prompt_tokens,
            "completion_tokens": self.n_output_tokens,
            "total_tokens": self.n_prompt_tokens + self.n_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.n_cached_tokens},
        })
    }
}

impl Shape {
    /// The chunk that opens a choice; completions have none.
    pub(super) fn opening(&self, index: usize) -> Option<Value> {
        match self.endpoint {
            Endpoint::Chat => {
                let delta = json!({"role": "assistant", "content": ""});
                Some(self.chat_chunk(index, delta, Value::Null, Value::Null))
            }
            Endpoint::Completions => None,
        }
    }

    /// A chunk of output.
    pub(super) fn piece(&self, index: usize, piece: &Piece) -> Value {
        let logprobs = self.logprobs(&piece.tokens);
        match self.endpoint {
            Endpoint::Chat => {
                let delta = json!({"content": piece.text});
                self.chat_chunk(index, delta, logprobs, Value::Null)
            }
            Endpoint::Completions => {
                self.completion_chunk(index, &piece.text, logprobs, Value::Null)
            }
        }
    }

    /// The chunk that ends a choice.
    pub(super) fn ending(&self, index: usize, reason: FinishReason) -> Value {
        let reason = Value::from(reason_name(reason));
        match self.endpoint {
            Endpoint::Chat => self.chat_chunk(index, json!({}), Value::Null, reason),
            Endpoint::Completions => self.completion_chunk(index, "", Value::Null, reason),
        }
    }

    /// The chunk with the usage.
    pub(super) fn usage(&self, usage: Usage) -> Value {
        self.around(self.chunk_object(), json!([]), Some(usage.json()))
    }

    /// The answer in one piece.
    pub(super) fn whole(&self, choices: Vec<WholeChoice>, usage: Usage) -> Value {
        let choices = choices.into_iter().enumerate();
        let choices = choices.map(|(index, choice)| self.whole_choice(index, choice));
        let object = match self.endpoint {
            Endpoint::Chat => "chat.completion",
            Endpoint::Completions => "text_completion",
        };
        self.around(object, choices.collect(), Some(usage.json()))
    }

    fn whole_choice(&self, index: usize, choice: WholeChoice) -> Value {
        let logprobs = match (self.has_logprobs, self.endpoint) {
            (false, _) => Value::Null,
            (true, Endpoint::Chat) => self.chat_logprobs(&choice.tokens),
            (true, Endpoint::Completions) => self.completion_logprobs(&choice.tokens),
        };
        let reason = reason_name(choice.ended.reason);
        match self.endpoint {
            Endpoint::Chat => json!({
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": null},
                "logprobs": logprobs,
                "finish_reason": reason,
            }),
            Endpoint::Completions => json!({
                "index": index,
                "text": choice.text,
                "logprobs": logprobs,
                "finish_reason": reason,
            }),
        }
    }

    fn chat_chunk(&self, index: usize, delta: Value, logprobs: Value, reason: Value) -> Value {
        let choice = json!({
            "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason,
        });
        self.chunk(choice)
    }

    fn completion_chunk(&self, index: usize, text: &str, logprobs: Value, reason: Value) -> Value {
        let choice = json!({
            "index": index, "text": text, "logprobs": logprobs, "finish_reason": reason,
        });
        self.chunk(choice)
    }

    fn chunk(&self, choice: Value) -> Value {
        let usage = self.include_usage.then_some(Value::Null);
        self.around(self.chunk_object(), json!([choice]), usage)
    }

    fn chunk_object(&self) -> &'static str {
        match self.endpoint {
            Endpoint::Chat => "chat.completion.chunk",
            Endpoint::Completions => "text_completion",
        }
    }

    fn around(&self, object: &str, choices: Value, usage: Option<Value>) -> Value {
        let mut body = json!({
            "id": self.id_text(),
            "object": object,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": null,
            "choices": choices,
        });
        if let (Some(usage), Some(map)) = (usage, body.as_object_mut()) {
            map.insert("usage".to_owned(), usage);
        }
        body
    }

    fn id_text(&self) -> String {
        let prefix = match self.endpoint {
            Endpoint::Chat => "chatcmpl",
            Endpoint::Completions => "cmpl",
        };
        format!("{prefix}-{}", self.id)
    }

    fn logprobs(&self, tokens: &[ScoredToken]) -> Value {
        match (tokens.is_empty(), self.endpoint) {
            (true, _) => Value::Null,
            (false, Endpoint::Chat) => self.chat_logprobs(tokens),
            (false, Endpoint::Completions) => self.completion_logprobs(tokens),
        }
    }

    fn chat_logprobs(&self, tokens: &[ScoredToken]) -> Value {
        let entry = |token: TokenId, logprob: Option<f32>| {
            json!({
                "token": self.token_text(token),
                "logprob": logprob.map(bounded),
                "bytes": self.vocabulary.token_bytes(token),
            })
        };
        let content = tokens.iter().map(|scored| {
            let mut value = entry(scored.token, scored.logprob);
            let top = scored
                .top
                .iter()
                .map(|top| entry(top.token, Some(top.logprob)));
            value["top_logprobs"] = top.collect();
            value
        });
        json!({"content": content.collect::<Value>(), "refusal": null})
    }

    fn completion_logprobs(&self, tokens: &[ScoredToken]) -> Value {
        let texts: Value = tokens.iter().map(|t| self.token_text(t.token)).collect();
        let logprobs: Value = tokens.iter().map(|t| t.logprob.map(bounded)).collect();
        let offsets: Value = tokens.iter().map(|t| t.offset_chars).collect();
        let top: Value = tokens
            .iter()
            .map(|scored| self.top_by_text(scored))
            .collect();
        json!({
            "tokens": texts,
            "token_logprobs": logprobs,
            "top_logprobs": top,
            "text_offset": offsets,
        })
    }

    /// The rivals and the token itself, by text; of two with the same text the more likely one.
    fn top_by_text(&self, scored: &ScoredToken) -> Value {
        let Some(own) = scored.logprob else {
            return Value::Null;
        };
        let mut by_text = Map::new();
        let top = scored.top.iter().map(|top| (top.token, top.logprob));
        for (token, logprob) in top.chain([(scored.token, own)]) {
            by_text
                .entry(self.token_text(token))
                .or_insert_with(|| json!(bounded(logprob)));
        }
        Value::Object(by_text)
    }

    /// A token's text; `bytes:\x..` when it is not whole characters, as with OpenAI.
    fn token_text(&self, token: TokenId) -> String {
        let bytes = self.vocabulary.token_bytes(token);
        match std::str::from_utf8(bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => {
                let escaped = bytes.iter().map(|byte| format!("\\x{byte:02x}"));
                format!("bytes:{}", escaped.collect::<String>())
            }
        }
    }
}

fn reason_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}

fn bounded(logprob: f32) -> f32 {
    logprob.max(LOGPROB_MIN)
}
