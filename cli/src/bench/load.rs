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
        match piece? {
            Piece::Text(_) => {
                let now = Instant::now();
                if first.is_none() {
                    first = Some(now - due);
                } else {
                    gaps.push(now - last);
                }
                last = now;
            }
            Piece::Usage(counts) => usage = Some(counts),
            Piece::Done => is_done = true,
        }
    }
    let (Some(ttft), Some(usage), true) = (first, usage, is_done) else {
        bail!("the stream ended without text, usage or [DONE]");
    };
    Ok(Timing {
        ttft,
        gaps,
        e2e: last - due,
        usage,
    })
}
