//! From a path to a model: the one place that decides which container it is.

use std::path::{Path, PathBuf};

use crate::config::ModelConfig;
use crate::error::{LoadError, Refusal};
use crate::mapping::Mapping;
use crate::tensors::{Tensors, WeightFiles};
use crate::{fingerprint, gguf, hf};

/// A model that is ready to be computed with. The weights are mapped, not copied.
#[derive(Debug, Clone)]
pub struct ModelFiles {
    /// Shape of the model.
    pub config: ModelConfig,
    /// Its weights.
    pub tensors: Tensors,
    /// Identity of config and weights: equal exactly when both are equal, wherever the files lie. Part of every
    /// block hash and KV layout, so that KV of different weights never meets.
    pub fingerprint: [u8; 32],
    /// The file or directory that was opened.
    pub path: PathBuf,
}

/// Opens a model: a GGUF file, or a directory with `config.json` and safetensors. Reads every weight once
/// for the fingerprint.
///
/// # Errors
/// [`LoadError`] when a file cannot be read, is malformed, or describes something that is not supported.
pub fn open(path: impl AsRef<Path>) -> Result<ModelFiles, LoadError> {
    let path = path.as_ref();
    let facts = std::fs::metadata(path).map_err(|source| LoadError::io(path, source))?;
    let (config, tensors) = if facts.is_dir() {
        hf::open(path)?
    } else {
        open_gguf(path)?
    };
    Ok(ModelFiles {
        fingerprint: fingerprint::fingerprint(&config, &tensors),
        config,
        tensors,
        path: path.to_path_buf(),
    })
}

/// Names what a file that is no GGUF file is, and what to do instead.
pub(crate) fn refuse_other_files(file: &Path) -> Result<(), LoadError> {
    hf::refuse_pickle(file)?;
    if file
        .extension()
        .is_some_and(|ending| ending == "safetensors")
    {
        return Err(Refusal::new(
            "format",
            "name the directory that holds this file and its config.json",
        )
        .in_file(file));
    }
    Ok(())
}

fn open_gguf(file: &Path) -> Result<(ModelConfig, Tensors), LoadError> {
    refuse_other_files(file)?;
    let mapping = Mapping::open(file)?;
    let (mut config, found) = gguf::parse(mapping.bytes())
        .and_then(|gguf| {
            let config = gguf::model::config(&gguf)?;
            let found = gguf::model::tensors(&gguf, &config);
            Ok((config, found))
        })
        .map_err(|refusal| refusal.in_file(file))?;
    if config.name.is_empty() {
        config.name = file
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
    }
    let files = WeightFiles {
        label: file.to_path_buf(),
        mappings: vec![mapping],
    };
    let tensors = Tensors::new(files, &config, found)?;
    Ok((config, tensors))
}

#[cfg(test)]
mod tests;
