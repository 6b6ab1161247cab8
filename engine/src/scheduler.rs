//! What the next step computes, and what its result means.
//!
//! Continuous batching: a sequence joins and leaves between any two steps. Running sequences come first, one token
//! each; what is left of the token budget goes to prompts, in chunks, first come first served. Memory is
//! granted oldest first: a sequence that needs a block may take it from a younger one, which is then computed
//! again later, never from an older one. So the oldest always moves on, and there is no livelock. Nothing here
//! reads a clock, draws randomness or iterates in hash order: equal calls give equal plans.

mod complete;
mod plan;
#[cfg(test)]
mod tests;

use crate::block_pool::{BlockPool, Owner};
use crate::executor::{PromptLogprob, SequenceId};
use crate::intake::ModelFacts;
use crate::sequence::Sequence;
use std::collections::{BTreeMap, BTreeSet};
use tidemill_core::planted::PlantedBug;
use tidemill_core::{BlockIdx, Failure, FailureCode, FinishReason, SampledToken, Timestamp};

/// Bounds of a step and of the queue.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SchedulerConfig {
    /// Most tokens that one step feeds.
    pub max_batch_tokens: u32,
    /// Most sequences that run at once.
    pub max_sequences: u32,
    /// Most sequences that wait; one more is refused.
    pub max_waiting: u32,
    /// Most tokens in a sequence.
    pub context_length: u32,
    /// Positions in a block.
    pub block_tokens: u32,
    /// Identity of the weights: what decoded tokens are hashed under.
    pub model_fingerprint: [u8; 32],
}

/// Why a configuration was refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("scheduler: {field} is {value}; allowed is {bound}")]
pub struct SchedulerConfigError {
    /// The offending field.
    pub field: &'static str,
    /// What it was.
    pub value: u32,
    /// What it may be.
    pub bound: &'static str,
}

impl SchedulerConfig {
    /// The defaults for a model.
    pub fn for_model(facts: &ModelFacts) -> Self {
        Self {
            max_batch_tokens: 512,
            max_sequences: 64,
            max_waiting: 1024,
            context_length: facts.context_length,
            block_tokens: facts.layout.block_tokens,
            model_fingerprint: facts.layout.model_fingerprint,
        }
    }

    /// Checks every field against its bound.
    ///
    /// # Errors
    /// Names the first field that does not hold.
    pub fn check(&self) -> Result<(), SchedulerConfigError> {
        let within = |field, value: u32, max: u32, bound| {
            if value == 0 || value > max {
                return Err(SchedulerConfigError {
                    field,
                    value,
                    bound,
                });
            }
            Ok(())
        };
        within(
            "max_batch_tokens",
            self.max_batch_tokens,
            1 << 20,
            "1 to 1048576",
        )?;
        within("max_sequences", self.max_sequences, 65_536, "1 to 65536")?;
        within("max_waiting", self.max_waiting, 1 << 20, "1 to 1048576")?;
        within("context_length", self.context_length, u32::MAX, "1 or more")?;
        within("block_tokens", self.block_tokens, 256, "1 to 256")
    }
}

/// What has become of a sequence.
#[derive(Clone, PartialEq, Debug)]
pub enum SequenceEvent {
    /// It is in a step for the first time.
    Started {
        /// Whose.
        sequence_id: SequenceId,
        /// Context tokens that need not be computed.
        n_cached_tokens: u32,
    },
    /// For the next prompt tokens, from the second one on.
    PromptLogprobs {
        /// Whose.
        sequence_id: SequenceId,
        /// One entry for each token.
        logprobs: Vec<PromptLogprob>,
    },
    /// The next output token.
    Token {
        /// Whose.
        sequence_id: SequenceId,
        /// The token; its `output_idx` counts emitted ones too.
        token: SampledToken,
    },
    /// The positive end. The blocks still belong to `Owner::Sequence`: who takes this event transfers or releases
    /// them.
    Finished(Finished),
    /// It lost its blocks to an older one and waits to be computed again. Nothing of it is lost.
    Preempted {
        /// Whose.
        sequence_id: SequenceId,
    },
    /// The negative end. Its blocks have been released.
    Failed {
        /// Whose.
        sequence_id: SequenceId,
        /// Why.
        failure: Failure,
    },
}

/// The positive end of a sequence.
#[derive(Clone, PartialEq, Debug)]
pub struct Finished {
    /// Whose.
    pub sequence_id: SequenceId,
    /// Why it ended; `None` when it ended after its first token and could go on elsewhere.
    pub reason: Option<FinishReason>,
    /// The last output token, as reported by `Token` before; `None` when no token was asked for.
    pub last_token: Option<SampledToken>,
    /// Its blocks in the order of positions.
    pub blocks: Vec<BlockIdx>,
    /// Output tokens, those emitted before included.
    pub n_output_tokens: u32,
    /// Context tokens taken from the prefix cache (or imported).
    pub n_cached_tokens: u32,
    /// Context tokens computed here, those computed again after a preemption included.
    pub n_computed_tokens: u32,
}

/// Place in the order of arrival: the smaller, the older.
type Arrival = u64;

/// One sequence's part in the step in flight.
struct FlightItem {
    arrival: Arrival,
    sequence_id: SequenceId,
    n_tokens: usize,
    /// The `output_idx` of the token that is to be drawn.
    sampled_idx: Option<u32>,
    n_prompt_logprobs: usize,
}

/// The step in flight.
struct Flight {
    step_id: u64,
    items: Vec<FlightItem>,
}

/// All sequences of a node, from submission to their end.
pub struct Scheduler {
    config: SchedulerConfig,
    /// Have blocks and take part in steps.
    running: BTreeMap<Arrival, Sequence>,
    /// Have KV from elsewhere and wait for a place among the running.
    ready: BTreeMap<Arrival, Sequence>,
    /// Have no blocks: new ones and preempted ones.
    waiting: BTreeMap<Arrival, Sequence>,
    arrivals: BTreeMap<SequenceId, Arrival>,
    deadlines: BTreeSet<(Timestamp, SequenceId)>,
    flight: Option<Flight>,
    next_arrival: Arrival,
    next_step_id: u64,
    n_preemptions: u64,
    n_tokens_after_cancel: u64,
}

impl Scheduler {
    /// A scheduler with nothing to do.
    ///
    /// # Panics
    /// When `config.check()` fails: a process checks its configuration at the start.
    pub fn new(config: SchedulerConfig) -> Self {
        if let Err(error) = config.check() {
            panic!("the configuration was checked before: {error}");
        }
        Self {
            config,
            running: BTreeMap::new(),
            ready: BTreeMap::new(),
            waiting: BTreeMap::new(),
            arrivals: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            flight: None,
            next_arrival: 0,
            next_step_id: 0,
            n_preemptions: 0,
            n_tokens_after_cancel: 0,
        }
    }

    /// Queues a sequence of which nothing is computed.
    ///
    /// # Errors
    /// `Overloaded` when the queue is full.
    ///
    /// # Panics
    /// When its id is in use.
    pub fn submit(&mut self, sequence: Sequence) -> Result<(), Failure> {
        if self.waiting.len() >= self.config.max_waiting as usize {
            return Err(Failure::new(
                FailureCode::Overloaded,
                format!(
                    "{} sequences wait already; max_waiting is {}",
                    self.waiting.len(),
                    self.config.max_waiting
                ),
            ));
        }
        let arrival = self.register(&sequence);
        self.waiting.insert(arrival, sequence);
        Ok(())
    }

    /// Queues a sequence made by `Sequence::with_kv`. Never refused: the pool bounds how many hold blocks.
    ///
    /// # Panics
    /// When its id is in use.
    pub fn submit_ready(&mut self, sequence: Sequence) {
        let arrival = self.register(&sequence);
        self.ready.insert(arrival, sequence);
    }

    fn register(&mut self, sequence: &Sequence) -> Arrival {
        let arrival = self.next_arrival;
        self.next_arrival += 1;
        let former = self.arrivals.insert(sequence.id(), arrival);
        assert!(former.is_none(), "{:?} is in use", sequence.id());
        self.deadlines.insert((sequence.deadline(), sequence.id()));
        arrival
    }

    /// Gives a sequence up, in any state, without an event; a no-op when it has ended. Blocks that the step in
    /// flight uses are freed when it ends.
    pub fn cancel(&mut self, pool: &mut BlockPool, sequence_id: SequenceId) {
        let Some(&arrival) = self.arrivals.get(&sequence_id) else {
            return;
        };
        if self.is_in_flight(arrival) && !PlantedBug::StepOwnsNothing.is_on() {
            let sequence = self.running.get_mut(&arrival);
            sequence.expect("what is in flight is running").is_cancelled = true;
        } else {
            self.remove(arrival);
            pool.release_all(Owner::Sequence(sequence_id));
        }
    }

    fn is_in_flight(&self, arrival: Arrival) -> bool {
        let items = self.flight.iter().flat_map(|flight| &flight.items);
        items.into_iter().any(|item| item.arrival == arrival)
    }

    /// Takes a sequence out of every table.
    fn remove(&mut self, arrival: Arrival) -> Sequence {
        let sequence = self
            .running
            .remove(&arrival)
            .or_else(|| self.ready.remove(&arrival))
            .or_else(|| self.waiting.remove(&arrival))
            .expect("a registered sequence is in one of the queues");
        self.arrivals.remove(&sequence.id());
        self.deadlines.remove(&(sequence.deadline(), sequence.id()));
        sequence
    }

    /// Ends a sequence that is in no step: blocks freed, event made.
    fn fail(
        &mut self,
        pool: &mut BlockPool,
        arrival: Arrival,
        failure: Failure,
        events: &mut Vec<SequenceEvent>,
    ) {
        let sequence = self.remove(arrival);
        let sequence_id = sequence.id();
        pool.release_all(Owner::Sequence(sequence_id));
        if !sequence.is_cancelled {
            events.push(SequenceEvent::Failed {
                sequence_id,
                failure,
            });
        }
    }

    /// Names the content of full blocks that no step writes any more.
    fn offer_blocks(sequence: &mut Sequence, block_tokens: usize, pool: &mut BlockPool) {
        let n_full = sequence.n_computed() / block_tokens;
        while sequence.n_offered_blocks < n_full {
            let idx = sequence.n_offered_blocks;
            let Some(hash) = sequence.block_hash(idx, block_tokens) else {
                break;
            };
            pool.insert(hash, sequence.blocks[idx]);
            sequence.n_offered_blocks += 1;
        }
    }

    /// Sequences that wait for blocks or for a place.
    pub fn n_waiting(&self) -> u32 {
        count(self.waiting.len() + self.ready.len())
    }

    /// Sequences that take part in steps.
    pub fn n_running(&self) -> u32 {
        count(self.running.len())
    }

    /// Sequences that lost their blocks and wait to be computed again. While there are any, reserving blocks for
    /// newcomers would starve them.
    pub fn n_preempted(&self) -> u32 {
        count(self.waiting.values().filter(|s| s.was_started()).count())
    }

    /// Preemptions so far.
    pub fn n_preemptions(&self) -> u64 {
        self.n_preemptions
    }

    /// Tokens that steps in flight computed for sequences that had been cancelled meanwhile.
    pub fn n_tokens_after_cancel(&self) -> u64 {
        self.n_tokens_after_cancel
    }

    /// Context tokens that are queued and not yet computed.
    pub fn queued_tokens(&self) -> u64 {
        let chunked = self.running.values().filter(|s| !s.is_decoding());
        let pending = self.waiting.values().chain(chunked);
        pending.map(|sequence| sequence.n_pending() as u64).sum()
    }

    /// The earliest deadline: when `plan` has something to do even if nothing happens before.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// True when it holds no sequence.
    pub fn is_idle(&self) -> bool {
        self.arrivals.is_empty() && self.flight.is_none()
    }

    /// Proves that its tables and the pool agree.
    ///
    /// # Errors
    /// Names the first sequence that is wrong.
    pub fn audit(&self, pool: &BlockPool) -> Result<(), String> {
        let n_sequences = self.running.len() + self.ready.len() + self.waiting.len();
        if n_sequences != self.arrivals.len() || n_sequences != self.deadlines.len() {
            return Err(format!(
                "{n_sequences} sequences, {} arrivals, {} deadlines",
                self.arrivals.len(),
                self.deadlines.len()
            ));
        }
        let queues = [&self.running, &self.ready, &self.waiting];
        for (arrival, sequence) in queues.into_iter().flatten() {
            let id = sequence.id();
            if self.arrivals.get(&id) != Some(arrival) {
                return Err(format!("{id:?} has lost its arrival {arrival}"));
            }
            let mut table = sequence.blocks.clone();
            table.sort_unstable();
            if table != pool.blocks_of(Owner::Sequence(id)) {
                return Err(format!("{id:?} does not own exactly its block table"));
            }
            if table.len() * (self.config.block_tokens as usize) < sequence.n_computed() {
                return Err(format!(
                    "{id:?} has {} positions in {} blocks",
                    sequence.n_computed(),
                    table.len()
                ));
            }
        }
        let waiting_with_blocks = self.waiting.values().find(|s| !s.blocks.is_empty());
        if let Some(sequence) = waiting_with_blocks {
            return Err(format!("{:?} waits and holds blocks", sequence.id()));
        }
        Ok(())
    }
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
