//! Sending requests on time and writing down when each token came.

use super::prompt::{PromptMaker, StreamOptions};
use crate::openai::{Client, Piece, Usage};
use anyhow::{Result, bail};
use futures::StreamExt;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde::Serialize;
use std::io::Write;
use std::time::{Duration, Instant};

/// What to send.
pub(super) struct Plan {
    pub(super) model: String,
    pub(super) prompt_tokens: u32,
    pub(super) shared_prefix_tokens: u32,
    pub(super) output_tokens: u32,
    pub(super) n_requests: u32,
    pub(super) concurrency: u32,
    pub(super) rate: Option<f64>,
    pub(super) seed: u64,
    pub(super) timeout: Duration,
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
}

/// Sends every request of the plan and waits for all.
pub(super) async fn run(client: &Client, prompts: &PromptMaker, plan: &Plan) -> Run {
    let start = Instant::now();
    let due = due_times(plan);
    let width = if plan.rate.is_some() {
        plan.n_requests
    } else {
        plan.concurrency
    };
    let sends = due.into_iter().enumerate().map(|(idx, due)| async move {
        let due = match due {
            Some(offset) => {
                tokio::time::sleep_until((start + offset).into()).await;
                start + offset
            }
            None => Instant::now(),
        };
        let idx = u32::try_from(idx).expect("n_requests is a u32");
        one(client, prompts, plan, idx, due).await
    });
    let results = futures::stream::iter(sends)
        .buffer_unordered(width as usize)
        .enumerate()
        .map(|(done_idx, result)| {
            show_progress(done_idx + 1, plan.n_requests);
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
fn show_progress(n_done: usize, n_requests: u32) {
    let n_requests = n_requests as usize;
    if n_done.is_multiple_of(n_requests.div_ceil(10)) || n_done == n_requests {
        // Nobody reads a closed standard error.
        let _ = writeln!(std::io::stderr(), "{n_done} of {n_requests} requests done");
    }
}

/// When each request is due: Poisson arrivals in an open loop, `None` (as soon as a client is free) in a closed one.
fn due_times(plan: &Plan) -> Vec<Option<Duration>> {
    let mut rng = SmallRng::seed_from_u64(plan.seed ^ 0xA771);
    let mut at = 0.0;
    (0..plan.n_requests)
        .map(|_| {
            let rate = plan.rate?;
            let uniform: f64 = rng.random_range(f64::EPSILON..1.0);
            at += -uniform.ln() / rate;
            Some(Duration::from_secs_f64(at))
        })
        .collect()
}

async fn one(
    client: &Client,
    prompts: &PromptMaker,
    plan: &Plan,
    idx: u32,
    due: Instant,
) -> Result<Timing> {
    let body = Body {
        model: &plan.model,
        prompt: prompts.make(idx, plan.prompt_tokens, plan.shared_prefix_tokens),
        max_tokens: plan.output_tokens,
        temperature: 0.0,
        stream: true,
        stream_options: StreamOptions {
            include_usage: true,
        },
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

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(rate: Option<f64>) -> Plan {
        Plan {
            model: String::new(),
            prompt_tokens: 1,
            shared_prefix_tokens: 0,
            output_tokens: 1,
            n_requests: 2000,
            concurrency: 1,
            rate,
            seed: 1,
            timeout: Duration::from_secs(1),
        }
    }

    #[test]
    fn open_loop_arrivals_have_the_asked_rate() {
        let due = due_times(&plan(Some(50.0)));
        let end = due.last().expect("2000").expect("open loop").as_secs_f64();
        assert!(
            (36.0..44.0).contains(&end),
            "2000 arrivals at 50/s took {end} s"
        );
        assert!(due.is_sorted());
    }

    #[test]
    fn closed_loop_requests_have_no_due_time() {
        assert!(due_times(&plan(None)).iter().all(Option::is_none));
    }
}
