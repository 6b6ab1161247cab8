//! Percentiles and goodput of a run, as a table or as JSON.

use super::load::{Run, Timing};
use anyhow::Result;
use hdrhistogram::Histogram;
use serde::Serialize;
use std::io::Write;
use std::time::Duration;

/// Longest time that is told apart: an hour, in microseconds.
const LONGEST_US: u64 = 3_600_000_000;

/// What a request must keep to count as good.
#[derive(Clone, Copy, Serialize)]
pub(super) struct Slo {
    pub(super) ttft_ms_max: f64,
    pub(super) itl_ms_max: f64,
}

/// One measure's spread, in milliseconds.
#[derive(Serialize)]
pub(super) struct Spread {
    mean: f64,
    p50: f64,
    p90: f64,
    p99: f64,
    max: f64,
}

/// The whole result.
#[derive(Serialize)]
pub(super) struct Report {
    pub(super) n_ok: usize,
    n_failed: usize,
    pub(super) first_error: Option<String>,
    wall_s: f64,
    requests_per_s: f64,
    goodput_per_s: f64,
    output_tokens_per_s: f64,
    prompt_tokens_per_s: f64,
    prompt_tokens_mean: f64,
    output_tokens_mean: f64,
    slo: Slo,
    ttft_ms: Spread,
    itl_ms: Spread,
    tpot_ms: Spread,
    e2e_ms: Spread,
}

/// Reduces a run to its report.
///
/// # Errors
/// Never for times below an hour; they are clamped.
pub(super) fn summarise(run: &Run, slo: Slo) -> Result<Report> {
    let ok: Vec<&Timing> = run.results.iter().filter_map(|r| r.as_ref().ok()).collect();
    let first_error = run.results.iter().find_map(|r| r.as_ref().err());
    let wall_s = run.wall.as_secs_f64().max(1e-9);
    let n_good = ok.iter().filter(|timing| is_good(timing, slo)).count();
    let prompt_tokens: u64 = ok.iter().map(|t| t.usage.prompt_tokens).sum();
    let output_tokens: u64 = ok.iter().map(|t| t.usage.completion_tokens).sum();
    let mean = |total: u64| total as f64 / ok.len().max(1) as f64;
    Ok(Report {
        n_ok: ok.len(),
        n_failed: run.results.len() - ok.len(),
        first_error: first_error.map(|error| format!("{error:#}")),
        wall_s,
        requests_per_s: ok.len() as f64 / wall_s,
        goodput_per_s: n_good as f64 / wall_s,
        output_tokens_per_s: output_tokens as f64 / wall_s,
        prompt_tokens_per_s: prompt_tokens as f64 / wall_s,
        prompt_tokens_mean: mean(prompt_tokens),
        output_tokens_mean: mean(output_tokens),
        slo,
        ttft_ms: spread(ok.iter().map(|t| t.ttft))?,
        itl_ms: spread(ok.iter().flat_map(|t| t.gaps.iter().copied()))?,
        tpot_ms: spread(ok.iter().filter_map(|t| tpot(t)))?,
        e2e_ms: spread(ok.iter().map(|t| t.e2e))?,
    })
}

/// (E2E - TTFT) / (output tokens - 1); nothing for a single token.
fn tpot(timing: &Timing) -> Option<Duration> {
    let n_gaps = u32::try_from(timing.usage.completion_tokens.checked_sub(1)?).ok()?;
    (n_gaps > 0).then(|| (timing.e2e - timing.ttft) / n_gaps)
}

fn is_good(timing: &Timing, slo: Slo) -> bool {
    let mut gaps = timing.gaps.clone();
    gaps.sort_unstable();
    let rank = (gaps.len() * 99).div_ceil(100).saturating_sub(1);
    let itl_ms = gaps.get(rank).map_or(0.0, |gap| gap.as_secs_f64() * 1e3);
    timing.ttft.as_secs_f64() * 1e3 <= slo.ttft_ms_max && itl_ms <= slo.itl_ms_max
}

fn spread(times: impl Iterator<Item = Duration>) -> Result<Spread> {
    let mut histogram = Histogram::<u64>::new_with_bounds(1, LONGEST_US, 3)?;
    for time in times {
        let micros = u64::try_from(time.as_micros()).unwrap_or(LONGEST_US);
        histogram.record(micros.clamp(1, LONGEST_US))?;
    }
    let ms = |micros: u64| micros as f64 / 1e3;
    Ok(Spread {
        mean: histogram.mean() / 1e3,
        p50: ms(histogram.value_at_quantile(0.5)),
        p90: ms(histogram.value_at_quantile(0.9)),
        p99: ms(histogram.value_at_quantile(0.99)),
        max: ms(histogram.max()),
    })
}

/// Prints the report on standard output.
///
/// # Errors
/// When standard output is closed.
pub(super) fn print(report: &Report, as_json: bool) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if as_json {
        serde_json::to_writer_pretty(&mut out, report)?;
        writeln!(out)?;
        return Ok(());
    }
    writeln!(
        out,
        "{} ok, {} failed in {:.1} s; prompts of {:.0} tokens, answers of {:.0} (means)",
        report.n_ok,
        report.n_failed,
        report.wall_s,
        report.prompt_tokens_mean,
        report.output_tokens_mean
    )?;
    if let Some(error) = &report.first_error {
        writeln!(out, "first failure: {error}")?;
    }
    writeln!(
        out,
        "{:<10}{:>10}{:>10}{:>10}{:>10}{:>10}",
        "ms", "mean", "p50", "p90", "p99", "max"
    )?;
    let rows = [
        ("TTFT", &report.ttft_ms),
        ("ITL", &report.itl_ms),
        ("TPOT", &report.tpot_ms),
        ("E2E", &report.e2e_ms),
    ];
    for (name, s) in rows {
        writeln!(
            out,
            "{name:<10}{:>10.1}{:>10.1}{:>10.1}{:>10.1}{:>10.1}",
            s.mean, s.p50, s.p90, s.p99, s.max
        )?;
    }
    writeln!(
        out,
        "{:.2} requests/s, {:.1} output tokens/s, {:.1} prompt tokens/s",
        report.requests_per_s, report.output_tokens_per_s, report.prompt_tokens_per_s
    )?;
    writeln!(
        out,
        "goodput {:.2} requests/s (TTFT <= {} ms and the request's p99 ITL <= {} ms)",
        report.goodput_per_s, report.slo.ttft_ms_max, report.slo.itl_ms_max
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::Usage;

    fn timing(ttft_ms: u64, gaps_ms: &[u64]) -> Timing {
        let gaps: Vec<Duration> = gaps_ms
            .iter()
            .map(|&ms| Duration::from_millis(ms))
            .collect();
        let ttft = Duration::from_millis(ttft_ms);
        Timing {
            ttft,
            e2e: ttft + gaps.iter().sum::<Duration>(),
            usage: Usage {
                prompt_tokens: 10,
                completion_tokens: gaps.len() as u64 + 1,
            },
            gaps,
        }
    }

    #[test]
    fn goodput_counts_only_requests_that_kept_every_slo() {
        let run = Run {
            wall: Duration::from_secs(2),
            results: vec![
                Ok(timing(100, &[10, 10])),
                Ok(timing(900, &[10, 10])),
                Ok(timing(100, &[10, 90])),
                Err(anyhow::anyhow!("refused")),
            ],
        };
        let slo = Slo {
            ttft_ms_max: 500.0,
            itl_ms_max: 50.0,
        };
        let report = summarise(&run, slo).expect("in range");
        assert_eq!((report.n_ok, report.n_failed), (3, 1));
        assert!((report.goodput_per_s - 0.5).abs() < 1e-9);
        assert!((report.requests_per_s - 1.5).abs() < 1e-9);
    }

    #[test]
    fn tpot_is_the_mean_gap_by_tokens() {
        assert_eq!(
            tpot(&timing(100, &[10, 30])),
            Some(Duration::from_millis(20))
        );
        assert_eq!(tpot(&timing(100, &[])), None);
    }
}
