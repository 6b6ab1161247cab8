//! The real model against an independent implementation.
//!
//! `tests/golden/smollm2-135m.json` holds 13 prompts with the log-probabilities and greedy tokens of a float32 numpy
//! implementation. The default path (int8 activations, f16 KV) and the float path (f32 weights, f32 KV) are fed the same
//! tokens and must stay within the tolerances that came with the file; free-running greedy output must
//! equal the reference as far as that is not a toss-up.

use serde_json::Value;
use std::path::PathBuf;
use std::sync::Arc;
use tidemill_core::{BlockIdx, KvDtype, LogprobSpec, SamplingParams};
use tidemill_engine::executor::cpu::CpuExecutor;
use tidemill_engine::executor::{
    Executor, GivenTokens, NoProgress, PromptLogprob, PromptLogprobSpec, SampleSpec, SequenceId,
    StepItem, StepItemOutput, StepPlan,
};
use tidemill_engine::model::Model;
use tidemill_kernels::cpu::Isa;
use tidemill_kernels::memory::KvArena;

/// Positions of a step: as a node with default settings would cut a long prompt.
const STEP_TOKENS: usize = 512;
/// Where the reference's best two differ by this much, the best must be the same.
const MARGIN: f64 = 0.5;

struct Case {
    name: String,
    prompt: Vec<u32>,
    generated: Vec<u32>,
    prompt_logprobs: Vec<f64>,
    /// For each generated position, (token, log-probability), best first.
    top: Vec<Vec<(u32, f64)>>,
    n_safe: usize,
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().expect("an array of ids").iter();
    ids.map(|id| id.as_u64().expect("an id") as u32).collect()
}

fn floats(value: &Value) -> Vec<f64> {
    let values = value.as_array().expect("an array of numbers").iter();
    values.map(|v| v.as_f64().expect("a number")).collect()
}

fn cases() -> Vec<Case> {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/golden/smollm2-135m.json"
    );
    let text = std::fs::read_to_string(path).expect("golden data is part of the repository");
    let all: Value = serde_json::from_str(&text).expect("golden data is JSON");
    let all = all.get("cases").unwrap_or(&all);
    let pair = |pair: &Value| {
        let pair = floats(pair);
        (pair[0] as u32, pair[1])
    };
    let case = |case: &Value| Case {
        name: case["name"].as_str().expect("a name").to_owned(),
        prompt: ids(&case["prompt_ids"]),
        generated: ids(&case["generated_ids"]),
        prompt_logprobs: floats(&case["prompt_logprobs"]),
        top: case["top5"]
            .as_array()
            .expect("top tokens")
            .iter()
            .map(|top| top.as_array().expect("five").iter().map(pair).collect())
            .collect(),
        n_safe: case["safe_tokens"].as_u64().expect("a count") as usize,
    };
    all.as_array()
        .expect("an array of cases")
        .iter()
        .map(case)
        .collect()
}

fn model_path(name: &str) -> PathBuf {
    let cache = std::env::var_os("TIDEMILL_CACHE")
        .map(PathBuf::from)
        .unwrap_or_else(|| {
            let home = std::env::var_os("HOME").expect("HOME is set");
            PathBuf::from(home).join(".cache/tidemill")
        });
    let path = cache.join("models").join(name);
    assert!(
        path.exists(),
        "{} is missing: run `make test-needs` once, it fetches the model and derives the float one",
        path.display()
    );
    path
}

fn executor(name: &str, kv_dtype: KvDtype) -> CpuExecutor {
    let files = tidemill_model_files::open(model_path(name)).expect("the model opens");
    let model = Arc::new(Model::load(&files, Isa::detect()).expect("the model is supported"));
    let arena =
        KvArena::new(&model.facts(kv_dtype).layout, 128).expect("memory for 2,048 positions");
    CpuExecutor::new(model, arena, 2).expect("threads start")
}

fn run(executor: &mut CpuExecutor, item: StepItem) -> StepItemOutput {
    let plan = StepPlan {
        step_id: 1,
        items: vec![item],
    };
    let mut output = executor.step(&plan, &mut NoProgress).expect("a valid step");
    let output = output.items.remove(0);
    assert_eq!(output.failure, None);
    output
}

fn item(tokens: &[u32], start: usize) -> StepItem {
    let n_blocks = (start + tokens.len()).div_ceil(16) as u32;
    StepItem {
        sequence_id: SequenceId(1),
        tokens: tokens.to_vec(),
        start_position: start as u32,
        block_table: (0..n_blocks).map(BlockIdx).collect(),
        sample: None,
        prompt_logprobs: None,
        report_progress: false,
    }
}

/// Log-probability, and the most likely token, of each token from the second on.
fn teacher_forced(executor: &mut CpuExecutor, tokens: &[u32]) -> Vec<PromptLogprob> {
    let mut found = Vec::new();
    for start in (0..tokens.len()).step_by(STEP_TOKENS) {
        let end = (start + STEP_TOKENS).min(tokens.len());
        let mut item = item(&tokens[start..end], start);
        item.prompt_logprobs = Some(PromptLogprobSpec {
            targets: tokens[start + 1..(end + 1).min(tokens.len())].to_vec(),
            n_top: 1,
        });
        found.extend(run(executor, item).prompt_logprobs);
    }
    found
}

/// Greedy tokens, one step each after the prompt.
fn greedy(executor: &mut CpuExecutor, prompt: &[u32], n: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    let mut n_done = 0;
    while tokens.len() < prompt.len() + n {
        let end = tokens.len().min(n_done + STEP_TOKENS);
        let mut item = item(&tokens[n_done..end], n_done);
        if end == tokens.len() {
            item.sample = Some(SampleSpec {
                params: SamplingParams::greedy(),
                output_idx: (tokens.len() - prompt.len()) as u32,
                given: GivenTokens::default(),
                barred: Vec::new(),
                logprobs: LogprobSpec::default(),
            });
        }
        n_done = end;
        if let Some(sampled) = run(executor, item).sampled {
            tokens.push(sampled.token);
        }
    }
    tokens.split_off(prompt.len())
}

/// Mean distance of all log-probabilities; checks the top tokens on the way.
fn mean_distance(executor: &mut CpuExecutor, cases: &[Case]) -> f64 {
    let (mut sum, mut n) = (0.0, 0);
    for case in cases {
        let tokens = [&case.prompt[..], &case.generated].concat();
        let found = teacher_forced(executor, &tokens);
        assert_eq!(found.len(), tokens.len() - 1);
        let generated = case.top.iter().map(|top| top[0].1);
        let wanted: Vec<f64> = case
            .prompt_logprobs
            .iter()
            .copied()
            .chain(generated)
            .collect();
        assert_eq!(wanted.len(), found.len(), "{}", case.name);
        for (found, wanted) in found.iter().zip(&wanted) {
            sum += (f64::from(found.logprob) - wanted).abs();
            n += 1;
        }
        for (found, top) in found[case.prompt.len() - 1..].iter().zip(&case.top) {
            if top[0].1 - top[1].1 >= MARGIN {
                assert_eq!(found.top[0].token, top[0].0, "{}", case.name);
            }
        }
    }
    sum / f64::from(n)
}

fn assert_free_running(executor: &mut CpuExecutor, cases: &[Case]) {
    for case in cases {
        let found = greedy(executor, &case.prompt, case.n_safe);
        assert_eq!(found, case.generated[..case.n_safe], "{}", case.name);
    }
}

#[test]
fn the_default_path_stays_close_to_the_reference() {
    let cases = cases();
    assert_eq!(cases.len(), 13);
    let mut executor = executor("SmolLM2-135M-Instruct.Q4_1.gguf", KvDtype::F16);
    let mean = mean_distance(&mut executor, &cases);
    assert!(mean <= 0.06, "mean distance of log-probabilities {mean}");
    assert_free_running(&mut executor, &cases);
}

#[test]
fn the_float_path_is_the_reference_to_three_digits() {
    let cases = cases();
    let mut executor = executor("SmolLM2-135M-f32", KvDtype::F32);
    let mean = mean_distance(&mut executor, &cases);
    assert!(mean <= 1e-3, "mean distance of log-probabilities {mean}");
    assert_free_running(&mut executor, &cases);
}
