//! Random weights that behave like trained ones where it matters to a test.
//!
//! Each matrix keeps the variance of its input. The embedding is small beside what the layers add, so that a tied
//! head does not simply repeat the last token and a wrong KV byte changes the next token.

use super::{N_TOKENS, TinySpec};
use crate::tensors::WeightType;

/// A tensor in Hugging Face's order of rows.
pub(super) struct Tensor {
    pub(super) hf_name: String,
    pub(super) gguf_name: String,
    pub(super) dtype: WeightType,
    /// Row-major; one dimension for a norm.
    pub(super) shape: Vec<usize>,
    pub(super) values: Vec<f32>,
}

impl Tensor {
    /// Dimensions as GGUF writes them, fastest first.
    pub(super) fn gguf_dims(&self) -> Vec<u64> {
        self.shape.iter().rev().map(|dim| *dim as u64).collect()
    }
}

/// splitmix64 (Steele et al. 2014): small, and the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Uniform in [-1, 1), exact in f32.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1_u32 << 23) as f32 - 1.0
    }
}

/// All tensors of the model, in the order of its layers.
pub(super) fn tensors(spec: &TinySpec) -> Vec<Tensor> {
    let mut random = Random(spec.seed);
    let hidden = spec.hidden_size as usize;
    let intermediate = spec.intermediate_size as usize;
    let q_rows = (spec.n_heads * spec.head_dim) as usize;
    let kv_rows = (spec.n_kv_heads * spec.head_dim) as usize;
    let embedding_type = match spec.weight_type {
        float @ (WeightType::F32 | WeightType::F16 | WeightType::BF16) => float,
        _ => WeightType::Q8_0,
    };
    let mut tensors = Vec::new();
    let mut embedding = |hf: &str, gguf: &str| {
        let shape = [N_TOKENS, hidden];
        let tensor = matrix(&mut random, [hf, gguf], shape, 0.25);
        tensors.push(Tensor {
            dtype: embedding_type,
            ..tensor
        });
    };
    embedding("model.embed_tokens.weight", "token_embd.weight");
    if !spec.tied_head {
        embedding("lm_head.weight", "output.weight");
    }
    tensors.push(norm(
        &mut random,
        ["model.norm.weight", "output_norm.weight"],
        hidden,
    ));
    for layer_idx in 0..spec.n_layers {
        let names = |hf: &str, gguf: &str| {
            [
                format!("model.layers.{layer_idx}.{hf}.weight"),
                format!("blk.{layer_idx}.{gguf}.weight"),
            ]
        };
        for (hf, gguf) in [
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", "ffn_norm"),
        ] {
            let [hf, gguf] = names(hf, gguf);
            tensors.push(norm(&mut random, [&hf, &gguf], hidden));
        }
        for (hf, gguf, shape) in [
            ("self_attn.q_proj", "attn_q", [q_rows, hidden]),
            ("self_attn.k_proj", "attn_k", [kv_rows, hidden]),
            ("self_attn.v_proj", "attn_v", [kv_rows, hidden]),
            ("self_attn.o_proj", "attn_output", [hidden, q_rows]),
            ("mlp.gate_proj", "ffn_gate", [intermediate, hidden]),
            ("mlp.up_proj", "ffn_up", [intermediate, hidden]),
            ("mlp.down_proj", "ffn_down", [hidden, intermediate]),
        ] {
            let [hf, gguf] = names(hf, gguf);
            // A uniform number in [-a, a) has variance a^2 / 3.
            let amplitude = (3.0 / shape[1] as f32).sqrt();
            let tensor = matrix(&mut random, [&hf, &gguf], shape, amplitude);
            tensors.push(Tensor {
                dtype: spec.weight_type,
                ..tensor
            });
        }
    }
    tensors
}

fn matrix(random: &mut Random, names: [&str; 2], shape: [usize; 2], amplitude: f32) -> Tensor {
    Tensor {
        hf_name: names[0].to_owned(),
        gguf_name: names[1].to_owned(),
        dtype: WeightType::F32,
        shape: shape.to_vec(),
        values: (0..shape[0] * shape[1])
            .map(|_| random.unit() * amplitude)
            .collect(),
    }
}

fn norm(random: &mut Random, names: [&str; 2], width: usize) -> Tensor {
    Tensor {
        hf_name: names[0].to_owned(),
        gguf_name: names[1].to_owned(),
        dtype: WeightType::F32,
        shape: vec![width],
        values: (0..width).map(|_| 1.0 + 0.1 * random.unit()).collect(),
    }
}

/// The tensor as a GGUF file holds it: rows of q and k from half-split to interleaved order within each head, so
/// that row `2 i + s` is Hugging Face's row `s * head_dim / 2 + i`.
pub(super) fn for_gguf(spec: &TinySpec, mut tensor: Tensor) -> Tensor {
    let is_rotated = ["attn_q", "attn_k"]
        .iter()
        .any(|part| tensor.gguf_name.contains(part));
    if !is_rotated {
        return tensor;
    }
    let head_dim = spec.head_dim as usize;
    let cols = tensor.shape[1];
    let source = tensor.values.clone();
    for (row, values) in tensor.values.chunks_exact_mut(cols).enumerate() {
        let (head_start, within) = (row / head_dim * head_dim, row % head_dim);
        let source_row = head_start + within % 2 * (head_dim / 2) + within / 2;
        values.copy_from_slice(&source[source_row * cols..][..cols]);
    }
    tensor
}
