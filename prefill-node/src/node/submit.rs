//! Taking work in, and ending it from outside: submit, cancel, a reader that leaves.

use super::{Node, PrefillEvent, Request};
use tidemill_core::planted::PlantedBug;
use tidemill_core::{
    BlockHash, CallId, Failure, FailureCode, Incarnation, PrefillRequest, RequestId, SequenceSpec,
    Timestamp,
};
use tidemill_engine::executor::SequenceId;
use tidemill_engine::intake;
use tidemill_engine::sequence::{FinishAfter, Sequence};

impl Node {
    pub(super) fn submit(
        &mut self,
        call: CallId,
        request: PrefillRequest,
        to: Incarnation,
        now: Timestamp,
    ) {
        let taken = self
            .check(&request.spec, to, now)
            .and_then(|hashes| self.enqueue(call, request.spec, hashes));
        if let Err(failure) = taken {
            self.tell_router(call, PrefillEvent::Failed(failure));
        }
    }

    fn check(
        &self,
        spec: &SequenceSpec,
        to: Incarnation,
        now: Timestamp,
    ) -> Result<Vec<BlockHash>, Failure> {
        self.check_life(to)?;
        if self.draining {
            return Err(Failure::new(
                FailureCode::Draining,
                format!("node {} is leaving; ask another", self.config.node_id),
            ));
        }
        let id = spec.request_id;
        // Digests of a given-up export still name its id.
        let is_digested = self.digest_jobs.values().any(|of| *of == id);
        if self.requests.contains_key(&id) || self.exports.contains(id) || is_digested {
            return Err(Failure::new(
                FailureCode::InvalidRequest,
                format!("request id {id} is in use; every attempt needs a fresh one"),
            ));
        }
        intake::check(&self.config.facts, spec, now)
    }

    fn enqueue(
        &mut self,
        call: CallId,
        spec: SequenceSpec,
        hashes: Vec<BlockHash>,
    ) -> Result<(), Failure> {
        let request_id = spec.request_id;
        let sequence_id = SequenceId(self.next_sequence);
        self.next_sequence += 1;
        let n_context = u32::try_from(spec.n_context()).expect("checked against the context");
        let n_left = spec.stop.max_tokens as usize - spec.emitted.len();
        self.scheduler.submit(Sequence::new(
            sequence_id,
            spec,
            hashes,
            FinishAfter::FirstToken,
        ))?;
        self.requests.insert(
            request_id,
            Request {
                call,
                sequence_id,
                n_context,
                // Nothing is left to decode after the first token: nobody will import.
                wants_export: n_left > 1,
                started: false,
            },
        );
        self.sequences.insert(sequence_id, request_id);
        self.prefill_calls.insert(call, request_id);
        Ok(())
    }

    pub(super) fn cancel(&mut self, request_id: RequestId, to: Incarnation) {
        // An unknown or ended id, or another life's: nothing to do, and nothing to tell.
        if self.check_life(to).is_err() || PlantedBug::CancelLost.is_on() {
            return;
        }
        let cancelled = Failure::new(FailureCode::Cancelled, "cancelled by the router");
        self.fail_request(request_id, cancelled);
        // Also when the prefill is over and only its lease lives.
        self.end_lease(request_id, "the request was cancelled by the router");
    }

    /// A prefill stream's reader leaving before the first token is a cancel; an importer's leaving is not: its
    /// lease lives until it is released or expires.
    pub(super) fn end_call(&mut self, call: CallId) {
        if let Some(&request_id) = self.prefill_calls.get(&call) {
            let left = Failure::new(FailureCode::Cancelled, "the stream's reader has left");
            self.fail_request(request_id, left);
        }
        self.claim_calls.retain(|_, claimed| *claimed != call);
    }

    /// Ends an unfinished prefill and its lease; a no-op when there is none.
    pub(super) fn fail_request(&mut self, request_id: RequestId, failure: Failure) {
        if let Some(request) = self.forget_request(request_id) {
            self.scheduler.cancel(&mut self.pool, request.sequence_id);
            self.end_lease(request_id, &failure.message);
            self.tell_router(request.call, PrefillEvent::Failed(failure));
        }
    }

    /// Takes a request out of every table; its sequence is left to the caller.
    pub(super) fn forget_request(&mut self, request_id: RequestId) -> Option<Request> {
        let request = self.requests.remove(&request_id)?;
        self.sequences.remove(&request.sequence_id);
        self.prefill_calls.remove(&request.call);
        Some(request)
    }
}
