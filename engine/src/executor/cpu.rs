//! Computes steps on the CPU.
//!
//! A step's items (chunks and single tokens) become rows of one forward pass; a very large step is cut into passes of
//! bounded memory, which changes no result, since a row depends on its own sequence alone. Everything
//! in a plan is checked before any memory is touched: an index that does not hold fails the step with a message
//! and leaves every block as it was. A row whose logits are not numbers fails its own item only.

mod check;
#[cfg(test)]
mod tests;

use crate::executor::{
    Executor, LayerProgress, ProgressSink, StepItem, StepItemOutput, StepOutput, StepPlan,
};
use crate::model::{Batch, Model, Workspace};
use crate::sampler;
use std::ops::Range;
use std::sync::Arc;
use tidemill_core::{Failure, FailureCode, LayerGroupIdx, TokenId};
use tidemill_kernels::cpu::{Span, Team};
use tidemill_kernels::memory::KvArena;

/// Rows of one pass: its working memory is some 20 KB a row for a small model.
const PASS_ROWS_MAX: usize = 512;
/// Rows whose logits are held at once.
const HEAD_ROWS_MAX: usize = 32;

/// Why an executor could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CpuExecutorError {
    /// The arena's blocks are not this model's.
    #[error("the KV arena was made for another layout than that of model {model}")]
    Layout {
        /// The model's label.
        model: String,
    },
    /// The operating system gave no thread.
    #[error("no compute thread")]
    Thread(#[from] std::io::Error),
}

/// One node's compute: a shared model, the node's KV memory, and a team of threads.
pub struct CpuExecutor {
    model: Arc<Model>,
    arena: Arc<KvArena>,
    team: Team,
    work: Workspace,
    vocab_size: u32,
    context_length: u32,
}

/// Some rows of one item, computed in one pass.
struct Part {
    item_idx: usize,
    /// Of the item's tokens.
    tokens: Range<usize>,
}

/// A row whose logits are needed.
struct Wanted {
    /// Row of the pass.
    row: usize,
    item_idx: usize,
    /// The prompt token whose log-probability is asked for.
    target: Option<TokenId>,
    /// Draw the next token.
    samples: bool,
}

impl CpuExecutor {
    /// `n_threads` compute together, the calling thread among them.
    ///
    /// # Errors
    /// When the arena does not fit the model, or a thread cannot be started.
    pub fn new(
        model: Arc<Model>,
        arena: Arc<KvArena>,
        n_threads: usize,
    ) -> Result<Self, CpuExecutorError> {
        let facts = model.facts(arena.layout().dtype);
        if facts.layout.fingerprint() != arena.layout().fingerprint() {
            return Err(CpuExecutorError::Layout {
                model: model.name().to_owned(),
            });
        }
        Ok(Self {
            work: Workspace::new(&model),
            vocab_size: facts.vocab_size,
            context_length: facts.context_length,
            team: Team::new(n_threads)?,
            model,
            arena,
        })
    }

    /// Unused tail positions of blocks that this step fills for the first time become zero.
    fn zero_fresh_tails(&self, item: &StepItem) -> Result<(), Failure> {
        let block_tokens = self.arena.layout().block_tokens as usize;
        let start = item.start_position as usize;
        let end = start + item.tokens.len();
        let last = (end - 1) / block_tokens;
        let is_fresh = last * block_tokens >= start;
        if is_fresh && !end.is_multiple_of(block_tokens) {
            self.arena
                .zero(item.block_table[last])
                .map_err(|error| Failure::new(FailureCode::Internal, error.to_string()))?;
        }
        Ok(())
    }

    /// Runs one pass and fills in what its rows give.
    fn run_pass(
        &mut self,
        plan: &StepPlan,
        parts: &[Part],
        progress: &mut dyn ProgressSink,
        outputs: &mut [StepItemOutput],
    ) {
        let mut tokens = Vec::new();
        let mut spans = Vec::with_capacity(parts.len());
        let mut wanted = Vec::new();
        for part in parts {
            let item = &plan.items[part.item_idx];
            want(item, part, tokens.len(), &mut wanted);
            spans.push(Span {
                first_row: tokens.len(),
                n_rows: part.tokens.len(),
                start_position: item.start_position as usize + part.tokens.start,
                block_table: item.block_table.clone(),
            });
            tokens.extend_from_slice(&item.tokens[part.tokens.clone()]);
        }
        let mut batch = Batch::new(&self.model, tokens, spans);
        let layout = self.arena.layout();
        let mut stored = |layer: u32| {
            let group = LayerGroupIdx(layer / layout.group_layers);
            if layer + 1 == layout.group_layer_range(group).end {
                report(plan, parts, group, progress);
            }
        };
        let memory = (&mut self.team, &mut self.work);
        self.model
            .forward(memory, &self.arena, &mut batch, &mut stored);
        for wanted in wanted.chunks(HEAD_ROWS_MAX) {
            self.read_logits(plan, wanted, outputs);
        }
    }

    fn read_logits(&mut self, plan: &StepPlan, wanted: &[Wanted], outputs: &mut [StepItemOutput]) {
        let rows: Vec<usize> = wanted.iter().map(|wanted| wanted.row).collect();
        let logits = self.model.logits(&mut self.team, &mut self.work, &rows);
        let logits = logits.chunks_exact(self.vocab_size as usize);
        for (wanted, logits) in wanted.iter().zip(logits) {
            let item = &plan.items[wanted.item_idx];
            let output = &mut outputs[wanted.item_idx];
            if output.failure.is_some() {
                continue;
            }
            if let Err(failure) = read_row(item, wanted, logits, output) {
                output.sampled = None;
                output.prompt_logprobs.clear();
                output.failure = Some(failure);
            }
        }
    }
}

impl Executor for CpuExecutor {
    fn step(
        &mut self,
        plan: &StepPlan,
        progress: &mut dyn ProgressSink,
    ) -> Result<StepOutput, Failure> {
        check::check(
            plan,
            &self.arena,
            &check::Bounds {
                vocab_size: self.vocab_size,
                context_length: self.context_length,
            },
        )?;
        for item in &plan.items {
            self.zero_fresh_tails(item)?;
        }
        let mut outputs: Vec<_> = plan
            .items
            .iter()
            .map(|item| StepItemOutput {
                sequence_id: item.sequence_id,
                sampled: None,
                prompt_logprobs: Vec::new(),
                failure: None,
            })
            .collect();
        for parts in passes(plan, PASS_ROWS_MAX) {
            self.run_pass(plan, &parts, progress, &mut outputs);
        }
        Ok(StepOutput {
            step_id: plan.step_id,
            items: outputs,
        })
    }
}

/// Cuts a step into passes of at most `rows_max` rows, items in order.
fn passes(plan: &StepPlan, rows_max: usize) -> Vec<Vec<Part>> {
    let mut passes = Vec::new();
    let mut pass = Vec::new();
    let mut n_free = rows_max;
    for (item_idx, item) in plan.items.iter().enumerate() {
        let mut start = 0;
        while start < item.tokens.len() {
            let end = item.tokens.len().min(start + n_free);
            pass.push(Part {
                item_idx,
                tokens: start..end,
            });
            n_free -= end - start;
            start = end;
            if n_free == 0 {
                passes.push(std::mem::take(&mut pass));
                n_free = rows_max;
            }
        }
    }
    if !pass.is_empty() {
        passes.push(pass);
    }
    passes
}

/// Notes the rows of a part whose logits are needed; its first row is `first_row` of the pass.
fn want(item: &StepItem, part: &Part, first_row: usize, wanted: &mut Vec<Wanted>) {
    for token_idx in part.tokens.clone() {
        let target = item
            .prompt_logprobs
            .as_ref()
            .and_then(|spec| spec.targets.get(token_idx).copied());
        let samples = item.sample.is_some() && token_idx + 1 == item.tokens.len();
        if target.is_some() || samples {
            wanted.push(Wanted {
                row: first_row + token_idx - part.tokens.start,
                item_idx: part.item_idx,
                target,
                samples,
            });
        }
    }
}

/// Reports a layer group of every exported sequence whose last row is in this pass.
fn report(plan: &StepPlan, parts: &[Part], group: LayerGroupIdx, progress: &mut dyn ProgressSink) {
    for part in parts {
        let item = &plan.items[part.item_idx];
        if item.report_progress && part.tokens.end == item.tokens.len() {
            progress.layers_done(LayerProgress {
                sequence_id: item.sequence_id,
                group,
                n_tokens: item.start_position + n_tokens(item),
            });
        }
    }
}

/// Tokens that an item feeds.
fn n_tokens(item: &StepItem) -> u32 {
    u32::try_from(item.tokens.len()).expect("chunks were checked against the context length")
}

fn read_row(
    item: &StepItem,
    wanted: &Wanted,
    logits: &[f32],
    output: &mut StepItemOutput,
) -> Result<(), Failure> {
    if let (Some(target), Some(spec)) = (wanted.target, &item.prompt_logprobs) {
        let logprob = sampler::prompt_logprob(logits, target, spec.n_top)?;
        output.prompt_logprobs.push(logprob);
    }
    if let (true, Some(spec)) = (wanted.samples, &item.sample) {
        output.sampled = Some(sampler::sample(logits, spec)?);
    }
    Ok(())
}
