use std::path::PathBuf;

use super::*;
use crate::tensors::WeightType;
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
fn rope_scaling() {
    for kind in ["linear", "dynamic", "llama3", "yarn", "longrope", "tidal"] {
        for key in ["type", "rope_type"] {
            let scaling = format!(r#"{{"{key}": "{kind}", "factor": 8.0}}"#);
            let field = format!("rope_scaling.{key}: ");
            assert_refused(&[("rope_scaling", &scaling)], &[&field, kind]);
            let field = format!("rope_parameters.{key}: ");
            assert_refused(&[("rope_parameters", &scaling)], &[&field, kind]);
        }
    }
    assert_refused(
        &[("rope_scaling", r#"{"factor": 8.0}"#)],
        &["rope_scaling.rope_type: the key is missing"],
    );
    assert_refused(
        &[(
            "rope_scaling",
            r#"{"rope_type": "default", "type": "yarn"}"#,
        )],
        &["rope_scaling.type: \"yarn\""],
    );
    assert_refused(
        &[("rope_scaling", r#"{"rope_type": "default", "factor": 8.0}"#)],
        &["rope_scaling.\"factor\"", "8.0"],
    );
    assert_refused(&[("rope_scaling", "8.0")], &["rope_scaling"]);
    accepted(&[("rope_scaling", r#"{"rope_type": "default"}"#)]);
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
        ("model_type", r#""qwen2""#, "llama"),
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
        let shown = if key == "model_type" { "qwen2" } else { &shown };
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

/// B060: no shard is read as long as not every one is; the refusal names the index.
#[test]
fn a_shard_index_is_refused_by_name() {
    let dir = directory("index");
    fs::write(dir.join(INDEX_FILE), "{}").expect("writable");
    assert_open_refused(&dir, INDEX_FILE, &["not supported yet"]);
    fs::remove_file(dir.join(WEIGHTS_FILE)).expect("it is there");
    assert_open_refused(&dir, INDEX_FILE, &["not supported yet"]);
    fs::remove_dir_all(dir).expect("the directory is ours");
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
    let config = ModelConfig {
        tied_head: true,
        ..accepted(&[])
    };
    let file = |head: u8| {
        safetensors_bytes(&[
            (
                EMBEDDING.to_owned(),
                WeightType::F32,
                vec![1, 1],
                vec![1; 4],
            ),
            (
                LM_HEAD.to_owned(),
                WeightType::F32,
                vec![1, 1],
                vec![head; 4],
            ),
        ])
    };
    let found = read_tensors(&config, &file(1)).expect("equal heads are one");
    assert_eq!(found.len(), 1);
    let Err(refusal) = read_tensors(&config, &file(2)) else {
        panic!("another head is refused");
    };
    assert_eq!(refusal.field, LM_HEAD);
}

#[test]
fn layer_names_have_one_spelling() {
    let name = "model.layers.7.mlp.up_proj.weight";
    assert_eq!(
        tensor_name(name),
        Some(TensorName::Layer(7, LayerTensor::Up))
    );
    for name in [
        "model.layers.07.mlp.up_proj.weight",
        "model.layers.+7.mlp.up_proj.weight",
        "model.layers.4294967296.mlp.up_proj.weight",
        "model.layers..mlp.up_proj.weight",
        "model.layers.7.mlp.up_proj.bias",
        "model.layers.7.self_attn.rotary_emb.inv_freq",
    ] {
        assert_eq!(tensor_name(name), None, "{name}");
    }
}
