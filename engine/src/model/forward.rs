//! One forward pass over rows of any mix of sequences.
//!
//! embedding -> layers of (norm, q k v, rope, store K and V, attention, o, add; norm, gate and up, SiLU, down, add) -> norm ->
//! head. Each row's result depends on its own sequence alone. K and V of a layer are final when they have been
//! stored, before the layer's attention, which is when the caller is told.

use super::Model;
use super::llama::Layer;
use tidemill_core::TokenId;
use tidemill_kernels::cpu::{
    Activations, AttentionPlan, LayerCache, Output, PackedMatrix, RopeAngles, Span, Team, attend,
    matmul, rms_norm, silu_mul, store_kv,
};
use tidemill_kernels::memory::KvArena;

/// The rows of one pass: spans follow one another without a gap.
pub(crate) struct Batch {
    tokens: Vec<TokenId>,
    positions: Vec<u32>,
    attention: AttentionPlan,
}

/// Memory that a pass works in; kept from pass to pass.
#[derive(Debug)]
pub(crate) struct Workspace {
    /// `[rows, hidden]`
    hidden: Vec<f32>,
    /// `[rows, hidden]`
    normed: Activations,
    /// `[rows, q | k | v]`
    qkv: Vec<f32>,
    /// `[rows, n_heads * head_dim]`
    attended: Activations,
    /// `[rows, gate | up]`
    gate_up: Vec<f32>,
    /// `[rows, intermediate]`
    gated: Activations,
    /// Rows that become logits, `[rows, hidden]`.
    head_input: Activations,
    /// `[rows, vocab]`
    logits: Vec<f32>,
    angles: RopeAngles,
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
            attention: AttentionPlan::new(model.shape, spans),
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
        Self {
            hidden: Vec::new(),
            normed: Activations::new(any(&|layer| {
                quantised(&layer.qkv) || quantised(&layer.gate_up)
            })),
            qkv: Vec::new(),
            attended: Activations::new(any(&|layer| layer.o.is_quantised())),
            gate_up: Vec::new(),
            gated: Activations::new(any(&|layer| layer.down.is_quantised())),
            head_input: Activations::new(model.weights.head().is_quantised()),
            logits: Vec::new(),
            angles: RopeAngles::default(),
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
        work.angles.fill(&self.rope, &batch.positions);
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
        let n_turned = self.shape.n_heads + self.shape.n_kv_heads;
        work.angles.turn(isa, team, &mut work.qkv, n_turned);
        let rows = (&work.qkv[..], n_columns);
        store_kv(isa, team, cache, batch.attention.spans(), rows);
        stored();
        let attended = &mut work.attended;
        attend((isa, team), &mut batch.attention, cache, rows, attended);
        let sums = Output::Add(&mut work.hidden);
        matmul(isa, team, &[&layer.o], &work.attended, sums);
    }

    fn feed_forward(&self, team: &mut Team, work: &mut Workspace, layer: &Layer) {
        let isa = self.isa;
        let norm = (&layer.ffn_norm[..], self.rms_norm_eps);
        rms_norm(isa, team, &work.hidden, norm, &mut work.normed);
        let n_rows = work.normed.n_rows();
        work.gate_up.resize(n_rows * columns(&layer.gate_up), 0.0);
        let matrices: [&PackedMatrix; 2] = layer.gate_up.each_ref();
        let products = Output::Replace(&mut work.gate_up);
        matmul(isa, team, &matrices, &work.normed, products);
        let n_inner = layer.down.n_inputs();
        silu_mul(isa, team, &work.gate_up, n_inner, &mut work.gated);
        let sums = Output::Add(&mut work.hidden);
        matmul(isa, team, &[&layer.down], &work.gated, sums);
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
