//! The border between deciding and computing.
//!
//! The scheduler decides what one forward pass holds (`StepPlan`), an `Executor` computes it on its own
//! thread and answers with a `StepOutput`. An executor owns the KV memory of its node and nothing else: it
//! never sees requests, roles or peers. While it computes it reports which layer groups of which sequences are
//! final, so that their slices can leave while later layers still run.

pub mod cpu;
pub mod simulated;

use tidemill_core::{
    BlockIdx, Failure, LayerGroupIdx, LogprobSpec, SampledToken, SamplingParams, TokenId,
    TokenLogprob,
};

/// A sequence within one engine; unique for the life of the process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SequenceId(pub u64);

/// One forward pass: what every sequence of the batch feeds and wants back.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct StepPlan {
    /// Rises with every step of a node.
    pub step_id: u64,
    /// The batch. A sequence appears at most once.
    pub items: Vec<StepItem>,
}

/// One sequence's share of a step: a chunk of its prompt, or its last token.
#[derive(Clone, PartialEq, Debug)]
pub struct StepItem {
    /// Whose.
    pub sequence_id: SequenceId,
    /// Tokens to feed, at positions `start_position..`; at least one.
    pub tokens: Vec<TokenId>,
    /// Positions before the first token; their KV is already in the blocks.
    pub start_position: u32,
    /// Blocks that hold positions `0..start_position + tokens.len()`, in order.
    pub block_table: Vec<BlockIdx>,
    /// Sample a token from the last row's logits; `None` for a chunk that is not the last.
    pub sample: Option<SampleSpec>,
    /// Report log-probabilities of prompt tokens within this chunk.
    pub prompt_logprobs: Option<PromptLogprobSpec>,
    /// Tell the progress sink about this sequence's layer groups (it is being exported).
    pub report_progress: bool,
}

/// How to draw the next token of a sequence.
#[derive(Clone, PartialEq, Debug)]
pub struct SampleSpec {
    /// The distribution.
    pub params: SamplingParams,
    /// Place of the drawn token in the output, from 0: the counter of the generator.
    pub output_idx: u32,
    /// What penalties look at; empty when there are none.
    pub given: GivenTokens,
    /// Tokens that may not be drawn here: stop tokens, as long as `min_tokens` is not reached.
    pub barred: Vec<TokenId>,
    /// What to report about it.
    pub logprobs: LogprobSpec,
}

/// The tokens of a sequence before the one that is to be drawn, whichever node computed them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct GivenTokens {
    /// Prompt tokens.
    pub prompt: Vec<TokenId>,
    /// Output tokens, those emitted before a resume included.
    pub output: Vec<TokenId>,
}

/// Log-probabilities of the tokens that *follow* the fed ones.
#[derive(Clone, PartialEq, Debug)]
pub struct PromptLogprobSpec {
    /// For each fed row, the token whose log-probability is wanted; the last row of a prompt has none, so
    /// there may be one target fewer than tokens.
    pub targets: Vec<TokenId>,
    /// How many top alternatives to report with each.
    pub n_top: u32,
}

/// What one forward pass gave.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct StepOutput {
    /// The plan's step.
    pub step_id: u64,
    /// One entry for each item of the plan, in its order.
    pub items: Vec<StepItemOutput>,
}

/// One sequence's result.
#[derive(Clone, PartialEq, Debug)]
pub struct StepItemOutput {
    /// Whose.
    pub sequence_id: SequenceId,
    /// The drawn token, when one was asked for.
    pub sampled: Option<SampledToken>,
    /// One entry for each target, when asked for.
    pub prompt_logprobs: Vec<PromptLogprob>,
    /// This row alone failed (for instance NaN logits); the others are good.
    pub failure: Option<Failure>,
}

/// Log-probability of one prompt token.
#[derive(Clone, PartialEq, Debug)]
pub struct PromptLogprob {
    /// Natural log of the prompt token's probability.
    pub logprob: f32,
    /// The most likely tokens at its place, best first.
    pub top: Vec<TokenLogprob>,
}

/// A layer group of a sequence is final up to a position: every block whose positions end there or before
/// may be read by others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerProgress {
    /// Whose.
    pub sequence_id: SequenceId,
    /// Which layers.
    pub group: LayerGroupIdx,
    /// Positions `0..n_tokens` of this group hold their final bytes.
    pub n_tokens: u32,
}

/// Takes progress during a step. Must not block: it runs on the compute thread.
pub trait ProgressSink: Send {
    /// Called once for each reporting sequence and layer group of the step.
    fn layers_done(&mut self, progress: LayerProgress);
}

/// A sink that drops everything.
pub struct NoProgress;

impl ProgressSink for NoProgress {
    fn layers_done(&mut self, _progress: LayerProgress) {}
}

/// Computes steps. `Send`, so that it can live on a compute thread.
pub trait Executor: Send {
    /// Computes one step. A block whose first position is fed is new to its sequence and holds anything: the
    /// executor zeroes it first, so that unused tail positions are zero. A failure of the whole step (not of
    /// one row) fails every sequence in it and no other.
    ///
    /// # Errors
    /// When nothing of the batch could be computed (a block index out of range, out of memory).
    fn step(
        &mut self,
        plan: &StepPlan,
        progress: &mut dyn ProgressSink,
    ) -> Result<StepOutput, Failure>;
}
