//! Model files, read without trusting them: GGUF and Hugging Face directories to config, tensors and text.
//!
//! [`open`] gives a node the shape and the mapped weights of a model. This crate knows no device, no network
//! and no request. Whatever it does not know exactly it refuses, naming the file, the field and the value: a
//! model that loads but computes something else is the worst answer. See `gguf` and `safetensors` for the
//! containers, `config` and `tensors` for what comes out.
#![deny(unsafe_code)]

pub mod config;
mod dequantise;
pub mod error;
mod fingerprint;
pub mod gguf;
mod hf;
mod json;
#[allow(unsafe_code)] // One mmap call, see there.
mod mapping;
mod open;
pub mod safetensors;
pub mod tensors;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod text;

pub use config::{
    Experts, Family, ModelConfig, NormWeights, Rope, RopeScaling, RopeStyle, Window, Yarn,
};
pub use error::{LoadError, Refusal};
pub use open::{ModelFiles, open};
pub use tensors::{ExpertTensor, LayerTensor, TensorName, TensorView, Tensors, WeightType};
pub use text::{ModelText, open_text};
