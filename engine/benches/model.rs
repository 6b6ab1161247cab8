//! Speed of whole forward passes: `cargo bench -p tidemill-engine --bench model -- MODEL [--threads N] [--row ROW]...`.
//!
//! A row is `prefill:TOKENS` (in chunks of 512) or `decode:STREAMS@CONTEXT` (64 steps from there on, greedy sampling
//! included). Printed are tokens per second and what bounds them: bytes of weights and KV that a step reads. With
//! `--json` each row is one JSON line, which `beside_llama_cpp.py` reads.

use anyhow::{Context, Result, bail, ensure};
use std::io::Write;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Instant;
use tidemill_core::{BlockIdx, KvDtype, LogprobSpec, SamplingParams};
use tidemill_engine::executor::cpu::CpuExecutor;
use tidemill_engine::executor::{
    Executor, GivenTokens, NoProgress, SampleSpec, SequenceId, StepItem, StepPlan,
};
use tidemill_engine::model::Model;
use tidemill_kernels::cpu::Isa;
use tidemill_kernels::memory::KvArena;

const CHUNK_TOKENS: usize = 512;
const BLOCK_TOKENS: usize = 16;
/// Runs of a row; the best counts, since the others measure neighbours.
const N_RUNS: usize = 3;
const N_STEPS: usize = 64;
/// The rows of the table in docs/performance.md.
const ROWS: [&str; 6] = [
    "prefill:512",
    "prefill:4096",
    "decode:1@128",
    "decode:1@4096",
    "decode:8@128",
    "decode:32@128",
];

/// What is measured.
#[derive(Clone, Copy)]
enum Row {
    Prefill { n_tokens: usize },
    Decode { n_streams: u32, context: usize },
}

impl FromStr for Row {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let expected =
            || format!("row {text:?}: prefill:TOKENS or decode:STREAMS@CONTEXT is expected");
        let (kind, numbers) = text.split_once(':').with_context(expected)?;
        let row = match (kind, numbers.split_once('@')) {
            ("prefill", None) => Self::Prefill {
                n_tokens: numbers.parse().with_context(expected)?,
            },
            ("decode", Some((streams, context))) => Self::Decode {
                n_streams: streams.parse().with_context(expected)?,
                context: context.parse().with_context(expected)?,
            },
            _ => bail!(expected()),
        };
        ensure!(row.n_streams() > 0 && row.n_positions() > 0, expected());
        Ok(row)
    }
}

impl Row {
    fn n_streams(self) -> u32 {
        match self {
            Self::Prefill { .. } => 1,
            Self::Decode { n_streams, .. } => n_streams,
        }
    }

    /// Positions of each stream.
    fn n_positions(self) -> usize {
        match self {
            Self::Prefill { n_tokens } => n_tokens,
            Self::Decode { context, .. } => context + N_STEPS,
        }
    }
}

struct Arguments {
    model: String,
    n_threads: usize,
    rows: Vec<(String, Row)>,
    is_json: bool,
}

impl Arguments {
    fn read(arguments: impl Iterator<Item = String>) -> Result<Self> {
        let mut arguments = arguments.filter(|argument| argument != "--bench");
        let model = arguments.next().context(
            "usage: cargo bench -p tidemill-engine --bench model -- MODEL [--threads N] [--row ROW]... [--json]",
        )?;
        let (mut n_threads, mut rows, mut is_json) = (2, Vec::new(), false);
        while let Some(flag) = arguments.next() {
            let mut value = || {
                arguments
                    .next()
                    .with_context(|| format!("{flag} needs a value"))
            };
            match flag.as_str() {
                "--threads" => n_threads = value()?.parse().context("--threads")?,
                "--row" => rows.push(value()?),
                "--json" => is_json = true,
                _ => bail!("unknown flag {flag}; --threads, --row and --json are known"),
            }
        }
        if rows.is_empty() {
            rows = ROWS.map(str::to_owned).to_vec();
        }
        let rows = rows
            .into_iter()
            .map(|text| Ok((text.clone(), text.parse()?)));
        Ok(Self {
            model,
            n_threads,
            rows: rows.collect::<Result<_>>()?,
            is_json,
        })
    }
}

struct Bench {
    executor: CpuExecutor,
    /// Blocks that each stream may fill.
    stream_blocks: usize,
}

impl Bench {
    fn open(model: &Arc<Model>, n_threads: usize, row: Row) -> Result<Self> {
        let stream_blocks = row.n_positions().div_ceil(BLOCK_TOKENS);
        let n_blocks = u32::try_from(stream_blocks)? * row.n_streams();
        let layout = model.facts(KvDtype::F16).layout;
        let arena = KvArena::new(&layout, n_blocks).context("no memory for the KV blocks")?;
        let executor = CpuExecutor::new(Arc::clone(model), arena, n_threads)?;
        Ok(Self {
            executor,
            stream_blocks,
        })
    }

    /// Feeds `n_tokens` to each of the first `n_streams` streams at position `start`.
    fn step(&mut self, n_streams: u32, start: usize, n_tokens: usize) -> Result<()> {
        let n_blocks = (start + n_tokens).div_ceil(BLOCK_TOKENS);
        let items = (0..n_streams).map(|stream| {
            let first = stream as usize * self.stream_blocks;
            let blocks = first..first + n_blocks;
            StepItem {
                sequence_id: SequenceId(u64::from(stream)),
                tokens: (0..n_tokens as u32)
                    .map(|i| (i * 7 + stream) % 1_000)
                    .collect(),
                start_position: start as u32,
                block_table: blocks.map(|block| BlockIdx(block as u32)).collect(),
                sample: Some(SampleSpec {
                    params: SamplingParams::greedy(),
                    output_idx: 0,
                    given: GivenTokens::default(),
                    barred: Vec::new(),
                    logprobs: LogprobSpec::default(),
                }),
                prompt_logprobs: None,
                report_progress: false,
            }
        });
        let plan = StepPlan {
            step_id: 1,
            items: items.collect(),
        };
        self.executor.step(&plan, &mut NoProgress)?;
        Ok(())
    }

    /// Computes a stream's first `n_tokens`, chunk by chunk.
    fn prefill(&mut self, n_streams: u32, n_tokens: usize) -> Result<()> {
        for start in (0..n_tokens).step_by(CHUNK_TOKENS) {
            self.step(n_streams, start, CHUNK_TOKENS.min(n_tokens - start))?;
        }
        Ok(())
    }

    /// Seconds of one run of a row, and the tokens that it counts.
    fn run(&mut self, row: Row) -> Result<(f64, usize)> {
        match row {
            Row::Prefill { n_tokens } => {
                let begin = Instant::now();
                self.prefill(1, n_tokens)?;
                Ok((begin.elapsed().as_secs_f64(), n_tokens))
            }
            Row::Decode { n_streams, context } => {
                let begin = Instant::now();
                for position in context..context + N_STEPS {
                    self.step(n_streams, position, 1)?;
                }
                Ok((begin.elapsed().as_secs_f64(), N_STEPS * n_streams as usize))
            }
        }
    }
}

/// Tokens per second of the best run, and bytes that one step reads.
fn measure(model: &Arc<Model>, n_threads: usize, row: Row) -> Result<(f64, f64)> {
    let mut bench = Bench::open(model, n_threads, row)?;
    if let Row::Decode { n_streams, context } = row {
        bench.prefill(n_streams, context)?;
    }
    let mut best: f64 = 0.0;
    for _ in 0..N_RUNS {
        let (seconds, n_tokens) = bench.run(row)?;
        best = best.max(n_tokens as f64 / seconds);
    }
    let position_bytes = model.facts(KvDtype::F16).layout.block_bytes() / BLOCK_TOKENS;
    let kv_bytes = match row {
        Row::Prefill { .. } => 0,
        Row::Decode { n_streams, context } => n_streams as usize * context * position_bytes,
    };
    Ok((best, (model.n_weight_bytes() + kv_bytes) as f64))
}

fn main() -> Result<()> {
    let arguments = Arguments::read(std::env::args().skip(1))?;
    let mut out = std::io::stdout();
    let begin = Instant::now();
    let files = tidemill_model_files::open(&arguments.model)?;
    let model = Arc::new(Model::load(&files, Isa::detect())?);
    let load_s = begin.elapsed().as_secs_f64();
    if !arguments.is_json {
        writeln!(out, "{model:?}: loaded in {load_s:.2} s")?;
    }
    for (name, row) in arguments.rows {
        let (rate, step_bytes) = measure(&model, arguments.n_threads, row)?;
        let step_gbytes_s = match row {
            Row::Prefill { .. } => None,
            Row::Decode { n_streams, .. } => Some(rate / f64::from(n_streams) * step_bytes / 1e9),
        };
        if arguments.is_json {
            let gbytes = step_gbytes_s.map_or("null".to_owned(), |rate| format!("{rate:.2}"));
            writeln!(
                out,
                r#"{{"row": "{name}", "tokens_per_s": {rate:.2}, "gbytes_per_s": {gbytes}}}"#
            )?;
        } else {
            let bound = step_gbytes_s.map_or(String::new(), |rate| {
                format!(", {rate:.1} GB/s of weights and KV")
            });
            writeln!(out, "{name}: {rate:.0} tokens/s{bound}")?;
        }
    }
    Ok(())
}
