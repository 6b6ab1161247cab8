use std::path::PathBuf;

use super::shards::INDEX_FILE;
use super::*;
use crate::config::{NormWeights, RopeScaling, Window, Yarn};
use crate::testing::{TinySpec, safetensors_bytes, scratch, write_hf_dir};

/// A valid config, with some members replaced or added: `("key", "json")`.
fn config_with(changes: &[(&str, &str)]) -> String {
    let mut members = vec![
        ("model_type", r#""llama""#),
        ("architectures", r#"["LlamaForCausalLM"]"#),
        ("hidden_size", "64"),
        ("intermediate_size", "96"),
        ("num_attention_heads", "4"),
        ("num_key_value_heads", "2"),
        ("num_hidden_layers", "2"),
        ("vocab_size", "320"),
        ("max_position_embeddings", "512"),
        ("rms_norm_eps", "1e-05"),
        ("rope_theta", "100000"),
    ];
    for (key, _) in changes {
        members.retain(|(other, _)| other != key);
    }
    let changes = changes.iter().filter(|(_, value)| *value != "absent");
    let members: Vec<String> = members
        .iter()
        .chain(changes)
        .map(|(key, value)| format!("\"{key}\": {value}"))
        .collect();
    format!("{{{}}}", members.join(", "))
}

fn accepted(changes: &[(&str, &str)]) -> ModelConfig {
    config::parse(config_with(changes).as_bytes()).expect("the config is supported")
}

fn assert_refused(changes: &[(&str, &str)], parts: &[&str]) {
    let text = config::parse(config_with(changes).as_bytes())
        .expect_err("the config is refused")
        .to_string();
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

#[test]
fn a_plain_config() {
    let config = accepted(&[]);
    assert_eq!(
        (
            config.n_layers,
            config.hidden_size,
            config.intermediate_size
        ),
        (2, 64, 96)
    );
    assert_eq!(
        (config.n_heads, config.n_kv_heads, config.head_dim),
        (4, 2, 16)
    );
    assert_eq!((config.vocab_size, config.context_length), (320, 512));
    assert_eq!((config.rms_norm_eps, config.rope.theta), (1e-5, 1e5));
    assert!(!config.tied_head);
}

#[test]
fn defaults_are_those_of_the_class() {
    let config = accepted(&[("num_key_value_heads", "null"), ("rope_theta", "absent")]);
    assert_eq!((config.n_kv_heads, config.rope.theta), (4, 1e4));
    assert_eq!(accepted(&[("head_dim", "32")]).head_dim, 32);
    assert!(accepted(&[("tie_word_embeddings", "true")]).tied_head);
}

/// B061: a scaling that we do not compute is refused under both spellings of its type; nothing is ignored.
#[test]
fn rope_scaling_that_is_not_known() {
    for kind in ["dynamic", "longrope", "su", "proportional", "tidal"] {
        for key in ["type", "rope_type"] {
            let scaling = format!(r#"{{"{key}": "{kind}", "factor": 8.0}}"#);
            let field = format!("rope_scaling.{key}: ");
            assert_refused(&[("rope_scaling", &scaling)], &[&field, kind, "llama3"]);
            let field = format!("rope_parameters.{key}: ");
            assert_refused(&[("rope_parameters", &scaling)], &[&field, kind]);
        }
    }
    for (scaling, part) in [
        (
            r#"{"factor": 8.0}"#,
            "rope_scaling.rope_type: the key is missing",
        ),
        (
            r#"{"rope_type": "default", "type": "yarn"}"#,
            "rope_scaling.type: \"yarn\" contradicts",
        ),
        (
            r#"{"rope_type": "default", "factor": 8.0}"#,
            "rope_scaling.\"factor\": \"8.0\"",
        ),
        (
            r#"{"rope_type": "linear"}"#,
            "rope_scaling.factor: the key is missing",
        ),
        (
            r#"{"type": "linear", "factor": 0.5}"#,
            "rope_scaling.factor: 0.5",
        ),
        (
            r#"{"type": "linear", "factor": 2, "beta_fast": 3}"#,
            "rope_scaling.\"beta_fast\"",
        ),
        (r#"{"type": "linear", "factor": "2"}"#, "factor"),
        (
            r#"{"type": "yarn"}"#,
            "rope_scaling.factor: the key is missing",
        ),
        (
            r#"{"type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 2}"#,
            "beta_fast: 1",
        ),
        (
            r#"{"type": "yarn", "factor": 4, "finetuned": true}"#,
            "\"finetuned\"",
        ),
        ("8.0", "rope_scaling"),
    ] {
        assert_refused(&[("rope_scaling", scaling)], &[part]);
    }
    let llama3 = [
        ("factor", "8"),
        ("low_freq_factor", "1"),
        ("high_freq_factor", "4"),
        ("original_max_position_embeddings", "8192"),
    ];
    for (missing, _) in llama3 {
        let rest = llama3.iter().filter(|(key, _)| *key != missing);
        let rest: String = rest
            .map(|(key, value)| format!(", \"{key}\": {value}"))
            .collect();
        let scaling = format!("{{\"rope_type\": \"llama3\"{rest}}}");
        let part = format!("rope_scaling.{missing}: the key is missing");
        assert_refused(&[("rope_scaling", &scaling)], &[&part]);
    }
    let equal = r#"{"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4,
        "original_max_position_embeddings": 8192}"#;
    assert_refused(&[("rope_scaling", equal)], &["high_freq_factor: 4"]);
}

#[test]
fn rope_scaling_that_is_known() {
    let scaling = |text: &str| {
        let older = accepted(&[("rope_scaling", text)]).rope.scaling;
        assert_eq!(accepted(&[("rope_parameters", text)]).rope.scaling, older);
        older
    };
    assert_eq!(scaling(r#"{"rope_type": "default"}"#), RopeScaling::None);
    assert_eq!(
        scaling(r#"{"type": "linear", "factor": 8.0}"#),
        RopeScaling::Linear { factor: 8.0 }
    );
    let llama3 = r#"{"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"}"#;
    assert_eq!(
        scaling(llama3),
        RopeScaling::Llama3 {
            factor: 32.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context_length: 8192
        }
    );
    let paper = Yarn::new(4.0, 512);
    let yarn = |rest: &str| {
        let text = format!(r#"{{"type": "yarn", "rope_type": "yarn", "factor": 4.0{rest}}}"#);
        match scaling(&text) {
            RopeScaling::Yarn(yarn) => yarn,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(yarn(""), paper, "the original length is that of the model");
    assert_eq!(
        yarn(r#", "mscale": 0.707"#),
        paper,
        "one mscale alone does not count"
    );
    let given = yarn(r#", "attention_factor": 1.25, "mscale": 2, "mscale_all_dim": 3"#);
    assert_eq!(
        (given.magnitude, given.mscale, given.mscale_all_dim),
        (1.25, 0.0, 0.0)
    );
    let both =
        yarn(r#", "mscale": 0.7, "mscale_all_dim": 0.5, "truncate": false, "beta_fast": 16"#);
    let wanted = Yarn {
        mscale: 0.7,
        mscale_all_dim: 0.5,
        truncate: false,
        beta_fast: 16.0,
        ..paper
    };
    assert_eq!(both, wanted);
}

/// B061: a YaRN model takes what its scaling gives it.
#[test]
fn yarn_extends_the_context_and_the_other_rules_state_it() {
    let length = |scaling: &str| accepted(&[("rope_scaling", scaling)]).context_length;
    let yarn = r#"{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}"#;
    assert_eq!(length(yarn), 2048);
    let stated = r#"{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}"#;
    assert_eq!(length(stated), 512);
    assert_eq!(length(r#"{"type": "linear", "factor": 4.0}"#), 512);
}

#[test]
fn theta_in_rope_parameters() {
    let newer = r#"{"rope_type": "default", "rope_theta": 5000.0}"#;
    let config = accepted(&[("rope_theta", "absent"), ("rope_parameters", newer)]);
    assert_eq!(config.rope.theta, 5000.0);
    assert_refused(
        &[("rope_parameters", newer)],
        &["rope_parameters.rope_theta: 5000.0 contradicts"],
    );
}

#[test]
fn what_is_not_computed_is_refused_by_name_and_value() {
    for (key, value, supported) in [
        (
            "model_type",
            r#""gemma2""#,
            "llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, gemma3_text",
        ),
        (
            "architectures",
            r#"["LlamaForSequenceClassification"]"#,
            "LlamaForCausalLM",
        ),
        ("hidden_act", r#""gelu""#, "silu"),
        ("attention_bias", "true", "false"),
        ("mlp_bias", "true", "false"),
        ("rope_interleaved", "true", "false"),
        ("sliding_window", "4096", "null"),
        ("quantization_config", r#"{"bits": 4}"#, "null"),
        ("partial_rotary_factor", "0.5", "1.0"),
        ("attention_multiplier", "2.0", "not known"),
    ] {
        let shown = value.replace('"', "\\\"");
        let shown = if key == "model_type" {
            "gemma2"
        } else {
            &shown
        };
        assert_refused(&[(key, value)], &[key, shown, supported]);
    }
    accepted(&[
        ("hidden_act", r#""silu""#),
        ("attention_bias", "false"),
        ("sliding_window", "null"),
        ("partial_rotary_factor", "1.0"),
        ("torch_dtype", r#""bfloat16""#),
    ]);
}

/// Members that a family has in place of, or besides, those of Llama.
fn of_family(family: Family) -> Vec<(&'static str, &'static str)> {
    match family {
        Family::Llama => vec![],
        Family::Mistral => vec![
            ("model_type", r#""mistral""#),
            ("architectures", r#"["MistralForCausalLM"]"#),
            ("sliding_window", "4096"),
        ],
        Family::Mixtral => vec![
            ("model_type", r#""mixtral""#),
            ("architectures", r#"["MixtralForCausalLM"]"#),
            ("num_local_experts", "8"),
            ("num_experts_per_tok", "2"),
            ("router_jitter_noise", "0.0"),
        ],
        Family::Qwen2 => vec![
            ("model_type", r#""qwen2""#),
            ("architectures", r#"["Qwen2ForCausalLM"]"#),
            ("use_sliding_window", "false"),
            ("sliding_window", "32768"),
            ("max_window_layers", "21"),
        ],
        Family::Qwen3 => vec![
            ("model_type", r#""qwen3""#),
            ("architectures", r#"["Qwen3ForCausalLM"]"#),
            ("head_dim", "128"),
            ("layer_types", r#"["full_attention", "full_attention"]"#),
        ],
        Family::Qwen3Moe => vec![
            ("model_type", r#""qwen3_moe""#),
            ("architectures", r#"["Qwen3MoeForCausalLM"]"#),
            ("num_experts", "8"),
            ("num_experts_per_tok", "2"),
            ("moe_intermediate_size", "32"),
            ("norm_topk_prob", "true"),
            ("decoder_sparse_step", "1"),
            ("mlp_only_layers", "[]"),
            ("router_aux_loss_coef", "0.001"),
        ],
        Family::Gemma3 => vec![
            ("model_type", r#""gemma3_text""#),
            ("architectures", r#"["Gemma3ForCausalLM"]"#),
            ("head_dim", "256"),
            ("hidden_activation", r#""gelu_pytorch_tanh""#),
            ("query_pre_attn_scalar", "168"),
            ("rope_local_base_freq", "5000"),
            ("sliding_window", "512"),
            ("final_logit_softcapping", "null"),
        ],
    }
}

fn family_with(
    family: Family,
    changes: &[(&'static str, &'static str)],
) -> Vec<(&'static str, &'static str)> {
    let mut members = of_family(family);
    members.retain(|(key, _)| !changes.iter().any(|(changed, _)| changed == key));
    members.extend(changes);
    members
}

#[test]
fn each_family_has_its_config() {
    for family in [
        Family::Llama,
        Family::Mistral,
        Family::Mixtral,
        Family::Qwen2,
        Family::Qwen3,
        Family::Qwen3Moe,
        Family::Gemma3,
    ] {
        let config = accepted(&of_family(family));
        assert_eq!(config.family, family);
        let has_experts = matches!(family, Family::Qwen3Moe | Family::Mixtral);
        assert_eq!(config.experts.is_some(), has_experts);
        assert_eq!(
            config.tied_head,
            family == Family::Gemma3,
            "the default of its class"
        );
    }
    let mistral = accepted(&of_family(Family::Mistral));
    let all = |n_positions| {
        Some(Window {
            n_positions,
            global_every: None,
        })
    };
    assert_eq!(mistral.window, all(4096));
    assert!(mistral.is_windowed(0) && mistral.is_windowed(1));
    let null = accepted(&family_with(Family::Mistral, &[("sliding_window", "null")]));
    assert_eq!(null.window, None);
    let absent = accepted(&family_with(
        Family::Mistral,
        &[("sliding_window", "absent")],
    ));
    assert_eq!(absent.window, all(4096), "the default of its class");
    assert_eq!(accepted(&of_family(Family::Qwen2)).window, None);
    let qwen3 = accepted(&family_with(Family::Qwen3, &[("head_dim", "absent")]));
    assert_eq!(qwen3.head_dim, 128, "the default of its class");
    let moe = accepted(&of_family(Family::Qwen3Moe))
        .experts
        .expect("it has experts");
    assert_eq!(
        (moe.n_experts, moe.n_used, moe.intermediate_size),
        (8, 2, 32)
    );
    assert!(moe.normalise);
    let mixtral = accepted(&of_family(Family::Mixtral));
    assert_eq!(mixtral.window, None, "the default of its class");
    let mixtral = mixtral.experts.expect("it has experts");
    assert_eq!((mixtral.n_experts, mixtral.intermediate_size), (8, 96));
    let plain = accepted(&family_with(
        Family::Qwen3Moe,
        &[("norm_topk_prob", "absent")],
    ));
    assert!(
        !plain.experts.expect("experts").normalise,
        "the default of its class"
    );
}

#[test]
fn gemma3_has_layers_of_two_kinds() {
    let gemma = accepted(&of_family(Family::Gemma3));
    let window = Window {
        n_positions: 512,
        global_every: Some(6),
    };
    assert_eq!(gemma.window, Some(window));
    assert_eq!((gemma.rope.theta, gemma.rope.local_theta), (1e5, 5e3));
    assert_eq!(
        (gemma.query_scalar, gemma.norm_weights),
        (168.0, NormWeights::LessOne)
    );
    assert!(gemma.is_windowed(4) && !gemma.is_windowed(5) && gemma.is_windowed(6));
    let every_second = family_with(
        Family::Gemma3,
        &[
            ("_sliding_window_pattern", "2"),
            ("layer_types", r#"["sliding_attention", "full_attention"]"#),
        ],
    );
    let every_second = accepted(&every_second);
    assert!(every_second.is_windowed(0) && !every_second.is_windowed(1));
    let newer = family_with(
        Family::Gemma3,
        &[
            ("rope_theta", "absent"),
            ("rope_local_base_freq", "absent"),
            (
                "rope_parameters",
                r#"{"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}"#,
            ),
        ],
    );
    let newer = accepted(&newer).rope;
    assert_eq!((newer.theta, newer.local_theta), (1e6, 1e4));
    assert_eq!(newer.scaling, RopeScaling::Linear { factor: 8.0 });
}

#[test]
fn what_a_family_does_not_compute_is_refused() {
    type Case = (Family, (&'static str, &'static str), &'static str);
    let cases: [Case; 19] = [
        (
            Family::Qwen2,
            ("use_sliding_window", "true"),
            "supported: false",
        ),
        (
            Family::Qwen2,
            ("layer_types", r#"["full_attention", "sliding_attention"]"#),
            "layer 1",
        ),
        (
            Family::Qwen2,
            ("architectures", r#"["LlamaForCausalLM"]"#),
            "Qwen2ForCausalLM",
        ),
        (Family::Qwen2, ("num_key_value_heads", "absent"), "missing"),
        (
            Family::Qwen3,
            ("attention_bias", "true"),
            "supported: false",
        ),
        (
            Family::Qwen3,
            ("layer_types", r#"["full_attention"]"#),
            "1 entries for 2 layers",
        ),
        (Family::Qwen3, ("num_experts", "8"), "not known"),
        (
            Family::Qwen3Moe,
            ("decoder_sparse_step", "2"),
            "supported: 1",
        ),
        (
            Family::Qwen3Moe,
            ("mlp_only_layers", "[0]"),
            "supported: []",
        ),
        (
            Family::Qwen3Moe,
            ("num_experts_per_tok", "9"),
            "9, expected 1 to 8",
        ),
        (
            Family::Qwen3Moe,
            ("num_experts", "513"),
            "513, expected 1 to 512",
        ),
        (
            Family::Gemma3,
            ("final_logit_softcapping", "30.0"),
            "supported: null",
        ),
        (
            Family::Gemma3,
            ("attn_logit_softcapping", "50.0"),
            "supported: null",
        ),
        (
            Family::Gemma3,
            ("hidden_activation", r#""gelu""#),
            "gelu_pytorch_tanh",
        ),
        (
            Family::Gemma3,
            ("use_bidirectional_attention", "true"),
            "supported: false",
        ),
        (
            Family::Gemma3,
            ("sliding_window_pattern", "0"),
            "expected at least 1",
        ),
        (
            Family::Gemma3,
            ("query_pre_attn_scalar", "absent"),
            "missing",
        ),
        (Family::Gemma3, ("sliding_window", "null"), "missing"),
        (Family::Mistral, ("sliding_window", "0"), "0, expected 1"),
    ];
    for (family, change, part) in cases {
        assert_refused(&family_with(family, &[change]), &[change.0, part]);
    }
    let image = [("model_type", r#""gemma3""#)];
    assert_refused(
        &family_with(Family::Gemma3, &image),
        &["model_type", "gemma3_text"],
    );
    let scaled_local = r#"{"full_attention": {"rope_type": "default", "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e3}}"#;
    let scaled_local = family_with(Family::Gemma3, &[("rope_parameters", scaled_local)]);
    assert_refused(
        &scaled_local,
        &["rope_parameters.sliding_attention.rope_type"],
    );
}

#[test]
fn numbers_that_are_missing_or_out_of_bounds() {
    for key in [
        "model_type",
        "hidden_size",
        "num_hidden_layers",
        "vocab_size",
        "rms_norm_eps",
    ] {
        assert_refused(&[(key, "absent")], &[key, "missing"]);
        assert_refused(&[(key, "{}")], &[key]);
    }
    assert_refused(
        &[("num_hidden_layers", "0")],
        &["num_hidden_layers: 0, expected 1 to 1024"],
    );
    assert_refused(
        &[("num_hidden_layers", "4294967295")],
        &["4294967295, expected 1 to 1024"],
    );
    assert_refused(&[("num_hidden_layers", "-1")], &["num_hidden_layers", "-1"]);
    assert_refused(
        &[("num_hidden_layers", "1e3")],
        &["num_hidden_layers", "1e3"],
    );
    assert_refused(&[("hidden_size", "0")], &["hidden_size: 0"]);
    assert_refused(&[("num_attention_heads", "0")], &["num_attention_heads: 0"]);
    assert_refused(
        &[("num_attention_heads", "3")],
        &["num_attention_heads: 3 does not divide"],
    );
    assert_refused(
        &[("num_key_value_heads", "3")],
        &["num_key_value_heads: 3 does not divide"],
    );
    assert_refused(&[("num_key_value_heads", "0")], &["num_key_value_heads: 0"]);
    assert_refused(
        &[("head_dim", "15")],
        &["head_dim: 15, expected an even number"],
    );
    assert_refused(&[("rms_norm_eps", "0")], &["rms_norm_eps: 0"]);
    assert_refused(&[("rms_norm_eps", "1e400")], &["rms_norm_eps"]);
    assert_refused(&[("rope_theta", "-1")], &["rope_theta: -1"]);
}

#[test]
fn json_that_is_none() {
    for text in [
        "",
        "[]",
        "null",
        "{\"hidden_size\": 1, \"hidden_size\": 1}",
        "\u{feff}{}",
    ] {
        let refusal = config::parse(text.as_bytes()).expect_err(text);
        assert_eq!(refusal.field, "config", "{text}");
    }
    assert!(config::parse(&[0xff]).is_err());
    let deep = format!("{{\"model_type\": {}", "[".repeat(1 << 19));
    assert!(config::parse(deep.as_bytes()).is_err());
}

fn directory(label: &str) -> PathBuf {
    let dir = scratch(label);
    write_hf_dir(&dir, &TinySpec::default()).expect("the scratch directory takes files");
    dir
}

fn assert_open_refused(dir: &Path, file: &str, parts: &[&str]) {
    let error = open(dir).expect_err("the directory is refused");
    let text = format!("{:#}", anyhow::Error::new(error));
    let file = if file.is_empty() {
        dir.to_path_buf()
    } else {
        dir.join(file)
    };
    let rest = text.strip_prefix(&file.display().to_string());
    let is_named = rest.is_some_and(|rest| rest.starts_with([':', ' ']));
    assert!(is_named, "{text}");
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

/// Cuts the weights of a directory into two shards with their index; `change` may spoil the index.
fn shard(dir: &Path, change: impl Fn(&str) -> String) {
    let whole = fs::read(dir.join(WEIGHTS_FILE)).expect("we wrote it");
    fs::remove_file(dir.join(WEIGHTS_FILE)).expect("it is there");
    let entries = safetensors::parse(&whole).expect("we wrote it");
    let mut map = Vec::new();
    let mut total = 0;
    for (number, part) in entries.chunks(entries.len().div_ceil(2)).enumerate() {
        let shard = format!("model-0000{}-of-00002.safetensors", number + 1);
        let tensors: Vec<_> = part
            .iter()
            .map(|entry| {
                let bytes = whole[entry.range.clone()].to_vec();
                total += bytes.len();
                map.push(format!("{:?}: {shard:?}", entry.name));
                (entry.name.clone(), entry.dtype, entry.shape.clone(), bytes)
            })
            .collect();
        fs::write(dir.join(&shard), safetensors_bytes(&tensors)).expect("writable");
    }
    let index = format!(
        "{{\"metadata\": {{\"total_size\": {total}}}, \"weight_map\": {{{}}}}}",
        map.join(", ")
    );
    fs::write(dir.join(INDEX_FILE), change(&index)).expect("writable");
}

fn sharded(label: &str, change: impl Fn(&str) -> String) -> PathBuf {
    let dir = directory(label);
    shard(&dir, change);
    dir
}

const SECOND: &str = "model-00002-of-00002.safetensors";

#[test]
fn shards_are_the_same_model_as_one_file() {
    let dir = directory("whole");
    let whole = crate::open(&dir).expect("one file");
    shard(&dir, str::to_owned);
    let sharded = crate::open(&dir).expect("two shards");
    assert_eq!(sharded.fingerprint, whole.fingerprint);
    fs::remove_dir_all(dir).expect("the directory is ours");
}

/// B060: index and shards must describe each other exactly.
#[test]
fn shards_that_are_not_those_of_the_index_are_refused() {
    let norm = "\"model.norm.weight\": ";
    let moved = |index: &str| {
        let at = index.find(norm).expect("the norm is in the index") + norm.len();
        let number = at + "\"model-0000".len();
        let other = if &index[number..=number] == "1" {
            "2"
        } else {
            "1"
        };
        format!("{}{other}{}", &index[..number], &index[number + 1..])
    };
    let dir = sharded("moved", moved);
    let error = open(&dir).expect_err("refused").to_string();
    assert!(
        error.contains("model.norm.weight") && error.contains(INDEX_FILE),
        "{error}"
    );
    fs::remove_dir_all(dir).expect("the directory is ours");

    let dir = sharded("total", |index| {
        index.replace("\"total_size\": ", "\"total_size\": 1")
    });
    assert_open_refused(
        &dir,
        INDEX_FILE,
        &["metadata.total_size: 1", "get them again"],
    );
    fs::remove_dir_all(dir).expect("the directory is ours");

    let dir = sharded("gone", str::to_owned);
    fs::remove_file(dir.join(SECOND)).expect("it is there");
    assert_open_refused(&dir, SECOND, &["No such file"]);
    fs::write(dir.join(SECOND), "short").expect("writable");
    assert_open_refused(&dir, SECOND, &["header length"]);
    fs::copy(
        dir.join("model-00001-of-00002.safetensors"),
        dir.join(SECOND),
    )
    .expect("writable");
    assert_open_refused(
        &dir,
        SECOND,
        &["says that this tensor is here", "get the file again"],
    );
    fs::remove_dir_all(dir).expect("the directory is ours");

    let dir = sharded("both", str::to_owned);
    fs::write(dir.join(WEIGHTS_FILE), "x").expect("writable");
    assert_open_refused(&dir, INDEX_FILE, &[WEIGHTS_FILE, "remove the one"]);
    fs::remove_dir_all(dir).expect("the directory is ours");
}

#[test]
fn shards_outside_of_the_directory_are_refused() {
    for (n, outside) in [
        "../model-00002-of-00002.safetensors",
        "/etc/passwd.safetensors",
        "sub/a.safetensors",
        "a\\\\b.safetensors",
        ".hidden.safetensors",
        "weights.bin",
        "",
    ]
    .into_iter()
    .enumerate()
    {
        let dir = sharded(&format!("outside-{n}"), |index| {
            index.replace(SECOND, outside)
        });
        assert_open_refused(&dir, INDEX_FILE, &["weight_map", "in this directory"]);
        fs::remove_dir_all(dir).expect("the directory is ours");
    }
    for (n, (index, part)) in [
        ("{}", "weight_map: the key is missing"),
        (r#"{"weight_map": {}}"#, "0 files"),
        (r#"{"weight_map": {"a": 1}}"#, "a: "),
        (
            r#"{"weight_map": {"a": "b.safetensors"}, "extra": 1}"#,
            "extra",
        ),
        (
            r#"{"weight_map": {"a": "b.safetensors", "a": "c.safetensors"}}"#,
            "twice",
        ),
        (
            r#"{"weight_map": {}, "metadata": {"total_size": -1}}"#,
            "metadata",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let dir = sharded(&format!("index-{n}"), |_| index.to_owned());
        assert_open_refused(&dir, INDEX_FILE, &[part]);
        fs::remove_dir_all(dir).expect("the directory is ours");
    }
}

/// B060: a stray file beside the weights is not read.
#[test]
fn foreign_files_are_not_read() {
    let dir = directory("foreign");
    fs::write(dir.join("model-00002-of-00002.safetensors"), "stray").expect("writable");
    fs::write(dir.join("pytorch_model.bin"), "stray").expect("writable");
    assert!(open(&dir).is_ok());
    fs::remove_dir_all(dir).expect("the directory is ours");
}

#[test]
fn pickles_and_missing_files_are_refused_by_name() {
    let dir = directory("pickle");
    fs::remove_file(dir.join(WEIGHTS_FILE)).expect("it is there");
    assert_open_refused(&dir, "", &["model.safetensors: this file is missing"]);
    fs::write(dir.join("pytorch_model.bin"), "x").expect("writable");
    assert_open_refused(&dir, "pytorch_model.bin", &["pickle"]);
    fs::remove_file(dir.join(CONFIG_FILE)).expect("it is there");
    assert_open_refused(&dir, CONFIG_FILE, &["No such file"]);
    fs::write(dir.join(CONFIG_FILE), vec![b' '; (1 << 20) + 1]).expect("writable");
    assert_open_refused(&dir, CONFIG_FILE, &["1048577 bytes", "at most 1048576"]);
    fs::remove_dir_all(dir).expect("the directory is ours");
}

#[test]
fn tensors_and_config_must_agree() {
    let dir = directory("agree");
    let rewrite = |from: &str, to: &str| {
        let file = dir.join(CONFIG_FILE);
        let text = fs::read_to_string(&file).expect("we wrote it");
        assert!(text.contains(from), "{from}");
        fs::write(&file, text.replace(from, to)).expect("writable");
    };
    rewrite("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3");
    assert_open_refused(
        &dir,
        WEIGHTS_FILE,
        &["layer 2 AttnNorm: this tensor is missing"],
    );
    rewrite("\"num_hidden_layers\": 3", "\"num_hidden_layers\": 1");
    assert_open_refused(
        &dir,
        WEIGHTS_FILE,
        &["model.layers.1.", "1 layers does not have"],
    );
    rewrite("\"num_hidden_layers\": 1", "\"num_hidden_layers\": 2");
    rewrite("\"intermediate_size\": 96", "\"intermediate_size\": 128");
    assert_open_refused(&dir, WEIGHTS_FILE, &["mlp.", "config implies"]);
    rewrite("\"intermediate_size\": 128", "\"intermediate_size\": 96");
    rewrite(
        "\"tie_word_embeddings\": true",
        "\"tie_word_embeddings\": false",
    );
    assert_open_refused(&dir, WEIGHTS_FILE, &["OutputHead: this tensor is missing"]);
    fs::remove_dir_all(dir).expect("the directory is ours");
}

#[test]
fn a_tied_head_that_is_stored_must_equal_the_embedding() {
    for (head, is_equal) in [(1, true), (2, false)] {
        let dir = directory(&format!("tied-{head}"));
        let whole = fs::read(dir.join(WEIGHTS_FILE)).expect("we wrote it");
        let entries = safetensors::parse(&whole).expect("we wrote it");
        let mut tensors: Vec<_> = entries
            .into_iter()
            .map(|entry| {
                (
                    entry.name,
                    entry.dtype,
                    entry.shape,
                    whole[entry.range].to_vec(),
                )
            })
            .collect();
        let embedding = tensors.iter().find(|tensor| tensor.0 == EMBEDDING);
        let (_, dtype, shape, mut bytes) = embedding.expect("it is there").clone();
        bytes[0] ^= u8::from(!is_equal);
        tensors.push((LM_HEAD.to_owned(), dtype, shape, bytes));
        fs::write(dir.join(WEIGHTS_FILE), safetensors_bytes(&tensors)).expect("writable");
        if is_equal {
            assert!(open(&dir).is_ok(), "equal heads are one");
        } else {
            assert_open_refused(&dir, WEIGHTS_FILE, &[LM_HEAD, "differs"]);
        }
        fs::remove_dir_all(dir).expect("the directory is ours");
    }
}

#[test]
fn layer_names_have_one_spelling() {
    let name = "model.layers.7.mlp.up_proj.weight";
    assert_eq!(
        tensor_name(name, Family::Llama),
        Some(TensorName::Layer(7, LayerTensor::Up))
    );
    for name in [
        "model.layers.07.mlp.up_proj.weight",
        "model.layers.+7.mlp.up_proj.weight",
        "model.layers.4294967296.mlp.up_proj.weight",
        "model.layers..mlp.up_proj.weight",
        "model.layers.7.mlp.up_proj.bias",
        "model.layers.7.mlp.experts.01.up_proj.weight",
        "model.layers.7.pre_feedforward_layernorm.weight",
        "model.layers.7.self_attn.rotary_emb.inv_freq",
    ] {
        assert_eq!(tensor_name(name, Family::Llama), None, "{name}");
    }
}
