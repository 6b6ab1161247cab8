//! The models: tiny random ones, made on the spot, and the default model, fetched before the tests run.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use tidemill_engine::model::Model;
use tidemill_kernels::cpu::Isa;
use tidemill_model_files::testing::{TinySpec, write_gguf};
use tidemill_model_files::{ModelFiles, WeightType};

const DEFAULT_MODEL: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// A tiny model's files; they vanish with it.
pub(crate) struct Tiny {
    path: PathBuf,
    pub(crate) files: ModelFiles,
}

impl Tiny {
    /// `label` tells apart tests that run at the same time.
    pub(crate) fn new(label: &str, weight_type: WeightType) -> Self {
        let spec = TinySpec::new(7, weight_type);
        let name = format!("tidemill-promise-{}-{label}.gguf", std::process::id());
        let path = std::env::temp_dir().join(name);
        write_gguf(&path, &spec).expect("the temporary directory is writable");
        let files = tidemill_model_files::open(&path).expect("a model of ours opens");
        Self { path, files }
    }

    pub(crate) fn load(&self, isa: Isa) -> Arc<Model> {
        load(&self.files, isa)
    }
}

impl Drop for Tiny {
    fn drop(&mut self) {
        // A file left behind is no reason to fail.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Packs a model for one instruction set.
pub(crate) fn load(files: &ModelFiles, isa: Isa) -> Arc<Model> {
    Arc::new(Model::load(files, isa).expect("the model is supported"))
}

/// The default model's file.
pub(crate) fn open_default() -> ModelFiles {
    let cache = std::env::var_os("TIDEMILL_CACHE").map_or_else(
        || {
            let home = std::env::var_os("HOME").expect("HOME is set");
            Path::new(&home).join(".cache/tidemill")
        },
        PathBuf::from,
    );
    let path = cache.join("models").join(DEFAULT_MODEL);
    assert!(
        path.exists(),
        "{} is missing: run `make test`, it fetches the model first",
        path.display()
    );
    tidemill_model_files::open(path).expect("the default model opens")
}
