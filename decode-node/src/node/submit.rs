//! Taking work in, and ending it from outside: submit, cancel, a reader that leaves.

use super::{Exporter, GenerateEvent, Node, Request, count};
use tidemill_core::planted::PlantedBug;
use tidemill_core::{
    BlockHash, CallId, Failure, FailureCode, GenerateRequest, Incarnation, KvHandle, RequestId,
    SequenceSpec, Timestamp,
};
use tidemill_engine::executor::SequenceId;
use tidemill_engine::intake;
use tidemill_engine::sequence::{FinishAfter, Sequence};
use tidemill_kv_transfer::export::LeaseRef;

impl Node {
    pub(super) fn submit(
        &mut self,
        call: CallId,
        request: GenerateRequest,
        to: Incarnation,
        now: Timestamp,
    ) {
        let taken = self.check(&request, to, now).and_then(|hashes| {
            let GenerateRequest { spec, handle } = request;
            match handle {
                Some(handle) => self.enqueue_import(call, spec, handle, hashes, now),
                None => self.enqueue_prefill(call, spec, hashes),
            }
        });
        if let Err(failure) = taken {
            self.tell_router(call, GenerateEvent::Failed(failure));
        }
    }

    fn check(
        &self,
        request: &GenerateRequest,
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
        let id = request.spec.request_id;
        // Pulls of a given-up import still name its id as the owner of blocks.
        if self.requests.contains_key(&id) || self.is_pulling(id) {
            return Err(Failure::new(
                FailureCode::InvalidRequest,
                format!("request id {id} is in use; every attempt needs a fresh one"),
            ));
        }
        let hashes = intake::check(&self.config.facts, &request.spec, now)?;
        if let Some(handle) = &request.handle {
            self.check_handle(handle, &request.spec, now)?;
        }
        Ok(hashes)
    }

    fn check_handle(
        &self,
        handle: &KvHandle,
        spec: &SequenceSpec,
        now: Timestamp,
    ) -> Result<(), Failure> {
        if handle.layout_fingerprint != self.config.facts.layout.fingerprint() {
            return Err(Failure::new(
                FailureCode::InvalidRequest,
                format!(
                    "handle.layout_fingerprint of node {} differs from this node's; both need the same \
                     model files, --kv-dtype and release",
                    handle.node_id
                ),
            ));
        }
        if handle.n_tokens as usize != spec.n_context() {
            return Err(Failure::new(
                FailureCode::InvalidRequest,
                format!(
                    "handle.n_tokens is {}; prompt and emitted have {} tokens",
                    handle.n_tokens,
                    spec.n_context()
                ),
            ));
        }
        if spec.stop.max_tokens as usize - spec.emitted.len() < 2 {
            return Err(Failure::new(
                FailureCode::InvalidRequest,
                format!(
                    "max_tokens is {} with {} emitted: the first token ends the request, which needs no \
                     decode node",
                    spec.stop.max_tokens,
                    spec.emitted.len()
                ),
            ));
        }
        if handle.expires_at <= now {
            return Err(Failure::new(
                FailureCode::Gone,
                format!("the lease at node {} has expired", handle.node_id),
            ));
        }
        Ok(())
    }

    fn enqueue_prefill(
        &mut self,
        call: CallId,
        spec: SequenceSpec,
        hashes: Vec<BlockHash>,
    ) -> Result<(), Failure> {
        let request_id = spec.request_id;
        let n_output = count(spec.emitted.len());
        let sequence_id = self.new_sequence();
        self.scheduler.submit(Sequence::new(
            sequence_id,
            spec,
            hashes,
            FinishAfter::Conditions,
        ))?;
        self.remember(request_id, call, None, n_output);
        self.attach_sequence(request_id, sequence_id);
        self.tell_router(call, GenerateEvent::Accepted);
        Ok(())
    }

    pub(super) fn remember(
        &mut self,
        request_id: RequestId,
        call: CallId,
        lender: Option<(Exporter, LeaseRef)>,
        n_output: u32,
    ) {
        self.generate_calls.insert(call, request_id);
        self.requests.insert(
            request_id,
            Request {
                call,
                sequence_id: None,
                lender,
                n_output,
            },
        );
    }

    pub(super) fn new_sequence(&mut self) -> SequenceId {
        self.next_sequence += 1;
        SequenceId(self.next_sequence)
    }

    pub(super) fn attach_sequence(&mut self, request_id: RequestId, sequence_id: SequenceId) {
        self.sequences.insert(sequence_id, request_id);
        let request = self.requests.get_mut(&request_id).expect("remembered");
        request.sequence_id = Some(sequence_id);
    }

    pub(super) fn cancel(&mut self, request_id: RequestId, to: Incarnation) {
        // An unknown or ended id, or another life's: nothing to do, and nothing to tell.
        if self.check_life(to).is_ok() {
            let cancelled = Failure::new(FailureCode::Cancelled, "cancelled by the router");
            self.fail_request(request_id, cancelled);
        }
    }

    /// A stream's reader leaving is a cancel.
    pub(super) fn end_call(&mut self, call: CallId) {
        if let Some(&request_id) = self.generate_calls.get(&call)
            && !PlantedBug::ReaderLossIgnored.is_on()
        {
            let left = Failure::new(FailureCode::Cancelled, "the stream's reader has left");
            self.fail_request(request_id, left);
        }
    }

    /// Ends an unfinished generation, in whatever state; a no-op when there is none.
    pub(super) fn fail_request(&mut self, request_id: RequestId, failure: Failure) {
        let Some(request) = self.forget_request(request_id) else {
            return;
        };
        self.drop_import(request_id);
        if let Some(sequence_id) = request.sequence_id {
            self.scheduler.cancel(&mut self.pool, sequence_id);
        }
        self.tell_router(request.call, GenerateEvent::Failed(failure));
    }

    /// Takes a request out of every table; its import and its sequence are left to the caller.
    pub(super) fn forget_request(&mut self, request_id: RequestId) -> Option<Request> {
        let request = self.requests.remove(&request_id)?;
        self.generate_calls.remove(&request.call);
        if let Some(sequence_id) = request.sequence_id {
            self.sequences.remove(&sequence_id);
        }
        Some(request)
    }
}
