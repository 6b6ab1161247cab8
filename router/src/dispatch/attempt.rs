//! One attempt of a request: the calls it has open and the nodes that may hold something of it.
//!
//! A leg owes its node a cancel as long as the node may hold something and has not said by itself that it is
//! over. `leave` pays that debt once; nothing else in the machine sends cancels.

use super::event::{Effect, GenerateEvent};
use crate::placement::{Candidate, Target};
use tidemill_core::planted::PlantedBug;
use tidemill_core::{CallId, KvHandle, RequestId, SampledToken, Timestamp};

/// A call to a node, and what the node may hold because of it.
#[derive(Clone, Debug)]
pub(super) struct Leg {
    pub(super) call: CallId,
    pub(super) target: Target,
    /// Its stream may still say something.
    pub(super) is_open: bool,
    /// The node may hold blocks, a lease or a queue place for us.
    pub(super) is_held: bool,
    /// It has said `Accepted`.
    pub(super) is_accepted: bool,
    /// It has said `KvReady`.
    pub(super) has_kv: bool,
    /// Tokens that this call gave.
    pub(super) n_tokens: u32,
    /// The call itself, or the latest word on it.
    pub(super) heard_at: Timestamp,
}

impl Leg {
    pub(super) fn new(call: CallId, target: Target, now: Timestamp) -> Self {
        Self {
            call,
            target,
            is_open: true,
            is_held: true,
            is_accepted: false,
            has_kv: false,
            n_tokens: 0,
            heard_at: now,
        }
    }

    /// The node has said by itself that it holds nothing of ours any more.
    pub(super) fn end(&mut self) {
        self.is_open = false;
        self.is_held = false;
    }
}

/// One attempt. Its id is on every message to every node that it touches.
#[derive(Clone, Debug)]
pub(super) struct Attempt {
    pub(super) id: RequestId,
    /// Output tokens that were emitted before it.
    pub(super) n_base: usize,
    /// Prompt log-probabilities that its nodes have told.
    pub(super) n_prompt_logprobs: usize,
    pub(super) prefill: Option<Leg>,
    pub(super) decode: Option<Leg>,
    /// The prefill node's facts, to choose decode nodes by; `None` when a decode node does everything.
    pub(super) exporter: Option<Candidate>,
    /// A decode node is to follow.
    pub(super) is_split: bool,
    pub(super) handle: Option<KvHandle>,
    pub(super) rebinding: Option<CallId>,
    /// Decode nodes that were given this id: never again, since their pulls may outlive a cancel.
    pub(super) decoders: Vec<Target>,
    /// The first token, whoever told it first, and when.
    pub(super) first: Option<(SampledToken, Timestamp)>,
    /// What the decode node has said before the prefill node had told all prompt log-probabilities: these come first.
    pub(super) early: Vec<GenerateEvent>,
    /// The prefill call's positive end has come.
    pub(super) is_prefilled: bool,
}

impl Attempt {
    pub(super) fn new(
        id: RequestId,
        n_base: usize,
        exporter: Option<Candidate>,
        is_split: bool,
    ) -> Self {
        Self {
            id,
            n_base,
            n_prompt_logprobs: 0,
            prefill: None,
            decode: None,
            exporter,
            is_split,
            handle: None,
            rebinding: None,
            decoders: Vec::new(),
            first: None,
            early: Vec::new(),
            is_prefilled: false,
        }
    }

    pub(super) fn is_prefill_call(&self, call: CallId) -> bool {
        self.prefill
            .as_ref()
            .is_some_and(|leg| leg.is_open && leg.call == call)
    }

    pub(super) fn is_decode_call(&self, call: CallId) -> bool {
        self.decode
            .as_ref()
            .is_some_and(|leg| leg.is_open && leg.call == call)
    }

    /// Gives the decode node up.
    pub(super) fn leave_decode(&mut self, effects: &mut Vec<Effect>) {
        self.early.clear();
        if let Some(leg) = self.decode.take() {
            leave(self.id, &leg, effects);
        }
    }

    /// Gives everything up.
    pub(super) fn leave(mut self, effects: &mut Vec<Effect>) {
        if let Some(call) = self.rebinding.take() {
            effects.push(Effect::DropCall(call));
        }
        self.leave_decode(effects);
        if let Some(leg) = self.prefill.take() {
            leave(self.id, &leg, effects);
        }
    }
}

fn leave(request_id: RequestId, leg: &Leg, effects: &mut Vec<Effect>) {
    if leg.is_held && !PlantedBug::LeftUncancelled.is_on() {
        effects.push(Effect::Cancel {
            target: leg.target.clone(),
            request_id,
        });
    }
    if leg.is_open {
        effects.push(Effect::DropCall(leg.call));
    }
}
