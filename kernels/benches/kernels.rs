//! Speed of each kernel beside what bounds it: `cargo bench -p tidemill-kernels -- [THREADS] [scalar|avx2|avx512] [WORD]`.
//!
//! Shapes are those of SmolLM2-135M. A number is the best of many short runs, since on a shared machine an average
//! measures the neighbours. The share is that of a plain FMA loop (arithmetic) and of a plain sum over a large
//! buffer (memory), both measured here first with as many threads. A word picks the lines that contain it.

use std::hint::black_box;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tidemill_core::{BlockIdx, KvDtype, KvLayout};
use tidemill_kernels::cpu::{
    Activations, AttentionPlan, HeadShape, Isa, LayerCache, Output, PackedMatrix, RawMatrix, Span,
    Team, WeightFormat, attend, matmul, rms_norm, silu_mul, store_kv,
};
use tidemill_kernels::memory::KvArena;

const MEASURE: Duration = Duration::from_millis(700);

/// Best seconds of one run.
fn best(mut run: impl FnMut()) -> f64 {
    let begin = Instant::now();
    let mut best = f64::INFINITY;
    while begin.elapsed() < MEASURE {
        let start = Instant::now();
        run();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

/// Best seconds of this thread's own computing, where the system tells: a long run is always interrupted by somebody.
fn best_alone(mut run: impl FnMut()) -> f64 {
    let computed = || {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        let nanoseconds: f64 = text.split_whitespace().next()?.parse().ok()?;
        Some(nanoseconds * 1e-9)
    };
    if computed().is_none() {
        return best(run);
    }
    let begin = Instant::now();
    let mut best = f64::INFINITY;
    while begin.elapsed() < MEASURE {
        let start = Instant::now();
        let before = computed();
        run();
        // The system counts at its ticks: below some of those the clock is better.
        let elapsed = start.elapsed().as_secs_f64();
        let own = computed()
            .zip(before)
            .map_or(elapsed, |(after, before)| after - before);
        best = best.min(if own < 0.02 {
            elapsed
        } else {
            own.min(elapsed)
        });
    }
    best
}

struct Bench {
    out: std::io::Stdout,
    isa: Isa,
    team: Team,
    flops: f64,
    bytes: f64,
    word: String,
}

impl Bench {
    /// Best seconds; those of other programs do not count when the team is one thread.
    fn best(&mut self, mut run: impl FnMut(Isa, &mut Team)) -> f64 {
        let (isa, team) = (self.isa, &mut self.team);
        match team.n_threads() {
            1 => best_alone(|| run(isa, team)),
            _ => best(|| run(isa, team)),
        }
    }

    /// What the machine does at best: FMA operations and bytes read, per second.
    fn measure_bounds(&mut self) -> std::io::Result<()> {
        let n_parts = self.team.n_threads() * 4;
        let total = AtomicU64::new(0);
        let n_steps = 20_000;
        let seconds = best(|| {
            self.team.run(n_parts, &|part| {
                let mut sums = [[part as f32; 8]; 12];
                multiply_add(&mut sums, n_steps);
                total.fetch_add(sums[0][0].to_bits().into(), Ordering::Relaxed);
            });
        });
        self.flops = (n_parts * n_steps * 12 * 8 * 2) as f64 / seconds;
        let words = vec![1_u64; 16 << 20];
        let seconds = best(|| {
            self.team.run_ranges(words.len(), 1 << 16, &|range| {
                let sum = words[range].iter().fold(0, |sum: u64, word| sum ^ word);
                total.fetch_add(sum, Ordering::Relaxed);
            });
        });
        self.bytes = (words.len() * 8) as f64 / seconds;
        writeln!(
            self.out,
            "{} threads, {}: {:.0} GFLOP/s, {:.1} GB/s at best",
            self.team.n_threads(),
            self.isa.name(),
            self.flops / 1e9,
            self.bytes / 1e9
        )
    }

    fn report(&mut self, name: &str, seconds: f64, flops: f64, bytes: f64) -> std::io::Result<()> {
        let (flops, bytes) = (flops / seconds, bytes / seconds);
        writeln!(
            self.out,
            "{name:<44} {:>9.1} us {:>7.1} GFLOP/s ({:>3.0} %) {:>6.1} GB/s ({:>3.0} %)",
            seconds * 1e6,
            flops / 1e9,
            100.0 * flops / self.flops,
            bytes / 1e9,
            100.0 * bytes / self.bytes
        )
    }

    fn matmul(
        &mut self,
        format: WeightFormat,
        shape: (usize, usize),
        rows: usize,
    ) -> std::io::Result<()> {
        let (n_outputs, n_inputs) = shape;
        let name = format!("matmul {format:?} [{n_outputs}, {n_inputs}] x {rows} rows");
        if !name.contains(&self.word) {
            return Ok(());
        }
        let weights = weights(format, n_outputs, n_inputs);
        let mut input = Activations::new(weights.is_quantised());
        input.resize(rows, n_inputs);
        fill(input.values_mut());
        input.quantise(self.isa);
        let mut output = vec![0.0; rows * n_outputs];
        let seconds = self.best(|isa, team| {
            let products = Output::Replace(black_box(&mut output));
            matmul(isa, team, &[&weights], &input, products);
        });
        let flops = (2 * rows * n_outputs * n_inputs) as f64;
        self.report(&name, seconds, flops, weights.n_bytes() as f64)
    }

    fn attention(&mut self, start: usize, rows: usize, streams: usize) -> std::io::Result<()> {
        let name = format!("attention {streams} x {rows} rows at {start}");
        if !name.contains(&self.word) {
            return Ok(());
        }
        let layout = KvLayout::new([0; 32], 1, 3, 64, KvDtype::F16).expect("a valid shape");
        let n_blocks = (start + rows).div_ceil(16);
        let arena = KvArena::new(&layout, (n_blocks * streams) as u32).expect("memory");
        let spans: Vec<Span> = (0..streams)
            .map(|stream| Span {
                first_row: stream * rows,
                n_rows: rows,
                start_position: start,
                block_table: (0..n_blocks)
                    .map(|block| BlockIdx((block * streams + stream) as u32))
                    .collect(),
            })
            .collect();
        let cache = LayerCache {
            arena: &arena,
            layer: 0,
        };
        let shape = HeadShape {
            n_heads: 9,
            n_kv_heads: 3,
            head_dim: 64,
            scale: 0.125,
        };
        let stride = 15 * 64;
        let mut all = vec![0.0; (start + rows) * stride];
        fill(&mut all);
        for span in &spans {
            let whole = Span {
                first_row: 0,
                n_rows: start + rows,
                start_position: 0,
                block_table: span.block_table.clone(),
            };
            store_kv(self.isa, &mut self.team, cache, &[whole], (&all, stride));
        }
        let mut plan = AttentionPlan::new(shape, spans);
        let mut queries = vec![0.0; rows * streams * stride];
        fill(&mut queries);
        let mut output = Activations::new(true);
        let seconds = self.best(|isa, team| {
            attend(
                (isa, team),
                &mut plan,
                cache,
                (&queries, stride),
                &mut output,
            );
        });
        let n_pairs = (rows * streams) as f64 * (start as f64 + (rows as f64 + 1.0) / 2.0);
        let bytes = (streams * (start + rows) * 2 * 3 * 64 * 2) as f64;
        self.report(&name, seconds, n_pairs * 9.0 * 64.0 * 4.0, bytes)
    }

    fn rows(&mut self) -> std::io::Result<()> {
        if !"rows".contains(&self.word) {
            return Ok(());
        }
        let mut input = vec![0.0; 3072 * 64];
        fill(&mut input);
        let weight = vec![1.0; 576];
        let mut output = Activations::new(true);
        let isa = self.isa;
        let one = &input[..576];
        let seconds = best(|| {
            for _ in 0..16 {
                rms_norm(isa, &mut self.team, one, (&weight, 1e-5), &mut output);
            }
        });
        self.report("norm and quantise a row of 576", seconds / 16.0, 0.0, 0.0)?;
        let one = &input[..3072];
        let seconds = best(|| {
            for _ in 0..16 {
                silu_mul(isa, &mut self.team, one, 1536, &mut output);
            }
        });
        self.report("gate and quantise a row of 1,536", seconds / 16.0, 0.0, 0.0)?;
        let seconds = best(|| {
            for _ in 0..100 {
                self.team.run(2, &|part| {
                    black_box(part);
                });
            }
        });
        self.report("an operation of two empty parts", seconds / 100.0, 0.0, 0.0)
    }
}

#[inline(never)]
fn multiply_add(sums: &mut [[f32; 8]; 12], n_steps: usize) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("fma") {
        // SAFETY: just looked.
        return unsafe { multiply_add_fma(sums, n_steps) };
    }
    for _ in 0..n_steps {
        for sum in sums.iter_mut().flatten() {
            *sum = *sum * 0.999 + 0.5;
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn multiply_add_fma(sums: &mut [[f32; 8]; 12], n_steps: usize) {
    use std::arch::x86_64::*;
    let (a, b) = (_mm256_set1_ps(0.999), _mm256_set1_ps(0.5));
    // SAFETY: each array holds 8 floats.
    let mut held = sums
        .each_ref()
        .map(|sum| unsafe { _mm256_loadu_ps(sum.as_ptr()) });
    for _ in 0..n_steps {
        for sum in &mut held {
            *sum = _mm256_fmadd_ps(*sum, a, b);
        }
    }
    for (held, sum) in held.into_iter().zip(sums) {
        // SAFETY: as above.
        unsafe { _mm256_storeu_ps(sum.as_mut_ptr(), held) };
    }
}

fn fill(values: &mut [f32]) {
    for (i, value) in values.iter_mut().enumerate() {
        *value = ((i * 37 + i / 11) % 199) as f32 / 99.5 - 1.0;
    }
}

fn weights(format: WeightFormat, n_outputs: usize, n_inputs: usize) -> PackedMatrix {
    let (elements, bytes) = format.block();
    // A small exponent in every scale and float, whatever else the bits say.
    let pattern = |i: usize| {
        if i.is_multiple_of(2) {
            (i % 251) as u8
        } else {
            0x2c
        }
    };
    let bytes: Vec<u8> = (0..n_outputs * n_inputs / elements * bytes)
        .map(pattern)
        .collect();
    let raw = RawMatrix {
        format,
        n_outputs,
        n_inputs,
        bytes: &bytes,
    };
    PackedMatrix::pack(&raw, |i| i).expect("a valid shape")
}

fn main() -> std::io::Result<()> {
    let (mut isa, mut n_threads, mut word) = (Isa::detect(), 2, String::new());
    let arguments = std::env::args().skip(1);
    for argument in arguments.filter(|argument| !argument.starts_with('-')) {
        let all = Isa::available();
        match all.into_iter().find(|isa| isa.name() == argument) {
            Some(named) => isa = named,
            None => match argument.parse() {
                Ok(number) => n_threads = number,
                Err(_) => word = argument,
            },
        }
    }
    let mut bench = Bench {
        out: std::io::stdout(),
        isa,
        team: Team::new(n_threads)?,
        flops: 1.0,
        bytes: 1.0,
        word,
    };
    bench.measure_bounds()?;
    use WeightFormat as F;
    let layers = [
        (F::Q4_1, [1, 4, 8, 32, 512]),
        (F::Q5_1, [1, 4, 8, 32, 512]),
        (F::Q8_0, [1, 4, 8, 32, 512]),
        (F::F16, [1, 4, 8, 64, 512]),
        (F::Bf16, [1, 4, 8, 64, 512]),
        (F::F32, [1, 4, 8, 64, 512]),
    ];
    for (format, all_rows) in layers {
        for rows in all_rows {
            bench.matmul(format, (3072, 576), rows)?;
            bench.matmul(format, (576, 1536), rows)?;
        }
    }
    for format in [F::Q4K, F::Q5K, F::Q6K] {
        for rows in [1, 4, 8, 32, 512] {
            bench.matmul(format, (3072, 768), rows)?;
        }
    }
    for rows in [1, 8, 32] {
        bench.matmul(F::Q4_1, (49_152, 576), rows)?;
        bench.matmul(F::Q8_0, (49_152, 576), rows)?;
        bench.matmul(F::F16, (49_152, 576), rows)?;
    }
    for (start, rows, streams) in [
        (127, 1, 1),
        (4095, 1, 1),
        (160, 1, 8),
        (0, 512, 1),
        (3584, 512, 1),
    ] {
        bench.attention(start, rows, streams)?;
    }
    bench.rows()
}
