//! Writes the files of a Hugging Face directory as transformers would.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use serde::Serialize;
use serde_json::json;

use super::tokenizer::{self, BOS_ID, CHAT_TEMPLATE, EOS_ID, SPECIAL_TOKENS, UNKNOWN_ID};
use super::{
    EXPERTS, LLAMA3_NUMBERS, LOCAL_ROPE_THETA, N_TOKENS, ORIGINAL_CONTEXT, RMS_NORM_EPS,
    ROPE_THETA, SCALING_FACTOR, TinyScaling, TinySpec, quantise, weights,
};
use crate::config::Family;
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

/// A tensor of a safetensors file: name, type, row-major shape, bytes.
type Written = (String, WeightType, Vec<u64>, Vec<u8>);

fn weights_bytes(spec: &TinySpec) -> Vec<u8> {
    let tensors: Vec<Written> = weights::tensors(spec)
        .into_iter()
        .map(|tensor| weights::for_hf(spec, tensor))
        .flat_map(|tensor| written(&tensor))
        .collect();
    safetensors_bytes(&tensors)
}

/// The experts of a layer are tensors of their own.
fn written(tensor: &weights::Tensor) -> Vec<Written> {
    let dtype = match tensor.dtype {
        float @ (WeightType::F16 | WeightType::BF16) => float,
        _ => WeightType::F32,
    };
    let shape: Vec<u64> = tensor.shape.iter().map(|dim| *dim as u64).collect();
    if shape.len() < 3 {
        let bytes = quantise(dtype, &tensor.values);
        return vec![(tensor.hf_name.clone(), dtype, shape, bytes)];
    }
    let of_one = tensor
        .values
        .chunks_exact(tensor.values.len() / tensor.shape[0]);
    let one = |(expert_idx, values): (usize, &[f32])| {
        let name = tensor.hf_name.replace("{}", &expert_idx.to_string());
        (name, dtype, shape[1..].to_vec(), quantise(dtype, values))
    };
    of_one.enumerate().map(one).collect()
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

fn config(spec: &TinySpec) -> serde_json::Value {
    let (model_type, architecture) = match spec.family {
        Family::Llama => ("llama", "LlamaForCausalLM"),
        Family::Mistral => ("mistral", "MistralForCausalLM"),
        Family::Mixtral => ("mixtral", "MixtralForCausalLM"),
        Family::Qwen2 => ("qwen2", "Qwen2ForCausalLM"),
        Family::Qwen3 => ("qwen3", "Qwen3ForCausalLM"),
        Family::Qwen3Moe => ("qwen3_moe", "Qwen3MoeForCausalLM"),
        Family::Gemma3 => ("gemma3_text", "Gemma3ForCausalLM"),
    };
    let mut config = json!({
        "architectures": [architecture],
        "attention_bias": false,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "head_dim": spec.head_dim,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "max_position_embeddings": spec.context_length,
        "model_type": model_type,
        "num_attention_heads": spec.n_heads,
        "num_hidden_layers": spec.n_layers,
        "num_key_value_heads": spec.n_kv_heads,
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_scaling": scaling(spec.scaling),
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": spec.tied_head,
        "torch_dtype": "float32",
        "vocab_size": N_TOKENS,
    });
    let [n_experts, n_used, inner] = EXPERTS;
    let additions = match spec.family {
        Family::Llama => json!({"hidden_act": "silu", "mlp_bias": false}),
        Family::Mistral => json!({"hidden_act": "silu", "sliding_window": spec.window}),
        Family::Mixtral => json!({
            "hidden_act": "silu",
            "num_experts_per_tok": n_used,
            "num_local_experts": n_experts,
            "sliding_window": spec.window,
        }),
        Family::Qwen2 | Family::Qwen3 => json!({
            "hidden_act": "silu",
            "max_window_layers": spec.n_layers,
            "sliding_window": null,
            "use_sliding_window": false,
        }),
        Family::Qwen3Moe => json!({
            "decoder_sparse_step": 1,
            "hidden_act": "silu",
            "mlp_only_layers": [],
            "moe_intermediate_size": inner,
            "norm_topk_prob": true,
            "num_experts": n_experts,
            "num_experts_per_tok": n_used,
            "use_sliding_window": false,
        }),
        Family::Gemma3 => json!({
            "attn_logit_softcapping": null,
            "final_logit_softcapping": null,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": spec.head_dim,
            "rope_local_base_freq": LOCAL_ROPE_THETA,
            "sliding_window": spec.window,
            "sliding_window_pattern": 6,
        }),
    };
    if let (Some(config), serde_json::Value::Object(additions)) =
        (config.as_object_mut(), additions)
    {
        config.extend(additions);
    }
    config
}

fn scaling(scaling: TinyScaling) -> serde_json::Value {
    let [factor, low, high] = LLAMA3_NUMBERS;
    match scaling {
        TinyScaling::None => serde_json::Value::Null,
        TinyScaling::Linear => json!({"rope_type": "linear", "factor": SCALING_FACTOR}),
        TinyScaling::Llama3 => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": ORIGINAL_CONTEXT,
        }),
        TinyScaling::Yarn => json!({
            "rope_type": "yarn",
            "factor": SCALING_FACTOR,
            "original_max_position_embeddings": ORIGINAL_CONTEXT,
        }),
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
