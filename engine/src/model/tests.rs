//! Every family against an independent implementation, against itself in the other container, and against itself cut up.

use super::*;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use tidemill_core::{BlockIdx, TokenId};
use tidemill_kernels::cpu::Span;
use tidemill_kernels::memory::KvArena;
use tidemill_model_files::testing::{TinyScaling, TinySpec, write_gguf, write_hf_dir};
use tidemill_model_files::{WeightType, open};

const FAMILIES: [Family; 7] = [
    Family::Llama,
    Family::Mistral,
    Family::Mixtral,
    Family::Qwen2,
    Family::Qwen3,
    Family::Qwen3Moe,
    Family::Gemma3,
];
/// Largest distance between a logit and the reference's.
const TOLERANCE: f64 = 1e-3;

/// A folder for one test, removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("tidemill-model-{}-{name}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("the temporary folder takes folders");
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn load(path: &Path, isa: Isa) -> Model {
    let files = open(path).expect("a valid model");
    Model::load(&files, isa).expect("a supported model")
}

fn from_gguf(folder: &Folder, spec: &TinySpec, isa: Isa) -> Model {
    let path = folder.0.join("tiny.gguf");
    write_gguf(&path, spec).expect("the folder takes files");
    load(&path, isa)
}

fn from_directory(folder: &Folder, spec: &TinySpec) -> (PathBuf, Model) {
    let path = folder.0.join("tiny");
    write_hf_dir(&path, spec).expect("the folder takes files");
    let model = load(&path, Isa::detect());
    (path, model)
}

fn tokens(n: u32) -> Vec<TokenId> {
    (0..n).map(|i| (i * 37 + i * i * 11 + 5) % 256).collect()
}

/// How a sequence is computed.
struct Way<'a> {
    n_threads: usize,
    /// Tokens of each pass.
    chunks: &'a [usize],
    /// Tokens of another sequence that shares each pass.
    n_neighbours: usize,
}

const AT_ONCE: Way<'_> = Way {
    n_threads: 1,
    chunks: &[usize::MAX],
    n_neighbours: 0,
};

/// Logits of all positions, `[tokens, vocab]`.
fn logits(model: &Model, dtype: KvDtype, tokens: &[TokenId], way: &Way<'_>) -> Vec<f32> {
    let arena = KvArena::new(&model.facts(dtype).layout, 64).expect("small");
    let mut team = Team::new(way.n_threads).expect("threads start");
    let mut work = Workspace::new(model);
    let blocks = |first: u32, n: usize| (first..first + n.div_ceil(16) as u32).map(BlockIdx);
    let mut logits = Vec::new();
    let mut start = 0;
    for chunk in way.chunks.iter().cycle() {
        let end = tokens.len().min(start + (*chunk).min(tokens.len()));
        let mut spans = Vec::new();
        let mut rows: Vec<TokenId> = tokens[..way.n_neighbours].to_vec();
        if way.n_neighbours > 0 {
            spans.push(Span {
                first_row: 0,
                n_rows: way.n_neighbours,
                start_position: 0,
                block_table: blocks(40, way.n_neighbours).collect(),
            });
        }
        spans.push(Span {
            first_row: rows.len(),
            n_rows: end - start,
            start_position: start,
            block_table: blocks(0, end).collect(),
        });
        rows.extend_from_slice(&tokens[start..end]);
        let mut batch = Batch::new(model, rows, spans);
        model.forward((&mut team, &mut work), &arena, &mut batch, &mut |_| {});
        let wanted: Vec<usize> = (0..end - start).map(|row| row + way.n_neighbours).collect();
        logits.extend_from_slice(model.logits(&mut team, &mut work, &wanted));
        start = end;
        if start == tokens.len() {
            break;
        }
    }
    logits
}

/// What `tests/scripts/reference_model.py` makes of a directory.
fn reference(directory: &Path, tokens: &[TokenId]) -> Vec<f64> {
    let script = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/scripts/reference_model.py"
    );
    let output = Command::new("python3")
        .arg(script)
        .arg(directory)
        .arg(format!("{tokens:?}"))
        .env("PYTHONPATH", python_path())
        .output()
        .expect("python3 is installed: `make test-needs` looks for it");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{told}\n`make test-needs` installs numpy"
    );
    let rows: Value = serde_json::from_slice(&output.stdout).expect("the script prints JSON");
    let rows = rows.as_array().expect("an array of rows").iter();
    rows.flat_map(|row| row.as_array().expect("a row").iter())
        .map(|value| value.as_f64().expect("a number"))
        .collect()
}

/// Where `make test-needs` puts numpy, and what the caller set.
fn python_path() -> String {
    let cache = std::env::var("TIDEMILL_CACHE").unwrap_or_else(|_| {
        let home = std::env::var("HOME").expect("HOME is set");
        format!("{home}/.cache/tidemill")
    });
    let before = std::env::var("PYTHONPATH").unwrap_or_default();
    format!("{cache}/python:{before}")
}

fn assert_near(found: &[f32], wanted: &[f64], label: &str) {
    assert_eq!(found.len(), wanted.len(), "{label}");
    let distance = found
        .iter()
        .zip(wanted)
        .map(|(found, wanted)| (f64::from(*found) - wanted).abs())
        .fold(0.0, f64::max);
    assert!(distance <= TOLERANCE, "{label}: {distance}");
}

/// Both containers against the reference, and against each other.
fn check_against_reference(spec: &TinySpec, label: &str) {
    let folder = Folder::new(label);
    let tokens = tokens(200);
    let (path, model) = from_directory(&folder, spec);
    let directory = logits(&model, KvDtype::F32, &tokens, &AT_ONCE);
    assert_near(&directory, &reference(&path, &tokens), label);
    let model = from_gguf(&folder, spec, Isa::detect());
    let file = logits(&model, KvDtype::F32, &tokens, &AT_ONCE);
    if spec.scaling == TinyScaling::Llama3 {
        // The divisors of the file are rounded.
        let directory: Vec<f64> = directory.iter().map(|logit| f64::from(*logit)).collect();
        assert_near(&file, &directory, label);
    } else {
        assert!(file == directory, "{label}: the containers differ");
    }
}

#[test]
fn each_family_agrees_with_the_reference_in_both_containers() {
    for family in FAMILIES {
        let spec = TinySpec::of(family, 11, WeightType::F32);
        check_against_reference(&spec, &format!("{family:?}"));
        let untied = TinySpec {
            tied_head: false,
            weight_type: WeightType::BF16,
            ..TinySpec::of(family, 12, WeightType::BF16)
        };
        check_against_reference(&untied, &format!("{family:?}-untied"));
    }
}

/// B061: positions below and above the original length.
#[test]
fn each_rope_scaling_agrees_with_the_reference_in_both_containers() {
    for scaling in [TinyScaling::Linear, TinyScaling::Llama3, TinyScaling::Yarn] {
        for family in [Family::Llama, Family::Qwen2] {
            let spec = TinySpec {
                scaling,
                head_dim: 32,
                ..TinySpec::of(family, 13, WeightType::F32)
            };
            check_against_reference(&spec, &format!("{family:?}-{scaling:?}"));
        }
    }
    let gemma = TinySpec {
        scaling: TinyScaling::Linear,
        ..TinySpec::of(Family::Gemma3, 14, WeightType::F32)
    };
    check_against_reference(&gemma, "gemma-linear");
}

/// What the tiny models of both containers leave at its default.
#[test]
fn numbers_that_only_a_directory_states_count() {
    for (family, from, to) in [
        (
            Family::Gemma3,
            "\"query_pre_attn_scalar\": 32",
            "\"query_pre_attn_scalar\": 50",
        ),
        (
            Family::Gemma3,
            "\"sliding_window_pattern\": 6",
            "\"sliding_window_pattern\": 3",
        ),
        (
            Family::Qwen3Moe,
            "\"norm_topk_prob\": true",
            "\"norm_topk_prob\": false",
        ),
        (
            Family::Llama,
            "\"rope_scaling\": null",
            "\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 3.0, \"attention_factor\": 1.5, \
             \"beta_fast\": 8, \"beta_slow\": 2, \"truncate\": false, \
             \"original_max_position_embeddings\": 100}",
        ),
        (
            Family::Llama,
            "\"rope_scaling\": null",
            "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 3.0, \"mscale\": 1.5, \
             \"mscale_all_dim\": 0.5, \"original_max_position_embeddings\": 100}",
        ),
    ] {
        let folder = Folder::new("stated");
        let tokens = tokens(60);
        let spec = TinySpec::of(family, 15, WeightType::F32);
        let (path, model) = from_directory(&folder, &spec);
        let before = logits(&model, KvDtype::F32, &tokens, &AT_ONCE);
        let config = path.join("config.json");
        let text = std::fs::read_to_string(&config).expect("we wrote it");
        assert!(text.contains(from), "{from}");
        std::fs::write(&config, text.replace(from, to)).expect("writable");
        let after = logits(&load(&path, Isa::detect()), KvDtype::F32, &tokens, &AT_ONCE);
        assert!(after != before, "{to}");
        assert_near(&after, &reference(&path, &tokens), to);
    }
}

/// Promise 1, for what the families add: int8 activations, f16 KV, windows that begin within a tile.
#[test]
fn chunks_neighbours_threads_and_variants_give_the_same_bits() {
    let tokens = tokens(330);
    for family in FAMILIES {
        let folder = Folder::new(&format!("bits-{family:?}"));
        let mut spec = TinySpec::of(family, 16, WeightType::Q4_1);
        spec.window = spec.window.map(|_| 150);
        spec.n_layers = spec.n_layers.min(6);
        let model = from_gguf(&folder, &spec, Isa::Scalar);
        let wanted = logits(&model, KvDtype::F16, &tokens, &AT_ONCE);
        assert!(wanted.iter().all(|logit| logit.is_finite()));
        for isa in Isa::available() {
            let model = from_gguf(&folder, &spec, isa);
            for (n_threads, chunks, n_neighbours) in [
                (1, &[64, 1, 7][..], 0),
                (3, &[100][..], 5),
                (2, &[1, 129, 17][..], 1),
            ] {
                let way = Way {
                    n_threads,
                    chunks,
                    n_neighbours,
                };
                let found = logits(&model, KvDtype::F16, &tokens, &way);
                assert!(found == wanted, "{family:?} {} {chunks:?}", isa.name());
            }
        }
    }
}

#[test]
fn a_divisor_that_is_none_is_refused() {
    let folder = Folder::new("divisor");
    let spec = TinySpec {
        scaling: TinyScaling::Llama3,
        ..TinySpec::default()
    };
    let path = folder.0.join("tiny.gguf");
    write_gguf(&path, &spec).expect("the folder takes files");
    let mut bytes = std::fs::read(&path).expect("we wrote it");
    let files = open(&path).expect("a valid model");
    let view = files.tensors.get(TensorName::RopeDivisors).expect("there");
    let value: Vec<u8> = view.bytes.to_vec();
    drop(files);
    let at = bytes.windows(value.len()).position(|part| part == value);
    let at = at.expect("the divisors are in the file");
    bytes[at..at + 4].copy_from_slice(&(-1.0_f32).to_le_bytes());
    std::fs::write(&path, bytes).expect("writable");
    let files = open(&path).expect("the file is well-formed");
    let error = Model::load(&files, Isa::Scalar)
        .expect_err("refused")
        .to_string();
    assert!(
        error.contains("RopeDivisors: value -1 for pair 0"),
        "{error}"
    );
}
