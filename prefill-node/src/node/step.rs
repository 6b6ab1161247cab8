//! Computing: start a step, take its result, and turn what has become final into digests to be announced.

use super::{Effect, FirstToken, Node, PrefillEvent};
use tidemill_core::kv_layout::SlicePlace;
use tidemill_core::{
    BlockIdx, Failure, FailureCode, KvHandle, LayerGroupIdx, RequestId, Timestamp,
};
use tidemill_engine::block_pool::Owner;
use tidemill_engine::executor::{LayerProgress, SequenceId, StepOutput};
use tidemill_engine::scheduler::{Finished, SequenceEvent};

/// What the node remembers about the step in flight.
pub(super) struct InFlight {
    pub(super) step_id: u64,
    /// Exported sequences of the step and the position at which each ends.
    exported: Vec<(SequenceId, u32)>,
}

impl Node {
    pub(super) fn start_step(&mut self, now: Timestamp) {
        if self.step.is_some() {
            return;
        }
        let (plan, events) = self.scheduler.plan(&mut self.pool, now);
        self.take_events(events, now);
        let Some(mut plan) = plan else { return };
        let mut exported = Vec::new();
        for item in &mut plan.items {
            let end = item.start_position + u32::try_from(item.tokens.len()).expect("bounded");
            if self.open_export(
                item.sequence_id,
                item.start_position,
                &item.block_table,
                now,
            ) {
                item.report_progress = true;
                exported.push((item.sequence_id, end));
            }
        }
        self.step = Some(InFlight {
            step_id: plan.step_id,
            exported,
        });
        self.effects.push(Effect::RunStep(plan));
    }

    /// Keeps the export of a scheduled sequence in step with its blocks; the first time, tells the router.
    /// False when the sequence is not exported.
    fn open_export(
        &mut self,
        sequence_id: SequenceId,
        n_final: u32,
        blocks: &[BlockIdx],
        now: Timestamp,
    ) -> bool {
        let Some(request_id) = self.sequences.get(&sequence_id).copied() else {
            return false;
        };
        let request = self.requests.get_mut(&request_id).expect("audited pair");
        if !request.wants_export {
            return false;
        }
        let (call, n_tokens, first) = (request.call, request.n_context, !request.started);
        request.started = true;
        if first {
            let capability = (self.config.draw_capability)();
            let opened = self.exports.open(request_id, capability, n_tokens, now);
            let handle = KvHandle {
                request_id,
                node_id: self.config.node_id.clone(),
                incarnation: self.config.incarnation,
                capability,
                epoch: opened.epoch,
                n_tokens,
                layout_fingerprint: self.config.facts.layout.fingerprint(),
                control_address: self.config.control_address.clone(),
                endpoints: self.config.endpoints.clone(),
                expires_at: opened.expires_at,
            };
            self.tell_router(call, PrefillEvent::Handle(handle));
        }
        self.exports.set_blocks(request_id, blocks);
        if first {
            // What the prefix cache had is final from the start.
            self.note_final(request_id, n_final);
        }
        true
    }

    /// Every layer group is final up to `n_tokens`.
    fn note_final(&mut self, request_id: RequestId, n_tokens: u32) {
        let mut places = Vec::new();
        for group in 0..self.config.facts.layout.n_groups() {
            places.extend(
                self.exports
                    .layers_done(request_id, LayerGroupIdx(group), n_tokens),
            );
        }
        self.digest(request_id, places);
    }

    pub(super) fn note_layers(&mut self, progress: LayerProgress) {
        // Only the step in flight reports; its sequence may have been cancelled meanwhile.
        if let Some(&request_id) = self.sequences.get(&progress.sequence_id) {
            let places: Vec<SlicePlace> =
                self.exports
                    .layers_done(request_id, progress.group, progress.n_tokens);
            self.digest(request_id, places);
        }
    }

    pub(super) fn end_step(
        &mut self,
        step_id: u64,
        result: Result<StepOutput, Failure>,
        now: Timestamp,
    ) {
        let Some(step) = self.step.take_if(|step| step.step_id == step_id) else {
            return;
        };
        if result.is_ok() {
            for (sequence_id, end) in step.exported {
                if let Some(&request_id) = self.sequences.get(&sequence_id) {
                    self.note_final(request_id, end);
                }
            }
        }
        let events = self.scheduler.complete(&mut self.pool, result);
        self.take_events(events, now);
    }

    fn take_events(&mut self, events: Vec<SequenceEvent>, now: Timestamp) {
        for event in events {
            match event {
                SequenceEvent::PromptLogprobs {
                    sequence_id,
                    logprobs,
                } => {
                    if let Some(request) = self.request_of(sequence_id) {
                        let call = request.call;
                        self.tell_router(call, PrefillEvent::PromptLogprobs(logprobs));
                    }
                }
                // The one token comes with the end.
                SequenceEvent::Token { .. } | SequenceEvent::Started { .. } => {}
                SequenceEvent::Finished(finished) => self.finish(finished, now),
                SequenceEvent::Preempted { sequence_id } => self.give_up_preempted(sequence_id),
                SequenceEvent::Failed {
                    sequence_id,
                    failure,
                } => self.fail_sequence(sequence_id, failure),
            }
        }
    }

    /// The first token goes out at once; the blocks go to the lease when there is more to decode.
    fn finish(&mut self, finished: Finished, now: Timestamp) {
        let owner = Owner::Sequence(finished.sequence_id);
        let Some(&request_id) = self.sequences.get(&finished.sequence_id) else {
            self.pool.release_all(owner);
            return;
        };
        let request = self.forget_request(request_id).expect("audited pair");
        let first = FirstToken {
            token: finished.last_token.clone(),
            n_cached_tokens: finished.n_cached_tokens,
            n_computed_tokens: finished.n_computed_tokens,
            finish: finished.reason,
        };
        self.tell_router(request.call, PrefillEvent::FirstToken(first));
        match finished.last_token {
            Some(token) if finished.reason.is_none() && self.exports.contains(request_id) => {
                self.pool.transfer(owner, Owner::Lease(request_id));
                for event in self.exports.complete(request_id, token, now) {
                    self.announce(request_id, event);
                }
            }
            _ => {
                self.pool.release_all(owner);
                self.end_lease(request_id, "the first token ended the request");
            }
        }
    }

    /// What was announced of a preempted sequence lies in blocks that it has lost: its importer cannot go on, and the
    /// router does better elsewhere. One that nobody imports is just computed again.
    fn give_up_preempted(&mut self, sequence_id: SequenceId) {
        let Some(&request_id) = self.sequences.get(&sequence_id) else {
            return;
        };
        if self.exports.contains(request_id) {
            let why = "an older request needed the KV blocks of this one; ask another node";
            self.fail_request(request_id, Failure::new(FailureCode::Overloaded, why));
        }
    }

    fn fail_sequence(&mut self, sequence_id: SequenceId, failure: Failure) {
        if let Some(&request_id) = self.sequences.get(&sequence_id) {
            self.fail_request(request_id, failure);
        }
    }

    fn request_of(&self, sequence_id: SequenceId) -> Option<&super::Request> {
        self.requests.get(self.sequences.get(&sequence_id)?)
    }
}
