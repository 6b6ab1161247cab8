//! Writes the files of a Hugging Face directory as transformers would.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use serde::Serialize;

use super::tokenizer::{self, BOS_ID, CHAT_TEMPLATE, EOS_ID, SPECIAL_TOKENS, UNKNOWN_ID};
use super::{N_TOKENS, RMS_NORM_EPS, ROPE_THETA, TinySpec, quantise, weights};
use crate::tensors::WeightType;

pub(super) fn write(directory: &Path, spec: &TinySpec) -> io::Result<()> {
    std::fs::create_dir_all(directory)?;
    let weights = weights_bytes(spec);
    std::fs::write(directory.join("model.safetensors"), weights)?;
    write_json(directory, "config.json", &config(spec))?;
    write_json(directory, "tokenizer.json", &tokenizer_json())?;
    write_json(directory, "tokenizer_config.json", &tokenizer_config())?;
    let generation = GenerationConfig {
        bos_token_id: BOS_ID,
        eos_token_id: EOS_ID,
        pad_token_id: EOS_ID,
    };
    write_json(directory, "generation_config.json", &generation)
}

fn write_json(directory: &Path, name: &str, value: &impl Serialize) -> io::Result<()> {
    std::fs::write(directory.join(name), serde_json::to_vec_pretty(value)?)
}

fn weights_bytes(spec: &TinySpec) -> Vec<u8> {
    let tensors: Vec<(String, WeightType, Vec<u64>, Vec<u8>)> = weights::tensors(spec)
        .into_iter()
        .map(|tensor| {
            let dtype = match tensor.dtype {
                float @ (WeightType::F16 | WeightType::BF16) => float,
                _ => WeightType::F32,
            };
            let shape = tensor.shape.iter().map(|dim| *dim as u64).collect();
            (
                tensor.hf_name,
                dtype,
                shape,
                quantise(dtype, &tensor.values),
            )
        })
        .collect();
    safetensors_bytes(&tensors)
}

#[derive(Serialize)]
struct Description<'a> {
    dtype: String,
    shape: &'a [u64],
    data_offsets: [usize; 2],
}

/// The bytes of a safetensors file with these tensors: name, type, row-major shape, bytes.
pub fn safetensors_bytes(tensors: &[(String, WeightType, Vec<u64>, Vec<u8>)]) -> Vec<u8> {
    let mut descriptions = BTreeMap::new();
    let mut data: Vec<u8> = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let start = data.len();
        data.extend(bytes);
        let description = Description {
            dtype: format!("{dtype:?}"),
            shape,
            data_offsets: [start, data.len()],
        };
        descriptions.insert(name.as_str(), description);
    }
    let mut header = serde_json::to_vec(&descriptions).expect("strings and numbers are JSON");
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(data);
    file
}

#[derive(Serialize)]
struct Config {
    architectures: [&'static str; 1],
    attention_bias: bool,
    bos_token_id: u32,
    eos_token_id: u32,
    head_dim: u32,
    hidden_act: &'static str,
    hidden_size: u32,
    intermediate_size: u32,
    max_position_embeddings: u32,
    mlp_bias: bool,
    model_type: &'static str,
    num_attention_heads: u32,
    num_hidden_layers: u32,
    num_key_value_heads: u32,
    rms_norm_eps: f32,
    rope_scaling: Option<()>,
    rope_theta: f32,
    tie_word_embeddings: bool,
    torch_dtype: &'static str,
    vocab_size: usize,
}

fn config(spec: &TinySpec) -> Config {
    Config {
        architectures: ["LlamaForCausalLM"],
        attention_bias: false,
        bos_token_id: BOS_ID,
        eos_token_id: EOS_ID,
        head_dim: spec.head_dim,
        hidden_act: "silu",
        hidden_size: spec.hidden_size,
        intermediate_size: spec.intermediate_size,
        max_position_embeddings: spec.context_length,
        mlp_bias: false,
        model_type: "llama",
        num_attention_heads: spec.n_heads,
        num_hidden_layers: spec.n_layers,
        num_key_value_heads: spec.n_kv_heads,
        rms_norm_eps: RMS_NORM_EPS,
        rope_scaling: None,
        rope_theta: ROPE_THETA,
        tie_word_embeddings: spec.tied_head,
        torch_dtype: "float32",
        vocab_size: N_TOKENS,
    }
}

#[derive(Serialize)]
struct GenerationConfig {
    bos_token_id: u32,
    eos_token_id: u32,
    pad_token_id: u32,
}

#[derive(Serialize)]
struct TokenizerConfig {
    add_prefix_space: bool,
    bos_token: &'static str,
    chat_template: &'static str,
    clean_up_tokenization_spaces: bool,
    eos_token: &'static str,
    pad_token: &'static str,
    tokenizer_class: &'static str,
    unk_token: &'static str,
}

fn tokenizer_config() -> TokenizerConfig {
    TokenizerConfig {
        add_prefix_space: false,
        bos_token: SPECIAL_TOKENS[BOS_ID as usize],
        chat_template: CHAT_TEMPLATE,
        clean_up_tokenization_spaces: false,
        eos_token: SPECIAL_TOKENS[EOS_ID as usize],
        pad_token: SPECIAL_TOKENS[EOS_ID as usize],
        tokenizer_class: "GPT2Tokenizer",
        unk_token: SPECIAL_TOKENS[UNKNOWN_ID as usize],
    }
}

/// `tokenizer.json` of the tokenizers library.
#[derive(Serialize)]
struct TokenizerJson {
    version: &'static str,
    truncation: Option<()>,
    padding: Option<()>,
    added_tokens: Vec<AddedToken>,
    normalizer: Option<()>,
    pre_tokenizer: Sequence,
    post_processor: Option<()>,
    decoder: ByteLevel,
    model: Bpe,
}

#[derive(Serialize)]
struct AddedToken {
    id: usize,
    content: &'static str,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
    special: bool,
}

#[derive(Serialize)]
struct Sequence {
    r#type: &'static str,
    pretokenizers: (Digits, ByteLevel),
}

#[derive(Serialize)]
struct Digits {
    r#type: &'static str,
    individual_digits: bool,
}

#[derive(Serialize)]
struct ByteLevel {
    r#type: &'static str,
    add_prefix_space: bool,
    trim_offsets: bool,
    use_regex: bool,
}

#[derive(Serialize)]
struct Bpe {
    r#type: &'static str,
    dropout: Option<f32>,
    unk_token: Option<&'static str>,
    continuing_subword_prefix: Option<&'static str>,
    end_of_word_suffix: Option<&'static str>,
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    vocab: BTreeMap<String, usize>,
    merges: Vec<String>,
}

fn tokenizer_json() -> TokenizerJson {
    let byte_level = || ByteLevel {
        r#type: "ByteLevel",
        add_prefix_space: false,
        trim_offsets: true,
        use_regex: true,
    };
    let added = |(id, content): (usize, &&'static str)| AddedToken {
        id,
        content,
        single_word: false,
        lstrip: false,
        rstrip: false,
        normalized: false,
        special: true,
    };
    let ids = tokenizer::tokens().into_iter().enumerate();
    TokenizerJson {
        version: "1.0",
        truncation: None,
        padding: None,
        added_tokens: SPECIAL_TOKENS.iter().enumerate().map(added).collect(),
        normalizer: None,
        pre_tokenizer: Sequence {
            r#type: "Sequence",
            pretokenizers: (
                Digits {
                    r#type: "Digits",
                    individual_digits: true,
                },
                byte_level(),
            ),
        },
        post_processor: None,
        decoder: byte_level(),
        model: Bpe {
            r#type: "BPE",
            dropout: None,
            unk_token: None,
            continuing_subword_prefix: None,
            end_of_word_suffix: None,
            fuse_unk: false,
            byte_fallback: false,
            ignore_merges: false,
            vocab: ids.map(|(id, token)| (token, id)).collect(),
            merges: tokenizer::merges(),
        },
    }
}
