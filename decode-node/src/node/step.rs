//! Computing: start a step, take its result, and tell the router.

use super::{Effect, Finished, GenerateEvent, Node};
use tidemill_core::{Failure, SampledToken, Timestamp};
use tidemill_engine::block_pool::Owner;
use tidemill_engine::executor::{SequenceId, StepOutput};
use tidemill_engine::scheduler::{self, SequenceEvent};

impl Node {
    pub(super) fn start_step(&mut self, now: Timestamp) {
        if self.step.is_some() {
            return;
        }
        let (plan, events) = self.scheduler.plan(&mut self.pool, now);
        self.take_events(events);
        if let Some(plan) = plan {
            self.step = Some(plan.step_id);
            self.effects.push(Effect::RunStep(plan));
        }
    }

    pub(super) fn end_step(&mut self, step_id: u64, result: Result<StepOutput, Failure>) {
        if self.step.take_if(|step| *step == step_id).is_none() {
            return;
        }
        let events = self.scheduler.complete(&mut self.pool, result);
        self.take_events(events);
    }

    fn take_events(&mut self, events: Vec<SequenceEvent>) {
        for event in events {
            match event {
                SequenceEvent::Started { .. } | SequenceEvent::Preempted { .. } => {}
                SequenceEvent::PromptLogprobs {
                    sequence_id,
                    logprobs,
                } => self.tell_sequence(sequence_id, GenerateEvent::PromptLogprobs(logprobs)),
                SequenceEvent::Token { sequence_id, token } => self.take_token(sequence_id, token),
                SequenceEvent::Finished(finished) => self.finish(finished),
                SequenceEvent::Failed {
                    sequence_id,
                    failure,
                } => {
                    if let Some(&request_id) = self.sequences.get(&sequence_id) {
                        self.fail_request(request_id, failure);
                    }
                }
            }
        }
    }

    fn take_token(&mut self, sequence_id: SequenceId, token: SampledToken) {
        let Some(&request_id) = self.sequences.get(&sequence_id) else {
            return;
        };
        let request = self.requests.get_mut(&request_id).expect("audited pair");
        request.n_output = token.output_idx + 1;
        // From its first decoded token on this node can go on alone: the lender may forget.
        if let Some((exporter, lease)) = request.lender.take() {
            self.effects.push(Effect::Release { exporter, lease });
        }
        self.tell_sequence(sequence_id, GenerateEvent::Token(token));
    }

    fn finish(&mut self, finished: scheduler::Finished) {
        self.pool.release_all(Owner::Sequence(finished.sequence_id));
        let Some(&request_id) = self.sequences.get(&finished.sequence_id) else {
            return;
        };
        let request = self.forget_request(request_id).expect("audited pair");
        if let Some((exporter, lease)) = request.lender {
            self.effects.push(Effect::Release { exporter, lease });
        }
        let finished = Finished {
            reason: finished
                .reason
                .expect("a sequence that ends by its conditions names one"),
            n_output_tokens: finished.n_output_tokens,
            n_cached_tokens: finished.n_cached_tokens,
            n_computed_tokens: finished.n_computed_tokens,
        };
        self.tell_router(request.call, GenerateEvent::Finished(finished));
    }

    fn tell_sequence(&mut self, sequence_id: SequenceId, event: GenerateEvent) {
        if let Some(request_id) = self.sequences.get(&sequence_id) {
            let call = self.requests[request_id].call;
            self.tell_router(call, event);
        }
    }
}
