//! Tiny models with random weights, for the tests of every crate.
//!
//! One [`TinySpec`] gives the same model as a GGUF file and as a Hugging Face directory: the same numbers, changed in the
//! GGUF file as its converters do it (rows of q and k permuted, norms with their 1, experts in one tensor). So a test can hold one container against the
//! other, and every test has a real model of some 300 KB with a real tokenizer, made in a millisecond. The bytes
//! depend on the spec alone, on every platform.

mod gguf_model;
mod gguf_writer;
mod hf_writer;
mod quantise;
mod quantise_super;
mod tokenizer;
mod weights;

use std::io;
use std::path::Path;

use crate::config::Family;
use crate::tensors::WeightType;

pub use gguf_model::gguf_bytes;
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
    /// Width of the residual stream; whole blocks of the weight type.
    pub hidden_size: u32,
    /// Width of the feed-forward block; whole blocks of the weight type.
    pub intermediate_size: u32,
    /// Query heads; `n_heads * head_dim` is whole blocks of the weight type.
    pub n_heads: u32,
    /// Key and value heads; divides `n_heads`.
    pub n_kv_heads: u32,
    /// Elements of one head; even.
    pub head_dim: u32,
    /// Longest context.
    pub context_length: u32,
    /// True when the output head is the embedding.
    pub tied_head: bool,
    /// The architecture. [`TinySpec::of`] sets what belongs to it.
    pub family: Family,
    /// How rope is scaled.
    pub scaling: TinyScaling,
    /// Positions that rows of windowed layers see. Of Gemma 3, every sixth layer sees everything.
    pub window: Option<u32>,
}

/// A scaling of rope, with the numbers below as its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TinyScaling {
    /// None.
    None,
    /// Linear, factor 4.
    Linear,
    /// The rule of Llama 3; as GGUF a tensor of divisors.
    Llama3,
    /// YaRN, factor 4.
    Yarn,
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
            family: Family::Llama,
            scaling: TinyScaling::None,
            window: None,
        }
    }
}

impl TinySpec {
    /// The default shape with these weights; a wider one for types with blocks of 256.
    pub fn new(seed: u64, weight_type: WeightType) -> Self {
        let spec = Self {
            seed,
            weight_type,
            ..Self::default()
        };
        match weight_type.block_elements() {
            256 => Self {
                hidden_size: 256,
                intermediate_size: 256,
                n_heads: 8,
                head_dim: 32,
                ..spec
            },
            _ => spec,
        }
    }

    /// A small model of a family, with all that the family has: windows short enough to matter, heads wider than the
    /// hidden size shared out, and for Gemma 3 layers of both kinds.
    pub fn of(family: Family, seed: u64, weight_type: WeightType) -> Self {
        let spec = Self {
            family,
            ..Self::new(seed, weight_type)
        };
        match family {
            Family::Llama | Family::Mixtral | Family::Qwen2 => spec,
            Family::Mistral => Self {
                window: Some(20),
                ..spec
            },
            Family::Qwen3 | Family::Qwen3Moe => Self {
                head_dim: 32,
                ..spec
            },
            Family::Gemma3 => Self {
                head_dim: 32,
                n_layers: 7,
                window: Some(20),
                ..spec
            },
        }
    }
}

/// Epsilon of every tiny model.
pub(crate) const RMS_NORM_EPS: f32 = 1e-5;
/// Rope base of every tiny model.
pub(crate) const ROPE_THETA: f32 = 10_000.0;

/// Rope base of Gemma's windowed layers.
pub(crate) const LOCAL_ROPE_THETA: f32 = 1_000.0;
/// Positions that a model with scaled rope was first trained with.
pub(crate) const ORIGINAL_CONTEXT: u32 = 64;
/// Factor of linear scaling and of YaRN.
pub(crate) const SCALING_FACTOR: f32 = 4.0;
/// The three numbers of Llama 3's rule: factor, low and high.
pub(crate) const LLAMA3_NUMBERS: [f32; 3] = [8.0, 1.0, 4.0];
/// Experts of each layer, those used, and the width of one of Qwen 3 MoE; Mixtral's are as wide as its feed-forward block.
pub(crate) const EXPERTS: [u32; 3] = [8, 2, 32];

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
