//! Speed of whole forward passes: `cargo bench -p tidemill-engine --bench model -- MODEL [THREADS]`.
//!
//! Prints tokens per second of prefill and decode, and how many bytes of weights a second a single stream reads, which
//! is what bounds it. Each number is the best of some runs: on a shared machine the others measure neighbours.

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;
use tidemill_core::{BlockIdx, KvDtype, LogprobSpec, SamplingParams};
use tidemill_engine::executor::cpu::CpuExecutor;
use tidemill_engine::executor::{Executor, NoProgress, SampleSpec, SequenceId, StepItem, StepPlan};
use tidemill_engine::model::Model;
use tidemill_kernels::cpu::Isa;
use tidemill_kernels::memory::KvArena;

const CHUNK_TOKENS: usize = 512;
const N_RUNS: usize = 5;
/// Blocks of one stream: 4,096 positions and some.
const STREAM_BLOCKS: u32 = 260;

struct Bench {
    executor: CpuExecutor,
}

impl Bench {
    /// Seconds of one step that feeds each stream `n_tokens` at `start`.
    fn step(&mut self, n_streams: u32, start: usize, n_tokens: usize) -> f64 {
        let items = (0..n_streams).map(|stream| StepItem {
            sequence_id: SequenceId(u64::from(stream)),
            tokens: (0..n_tokens as u32)
                .map(|i| (i * 7 + stream) % 40_000)
                .collect(),
            start_position: start as u32,
            block_table: (0..((start + n_tokens).div_ceil(16)) as u32)
                .map(|block| BlockIdx(stream * STREAM_BLOCKS + block))
                .collect(),
            sample: Some(SampleSpec {
                params: SamplingParams::greedy(),
                output_idx: 0,
                logprobs: LogprobSpec::default(),
            }),
            prompt_logprobs: None,
            report_progress: false,
        });
        let plan = StepPlan {
            step_id: 1,
            items: items.collect(),
        };
        let begin = Instant::now();
        self.executor
            .step(&plan, &mut NoProgress)
            .expect("a valid step");
        begin.elapsed().as_secs_f64()
    }

    fn best(&mut self, n_streams: u32, start: usize, n_tokens: usize) -> f64 {
        let times = (0..N_RUNS).map(|_| self.step(n_streams, start, n_tokens));
        times.fold(f64::INFINITY, f64::min)
    }
}

fn main() -> std::io::Result<()> {
    let mut arguments = std::env::args()
        .skip(1)
        .filter(|argument| argument != "--bench");
    let mut out = std::io::stdout();
    let Some(path) = arguments.next() else {
        return writeln!(
            out,
            "usage: cargo bench -p tidemill-engine --bench model -- MODEL [THREADS]"
        );
    };
    let n_threads = arguments.next().and_then(|n| n.parse().ok()).unwrap_or(2);
    let begin = Instant::now();
    let files = tidemill_model_files::open(&path).expect("the model opens");
    let model = Arc::new(Model::load(&files, Isa::detect()).expect("the model is supported"));
    let n_bytes = model.n_weight_bytes() as f64;
    writeln!(
        out,
        "{model:?}: loaded in {:.2} s",
        begin.elapsed().as_secs_f64()
    )?;
    let layout = model.facts(KvDtype::F16).layout;
    let arena = KvArena::new(&layout, STREAM_BLOCKS * 32).expect("memory for 32 streams");
    let executor = CpuExecutor::new(model, arena, n_threads).expect("threads start");
    let mut bench = Bench { executor };
    for start in [0, 3584] {
        let seconds = bench.best(1, start, CHUNK_TOKENS);
        let rate = CHUNK_TOKENS as f64 / seconds;
        writeln!(
            out,
            "prefill of {CHUNK_TOKENS} tokens at {start}: {rate:.0} tokens/s"
        )?;
    }
    for (n_streams, start) in [(1, 128), (1, 4095), (8, 160), (32, 160)] {
        let seconds = bench.best(n_streams, start, 1);
        writeln!(
            out,
            "decode, {n_streams} streams at {start}: {:.0} tokens/s, {:.1} ms a step, {:.1} GB/s of weights",
            f64::from(n_streams) / seconds,
            seconds * 1e3,
            n_bytes / seconds / 1e9
        )?;
    }
    Ok(())
}
