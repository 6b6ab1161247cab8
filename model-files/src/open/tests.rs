use super::*;
use crate::config::{Family, NormWeights, RopeScaling, RopeStyle, Yarn};
use crate::tensors::{ExpertTensor, LayerTensor, TensorName, WeightType};
use crate::testing::{GgufWriter, TinySpec, gguf_bytes, scratch};

/// Writes the bytes and opens them.
fn open_bytes(label: &str, bytes: &[u8]) -> Result<ModelFiles, LoadError> {
    let dir = scratch(label);
    let file = dir.join("tiny.gguf");
    std::fs::write(&file, bytes).expect("the scratch directory takes files");
    let result = open(&file);
    std::fs::remove_dir_all(dir).expect("a mapped file can be unlinked");
    result
}

fn assert_refused(label: &str, bytes: &[u8], parts: &[&str]) {
    let text = open_bytes(label, bytes)
        .expect_err("the file is refused")
        .to_string();
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

/// The keys of a supported model that has no tensors.
fn keys(change: impl Fn(&mut GgufWriter), without: &str) -> Vec<u8> {
    let mut writer = GgufWriter::new();
    for (key, value) in [
        ("llama.block_count", 2),
        ("llama.context_length", 512),
        ("llama.embedding_length", 64),
        ("llama.feed_forward_length", 96),
        ("llama.attention.head_count", 4),
        ("llama.vocab_size", 320),
    ] {
        if key != without {
            writer.u32(key, value);
        }
    }
    if without != "general.architecture" {
        writer.string("general.architecture", "llama");
    }
    if without != "llama.attention.layer_norm_rms_epsilon" {
        writer.f32("llama.attention.layer_norm_rms_epsilon", 1e-5);
    }
    change(&mut writer);
    writer.finish()
}

fn config_of(bytes: &[u8]) -> ModelConfig {
    let gguf = gguf::parse(bytes).expect("well-formed");
    gguf::model::config(&gguf).expect("the model is supported")
}

#[test]
fn a_gguf_model_opens() {
    let spec = TinySpec::new(1, WeightType::Q4_1);
    let model = open_bytes("opens", &gguf_bytes(&spec)).expect("our own file");
    assert_eq!(model.config.name, "tiny");
    assert_eq!((model.config.n_layers, model.config.n_kv_heads), (2, 2));
    let q = model
        .tensors
        .get(TensorName::Layer(0, LayerTensor::Q))
        .expect("there");
    assert_eq!(
        (q.dtype, q.shape, q.bytes.len()),
        (WeightType::Q4_1, [64, 64], 64 * 2 * 20)
    );
    let embedding = model
        .tensors
        .get(TensorName::TokenEmbedding)
        .expect("there");
    assert_eq!(embedding.dtype, WeightType::Q8_0);
    assert!(
        model.tensors.get(TensorName::OutputHead).is_err(),
        "the head is tied"
    );
    assert!(
        model
            .tensors
            .get(TensorName::Layer(2, LayerTensor::Q))
            .is_err()
    );
    assert_eq!(model.tensors.iter().count(), 2 + 2 * 9);
}

/// One weight bit, or one number of the config, is another model; a name is not.
#[test]
fn the_fingerprint_covers_what_the_output_depends_on() {
    let bytes = gguf_bytes(&TinySpec::default());
    let fingerprint =
        |label: &str, bytes: &[u8]| open_bytes(label, bytes).expect("still a model").fingerprint;
    let original = fingerprint("original", &bytes);
    let mut weight = bytes.clone();
    *weight.last_mut().expect("not empty") ^= 1;
    assert_ne!(fingerprint("weight", &weight), original);
    let spec = TinySpec {
        context_length: 511,
        ..TinySpec::default()
    };
    assert_ne!(fingerprint("context", &gguf_bytes(&spec)), original);
    let place = bytes
        .windows(4)
        .position(|part| part == b"tiny")
        .expect("the name");
    let mut name = bytes;
    name[place..place + 4].copy_from_slice(b"mill");
    assert_eq!(fingerprint("name", &name), original);
}

#[test]
fn gguf_keys_become_a_config() {
    let config = config_of(&keys(|_| {}, ""));
    assert_eq!(config.family, Family::Llama);
    assert_eq!(
        (config.n_heads, config.n_kv_heads, config.head_dim),
        (4, 4, 16)
    );
    assert_eq!(
        (config.rope.theta, config.rope.style),
        (1e4, RopeStyle::Interleaved)
    );
    assert!(config.tied_head);
    let config = config_of(&keys(
        |writer| {
            writer.f32("llama.rope.freq_base", 1e5);
            writer.string("llama.rope.scaling.type", "none");
            writer.u32("llama.attention.key_length", 32);
            writer.u32("llama.attention.value_length", 32);
            writer.u32("llama.expert_count", 0);
            writer.string("llama_other.key", "no key of this family");
        },
        "",
    ));
    assert_eq!((config.rope.theta, config.head_dim), (1e5, 32));
}

#[test]
fn gguf_rope_scaling_becomes_a_rule() {
    let rope = |change: fn(&mut GgufWriter)| config_of(&keys(change, ""));
    let linear = RopeScaling::Linear { factor: 4.0 };
    let changes: [fn(&mut GgufWriter); 3] = [
        |w| w.f32("llama.rope.scaling.factor", 4.0),
        |w| w.f32("llama.rope.scale_linear", 4.0),
        |w| {
            w.string("llama.rope.scaling.type", "linear");
            w.f32("llama.rope.scaling.factor", 4.0);
        },
    ];
    for change in changes {
        assert_eq!(rope(change).rope.scaling, linear);
    }
    let none = rope(|w| {
        w.string("llama.rope.scaling.type", "none");
        w.f32("llama.rope.scaling.factor", 4.0);
        w.boolean("llama.rope.scaling.finetuned", false);
    });
    assert_eq!(none.rope.scaling, RopeScaling::None);
    let yarn = rope(|w| {
        w.string("llama.rope.scaling.type", "yarn");
        w.f32("llama.rope.scaling.factor", 8.0);
        w.u32("llama.rope.scaling.original_context_length", 256);
        w.f32("llama.rope.scaling.attn_factor", 0.5);
        w.f32("llama.rope.scaling.yarn_beta_fast", 16.0);
    });
    let wanted = Yarn {
        magnitude: 0.5,
        beta_fast: 16.0,
        ..Yarn::new(8.0, 256)
    };
    assert_eq!(yarn.rope.scaling, RopeScaling::Yarn(wanted));
    assert_eq!(yarn.context_length, 2048);
    let divisors = rope(|w| w.tensor("rope_freqs.weight", WeightType::F32, &[8], &[0; 32]));
    assert_eq!(divisors.rope.scaling, RopeScaling::Divisors);
}

#[test]
fn gguf_families() {
    for (family, seen_as) in [
        (Family::Llama, Family::Llama),
        (Family::Mistral, Family::Llama),
        (Family::Mixtral, Family::Llama),
        (Family::Qwen2, Family::Qwen2),
        (Family::Qwen3, Family::Qwen3),
        (Family::Qwen3Moe, Family::Qwen3Moe),
        (Family::Gemma3, Family::Gemma3),
    ] {
        let spec = TinySpec::of(family, 1, WeightType::F32);
        let model = open_bytes("family", &gguf_bytes(&spec)).expect("our own file");
        let config = &model.config;
        assert_eq!(config.family, seen_as);
        assert_eq!(config.norm_weights, NormWeights::AsStored);
        assert_eq!(config.experts.is_some(), spec.has_experts());
        let is_permuted = seen_as == Family::Llama;
        assert_eq!(config.rope.style == RopeStyle::Interleaved, is_permuted);
        assert_eq!(config.window.map(|window| window.n_positions), spec.window);
    }
}

/// The experts of a layer lie in one tensor and are found one by one; a tensor of fewer is refused.
#[test]
fn gguf_experts() {
    let spec = TinySpec::of(Family::Qwen3Moe, 1, WeightType::Q4_1);
    let bytes = gguf_bytes(&spec);
    let model = open_bytes("experts", &bytes).expect("our own file");
    let down = |expert_idx| {
        let name = TensorName::Expert(1, expert_idx, ExpertTensor::Down);
        let view = model.tensors.get(name).expect("it is there");
        assert_eq!(view.shape, [64, 32]);
        view.bytes.to_vec()
    };
    assert_ne!(down(0), down(7));
    let name = TensorName::Expert(1, 8, ExpertTensor::Down);
    assert!(model.tensors.get(name).is_err());
    let key = b"qwen3moe.expert_count";
    let at = bytes.windows(key.len()).position(|part| part == key);
    let mut fewer = bytes.clone();
    fewer[at.expect("the key") + key.len() + 4] = 7;
    assert_refused(
        "fewer-experts",
        &fewer,
        &["ffn_gate_inp", "[8, 64]", "[7, 64]"],
    );
}

/// The sizes of Gemma 3 are told apart by their layers: 27B scales scores in its own way.
#[test]
fn gemma3_27b_scales_scores_by_the_hidden_size() {
    for (n_layers, query_scalar) in [(34, 32.0), (62, 16.0)] {
        let spec = TinySpec {
            n_layers,
            ..TinySpec::of(Family::Gemma3, 1, WeightType::Q4_0)
        };
        let model = open_bytes("gemma", &gguf_bytes(&spec)).expect("our own file");
        assert_eq!(model.config.query_scalar, query_scalar);
    }
}

#[test]
fn gguf_keys_that_are_not_supported_are_refused_by_name_and_value() {
    type Change = fn(&mut GgufWriter);
    let cases: [(Change, &[&str]); 11] = [
        (
            |w| w.string("llama.rope.scaling.type", "yarn"),
            &["rope.scaling.factor: the key is missing"],
        ),
        (
            |w| w.string("llama.rope.scaling.type", "longrope"),
            &["rope.scaling.type: \"longrope\"", "none, linear, yarn"],
        ),
        (
            |w| w.f32("llama.rope.scaling.factor", 0.25),
            &["rope.scaling.factor: 0.25"],
        ),
        (
            |w| w.f32("llama.rope.scaling.yarn_log_multiplier", 0.1),
            &["yarn_log_multiplier: 0.1"],
        ),
        (
            |w| {
                w.f32("llama.rope.scaling.factor", 4.0);
                w.tensor("rope_freqs.weight", WeightType::F32, &[8], &[0; 32]);
            },
            &["rope_freqs.weight", "both"],
        ),
        (
            |w| w.f32("llama.attn_logit_softcapping", 50.0),
            &["attn_logit_softcapping: 50.0"],
        ),
        (
            |w| w.u32("llama.expert_count", 8),
            &["llama.expert_used_count: the key is missing"],
        ),
        (
            |w| w.u32("llama.rope.dimension_count", 8),
            &["rope.dimension_count: 8", "16"],
        ),
        (
            |w| w.u32("llama.attention.value_length", 8),
            &["value_length: 8", "16"],
        ),
        (
            |w| w.u32("llama.attention.head_count_kv", 3),
            &["head_count_kv: 3 does not divide"],
        ),
        (
            |w| w.string("general.type", "adapter"),
            &["general.type: \"adapter\""],
        ),
    ];
    for (idx, (change, parts)) in cases.into_iter().enumerate() {
        assert_refused(&format!("keys-{idx}"), &keys(change, ""), parts);
    }
    let other = keys(
        |w| w.string("general.architecture", "gemma2"),
        "general.architecture",
    );
    assert_refused(
        "family",
        &other,
        &["tiny.gguf", "general.architecture: \"gemma2\"", "qwen3moe"],
    );
}

#[test]
fn gguf_keys_that_are_missing_or_of_another_type() {
    for key in [
        "general.architecture",
        "llama.block_count",
        "llama.context_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
    ] {
        let file = keys(|_| {}, key);
        assert_refused(&format!("missing-{key}"), &file, &[key, "missing"]);
        let file = keys(|writer| writer.boolean(key, true), key);
        assert_refused(&format!("type-{key}"), &file, &[key, "true, expected"]);
    }
    let file = keys(|_| {}, "llama.vocab_size");
    assert_refused(
        "no-vocab",
        &file,
        &["token_embd.weight: this tensor is missing"],
    );
    let file = keys(
        |writer| writer.u32("llama.block_count", u32::MAX),
        "llama.block_count",
    );
    assert_refused(
        "layers",
        &file,
        &["llama.block_count: 4294967295, expected 1 to 1024"],
    );
}

/// The vocabulary size of older files is that of the embedding.
#[test]
fn tensors_must_be_those_of_the_config() {
    let embedding = |extra: fn(&mut GgufWriter)| {
        keys(
            |writer| {
                writer.tensor(
                    "token_embd.weight",
                    WeightType::F16,
                    &[64, 320],
                    &[0; 64 * 320 * 2],
                );
                extra(writer);
            },
            "llama.vocab_size",
        )
    };
    assert_eq!(config_of(&embedding(|_| {})).vocab_size, 320);
    assert_refused(
        "few",
        &embedding(|_| {}),
        &["OutputNorm: this tensor is missing (1 of 20"],
    );
    let surplus = embedding(|w| w.tensor("blk.0.attn_q.bias", WeightType::F32, &[64], &[0; 256]));
    assert_refused("surplus", &surplus, &["blk.0.attn_q.bias", "does not have"]);
    let shape = embedding(|w| w.tensor("output_norm.weight", WeightType::F32, &[32], &[0; 128]));
    assert_refused("shape", &shape, &["output_norm.weight", "[32]", "[1, 64]"]);
    let layer =
        embedding(|w| w.tensor("blk.2.attn_norm.weight", WeightType::F32, &[64], &[0; 256]));
    assert_refused("layer", &layer, &["blk.2.attn_norm.weight", "2 layers"]);
}

#[test]
fn paths_that_hold_no_model() {
    let dir = scratch("paths");
    let error = open(dir.join("absent.gguf")).expect_err("absent");
    let text = format!("{:#}", anyhow::Error::new(error));
    assert!(text.contains("absent.gguf"), "{text}");
    assert_eq!(text.matches("No such file").count(), 1, "{text}");
    for (name, bytes, part) in [
        ("empty.gguf", &b""[..], "not a regular file with content"),
        ("short.gguf", b"GG", "magic"),
        (
            "other.gguf",
            b"not a model at all",
            "does not start with GGUF",
        ),
        ("weights.pt", b"x", "pickle"),
        ("weights.BIN", b"x", "pickle"),
        ("model.safetensors", b"x", "name the directory"),
    ] {
        std::fs::write(dir.join(name), bytes).expect("writable");
        let text = open(dir.join(name)).expect_err(name).to_string();
        assert!(
            text.contains(name) && text.contains(part),
            "{part:?} is not in {text:?}"
        );
    }
    std::fs::remove_dir_all(dir).expect("the directory is ours");
}

/// What `make test` puts into the cache before it runs the tests.
fn cached(name: &str) -> PathBuf {
    let cache = std::env::var_os("TIDEMILL_CACHE").map_or_else(
        || Path::new(&std::env::var_os("HOME").expect("HOME is set")).join(".cache/tidemill"),
        PathBuf::from,
    );
    cache.join("models").join(name)
}

const NEEDED: &str = "`make test-needs` fetches the default model and derives its f32 form";

#[test]
fn the_default_model_opens() {
    let model = open(cached("SmolLM2-135M-Instruct.Q4_1.gguf")).expect(NEEDED);
    assert_eq!(
        (model.config.n_layers, model.config.vocab_size),
        (30, 49_152)
    );
    assert_eq!(
        (
            model.config.n_heads,
            model.config.n_kv_heads,
            model.config.head_dim
        ),
        (9, 3, 64)
    );
    assert_eq!(
        (model.config.rope.theta, model.config.context_length),
        (1e5, 8192)
    );
    assert!(model.config.tied_head);
    let down = model
        .tensors
        .get(TensorName::Layer(29, LayerTensor::Down))
        .expect("there");
    assert_eq!((down.dtype, down.shape), (WeightType::Q4_1, [576, 1536]));
}

/// The derived directory is the same model: each row dequantised, q and k in the other order of rows.
#[test]
fn the_derived_float_model_holds_the_same_numbers() {
    let gguf = open(cached("SmolLM2-135M-Instruct.Q4_1.gguf")).expect(NEEDED);
    let float = open(cached("SmolLM2-135M-f32")).expect(NEEDED);
    let mut config = float.config.clone();
    config.rope.style = RopeStyle::Interleaved;
    config.name.clone_from(&gguf.config.name);
    assert_eq!(config, gguf.config);
    let head_dim = config.head_dim as usize;
    for (quantised, float) in gguf.tensors.iter().zip(float.tensors.iter()) {
        assert_eq!((quantised.name, quantised.shape), (float.name, float.shape));
        let [rows, cols] = quantised.shape;
        let (mut ours, mut theirs) = (vec![0.0; cols], vec![0.0; cols]);
        // A prime step visits every place within a head.
        for row in (0..rows).step_by(37) {
            let within = row % head_dim;
            let half_split = row - within + within % 2 * (head_dim / 2) + within / 2;
            let permuted = matches!(
                float.name,
                TensorName::Layer(_, LayerTensor::Q | LayerTensor::K)
            );
            quantised.row_to_f32(row, &mut ours);
            float.row_to_f32(if permuted { half_split } else { row }, &mut theirs);
            assert_eq!(ours, theirs, "{float:?} row {row}");
        }
    }
}
