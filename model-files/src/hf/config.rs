//! `config.json` of a model, strictly.
//!
//! What may stand in it is `dialect`'s to say, and `rope` reads what concerns rope; here the numbers become a
//! [`ModelConfig`]. Where a key is absent, the default is that of the family's own class in transformers, or the key is
//! required.

use super::dialect::Dialect;
use super::rope;
use crate::config::{
    Experts, Family, FieldNames, ModelConfig, NormWeights, Rope, RopeStyle, Window,
};
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
    rope_local_theta: "rope_local_base_freq",
    rope_scaling: "rope_scaling",
    query_scalar: "query_pre_attn_scalar",
    window: "sliding_window",
    n_experts: "num_experts",
    n_experts_used: "num_experts_per_tok",
    expert_intermediate_size: "moe_intermediate_size",
};

/// The default of most families; Gemma 3 and Mixtral must state theirs.
const ROPE_THETA_DEFAULT: f32 = 10_000.0;
const GEMMA_LOCAL_THETA_DEFAULT: f32 = 10_000.0;
const MISTRAL_WINDOW_DEFAULT: u32 = 4096;
const GEMMA_GLOBAL_EVERY_DEFAULT: u32 = 6;
/// Of Qwen 3's classes, whatever the hidden size is.
const QWEN3_HEAD_DIM_DEFAULT: u32 = 128;

/// The config in the bytes of a `config.json`. The name is left empty: the file does not state one.
pub(super) fn parse(bytes: &[u8]) -> Result<ModelConfig, Refusal> {
    let fields = Fields::parse(bytes, "config")?;
    let family = Dialect::of(&fields)?.family;
    let hidden_size = fields.required(NAMES.hidden_size)?;
    let n_heads = fields.required(NAMES.n_heads)?;
    let head_dim = match (fields.get(NAMES.head_dim)?, family) {
        (Some(head_dim), _) => head_dim,
        (None, Family::Qwen3 | Family::Qwen3Moe) => QWEN3_HEAD_DIM_DEFAULT,
        (None, Family::Gemma3) => fields.required(NAMES.head_dim)?,
        (None, _) => ModelConfig::implied_head_dim(hidden_size, n_heads, &NAMES)?,
    };
    let n_kv_heads = match (fields.get(NAMES.n_kv_heads)?, family) {
        (Some(n_kv_heads), _) => n_kv_heads,
        (None, Family::Llama) => n_heads,
        (None, _) => fields.required(NAMES.n_kv_heads)?,
    };
    let context_length = fields.required(NAMES.context_length)?;
    let n_layers = fields.required(NAMES.n_layers)?;
    let rope = read_rope(&fields, family, context_length)?;
    let tied_head = fields.get("tie_word_embeddings")?;
    let config = ModelConfig {
        family,
        n_layers,
        hidden_size,
        intermediate_size: fields.required(NAMES.intermediate_size)?,
        n_heads,
        n_kv_heads,
        head_dim,
        vocab_size: fields.required(NAMES.vocab_size)?,
        context_length: rope.scaling.context_length(context_length),
        rms_norm_eps: fields.required(NAMES.rms_norm_eps)?,
        norm_weights: match family {
            Family::Gemma3 => NormWeights::LessOne,
            _ => NormWeights::AsStored,
        },
        rope,
        query_scalar: match family {
            Family::Gemma3 => fields.required(NAMES.query_scalar)?,
            _ => head_dim as f32,
        },
        window: read_window(&fields, family, n_layers)?,
        experts: read_experts(&fields, family)?,
        tied_head: tied_head.unwrap_or(family == Family::Gemma3),
        name: String::new(),
    };
    config.check(&NAMES)?;
    Ok(config)
}

/// Positions that the model takes, prompt and output together.
pub(crate) fn context_length(fields: &Fields<'_>) -> Result<u32, Refusal> {
    let stated = fields.required(NAMES.context_length)?;
    Ok(rope::read(fields, stated)?.scaling.context_length(stated))
}

fn read_rope(fields: &Fields<'_>, family: Family, context_length: u32) -> Result<Rope, Refusal> {
    let stated = rope::read(fields, context_length)?;
    let is_gemma = family == Family::Gemma3;
    let must_state = is_gemma || family == Family::Mixtral;
    let theta = match stated.theta {
        Some(theta) => theta,
        None if must_state => fields.required(NAMES.rope_theta)?,
        None => ROPE_THETA_DEFAULT,
    };
    Ok(Rope {
        theta,
        local_theta: match stated.local_theta {
            Some(local_theta) => local_theta,
            None if is_gemma => GEMMA_LOCAL_THETA_DEFAULT,
            None => theta,
        },
        style: RopeStyle::HalfSplit,
        scaling: stated.scaling,
    })
}

fn read_window(
    fields: &Fields<'_>,
    family: Family,
    n_layers: u32,
) -> Result<Option<Window>, Refusal> {
    let window = match family {
        Family::Gemma3 => Some(Window {
            n_positions: fields.required(NAMES.window)?,
            global_every: Some(global_every(fields)?),
        }),
        Family::Mistral | Family::Mixtral => {
            let stated: Option<u32> = fields.get(NAMES.window)?;
            // An absent key means something for Mistral only.
            let is_absent = family == Family::Mistral && fields.raw(NAMES.window).is_empty();
            let n_positions = stated.or(is_absent.then_some(MISTRAL_WINDOW_DEFAULT));
            n_positions.map(|n_positions| Window {
                n_positions,
                global_every: None,
            })
        }
        _ => None,
    };
    check_layer_types(fields, window, n_layers)?;
    Ok(window)
}

/// Every how many layers one sees everything.
fn global_every(fields: &Fields<'_>) -> Result<u32, Refusal> {
    let keys = ["sliding_window_pattern", "_sliding_window_pattern"];
    let mut every = None;
    for key in keys {
        every = every.or(fields.get::<u32>(key)?);
    }
    match every.unwrap_or(GEMMA_GLOBAL_EVERY_DEFAULT) {
        0 => Err(Refusal::new(keys[0], "0, expected at least 1")),
        every => Ok(every),
    }
}

/// Newer files list the kind of every layer, which must be what the other keys come to.
fn check_layer_types(
    fields: &Fields<'_>,
    window: Option<Window>,
    n_layers: u32,
) -> Result<(), Refusal> {
    let Some(types) = fields.get::<Vec<String>>("layer_types")? else {
        return Ok(());
    };
    if types.len() != n_layers as usize {
        let problem = format!("{} entries for {n_layers} layers", types.len());
        return Err(Refusal::new("layer_types", problem));
    }
    for (number, kind) in (1_u32..).zip(types) {
        let is_windowed = window.is_some_and(|window| {
            !window
                .global_every
                .is_some_and(|every| number.is_multiple_of(every))
        });
        let expected = if is_windowed {
            "sliding_attention"
        } else {
            "full_attention"
        };
        if kind != expected {
            let problem = format!(
                "{} for layer {}, supported: {expected}",
                quoted(&kind),
                number - 1
            );
            return Err(Refusal::new("layer_types", problem));
        }
    }
    Ok(())
}

fn read_experts(fields: &Fields<'_>, family: Family) -> Result<Option<Experts>, Refusal> {
    Ok(match family {
        Family::Qwen3Moe => Some(Experts {
            n_experts: fields.required(NAMES.n_experts)?,
            n_used: fields.required(NAMES.n_experts_used)?,
            intermediate_size: fields.required(NAMES.expert_intermediate_size)?,
            normalise: fields.get("norm_topk_prob")?.unwrap_or(false),
        }),
        Family::Mixtral => Some(Experts {
            n_experts: fields.required("num_local_experts")?,
            n_used: fields.required(NAMES.n_experts_used)?,
            intermediate_size: fields.required(NAMES.intermediate_size)?,
            normalise: true,
        }),
        _ => None,
    })
}
