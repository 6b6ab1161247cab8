use super::*;
use crate::executor::{GivenTokens, NoProgress, PromptLogprobSpec, SampleSpec, SequenceId};
use std::sync::OnceLock;
use tidemill_core::{BlockIdx, KvDtype, LogprobSpec, SamplingParams};
use tidemill_kernels::cpu::Isa;
use tidemill_kernels::memory::SliceAt;
use tidemill_model_files::WeightType;
use tidemill_model_files::testing::{TinySpec, write_gguf, write_hf_dir};

/// A file or folder for one test, removed at its end.
struct TempPath(std::path::PathBuf);

impl TempPath {
    fn new(name: &str) -> Self {
        let name = format!("tidemill-cpu-{}-{name}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for TempPath {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn load(spec: &TinySpec, isa: Isa, name: &str) -> Arc<Model> {
    let path = TempPath::new(name);
    write_gguf(&path.0, spec).expect("the temporary folder takes files");
    let files = tidemill_model_files::open(&path.0).expect("a valid model");
    Arc::new(Model::load(&files, isa).expect("a supported model"))
}

fn q4_1() -> Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    let load = || {
        load(
            &TinySpec::new(3, WeightType::Q4_1),
            Isa::detect(),
            "q4_1.gguf",
        )
    };
    Arc::clone(MODEL.get_or_init(load))
}

fn executor(model: &Arc<Model>, dtype: KvDtype, n_threads: usize) -> CpuExecutor {
    let arena = KvArena::new(&model.facts(dtype).layout, 64).expect("small");
    CpuExecutor::new(Arc::clone(model), arena, n_threads).expect("it fits")
}

fn prompt(seed: u32, n: usize) -> Vec<TokenId> {
    (0..n as u32)
        .map(|i| (i * 37 + seed * 11 + i * i) % 256)
        .collect()
}

/// An item whose blocks start at `first_block`.
fn item(id: u64, tokens: &[TokenId], start: usize, first_block: u32) -> StepItem {
    let n_blocks = (start + tokens.len()).div_ceil(16) as u32;
    StepItem {
        sequence_id: SequenceId(id),
        tokens: tokens.to_vec(),
        start_position: start as u32,
        block_table: (first_block..first_block + n_blocks)
            .map(BlockIdx)
            .collect(),
        sample: None,
        prompt_logprobs: None,
        report_progress: false,
    }
}

fn sampling(mut item: StepItem) -> StepItem {
    item.sample = Some(SampleSpec {
        params: SamplingParams::greedy(),
        output_idx: 0,
        given: GivenTokens::default(),
        barred: Vec::new(),
        logprobs: LogprobSpec {
            output_top: Some(2),
            prompt_top: None,
            logits_digest: true,
        },
    });
    item
}

fn step(executor: &mut CpuExecutor, items: Vec<StepItem>) -> StepOutput {
    let plan = StepPlan { step_id: 1, items };
    executor.step(&plan, &mut NoProgress).expect("a valid plan")
}

fn digest(output: &StepOutput, item_idx: usize) -> u64 {
    let sampled = output.items[item_idx].sampled.as_ref().expect("sampled");
    sampled.logits_digest.expect("asked for")
}

/// All bytes of the first blocks.
fn block_bytes(executor: &CpuExecutor, n_blocks: u32) -> Vec<Vec<u8>> {
    let layout = executor.arena.layout();
    let mut slices = Vec::new();
    for block in 0..n_blocks {
        for group in 0..layout.n_groups() {
            let group = LayerGroupIdx(group);
            let mut bytes = vec![0; layout.group_byte_range(group).len()];
            let at = SliceAt {
                block: BlockIdx(block),
                group,
            };
            executor.arena.copy_out(at, &mut bytes).expect("exists");
            slices.push(bytes);
        }
    }
    slices
}

#[test]
fn chunks_batches_threads_and_variants_give_the_same_bits() {
    let tokens = prompt(1, 90);
    for (weight_type, dtype) in [
        (WeightType::Q4_1, KvDtype::F16),
        (WeightType::Q8_0, KvDtype::Bf16),
        (WeightType::F32, KvDtype::F32),
    ] {
        let spec = TinySpec::new(7, weight_type);
        let reference = load(&spec, Isa::Scalar, "reference.gguf");
        let mut whole = executor(&reference, dtype, 1);
        let output = step(&mut whole, vec![sampling(item(1, &tokens, 0, 0))]);
        let (wanted, kv) = (digest(&output, 0), block_bytes(&whole, 6));

        let model = load(&spec, Isa::detect(), "detected.gguf");
        for n_threads in [1, 3] {
            let mut cut = executor(&model, dtype, n_threads);
            let mut start = 0;
            for n in [1, 15, 17, 30, 26, 1] {
                // A neighbour shares every step.
                let neighbour = sampling(item(2, &prompt(start as u32, 1 + n / 3), 0, 20));
                let own = sampling(item(1, &tokens[start..start + n], start, 0));
                let output = step(&mut cut, vec![neighbour, own]);
                start += n;
                if start == tokens.len() {
                    assert_eq!(digest(&output, 1), wanted, "{weight_type:?}");
                }
            }
            assert_eq!(block_bytes(&cut, 6), kv, "{weight_type:?}");
        }
    }
}

#[test]
fn a_gguf_file_and_a_directory_of_the_same_numbers_agree() {
    let spec = TinySpec::new(5, WeightType::F32);
    let directory = TempPath::new("hf");
    write_hf_dir(&directory.0, &spec).expect("the temporary folder takes files");
    let files = tidemill_model_files::open(&directory.0).expect("a valid model");
    let from_directory = Arc::new(Model::load(&files, Isa::detect()).expect("supported"));
    let from_file = load(&spec, Isa::detect(), "f32.gguf");
    let digests = [from_directory, from_file].map(|model| {
        let mut executor = executor(&model, KvDtype::F32, 1);
        digest(
            &step(&mut executor, vec![sampling(item(1, &prompt(4, 40), 0, 0))]),
            0,
        )
    });
    assert_eq!(
        digests[0], digests[1],
        "rope pairs are put in order at load"
    );
}

#[test]
fn unused_tail_positions_are_zero_in_a_block_used_before() {
    let model = q4_1();
    let mut executor = executor(&model, KvDtype::F16, 1);
    step(&mut executor, vec![item(1, &prompt(1, 32), 0, 0)]);
    step(&mut executor, vec![item(2, &prompt(2, 20), 0, 0)]);
    let used = block_bytes(&executor, 2);
    let mut fresh = self::executor(&model, KvDtype::F16, 1);
    step(&mut fresh, vec![item(2, &prompt(2, 20), 0, 0)]);
    assert_eq!(used, block_bytes(&fresh, 2));
}

#[test]
fn prompt_logprobs_do_not_depend_on_the_chunk_and_follow_the_targets() {
    let model = q4_1();
    let tokens = prompt(3, 50);
    let ask = |mut item: StepItem, targets: &[TokenId]| {
        item.prompt_logprobs = Some(PromptLogprobSpec {
            targets: targets.to_vec(),
            n_top: 3,
        });
        item
    };
    let mut whole = executor(&model, KvDtype::F16, 2);
    let output = step(&mut whole, vec![ask(item(1, &tokens, 0, 0), &tokens[1..])]);
    let wanted = &output.items[0].prompt_logprobs;
    assert_eq!(wanted.len(), 49);
    assert!(
        wanted
            .iter()
            .all(|one| one.top.len() == 3 && one.logprob <= one.top[0].logprob)
    );
    let mut cut = executor(&model, KvDtype::F16, 2);
    let first = step(
        &mut cut,
        vec![ask(item(1, &tokens[..33], 0, 0), &tokens[1..34])],
    );
    let second = step(
        &mut cut,
        vec![ask(item(1, &tokens[33..], 33, 0), &tokens[34..])],
    );
    let both = [&first, &second].map(|output| &output.items[0].prompt_logprobs[..]);
    assert_eq!(both.concat(), *wanted);
}

#[test]
fn progress_names_each_group_of_exported_sequences_once() {
    struct Seen(Vec<LayerProgress>);
    impl ProgressSink for Seen {
        fn layers_done(&mut self, progress: LayerProgress) {
            self.0.push(progress);
        }
    }
    let model = q4_1();
    let mut executor = executor(&model, KvDtype::F16, 1);
    let mut exported = item(1, &prompt(1, 20), 0, 0);
    exported.report_progress = true;
    let plan = StepPlan {
        step_id: 4,
        items: vec![item(2, &prompt(2, 5), 0, 10), exported],
    };
    let mut seen = Seen(Vec::new());
    executor.step(&plan, &mut seen).expect("a valid plan");
    let n_groups = executor.arena.layout().n_groups();
    let wanted = (0..n_groups).map(|group| LayerProgress {
        sequence_id: SequenceId(1),
        group: LayerGroupIdx(group),
        n_tokens: 20,
    });
    assert_eq!(seen.0, wanted.collect::<Vec<_>>());
}

#[test]
fn plans_that_do_not_hold_are_refused_before_anything_is_written() {
    let model = q4_1();
    let mut executor = executor(&model, KvDtype::F16, 1);
    let good = item(1, &prompt(1, 20), 0, 0);
    let mut far = good.clone();
    far.block_table[1] = BlockIdx(64);
    let mut few = good.clone();
    few.block_table.pop();
    let mut unknown = good.clone();
    unknown.tokens[3] = 1 << 20;
    let mut none = good.clone();
    none.tokens.clear();
    let mut late = good.clone();
    late.start_position = 512;
    let mut twice = good.clone();
    twice.block_table[1] = twice.block_table[0];
    for (bad, word) in [
        (vec![far], "64"),
        (vec![few], "blocks"),
        (vec![unknown], "1048576"),
        (vec![none], "no token"),
        (vec![late], "512"),
        (vec![twice], "two places"),
        (vec![good.clone(), good.clone()], "twice"),
        (
            vec![good.clone(), item(2, &prompt(2, 20), 0, 1)],
            "written twice",
        ),
        (
            vec![good.clone(), item(2, &prompt(2, 1), 40, 1)],
            "reads block 1",
        ),
    ] {
        let plan = StepPlan {
            step_id: 1,
            items: bad,
        };
        let failure = executor.step(&plan, &mut NoProgress).expect_err(word);
        assert_eq!(failure.code, FailureCode::Internal);
        assert!(failure.message.contains(word), "{failure}");
    }
    let zero = |bytes: &Vec<u8>| bytes.iter().all(|b| *b == 0);
    assert!(block_bytes(&executor, 64).iter().all(zero));
}

#[test]
fn a_row_without_numbers_fails_alone() {
    let model = q4_1();
    let mut executor = executor(&model, KvDtype::F16, 1);
    let tokens = prompt(1, 18);
    step(
        &mut executor,
        vec![item(1, &tokens[..17], 0, 0), item(2, &tokens[..17], 0, 10)],
    );
    // NaN in the KV of the first sequence, as a broken machine might leave it.
    let at = SliceAt {
        block: BlockIdx(0),
        group: LayerGroupIdx(0),
    };
    let n = executor.arena.layout().group_byte_range(at.group).len();
    executor.arena.copy_in(at, &vec![0xff; n]).expect("exists");
    let next = |id, first_block| sampling(item(id, &tokens[17..], 17, first_block));
    let output = step(&mut executor, vec![next(1, 0), next(2, 10)]);
    let failure = output.items[0].failure.as_ref().expect("NaN");
    assert_eq!(failure.code, FailureCode::NumericFault);
    assert!(output.items[0].sampled.is_none());
    assert!(output.items[1].failure.is_none() && output.items[1].sampled.is_some());
}

#[test]
fn a_large_step_is_cut_without_changing_it() {
    let items = [(1, 700, 0), (2, 5, 0), (3, 600, 9)];
    let plan = StepPlan {
        step_id: 1,
        items: items
            .map(|(id, n, start)| item(id, &prompt(1, n), start, 0))
            .to_vec(),
    };
    let passes = passes(&plan, 512);
    let rows = |pass: &Vec<Part>| pass.iter().map(|part| part.tokens.len()).sum::<usize>();
    assert_eq!(passes.iter().map(rows).collect::<Vec<_>>(), [512, 512, 281]);
    for (item_idx, (_, n, _)) in items.iter().enumerate() {
        let parts = passes
            .iter()
            .flatten()
            .filter(|part| part.item_idx == item_idx);
        assert_eq!(
            parts
                .flat_map(|part| part.tokens.clone())
                .collect::<Vec<_>>(),
            (0..*n).collect::<Vec<_>>()
        );
    }
}

#[test]
fn an_arena_of_another_model_is_refused() {
    let other = load(
        &TinySpec::new(99, WeightType::Q4_1),
        Isa::detect(),
        "other.gguf",
    );
    let arena = KvArena::new(&other.facts(KvDtype::F16).layout, 2).expect("small");
    assert!(CpuExecutor::new(q4_1(), arena, 1).is_err());
}

/// One row for each kind of pipeline; the last one cannot be drawn.
fn rows_of_every_kind(tokens: &[TokenId]) -> Vec<SampleSpec> {
    let kind = |params: SamplingParams| SampleSpec {
        params: SamplingParams { seed: 3, ..params },
        output_idx: 2,
        given: GivenTokens {
            prompt: tokens.to_vec(),
            output: vec![1, 2],
        },
        barred: Vec::new(),
        logprobs: LogprobSpec::default(),
    };
    let greedy = SamplingParams::greedy();
    let warm = SamplingParams {
        temperature: 1.5,
        ..greedy.clone()
    };
    let bias = |token| tidemill_core::TokenBias {
        token,
        bias: -100.0,
    };
    let mut rows = vec![
        kind(greedy.clone()),
        kind(warm.clone()),
        kind(SamplingParams {
            repetition_penalty: 1.5,
            frequency_penalty: 2.0,
            ..warm.clone()
        }),
        kind(SamplingParams {
            typical_p: 0.3,
            min_p: 0.2,
            top_k: 30,
            ..warm.clone()
        }),
        kind(SamplingParams {
            logit_bias: (0..250).map(bias).collect(),
            ..greedy.clone()
        }),
        kind(SamplingParams {
            temperature: 1e-45,
            ..greedy.clone()
        }),
        kind(warm),
        kind(greedy),
    ];
    let n_rows = rows.len();
    rows[n_rows - 2].barred = (0..200).collect();
    rows[n_rows - 1].barred = (0..100_000).collect();
    rows
}

#[test]
fn b051_each_row_of_a_batch_has_a_pipeline_of_its_own() {
    let model = q4_1();
    let mut executor = executor(&model, KvDtype::F16, 2);
    let tokens = prompt(9, 12);
    let rows = rows_of_every_kind(&tokens);
    let n_good = rows.len() - 1;
    let items = rows.into_iter().enumerate().map(|(idx, spec)| StepItem {
        sample: Some(spec),
        ..item(idx as u64, &tokens, 0, idx as u32)
    });
    let items: Vec<StepItem> = items.collect();
    let together = step(&mut executor, items.clone());
    let mut backwards = step(&mut executor, items.iter().rev().cloned().collect());
    backwards.items.reverse();
    assert_eq!(together.items, backwards.items);
    for (idx, item) in items.into_iter().enumerate() {
        let alone = step(&mut executor, vec![item]);
        assert_eq!(alone.items[0], together.items[idx], "row {idx}");
        assert_eq!(together.items[idx].failure.is_none(), idx < n_good);
    }
    let drawn = |idx: usize| together.items[idx].sampled.as_ref().expect("drawn").token;
    assert_eq!(drawn(0), drawn(5), "a tiny temperature is greedy");
    assert!(drawn(4) >= 250 && drawn(6) >= 200, "bias and bars hold");
}
