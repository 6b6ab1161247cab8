//! A Hugging Face model directory: `config.json` beside one `model.safetensors`.
//!
//! What is in the directory decides what is read, and nothing is guessed: a shard index or pickled weights are
//! refused by name rather than half understood. Tensor names are those of `LlamaForCausalLM`.

mod config;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::config::ModelConfig;
use crate::error::{LoadError, Refusal};
use crate::mapping::Mapping;
use crate::safetensors;
use crate::tensors::{Found, LayerTensor, TensorName, Tensors};

const CONFIG_FILE: &str = "config.json";
const WEIGHTS_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";
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
    let weights_file = find_weights(directory)?;
    let mapping = Arc::new(Mapping::open(&weights_file)?);
    let found =
        read_tensors(&config, mapping.bytes()).map_err(|refusal| refusal.in_file(&weights_file))?;
    let tensors = Tensors::new(weights_file, mapping, &config, found)?;
    Ok((config, tensors))
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
    let index = directory.join(INDEX_FILE);
    if index.exists() {
        return Err(Refusal::new(
            "weight_map",
            format!(
                "weights in several files are not supported yet; \
                 merge them into one {WEIGHTS_FILE} and remove this index"
            ),
        )
        .in_file(&index));
    }
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

fn read_tensors(config: &ModelConfig, file: &[u8]) -> Result<Vec<Found>, Refusal> {
    let mut entries = safetensors::parse(file)?;
    if config.tied_head {
        drop_equal_head(&mut entries, file)?;
    }
    Ok(entries
        .into_iter()
        .map(|entry| Found {
            name: tensor_name(&entry.name),
            spelling: entry.name,
            dtype: entry.dtype,
            shape: entry.shape,
            range: entry.range,
        })
        .collect())
}

/// Some writers store a tied head all the same. It is dropped when it equals the embedding and refused otherwise,
/// for then the config and the weights contradict each other.
fn drop_equal_head(
    entries: &mut Vec<safetensors::TensorEntry>,
    file: &[u8],
) -> Result<(), Refusal> {
    let place = |name: &str| entries.iter().position(|entry| entry.name == name);
    let (Some(head), Some(embedding)) = (place(LM_HEAD), place(EMBEDDING)) else {
        return Ok(());
    };
    let bytes = |idx: usize| &file[entries[idx].range.clone()];
    if entries[head].dtype != entries[embedding].dtype || bytes(head) != bytes(embedding) {
        return Err(Refusal::new(
            LM_HEAD,
            format!("differs from {EMBEDDING}, but tie_word_embeddings is true in {CONFIG_FILE}"),
        ));
    }
    entries.remove(head);
    Ok(())
}

fn tensor_name(spelling: &str) -> Option<TensorName> {
    match spelling {
        EMBEDDING => return Some(TensorName::TokenEmbedding),
        "model.norm.weight" => return Some(TensorName::OutputNorm),
        LM_HEAD => return Some(TensorName::OutputHead),
        _ => {}
    }
    let (layer_idx, rest) = spelling.strip_prefix("model.layers.")?.split_once('.')?;
    let tensor = match rest {
        "input_layernorm.weight" => LayerTensor::AttnNorm,
        "self_attn.q_proj.weight" => LayerTensor::Q,
        "self_attn.k_proj.weight" => LayerTensor::K,
        "self_attn.v_proj.weight" => LayerTensor::V,
        "self_attn.o_proj.weight" => LayerTensor::O,
        "post_attention_layernorm.weight" => LayerTensor::FfnNorm,
        "mlp.gate_proj.weight" => LayerTensor::Gate,
        "mlp.up_proj.weight" => LayerTensor::Up,
        "mlp.down_proj.weight" => LayerTensor::Down,
        _ => return None,
    };
    Some(TensorName::Layer(
        crate::tensors::layer_idx(layer_idx)?,
        tensor,
    ))
}

#[cfg(test)]
mod tests;
