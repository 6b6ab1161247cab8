//! One forward pass over rows of any mix of sequences.
//!
//! embedding -> layers of (norm, q k v, rope, store K and V, attention, o, add; norm, gate and up, SiLU, down, add) -> norm ->
//! head. What families add in between stands in their own files. Each row's result depends on its own sequence alone. K
//! and V of a layer are final when they have been stored, before the layer's attention, which is when the caller is told.

use super::llama::{FeedForward, Gated, Layer};
use super::qwen3_moe::ExpertRows;
use super::{ByReach, Model};
use tidemill_core::TokenId;
use tidemill_kernels::cpu::{
    Activations, AttentionPlan, LayerCache, Output, PackedMatrix, RopeAngles, Span, Team, add_bias,
    add_rows, attend, matmul, rms_norm, scale, store_kv,
};
use tidemill_kernels::memory::KvArena;

/// The rows of one pass: spans follow one another without a gap.
pub(crate) struct Batch {
    tokens: Vec<TokenId>,
    positions: Vec<u32>,
    attention: ByReach<AttentionPlan>,
}

/// Memory that a pass works in; kept from pass to pass.
#[derive(Debug)]
pub(crate) struct Workspace {
    /// The residual stream, `[rows, hidden]`.
    pub(super) hidden: Vec<f32>,
    /// `[rows, hidden]`
    pub(super) normed: Activations,
    /// `[rows, q | k | v]`
    qkv: Vec<f32>,
    /// `[rows, n_heads * head_dim]`
    attended: Activations,
    /// `[rows, gate | up]`
    pub(super) gate_up: Vec<f32>,
    /// `[rows, intermediate]`
    pub(super) gated: Activations,
    pub(super) expert_rows: ExpertRows,
    /// What half a layer gives, where it is not added at once, `[rows, hidden]`.
    pub(super) branch: Vec<f32>,
    /// `[rows, hidden]`
    pub(super) branch_normed: Activations,
    /// Rows that become logits, `[rows, hidden]`.
    head_input: Activations,
    /// `[rows, vocab]`
    logits: Vec<f32>,
    angles: ByReach<RopeAngles>,
}

impl Batch {
    /// Rows of tokens with the spans that they belong to.
    pub(crate) fn new(model: &Model, tokens: Vec<TokenId>, spans: Vec<Span>) -> Self {
        let positions = spans.iter().flat_map(|span| {
            let positions = span.start_position..span.n_positions();
            positions.map(|p| u32::try_from(p).expect("positions were checked against the context"))
        });
        Self {
            tokens,
            positions: positions.collect(),
            attention: ByReach {
                window: model.window.map(|window| {
                    AttentionPlan::windowed(model.shape, Some(window), spans.clone())
                }),
                everything: AttentionPlan::new(model.shape, spans),
            },
        }
    }
}

fn columns(matrices: &[PackedMatrix]) -> usize {
    matrices.iter().map(PackedMatrix::n_outputs).sum()
}

impl Workspace {
    pub(crate) fn new(model: &Model) -> Self {
        let any = |of: &dyn Fn(&Layer) -> bool| model.weights.layers.iter().any(of);
        let quantised = |matrices: &[PackedMatrix]| matrices.iter().any(PackedMatrix::is_quantised);
        let feeds_int8 = any(&|layer| layer.feed_forward.reads_int8());
        Self {
            hidden: Vec::new(),
            normed: Activations::new(feeds_int8 || any(&|layer| quantised(&layer.qkv))),
            qkv: Vec::new(),
            attended: Activations::new(any(&|layer| layer.o.is_quantised())),
            gate_up: Vec::new(),
            gated: Activations::new(any(&|layer| layer.feed_forward.narrows_inside())),
            expert_rows: ExpertRows::new(feeds_int8),
            branch: Vec::new(),
            branch_normed: Activations::new(false),
            head_input: Activations::new(model.weights.head().is_quantised()),
            logits: Vec::new(),
            angles: ByReach {
                everything: RopeAngles::default(),
                window: model.window.map(|_| RopeAngles::default()),
            },
        }
    }
}

impl Model {
    /// Computes all layers; the rows' hidden states stay in the workspace. `stored(layer)` is called when K and V of a
    /// layer are in their blocks.
    pub(crate) fn forward(
        &self,
        (team, work): (&mut Team, &mut Workspace),
        arena: &KvArena,
        batch: &mut Batch,
        stored: &mut dyn FnMut(u32),
    ) {
        let n_hidden = self.weights.embedding.n_inputs();
        work.hidden.resize(batch.tokens.len() * n_hidden, 0.0);
        for (row, token) in work.hidden.chunks_exact_mut(n_hidden).zip(&batch.tokens) {
            self.weights.embedding.row_to_f32(*token as usize, row);
        }
        if let Some(factor) = self.embedding_scale {
            scale(&mut work.hidden, factor);
        }
        let angles = &mut work.angles;
        angles
            .everything
            .fill(&self.rope.everything, &batch.positions);
        if let (Some(angles), Some(rope)) = (&mut angles.window, &self.rope.window) {
            angles.fill(rope, &batch.positions);
        }
        for (layer_idx, layer) in (0_u32..).zip(&self.weights.layers) {
            let cache = LayerCache {
                arena,
                layer: layer_idx,
            };
            self.attention(team, work, (layer, cache), batch, &mut || stored(layer_idx));
            self.feed_forward(team, work, layer);
        }
    }

    fn attention(
        &self,
        team: &mut Team,
        work: &mut Workspace,
        (layer, cache): (&Layer, LayerCache<'_>),
        batch: &mut Batch,
        stored: &mut dyn FnMut(),
    ) {
        let isa = self.isa;
        let norm = (&layer.attn_norm[..], self.rms_norm_eps);
        rms_norm(isa, team, &work.hidden, norm, &mut work.normed);
        let n_columns = columns(&layer.qkv);
        work.qkv.resize(batch.tokens.len() * n_columns, 0.0);
        let matrices: [&PackedMatrix; 3] = layer.qkv.each_ref();
        let products = Output::Replace(&mut work.qkv);
        matmul(isa, team, &matrices, &work.normed, products);
        if let Some(bias) = &layer.qkv_bias {
            add_bias(isa, team, &mut work.qkv, bias);
        }
        if let Some(norms) = &layer.head_norms {
            self.norm_q_and_k(team, norms, (&mut work.qkv, n_columns));
        }
        let n_turned = self.shape.n_heads + self.shape.n_kv_heads;
        work.angles
            .of(layer.reach)
            .turn(isa, team, &mut work.qkv, n_turned);
        let plan = batch.attention.of_mut(layer.reach);
        let rows = (&work.qkv[..], n_columns);
        store_kv(isa, team, cache, plan.spans(), rows);
        stored();
        attend((isa, team), plan, cache, rows, &mut work.attended);
        match &layer.post_norms {
            None => {
                let sums = Output::Add(&mut work.hidden);
                matmul(isa, team, &[&layer.o], &work.attended, sums);
            }
            Some(norms) => {
                work.branch.resize(work.hidden.len(), 0.0);
                let branch = Output::Replace(&mut work.branch);
                matmul(isa, team, &[&layer.o], &work.attended, branch);
                self.add_branch_normed(team, work, &norms.attn);
            }
        }
    }

    fn feed_forward(&self, team: &mut Team, work: &mut Workspace, layer: &Layer) {
        let norm = (&layer.ffn_norm[..], self.rms_norm_eps);
        rms_norm(self.isa, team, &work.hidden, norm, &mut work.normed);
        let inner = (&mut work.gate_up, &mut work.gated);
        match (&layer.feed_forward, &layer.post_norms) {
            (FeedForward::Dense(gated), None) => {
                let sums = Output::Add(&mut work.hidden);
                self.gated(team, gated, (&work.normed, inner), sums);
            }
            (FeedForward::Dense(gated), Some(norms)) => {
                work.branch.resize(work.hidden.len(), 0.0);
                let branch = Output::Replace(&mut work.branch);
                self.gated(team, gated, (&work.normed, inner), branch);
                self.add_branch_normed(team, work, &norms.ffn);
            }
            (FeedForward::Experts(mixture), None) => {
                self.mix_experts(team, work, mixture);
                add_rows(self.isa, team, &mut work.hidden, &work.branch);
            }
            (FeedForward::Experts(mixture), Some(norms)) => {
                self.mix_experts(team, work, mixture);
                self.add_branch_normed(team, work, &norms.ffn);
            }
        }
    }

    /// `down(activation(gate x) * up x)` for all rows of `input`; `gate_up` and `inner` are working memory.
    pub(super) fn gated(
        &self,
        team: &mut Team,
        weights: &Gated,
        (input, (gate_up, inner)): (&Activations, (&mut Vec<f32>, &mut Activations)),
        output: Output<'_>,
    ) {
        gate_up.resize(input.n_rows() * columns(&weights.gate_up), 0.0);
        let matrices: [&PackedMatrix; 2] = weights.gate_up.each_ref();
        matmul(self.isa, team, &matrices, input, Output::Replace(gate_up));
        (self.gate)(self.isa, team, gate_up, weights.down.n_inputs(), inner);
        matmul(self.isa, team, &[&weights.down], inner, output);
    }

    /// Logits of some rows of the last pass, `[rows.len(), vocab]`.
    pub(crate) fn logits<'w>(
        &self,
        team: &mut Team,
        work: &'w mut Workspace,
        rows: &[usize],
    ) -> &'w [f32] {
        let isa = self.isa;
        let n_hidden = self.weights.embedding.n_inputs();
        let mut chosen = Vec::with_capacity(rows.len() * n_hidden);
        for row in rows {
            chosen.extend_from_slice(&work.hidden[row * n_hidden..(row + 1) * n_hidden]);
        }
        let norm = (&self.weights.output_norm[..], self.rms_norm_eps);
        rms_norm(isa, team, &chosen, norm, &mut work.head_input);
        let head = self.weights.head();
        work.logits.resize(rows.len() * head.n_outputs(), 0.0);
        let products = Output::Replace(&mut work.logits);
        matmul(isa, team, &[head], &work.head_input, products);
        &work.logits
    }
}
