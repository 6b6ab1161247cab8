//! Choosing the next step: end what is late, give every running sequence its token, then fill the budget with
//! chunks of prompts. Blocks for a whole context are granted at once, when it is admitted, so a prompt never
//! stalls half-way for memory; only decoding grows, one block at a time.

use super::{Arrival, Finished, Flight, FlightItem, Scheduler, SequenceEvent, count};
use crate::block_pool::{BlockPool, Owner};
use crate::executor::{StepItem, StepPlan};
use crate::sequence::Sequence;
use tidemill_core::{Failure, FailureCode, Timestamp};

/// A plan in the making.
struct Round<'a> {
    pool: &'a mut BlockPool,
    budget: usize,
    items: Vec<StepItem>,
    flight: Vec<FlightItem>,
    events: Vec<SequenceEvent>,
    preempted: bool,
}

impl Scheduler {
    /// Plans the next step, and says what became of sequences meanwhile. No plan while a step is in flight, or
    /// when there is nothing to compute (or no memory to compute it in).
    pub fn plan(
        &mut self,
        pool: &mut BlockPool,
        now: Timestamp,
    ) -> (Option<StepPlan>, Vec<SequenceEvent>) {
        if self.flight.is_some() {
            return (None, Vec::new());
        }
        let mut round = Round {
            pool,
            budget: self.config.max_batch_tokens as usize,
            items: Vec::new(),
            flight: Vec::new(),
            events: Vec::new(),
            preempted: false,
        };
        self.expire(&mut round, now);
        self.admit_ready(&mut round);
        self.plan_decoding(&mut round);
        self.plan_chunks(&mut round);
        self.admit_waiting(&mut round);

        let Round {
            items,
            flight,
            events,
            ..
        } = round;
        if items.is_empty() {
            return (None, events);
        }
        self.next_step_id += 1;
        let step_id = self.next_step_id;
        self.flight = Some(Flight {
            step_id,
            items: flight,
        });
        (Some(StepPlan { step_id, items }), events)
    }

    fn expire(&mut self, round: &mut Round<'_>, now: Timestamp) {
        while let Some(&(deadline, sequence_id)) = self.deadlines.first() {
            if deadline > now {
                break;
            }
            let arrival = self.arrivals[&sequence_id];
            let failure = Failure::new(
                FailureCode::DeadlineExceeded,
                format!(
                    "the deadline passed {} ms ago, before the end of generation",
                    now.since_us(deadline) / 1000
                ),
            );
            self.fail(round.pool, arrival, failure, &mut round.events);
        }
    }

    /// Sequences with KV from elsewhere join before new ones: they hold memory already.
    fn admit_ready(&mut self, round: &mut Round<'_>) {
        while self.running.len() < self.config.max_sequences as usize {
            let Some((arrival, sequence)) = self.ready.pop_first() else {
                break;
            };
            round.events.push(SequenceEvent::Started {
                sequence_id: sequence.id(),
                n_cached_tokens: sequence.n_cached_tokens.unwrap_or(0),
            });
            let reason = sequence.finish_reason(self.config.context_length);
            self.running.insert(arrival, sequence);
            if reason.is_some() {
                // Its first token, drawn elsewhere, was its last.
                let finished = self.finish(round.pool, arrival, reason, None);
                round.events.push(SequenceEvent::Finished(finished));
            }
        }
    }

    fn plan_decoding(&mut self, round: &mut Round<'_>) {
        let decoding = self.running.iter().filter(|(_, s)| s.is_decoding());
        let arrivals: Vec<Arrival> = decoding.map(|(&arrival, _)| arrival).collect();
        for arrival in arrivals {
            if round.budget == 0 {
                break;
            }
            // It may have lost its blocks to an older one a moment ago.
            if self.running.contains_key(&arrival) && self.grow(round, arrival) {
                self.take_into_step(round, arrival, 1);
            }
        }
    }

    /// Makes sure that the next position has a block. False when the sequence has to wait or has failed.
    fn grow(&mut self, round: &mut Round<'_>, arrival: Arrival) -> bool {
        let sequence = &self.running[&arrival];
        let n_wanted = (sequence.n_computed() + 1).div_ceil(self.config.block_tokens as usize);
        let owner = Owner::Sequence(sequence.id());
        if n_wanted > round.pool.n_blocks() as usize {
            let failure = never_fits(n_wanted, round.pool);
            self.fail(round.pool, arrival, failure, &mut round.events);
            return false;
        }
        while self.running[&arrival].blocks.len() < n_wanted {
            if let Some(block) = round.pool.allocate(owner) {
                let sequence = self.running.get_mut(&arrival).expect("checked above");
                sequence.blocks.push(block);
            } else if !self.preempt_younger_than(round, arrival) {
                // The rest is held by older ones, leases or imports; all of these end by themselves.
                return false;
            }
        }
        true
    }

    /// Takes the blocks of the youngest sequence, if there is one younger than `arrival`.
    fn preempt_younger_than(&mut self, round: &mut Round<'_>, arrival: Arrival) -> bool {
        let youngest = [&self.running, &self.ready]
            .into_iter()
            .filter_map(|queue| queue.last_key_value())
            .map(|(&youngest, _)| youngest)
            .max();
        let Some(victim) = youngest.filter(|&youngest| youngest > arrival) else {
            return false;
        };
        let mut sequence = self
            .running
            .remove(&victim)
            .or_else(|| self.ready.remove(&victim))
            .expect("found there");
        let sequence_id = sequence.id();
        sequence.extend_hashes(&self.config.model_fingerprint);
        Self::offer_blocks(&mut sequence, self.config.block_tokens as usize, round.pool);
        sequence.forget_kv();
        round.pool.release_all(Owner::Sequence(sequence_id));
        self.waiting.insert(victim, sequence);
        self.n_preemptions += 1;
        round.preempted = true;
        round.events.push(SequenceEvent::Preempted { sequence_id });
        true
    }

    fn plan_chunks(&mut self, round: &mut Round<'_>) {
        let chunked = self.running.iter().filter(|(_, s)| !s.is_decoding());
        let pending: Vec<_> = chunked.map(|(&a, s)| (a, s.n_pending())).collect();
        for (arrival, n_pending) in pending {
            let n_tokens = n_pending.min(round.budget);
            if n_tokens == 0 {
                break;
            }
            self.take_into_step(round, arrival, n_tokens);
        }
    }

    /// First come first served: when the oldest does not fit, nobody behind it is looked at.
    fn admit_waiting(&mut self, round: &mut Round<'_>) {
        // What an older one has just taken from a younger one is not given back in the same breath.
        while !round.preempted
            && round.budget > 0
            && self.running.len() < self.config.max_sequences as usize
        {
            let Some((&arrival, sequence)) = self.waiting.first_key_value() else {
                break;
            };
            let n_wanted = sequence
                .n_tokens()
                .div_ceil(self.config.block_tokens as usize);
            if n_wanted > round.pool.n_blocks() as usize {
                let failure = never_fits(n_wanted, round.pool);
                self.fail(round.pool, arrival, failure, &mut round.events);
                continue;
            }
            if !self.admit(round, arrival, n_wanted) {
                break;
            }
            let n_tokens = self.running[&arrival].n_pending().min(round.budget);
            self.take_into_step(round, arrival, n_tokens);
        }
    }

    /// Grants all blocks of a context at once, cached ones first. False when they are not there.
    fn admit(&mut self, round: &mut Round<'_>, arrival: Arrival, n_wanted: usize) -> bool {
        let block_tokens = self.config.block_tokens as usize;
        let hashes = self.waiting[&arrival].reusable_hashes(block_tokens);
        let cached = round.pool.peek(&hashes);
        let n_taken = n_wanted - (cached.n_blocks - cached.n_unowned) as usize;
        // Leaves those that decode a block each, so that a newcomer is not preempted at once.
        let growing = self.running.values();
        let n_growing = growing
            .filter(|sequence| !sequence.finishes_after_first_token())
            .count();
        if n_taken + n_growing > round.pool.n_free() as usize {
            return false;
        }
        let mut sequence = self.waiting.remove(&arrival).expect("it is the first");
        let owner = Owner::Sequence(sequence.id());
        sequence.blocks = round.pool.look_up(&hashes, owner);
        let n_cached_blocks = sequence.blocks.len();
        while sequence.blocks.len() < n_wanted {
            let block = round.pool.allocate(owner);
            sequence.blocks.push(block.expect("counted above"));
        }
        if !sequence.was_started() {
            round.events.push(SequenceEvent::Started {
                sequence_id: sequence.id(),
                n_cached_tokens: count(n_cached_blocks * block_tokens),
            });
        }
        sequence.start_at(n_cached_blocks * block_tokens, n_cached_blocks);
        self.running.insert(arrival, sequence);
        true
    }

    fn take_into_step(&mut self, round: &mut Round<'_>, arrival: Arrival, n_tokens: usize) {
        let sequence = &self.running[&arrival];
        let item = step_item(sequence, n_tokens, self.config.block_tokens as usize);
        round.budget -= n_tokens;
        round.flight.push(FlightItem {
            arrival,
            sequence_id: item.sequence_id,
            n_tokens,
            sampled_idx: item.sample.as_ref().map(|sample| sample.output_idx),
            n_prompt_logprobs: item.prompt_logprobs.as_ref().map_or(0, |p| p.targets.len()),
        });
        round.items.push(item);
    }

    /// Takes a sequence out that has ended well. Its blocks stay its own.
    pub(super) fn finish(
        &mut self,
        pool: &mut BlockPool,
        arrival: Arrival,
        reason: Option<tidemill_core::FinishReason>,
        last_token: Option<tidemill_core::SampledToken>,
    ) -> Finished {
        let mut sequence = self.remove(arrival);
        sequence.extend_hashes(&self.config.model_fingerprint);
        Self::offer_blocks(&mut sequence, self.config.block_tokens as usize, pool);
        Finished {
            sequence_id: sequence.id(),
            reason,
            last_token,
            n_output_tokens: sequence.n_output(),
            n_cached_tokens: sequence.n_cached_tokens.unwrap_or(0),
            n_computed_tokens: sequence.n_computed_tokens,
            blocks: sequence.blocks,
        }
    }
}

fn step_item(sequence: &Sequence, n_tokens: usize, block_tokens: usize) -> StepItem {
    let end = sequence.n_computed() + n_tokens;
    let is_last = end == sequence.n_tokens();
    StepItem {
        sequence_id: sequence.id(),
        tokens: sequence.chunk(n_tokens),
        start_position: count(sequence.n_computed()),
        block_table: sequence.blocks[..end.div_ceil(block_tokens)].to_vec(),
        sample: is_last.then(|| sequence.sample_spec()).flatten(),
        prompt_logprobs: sequence.prompt_logprob_spec(n_tokens),
        report_progress: false,
    }
}

fn never_fits(n_wanted: usize, pool: &BlockPool) -> Failure {
    Failure::new(
        FailureCode::ContextLengthExceeded,
        format!(
            "the sequence needs {n_wanted} KV blocks; this node has {} in all (see --kv-bytes)",
            pool.n_blocks()
        ),
    )
}
