//! A Llama model as GGUF spells it: metadata keys to [`ModelConfig`], tensor names to [`TensorName`].
//!
//! Keys under `llama.` change what the model computes, so a key that is not known here refuses the file; keys
//! outside (`general.`, `tokenizer.`) describe it. The converter permutes q and k rows, hence interleaved rope.
//! Source: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>, standardized key-value pairs.

use super::access::{describe, wrong_type};
use super::{Gguf, Value};
use crate::config::{Family, FieldNames, ModelConfig, Rope, RopeStyle};
use crate::error::{Refusal, quoted};
use crate::tensors::{Found, LayerTensor, TensorName};

const NAMES: FieldNames = FieldNames {
    n_layers: "llama.block_count",
    hidden_size: "llama.embedding_length",
    intermediate_size: "llama.feed_forward_length",
    n_heads: "llama.attention.head_count",
    n_kv_heads: "llama.attention.head_count_kv",
    head_dim: "llama.attention.key_length",
    vocab_size: "llama.vocab_size",
    context_length: "llama.context_length",
    rms_norm_eps: "llama.attention.layer_norm_rms_epsilon",
    rope_theta: "llama.rope.freq_base",
};

const VALUE_LENGTH: &str = "llama.attention.value_length";
const ROPE_DIMENSIONS: &str = "llama.rope.dimension_count";
const TOKEN_EMBEDDING: &str = "token_embd.weight";
const OUTPUT_HEAD: &str = "output.weight";

/// The theta of the rope paper, which GGUF's llama means when the key is absent.
const ROPE_THETA_DEFAULT: f32 = 10_000.0;

/// The config of the model that a parsed file describes.
pub(crate) fn config(gguf: &Gguf<'_>) -> Result<ModelConfig, Refusal> {
    refuse_other_families(gguf)?;
    refuse_unknown_keys(gguf)?;
    let hidden_size = required(gguf, NAMES.hidden_size)?;
    let n_heads = required(gguf, NAMES.n_heads)?;
    let head_dim = match gguf.u32(NAMES.head_dim)? {
        Some(head_dim) => head_dim,
        None => ModelConfig::implied_head_dim(hidden_size, n_heads, &NAMES)?,
    };
    for key in [VALUE_LENGTH, ROPE_DIMENSIONS] {
        if let Some(other) = gguf.u32(key)?.filter(|value| *value != head_dim) {
            return Err(Refusal::new(
                key,
                format!("{other}, but only the head dimension, {head_dim}, is supported"),
            ));
        }
    }
    let config = ModelConfig {
        family: Family::Llama,
        n_layers: required(gguf, NAMES.n_layers)?,
        hidden_size,
        intermediate_size: required(gguf, NAMES.intermediate_size)?,
        n_heads,
        n_kv_heads: gguf.u32(NAMES.n_kv_heads)?.unwrap_or(n_heads),
        head_dim,
        vocab_size: vocab_size(gguf)?,
        context_length: required(gguf, NAMES.context_length)?,
        rms_norm_eps: gguf
            .f32(NAMES.rms_norm_eps)?
            .ok_or_else(|| Refusal::new(NAMES.rms_norm_eps, "the key is missing"))?,
        rope: Rope {
            theta: gguf.f32(NAMES.rope_theta)?.unwrap_or(ROPE_THETA_DEFAULT),
            style: RopeStyle::Interleaved,
        },
        tied_head: !gguf
            .tensors()
            .iter()
            .any(|tensor| tensor.name == OUTPUT_HEAD),
        name: gguf.string("general.name")?.unwrap_or_default().to_owned(),
    };
    config.check(&NAMES)?;
    Ok(config)
}

fn refuse_other_families(gguf: &Gguf<'_>) -> Result<(), Refusal> {
    let key = "general.architecture";
    match gguf.string(key)? {
        Some("llama") => {}
        Some(other) => {
            return Err(Refusal::new(
                key,
                format!("{}, supported: \"llama\"", quoted(other)),
            ));
        }
        None => return Err(Refusal::new(key, "the key is missing")),
    }
    let key = "general.type";
    match gguf.string(key)? {
        None | Some("model") => Ok(()),
        Some(other) => Err(Refusal::new(
            key,
            format!("{}, supported: \"model\"", quoted(other)),
        )),
    }
}

/// Keys whose presence is fine whatever they say, because [`config`] reads them.
const READ_KEYS: [&str; 12] = [
    NAMES.n_layers,
    NAMES.hidden_size,
    NAMES.intermediate_size,
    NAMES.n_heads,
    NAMES.n_kv_heads,
    NAMES.head_dim,
    NAMES.vocab_size,
    NAMES.context_length,
    NAMES.rms_norm_eps,
    NAMES.rope_theta,
    VALUE_LENGTH,
    ROPE_DIMENSIONS,
];

/// Keys that are fine only with the value that says "this model does not use it".
const FIXED_KEYS: [(&str, Value<'static>); 5] = [
    ("llama.rope.scaling.type", Value::String("none")),
    ("llama.expert_count", Value::Unsigned(0)),
    ("llama.expert_used_count", Value::Unsigned(0)),
    ("llama.attention.causal", Value::Bool(true)),
    (
        "llama.tensor_data_layout",
        Value::String("Meta AI original pth"),
    ),
];

fn refuse_unknown_keys(gguf: &Gguf<'_>) -> Result<(), Refusal> {
    // In order, so that a file is refused for the same key each time.
    let mut keys: Vec<&str> = gguf
        .keys()
        .filter(|key| key.starts_with("llama."))
        .collect();
    keys.sort_unstable();
    for key in keys {
        if READ_KEYS.contains(&key) {
            continue;
        }
        let value = gguf.value(key).expect("the key comes from this file");
        match FIXED_KEYS.iter().find(|(fixed, _)| *fixed == key) {
            Some((_, supported)) if value == supported => {}
            Some((_, supported)) => {
                return Err(Refusal::new(
                    key,
                    format!("{}, supported: {}", describe(value), describe(supported)),
                ));
            }
            None => {
                return Err(Refusal::new(
                    key,
                    format!("{}; this key is not supported", describe(value)),
                ));
            }
        }
    }
    Ok(())
}

fn required(gguf: &Gguf<'_>, key: &str) -> Result<u32, Refusal> {
    gguf.u32(key)?
        .ok_or_else(|| Refusal::new(key, "the key is missing"))
}

/// The stated size, else the rows of the embedding; the two must agree with the tensor anyway.
fn vocab_size(gguf: &Gguf<'_>) -> Result<u32, Refusal> {
    if let Some(vocab_size) = gguf.u32(NAMES.vocab_size)? {
        return Ok(vocab_size);
    }
    let embedding = gguf
        .tensors()
        .iter()
        .find(|tensor| tensor.name == TOKEN_EMBEDDING);
    let rows = embedding.and_then(|tensor| tensor.dims.get(1)).copied();
    let rows = rows.ok_or_else(|| {
        Refusal::new(
            TOKEN_EMBEDDING,
            "this tensor is missing or has one dimension only",
        )
    })?;
    u32::try_from(rows)
        .map_err(|_| wrong_type(TOKEN_EMBEDDING, &Value::Unsigned(rows), "fewer rows"))
}

/// The file's tensors, row-major, under the names of this crate.
pub(crate) fn tensors(gguf: &Gguf<'_>) -> Vec<Found> {
    gguf.tensors()
        .iter()
        .map(|tensor| Found {
            spelling: tensor.name.to_owned(),
            name: tensor_name(tensor.name),
            dtype: tensor.dtype,
            shape: tensor.dims.iter().rev().copied().collect(),
            range: tensor.range.clone(),
        })
        .collect()
}

fn tensor_name(spelling: &str) -> Option<TensorName> {
    match spelling {
        TOKEN_EMBEDDING => return Some(TensorName::TokenEmbedding),
        "output_norm.weight" => return Some(TensorName::OutputNorm),
        OUTPUT_HEAD => return Some(TensorName::OutputHead),
        _ => {}
    }
    let (layer_idx, rest) = spelling.strip_prefix("blk.")?.split_once('.')?;
    let tensor = match rest {
        "attn_norm.weight" => LayerTensor::AttnNorm,
        "attn_q.weight" => LayerTensor::Q,
        "attn_k.weight" => LayerTensor::K,
        "attn_v.weight" => LayerTensor::V,
        "attn_output.weight" => LayerTensor::O,
        "ffn_norm.weight" => LayerTensor::FfnNorm,
        "ffn_gate.weight" => LayerTensor::Gate,
        "ffn_up.weight" => LayerTensor::Up,
        "ffn_down.weight" => LayerTensor::Down,
        _ => return None,
    };
    Some(TensorName::Layer(
        crate::tensors::layer_idx(layer_idx)?,
        tensor,
    ))
}
