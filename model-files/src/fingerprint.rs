//! The identity of a model: blake3 over everything that its output depends on.
//!
//! KV computed with one model must never be used with another, however alike their names are, so the identity
//! covers every weight byte, not a name, a size or a date. Each part is written with its length or in a fixed
//! width, so no two models have the same input to the hash.

use crate::config::{Family, ModelConfig, NormWeights, Rope, RopeScaling, RopeStyle, Yarn};
use crate::tensors::Tensors;

/// Raise when the encoding below changes.
const REVISION: &[u8] = b"tidemill model 2";

/// Config (less its name) and all tensors in canonical order.
pub(crate) fn fingerprint(config: &ModelConfig, tensors: &Tensors) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(REVISION);
    // Destructured, so that a new field cannot be forgotten here.
    let ModelConfig {
        family,
        n_layers,
        hidden_size,
        intermediate_size,
        n_heads,
        n_kv_heads,
        head_dim,
        vocab_size,
        context_length,
        rms_norm_eps,
        norm_weights,
        rope,
        query_scalar,
        window,
        experts,
        tied_head,
        name: _,
    } = config;
    let family = match family {
        Family::Llama => 0_u32,
        Family::Mistral => 1,
        Family::Qwen2 => 2,
        Family::Qwen3 => 3,
        Family::Qwen3Moe => 4,
        Family::Gemma3 => 5,
        Family::Mixtral => 6,
    };
    let norm_weights = match norm_weights {
        NormWeights::AsStored => 0_u32,
        NormWeights::LessOne => 1,
    };
    let window = window.map_or([0; 2], |w| [w.n_positions, w.global_every.unwrap_or(0)]);
    let experts = experts.map_or([0; 4], |e| {
        let normalise = u32::from(e.normalise);
        [e.n_experts, e.n_used, e.intermediate_size, normalise]
    });
    for number in [
        family,
        *n_layers,
        *hidden_size,
        *intermediate_size,
        *n_heads,
        *n_kv_heads,
        *head_dim,
        *vocab_size,
        *context_length,
        rms_norm_eps.to_bits(),
        norm_weights,
        query_scalar.to_bits(),
        u32::from(*tied_head),
    ]
    .into_iter()
    .chain(window)
    .chain(experts)
    .chain(rope_numbers(rope))
    {
        hasher.update(&number.to_le_bytes());
    }
    for tensor in tensors.iter() {
        let name = tensor.name.to_string();
        let [rows, cols] = tensor.shape;
        let dtype = u64::from(tensor.dtype.ggml_id());
        for number in [name.len() as u64, dtype, rows as u64, cols as u64] {
            hasher.update(&number.to_le_bytes());
        }
        hasher.update(name.as_bytes());
        hasher.update(tensor.bytes);
    }
    *hasher.finalize().as_bytes()
}

/// The kind of scaling decides how many numbers follow it.
fn rope_numbers(rope: &Rope) -> Vec<u32> {
    let Rope {
        theta,
        local_theta,
        style,
        scaling,
    } = rope;
    let style = match style {
        RopeStyle::Interleaved => 0_u32,
        RopeStyle::HalfSplit => 1,
    };
    let mut numbers = vec![theta.to_bits(), local_theta.to_bits(), style];
    match scaling {
        RopeScaling::None => numbers.push(0),
        RopeScaling::Linear { factor } => numbers.extend([1, factor.to_bits()]),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_context_length,
        } => {
            let [factor, low, high] =
                [factor, low_freq_factor, high_freq_factor].map(|number| number.to_bits());
            numbers.extend([2, factor, low, high, *original_context_length]);
        }
        RopeScaling::Yarn(Yarn {
            factor,
            beta_fast,
            beta_slow,
            original_context_length,
            truncate,
            magnitude,
            mscale,
            mscale_all_dim,
        }) => {
            numbers.extend([3, *original_context_length, u32::from(*truncate)]);
            let rest = [
                factor,
                beta_fast,
                beta_slow,
                magnitude,
                mscale,
                mscale_all_dim,
            ];
            numbers.extend(rest.map(|number| number.to_bits()));
        }
        RopeScaling::Divisors => numbers.push(4),
    }
    numbers
}
