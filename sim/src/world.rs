//! One history: who lives, what is on its way, and the loop that lets it happen.
//!
//! `run` draws a deployment, a load and faults from the seed, lets everything happen in order of virtual time, checks
//! every invariant after each step, then ends all faults and waits until the pools are idle again.

use crate::answers::Tracked;
use crate::coverage::Coverage;
use crate::fault::Window;
use crate::host::{Host, StepWork};
use crate::left::{Leg, Place};
use crate::network::{End, Network, Process};
use crate::occurrence::Occurrence;
use crate::rng::Rng;
use crate::router_host::RouterHost;
use crate::schedule::Schedule;
use crate::transfer::Transfer;
use std::collections::BTreeMap;
use tidemill_core::{CallId, Epoch, KvLayout, RequestId, Timestamp};
use tidemill_decode_node::node as decode;
use tidemill_engine::executor::LayerProgress;
use tidemill_prefill_node::node as prefill;

/// Events after which a history counts as going in circles.
const EVENTS_MAX: u64 = 300_000;
/// How long after the last fault everything has to be idle again.
const SETTLE_US: u64 = 240_000_000;

/// What a history holds.
#[derive(Clone, Copy, Debug)]
pub struct SimConfig {
    /// Requests of clients.
    pub n_requests: usize,
    /// Faults of all kinds.
    pub n_faults: usize,
    /// Print every occurrence.
    pub trace: bool,
}

/// What a history gave.
#[derive(Clone, Default, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Which faults met which phases.
    pub coverage: Coverage,
    /// Occurrences.
    pub n_events: u64,
    /// Requests that the router took in.
    pub n_admitted: u64,
    /// Times that a client found no router, and came again.
    pub n_turned_away: u64,
    /// Requests that got every token of the reference.
    pub n_finished: u64,
    /// Requests that ended with an error, and what it said how often.
    pub failures: BTreeMap<&'static str, u64>,
    /// Requests whose client left.
    pub n_cancelled: u64,
    /// Requests whose router died after it had taken them in.
    pub n_lost: u64,
    /// Output tokens given.
    pub n_tokens: u64,
    /// Prompt log-probabilities given.
    pub n_prompt_logprobs: u64,
    /// What the router counted.
    pub notes: BTreeMap<&'static str, u64>,
    /// A hash over every occurrence: equal for equal seeds.
    pub fingerprint: u64,
}

/// A broken promise.
#[derive(Clone, Debug, thiserror::Error)]
#[error("seed {seed}, at {at_us} us, event {n_events}: {what}")]
pub struct Violation {
    /// The history.
    pub seed: u64,
    /// Virtual time since its beginning.
    pub at_us: u64,
    /// Events before it.
    pub n_events: u64,
    /// What does not hold.
    pub what: String,
}

/// Everything that exists.
pub(crate) struct World {
    pub(crate) config: SimConfig,
    pub(crate) rng: Rng,
    pub(crate) now: Timestamp,
    pub(crate) schedule: Schedule<Occurrence>,
    pub(crate) network: Network,
    pub(crate) layout: KvLayout,
    pub(crate) prefills: Vec<Host<prefill::Node>>,
    pub(crate) decodes: Vec<Host<decode::Node>>,
    pub(crate) router: RouterHost,
    pub(crate) requests: Vec<Tracked>,
    /// Which request an attempt belongs to.
    pub(crate) attempts: BTreeMap<RequestId, usize>,
    pub(crate) transfers: BTreeMap<CallId, Transfer>,
    pub(crate) claims: BTreeMap<CallId, decode::ClaimId>,
    pub(crate) renewals: BTreeMap<CallId, decode::Exporter>,
    /// The faults are over.
    pub(crate) is_settling: bool,
    /// While it is open questions are lost and streams break.
    pub(crate) drops: Window,
    /// While it is open questions are heard twice.
    pub(crate) doubles: Window,
    /// While it is open slices in flight arrive with one byte changed.
    pub(crate) corrupts: Window,
    /// Nodes that may hold something of an attempt.
    pub(crate) legs: BTreeMap<Place, Leg>,
    /// The attempt behind a call at a decode node.
    pub(crate) generating: BTreeMap<CallId, RequestId>,
    /// Rebinds on their way, and the epoch that counts since the last one that was granted.
    pub(crate) rebinding: BTreeMap<CallId, (RequestId, Epoch)>,
    pub(crate) epochs: BTreeMap<RequestId, Epoch>,
    pub(crate) outcome: Outcome,
    /// The first broken promise.
    pub(crate) violation: Option<String>,
}

/// Virtual histories begin here.
pub(crate) const BEGINNING: Timestamp = Timestamp(1_000_000_000);

/// Runs one history.
///
/// # Errors
/// The first broken promise, with the seed that replays it.
pub fn run(seed: u64, config: SimConfig) -> Result<Outcome, Violation> {
    let mut world = World::new(seed, config);
    world.plan_load_and_faults();
    world.turn_until(None);
    if world.violation.is_none() {
        world.end_faults();
        let end = world.now.plus_us(SETTLE_US);
        world.turn_until(Some(end));
        world.check_settled();
    }
    match world.violation {
        None => Ok(world.outcome),
        Some(what) => Err(Violation {
            seed,
            at_us: world.now.since_us(BEGINNING),
            n_events: world.outcome.n_events,
            what,
        }),
    }
}

impl World {
    /// Lets things happen until every request has ended (`None`) or until a point in time.
    fn turn_until(&mut self, end: Option<Timestamp>) {
        while self.violation.is_none() {
            if end.is_none() && self.requests.iter().all(|request| request.is_over()) {
                return;
            }
            let Some((at, occurrence)) = self.schedule.pop() else {
                return;
            };
            if end.is_some_and(|end| at > end) {
                return;
            }
            self.now = self.now.max(at);
            self.outcome.n_events += 1;
            if self.outcome.n_events > EVENTS_MAX {
                self.violate("the history goes in circles".to_owned());
                return;
            }
            self.happen(occurrence);
            let n_struck = self.network.take_struck();
            self.outcome.coverage.add_faults(n_struck);
        }
    }

    fn happen(&mut self, occurrence: Occurrence) {
        self.note_occurrence(&occurrence);
        let Some(occurrence) = self.hold_back(occurrence) else {
            return;
        };
        match occurrence {
            Occurrence::Arrive(request_idx) => self.arrive(request_idx),
            Occurrence::ClientLeaves(request_idx) => self.client_leaves(request_idx),
            Occurrence::ToServer(call, message) => self.reach_server(call, *message),
            Occurrence::ToClient(call, message) => self.reach_client(call, *message),
            Occurrence::ServerLoses(call, server) => self.server_loses(call, server),
            Occurrence::ClientLoses(call, client) => self.client_loses(call, client),
            Occurrence::HeardAgain(process, call, message) => {
                if self.is_running(process) {
                    self.hear(process, call, *message);
                }
            }
            Occurrence::Notice(process, notice) => self.take_notice(process, notice),
            Occurrence::CancelAgain(cancel) => self.try_cancel(cancel),
            Occurrence::MustBeGone(place) => self.check_gone(place),
            Occurrence::CheckSilence(request_idx, call) => self.check_silence(request_idx, call),
            Occurrence::Wake(end) if self.is_alive(end) => self.wake(end),
            Occurrence::WakeRequest(request_idx, at) => self.wake_request(request_idx, at),
            Occurrence::Layers(end, progress) if self.is_alive(end) => self.layers(end, progress),
            Occurrence::StepEnds(end, step_id, work) if self.is_alive(end) => {
                self.end_step(end, step_id, work);
            }
            Occurrence::Digest(end, job, places) if self.is_alive(end) => {
                self.digest(end, job, &places);
            }
            Occurrence::CopyOut(call, place_idx) => self.copy_out(call, place_idx),
            Occurrence::CopyIn(call, place_idx, bytes) => self.copy_in(call, place_idx, &bytes),
            Occurrence::LoadReport(end) if self.is_alive(end) => self.report_load(end.process),
            Occurrence::Describe(process) => self.describe(process),
            Occurrence::Fault(fault) => self.inflict(fault),
            Occurrence::Restart(process) => self.restart(process),
            Occurrence::Heal(a, b) => self.network.heal(a, b, self.now),
            // Of a life that is over.
            Occurrence::Wake(_)
            | Occurrence::Layers(..)
            | Occurrence::StepEnds(..)
            | Occurrence::Digest(..)
            | Occurrence::LoadReport(_) => {}
        }
    }

    /// Schedules something `delay_us` from now.
    pub(crate) fn after(&mut self, delay_us: u64, occurrence: Occurrence) {
        self.schedule.push(self.now.plus_us(delay_us), occurrence);
    }

    /// The first broken promise stays.
    pub(crate) fn violate(&mut self, what: String) {
        self.violation.get_or_insert(what);
    }

    /// The present life of a process.
    pub(crate) fn end_of(&self, process: Process) -> End {
        let life = match process {
            Process::Router => self.router.life,
            Process::Prefill(i) => self.prefills[i].life,
            Process::Decode(i) => self.decodes[i].life,
        };
        End { process, life }
    }

    /// True while this very life goes on.
    pub(crate) fn is_alive(&self, end: End) -> bool {
        self.end_of(end.process) == end && self.is_running(end.process)
    }

    pub(crate) fn is_running(&self, process: Process) -> bool {
        match process {
            Process::Router => self.router.is_up,
            Process::Prefill(i) => self.prefills[i].core.is_some(),
            Process::Decode(i) => self.decodes[i].core.is_some(),
        }
    }

    pub(crate) fn prefill_holds(&self, prefill_idx: usize, request_id: RequestId) -> bool {
        let core = self.prefills[prefill_idx].core.as_ref();
        core.is_some_and(|core| core.holds(request_id))
    }

    pub(crate) fn decode_holds(&self, decode_idx: usize, request_id: RequestId) -> bool {
        let core = self.decodes[decode_idx].core.as_ref();
        core.is_some_and(|core| core.holds(request_id))
    }

    pub(crate) fn incarnation_of(&self, process: Process) -> Option<tidemill_core::Incarnation> {
        match process {
            Process::Router => None,
            Process::Prefill(i) => self.prefills[i]
                .core
                .as_ref()
                .map(|_| self.prefills[i].incarnation),
            Process::Decode(i) => self.decodes[i]
                .core
                .as_ref()
                .map(|_| self.decodes[i].incarnation),
        }
    }

    // ---- Steps ------------------------------------------------------------------------------------------------

    fn wake(&mut self, end: End) {
        match end.process {
            Process::Prefill(i) => {
                self.prefills[i].wake_at = None;
                self.maintain_prefill(i);
            }
            Process::Decode(i) => {
                self.decodes[i].wake_at = None;
                self.maintain_decode(i);
            }
            Process::Router => {}
        }
    }

    fn layers(&mut self, end: End, progress: LayerProgress) {
        match end.process {
            Process::Prefill(i) => self.prefill_event(i, prefill::Event::LayersDone(progress)),
            Process::Decode(i) => self.decode_event(i, decode::Event::LayersDone(progress)),
            Process::Router => {}
        }
    }

    fn end_step(&mut self, end: End, step_id: u64, work: StepWork) {
        match end.process {
            Process::Prefill(i) => {
                let result = self.prefills[i].end_step(work);
                self.prefill_event(i, prefill::Event::StepDone { step_id, result });
            }
            Process::Decode(i) => {
                let result = self.decodes[i].end_step(work);
                self.decode_event(i, decode::Event::StepDone { step_id, result });
            }
            Process::Router => {}
        }
    }

    /// Schedules what a begun step reports and its end.
    pub(crate) fn schedule_step(&mut self, end: End, step_id: u64, begun: crate::host::BegunStep) {
        for kind in begun.spoiled_by {
            self.outcome.coverage.add_faults(1);
            self.note_process(kind, end.process);
        }
        let n_reports = begun.progress.len() as u64 + 1;
        for (report_idx, progress) in begun.progress.into_iter().enumerate() {
            let at = begun.duration_us * (report_idx as u64 + 1) / n_reports;
            self.after(at, Occurrence::Layers(end, progress));
        }
        let ends = Occurrence::StepEnds(end, step_id, begun.work);
        self.after(begun.duration_us, ends);
    }

    /// Wakes a node when its core asks for it.
    pub(crate) fn wake_node_at(&mut self, end: End, at: Option<Timestamp>) {
        let Some(at) = at.map(|at| at.max(self.now.plus_us(1))) else {
            return;
        };
        let wake_at = match end.process {
            Process::Prefill(i) => &mut self.prefills[i].wake_at,
            Process::Decode(i) => &mut self.decodes[i].wake_at,
            Process::Router => return,
        };
        if wake_at.is_none_or(|planned| at < planned) {
            *wake_at = Some(at);
            self.schedule.push(at, Occurrence::Wake(end));
        }
    }
}
