//! Taking a step's result in: positions become computed, tokens become output, ends become events. A failure of
//! one row ends one sequence, a failure of the whole step ends those that were in it, and no other.

use super::{FlightItem, Scheduler, SequenceEvent};
use crate::block_pool::{BlockPool, Owner};
use crate::executor::{StepItemOutput, StepOutput};
use tidemill_core::{Failure, FailureCode, FinishReason};

impl Scheduler {
    /// Ends the step in flight.
    pub fn complete(
        &mut self,
        pool: &mut BlockPool,
        result: Result<StepOutput, Failure>,
    ) -> Vec<SequenceEvent> {
        let mut events = Vec::new();
        let Some(flight) = self.flight.take() else {
            return events;
        };
        let checked = result.and_then(|output| {
            let ids = output.items.iter().map(|item| item.sequence_id);
            let matches = output.step_id == flight.step_id
                && ids.eq(flight.items.iter().map(|item| item.sequence_id));
            if matches {
                return Ok(output.items);
            }
            Err(Failure::new(
                FailureCode::Internal,
                format!(
                    "the executor answered step {} with step {} and {} items; {} were planned",
                    flight.step_id,
                    output.step_id,
                    output.items.len(),
                    flight.items.len()
                ),
            ))
        });
        match checked {
            Ok(outputs) => {
                for (item, output) in flight.items.iter().zip(outputs) {
                    self.end_item(pool, item, output, &mut events);
                }
            }
            Err(failure) => {
                for item in &flight.items {
                    self.fail(pool, item.arrival, failure.clone(), &mut events);
                }
            }
        }
        events
    }

    fn end_item(
        &mut self,
        pool: &mut BlockPool,
        item: &FlightItem,
        output: StepItemOutput,
        events: &mut Vec<SequenceEvent>,
    ) {
        let sequence_id = item.sequence_id;
        let sequence = self
            .running
            .get_mut(&item.arrival)
            .expect("what is in flight is running");
        if sequence.is_cancelled {
            self.n_tokens_after_cancel += item.n_tokens as u64;
            self.remove(item.arrival);
            pool.release_all(Owner::Sequence(sequence_id));
            return;
        }
        if let Err(failure) = check_output(item, &output) {
            self.fail(pool, item.arrival, failure, events);
            return;
        }

        // Rows that an earlier computation has reported are not reported again.
        let first_row = sequence.n_computed();
        let n_known = sequence.n_prompt_logprobs.saturating_sub(first_row);
        let mut logprobs = output.prompt_logprobs;
        logprobs.drain(..n_known.min(logprobs.len()));
        if !logprobs.is_empty() {
            sequence.n_prompt_logprobs += logprobs.len();
            events.push(SequenceEvent::PromptLogprobs {
                sequence_id,
                logprobs,
            });
        }

        sequence.advance(item.n_tokens);
        Self::offer_blocks(sequence, self.config.block_tokens as usize, pool);
        if sequence.n_pending() > 0 {
            return;
        }
        let Some(token) = output.sampled else {
            // No token was wanted: the prompt alone was the task.
            let finished = self.finish(pool, item.arrival, Some(FinishReason::Length), None);
            events.push(SequenceEvent::Finished(finished));
            return;
        };
        sequence.append(token.token);
        let reason = sequence.finish_reason(self.config.context_length);
        let ends = reason.is_some() || sequence.finishes_after_first_token();
        events.push(SequenceEvent::Token {
            sequence_id,
            token: token.clone(),
        });
        if ends {
            let finished = self.finish(pool, item.arrival, reason, Some(token));
            events.push(SequenceEvent::Finished(finished));
        }
    }
}

/// An executor's answer is checked like a peer's: a wrong one ends its sequence, not the node.
fn check_output(item: &FlightItem, output: &StepItemOutput) -> Result<(), Failure> {
    if let Some(failure) = &output.failure {
        return Err(failure.clone());
    }
    let sampled_idx = output.sampled.as_ref().map(|token| token.output_idx);
    if sampled_idx == item.sampled_idx && output.prompt_logprobs.len() == item.n_prompt_logprobs {
        return Ok(());
    }
    Err(Failure::new(
        FailureCode::Internal,
        format!(
            "the executor drew output token {sampled_idx:?} with {} prompt log-probabilities; asked for were \
             {:?} and {}",
            output.prompt_logprobs.len(),
            item.sampled_idx,
            item.n_prompt_logprobs
        ),
    ))
}
