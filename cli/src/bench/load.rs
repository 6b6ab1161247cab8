//! Sending requests on time and writing down when each token came.

use super::arrivals::Arrival;
use super::prompt::{PromptMaker, StreamOptions};
use crate::openai::{Client, Piece, Usage};
use anyhow::{Result, bail};
use futures::StreamExt;
use serde::Serialize;
use std::io::Write;
use std::time::{Duration, Instant};

/// What to send, and how.
pub(super) struct Plan {
    pub(super) model: String,
    pub(super) arrivals: Vec<Arrival>,
    /// Clients of a closed loop.
    pub(super) concurrency: u32,
    pub(super) timeout: Duration,
    pub(super) ignore_eos: bool,
}

/// One request as its client saw it. Times count from when it was *due*, so that in an open loop a late send
/// counts against the server.
#[derive(Debug, Clone)]
pub(super) struct Timing {
    pub(super) ttft: Duration,
    pub(super) gaps: Vec<Duration>,
    pub(super) e2e: Duration,
    pub(super) usage: Usage,
}

/// A whole run.
pub(super) struct Run {
    pub(super) wall: Duration,
    pub(super) results: Vec<Result<Timing>>,
}

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    prompt: String,
    max_tokens: u32,
    temperature: f32,
    stream: bool,
    stream_options: StreamOptions,
    /// Not every server knows it, so it is sent only when it is asked for.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    ignore_eos: bool,
}

/// Sends every request of the plan and waits for all.
pub(super) async fn run(client: &Client, prompts: &PromptMaker, plan: &Plan) -> Run {
    let start = Instant::now();
    let n_requests = plan.arrivals.len();
    let is_open = plan.arrivals.iter().any(|arrival| arrival.at.is_some());
    let width = if is_open {
        n_requests
    } else {
        plan.concurrency as usize
    };
    let sends = plan.arrivals.iter().map(|arrival| async move {
        let due = match arrival.at {
            Some(offset) => {
                tokio::time::sleep_until((start + offset).into()).await;
                start + offset
            }
            None => Instant::now(),
        };
        one(client, prompts, plan, arrival, due).await
    });
    let results = futures::stream::iter(sends)
        .buffer_unordered(width)
        .enumerate()
        .map(|(done_idx, result)| {
            show_progress(done_idx + 1, n_requests);
            result
        })
        .collect()
        .await;
    Run {
        wall: start.elapsed(),
        results,
    }
}

/// About ten lines in all, on standard error.
fn show_progress(n_done: usize, n_requests: usize) {
    if n_done.is_multiple_of(n_requests.div_ceil(10)) || n_done == n_requests {
        // Nobody reads a closed standard error.
        let _ = writeln!(std::io::stderr(), "{n_done} of {n_requests} requests done");
    }
}

async fn one(
    client: &Client,
    prompts: &PromptMaker,
    plan: &Plan,
    arrival: &Arrival,
    due: Instant,
) -> Result<Timing> {
    let body = Body {
        model: &plan.model,
        prompt: prompts.make(&arrival.prompt),
        max_tokens: arrival.output_tokens,
        temperature: 0.0,
        stream: true,
        stream_options: StreamOptions {
            include_usage: true,
        },
        ignore_eos: plan.ignore_eos,
    };
    match tokio::time::timeout(plan.timeout, timed(client, &body, due)).await {
        Ok(timing) => timing,
        Err(_) => bail!("no end within {} s", plan.timeout.as_secs()),
    }
}

async fn timed(client: &Client, body: &Body<'_>, due: Instant) -> Result<Timing> {
    let mut pieces = Box::pin(client.stream("completions", body).await?);
    let (mut first, mut last, mut gaps) = (None, due, Vec::new());
    let mut usage = None;
    let mut is_done = false;
    while let Some(piece) = pieces.next().await {
        let now = Instant::now();
        match piece? {
            Piece::Text(_) if first.is_none() => (first, last) = (Some(now), now),
            Piece::Text(_) => {
                gaps.push(now - last);
                last = now;
            }
            Piece::Usage(counts) => usage = Some((counts, now)),
            Piece::Done => is_done = true,
        }
    }
    let (Some((usage, told)), true) = (usage, is_done) else {
        bail!("the stream ended without usage or [DONE]");
    };
    // An answer may end before its first text; then its end is all that there is to wait for.
    let first = first.unwrap_or(told);
    Ok(Timing {
        ttft: first - due,
        gaps,
        e2e: last.max(first) - due,
        usage,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    const PAUSE: Duration = Duration::from_millis(50);

    /// What a client measures of these events, each sent after a pause.
    async fn timing(events: &'static [&'static str]) -> Result<Timing> {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a client");
            let n_read = stream.read(&mut [0; 4096]).await.expect("a request");
            assert!(n_read > 0);
            let head =
                "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
            stream.write_all(head.as_bytes()).await.expect("written");
            for event in events {
                tokio::time::sleep(PAUSE).await;
                let event = format!("data: {event}\n\n");
                stream.write_all(event.as_bytes()).await.expect("written");
            }
        });
        let body = Body {
            model: "m",
            prompt: "p".to_owned(),
            max_tokens: 4,
            temperature: 0.0,
            stream: true,
            stream_options: StreamOptions {
                include_usage: true,
            },
            ignore_eos: false,
        };
        let client = Client::new(&url).expect("a client");
        let timed = timed(&client, &body, Instant::now()).await;
        server.await.expect("no panic");
        timed
    }

    const TEXT: &str = r#"{"choices":[{"text":"a"}]}"#;
    const END: &str = r#"{"choices":[{"text":"","finish_reason":"stop"}]}"#;
    const USAGE: &str = r#"{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}"#;

    #[tokio::test]
    async fn an_answer_that_ends_before_its_first_text_has_not_failed() {
        let timing = timing(&[END, USAGE, "[DONE]"]).await.expect("an answer");
        assert!(timing.ttft >= 2 * PAUSE && timing.e2e >= timing.ttft);
        assert!(timing.gaps.is_empty());
        assert_eq!(timing.usage.completion_tokens, 1);
    }

    #[tokio::test]
    async fn a_text_is_what_is_waited_for() {
        let timing = timing(&[TEXT, TEXT, END, USAGE, "[DONE]"]).await;
        let timing = timing.expect("an answer");
        assert!(timing.ttft >= PAUSE && timing.ttft <= timing.e2e);
        assert_eq!(timing.gaps.len(), 1);
        assert_eq!(timing.e2e, timing.ttft + timing.gaps[0], "to the last text");
    }

    #[tokio::test]
    async fn an_answer_without_its_end_has_failed() {
        for events in [&[END, USAGE][..], &[END, "[DONE]"], &["[DONE]"], &[]] {
            let error = timing(events).await.expect_err("not whole").to_string();
            assert!(error.contains("ended without"), "{error}");
        }
    }
}
