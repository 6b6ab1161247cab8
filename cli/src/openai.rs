//! The few client calls that chat and bench need, against any server that speaks OpenAI's completions.

mod sse;

use anyhow::{Context, Result, anyhow, bail};
use futures::StreamExt;
use futures::stream::BoxStream;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Longest error text that is shown.
const ERROR_BYTES_MAX: usize = 2000;

/// A server's base URL and how to reach it. Clones share connections.
#[derive(Clone)]
pub(crate) struct Client {
    http: reqwest::Client,
    base: String,
    key: Option<String>,
}

/// One message of a chat.
#[derive(Clone, Serialize, Deserialize, Debug)]
pub(crate) struct Message {
    pub(crate) role: String,
    pub(crate) content: String,
}

/// Token counts of a finished request.
#[derive(Clone, Copy, Deserialize, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
}

/// A streamed piece.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    /// Text, never empty.
    Text(String),
    /// The counts, once.
    Usage(Usage),
    /// The positive end.
    Done,
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<ErrorBody>,
}

#[derive(Deserialize)]
struct Choice {
    text: Option<String>,
    delta: Option<Delta>,
}

#[derive(Deserialize)]
struct Delta {
    content: Option<String>,
}

#[derive(Deserialize)]
struct ErrorBody {
    message: String,
}

#[derive(Deserialize)]
struct ModelList {
    data: Vec<ModelEntry>,
}

#[derive(Deserialize)]
struct ModelEntry {
    id: String,
}

impl Client {
    /// A client for `url` (with or without `/v1`). The key comes from `OPENAI_API_KEY`.
    ///
    /// # Errors
    /// When the TLS set-up fails.
    pub(crate) fn new(url: &str) -> Result<Self> {
        // An installed provider stays; a second call changes nothing.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let base = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        if !(base.starts_with("http://") || base.starts_with("https://")) {
            bail!("--url {url}: must begin with http:// or https://");
        }
        Ok(Self {
            http: reqwest::Client::builder()
                .connect_timeout(Duration::from_secs(5))
                .tcp_nodelay(true)
                .pool_max_idle_per_host(1024)
                .build()?,
            base,
            key: std::env::var("OPENAI_API_KEY").ok(),
        })
    }

    /// The first model that the server names.
    ///
    /// # Errors
    /// When the server does not answer or names none.
    pub(crate) async fn first_model(&self) -> Result<String> {
        let request = self.with_key(self.http.get(format!("{}/v1/models", self.base)));
        let answer = request.send().await.with_context(|| {
            format!(
                "no answer from {}; is the server running? (`tidemill serve` starts one)",
                self.base
            )
        })?;
        let list: ModelList = checked(answer).await?.json().await?;
        let first = list.data.into_iter().next();
        Ok(first.context("the server names no model; pass --model")?.id)
    }

    /// Starts a streamed request on `/v1/<path>`; `body` must ask for a stream.
    ///
    /// # Errors
    /// When the server does not answer or refuses; the text holds its reason.
    pub(crate) async fn stream(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<BoxStream<'static, Result<Piece>>> {
        let request = self
            .http
            .post(format!("{}/v1/{path}", self.base))
            .json(body);
        let answer = self
            .with_key(request)
            .send()
            .await
            .with_context(|| format!("no answer from {}", self.base))?;
        let bytes = checked(answer).await?.bytes_stream();
        let events = sse::events(bytes.map(|part| part.context("the stream broke")));
        let pieces = events.flat_map(|event| futures::stream::iter(pieces(event)));
        Ok(pieces.boxed())
    }

    fn with_key(&self, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        match &self.key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }
}

async fn checked(answer: reqwest::Response) -> Result<reqwest::Response> {
    let status = answer.status();
    if status.is_success() {
        return Ok(answer);
    }
    let mut text = answer.text().await.unwrap_or_default();
    let end = (0..=ERROR_BYTES_MAX.min(text.len()))
        .rev()
        .find(|&i| text.is_char_boundary(i));
    text.truncate(end.unwrap_or(0));
    bail!("the server answered {status}: {text}")
}

fn pieces(event: Result<String>) -> Vec<Result<Piece>> {
    let data = match event {
        Ok(data) => data,
        Err(error) => return vec![Err(error)],
    };
    if data.trim() == "[DONE]" {
        return vec![Ok(Piece::Done)];
    }
    let chunk: Chunk = match serde_json::from_str(&data) {
        Ok(chunk) => chunk,
        Err(error) => {
            return vec![Err(anyhow!(
                "the server sent an event that is not a chunk: {error}"
            ))];
        }
    };
    if let Some(error) = chunk.error {
        return vec![Err(anyhow!(
            "the server ended the stream with an error: {}",
            error.message
        ))];
    }
    let mut pieces = Vec::new();
    for choice in chunk.choices {
        let text = choice
            .text
            .or_else(|| choice.delta.and_then(|delta| delta.content));
        pieces.extend(
            text.filter(|text| !text.is_empty())
                .map(|text| Ok(Piece::Text(text))),
        );
    }
    pieces.extend(chunk.usage.map(|usage| Ok(Piece::Usage(usage))));
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(data: &str) -> Vec<Result<Piece>> {
        pieces(Ok(data.to_owned()))
    }

    #[test]
    fn both_chunk_shapes_give_text() {
        for data in [
            r#"{"choices":[{"text":"hi"}]}"#,
            r#"{"choices":[{"delta":{"content":"hi"}}],"usage":null}"#,
        ] {
            let pieces = read(data);
            assert!(
                matches!(&pieces[..], [Ok(Piece::Text(text))] if text == "hi"),
                "{data}"
            );
        }
    }

    #[test]
    fn an_error_event_is_an_error() {
        assert!(read(r#"{"error":{"message":"lost"}}"#)[0].is_err());
        assert!(read("not json")[0].is_err());
    }
}
