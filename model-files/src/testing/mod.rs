//! Tiny models with random weights, for the tests of every crate.
//!
//! One [`TinySpec`] gives the same model as a GGUF file and as a Hugging Face directory: the same numbers, with the
//! q and k rows permuted in the GGUF file as its converters do it. So a test can hold one container against the
//! other, and every test has a real model of some 300 KB with a real tokenizer, made in a millisecond. The bytes
//! depend on the spec alone, on every platform.

mod gguf_writer;
mod hf_writer;
mod quantise;
mod tokenizer;
mod weights;

use std::io;
use std::path::Path;

use crate::tensors::WeightType;

pub use gguf_writer::GgufWriter;
pub use hf_writer::safetensors_bytes;
pub use quantise::quantise;
pub use tokenizer::{CHAT_TEMPLATE, N_TOKENS, SPECIAL_TOKENS};

/// What a tiny model looks like. Start from [`TinySpec::default`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TinySpec {
    /// Decides every weight.
    pub seed: u64,
    /// How the matrices are stored. Norms are always f32, and the embedding is Q8_0 when this is a smaller block
    /// type, as in published files. In a Hugging Face directory a block type means f32.
    pub weight_type: WeightType,
    /// Layers.
    pub n_layers: u32,
    /// Width of the residual stream; a multiple of 32 for block types.
    pub hidden_size: u32,
    /// Width of the feed-forward block; a multiple of 32 for block types.
    pub intermediate_size: u32,
    /// Query heads; `n_heads * head_dim` is a multiple of 32 for block types.
    pub n_heads: u32,
    /// Key and value heads; divides `n_heads`.
    pub n_kv_heads: u32,
    /// Elements of one head; even.
    pub head_dim: u32,
    /// Longest context.
    pub context_length: u32,
    /// True when the output head is the embedding.
    pub tied_head: bool,
}

impl Default for TinySpec {
    fn default() -> Self {
        Self {
            seed: 1,
            weight_type: WeightType::F32,
            n_layers: 2,
            hidden_size: 64,
            intermediate_size: 96,
            n_heads: 4,
            n_kv_heads: 2,
            head_dim: 16,
            context_length: 512,
            tied_head: true,
        }
    }
}

impl TinySpec {
    /// The default shape with these weights.
    pub fn new(seed: u64, weight_type: WeightType) -> Self {
        Self {
            seed,
            weight_type,
            ..Self::default()
        }
    }
}

/// Epsilon of every tiny model.
pub(crate) const RMS_NORM_EPS: f32 = 1e-5;
/// Rope base of every tiny model.
pub(crate) const ROPE_THETA: f32 = 10_000.0;

/// The bytes of the model as a GGUF file.
pub fn gguf_bytes(spec: &TinySpec) -> Vec<u8> {
    let mut writer = GgufWriter::new();
    writer.string("general.architecture", "llama");
    writer.string("general.name", "tiny");
    for (key, value) in [
        ("llama.block_count", spec.n_layers),
        ("llama.context_length", spec.context_length),
        ("llama.embedding_length", spec.hidden_size),
        ("llama.feed_forward_length", spec.intermediate_size),
        ("llama.attention.head_count", spec.n_heads),
        ("llama.attention.head_count_kv", spec.n_kv_heads),
        ("llama.attention.key_length", spec.head_dim),
        ("llama.attention.value_length", spec.head_dim),
        ("llama.rope.dimension_count", spec.head_dim),
        ("llama.vocab_size", N_TOKENS as u32),
    ] {
        writer.u32(key, value);
    }
    writer.f32("llama.attention.layer_norm_rms_epsilon", RMS_NORM_EPS);
    writer.f32("llama.rope.freq_base", ROPE_THETA);
    tokenizer::write_gguf(&mut writer);
    for tensor in weights::tensors(spec) {
        let tensor = weights::for_gguf(spec, tensor);
        let bytes = quantise(tensor.dtype, &tensor.values);
        writer.tensor(&tensor.gguf_name, tensor.dtype, &tensor.gguf_dims(), &bytes);
    }
    writer.finish()
}

/// Writes the model as a GGUF file.
///
/// # Errors
/// What the operating system says.
pub fn write_gguf(path: impl AsRef<Path>, spec: &TinySpec) -> io::Result<()> {
    std::fs::write(path, gguf_bytes(spec))
}

/// Writes the model as a Hugging Face directory, which is created when it does not exist.
///
/// # Errors
/// What the operating system says.
pub fn write_hf_dir(directory: impl AsRef<Path>, spec: &TinySpec) -> io::Result<()> {
    hf_writer::write(directory.as_ref(), spec)
}

/// A fresh directory for one test of this crate.
#[cfg(test)]
pub(crate) fn scratch(label: &str) -> std::path::PathBuf {
    let name = format!("tidemill-model-files-{}-{label}", std::process::id());
    let dir = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&dir).expect("the temporary directory is writable");
    dir
}

/// Runs `drive` on every seed of a fuzz target, so that what a fuzzer once found stays fixed.
#[cfg(test)]
pub(crate) fn replay_corpus(target: &str, drive: impl Fn(&[u8])) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fuzz/corpus")
        .join(target);
    let mut n_seeds = 0;
    for entry in std::fs::read_dir(&corpus).expect("the corpus is part of the repository") {
        let seed = entry.expect("the corpus is readable").path();
        drive(&std::fs::read(seed).expect("a seed is a file"));
        n_seeds += 1;
    }
    assert!(n_seeds > 0, "{} is empty", corpus.display());
}

#[cfg(test)]
mod tests;
