//! A mixture of experts in place of the feed-forward block: Qwen 3 MoE, and Mixtral.
//!
//! Rows are gathered by expert, so that each expert's weights are read once however many rows it has; a row's answers are
//! added in the order of the experts' indices, whatever its neighbours chose.
//! Source: "Qwen3 Technical Report", <https://arxiv.org/abs/2505.09388>; Jiang et al., <https://arxiv.org/abs/2401.04088>.

use super::forward::Workspace;
use super::llama::{Gated, pack};
use super::{Model, ModelError};
use tidemill_kernels::cpu::{Activations, Output, PackedMatrix, Team, add_shares, matmul, route};
use tidemill_model_files::{ExpertTensor, Experts, LayerTensor, ModelFiles, TensorName};

/// The experts of one layer.
pub(crate) struct Mixture {
    /// `[n_experts, hidden]`
    pub(super) router: PackedMatrix,
    pub(super) experts: Vec<Gated>,
    n_used: usize,
    normalise: bool,
}

/// Memory that a mixture works in.
#[derive(Debug)]
pub(super) struct ExpertRows {
    /// `[rows, n_experts]`
    scores: Vec<f32>,
    /// Rows of one expert, `[its rows, hidden]`.
    gathered: Activations,
    /// What it gives for them, `[its rows, hidden]`.
    answers: Vec<f32>,
}

impl ExpertRows {
    /// `int8` says that experts read quantised rows.
    pub(super) fn new(int8: bool) -> Self {
        Self {
            scores: Vec::new(),
            gathered: Activations::new(int8),
            answers: Vec::new(),
        }
    }
}

impl Mixture {
    pub(super) fn load(
        files: &ModelFiles,
        layer_idx: u32,
        experts: &Experts,
    ) -> Result<Self, ModelError> {
        let expert = |expert_idx| {
            Gated::load(files, |part| {
                let parts = [ExpertTensor::Gate, ExpertTensor::Up, ExpertTensor::Down];
                TensorName::Expert(layer_idx, expert_idx, parts[part])
            })
        };
        Ok(Self {
            router: pack(files, TensorName::Layer(layer_idx, LayerTensor::Router))?,
            experts: (0..experts.n_experts)
                .map(expert)
                .collect::<Result<_, _>>()?,
            n_used: experts.n_used as usize,
            normalise: experts.normalise,
        })
    }

    /// Bytes that one row reads.
    pub(super) fn n_bytes(&self) -> usize {
        let all: usize = self.experts.iter().map(Gated::n_bytes).sum();
        self.router.n_bytes() + all * self.n_used / self.experts.len()
    }
}

impl Model {
    /// What the experts give for the normed rows, into the branch.
    pub(super) fn mix_experts(&self, team: &mut Team, work: &mut Workspace, mixture: &Mixture) {
        let (n_rows, n_hidden) = (work.normed.n_rows(), work.normed.n_columns());
        let n_experts = mixture.experts.len();
        let rows = &mut work.expert_rows;
        rows.scores.resize(n_rows * n_experts, 0.0);
        let scores = Output::Replace(&mut rows.scores);
        matmul(self.isa, team, &[&mixture.router], &work.normed, scores);
        let shares = route(&rows.scores, n_experts, mixture.n_used, mixture.normalise);
        work.branch.clear();
        work.branch.resize(n_rows * n_hidden, 0.0);
        for (expert, shares) in mixture.experts.iter().zip(&shares) {
            if shares.is_empty() {
                continue;
            }
            work.normed.gather(shares, &mut rows.gathered);
            rows.answers.resize(shares.len() * n_hidden, 0.0);
            let inner = (&mut work.gate_up, &mut work.gated);
            let answers = Output::Replace(&mut rows.answers);
            self.gated(team, expert, (&rows.gathered, inner), answers);
            add_shares(shares, &rows.answers, n_hidden, &mut work.branch);
        }
    }
}
