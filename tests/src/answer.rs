//! What a client got for one request, streaming or not, in one shape, so that any two can be compared whole.
//!
//! Text, tokens with their log-probabilities, finish reason, usage, and how it ended. A stream counts as done only with
//! its `[DONE]`; everything else is a failure that says which.

use crate::http::{self, Answering};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::net::SocketAddr;

/// Path of the chat endpoint.
pub const CHAT: &str = "/v1/chat/completions";
/// Path of the completions endpoint.
pub const COMPLETIONS: &str = "/v1/completions";

/// How an answer ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum End {
    /// Whole.
    Done,
    /// An error status with OpenAI's error body, before the first byte of an answer.
    Refused {
        /// HTTP status.
        status: u16,
        /// Stable code.
        code: String,
    },
    /// An `error` event within a stream, and no `[DONE]` after it.
    Error {
        /// Stable code.
        code: String,
    },
    /// The connection broke.
    Broken,
}

/// What a client got.
#[derive(Clone, PartialEq, Debug)]
pub struct Answer {
    /// All text of choice 0.
    pub text: String,
    /// Sampled tokens, each with its log-probability and rivals, as the endpoint spells them.
    pub tokens: Vec<Value>,
    /// stop or length.
    pub finish_reason: Option<String>,
    /// As told; a stream tells it only when asked.
    pub usage: Option<Value>,
    /// How it ended.
    pub end: End,
    /// What was said to a person, when it failed.
    pub message: String,
}

impl Answer {
    fn ended(end: End) -> Self {
        Self {
            text: String::new(),
            tokens: Vec::new(),
            finish_reason: None,
            usage: None,
            end,
            message: String::new(),
        }
    }

    /// The same without what may differ between two runs: how much of a prompt was cached.
    pub fn comparable(&self) -> Self {
        let mut same = self.clone();
        if let Some(Value::Object(usage)) = &mut same.usage {
            usage.remove("prompt_tokens_details");
        }
        same
    }

    /// True for an end that cannot be taken for a whole answer.
    pub fn has_failed_openly(&self) -> bool {
        match &self.end {
            End::Done | End::Broken => false,
            End::Refused { status, .. } => *status == 503,
            End::Error { .. } => true,
        }
    }

    fn take(&mut self, choice: &Value) {
        let text = [&choice["text"], &choice["delta"]["content"]];
        let text = text.into_iter().chain([&choice["message"]["content"]]);
        self.text.extend(text.filter_map(Value::as_str));
        self.tokens.extend(tokens(&choice["logprobs"]));
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish_reason = Some(reason.to_owned());
        }
    }
}

/// One entry a token, for both spellings of log-probabilities.
fn tokens(logprobs: &Value) -> Vec<Value> {
    if let Some(content) = logprobs["content"].as_array() {
        return content.clone();
    }
    let list = |key: &str| logprobs[key].as_array().cloned().unwrap_or_default();
    let columns = (list("tokens"), list("token_logprobs"), list("top_logprobs"));
    let rows = columns.0.into_iter().zip(columns.1).zip(columns.2);
    rows.map(|((token, logprob), rivals)| json!([token, logprob, rivals]))
        .collect()
}

/// A stream of server-sent events.
pub struct Events {
    answering: Answering,
    unread: Vec<u8>,
    answer: Answer,
    /// Events with text so far.
    pub n_texts: usize,
}

impl Events {
    /// Sends a request with `"stream": true`.
    ///
    /// # Errors
    /// The answer itself when it is no stream, else what broke.
    #[expect(
        clippy::result_large_err,
        reason = "a refusal is an answer like any other"
    )]
    pub fn open(address: SocketAddr, path: &str, body: &Value) -> Result<Self, Answer> {
        let mut body = body.clone();
        body["stream"] = json!(true);
        let Ok(answering) = http::post(address, path, &body) else {
            return Err(Answer::ended(End::Broken));
        };
        if answering.status != 200 {
            return Err(refused(answering).unwrap_or(Answer::ended(End::Broken)));
        }
        Ok(Self {
            answering,
            unread: Vec::new(),
            answer: Answer::ended(End::Broken),
            n_texts: 0,
        })
    }

    /// Reads one event; false after the last.
    ///
    /// # Errors
    /// When the connection breaks, or an event has a form that no client understands.
    pub fn step(&mut self) -> Result<bool> {
        let Some(event) = self.next_event()? else {
            return Ok(false);
        };
        let data: Vec<&str> = event
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .collect();
        if data.is_empty() {
            // A comment.
            return Ok(true);
        }
        ensure!(
            self.answer.end == End::Broken,
            "{event:?} follows the end of the stream"
        );
        let data = data.join("\n");
        if data == "[DONE]" {
            self.answer.end = End::Done;
            return Ok(true);
        }
        let chunk: Value = serde_json::from_str(&data).with_context(|| format!("{data:?}"))?;
        if event.lines().any(|line| line == "event: error") {
            let code = chunk["error"]["code"].as_str();
            let code = code.context("an error without a code")?.to_owned();
            self.answer.end = End::Error { code };
            self.answer.message = chunk["error"]["message"].to_string();
            return Ok(true);
        }
        if chunk["usage"].is_object() {
            self.answer.usage = Some(chunk["usage"].clone());
        }
        let n_bytes = self.answer.text.len();
        for choice in chunk["choices"].as_array().context("no choices")? {
            self.answer.take(choice);
        }
        self.n_texts += usize::from(self.answer.text.len() > n_bytes);
        Ok(true)
    }

    fn next_event(&mut self) -> Result<Option<String>> {
        loop {
            let end = self.unread.windows(2).position(|pair| pair == b"\n\n");
            if let Some(end) = end {
                let event: Vec<u8> = self.unread.drain(..end + 2).collect();
                return Ok(Some(String::from_utf8(event)?));
            }
            match self.answering.next_bytes()? {
                Some(bytes) => self.unread.extend(bytes),
                None if self.unread.is_empty() => return Ok(None),
                None => bail!("half an event: {:?}", String::from_utf8_lossy(&self.unread)),
            }
        }
    }

    /// Reads until so many events with text have come.
    ///
    /// # Errors
    /// When the stream ends or breaks before.
    pub fn read_texts(&mut self, n_texts: usize) -> Result<()> {
        while self.n_texts < n_texts {
            ensure!(
                self.step()?,
                "the stream ended after {} texts",
                self.n_texts
            );
        }
        Ok(())
    }

    /// Reads the rest. A stream that breaks is an answer whose end says so; one that ends in the plain form without
    /// `[DONE]` or an error is a fault.
    ///
    /// # Errors
    /// For the fault.
    pub fn finish(mut self) -> Result<Answer> {
        loop {
            match self.step() {
                Ok(true) => {}
                Ok(false) if self.answer.end == End::Broken => {
                    bail!("the stream ended like a whole one, without [DONE]")
                }
                Ok(false) | Err(_) => return Ok(self.answer),
            }
        }
    }

    /// Leaves without reading on.
    pub fn leave(self) {
        self.answering.leave();
    }
}

fn refused(answering: Answering) -> Result<Answer> {
    let response = answering.whole()?;
    let error = response.json()?["error"].clone();
    for key in ["message", "type", "code"] {
        ensure!(error[key].is_string(), "{error} has no {key}");
    }
    let end = End::Refused {
        status: response.status,
        code: error["code"].as_str().unwrap_or_default().to_owned(),
    };
    let message = error["message"].to_string();
    Ok(Answer {
        message,
        ..Answer::ended(end)
    })
}

/// Asks and reads the whole stream.
///
/// # Errors
/// When the answer breaks the rules of streams.
pub fn ask_stream(address: SocketAddr, path: &str, body: &Value) -> Result<Answer> {
    match Events::open(address, path, body) {
        Ok(events) => events.finish(),
        Err(answer) => Ok(answer),
    }
}

/// Asks for the answer in one piece.
///
/// # Errors
/// When the answer has another form than a client expects.
pub fn ask(address: SocketAddr, path: &str, body: &Value) -> Result<Answer> {
    let Ok(answering) = http::post(address, path, body) else {
        return Ok(Answer::ended(End::Broken));
    };
    if answering.status != 200 {
        return refused(answering);
    }
    let whole = answering.whole()?.json()?;
    let mut answer = Answer::ended(End::Done);
    answer.usage = Some(whole["usage"].clone());
    let choices = whole["choices"].as_array().context("no choices")?;
    for choice in choices.iter().filter(|choice| choice["index"] == 0) {
        answer.take(choice);
    }
    Ok(answer)
}
