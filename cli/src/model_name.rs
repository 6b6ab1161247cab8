//! `--model` takes a path, the default model's name, or a Hugging Face name; all end as a path on disk.

use crate::pull;
use anyhow::{Result, bail};
use std::path::{Path, PathBuf};

/// The path behind what the user gave. A name that is not in the cache yet is pulled.
///
/// # Errors
/// When it is neither a path nor a known name, or cannot be fetched; the text says what to do.
pub(crate) fn resolve(model: &str) -> Result<PathBuf> {
    let path = Path::new(model);
    if path.exists() {
        return Ok(path.to_owned());
    }
    if looks_like_path(model) {
        bail!(
            "--model {model}: no such file or directory; give a .gguf file, a Hugging Face directory or a name"
        );
    }
    pull::pull(model)
}

fn looks_like_path(model: &str) -> bool {
    model.starts_with(['/', '.', '~']) || model.ends_with(".gguf")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_path_is_not_taken_for_a_name() {
        for missing in ["/nowhere/model.gguf", "./nowhere", "nowhere.gguf"] {
            let error = resolve(missing).expect_err("does not exist");
            assert!(error.to_string().contains(missing), "{error}");
        }
    }
}
