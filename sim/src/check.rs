//! The promises, checked after every step.
//!
//! A request ends exactly once; what its client was given is a prefix of the reference, and all of it when it ended
//! well; every block of every pool has owners; whatever waits has a deadline; and when the faults are over, every
//! pool is idle again.

use crate::coverage::{FaultKind, Phase};
use crate::message::{Notice, ToClient};
use crate::network::Process;
use crate::occurrence::Occurrence;
use crate::world::World;
use std::collections::BTreeSet;
use tidemill_core::{
    CallId, Epoch, FailureCode, FinishReason, Incarnation, RequestId, Timestamp, TokenId,
};
use tidemill_router::requests::{Answer, Job};

/// One request and what its client has seen.
pub(crate) struct Tracked {
    pub(crate) job: Job,
    /// What an undisturbed node gives.
    pub(crate) reference: Vec<TokenId>,
    /// Why it ends there.
    pub(crate) reason: FinishReason,
    pub(crate) n_emitted: usize,
    pub(crate) has_arrived: bool,
    pub(crate) client_left: bool,
    /// How often it has ended.
    pub(crate) n_ends: u32,
    /// Its router died, or was not there.
    pub(crate) is_lost: bool,
    pub(crate) phase: Option<Phase>,
    /// Nodes that were called for it.
    pub(crate) touched: BTreeSet<Process>,
    pub(crate) wake_at: Option<Timestamp>,
}

impl Tracked {
    pub(crate) fn new(job: Job, reference: Vec<TokenId>, reason: FinishReason) -> Self {
        Self {
            job,
            reference,
            reason,
            n_emitted: 0,
            has_arrived: false,
            client_left: false,
            n_ends: 0,
            is_lost: false,
            phase: None,
            touched: BTreeSet::new(),
            wake_at: None,
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.n_ends > 0 || self.is_lost
    }

    /// Its client has lost the router.
    pub(crate) fn lose(&mut self) {
        self.is_lost = true;
        self.phase = None;
    }

    pub(crate) fn touch(&mut self, process: Process) {
        self.touched.insert(process);
        if matches!(process, Process::Prefill(_)) {
            self.phase = Some(Phase::Queued);
        }
    }

    /// Moves the phase on by what the router hears.
    pub(crate) fn see(&mut self, message: &ToClient) {
        use tidemill_decode_node::node::GenerateEvent;
        use tidemill_prefill_node::node::PrefillEvent;
        self.phase = match message {
            ToClient::Prefill(PrefillEvent::Handle(_)) => Some(Phase::Offered),
            ToClient::Prefill(PrefillEvent::FirstToken(_)) => match self.phase {
                Some(Phase::Decoding) => Some(Phase::Decoding),
                _ => Some(Phase::FirstToken),
            },
            ToClient::Generate(GenerateEvent::Accepted) => match self.phase {
                Some(Phase::Offered) => Some(Phase::Importing),
                // It prefills by itself.
                None => Some(Phase::Decoding),
                other => other,
            },
            ToClient::Generate(GenerateEvent::KvReady(_)) => Some(Phase::Decoding),
            _ => self.phase,
        };
    }
}

impl World {
    pub(crate) fn check_answer(&mut self, request_idx: usize, answer: Answer) {
        let request = &mut self.requests[request_idx];
        if request.n_ends > 0 {
            return self.violate(format!("request {request_idx} got an answer after its end"));
        }
        match answer {
            Answer::Token(token) => {
                let expected = request.reference.get(request.n_emitted).copied();
                if token.output_idx as usize != request.n_emitted || expected != Some(token.token) {
                    let what = format!(
                        "request {request_idx}: output {} is {}, the reference has {expected:?}",
                        token.output_idx, token.token
                    );
                    return self.violate(what);
                }
                request.n_emitted += 1;
                self.outcome.n_tokens += 1;
            }
            Answer::Finished(finished) => {
                request.n_ends += 1;
                request.phase = None;
                let is_whole = request.n_emitted == request.reference.len()
                    && finished.n_output_tokens as usize == request.n_emitted
                    && finished.reason == request.reason;
                if !is_whole {
                    let what = format!(
                        "request {request_idx} ended well ({:?}) after {} of {} tokens",
                        finished.reason,
                        request.n_emitted,
                        request.reference.len()
                    );
                    return self.violate(what);
                }
                self.outcome.n_finished += 1;
            }
            Answer::Failed(failure) => {
                self.take_failure(request_idx, failure.code, &failure.message)
            }
            Answer::PromptLogprobs(_) => {
                self.violate("prompt log-probabilities that nobody asked for".into())
            }
        }
    }

    fn take_failure(&mut self, request_idx: usize, code: FailureCode, message: &str) {
        let now = self.now;
        let request = &mut self.requests[request_idx];
        request.n_ends += 1;
        request.phase = None;
        let is_late = request.job.deadline <= now;
        let is_right = match code {
            FailureCode::Cancelled => request.client_left,
            FailureCode::DeadlineExceeded => is_late,
            // Nothing of the load is invalid.
            FailureCode::InvalidRequest
            | FailureCode::ContextLengthExceeded
            | FailureCode::NumericFault => false,
            _ => true,
        };
        if !is_right {
            self.violate(format!(
                "request {request_idx} failed with {}: {message}",
                code.name()
            ));
        }
        if code == FailureCode::Cancelled {
            self.outcome.n_cancelled += 1;
        } else {
            *self.outcome.failures.entry(code.name()).or_default() += 1;
        }
    }

    /// After every event of a request.
    pub(crate) fn check_request(&mut self, request_idx: usize) {
        let request = &self.requests[request_idx];
        let is_open = self.router.open.contains_key(&request_idx);
        if is_open == (request.n_ends > 0) {
            let n_ends = request.n_ends;
            self.violate(format!(
                "request {request_idx} has ended {n_ends} times, and is open: {is_open}"
            ));
        }
        if is_open && self.requests[request_idx].wake_at.is_none() {
            self.violate(format!("request {request_idx} waits without a deadline"));
        }
    }

    /// After every step of a prefill node.
    pub(crate) fn check_prefill(&mut self, prefill_idx: usize) {
        let host = &self.prefills[prefill_idx];
        let Some(core) = &host.core else { return };
        let has_work = host.is_computing || host.n_digesting > 0;
        let waits = !core.is_idle()
            && core.next_wakeup().is_none()
            && !has_work
            && !self.is_lending(prefill_idx);
        let problem = core
            .audit()
            .err()
            .or_else(|| waits.then(|| "it waits without a deadline".to_owned()));
        if let Some(problem) = problem {
            self.violate(format!("prefill-{prefill_idx}: {problem}"));
        }
    }

    /// After every step of a decode node.
    pub(crate) fn check_decode(&mut self, decode_idx: usize) {
        let host = &self.decodes[decode_idx];
        let Some(core) = &host.core else { return };
        let waits = !core.is_idle()
            && core.next_wakeup().is_none()
            && !host.is_computing
            && !self.is_pulling(decode_idx);
        let problem = core
            .audit()
            .err()
            .or_else(|| waits.then(|| "it waits without a deadline".to_owned()));
        if let Some(problem) = problem {
            self.violate(format!("decode-{decode_idx}: {problem}"));
        }
    }

    /// Work, a release or a read was taken: only the present life may take it.
    pub(crate) fn check_life(&mut self, process: Process, to: Incarnation) {
        if self.incarnation_of(process) != Some(to) {
            self.violate(format!(
                "{process:?} acted on a message for another incarnation"
            ));
        }
    }

    /// A message about a lease changed something: it must name the present life and the present epoch.
    pub(crate) fn check_right(
        &mut self,
        process: Process,
        to: Incarnation,
        (request_id, epoch): (RequestId, Epoch),
    ) {
        self.check_life(process, to);
        if self
            .epochs
            .get(&request_id)
            .is_some_and(|present| epoch < *present)
        {
            self.violate(format!("{process:?} acted on a message of an old epoch"));
        }
    }

    /// A read was granted.
    pub(crate) fn check_granted(&mut self, call: CallId) {
        let Some(transfer) = self.transfers.get(&call) else {
            return;
        };
        let present = self.epochs.get(&transfer.request_id);
        if present.is_some_and(|present| transfer.epoch < *present) {
            self.violate("a read of an old epoch was granted".to_owned());
        }
    }

    /// A cancel was delivered: it ends everything in the life that it means, and nothing in another one.
    pub(crate) fn check_cancelled(
        &mut self,
        process: Process,
        to: Incarnation,
        (held, holds): (bool, bool),
    ) {
        let is_meant = self.incarnation_of(process) == Some(to);
        if is_meant && holds {
            self.violate(format!("{process:?} goes on after a cancel"));
        }
        if !is_meant && held && !holds {
            self.violate(format!(
                "{process:?} acted on a cancel for another incarnation"
            ));
        }
    }

    /// The reader of a decode node's stream is gone: so is the work.
    pub(crate) fn check_abandoned(&mut self, decode_idx: usize, call: CallId) {
        if let Some(request_id) = self.generating.remove(&call)
            && !self.generating.values().any(|other| *other == request_id)
            && self.decode_holds(decode_idx, request_id)
        {
            self.violate(format!(
                "decode-{decode_idx} goes on for a reader that has left"
            ));
        }
    }

    /// When faults and load are over and time has passed.
    pub(crate) fn check_settled(&mut self) {
        if self.violation.is_some() {
            return;
        }
        for request_idx in 0..self.requests.len() {
            let request = &self.requests[request_idx];
            if !request.is_over() {
                return self.violate(format!("request {request_idx} never ended"));
            }
        }
        if !self.router.open.is_empty() || self.router.membership.n_booked() > 0 {
            let (n_open, n_booked) = (self.router.open.len(), self.router.membership.n_booked());
            return self.violate(format!(
                "the router still has {n_open} requests and {n_booked} bookings"
            ));
        }
        for prefill_idx in 0..self.prefills.len() {
            if self.prefills[prefill_idx]
                .core
                .as_ref()
                .is_some_and(|core| !core.is_idle())
            {
                return self.violate(format!(
                    "prefill-{prefill_idx} is not idle long after the last fault"
                ));
            }
        }
        for decode_idx in 0..self.decodes.len() {
            if self.decodes[decode_idx]
                .core
                .as_ref()
                .is_some_and(|core| !core.is_idle())
            {
                return self.violate(format!(
                    "decode-{decode_idx} is not idle long after the last fault"
                ));
            }
        }
        if self.network.n_calls() > 0 {
            let n_calls = self.network.n_calls();
            self.violate(format!(
                "{n_calls} calls are still open long after the last fault"
            ));
        }
    }

    /// A fault has met the request of an attempt.
    pub(crate) fn note_attempt(&mut self, fault: FaultKind, request_id: RequestId) {
        if let Some(&request_idx) = self.attempts.get(&request_id)
            && let Some(phase) = self.requests[request_idx].phase
        {
            self.outcome.coverage.note(fault, phase);
        }
    }

    pub(crate) fn note_notice(&mut self, fault: FaultKind, notice: &Notice) {
        self.note_attempt(fault, notice.request_id());
    }

    /// A fault has met every open request that has called this process.
    pub(crate) fn note_process(&mut self, fault: FaultKind, process: Process) {
        for request in self
            .requests
            .iter()
            .filter(|request| request.touched.contains(&process))
        {
            if let Some(phase) = request.phase.filter(|_| !request.is_over()) {
                self.outcome.coverage.note(fault, phase);
            }
        }
    }

    /// Two runs of one seed are the same history: their fingerprints are equal.
    pub(crate) fn note_occurrence(&mut self, occurrence: &Occurrence) {
        let name = occurrence.name();
        if self.config.trace {
            self.trace(occurrence);
        }
        let mut hash = self.outcome.fingerprint ^ self.now.0;
        for byte in name.bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        self.outcome.fingerprint = hash;
    }

    #[expect(clippy::print_stderr, reason = "a trace is asked for by a person")]
    fn trace(&self, occurrence: &Occurrence) {
        let at_us = self.now.since_us(crate::world::BEGINNING);
        eprintln!("{at_us:>12} {}", occurrence.describe());
    }
}
