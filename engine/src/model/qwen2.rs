//! What Qwen 2 and 2.5 add to Llama: biases of q, k and v.
//!
//! Source: Yang et al., "Qwen2 Technical Report", <https://arxiv.org/abs/2407.10671>.

use super::ModelError;
use super::llama::vector;
use tidemill_model_files::{LayerTensor, ModelFiles, TensorName};

/// `[q | k | v]`, as the products lie side by side.
pub(super) fn qkv_bias(files: &ModelFiles, layer_idx: u32) -> Result<Vec<f32>, ModelError> {
    let mut bias = Vec::new();
    for tensor in [LayerTensor::QBias, LayerTensor::KBias, LayerTensor::VBias] {
        bias.extend(vector(files, TensorName::Layer(layer_idx, tensor))?);
    }
    Ok(bias)
}
