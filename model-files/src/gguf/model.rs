//! A model as GGUF spells it: metadata keys to [`ModelConfig`], tensor names to [`TensorName`].
//!
//! Keys under the architecture's name change what the model computes, so a key that is not known here refuses the file;
//! keys outside (`general.`, `tokenizer.`) describe it. What the format leaves to the reader (Gemma's pattern of layers,
//! say) is written down here. The converter permutes q and k rows of the family llama, hence interleaved rope.
//! Source: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>, standardized key-value pairs.

use super::access::{describe, wrong_type};
use super::rope;
use super::{Gguf, Value};
use crate::config::{
    Experts, Family, FieldNames, ModelConfig, NormWeights, Rope, RopeStyle, Window,
};
use crate::error::{Refusal, quoted};
use crate::tensors::{ExpertTensor, Found, LayerTensor, TensorName};

const TOKEN_EMBEDDING: &str = "token_embd.weight";
const OUTPUT_HEAD: &str = "output.weight";

/// The theta of the rope paper, which an absent key means.
const ROPE_THETA_DEFAULT: f32 = 10_000.0;
/// Gemma 3's windowed layers, where the key is absent.
const GEMMA_LOCAL_THETA_DEFAULT: f32 = 10_000.0;
/// Gemma 3 has a global layer after every five.
const GEMMA_GLOBAL_EVERY: u32 = 6;
/// The one size of Gemma 3 whose scores are scaled by the hidden size shared out among the heads (27B).
const GEMMA_27B_LAYERS: u32 = 62;

/// One `general.architecture`.
pub(super) struct Architecture {
    name: &'static str,
    family: Family,
    names: FieldNames,
    /// Keys, less the architecture's name, that are read besides those of all.
    read: &'static [&'static str],
}

macro_rules! architecture {
    ($name:literal, $family:expr, $read:expr) => {
        Architecture {
            name: $name,
            family: $family,
            names: FieldNames {
                n_layers: concat!($name, ".block_count"),
                hidden_size: concat!($name, ".embedding_length"),
                intermediate_size: concat!($name, ".feed_forward_length"),
                n_heads: concat!($name, ".attention.head_count"),
                n_kv_heads: concat!($name, ".attention.head_count_kv"),
                head_dim: concat!($name, ".attention.key_length"),
                vocab_size: concat!($name, ".vocab_size"),
                context_length: concat!($name, ".context_length"),
                rms_norm_eps: concat!($name, ".attention.layer_norm_rms_epsilon"),
                rope_theta: concat!($name, ".rope.freq_base"),
                rope_local_theta: concat!($name, ".rope.freq_base_swa"),
                rope_scaling: concat!($name, ".rope.scaling"),
                query_scalar: concat!($name, ".attention.key_length"),
                window: concat!($name, ".attention.sliding_window"),
                n_experts: concat!($name, ".expert_count"),
                n_experts_used: concat!($name, ".expert_used_count"),
                expert_intermediate_size: concat!($name, ".expert_feed_forward_length"),
            },
            read: $read,
        }
    };
}

const ARCHITECTURES: [Architecture; 5] = [
    architecture!(
        "llama",
        Family::Llama,
        &[
            "attention.sliding_window",
            "expert_count",
            "expert_used_count"
        ]
    ),
    architecture!("qwen2", Family::Qwen2, &[]),
    architecture!("qwen3", Family::Qwen3, &[]),
    architecture!(
        "qwen3moe",
        Family::Qwen3Moe,
        &[
            "expert_count",
            "expert_used_count",
            "expert_feed_forward_length"
        ]
    ),
    architecture!(
        "gemma3",
        Family::Gemma3,
        &[
            "attention.sliding_window",
            "attention.sliding_window_pattern",
            "rope.freq_base_swa"
        ]
    ),
];

/// Keys, less the architecture's name, that are read for all.
const READ_KEYS: [&str; 12] = [
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "vocab_size",
    "context_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
];

/// Keys that are fine only with the value that says "this model does not use it".
const FIXED_KEYS: [(&str, Value<'static>); 4] = [
    ("expert_count", Value::Unsigned(0)),
    ("expert_used_count", Value::Unsigned(0)),
    ("attention.causal", Value::Bool(true)),
    ("tensor_data_layout", Value::String("Meta AI original pth")),
];

/// The config of the model that a parsed file describes.
pub(crate) fn config(gguf: &Gguf<'_>) -> Result<ModelConfig, Refusal> {
    let architecture = Architecture::of(gguf)?;
    let (family, names) = (architecture.family, &architecture.names);
    refuse_unknown_keys(gguf, architecture)?;
    let hidden_size = required(gguf, names.hidden_size)?;
    let n_heads = required(gguf, names.n_heads)?;
    let n_layers = required(gguf, names.n_layers)?;
    let context_length = required(gguf, names.context_length)?;
    let intermediate_size = required(gguf, names.intermediate_size)?;
    let head_dim = match gguf.u32(names.head_dim)? {
        Some(head_dim) => head_dim,
        None => ModelConfig::implied_head_dim(hidden_size, n_heads, names)?,
    };
    architecture.check_other_head_dims(gguf, head_dim)?;
    let rope = architecture.rope(gguf, context_length)?;
    let is_27b = family == Family::Gemma3 && n_layers == GEMMA_27B_LAYERS;
    let config = ModelConfig {
        family,
        n_layers,
        hidden_size,
        intermediate_size,
        n_heads,
        n_kv_heads: gguf.u32(names.n_kv_heads)?.unwrap_or(n_heads),
        head_dim,
        vocab_size: vocab_size(gguf, names)?,
        context_length: rope.scaling.context_length(context_length),
        rms_norm_eps: gguf
            .f32(names.rms_norm_eps)?
            .ok_or_else(|| Refusal::new(names.rms_norm_eps, "the key is missing"))?,
        norm_weights: NormWeights::AsStored,
        rope,
        query_scalar: match is_27b {
            true => ModelConfig::implied_head_dim(hidden_size, n_heads, names)? as f32,
            false => head_dim as f32,
        },
        window: architecture.window(gguf)?,
        experts: architecture.experts(gguf, intermediate_size)?,
        tied_head: !has_tensor(gguf, OUTPUT_HEAD),
        name: gguf.string("general.name")?.unwrap_or_default().to_owned(),
    };
    config.check(names)?;
    Ok(config)
}

/// Positions that the model takes, prompt and output together.
pub(crate) fn context_length(gguf: &Gguf<'_>) -> Result<u32, Refusal> {
    let architecture = Architecture::of(gguf)?;
    let stated = required(gguf, architecture.names.context_length)?;
    let scaling = rope::scaling(gguf, architecture.name, stated)?;
    Ok(scaling.context_length(stated))
}

impl Architecture {
    fn of(gguf: &Gguf<'_>) -> Result<&'static Self, Refusal> {
        let key = "general.architecture";
        let Some(name) = gguf.string(key)? else {
            return Err(Refusal::new(key, "the key is missing"));
        };
        let Some(architecture) = ARCHITECTURES.iter().find(|known| known.name == name) else {
            let supported: Vec<_> = ARCHITECTURES.iter().map(|known| known.name).collect();
            let problem = format!("{}, supported: {}", quoted(name), supported.join(", "));
            return Err(Refusal::new(key, problem));
        };
        let key = "general.type";
        match gguf.string(key)? {
            None | Some("model") => Ok(architecture),
            Some(other) => Err(Refusal::new(
                key,
                format!("{}, supported: \"model\"", quoted(other)),
            )),
        }
    }

    fn check_other_head_dims(&self, gguf: &Gguf<'_>, head_dim: u32) -> Result<(), Refusal> {
        for key in ["attention.value_length", "rope.dimension_count"] {
            let key = format!("{}.{key}", self.name);
            if let Some(other) = gguf.u32(&key)?.filter(|value| *value != head_dim) {
                let problem =
                    format!("{other}, but only the head dimension, {head_dim}, is supported");
                return Err(Refusal::new(key, problem));
            }
        }
        Ok(())
    }

    fn rope(&self, gguf: &Gguf<'_>, context_length: u32) -> Result<Rope, Refusal> {
        let theta = gguf
            .f32(self.names.rope_theta)?
            .unwrap_or(ROPE_THETA_DEFAULT);
        let local_theta = match self.family {
            Family::Gemma3 => GEMMA_LOCAL_THETA_DEFAULT,
            _ => theta,
        };
        Ok(Rope {
            theta,
            local_theta: gguf
                .f32(self.names.rope_local_theta)?
                .unwrap_or(local_theta),
            style: match self.family {
                Family::Llama => RopeStyle::Interleaved,
                _ => RopeStyle::HalfSplit,
            },
            scaling: rope::scaling(gguf, self.name, context_length)?,
        })
    }

    fn window(&self, gguf: &Gguf<'_>) -> Result<Option<Window>, Refusal> {
        let global_every = match self.family {
            Family::Gemma3 => {
                let key = "gemma3.attention.sliding_window_pattern";
                let every = gguf.u32(key)?.unwrap_or(GEMMA_GLOBAL_EVERY);
                if every == 0 {
                    return Err(Refusal::new(key, "0, expected at least 1"));
                }
                Some(every)
            }
            _ => None,
        };
        let n_positions = match self.family {
            Family::Gemma3 => Some(required(gguf, self.names.window)?),
            _ => gguf.u32(self.names.window)?,
        };
        Ok(n_positions.map(|n_positions| Window {
            n_positions,
            global_every,
        }))
    }

    /// Mixtral is a llama with experts as wide as its feed-forward block. All divide the weights by their sum.
    fn experts(&self, gguf: &Gguf<'_>, intermediate_size: u32) -> Result<Option<Experts>, Refusal> {
        let n_experts = match self.family {
            Family::Qwen3Moe => required(gguf, self.names.n_experts)?,
            Family::Llama => gguf.u32(self.names.n_experts)?.unwrap_or(0),
            _ => 0,
        };
        if n_experts == 0 && self.family != Family::Qwen3Moe {
            return Ok(None);
        }
        Ok(Some(Experts {
            n_experts,
            n_used: required(gguf, self.names.n_experts_used)?,
            intermediate_size: match self.family {
                Family::Qwen3Moe => required(gguf, self.names.expert_intermediate_size)?,
                _ => intermediate_size,
            },
            normalise: true,
        }))
    }
}

fn refuse_unknown_keys(gguf: &Gguf<'_>, architecture: &Architecture) -> Result<(), Refusal> {
    let prefix = format!("{}.", architecture.name);
    // In order, so that a file is refused for the same key each time.
    let mut keys: Vec<&str> = gguf.keys().filter(|key| key.starts_with(&prefix)).collect();
    keys.sort_unstable();
    for key in keys {
        let rest = &key[prefix.len()..];
        let is_read = READ_KEYS.contains(&rest) || rope::KEYS.contains(&rest);
        if is_read || architecture.read.contains(&rest) {
            continue;
        }
        let value = gguf.value(key).expect("the key comes from this file");
        match FIXED_KEYS.iter().find(|(fixed, _)| *fixed == rest) {
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

pub(super) fn has_tensor(gguf: &Gguf<'_>, name: &str) -> bool {
    gguf.tensors().iter().any(|tensor| tensor.name == name)
}

fn required(gguf: &Gguf<'_>, key: &str) -> Result<u32, Refusal> {
    gguf.u32(key)?
        .ok_or_else(|| Refusal::new(key, "the key is missing"))
}

/// The stated size, else the rows of the embedding; the two must agree with the tensor anyway.
fn vocab_size(gguf: &Gguf<'_>, names: &FieldNames) -> Result<u32, Refusal> {
    if let Some(vocab_size) = gguf.u32(names.vocab_size)? {
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

/// The file's tensors, row-major, under the names of this crate. The experts of a layer, which lie in one tensor of three
/// dimensions, come one by one.
pub(crate) fn tensors(gguf: &Gguf<'_>, config: &ModelConfig) -> Vec<Found> {
    let n_experts = config.experts.map_or(0, |experts| experts.n_experts);
    let mut found = Vec::new();
    for tensor in gguf.tensors() {
        let whole = Found {
            spelling: tensor.name.to_owned(),
            name: tensor_name(tensor.name),
            dtype: tensor.dtype,
            shape: tensor.dims.iter().rev().copied().collect(),
            file_idx: 0,
            range: tensor.range.clone(),
        };
        match experts_name(tensor.name) {
            // Another count stays whole, and is then refused with its shape.
            Some(name) if whole.shape.len() == 3 && whole.shape[0] == u64::from(n_experts) => {
                found.extend((0..n_experts).map(|expert_idx| one_expert(&whole, name, expert_idx)));
            }
            _ => found.push(whole),
        }
    }
    found
}

/// The layer and tensor of a spelling that stands for all experts of a layer.
fn experts_name(spelling: &str) -> Option<(u32, ExpertTensor)> {
    let (layer_idx, rest) = spelling.strip_prefix("blk.")?.split_once('.')?;
    let tensor = match rest {
        "ffn_gate_exps.weight" => ExpertTensor::Gate,
        "ffn_up_exps.weight" => ExpertTensor::Up,
        "ffn_down_exps.weight" => ExpertTensor::Down,
        _ => return None,
    };
    Some((crate::tensors::layer_idx(layer_idx)?, tensor))
}

/// The tensor's size is that of its shape, so it divides evenly.
fn one_expert(whole: &Found, name: (u32, ExpertTensor), expert_idx: u32) -> Found {
    let n_bytes = whole.range.len() / whole.shape[0] as usize;
    let start = whole.range.start + expert_idx as usize * n_bytes;
    Found {
        spelling: whole.spelling.clone(),
        name: Some(TensorName::Expert(name.0, expert_idx, name.1)),
        dtype: whole.dtype,
        shape: whole.shape[1..].to_vec(),
        file_idx: whole.file_idx,
        range: start..start + n_bytes,
    }
}

fn tensor_name(spelling: &str) -> Option<TensorName> {
    match spelling {
        TOKEN_EMBEDDING => return Some(TensorName::TokenEmbedding),
        "output_norm.weight" => return Some(TensorName::OutputNorm),
        OUTPUT_HEAD => return Some(TensorName::OutputHead),
        rope::DIVISORS => return Some(TensorName::RopeDivisors),
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
        "attn_q.bias" => LayerTensor::QBias,
        "attn_k.bias" => LayerTensor::KBias,
        "attn_v.bias" => LayerTensor::VBias,
        "attn_q_norm.weight" => LayerTensor::QNorm,
        "attn_k_norm.weight" => LayerTensor::KNorm,
        "post_attention_norm.weight" => LayerTensor::PostAttnNorm,
        "post_ffw_norm.weight" => LayerTensor::PostFfnNorm,
        "ffn_gate_inp.weight" => LayerTensor::Router,
        _ => return None,
    };
    Some(TensorName::Layer(
        crate::tensors::layer_idx(layer_idx)?,
        tensor,
    ))
}
