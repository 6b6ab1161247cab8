//! The models that whole-system tests serve: a tiny one made in a moment, a slower one whose work can be interrupted,
//! and the real default model from the cache.

use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use tidemill_model_files::testing::{TinySpec, write_gguf};

/// The file name of the default model.
const REAL_NAME: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// A folder that is removed with its owner.
pub struct Scratch(PathBuf);

impl Scratch {
    /// A fresh folder.
    ///
    /// # Errors
    /// When the temporary folder is not writable.
    pub fn new() -> Result<Self> {
        static N_MADE: AtomicU64 = AtomicU64::new(0);
        let n_made = N_MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("tidemill-system-{}-{n_made}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
        Ok(Self(path))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What stays behind lies in the temporary folder.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A model file, and the folder that goes with it when it was made for a test.
pub struct ModelFile {
    path: PathBuf,
    _scratch: Option<Scratch>,
}

impl ModelFile {
    fn made(spec: &TinySpec) -> Result<Self> {
        let scratch = Scratch::new()?;
        let path = scratch.path().join("tiny.gguf");
        write_gguf(&path, spec)?;
        Ok(Self {
            path,
            _scratch: Some(scratch),
        })
    }

    /// A model whose tokens take no time.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn tiny() -> Result<Self> {
        Self::made(&TinySpec {
            context_length: 2048,
            ..TinySpec::default()
        })
    }

    /// A model whose tokens take milliseconds, so that a test can come between them.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn slow() -> Result<Self> {
        Self::made(&TinySpec {
            seed: 7,
            n_layers: 8,
            hidden_size: 256,
            intermediate_size: 512,
            n_heads: 8,
            n_kv_heads: 4,
            head_dim: 32,
            context_length: 4096,
            ..TinySpec::default()
        })
    }

    /// The default model, which `make test` fetches.
    ///
    /// # Errors
    /// When it has not been fetched.
    pub fn real() -> Result<Self> {
        let under = |name: &str, rest: &str| {
            std::env::var_os(name).map(|folder| PathBuf::from(folder).join(rest))
        };
        let cache = under("TIDEMILL_CACHE", "")
            .or_else(|| under("XDG_CACHE_HOME", "tidemill"))
            .or_else(|| under("HOME", ".cache/tidemill"))
            .context("neither TIDEMILL_CACHE nor HOME is set")?;
        let path = cache.join("models").join(REAL_NAME);
        ensure!(
            path.is_file(),
            "{} is missing; run `make test`, which fetches it first",
            path.display()
        );
        Ok(Self {
            path,
            _scratch: None,
        })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// As an argument.
    ///
    /// # Errors
    /// When the path is no UTF-8.
    pub fn argument(&self) -> Result<String> {
        let text = self.path.to_str().context("the path is no UTF-8")?;
        Ok(text.to_owned())
    }
}
