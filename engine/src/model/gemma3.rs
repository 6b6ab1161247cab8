//! What Gemma 3 adds: norms of what attention and feed-forward give, and an embedding that is scaled.
//!
//! Its head norms are those of `qwen3`; its windowed layers and their rope are data of the config; its gate is GELU; weights
//! of norms that a file stores less 1 get it back when they are read (see `llama`).
//! Source: "Gemma 3 Technical Report", <https://arxiv.org/abs/2503.19786>.

use super::forward::Workspace;
use super::llama::norm;
use super::{Model, ModelError};
use tidemill_kernels::cpu::{Team, add_rows, rms_norm};
use tidemill_model_files::{Family, LayerTensor, ModelConfig, ModelFiles, TensorName};

/// The weights of both norms, `[hidden]` each.
pub(crate) struct PostNorms {
    pub(super) attn: Vec<f32>,
    pub(super) ffn: Vec<f32>,
}

impl PostNorms {
    pub(super) fn load(files: &ModelFiles, layer_idx: u32) -> Result<Self, ModelError> {
        let norm = |tensor| norm(files, TensorName::Layer(layer_idx, tensor));
        Ok(Self {
            attn: norm(LayerTensor::PostAttnNorm)?,
            ffn: norm(LayerTensor::PostFfnNorm)?,
        })
    }
}

/// What embedded tokens are multiplied with, if anything.
pub(super) fn embedding_scale(config: &ModelConfig) -> Option<f32> {
    (config.family == Family::Gemma3).then(|| (config.hidden_size as f32).sqrt())
}

impl Model {
    /// Adds the branch of a layer, normalised, to the residual stream.
    pub(super) fn add_branch_normed(&self, team: &mut Team, work: &mut Workspace, weight: &[f32]) {
        let norm = (weight, self.rms_norm_eps);
        rms_norm(self.isa, team, &work.branch, norm, &mut work.branch_normed);
        add_rows(
            self.isa,
            team,
            &mut work.hidden,
            work.branch_normed.values(),
        );
    }
}
