//! The decode node as a pure machine: events in, effects out.
//!
//! One owner for everything that a node knows: the scheduler with its block pool, the imports with their
//! reservations, and who waits for which answer. It holds no channel, task, lock or clock, so a test (and the
//! simulator) is a list of events. Read downward: `submit` takes work in and ends it, `import` fetches KV from
//! a prefill node, `claim` hears what that says, `renewal` keeps its leases, `step` computes.

mod claim;
mod import;
mod renewal;
mod step;
mod submit;
#[cfg(test)]
mod tests;

use self::import::{Importing, Pulling};
use std::collections::{BTreeMap, VecDeque};
use tidemill_core::planted::PlantedBug;
use tidemill_core::{
    CallId, Failure, FailureCode, FinishReason, GenerateRequest, Incarnation, LoadReport, NodeId,
    RequestId, Role, SampledToken, Timestamp,
};
use tidemill_engine::block_pool::BlockPool;
use tidemill_engine::executor::{LayerProgress, PromptLogprob, SequenceId, StepOutput, StepPlan};
use tidemill_engine::intake::ModelFacts;
use tidemill_engine::scheduler::{Scheduler, SchedulerConfig};
use tidemill_kv_transfer::export::{Claim, ExportEvent, LeaseRef};
use tidemill_kv_transfer::import::Credits;
use tidemill_kv_transfer::transport::{PullRequest, PullResult};

/// Bytes that all pulls of a node may have on their way together: enough for several peers at full speed, few
/// enough that a slow one does not hold up the memory of the others.
const PULL_BYTES_MAX: u64 = 64 << 20;

/// One claim of ours at an exporter. A claim that was given up never matches again.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ClaimId(pub u64);

/// One pull of ours, unique for the life of the node.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct PullId(pub u64);

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
}

/// What can happen to a decode node.
#[derive(Clone, PartialEq, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "the large one comes once for each request, and is moved a few times"
)]
pub enum Event {
    /// The router asks for tokens; answers go to `call`.
    Generate {
        /// The stream that waits.
        call: CallId,
        /// What to continue.
        request: GenerateRequest,
        /// The life that the router means.
        to: Incarnation,
    },
    /// The router gives a request up.
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
    /// A layer group of a sequence is final: only exporters care.
    LayersDone(LayerProgress),
    /// The exporter says something about a claimed lease.
    Exporter {
        /// Which claim: an answer to an earlier one changes nothing.
        claim: ClaimId,
        /// What it says.
        event: ExportEvent,
    },
    /// The claim's stream has ended; before `Complete` or `Failed` this is a loss.
    ClaimEnded {
        /// Which claim.
        claim: ClaimId,
    },
    /// A pull has ended: nobody writes to its blocks any more.
    PullDone {
        /// Which.
        pull: PullId,
        /// What arrived.
        result: PullResult,
    },
    /// An exporter has answered `Renew`.
    Renewed {
        /// Who.
        exporter: Exporter,
        /// Requests whose lease is no more.
        gone: Vec<RequestId>,
    },
    /// The process is leaving: take no new work.
    Drain,
}

/// What a decode node wants done.
#[derive(Clone, PartialEq, Debug)]
pub enum Effect {
    /// Compute; answered by `StepDone`.
    RunStep(StepPlan),
    /// Tell the router.
    Generate {
        /// Its stream.
        call: CallId,
        /// What.
        event: GenerateEvent,
    },
    /// Claim a lease; answered by `Exporter` and `ClaimEnded`.
    Claim {
        /// Under this id.
        claim: ClaimId,
        /// Whose control service to call.
        exporter: Exporter,
        /// What to say.
        ask: Claim,
        /// The trace that it belongs to.
        traceparent: String,
    },
    /// Stop listening to a claim.
    DropClaim(ClaimId),
    /// Read slices into our blocks; answered by `PullDone`, whatever happens.
    Pull {
        /// Under this id.
        pull: PullId,
        /// What, from where, into which blocks.
        ask: PullRequest,
    },
    /// Keep leases alive: one message for all leases at one exporter.
    Renew {
        /// Whose control service to call.
        exporter: Exporter,
        /// The leases.
        leases: Vec<LeaseRef>,
    },
    /// Give a lease back.
    Release {
        /// Whose control service to call.
        exporter: Exporter,
        /// The lease.
        lease: LeaseRef,
    },
}

/// One life of an exporter and the address of its control service.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Exporter {
    /// `host:port` or `local:NAME`.
    pub control_address: String,
    /// Which life.
    pub incarnation: Incarnation,
}

/// What the router hears: accepted, then `KvReady` when KV was imported, tokens, and exactly one end.
#[derive(Clone, PartialEq, Debug)]
pub enum GenerateEvent {
    /// Blocks are reserved (or the sequence is queued to be prefilled here).
    Accepted,
    /// Every slice is here and checked.
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
    /// True when nothing follows on its stream.
    pub fn is_last(&self) -> bool {
        matches!(self, Self::Finished(_) | Self::Failed(_))
    }
}

/// The import is complete.
#[derive(Clone, PartialEq, Debug)]
pub struct KvReady {
    /// As told by the exporter; the router compares it with what the prefill stream said.
    pub first_token: SampledToken,
    /// Bytes copied here.
    pub bytes_moved: u64,
    /// Context tokens that were already here.
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
    /// Context tokens computed here.
    pub n_computed_tokens: u32,
}

/// A generation that has not ended yet.
struct Request {
    call: CallId,
    /// Set once it is in the scheduler.
    sequence_id: Option<SequenceId>,
    /// Set until the lease is released: who lends its KV.
    lender: Option<(Exporter, LeaseRef)>,
    /// Output tokens so far, those emitted before included.
    n_output: u32,
}

/// A decode node.
pub struct Node {
    config: NodeConfig,
    scheduler: Scheduler,
    pool: BlockPool,
    /// Generations between `Generate` and their last event.
    requests: BTreeMap<RequestId, Request>,
    sequences: BTreeMap<SequenceId, RequestId>,
    generate_calls: BTreeMap<CallId, RequestId>,
    /// Imports that wait for blocks or for slices.
    imports: BTreeMap<RequestId, Importing>,
    /// Imports that have no reservation yet, in arrival order.
    reserving: VecDeque<RequestId>,
    claims: BTreeMap<ClaimId, RequestId>,
    /// Pulls in flight, those of given-up imports too: each owns its target blocks until it ends.
    pulls: BTreeMap<PullId, Pulling>,
    credits: Credits,
    /// The step in flight.
    step: Option<u64>,
    next_sequence: u64,
    next_claim: u64,
    next_pull: u64,
    next_renewal: Option<Timestamp>,
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
            requests: BTreeMap::new(),
            sequences: BTreeMap::new(),
            generate_calls: BTreeMap::new(),
            imports: BTreeMap::new(),
            reserving: VecDeque::new(),
            claims: BTreeMap::new(),
            pulls: BTreeMap::new(),
            credits: Credits::new(PULL_BYTES_MAX),
            step: None,
            next_sequence: 0,
            next_claim: 0,
            next_pull: 0,
            next_renewal: None,
            n_reports: 0,
            draining: false,
            effects: Vec::new(),
            config,
        }
    }

    /// Takes one event in.
    pub fn apply(&mut self, event: Event, now: Timestamp) -> Vec<Effect> {
        match event {
            Event::Generate { call, request, to } => self.submit(call, request, to, now),
            Event::Cancel { request_id, to } => self.cancel(request_id, to),
            Event::CallEnded { call } => self.end_call(call),
            Event::StepDone { step_id, result } => self.end_step(step_id, result),
            Event::LayersDone(_) => {}
            Event::Exporter { claim, event } => self.hear_exporter(claim, event, now),
            Event::ClaimEnded { claim } => self.lose_claim(claim),
            Event::PullDone { pull, result } => self.end_pull(pull, &result, now),
            Event::Renewed { exporter, gone } => self.hear_renewal(&exporter, &gone, now),
            Event::Drain => self.draining = true,
        }
        std::mem::take(&mut self.effects)
    }

    /// Does what time asks for: ends what is late, reserves for waiting imports, starts pulls, renews leases,
    /// starts the next step.
    pub fn maintain(&mut self, now: Timestamp) -> Vec<Effect> {
        self.expire_imports(now);
        self.reserve_waiting(now);
        self.start_pulls(now);
        self.renew_leases(now);
        self.start_step(now);
        std::mem::take(&mut self.effects)
    }

    /// When `maintain` has something to do even if nothing happens before.
    pub fn next_wakeup(&self) -> Option<Timestamp> {
        let imports = self.imports.values().map(Importing::deadline).min();
        [imports, self.next_renewal, self.step_deadline()]
            .into_iter()
            .flatten()
            .min()
    }

    /// When the scheduler has somebody to give up. While a step is in flight it waits for its end: to ask before
    /// would only turn the loop.
    fn step_deadline(&self) -> Option<Timestamp> {
        if self.step.is_some() {
            return None;
        }
        self.scheduler.next_deadline()
    }

    /// True when nothing is waiting, imported or computed.
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty()
            && self.step.is_none()
            && self.imports.is_empty()
            && self.pulls.is_empty()
            && self.pool.n_free() == self.config.n_blocks
    }

    /// True while something of an attempt is kept here, pulls in flight apart.
    pub fn holds(&self, request_id: RequestId) -> bool {
        self.requests.contains_key(&request_id) || self.imports.contains_key(&request_id)
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
            role: Role::Decode,
            sequence_number: self.n_reports,
            n_waiting: self.scheduler.n_waiting() + count(self.imports.len()),
            n_running: self.scheduler.n_running(),
            queued_tokens: self.scheduler.queued_tokens(),
            n_blocks: self.config.n_blocks,
            n_blocks_free: self.pool.n_free(),
            n_blocks_leased: 0,
            draining: self.draining,
        }
    }

    /// Tokens that were computed although their request had been given up: a step in flight goes on to its end.
    pub fn n_tokens_after_cancel(&self) -> u64 {
        self.scheduler.n_tokens_after_cancel()
    }

    /// Proves that every block, import and answer has an owner.
    ///
    /// # Errors
    /// Names what is wrong.
    pub fn audit(&self) -> Result<(), String> {
        self.pool.audit()?;
        self.scheduler.audit(&self.pool)?;
        self.audit_imports()?;
        if self.requests.len() != self.generate_calls.len() {
            return Err(format!(
                "{} requests but {} calls",
                self.requests.len(),
                self.generate_calls.len()
            ));
        }
        if self.requests.len() != self.sequences.len() + self.imports.len() {
            return Err(format!(
                "{} requests but {} sequences and {} imports",
                self.requests.len(),
                self.sequences.len(),
                self.imports.len()
            ));
        }
        for (request_id, request) in &self.requests {
            let computes = request
                .sequence_id
                .is_some_and(|id| self.sequences.get(&id) == Some(request_id));
            if computes == self.imports.contains_key(request_id) {
                return Err(format!("request {request_id} is in two places or in none"));
            }
            if self.generate_calls.get(&request.call) != Some(request_id) {
                return Err(format!("request {request_id} has nobody to answer to"));
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

    /// Sends to a generate stream.
    fn tell_router(&mut self, call: CallId, event: GenerateEvent) {
        self.effects.push(Effect::Generate { call, event });
    }
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
