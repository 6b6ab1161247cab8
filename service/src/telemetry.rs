//! Logs: one line an event and one for each span that ends, text or JSON, to standard error. Log statements in this
//! code base name requests by id and never carry prompts, tokens, capabilities or client keys.

use std::io::IsTerminal;
use std::str::FromStr;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::FmtSpan;

/// Shape of a log line.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// For machines.
    Json,
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            other => Err(format!("log format {other:?} is neither text nor json")),
        }
    }
}

/// Starts logging, filtered by `filter` (the syntax of `RUST_LOG`, e.g. `info,tidemill_router=debug`).
///
/// # Errors
/// When the filter does not parse or logging has already been started.
pub fn start(filter: &str, format: LogFormat) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(filter)
        .map_err(|error| anyhow::anyhow!("log filter {filter:?}: {error}"))?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_span_events(FmtSpan::CLOSE)
        // Else a log line that nobody reads any more (a collector that has ended) would panic where it is written.
        .log_internal_errors(false)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    let started = match format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    started.map_err(|error| anyhow::anyhow!("logging has already been started: {error}"))
}
