//! `config.json` of a Llama model, strictly.
//!
//! Each key is read, checked against the one value that we compute, or known to be without effect on the
//! numbers. Any other key refuses the model: a key that is ignored with a warning is how a server comes to
//! answer with another model than the one that was asked for.
//! Source: <https://huggingface.co/docs/transformers/model_doc/llama>, `LlamaConfig`.

use crate::config::{Family, FieldNames, ModelConfig, Rope, RopeStyle};
use crate::error::{Refusal, quoted};
use crate::json::Fields;

const NAMES: FieldNames = FieldNames {
    n_layers: "num_hidden_layers",
    hidden_size: "hidden_size",
    intermediate_size: "intermediate_size",
    n_heads: "num_attention_heads",
    n_kv_heads: "num_key_value_heads",
    head_dim: "head_dim",
    vocab_size: "vocab_size",
    context_length: "max_position_embeddings",
    rms_norm_eps: "rms_norm_eps",
    rope_theta: "rope_theta",
};

/// `LlamaConfig`'s own default.
const ROPE_THETA_DEFAULT: f32 = 10_000.0;

/// Keys that [`parse`] reads.
const READ_KEYS: [&str; 15] = [
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
    "model_type",
    "architectures",
    "tie_word_embeddings",
    "rope_scaling",
    "rope_parameters",
];

/// Keys that switch something on which we do not compute; each is fine when false or absent.
const OFF_KEYS: [&str; 4] = [
    "attention_bias",
    "mlp_bias",
    "rope_interleaved",
    "use_sliding_window",
];

/// Keys that must be null or absent.
const NULL_KEYS: [&str; 4] = [
    "sliding_window",
    "quantization_config",
    "layer_types",
    "auto_map",
];

/// Keys without effect on the numbers: provenance, training, and token ids, which come from the tokenizer's files.
const INERT_KEYS: [&str; 20] = [
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
    "initializer_range",
    "pretraining_tp",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "is_llama_config",
    "transformers.js_config",
    "attn_implementation",
    "_attn_implementation_autoset",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "model_name",
];

/// The config in the bytes of a `config.json`. The name is left empty: the file does not state one.
pub(super) fn parse(bytes: &[u8]) -> Result<ModelConfig, Refusal> {
    let fields = Fields::parse(bytes, "config")?;
    refuse_other_families(&fields)?;
    refuse_unsupported(&fields)?;
    let hidden_size = fields.required(NAMES.hidden_size)?;
    let n_heads = fields.required(NAMES.n_heads)?;
    let head_dim = match fields.get(NAMES.head_dim)? {
        Some(head_dim) => head_dim,
        None => ModelConfig::implied_head_dim(hidden_size, n_heads, &NAMES)?,
    };
    let config = ModelConfig {
        family: Family::Llama,
        n_layers: fields.required(NAMES.n_layers)?,
        hidden_size,
        intermediate_size: fields.required(NAMES.intermediate_size)?,
        n_heads,
        n_kv_heads: fields.get(NAMES.n_kv_heads)?.unwrap_or(n_heads),
        head_dim,
        vocab_size: fields.required(NAMES.vocab_size)?,
        context_length: fields.required(NAMES.context_length)?,
        rms_norm_eps: fields.required(NAMES.rms_norm_eps)?,
        rope: rope(&fields)?,
        tied_head: fields.get("tie_word_embeddings")?.unwrap_or(false),
        name: String::new(),
    };
    config.check(&NAMES)?;
    Ok(config)
}

fn refuse_other_families(fields: &Fields<'_>) -> Result<(), Refusal> {
    let model_type: String = fields.required("model_type")?;
    if model_type != "llama" {
        return Err(Refusal::new(
            "model_type",
            format!("{}, supported: \"llama\"", quoted(&model_type)),
        ));
    }
    let architectures: Option<Vec<String>> = fields.get("architectures")?;
    match architectures.as_deref() {
        None => Ok(()),
        Some([one]) if one == "LlamaForCausalLM" => Ok(()),
        Some(_) => Err(Refusal::new(
            "architectures",
            format!(
                "{}, supported: [\"LlamaForCausalLM\"]",
                quoted(fields.raw("architectures"))
            ),
        )),
    }
}

fn refuse_unsupported(fields: &Fields<'_>) -> Result<(), Refusal> {
    for key in fields.keys() {
        let value = fields.raw(key);
        let supported = match key {
            "hidden_act" if value == "\"silu\"" => continue,
            "hidden_act" => "\"silu\"",
            "partial_rotary_factor" if fields.get(key)? == Some(1.0_f64) => continue,
            "partial_rotary_factor" => "1.0",
            _ if READ_KEYS.contains(&key) || INERT_KEYS.contains(&key) => continue,
            _ if OFF_KEYS.contains(&key) && matches!(value, "false" | "null") => continue,
            _ if OFF_KEYS.contains(&key) => "false",
            _ if NULL_KEYS.contains(&key) && value == "null" => continue,
            _ if NULL_KEYS.contains(&key) => "null",
            _ => {
                return Err(Refusal::new(
                    quoted(key),
                    format!(
                        "{}; this key is not known and may change the result",
                        quoted(value)
                    ),
                ));
            }
        };
        return Err(Refusal::new(
            key,
            format!("{}, supported: {supported}", quoted(value)),
        ));
    }
    Ok(())
}

/// `rope_theta` and `rope_scaling`, or their newer form `rope_parameters`.
fn rope(fields: &Fields<'_>) -> Result<Rope, Refusal> {
    let mut theta: Option<f32> = fields.get(NAMES.rope_theta)?;
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(inner) = fields.get::<Fields<'_>>(key)? else {
            continue;
        };
        refuse_scaling(key, &inner)?;
        let inner_theta: Option<f32> = inner.get(NAMES.rope_theta)?;
        if theta.is_some() && inner_theta.is_some() && theta != inner_theta {
            return Err(Refusal::new(
                format!("{key}.rope_theta"),
                format!(
                    "{} contradicts rope_theta outside",
                    inner.raw(NAMES.rope_theta)
                ),
            ));
        }
        theta = theta.or(inner_theta);
    }
    Ok(Rope {
        theta: theta.unwrap_or(ROPE_THETA_DEFAULT),
        style: RopeStyle::HalfSplit,
    })
}

/// Only the type that changes nothing is supported, under either spelling of its key.
fn refuse_scaling(object: &str, scaling: &Fields<'_>) -> Result<(), Refusal> {
    let mut n_types = 0;
    for key in ["rope_type", "type"] {
        let Some(kind) = scaling.get::<String>(key)? else {
            continue;
        };
        n_types += 1;
        if kind != "default" {
            return Err(Refusal::new(
                format!("{object}.{key}"),
                format!(
                    "{} is not supported, supported: \"default\" or no {object}",
                    quoted(&kind)
                ),
            ));
        }
    }
    if n_types == 0 {
        return Err(Refusal::new(
            format!("{object}.rope_type"),
            "the key is missing",
        ));
    }
    let known = ["rope_type", "type", NAMES.rope_theta];
    match scaling.keys().find(|key| !known.contains(key)) {
        None => Ok(()),
        Some(key) => Err(Refusal::new(
            format!("{object}.{}", quoted(key)),
            format!("{}; this key is not supported", quoted(scaling.raw(key))),
        )),
    }
}
