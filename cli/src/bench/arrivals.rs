//! Which requests a run sends, and when: all alike from the flags, or as a trace recorded them.
//!
//! Traces are read as published: Azure's CSV (`TIMESTAMP,ContextTokens,GeneratedTokens`), Mooncake's JSON lines
//! (`timestamp` in ms, lengths, `hash_ids` of 512-token prefix blocks) and CSV samples of lengths alone
//! (`num_prefill_tokens,num_decode_tokens`), each plain or `.gz`. A trace of a big cluster is made to fit a small
//! machine with `--rate` (arrivals, their pattern kept) and `--length-scale` (tokens, shared prefixes kept).

use super::BenchArgs;
use super::prompt::Segment;
use anyhow::{Context, Result, bail, ensure};
use flate2::read::GzDecoder;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde::Deserialize;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::time::Duration;

/// Tokens of a prefix block of a Mooncake trace.
const TRACE_BLOCK_TOKENS: u32 = 512;
/// Longest prompt or answer that a line may ask for, after scaling.
const TOKENS_MAX: u32 = 1_000_000;
/// Longest line of a trace.
const LINE_BYTES_MAX: u64 = 1 << 20;

/// One request of a run.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Arrival {
    /// When it is due, from the start; `None`: as soon as a client is free.
    pub(super) at: Option<Duration>,
    pub(super) prompt: Vec<Segment>,
    pub(super) output_tokens: u32,
}

/// One line of a trace.
struct Line {
    /// From the trace's own zero.
    at: Option<Duration>,
    prompt_tokens: u32,
    output_tokens: u32,
    /// Identities of the prompt's blocks; empty when nothing is shared.
    block_ids: Vec<u64>,
}

/// All requests of a run, in the order of their arrival.
///
/// # Errors
/// Names the file and line that cannot be used.
pub(super) fn plan(args: &BenchArgs) -> Result<Vec<Arrival>> {
    let Some(path) = &args.trace else {
        return Ok(alike(args));
    };
    let lines = read(path, args.requests as usize)?;
    ensure!(!lines.is_empty(), "{}: no requests in it", path.display());
    let times = match args.rate {
        _ if lines.iter().any(|line| line.at.is_none()) => due_times(args, lines.len()),
        rate => recorded_times(&lines, rate),
    };
    let arrivals = lines.iter().zip(times).enumerate();
    arrivals
        .map(|(idx, (line, at))| {
            Ok(Arrival {
                at,
                prompt: segments(args, idx, line)?,
                output_tokens: scaled(line.output_tokens, args.length_scale)?,
            })
        })
        .collect()
}

fn alike(args: &BenchArgs) -> Vec<Arrival> {
    let n = args.requests as usize;
    let shared = Segment {
        seed: args.seed ^ 0x5EED,
        n_tokens: args.shared_prefix_tokens,
    };
    let arrivals = due_times(args, n).into_iter().enumerate();
    arrivals
        .map(|(idx, at)| {
            let own = Segment {
                seed: own_seed(args, idx),
                n_tokens: args.prompt_tokens - args.shared_prefix_tokens,
            };
            let segments = [shared, own].into_iter().filter(|it| it.n_tokens > 0);
            Arrival {
                at,
                prompt: segments.collect(),
                output_tokens: args.output_tokens,
            }
        })
        .collect()
}

fn own_seed(args: &BenchArgs, idx: usize) -> u64 {
    args.seed
        .wrapping_mul(0x9E37_79B9)
        .wrapping_add(idx as u64 + 1)
}

/// Poisson arrivals at `--rate`, or none: a closed loop.
fn due_times(args: &BenchArgs, n: usize) -> Vec<Option<Duration>> {
    let mut rng = SmallRng::seed_from_u64(args.seed ^ 0xA771);
    let mut at = 0.0;
    (0..n)
        .map(|_| {
            let rate = args.rate?;
            let uniform: f64 = rng.random_range(f64::EPSILON..1.0);
            at += -uniform.ln() / rate;
            Some(Duration::from_secs_f64(at))
        })
        .collect()
}

/// The trace's own times from its first request on, stretched to a mean rate when one is given.
fn recorded_times(lines: &[Line], rate: Option<f64>) -> Vec<Option<Duration>> {
    let first = lines.first().and_then(|line| line.at).unwrap_or_default();
    let last = lines.last().and_then(|line| line.at).unwrap_or_default();
    let span_s = last.saturating_sub(first).as_secs_f64();
    let stretch = match rate {
        Some(rate) if span_s > 0.0 => lines.len() as f64 / rate / span_s,
        _ => 1.0,
    };
    let from_first = |at: Duration| at.saturating_sub(first).mul_f64(stretch);
    lines.iter().map(|line| line.at.map(from_first)).collect()
}

fn scaled(tokens: u32, scale: f64) -> Result<u32> {
    let scaled = (f64::from(tokens) * scale).round().max(1.0);
    ensure!(
        scaled <= f64::from(TOKENS_MAX),
        "{tokens} tokens of the trace times --length-scale {scale} is more than {TOKENS_MAX}"
    );
    Ok(scaled as u32)
}

/// A prompt's blocks, each with the words of its identity, so that equal blocks share their text.
fn segments(args: &BenchArgs, idx: usize, line: &Line) -> Result<Vec<Segment>> {
    let n_tokens = scaled(line.prompt_tokens, args.length_scale)?;
    if line.block_ids.is_empty() {
        let seed = own_seed(args, idx);
        return Ok(vec![Segment { seed, n_tokens }]);
    }
    let block_tokens = scaled(TRACE_BLOCK_TOKENS, args.length_scale)?;
    let mut left = n_tokens;
    let blocks = line.block_ids.iter().map_while(|id| {
        let n_tokens = left.min(block_tokens);
        left -= n_tokens;
        let seed = args.seed ^ id.wrapping_mul(0x2545_F491_4F6C_DD1D);
        (n_tokens > 0).then_some(Segment { seed, n_tokens })
    });
    Ok(blocks.collect())
}

fn read(path: &Path, n_lines_max: usize) -> Result<Vec<Line>> {
    let file = File::open(path).with_context(|| format!("--trace {}", path.display()))?;
    let is_packed = path.extension().is_some_and(|extension| extension == "gz");
    let source: Box<dyn Read> = match is_packed {
        true => Box::new(GzDecoder::new(file)),
        false => Box::new(file),
    };
    let mut source = BufReader::new(source);
    let first = source
        .fill_buf()
        .with_context(|| path.display().to_string())?;
    let lines = match first.first() {
        Some(b'{') => json_lines(source, n_lines_max),
        _ => csv_lines(source, n_lines_max),
    };
    lines.with_context(|| format!("--trace {}", path.display()))
}

fn json_lines(mut source: impl BufRead, n_lines_max: usize) -> Result<Vec<Line>> {
    #[derive(Deserialize)]
    struct Record {
        timestamp: u64,
        input_length: u32,
        output_length: u32,
        #[serde(default)]
        hash_ids: Vec<u64>,
    }
    let mut lines = Vec::new();
    let mut text = String::new();
    while lines.len() < n_lines_max {
        text.clear();
        let n_bytes = source.by_ref().take(LINE_BYTES_MAX).read_line(&mut text)?;
        if n_bytes == 0 {
            break;
        }
        let record: Record = serde_json::from_str(&text)
            .with_context(|| format!("line {} is no request of a trace", lines.len() + 1))?;
        lines.push(Line {
            at: Some(Duration::from_millis(record.timestamp)),
            prompt_tokens: record.input_length,
            output_tokens: record.output_length,
            block_ids: record.hash_ids,
        });
    }
    Ok(lines)
}

fn csv_lines(source: impl Read, n_lines_max: usize) -> Result<Vec<Line>> {
    let mut table = csv::Reader::from_reader(source);
    let header = table.headers()?.clone();
    let column = |name: &str| header.iter().position(|column| column == name);
    let columns = match (
        column("ContextTokens").or(column("num_prefill_tokens")),
        column("GeneratedTokens").or(column("num_decode_tokens")),
    ) {
        (Some(prompt), Some(output)) => (column("TIMESTAMP"), prompt, output),
        _ => bail!(
            "columns {:?}; ContextTokens and GeneratedTokens (or num_prefill_tokens and num_decode_tokens) are needed",
            header.iter().collect::<Vec<_>>()
        ),
    };
    let records = table.records().take(n_lines_max).enumerate();
    records
        .map(|(idx, record)| {
            csv_line(&record?, columns).with_context(|| format!("line {}", idx + 2))
        })
        .collect()
}

fn csv_line(
    record: &csv::StringRecord,
    (time, prompt, output): (Option<usize>, usize, usize),
) -> Result<Line> {
    let number = |column: usize| -> Result<u32> {
        let text = record.get(column).unwrap_or_default();
        text.parse()
            .with_context(|| format!("{text:?} is no count of tokens"))
    };
    let at = match time.and_then(|column| record.get(column)) {
        None => None,
        Some(text) => {
            let time: jiff::civil::DateTime = text
                .parse()
                .with_context(|| format!("{text:?} is no time"))?;
            let since =
                time.duration_since(jiff::civil::DateTime::constant(1970, 1, 1, 0, 0, 0, 0));
            Some(Duration::try_from(since).with_context(|| format!("{text:?} is before 1970"))?)
        }
    };
    Ok(Line {
        at,
        prompt_tokens: number(prompt)?,
        output_tokens: number(output)?,
        block_ids: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::io::Write;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        bench: BenchArgs,
    }

    fn args(flags: &[&str]) -> BenchArgs {
        let all = ["bench"].iter().chain(flags);
        Command::try_parse_from(all).expect("valid flags").bench
    }

    fn trace(name: &str, text: &str) -> tempfile::TempPath {
        let mut file = tempfile::Builder::new()
            .suffix(name)
            .tempfile()
            .expect("a file");
        if name.ends_with(".gz") {
            let mut packer = flate2::write::GzEncoder::new(&mut file, flate2::Compression::fast());
            packer.write_all(text.as_bytes()).expect("packed");
            packer.finish().expect("packed");
        } else {
            file.write_all(text.as_bytes()).expect("written");
        }
        file.into_temp_path()
    }

    fn plan_of(path: &Path, flags: &[&str]) -> Result<Vec<Arrival>> {
        let path = path.to_str().expect("UTF-8");
        plan(&args(&[&["--trace", path], flags].concat()))
    }

    fn seconds(arrivals: &[Arrival]) -> Vec<f64> {
        let at = |it: &Arrival| it.at.expect("recorded").as_secs_f64();
        arrivals.iter().map(at).collect()
    }

    const AZURE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
        2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.6805900,396,109\n2023-11-16 18:15:48.6805900,10,1\n";

    #[test]
    fn azure_lines_keep_their_times_and_lengths() {
        let path = trace(".csv.gz", AZURE);
        let arrivals = plan_of(&path, &["--requests", "2"]).expect("valid");
        assert_eq!(seconds(&arrivals), [0.0, 4.0]);
        assert_eq!(arrivals[1].prompt[0].n_tokens, 396);
        assert_eq!(arrivals[1].output_tokens, 109);
        let arrivals = plan_of(
            &path,
            &["--requests", "2", "--rate", "0.25", "--length-scale", "0.5"],
        );
        let arrivals = arrivals.expect("valid");
        assert_eq!(seconds(&arrivals), [0.0, 8.0]);
        assert_eq!(arrivals[0].prompt[0].n_tokens, 187);
        assert_eq!(arrivals[0].output_tokens, 22);
    }

    #[test]
    fn equal_block_ids_are_equal_segments() {
        let path = trace(
            ".jsonl",
            "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 5, \"hash_ids\": [0, 1]}\n\
             {\"timestamp\": 500, \"input_length\": 1030, \"output_length\": 6, \"hash_ids\": [0, 2, 3]}\n",
        );
        let arrivals = plan_of(&path, &[]).expect("valid");
        assert_eq!(seconds(&arrivals), [0.0, 0.5]);
        assert_eq!(arrivals[0].prompt[0], arrivals[1].prompt[0]);
        assert_ne!(arrivals[0].prompt[1].seed, arrivals[1].prompt[1].seed);
        let lengths = |it: &Arrival| it.prompt.iter().map(|s| s.n_tokens).collect::<Vec<_>>();
        assert_eq!(lengths(&arrivals[0]), [512, 88]);
        assert_eq!(lengths(&arrivals[1]), [512, 512, 6]);
    }

    #[test]
    fn lengths_alone_arrive_as_the_flags_say() {
        let path = trace(
            ".csv",
            "num_prefill_tokens,num_decode_tokens,num_total_tokens\n74,918,992\n290,905,1195\n",
        );
        let arrivals = plan_of(&path, &[]).expect("valid");
        assert!(arrivals.iter().all(|it| it.at.is_none()));
        assert_eq!(arrivals[1].output_tokens, 905);
        let arrivals = plan_of(&path, &["--rate", "2"]).expect("valid");
        assert!(arrivals.iter().all(|it| it.at.is_some()));
    }

    #[test]
    fn what_is_no_trace_is_refused_with_its_line() {
        for (text, what) in [
            ("a,b\n1,2\n", "ContextTokens"),
            ("ContextTokens,GeneratedTokens\n1,x\n", "line 2"),
            ("{\"timestamp\": 1}\n", "line 1"),
            ("", "ContextTokens"),
            ("ContextTokens,GeneratedTokens\n", "no requests"),
            (
                "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n",
                "is no time",
            ),
        ] {
            let path = trace(".csv", text);
            let error = format!("{:#}", plan_of(&path, &[]).expect_err(text));
            assert!(error.contains(what), "{error}");
        }
        let error = plan_of(Path::new("/nowhere.csv"), &[]).expect_err("missing");
        assert!(format!("{error:#}").contains("/nowhere.csv"));
        let path = trace(".csv", AZURE);
        let error = plan_of(&path, &["--length-scale", "10000"]).expect_err("too long");
        assert!(format!("{error:#}").contains("--length-scale"));
    }

    #[test]
    fn open_loop_arrivals_have_the_asked_rate() {
        let due = due_times(&args(&["--rate", "50"]), 2000);
        let end = due.last().expect("2000").expect("open loop").as_secs_f64();
        assert!(
            (36.0..44.0).contains(&end),
            "2000 arrivals at 50/s took {end} s"
        );
        assert!(due.is_sorted());
    }

    #[test]
    fn alike_requests_share_their_prefix_and_nothing_else() {
        let arrivals = alike(&args(&[
            "--prompt-tokens",
            "50",
            "--shared-prefix-tokens",
            "20",
        ]));
        assert!(
            arrivals
                .iter()
                .all(|it| it.at.is_none() && it.prompt[0].n_tokens == 20)
        );
        assert_eq!(arrivals[0].prompt[0], arrivals[1].prompt[0]);
        assert_ne!(arrivals[0].prompt[1], arrivals[1].prompt[1]);
    }
}
