//! A tiny model as the converters of llama.cpp would write it.

use super::gguf_writer::GgufWriter;
use super::{
    EXPERTS, LLAMA3_NUMBERS, LOCAL_ROPE_THETA, N_TOKENS, ORIGINAL_CONTEXT, RMS_NORM_EPS,
    ROPE_THETA, SCALING_FACTOR, TinyScaling, TinySpec, quantise, tokenizer, weights,
};
use crate::config::Family;
use crate::tensors::WeightType;

impl TinySpec {
    /// The converter permutes rows of q and k.
    pub(crate) fn is_permuted(&self) -> bool {
        matches!(
            self.family,
            Family::Llama | Family::Mistral | Family::Mixtral
        )
    }

    pub(crate) fn has_experts(&self) -> bool {
        matches!(self.family, Family::Mixtral | Family::Qwen3Moe)
    }
}

/// The bytes of the model as a GGUF file.
pub fn gguf_bytes(spec: &TinySpec) -> Vec<u8> {
    let mut writer = GgufWriter::new();
    let architecture = match spec.family {
        Family::Llama | Family::Mistral | Family::Mixtral => "llama",
        Family::Qwen2 => "qwen2",
        Family::Qwen3 => "qwen3",
        Family::Qwen3Moe => "qwen3moe",
        Family::Gemma3 => "gemma3",
    };
    writer.string("general.architecture", architecture);
    writer.string("general.name", "tiny");
    write_numbers(&mut writer, architecture, spec);
    write_scaling(&mut writer, architecture, spec);
    tokenizer::write_gguf(&mut writer);
    for tensor in weights::tensors(spec) {
        let tensor = weights::for_gguf(spec, tensor);
        let bytes = quantise(tensor.dtype, &tensor.values);
        writer.tensor(&tensor.gguf_name, tensor.dtype, &tensor.gguf_dims(), &bytes);
    }
    writer.finish()
}

fn write_numbers(writer: &mut GgufWriter, architecture: &str, spec: &TinySpec) {
    let key = |key: &str| format!("{architecture}.{key}");
    for (name, value) in [
        ("block_count", spec.n_layers),
        ("context_length", spec.context_length),
        ("embedding_length", spec.hidden_size),
        ("feed_forward_length", spec.intermediate_size),
        ("attention.head_count", spec.n_heads),
        ("attention.head_count_kv", spec.n_kv_heads),
        ("attention.key_length", spec.head_dim),
        ("attention.value_length", spec.head_dim),
        ("rope.dimension_count", spec.head_dim),
        ("vocab_size", N_TOKENS as u32),
    ] {
        writer.u32(&key(name), value);
    }
    writer.f32(&key("attention.layer_norm_rms_epsilon"), RMS_NORM_EPS);
    writer.f32(&key("rope.freq_base"), ROPE_THETA);
    if let Some(window) = spec.window {
        writer.u32(&key("attention.sliding_window"), window);
    }
    if spec.family == Family::Gemma3 {
        writer.f32(&key("rope.freq_base_swa"), LOCAL_ROPE_THETA);
    }
    let [n_experts, n_used, inner] = EXPERTS;
    if spec.has_experts() {
        writer.u32(&key("expert_count"), n_experts);
        writer.u32(&key("expert_used_count"), n_used);
    }
    if spec.family == Family::Qwen3Moe {
        writer.u32(&key("expert_feed_forward_length"), inner);
    }
}

fn write_scaling(writer: &mut GgufWriter, architecture: &str, spec: &TinySpec) {
    let key = |key: &str| format!("{architecture}.rope.scaling.{key}");
    match spec.scaling {
        TinyScaling::None => {}
        TinyScaling::Linear => {
            writer.string(&key("type"), "linear");
            writer.f32(&key("factor"), SCALING_FACTOR);
        }
        TinyScaling::Yarn => {
            writer.string(&key("type"), "yarn");
            writer.f32(&key("factor"), SCALING_FACTOR);
            writer.u32(&key("original_context_length"), ORIGINAL_CONTEXT);
        }
        TinyScaling::Llama3 => {
            let divisors = llama3_divisors(spec.head_dim);
            let dims = [divisors.len() as u64];
            let bytes = quantise(WeightType::F32, &divisors);
            writer.tensor("rope_freqs.weight", WeightType::F32, &dims, &bytes);
        }
    }
}

/// What the converter works out from the four numbers.
fn llama3_divisors(head_dim: u32) -> Vec<f32> {
    let [factor, low, high] = LLAMA3_NUMBERS.map(f64::from);
    let original = f64::from(ORIGINAL_CONTEXT);
    let divisor = |pair: u32| {
        let exponent = f64::from(2 * pair) / f64::from(head_dim);
        let wavelength = std::f64::consts::TAU * f64::from(ROPE_THETA).powf(exponent);
        if wavelength < original / high {
            1.0
        } else if wavelength > original / low {
            factor
        } else {
            let smooth = (original / wavelength - low) / (high - low);
            1.0 / ((1.0 - smooth) / factor + smooth)
        }
    };
    (0..head_dim / 2).map(|pair| divisor(pair) as f32).collect()
}
