//! What a request's machine hears and what it wants done, as plain values.
//!
//! Every answer of a node is addressed by the call that asked for it; calls are numbered within one request and
//! never reused, so an event of a call that was given up finds nobody.

use crate::placement::{Candidate, Target};
use crate::requests::{Answer, PromptLogprob};
use tidemill_core::{
    CallId, Capability, Epoch, Failure, FinishReason, GenerateRequest, KvHandle, PrefillRequest,
    RequestId, SampledToken, Timestamp,
};

/// The moment, the nodes and the randomness, as arguments: the simulator replays them.
pub struct Outside<'a> {
    /// The present.
    pub now: Timestamp,
    /// Nodes that take work now; asked only when something is placed.
    pub candidates: &'a dyn Fn() -> Vec<Candidate>,
    /// Draws the id of an attempt.
    pub draw_id: &'a mut dyn FnMut() -> RequestId,
}

/// What can happen to a request.
#[derive(Clone, PartialEq, Debug)]
pub enum Event {
    /// It has its permit.
    Start,
    /// A prefill node says something.
    Prefill {
        /// On which call.
        call: CallId,
        /// What.
        event: PrefillEvent,
    },
    /// A decode node says something.
    Generate {
        /// On which call.
        call: CallId,
        /// What.
        event: GenerateEvent,
    },
    /// A rebind was answered.
    Rebound {
        /// Which call.
        call: CallId,
        /// Done, or why not.
        result: Result<(), Failure>,
    },
    /// A call ended without its positive or negative last message, or could not be made.
    CallLost {
        /// Which call.
        call: CallId,
        /// What the connection says.
        failure: Failure,
    },
    /// The client has left, or its text is complete.
    Cancel,
    /// Time has passed.
    Tick,
}

/// What a prefill node says: at most one handle, prompt log-probabilities, then exactly one of the others.
#[derive(Clone, PartialEq, Debug)]
pub enum PrefillEvent {
    /// The first chunk is scheduled; a decode node may begin to pull.
    Handle(KvHandle),
    /// For the next prompt tokens, from the second one on.
    PromptLogprobs(Vec<PromptLogprob>),
    /// The positive end.
    FirstToken(FirstToken),
    /// The negative end.
    Failed(Failure),
}

impl PrefillEvent {
    /// True when nothing follows on its call.
    pub fn is_last(&self) -> bool {
        matches!(self, Self::FirstToken(_) | Self::Failed(_))
    }
}

/// The positive end of a prefill.
#[derive(Clone, PartialEq, Debug)]
pub struct FirstToken {
    /// The token; absent when `max_tokens` is 0.
    pub token: Option<SampledToken>,
    /// Context tokens taken from the node's prefix cache.
    pub n_cached_tokens: u32,
    /// Context tokens computed there.
    pub n_computed_tokens: u32,
    /// Set when this token ended the request.
    pub finish: Option<FinishReason>,
}

/// What a decode node says: accepted, `KvReady` when KV was imported, tokens, and exactly one end.
#[derive(Clone, PartialEq, Debug)]
pub enum GenerateEvent {
    /// Blocks are reserved, or the sequence is queued to be prefilled there.
    Accepted,
    /// Every slice is there and checked.
    KvReady(KvReady),
    /// The next token.
    Token(SampledToken),
    /// For the next prompt tokens, from the second one on.
    PromptLogprobs(Vec<PromptLogprob>),
    /// The positive end.
    Finished(Finished),
    /// The negative end.
    Failed(Failure),
}

impl GenerateEvent {
    /// True when nothing follows on its call.
    pub fn is_last(&self) -> bool {
        matches!(self, Self::Finished(_) | Self::Failed(_))
    }
}

/// The import is complete.
#[derive(Clone, PartialEq, Debug)]
pub struct KvReady {
    /// As the exporter told the importer; held against what the prefill call says.
    pub first_token: SampledToken,
    /// Bytes copied.
    pub bytes_moved: u64,
    /// Context tokens that were already there.
    pub n_local_tokens: u32,
}

/// The positive end of a generation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Finished {
    /// Why.
    pub reason: FinishReason,
    /// Output tokens, those emitted before included.
    pub n_output_tokens: u32,
    /// Context tokens taken from the prefix cache (or imported).
    pub n_cached_tokens: u32,
    /// Context tokens computed there.
    pub n_computed_tokens: u32,
}

/// What a request wants done.
#[derive(Clone, PartialEq, Debug)]
pub enum Effect {
    /// Call `Prefill`; answered by `Event::Prefill` and `Event::CallLost`.
    Prefill {
        /// Under this number.
        call: CallId,
        /// At this life of this node.
        target: Target,
        /// What.
        request: PrefillRequest,
    },
    /// Call `Generate`; answered by `Event::Generate` and `Event::CallLost`.
    Generate {
        /// Under this number.
        call: CallId,
        /// At this life of this node.
        target: Target,
        /// What.
        request: GenerateRequest,
    },
    /// Call `Rebind`; answered by `Event::Rebound`.
    Rebind {
        /// Under this number.
        call: CallId,
        /// The exporter.
        target: Target,
        /// Whose lease.
        request_id: RequestId,
        /// The right to it.
        capability: Capability,
        /// The new epoch.
        epoch: Epoch,
    },
    /// Stop listening to a call.
    DropCall(CallId),
    /// Tell a node to give an attempt up; repeated by the driver until the node has heard it or is gone.
    Cancel {
        /// Which node.
        target: Target,
        /// Which attempt.
        request_id: RequestId,
    },
    /// Tell the client; the last one ends the request.
    Answer(Answer),
    /// Book what the request took; comes once, right before its last answer.
    Account(Usage),
    /// Tell membership how a node did.
    Report {
        /// Which node.
        target: Target,
        /// How.
        outcome: Outcome,
    },
    /// Count this.
    Note(Note),
}

/// What a request took, over all its attempts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Prompt tokens.
    pub n_prompt_tokens: u32,
    /// Output tokens.
    pub n_output_tokens: u32,
    /// Context tokens that prefill found in a prefix cache, in the first attempt that told.
    pub n_cached_tokens: u32,
    /// Context tokens computed on prefill nodes.
    pub n_prefill_computed_tokens: u32,
    /// Context tokens computed on decode nodes.
    pub n_decode_computed_tokens: u32,
    /// KV bytes moved between nodes.
    pub bytes_moved: u64,
    /// Attempts and take-overs started.
    pub n_attempts: u32,
}

/// How a node did, as far as its health is concerned.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Outcome {
    /// It did what it was asked, to the end.
    Served,
    /// It was lost, stood still, or broke its own rules.
    Failed,
    /// It answered for another life.
    Stale,
}

/// What is worth counting.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Note {
    /// The policy would have split, but no pair was there.
    SplitException,
    /// Nothing had been emitted yet; the prompt is prefilled elsewhere.
    Retry,
    /// Another decode node takes over the same export.
    TakeOver,
    /// Prompt and emitted tokens are prefilled again.
    Resume,
    /// A decode node stood still.
    Stall,
    /// An event of a call that was given up.
    LateEvent,
    /// Nodes disagreed, or a stream was out of order.
    Violation,
}

impl Note {
    /// Every note, for the registry.
    pub const ALL: [Self; 7] = [
        Self::SplitException,
        Self::Retry,
        Self::TakeOver,
        Self::Resume,
        Self::Stall,
        Self::LateEvent,
        Self::Violation,
    ];

    /// The name used in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::SplitException => "split_exception",
            Self::Retry => "retry",
            Self::TakeOver => "take_over",
            Self::Resume => "resume",
            Self::Stall => "stall",
            Self::LateEvent => "late_event",
            Self::Violation => "violation",
        }
    }
}
