//! A Hugging Face model directory: `config.json` beside `model.safetensors`, or beside shards and their index.
//!
//! What is in the directory decides what is read, and nothing is guessed: pickled weights are refused by name, and so
//! is an index that does not describe its shards exactly. Tensor names are those of transformers' `ForCausalLM` classes.

mod config;
mod dialect;
mod rope;
mod shards;

use std::fs;
use std::path::{Path, PathBuf};

use crate::config::{Family, ModelConfig};
use crate::error::{LoadError, Refusal};
use crate::mapping::Mapping;
use crate::safetensors::{self, TensorEntry};
use crate::tensors::{ExpertTensor, Found, LayerTensor, TensorName, Tensors, WeightFiles};

pub(crate) use config::context_length;

const CONFIG_FILE: &str = "config.json";
const WEIGHTS_FILE: &str = "model.safetensors";
const CONFIG_BYTES_MAX: u64 = 1 << 20;
const LM_HEAD: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";

/// Endings of pickled weights: loading one runs whatever code is in it.
const PICKLE_ENDINGS: [&str; 5] = ["bin", "pt", "pth", "ckpt", "pkl"];

/// Refuses a file that is a pickle by its name.
pub(crate) fn refuse_pickle(file: &Path) -> Result<(), LoadError> {
    let ending = file
        .extension()
        .and_then(|ending| ending.to_str())
        .unwrap_or_default();
    if PICKLE_ENDINGS.contains(&ending.to_ascii_lowercase().as_str()) {
        return Err(Refusal::new(
            "format",
            format!(
                "a .{ending} file may be a pickle, which can run code when it is loaded; \
                 use safetensors or GGUF"
            ),
        )
        .in_file(file));
    }
    Ok(())
}

/// Reads config and weights of a directory.
pub(crate) fn open(directory: &Path) -> Result<(ModelConfig, Tensors), LoadError> {
    let config_file = directory.join(CONFIG_FILE);
    let text = read_bounded(&config_file, CONFIG_BYTES_MAX)?;
    let mut config = config::parse(&text).map_err(|refusal| refusal.in_file(&config_file))?;
    config.name = label(directory);
    let index = directory.join(shards::INDEX_FILE);
    let (files, mut entries) = if index.exists() {
        shards::open(directory, &index)?
    } else {
        open_single(find_weights(directory)?)?
    };
    if config.tied_head {
        drop_equal_head(&mut entries, &files.mappings)
            .map_err(|refusal| refusal.in_file(&files.label))?;
    }
    let found = entries.into_iter().map(|(file_idx, entry)| Found {
        name: tensor_name(&entry.name, config.family),
        spelling: entry.name,
        dtype: entry.dtype,
        shape: entry.shape,
        file_idx,
        range: entry.range,
    });
    let found = found.collect();
    let tensors = Tensors::new(files, &config, found)?;
    Ok((config, tensors))
}

/// A tensor and the index of its file.
type Entry = (usize, TensorEntry);

fn open_single(file: PathBuf) -> Result<(WeightFiles, Vec<Entry>), LoadError> {
    let mapping = Mapping::open(&file)?;
    let entries = safetensors::parse(mapping.bytes());
    let entries = entries.map_err(|refusal| refusal.in_file(&file))?;
    let files = WeightFiles {
        label: file,
        mappings: vec![mapping],
    };
    Ok((files, entries.into_iter().map(|entry| (0, entry)).collect()))
}

fn label(directory: &Path) -> String {
    let name = directory.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// The whole of a small file. Its size is looked at first.
pub(crate) fn read_bounded(file: &Path, bytes_max: u64) -> Result<Vec<u8>, LoadError> {
    let facts = fs::metadata(file).map_err(|source| LoadError::io(file, source))?;
    if !facts.is_file() || facts.len() > bytes_max {
        return Err(Refusal::new(
            "file",
            format!(
                "{} bytes, expected a regular file of at most {bytes_max}",
                facts.len()
            ),
        )
        .in_file(file));
    }
    fs::read(file).map_err(|source| LoadError::io(file, source))
}

fn find_weights(directory: &Path) -> Result<PathBuf, LoadError> {
    let weights = directory.join(WEIGHTS_FILE);
    if weights.exists() {
        return Ok(weights);
    }
    let mut others = Vec::new();
    let entries = fs::read_dir(directory).map_err(|source| LoadError::io(directory, source))?;
    for entry in entries {
        others.push(
            entry
                .map_err(|source| LoadError::io(directory, source))?
                .path(),
        );
    }
    others.sort();
    for other in &others {
        refuse_pickle(other)?;
    }
    Err(Refusal::new(WEIGHTS_FILE, "this file is missing").in_file(directory))
}

/// Some writers store a tied head all the same. It is dropped when it equals the embedding and refused otherwise,
/// for then the config and the weights contradict each other.
fn drop_equal_head(entries: &mut Vec<Entry>, mappings: &[Mapping]) -> Result<(), Refusal> {
    let place = |name: &str| entries.iter().position(|(_, entry)| entry.name == name);
    let (Some(head), Some(embedding)) = (place(LM_HEAD), place(EMBEDDING)) else {
        return Ok(());
    };
    let facts = |idx: usize| {
        let (file_idx, entry) = &entries[idx];
        let bytes = &mappings[*file_idx].bytes()[entry.range.clone()];
        (entry.dtype, bytes)
    };
    if facts(head) != facts(embedding) {
        return Err(Refusal::new(
            LM_HEAD,
            format!("differs from {EMBEDDING}, but tie_word_embeddings is true in {CONFIG_FILE}"),
        ));
    }
    entries.remove(head);
    Ok(())
}

fn tensor_name(spelling: &str, family: Family) -> Option<TensorName> {
    match spelling {
        EMBEDDING => return Some(TensorName::TokenEmbedding),
        "model.norm.weight" => return Some(TensorName::OutputNorm),
        LM_HEAD => return Some(TensorName::OutputHead),
        _ => {}
    }
    let (layer_idx, rest) = spelling.strip_prefix("model.layers.")?.split_once('.')?;
    let layer_idx = crate::tensors::layer_idx(layer_idx)?;
    let experts = match family {
        Family::Mixtral => "block_sparse_moe.experts.",
        _ => "mlp.experts.",
    };
    if let Some(expert) = rest.strip_prefix(experts) {
        return expert_name(layer_idx, expert, family);
    }
    Some(TensorName::Layer(layer_idx, layer_tensor(rest, family)?))
}

fn layer_tensor(spelling: &str, family: Family) -> Option<LayerTensor> {
    Some(match spelling {
        "input_layernorm.weight" => LayerTensor::AttnNorm,
        "self_attn.q_proj.weight" => LayerTensor::Q,
        "self_attn.k_proj.weight" => LayerTensor::K,
        "self_attn.v_proj.weight" => LayerTensor::V,
        "self_attn.o_proj.weight" => LayerTensor::O,
        // What is called "post" here is in front of feed-forward where there are no other norms.
        "post_attention_layernorm.weight" if family.has_post_norms() => LayerTensor::PostAttnNorm,
        "post_attention_layernorm.weight" => LayerTensor::FfnNorm,
        "pre_feedforward_layernorm.weight" if family.has_post_norms() => LayerTensor::FfnNorm,
        "post_feedforward_layernorm.weight" => LayerTensor::PostFfnNorm,
        "mlp.gate_proj.weight" => LayerTensor::Gate,
        "mlp.up_proj.weight" => LayerTensor::Up,
        "mlp.down_proj.weight" => LayerTensor::Down,
        "mlp.gate.weight" => LayerTensor::Router,
        "block_sparse_moe.gate.weight" => LayerTensor::Router,
        "self_attn.q_proj.bias" => LayerTensor::QBias,
        "self_attn.k_proj.bias" => LayerTensor::KBias,
        "self_attn.v_proj.bias" => LayerTensor::VBias,
        "self_attn.q_norm.weight" => LayerTensor::QNorm,
        "self_attn.k_norm.weight" => LayerTensor::KNorm,
        _ => return None,
    })
}

fn expert_name(layer_idx: u32, spelling: &str, family: Family) -> Option<TensorName> {
    let (expert_idx, rest) = spelling.split_once('.')?;
    let tensor = match (rest, family) {
        ("w1.weight", Family::Mixtral) => ExpertTensor::Gate,
        ("w3.weight", Family::Mixtral) => ExpertTensor::Up,
        ("w2.weight", Family::Mixtral) => ExpertTensor::Down,
        (_, Family::Mixtral) => return None,
        ("gate_proj.weight", _) => ExpertTensor::Gate,
        ("up_proj.weight", _) => ExpertTensor::Up,
        ("down_proj.weight", _) => ExpertTensor::Down,
        _ => return None,
    };
    let expert_idx = crate::tensors::layer_idx(expert_idx)?;
    Some(TensorName::Expert(layer_idx, expert_idx, tensor))
}

#[cfg(test)]
mod tests;
