//! `--model` takes a path, the default model's name, or a Hugging Face name; all end as a path on disk.
//!
//! A mistyped path must not be asked of the hub: only what is exactly `owner/name` is, and only when no directory
//! `owner` is here.

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
    if pull::is_default(model) || is_name_at_hub(model) {
        return pull::pull(model);
    }
    bail!(
        "--model {model}: no such file or directory; give a .gguf file, a Hugging Face directory, or a name \
         (smollm2-135m, or owner/name of the Hugging Face hub)"
    );
}

fn is_name_at_hub(model: &str) -> bool {
    let owner = model.split('/').next().unwrap_or_default();
    pull::is_hub_name(model) && !model.ends_with(".gguf") && !Path::new(owner).is_dir()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_path_is_not_taken_for_a_name() {
        for missing in [
            "/nowhere/model.gguf",
            "./nowhere",
            "~/nowhere",
            "nowhere",
            "nowhere.gguf",
            "nowhere/model.gguf",
            "deep/in/nowhere",
            "nowhere/",
            // A folder of this crate, where its tests run.
            "src/nowhere",
        ] {
            let error = resolve(missing).expect_err("does not exist").to_string();
            assert!(
                error.contains(&format!("--model {missing}: no such file")),
                "{error}"
            );
        }
    }

    #[test]
    fn an_owner_and_a_name_are_asked_of_the_hub() {
        assert!(is_name_at_hub("owner-that-is-no-folder/SmolLM2-135M"));
        assert!(!is_name_at_hub("owner"));
    }
}
