//! The promises, checked after every step.
//!
//! A request ends exactly once and waits for somebody until then; every block of every pool has owners; whatever waits
//! has a deadline; only the present life under the present epoch acts; and when the faults are over, every pool is
//! idle again. What clients hear is checked in `answers`, what nodes keep in `left`, what they find in `sharing`.

use crate::coverage::FaultKind;
use crate::network::Process;
use crate::occurrence::Occurrence;
use crate::world::World;
use tidemill_core::{CallId, Epoch, Incarnation, RequestId};

impl World {
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
        if is_open && !self.router.has_calls(request_idx) {
            self.violate(format!("request {request_idx} waits for nobody"));
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

    /// A fault has met every open request that has called both ends of a link.
    pub(crate) fn note_link(&mut self, fault: FaultKind, (a, b): (Process, Process)) {
        for request in self.requests.iter().filter(|request| !request.is_over()) {
            let uses = |end| end == Process::Router || request.touched.contains(&end);
            if let Some(phase) = request.phase.filter(|_| uses(a) && uses(b)) {
                self.outcome.coverage.note(fault, phase);
            }
        }
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
