//! What Qwen 3 adds to Llama: a norm over each head of q and of k, before rope. Gemma 3 has the same.
//!
//! Source: "Qwen3 Technical Report", <https://arxiv.org/abs/2505.09388>.

use super::llama::norm;
use super::{Model, ModelError};
use tidemill_kernels::cpu::{Team, norm_heads};
use tidemill_model_files::{LayerTensor, ModelFiles, TensorName};

/// The weights of both norms, `[head_dim]` each, the same for all heads.
pub(crate) struct HeadNorms {
    q: Vec<f32>,
    k: Vec<f32>,
}

impl HeadNorms {
    pub(super) fn load(files: &ModelFiles, layer_idx: u32) -> Result<Self, ModelError> {
        let norm = |tensor| norm(files, TensorName::Layer(layer_idx, tensor));
        Ok(Self {
            q: norm(LayerTensor::QNorm)?,
            k: norm(LayerTensor::KNorm)?,
        })
    }
}

impl Model {
    /// `qkv` is `[rows, q | k | v]`, a row having `n_columns`.
    pub(super) fn norm_q_and_k(
        &self,
        team: &mut Team,
        norms: &HeadNorms,
        (qkv, n_columns): (&mut [f32], usize),
    ) {
        let (n_q, n_k) = (self.shape.n_heads, self.shape.n_kv_heads);
        for (heads, weight) in [(0..n_q, &norms.q), (n_q..n_q + n_k, &norms.k)] {
            let weight = (&weight[..], self.rms_norm_eps);
            norm_heads(self.isa, team, (&mut *qkv, n_columns), heads, weight);
        }
    }
}
