//! The prefill node as a pure machine: events in, effects out.
//!
//! One owner for everything that a node knows: the scheduler with its block pool, the exports with their
//! leases, and who waits for which answer. It holds no channel, task, lock or clock, so a test (and the
//! simulator) is a list of events. Read downward: `submit` takes work in and ends it, `step` computes,
//! `export` lends the result to decode nodes.

mod export;
mod step;
mod submit;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use tidemill_core::kv_layout::SlicePlace;
use tidemill_core::planted::PlantedBug;
use tidemill_core::{
    CallId, Capability, Digest, Endpoint, Failure, FailureCode, FinishReason, Incarnation,
    KvHandle, LoadReport, NodeId, PrefillRequest, ReadId, RequestId, Role, SampledToken, Slice,
    Timestamp,
};
use tidemill_engine::block_pool::{BlockPool, Owner};
use tidemill_engine::executor::{LayerProgress, PromptLogprob, SequenceId, StepOutput, StepPlan};
use tidemill_engine::intake::ModelFacts;
use tidemill_engine::scheduler::{Scheduler, SchedulerConfig};
use tidemill_kv_transfer::export::{Claim, ExportEvent, ExportTable, LeaseRef, ReadAsk, ReadGrant};

/// What a node is told at its start.
pub struct NodeConfig {
    /// Its name.
    pub node_id: NodeId,
    /// This life of it.
    pub incarnation: Incarnation,
    /// The model that it serves.
    pub facts: ModelFacts,
    /// Blocks of its pool.
    pub n_blocks: u32,
    /// Bounds of a step and of the queue.
    pub scheduler: SchedulerConfig,
    /// Where importers reach its control service.
    pub control_address: String,
    /// Where importers read its blocks.
    pub endpoints: Vec<Endpoint>,
    /// Draws capabilities: from the operating system, or seeded in the simulator.
    pub draw_capability: Box<dyn FnMut() -> Capability + Send>,
}

/// What can happen to a prefill node.
#[derive(Clone, PartialEq, Debug)]
pub enum Event {
    /// The router asks for a prefill; answers go to `call`.
    Prefill {
        /// The stream that waits.
        call: CallId,
        /// What to compute.
        request: PrefillRequest,
        /// The life that the router means.
        to: Incarnation,
    },
    /// The router gives a request up, lease included.
    Cancel {
        /// Which attempt.
        request_id: RequestId,
        /// The life that the caller means.
        to: Incarnation,
    },
    /// A stream's reader has left.
    CallEnded {
        /// The stream.
        call: CallId,
    },
    /// The step in flight has ended.
    StepDone {
        /// Which.
        step_id: u64,
        /// What it gave.
        result: Result<StepOutput, Failure>,
    },
    /// A layer group of a sequence is final up to a position. A hint: the end of the step implies it.
    LayersDone(LayerProgress),
    /// A digest job has ended.
    Digested {
        /// The job.
        job: ReadId,
        /// The checksums of its slices.
        digests: Vec<(Slice, Digest)>,
    },
    /// A decode node claims a lease; announcements go to `call`.
    Claim {
        /// The stream that waits.
        call: CallId,
        /// Who claims what.
        claim: Claim,
        /// The life that the importer means.
        to: Incarnation,
    },
    /// A decode node still wants these leases.
    Renew {
        /// Who waits for the answer.
        call: CallId,
        /// The importer's life.
        importer: Incarnation,
        /// The leases.
        leases: Vec<LeaseRef>,
        /// The life that the importer means.
        to: Incarnation,
    },
    /// A decode node (or the router) needs a lease no more.
    Release {
        /// The lease.
        lease: LeaseRef,
        /// The life that the caller means.
        to: Incarnation,
    },
    /// The router gives a lease to another decode node: `lease.epoch` is the new one.
    Rebind {
        /// Who waits for the answer.
        call: CallId,
        /// The lease under its new epoch.
        lease: LeaseRef,
        /// The life that the router means.
        to: Incarnation,
    },
    /// An importer asks to read blocks.
    ReadAsked {
        /// Who waits for the answer.
        call: CallId,
        /// Which blocks, with what right.
        ask: ReadAsk,
    },
    /// A granted read is over, well or not: nobody touches its blocks any more.
    ReadEnded(ReadId),
    /// The process is leaving: take no new work.
    Drain,
}

/// What a prefill node wants done.
#[derive(Clone, PartialEq, Debug)]
pub enum Effect {
    /// Compute; answered by `StepDone`.
    RunStep(StepPlan),
    /// Compute checksums on the transfer thread; answered by `Digested`.
    Digest {
        /// The job; it owns the blocks until its answer.
        job: ReadId,
        /// Where the slices lie.
        places: Vec<SlicePlace>,
    },
    /// Tell the router.
    Prefill {
        /// Its stream.
        call: CallId,
        /// What.
        event: PrefillEvent,
    },
    /// Tell an importer.
    Export {
        /// Its stream.
        call: CallId,
        /// What.
        event: ExportEvent,
    },
    /// Answer `Renew`.
    Renewed {
        /// Who waits.
        call: CallId,
        /// Requests whose lease is no more.
        gone: Vec<RequestId>,
        /// When the others end.
        expires_at: Timestamp,
    },
    /// Answer `Rebind`.
    Rebound {
        /// Who waits.
        call: CallId,
        /// Done, or why not.
        result: Result<(), Failure>,
    },
    /// Answer `ReadAsked`.
    ReadDecided {
        /// Who waits.
        call: CallId,
        /// The right to read these blocks until `ReadEnded`, or why not.
        result: Result<ReadGrant, Failure>,
    },
}

/// What the router hears about a prefill, in this order: at most one handle, prompt log-probabilities, then
/// exactly one of first token and failure.
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
    /// True when nothing follows on its stream.
    pub fn is_last(&self) -> bool {
        matches!(self, Self::FirstToken(_) | Self::Failed(_))
    }
}

/// The positive end of a prefill.
#[derive(Clone, PartialEq, Debug)]
pub struct FirstToken {
    /// The token; absent when `max_tokens` is 0.
    pub token: Option<SampledToken>,
    /// Context tokens taken from the prefix cache.
    pub n_cached_tokens: u32,
    /// Context tokens computed here.
    pub n_computed_tokens: u32,
    /// Set when this token ended the request.
    pub finish: Option<FinishReason>,
}

/// A prefill that has not ended yet.
struct Request {
    call: CallId,
    sequence_id: SequenceId,
    n_context: u32,
    wants_export: bool,
    started: bool,
}

/// A prefill node.
pub struct Node {
    config: NodeConfig,
    scheduler: Scheduler,
    pool: BlockPool,
    exports: ExportTable,
    /// Prefills between `Prefill` and their last event.
    requests: BTreeMap<RequestId, Request>,
    sequences: BTreeMap<SequenceId, RequestId>,
    prefill_calls: BTreeMap<CallId, RequestId>,
    /// Who hears about a lease, by request.
    claim_calls: BTreeMap<RequestId, CallId>,
    /// The step in flight: its id and the sequences in it that are exported, with their end positions.
    step: Option<step::InFlight>,
    /// Digest jobs in flight, those of given-up exports too: each owns its blocks until it ends.
    digest_jobs: BTreeMap<ReadId, RequestId>,
    next_sequence: u64,
    next_read: u64,
    n_reports: u64,
    draining: bool,
    effects: Vec<Effect>,
}

impl Node {
    /// A node at rest.
    pub fn new(config: NodeConfig) -> Self {
        Self {
            scheduler: Scheduler::new(config.scheduler.clone()),
            pool: BlockPool::new(config.n_blocks),
            exports: ExportTable::new(config.facts.layout.clone()),
            requests: BTreeMap::new(),
            sequences: BTreeMap::new(),
            prefill_calls: BTreeMap::new(),
            claim_calls: BTreeMap::new(),
            step: None,
            digest_jobs: BTreeMap::new(),
            next_sequence: 0,
            next_read: 0,
            n_reports: 0,
            draining: false,
            effects: Vec::new(),
            config,
        }
    }

    /// Takes one event in.
    pub fn apply(&mut self, event: Event, now: Timestamp) -> Vec<Effect> {
        match event {
            Event::Prefill { call, request, to } => self.submit(call, request, to, now),
            Event::Cancel { request_id, to } => self.cancel(request_id, to),
            Event::CallEnded { call } => self.end_call(call),
            Event::StepDone { step_id, result } => self.end_step(step_id, result, now),
            Event::LayersDone(progress) => self.note_layers(progress),
            Event::Digested { job, digests } => self.take_digests(job, &digests),
            Event::Claim { call, claim, to } => self.claim(call, &claim, to, now),
            Event::Renew {
                call,
                importer,
                leases,
                to,
            } => self.renew(call, importer, &leases, to, now),
            Event::Release { lease, to } => self.release(lease, to),
            Event::Rebind { call, lease, to } => self.rebind(call, lease, to, now),
            Event::ReadAsked { call, ask } => self.decide_read(call, &ask, now),
            Event::ReadEnded(read) => self.end_read(read),
            Event::Drain => self.draining = true,
        }
        std::mem::take(&mut self.effects)
    }

    /// Does what time asks for: ends expired leases and sequences, starts the next step.
    pub fn maintain(&mut self, now: Timestamp) -> Vec<Effect> {
        self.expire_leases(now);
        self.start_step(now);
        std::mem::take(&mut self.effects)
    }

    /// When `maintain` has something to do even if nothing happens before.
    pub fn next_wakeup(&self) -> Option<Timestamp> {
        let exports = self.exports.next_deadline();
        let leases = exports.filter(|_| !PlantedBug::LeaseForEver.is_on());
        [leases, self.step_deadline()].into_iter().flatten().min()
    }

    /// When the scheduler has somebody to give up. While a step is in flight it waits for its end: to ask before
    /// would only turn the loop.
    fn step_deadline(&self) -> Option<Timestamp> {
        if self.step.is_some() {
            return None;
        }
        self.scheduler.next_deadline()
    }

    /// True when nothing is waiting, computed, lent or read.
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty()
            && self.step.is_none()
            && self.exports.is_empty()
            && self.digest_jobs.is_empty()
            && self.pool.n_free() == self.config.n_blocks
    }

    /// True while something of an attempt is kept here, reads in flight apart.
    pub fn holds(&self, request_id: RequestId) -> bool {
        self.requests.contains_key(&request_id) || self.exports.contains(request_id)
    }

    /// True once it takes no new work.
    pub fn is_draining(&self) -> bool {
        self.draining
    }

    /// The node's state in its own counts.
    pub fn load_report(&mut self) -> LoadReport {
        self.n_reports += 1;
        LoadReport {
            node_id: self.config.node_id.clone(),
            incarnation: self.config.incarnation,
            role: Role::Prefill,
            sequence_number: self.n_reports,
            n_waiting: self.scheduler.n_waiting(),
            n_running: self.scheduler.n_running(),
            queued_tokens: self.scheduler.queued_tokens(),
            n_blocks: self.config.n_blocks,
            n_blocks_free: self.pool.n_free(),
            n_blocks_leased: self.exports.n_blocks(),
            draining: self.draining,
        }
    }

    /// Tokens that were computed although their request had been given up: a step in flight goes on to its end.
    pub fn n_tokens_after_cancel(&self) -> u64 {
        self.scheduler.n_tokens_after_cancel()
    }

    /// Proves that every block, lease and answer has an owner.
    ///
    /// # Errors
    /// Names what is wrong.
    pub fn audit(&self) -> Result<(), String> {
        self.pool.audit()?;
        self.scheduler.audit(&self.pool)?;
        self.exports.audit()?;
        if self.requests.len() != self.sequences.len() {
            return Err(format!(
                "{} requests but {} sequences",
                self.requests.len(),
                self.sequences.len()
            ));
        }
        for (request_id, request) in &self.requests {
            if self.sequences.get(&request.sequence_id) != Some(request_id) {
                return Err(format!("request {request_id} has lost its sequence"));
            }
            if self.prefill_calls.get(&request.call) != Some(request_id) {
                return Err(format!("request {request_id} has nobody to answer to"));
            }
        }
        for read in self.exports.reads() {
            if self.pool.blocks_of(Owner::Read(read)).is_empty() {
                return Err(format!("{read:?} is in flight and owns no block"));
            }
        }
        for request_id in self.claim_calls.keys() {
            if !self.exports.contains(*request_id) {
                return Err(format!("request {request_id} is claimed but not exported"));
            }
        }
        Ok(())
    }

    /// A message for another life of this node is answered `gone`.
    fn check_life(&self, to: Incarnation) -> Result<(), Failure> {
        if to == self.config.incarnation || PlantedBug::IncarnationUnchecked.is_on() {
            return Ok(());
        }
        Err(Failure::new(
            FailureCode::Gone,
            format!(
                "node {} is now incarnation {}, not {to}; describe it again",
                self.config.node_id, self.config.incarnation
            ),
        ))
    }

    /// Sends to a prefill stream.
    fn tell_router(&mut self, call: CallId, event: PrefillEvent) {
        self.effects.push(Effect::Prefill { call, event });
    }
}
