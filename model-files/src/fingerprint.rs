//! The identity of a model: blake3 over everything that its output depends on.
//!
//! KV computed with one model must never be used with another, however alike their names are, so the identity
//! covers every weight byte, not a name, a size or a date. Each part is written with its length or in a fixed
//! width, so no two models have the same input to the hash.

use crate::config::{Family, ModelConfig, RopeStyle};
use crate::tensors::Tensors;

/// Raise when the encoding below changes.
const REVISION: &[u8] = b"tidemill model 1";

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
        rope,
        tied_head,
        name: _,
    } = config;
    let family = match family {
        Family::Llama => 0_u32,
    };
    let rope_style = match rope.style {
        RopeStyle::Interleaved => 0_u32,
        RopeStyle::HalfSplit => 1,
    };
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
        rope.theta.to_bits(),
        rope_style,
        u32::from(*tied_head),
    ] {
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
