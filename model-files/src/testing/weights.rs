//! Random weights that behave like trained ones where it matters to a test.
//!
//! Each matrix keeps the variance of its input. The embedding is small beside what the layers add, so that a tied
//! head does not simply repeat the last token and a wrong KV byte changes the next token.

use super::{EXPERTS, N_TOKENS, TinySpec};
use crate::config::Family;
use crate::tensors::WeightType;

/// A tensor in Hugging Face's order of rows.
pub(super) struct Tensor {
    pub(super) hf_name: String,
    pub(super) gguf_name: String,
    pub(super) dtype: WeightType,
    /// Row-major; one dimension for a norm, three for the experts of a layer, whose Hugging Face name has `{}` for the
    /// expert.
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
        let layer = Layer { spec, layer_idx };
        layer.base(&mut random, &mut tensors);
        layer.additions(&mut random, &mut tensors);
    }
    tensors
}

/// The tensors of one layer.
struct Layer<'a> {
    spec: &'a TinySpec,
    layer_idx: u32,
}

impl Layer<'_> {
    fn names(&self, hf: &str, gguf: &str) -> [String; 2] {
        let layer_idx = self.layer_idx;
        [
            format!("model.layers.{layer_idx}.{hf}"),
            format!("blk.{layer_idx}.{gguf}"),
        ]
    }

    /// What Llama has.
    fn base(&self, random: &mut Random, tensors: &mut Vec<Tensor>) {
        let spec = self.spec;
        let hidden = spec.hidden_size as usize;
        let intermediate = spec.intermediate_size as usize;
        let q_rows = (spec.n_heads * spec.head_dim) as usize;
        let kv_rows = (spec.n_kv_heads * spec.head_dim) as usize;
        let ffn_norm = match spec.family {
            Family::Gemma3 => "pre_feedforward_layernorm.weight",
            _ => "post_attention_layernorm.weight",
        };
        for (hf, gguf) in [
            ("input_layernorm.weight", "attn_norm.weight"),
            (ffn_norm, "ffn_norm.weight"),
        ] {
            let [hf, gguf] = self.names(hf, gguf);
            tensors.push(norm(random, [&hf, &gguf], hidden));
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
            if spec.has_experts() && hf.starts_with("mlp") {
                continue;
            }
            let [hf, gguf] = self.names(&format!("{hf}.weight"), &format!("{gguf}.weight"));
            // A uniform number in [-a, a) has variance a^2 / 3.
            let amplitude = (3.0 / shape[1] as f32).sqrt();
            let tensor = matrix(random, [&hf, &gguf], shape, amplitude);
            tensors.push(Tensor {
                dtype: spec.weight_type,
                ..tensor
            });
        }
    }

    /// What the family adds.
    fn additions(&self, random: &mut Random, tensors: &mut Vec<Tensor>) {
        let spec = self.spec;
        let hidden = spec.hidden_size as usize;
        let head_dim = spec.head_dim as usize;
        if spec.family.has_qkv_bias() {
            for (letter, n_heads) in [
                ("q", spec.n_heads),
                ("k", spec.n_kv_heads),
                ("v", spec.n_kv_heads),
            ] {
                let hf = format!("self_attn.{letter}_proj.bias");
                let [hf, gguf] = self.names(&hf, &format!("attn_{letter}.bias"));
                let bias = matrix(random, [&hf, &gguf], [1, n_heads as usize * head_dim], 0.5);
                tensors.push(Tensor {
                    shape: vec![bias.shape[1]],
                    ..bias
                });
            }
        }
        let mut norms = Vec::new();
        if spec.family.has_head_norms() {
            norms.extend([
                ("self_attn.q_norm.weight", "attn_q_norm.weight", head_dim),
                ("self_attn.k_norm.weight", "attn_k_norm.weight", head_dim),
            ]);
        }
        if spec.family.has_post_norms() {
            norms.extend([
                (
                    "post_attention_layernorm.weight",
                    "post_attention_norm.weight",
                    hidden,
                ),
                (
                    "post_feedforward_layernorm.weight",
                    "post_ffw_norm.weight",
                    hidden,
                ),
            ]);
        }
        for (hf, gguf, width) in norms {
            let [hf, gguf] = self.names(hf, gguf);
            tensors.push(norm(random, [&hf, &gguf], width));
        }
        if spec.has_experts() {
            self.experts(random, tensors);
        }
    }

    fn experts(&self, random: &mut Random, tensors: &mut Vec<Tensor>) {
        let hidden = self.spec.hidden_size as usize;
        let [n_experts, _, inner] = EXPERTS.map(|number| number as usize);
        let (block, parts, inner) = match self.spec.family {
            Family::Mixtral => (
                "block_sparse_moe",
                ["w1", "w3", "w2"],
                self.spec.intermediate_size as usize,
            ),
            _ => ("mlp", ["gate_proj", "up_proj", "down_proj"], inner),
        };
        let router = format!("{block}.gate.weight");
        let [hf, gguf] = self.names(&router, "ffn_gate_inp.weight");
        // Large, so that rows prefer some experts clearly.
        tensors.push(matrix(random, [&hf, &gguf], [n_experts, hidden], 1.0));
        for (hf_part, (part, rows, cols)) in parts.into_iter().zip([
            ("gate", inner, hidden),
            ("up", inner, hidden),
            ("down", hidden, inner),
        ]) {
            let hf = format!("{block}.experts.{{}}.{hf_part}.weight");
            let [hf, gguf] = self.names(&hf, &format!("ffn_{part}_exps.weight"));
            let amplitude = (3.0 / cols as f32).sqrt();
            let all = matrix(random, [&hf, &gguf], [n_experts * rows, cols], amplitude);
            tensors.push(Tensor {
                dtype: self.spec.weight_type,
                shape: vec![n_experts, rows, cols],
                ..all
            });
        }
    }
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

/// The tensor as a Hugging Face file holds it: norms of Gemma less 1, which is exact for numbers near 1.
pub(super) fn for_hf(spec: &TinySpec, mut tensor: Tensor) -> Tensor {
    let is_norm = tensor.hf_name.ends_with("norm.weight");
    if spec.family == Family::Gemma3 && is_norm {
        tensor.values.iter_mut().for_each(|value| *value -= 1.0);
    }
    tensor
}

/// The tensor as a GGUF file holds it: of a llama, rows of q and k from half-split to interleaved order within each head,
/// so that row `2 i + s` is Hugging Face's row `s * head_dim / 2 + i`.
pub(super) fn for_gguf(spec: &TinySpec, mut tensor: Tensor) -> Tensor {
    let is_rotated = ["attn_q", "attn_k"]
        .iter()
        .any(|part| tensor.gguf_name.contains(part));
    if !is_rotated || !spec.is_permuted() {
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
