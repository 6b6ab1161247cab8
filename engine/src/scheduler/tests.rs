//! The scheduler with a simulated model: each rule by itself, then random storms against the reference.

mod storm;

use super::*;
use crate::executor::simulated::SimulatedExecutor;
use crate::executor::{Executor, NoProgress, StepOutput, StepPlan};
use crate::sequence::FinishAfter;
use tidemill_core::{
    KvDtype, KvLayout, LogprobSpec, RequestId, SamplingParams, SequenceSpec, StopConditions,
    TokenId, block_hashes,
};
use tidemill_kernels::memory::KvArena;

const VOCAB_SIZE: u32 = 48;
/// Added to the id of a prefill for the sequence that goes on with its blocks.
const HEIR: u64 = 1_000_000;
const IMPORT: Owner = Owner::Import(RequestId(1));
const FINGERPRINT: [u8; 32] = [5; 32];

fn layout() -> KvLayout {
    KvLayout::new(FINGERPRINT, 1, 1, 4, KvDtype::F16).expect("valid")
}

fn config() -> SchedulerConfig {
    let facts = ModelFacts {
        vocab_size: VOCAB_SIZE,
        context_length: 4096,
        layout: layout(),
    };
    SchedulerConfig {
        max_batch_tokens: 40,
        max_sequences: 4,
        max_waiting: 8,
        ..SchedulerConfig::for_model(&facts)
    }
}

fn prompt(seed: u32, n_tokens: u32) -> Vec<TokenId> {
    let token = |idx: u32| (seed * 31 + idx * (seed + 5) + idx / 7) % VOCAB_SIZE;
    (0..n_tokens).map(token).collect()
}

fn spec(prompt: Vec<TokenId>, max_tokens: u32) -> SequenceSpec {
    SequenceSpec {
        request_id: RequestId(1),
        block_hashes: block_hashes(&FINGERPRINT, "", &prompt),
        prompt,
        emitted: vec![],
        namespace: String::new(),
        sampling: SamplingParams {
            temperature: 1.0,
            seed: 11,
            ..SamplingParams::greedy()
        },
        stop: StopConditions {
            max_tokens,
            min_tokens: 0,
            stop_token_ids: vec![],
        },
        logprobs: LogprobSpec::default(),
        deadline: Timestamp(1_000),
        traceparent: String::new(),
    }
}

fn sequence(id: u64, spec: SequenceSpec) -> Sequence {
    let context: Vec<_> = spec.prompt.iter().chain(&spec.emitted).copied().collect();
    let hashes = block_hashes(&FINGERPRINT, &spec.namespace, &context);
    Sequence::new(SequenceId(id), spec, hashes, FinishAfter::Conditions)
}

/// A node in small: scheduler, pool and executor, audited after every move.
struct Bench {
    scheduler: Scheduler,
    pool: BlockPool,
    executor: SimulatedExecutor,
    now: Timestamp,
    tokens: BTreeMap<u64, Vec<TokenId>>,
    finished: BTreeMap<u64, Finished>,
    failed: BTreeMap<u64, Failure>,
    /// Ends after the first token, then goes on under another id, as if imported.
    prefills: BTreeMap<u64, SequenceSpec>,
    n_preempted: usize,
    n_prompt_logprobs: BTreeMap<u64, usize>,
}

impl Bench {
    fn new(config: SchedulerConfig, n_blocks: u32) -> Self {
        let arena = KvArena::new(&layout(), n_blocks).expect("small");
        Self {
            scheduler: Scheduler::new(config),
            pool: BlockPool::new(n_blocks),
            executor: SimulatedExecutor::new(arena, VOCAB_SIZE),
            now: Timestamp(0),
            tokens: BTreeMap::new(),
            finished: BTreeMap::new(),
            failed: BTreeMap::new(),
            prefills: BTreeMap::new(),
            n_preempted: 0,
            n_prompt_logprobs: BTreeMap::new(),
        }
    }

    fn submit(&mut self, id: u64, spec: SequenceSpec) {
        let queued = self.scheduler.submit(sequence(id, spec));
        queued.expect("the queue has room");
    }

    fn plan(&mut self) -> Option<StepPlan> {
        let (plan, events) = self.scheduler.plan(&mut self.pool, self.now);
        self.take(events);
        plan
    }

    fn complete(&mut self, result: Result<StepOutput, Failure>) {
        let events = self.scheduler.complete(&mut self.pool, result);
        self.take(events);
    }

    /// One whole step. False when there was nothing to compute.
    fn step(&mut self) -> bool {
        let Some(plan) = self.plan() else {
            return false;
        };
        let output = self.executor.step(&plan, &mut NoProgress);
        self.complete(output);
        true
    }

    fn run_until_idle(&mut self) {
        for _ in 0..10_000 {
            if !self.step() {
                break;
            }
        }
        self.assert_idle();
    }

    fn assert_idle(&self) {
        assert!(self.scheduler.is_idle(), "sequences are left");
        assert_eq!(self.pool.n_free(), self.pool.n_blocks(), "blocks are left");
        assert_eq!(self.scheduler.next_deadline(), None);
    }

    fn take(&mut self, events: Vec<SequenceEvent>) {
        for event in events {
            match event {
                SequenceEvent::Started { .. } => {}
                SequenceEvent::PromptLogprobs {
                    sequence_id,
                    logprobs,
                } => *self.n_prompt_logprobs.entry(sequence_id.0).or_default() += logprobs.len(),
                SequenceEvent::Token { sequence_id, token } => {
                    let tokens = self.tokens.entry(sequence_id.0).or_default();
                    tokens.push(token.token);
                }
                SequenceEvent::Finished(finished) => {
                    self.hand_over(&finished);
                    self.pool.release_all(Owner::Sequence(finished.sequence_id));
                    let former = self.finished.insert(finished.sequence_id.0, finished);
                    assert_eq!(former, None, "a sequence ends once");
                }
                SequenceEvent::Preempted { .. } => self.n_preempted += 1,
                SequenceEvent::Failed {
                    sequence_id,
                    failure,
                } => {
                    self.failed.insert(sequence_id.0, failure);
                }
            }
        }
        self.pool.audit().expect("the pool is sound");
        self.scheduler
            .audit(&self.pool)
            .expect("the scheduler is sound");
    }

    /// Computes a prompt and leaves its blocks with an import.
    fn compute_elsewhere(&mut self, asked: &SequenceSpec) -> (Vec<BlockIdx>, TokenId) {
        let made = spec(asked.prompt.clone(), 1);
        self.scheduler.submit(sequence(99, made)).expect("room");
        let plan = self.plan().expect("work");
        let output = self.executor.step(&plan, &mut NoProgress);
        let events = self.scheduler.complete(&mut self.pool, output);
        let Some(SequenceEvent::Finished(finished)) = events.last() else {
            panic!("one chunk is enough: {events:?}");
        };
        self.pool.transfer(Owner::Sequence(SequenceId(99)), IMPORT);
        let first = finished.last_token.as_ref().expect("one");
        (finished.blocks.clone(), first.token)
    }

    /// Lets an imported sequence join.
    fn join(&mut self, id: u64, asked: &SequenceSpec, blocks: Vec<BlockIdx>, first: TokenId) {
        self.pool.transfer(IMPORT, Owner::Sequence(SequenceId(id)));
        let ready = sequence(id, asked.clone()).with_kv(blocks, first);
        self.scheduler.submit_ready(ready);
    }

    /// What a decode node does with a prefill's result.
    fn hand_over(&mut self, finished: &Finished) {
        let id = finished.sequence_id;
        let Some(spec) = self.prefills.get(&id.0) else {
            return;
        };
        if finished.reason.is_some() {
            return;
        }
        let heir = id.0 + HEIR;
        let first = finished.last_token.as_ref().expect("it goes on");
        self.pool
            .transfer(Owner::Sequence(id), Owner::Sequence(SequenceId(heir)));
        let ready = sequence(heir, spec.clone()).with_kv(finished.blocks.clone(), first.token);
        self.scheduler.submit_ready(ready);
    }

    fn reference(&self, spec: &SequenceSpec, n_output: u32) -> Vec<TokenId> {
        self.executor
            .reference(&spec.prompt, &spec.sampling, n_output)
    }

    fn assert_output(&self, id: u64, spec: &SequenceSpec) {
        let expected = self.reference(spec, spec.stop.max_tokens);
        assert_eq!(self.tokens[&id], expected, "sequence {id}");
    }
}

#[test]
fn a_batch_gives_each_the_tokens_that_it_would_have_alone() {
    let mut bench = Bench::new(config(), 64);
    let specs: Vec<_> = (1..=6).map(|n| spec(prompt(n, n * 13), 4 + n)).collect();
    for (id, spec) in specs.iter().enumerate() {
        bench.submit(id as u64, spec.clone());
    }
    bench.run_until_idle();
    for (id, spec) in specs.iter().enumerate() {
        bench.assert_output(id as u64, spec);
        let finished = &bench.finished[&(id as u64)];
        assert_eq!(finished.reason, Some(FinishReason::Length));
        assert_eq!(finished.n_output_tokens, spec.stop.max_tokens);
        assert_eq!(
            finished.n_cached_tokens + finished.n_computed_tokens,
            spec.prompt.len() as u32
        );
    }
    assert_eq!(bench.n_preempted, 0);
}

#[test]
fn prompts_are_cut_to_the_budget_and_decoding_comes_first() {
    let mut bench = Bench::new(config(), 64);
    bench.submit(1, spec(prompt(1, 10), 20));
    assert!(bench.step());
    bench.submit(2, spec(prompt(2, 100), 2));
    let plan = bench.plan().expect("work");
    let shape: Vec<_> = plan
        .items
        .iter()
        .map(|item| (item.sequence_id.0, item.start_position, item.tokens.len()))
        .collect();
    assert_eq!(shape, [(1, 10, 1), (2, 0, 39)]);
    assert!(plan.items[1].sample.is_none());
    assert_eq!(plan.items[1].block_table.len(), 3);
    assert!(bench.plan().is_none(), "one step in flight");
    let output = bench.executor.step(&plan, &mut NoProgress);
    bench.complete(output);
    bench.run_until_idle();
}

#[test]
fn a_full_hit_computes_its_last_block_afresh() {
    let mut bench = Bench::new(config(), 64);
    let whole = spec(prompt(3, 48), 3);
    bench.submit(1, whole.clone());
    bench.run_until_idle();
    bench.submit(2, whole.clone());
    let plan = bench.plan().expect("work");
    assert_eq!(plan.items[0].start_position, 32);
    let fresh = plan.items[0].block_table[2];
    assert_eq!(bench.pool.n_owners_of(fresh), 1);
    let output = bench.executor.step(&plan, &mut NoProgress);
    bench.complete(output);
    bench.run_until_idle();
    assert_eq!(bench.finished[&2].n_cached_tokens, 32);
    assert_eq!(bench.finished[&2].n_computed_tokens, 16);
    bench.assert_output(2, &whole);
}

#[test]
fn decoded_tokens_are_found_again_in_the_next_turn() {
    let mut bench = Bench::new(config(), 64);
    let first = spec(prompt(4, 20), 30);
    bench.submit(1, first.clone());
    bench.run_until_idle();
    let mut turn = first.prompt.clone();
    turn.extend(&bench.tokens[&1]);
    turn.extend([1, 2, 3]);
    let second = spec(turn, 4);
    bench.submit(2, second.clone());
    bench.run_until_idle();
    assert_eq!(bench.finished[&2].n_cached_tokens, 48);
    bench.assert_output(2, &second);
    let mut other = spec(second.prompt.clone(), 4);
    other.namespace = "tenant".to_owned();
    other.block_hashes = block_hashes(&FINGERPRINT, "tenant", &other.prompt);
    bench.submit(3, other);
    bench.run_until_idle();
    assert_eq!(bench.finished[&3].n_cached_tokens, 0, "another namespace");
}

#[test]
fn a_block_is_cached_only_when_its_step_has_ended() {
    let mut bench = Bench::new(config(), 64);
    let shared = spec(prompt(5, 33), 2);
    bench.submit(1, shared.clone());
    bench.submit(2, shared.clone());
    let plan = bench.plan().expect("work");
    assert_eq!(bench.pool.n_cached(), 0);
    assert!(plan.items.iter().all(|item| item.start_position == 0));
    bench.complete(Err(Failure::new(FailureCode::Internal, "broken")));
    assert_eq!(bench.pool.n_cached(), 0);
    assert_eq!(bench.failed.len(), 2);
    bench.assert_idle();
}

#[test]
fn the_younger_gives_way_and_both_get_their_tokens() {
    let mut narrow = config();
    narrow.max_batch_tokens = 4;
    let mut bench = Bench::new(narrow, 5);
    let specs = [spec(prompt(1, 30), 40), spec(prompt(2, 17), 40)];
    bench.submit(0, specs[0].clone());
    bench.submit(1, specs[1].clone());
    let mut output_in_chunks = false;
    while let Some(plan) = bench.plan() {
        let mut younger = plan.items.iter().filter(|item| item.sequence_id.0 == 1);
        output_in_chunks |= younger.any(|item| item.start_position > 17 && item.tokens.len() > 1);
        let output = bench.executor.step(&plan, &mut NoProgress);
        bench.complete(output);
    }
    bench.assert_idle();
    assert!(bench.n_preempted > 0, "the pool is too small for both");
    assert!(bench.scheduler.n_preemptions() > 0);
    bench.assert_output(0, &specs[0]);
    bench.assert_output(1, &specs[1]);
    assert!(output_in_chunks, "computed again, output is context");
    assert!(bench.finished[&1].n_computed_tokens > 17);
}

#[test]
fn what_never_fits_fails_and_the_rest_goes_on() {
    let mut bench = Bench::new(config(), 4);
    bench.submit(1, spec(prompt(1, 65), 1));
    let growing = spec(prompt(2, 60), 10);
    bench.submit(2, growing.clone());
    let good = spec(prompt(3, 8), 3);
    bench.submit(3, good.clone());
    bench.run_until_idle();
    assert_eq!(bench.failed[&1].code, FailureCode::ContextLengthExceeded);
    assert!(bench.failed[&1].message.contains("5 KV blocks"));
    assert_eq!(bench.failed[&2].code, FailureCode::ContextLengthExceeded);
    assert_eq!(bench.tokens[&2], bench.reference(&growing, 5));
    bench.assert_output(3, &good);
}

#[test]
fn it_waits_while_others_hold_the_blocks() {
    let mut bench = Bench::new(config(), 4);
    let lease = Owner::Lease(RequestId(9));
    let held = [bench.pool.allocate(lease), bench.pool.allocate(lease)];
    assert!(held.iter().all(Option::is_some));
    let growing = spec(prompt(1, 31), 20);
    bench.submit(1, growing.clone());
    while bench.step() {}
    assert_eq!(bench.scheduler.n_running(), 1, "it keeps what it has");
    assert_eq!(bench.tokens[&1].len(), 2);
    bench.pool.release_all(lease);
    bench.run_until_idle();
    bench.assert_output(1, &growing);
}

#[test]
fn stop_tokens_and_resumed_output_count() {
    let mut bench = Bench::new(config(), 64);
    let mut asked = spec(prompt(6, 21), 30);
    let expected = bench.reference(&asked, 30);
    let stop = expected[7];
    let first = expected.iter().position(|&t| t == stop).expect("there") + 1;
    asked.stop.stop_token_ids = vec![stop];
    bench.submit(1, asked.clone());
    asked.emitted = expected[..first - 1].to_vec();
    bench.submit(2, asked.clone());
    asked.stop = StopConditions {
        max_tokens: 12,
        min_tokens: 0,
        stop_token_ids: vec![],
    };
    asked.emitted = expected[..9].to_vec();
    bench.submit(3, asked);
    bench.run_until_idle();
    assert_eq!(bench.tokens[&1], expected[..first]);
    assert_eq!(bench.finished[&1].reason, Some(FinishReason::Stop));
    assert_eq!(bench.tokens[&2], [stop]);
    assert_eq!(bench.finished[&2].n_output_tokens as usize, first);
    assert_eq!(bench.tokens[&3], expected[9..12]);
    assert_eq!(bench.finished[&3].reason, Some(FinishReason::Length));
}

#[test]
fn the_context_length_ends_generation() {
    let mut short = config();
    short.context_length = 20;
    let mut bench = Bench::new(short, 64);
    bench.submit(1, spec(prompt(1, 15), 100));
    bench.run_until_idle();
    assert_eq!(bench.tokens[&1].len(), 5);
    assert_eq!(bench.finished[&1].reason, Some(FinishReason::Length));
}

#[test]
fn a_prefill_ends_after_its_first_token_and_keeps_its_blocks() {
    let mut bench = Bench::new(config(), 64);
    let asked = spec(prompt(7, 50), 10);
    let hashes = asked.block_hashes.clone();
    let first = Sequence::new(
        SequenceId(1),
        asked.clone(),
        hashes,
        FinishAfter::FirstToken,
    );
    bench.scheduler.submit(first).expect("room");
    let Some(plan) = bench.plan() else {
        panic!("work")
    };
    let output = bench.executor.step(&plan, &mut NoProgress);
    bench.complete(output);
    let plan = bench.plan().expect("second chunk");
    let output = bench.executor.step(&plan, &mut NoProgress);
    let events = bench.scheduler.complete(&mut bench.pool, output);
    let Some(SequenceEvent::Finished(finished)) = events.last() else {
        panic!("it ends: {events:?}");
    };
    assert_eq!(finished.reason, None);
    let token = finished.last_token.as_ref().expect("one").token;
    assert_eq!([token], bench.reference(&asked, 1)[..]);
    assert_eq!(finished.blocks, plan.items[0].block_table);
    let (from, to) = (Owner::Sequence(SequenceId(1)), Owner::Lease(RequestId(1)));
    bench.pool.transfer(from, to);
    assert_eq!(bench.pool.blocks_of(to).len(), 4);
    assert_eq!(bench.pool.n_free(), 60);
}

#[test]
fn imported_kv_goes_on_where_it_stopped() {
    let mut bench = Bench::new(config(), 64);
    let asked = spec(prompt(8, 37), 9);
    let (blocks, first) = bench.compute_elsewhere(&asked);
    bench.join(2, &asked, blocks, first);
    assert_eq!(bench.scheduler.n_waiting(), 1);
    bench.run_until_idle();
    let expected = bench.reference(&asked, 9);
    assert_eq!(first, expected[0]);
    assert_eq!(bench.tokens[&2], expected[1..]);
    assert_eq!(bench.finished[&2].n_cached_tokens, 37);
    assert_eq!(bench.finished[&2].n_computed_tokens, 0);
}

#[test]
fn an_import_whose_first_token_stops_ends_at_once() {
    let mut bench = Bench::new(config(), 64);
    let mut asked = spec(prompt(8, 37), 9);
    let (blocks, first) = bench.compute_elsewhere(&asked);
    asked.stop.stop_token_ids = vec![first];
    bench.join(2, &asked, blocks, first);
    assert!(!bench.step(), "nothing is left to compute");
    assert_eq!(bench.finished[&2].reason, Some(FinishReason::Stop));
    bench.assert_idle();
}

#[test]
fn an_import_that_waits_for_a_place_gives_its_blocks_to_the_older() {
    let mut narrow = config();
    narrow.max_sequences = 1;
    let mut bench = Bench::new(narrow, 4);
    let import = spec(prompt(8, 20), 9);
    let (blocks, first) = bench.compute_elsewhere(&import);
    let older = spec(prompt(1, 20), 40);
    bench.submit(1, older.clone());
    assert!(bench.step());
    let mut asked = import.clone();
    asked.logprobs.prompt_top = Some(0);
    bench.join(2, &asked, blocks, first);
    bench.run_until_idle();
    assert_eq!(bench.n_preempted, 1);
    bench.assert_output(1, &older);
    assert_eq!(bench.tokens[&2], bench.reference(&import, 9)[1..]);
    assert!(bench.n_prompt_logprobs.is_empty(), "reported elsewhere");
}

#[test]
fn prompt_logprobs_come_once_and_without_the_cache() {
    let mut bench = Bench::new(config(), 64);
    let mut asked = spec(prompt(9, 90), 0);
    bench.submit(1, spec(asked.prompt.clone(), 1));
    bench.run_until_idle();
    asked.logprobs.prompt_top = Some(1);
    bench.submit(2, asked);
    bench.run_until_idle();
    assert_eq!(bench.n_prompt_logprobs[&2], 89);
    let finished = &bench.finished[&2];
    assert_eq!(
        (finished.n_cached_tokens, finished.n_computed_tokens),
        (0, 90)
    );
    assert_eq!(finished.last_token, None);
    assert_eq!(finished.reason, Some(FinishReason::Length));
    assert!(!bench.tokens.contains_key(&2));
}

#[test]
fn a_cancel_frees_at_once_or_when_the_step_has_ended() {
    let mut bench = Bench::new(config(), 64);
    bench.submit(1, spec(prompt(1, 60), 9));
    bench.submit(2, spec(prompt(2, 20), 9));
    let plan = bench.plan().expect("work");
    bench.scheduler.cancel(&mut bench.pool, SequenceId(2));
    bench.scheduler.cancel(&mut bench.pool, SequenceId(1));
    bench.scheduler.cancel(&mut bench.pool, SequenceId(1));
    bench.scheduler.cancel(&mut bench.pool, SequenceId(99));
    assert_eq!(bench.pool.n_free(), 60, "the step still writes there");
    assert_eq!(bench.scheduler.n_tokens_after_cancel(), 0);
    let output = bench.executor.step(&plan, &mut NoProgress);
    bench.complete(output);
    bench.assert_idle();
    let n_fed: usize = plan.items.iter().map(|item| item.tokens.len()).sum();
    assert_eq!(bench.scheduler.n_tokens_after_cancel(), n_fed as u64);
    assert!(bench.tokens.is_empty() && bench.failed.is_empty());
    bench.submit(3, spec(prompt(1, 20), 9));
    assert!(bench.step());
    bench.scheduler.cancel(&mut bench.pool, SequenceId(3));
    bench.assert_idle();
}

#[test]
fn deadlines_hold_in_the_queue_and_in_the_batch() {
    let mut bench = Bench::new(config(), 64);
    let mut late = spec(prompt(1, 10), 50);
    late.deadline = Timestamp(10);
    bench.submit(1, late);
    bench.submit(2, spec(prompt(2, 10), 5));
    assert_eq!(bench.scheduler.next_deadline(), Some(Timestamp(10)));
    assert!(bench.step());
    bench.now = Timestamp(10);
    bench.run_until_idle();
    assert_eq!(bench.failed[&1].code, FailureCode::DeadlineExceeded);
    assert_eq!(bench.tokens[&2].len(), 5);
}

#[test]
fn a_full_queue_is_an_answer() {
    let mut bench = Bench::new(config(), 64);
    for id in 0..8 {
        bench.submit(id, spec(prompt(1, 5), 1));
    }
    let refused = bench.scheduler.submit(sequence(8, spec(prompt(1, 5), 1)));
    let failure = refused.expect_err("max_waiting is 8");
    assert_eq!(failure.code, FailureCode::Overloaded);
    assert!(failure.message.contains('8'));
    bench.run_until_idle();
}

#[test]
fn a_bad_answer_of_the_executor_ends_only_what_it_touches() {
    let mut bench = Bench::new(config(), 64);
    let good = spec(prompt(2, 12), 4);
    bench.submit(1, spec(prompt(1, 12), 4));
    bench.submit(2, good.clone());
    bench.submit(3, spec(prompt(3, 12), 4));
    let plan = bench.plan().expect("work");
    let mut output = bench.executor.step(&plan, &mut NoProgress).expect("good");
    output.items[0].sampled = None;
    output.items[2].failure = Some(Failure::new(FailureCode::NumericFault, "NaN"));
    bench.complete(Ok(output));
    assert_eq!(bench.failed[&1].code, FailureCode::Internal);
    assert_eq!(bench.failed[&3].code, FailureCode::NumericFault);
    bench.run_until_idle();
    bench.assert_output(2, &good);

    bench.submit(4, good);
    let plan = bench.plan().expect("work");
    bench.complete(Ok(StepOutput {
        step_id: plan.step_id + 1,
        items: vec![],
    }));
    assert_eq!(bench.failed[&4].code, FailureCode::Internal);
    bench.assert_idle();
}

#[test]
fn a_configuration_is_held_against_its_bounds() {
    let mut bad = config();
    bad.max_batch_tokens = 0;
    let error = bad.check().expect_err("no token could be fed");
    assert_eq!(error.field, "max_batch_tokens");
    assert!(config().check().is_ok());
}

/// Every parameter that looks at what was given before.
fn with_whole_pipeline(mut spec: SequenceSpec) -> SequenceSpec {
    let bias = |token| tidemill_core::TokenBias { token, bias: 1.0 };
    spec.sampling = SamplingParams {
        top_k: 40,
        top_p: 0.97,
        min_p: 0.001,
        typical_p: 0.98,
        repetition_penalty: 1.3,
        presence_penalty: 0.4,
        frequency_penalty: 0.9,
        logit_bias: [2, 3, 5, 7].map(bias).into(),
        ..spec.sampling
    };
    spec
}

#[test]
fn penalties_go_on_at_every_position_of_a_resume_and_after_a_hand_over() {
    let asked = with_whole_pipeline(spec(prompt(8, 21), 24));
    let mut bench = Bench::new(config(), 64);
    let expected = bench.reference(&asked, 24);
    let plain = bench.reference(&spec(prompt(8, 21), 24), 24);
    assert_ne!(expected, plain, "the pipeline has to matter");
    for n_emitted in 0..24_usize {
        let mut resumed = asked.clone();
        resumed.emitted = expected[..n_emitted].to_vec();
        bench.submit(n_emitted as u64 + 1, resumed);
        bench.run_until_idle();
        assert_eq!(bench.tokens[&(n_emitted as u64 + 1)], expected[n_emitted..]);
    }
    // Prefill draws the first token, decode the others.
    let (blocks, _) = bench.compute_elsewhere(&asked);
    bench.join(50, &asked, blocks, expected[0]);
    bench.run_until_idle();
    assert_eq!(bench.tokens[&50], expected[1..]);
}

#[test]
fn stop_tokens_wait_for_min_tokens_whoever_resumes() {
    let mut asked = spec(prompt(6, 21), 30);
    let mut bench = Bench::new(config(), 64);
    let free = bench.reference(&asked, 30);
    asked.stop.stop_token_ids = vec![free[0], free[3], free[5]];
    bench.submit(1, asked.clone());
    asked.stop.min_tokens = 12;
    bench.submit(2, asked.clone());
    bench.run_until_idle();
    assert_eq!(bench.tokens[&1], [free[0]], "it stops at once without");
    let whole = bench.tokens[&2].clone();
    let is_stop = |token: &TokenId| asked.stop.stop_token_ids.contains(token);
    let n_free = whole.iter().position(is_stop).unwrap_or(whole.len());
    assert!(n_free >= 12, "a stop token came as number {n_free}");
    for n_emitted in 1..whole.len() {
        let mut resumed = asked.clone();
        resumed.emitted = whole[..n_emitted].to_vec();
        let id = 10 + n_emitted as u64;
        bench.submit(id, resumed);
        bench.run_until_idle();
        assert_eq!(bench.tokens[&id], whole[n_emitted..]);
        assert_eq!(bench.finished[&id].reason, bench.finished[&2].reason);
    }
}
