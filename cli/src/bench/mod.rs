//! `tidemill bench`: load against any OpenAI endpoint, and what its clients would have felt.
//!
//! Closed loop (`--concurrency`: as many clients, each sends its next request when the last one ends) or open loop
//! (`--rate`: Poisson arrivals that do not wait for answers, so that a slow server cannot hide behind its
//! clients), or the arrivals and lengths of a recorded `--trace`. Prompts are words drawn from a seed, of a length
//! measured in the server's own tokens.

mod arrivals;
mod load;
mod prompt;
mod report;

use crate::openai::Client;
use anyhow::{Result, bail};
use load::Plan;
use prompt::PromptMaker;
use std::path::PathBuf;
use std::time::Duration;

/// Flags of `tidemill bench`.
#[derive(clap::Args, Debug)]
pub(crate) struct BenchArgs {
    /// The server.
    #[arg(long, default_value = "http://127.0.0.1:8000", env = "TIDEMILL_URL")]
    url: String,
    /// The model; the server's first one when not given.
    #[arg(long)]
    model: Option<String>,
    /// Requests to send.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    requests: u32,
    /// Closed loop: clients at once.
    #[arg(long, default_value_t = 4, conflicts_with = "rate", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    concurrency: u32,
    /// Open loop: requests per second.
    #[arg(long)]
    rate: Option<f64>,
    /// Tokens of each prompt (about: the report gives the true mean).
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    prompt_tokens: u32,
    /// Leading prompt tokens that all requests share.
    #[arg(long, default_value_t = 0)]
    shared_prefix_tokens: u32,
    /// Most tokens of each answer.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    output_tokens: u32,
    /// A recorded trace instead: Azure CSV, Mooncake JSON lines, or a CSV of lengths; plain or .gz. Its first `--requests` lines are
    /// sent; `--rate` stretches its times to that mean rate.
    #[arg(long, conflicts_with_all = ["prompt_tokens", "output_tokens", "shared_prefix_tokens"])]
    trace: Option<PathBuf>,
    /// Multiplies every length of the trace.
    #[arg(long, default_value_t = 1.0, requires = "trace")]
    length_scale: f64,
    /// Have every answer be as long as asked, on servers that know this field.
    #[arg(long)]
    ignore_eos: bool,
    /// SLO: time to first token.
    #[arg(long, default_value_t = 2000.0)]
    slo_ttft_ms: f64,
    /// SLO: the 99th percentile of a request's gaps between tokens.
    #[arg(long, default_value_t = 200.0)]
    slo_itl_ms: f64,
    /// Seed of prompts and arrivals.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Longest wait for one request.
    #[arg(long, default_value_t = 300)]
    timeout_s: u64,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// Runs the load and prints the report.
///
/// # Errors
/// When the server cannot be reached or every request failed.
pub(crate) async fn run(args: BenchArgs) -> Result<()> {
    if let Some(rate) = args
        .rate
        .filter(|rate| !(*rate > 0.0 && *rate <= 100_000.0))
    {
        bail!("--rate {rate}: above 0 up to 100000 requests per second is allowed");
    }
    if args.shared_prefix_tokens > args.prompt_tokens {
        bail!(
            "--shared-prefix-tokens {} is more than --prompt-tokens {}",
            args.shared_prefix_tokens,
            args.prompt_tokens
        );
    }
    if !(args.length_scale > 0.0 && args.length_scale <= 1_000.0) {
        bail!(
            "--length-scale {}: above 0 up to 1000 is allowed",
            args.length_scale
        );
    }
    let arrivals = arrivals::plan(&args)?;
    let client = Client::new(&args.url)?;
    let model = match &args.model {
        Some(model) => model.clone(),
        None => client.first_model().await?,
    };
    let prompts = PromptMaker::calibrate(&client, &model, args.seed).await?;
    let plan = Plan {
        model,
        arrivals,
        concurrency: args.concurrency,
        timeout: Duration::from_secs(args.timeout_s),
        ignore_eos: args.ignore_eos,
    };
    let run = load::run(&client, &prompts, &plan).await;
    let slo = report::Slo {
        ttft_ms_max: args.slo_ttft_ms,
        itl_ms_max: args.slo_itl_ms,
    };
    let report = report::summarise(&run, slo)?;
    report::print(&report, args.json)?;
    if report.n_ok == 0 {
        bail!(
            "every request failed; the first reason: {}",
            report.first_error.unwrap_or_default()
        );
    }
    Ok(())
}
