//! The prefill core as lists of events. `Bench` answers what the loop's threads would answer; after every event
//! the node proves that nothing is lost.

use super::*;
use std::collections::VecDeque;
use tidemill_core::bounds::LEASE_TTL_US;
use tidemill_core::{
    Epoch, KvDtype, KvLayout, LayerGroupIdx, LogprobSpec, SamplingParams, SequenceSpec,
    StopConditions, TransportKind, block_hashes,
};
use tidemill_engine::executor::StepItemOutput;

const LIFE: Incarnation = Incarnation(0xA11);
const IMPORTER: Incarnation = Incarnation(0xDEC);
const ROUTER: CallId = CallId(1);
const CLAIM: CallId = CallId(50);
const REQUEST: RequestId = RequestId(7);
const T0: Timestamp = Timestamp(1_000_000);
const VOCAB_SIZE: u32 = 100;

struct Bench {
    node: Node,
    now: Timestamp,
    steps: VecDeque<StepPlan>,
    digests: VecDeque<(ReadId, Vec<SlicePlace>)>,
    heard: Vec<Effect>,
}

fn facts() -> ModelFacts {
    let mut layout = KvLayout::new([3; 32], 4, 1, 8, KvDtype::F32).expect("small");
    layout.group_layers = 2;
    ModelFacts {
        vocab_size: VOCAB_SIZE,
        context_length: 512,
        layout,
    }
}

fn bench_of(n_blocks: u32, max_batch_tokens: u32) -> Bench {
    let facts = facts();
    let mut scheduler = SchedulerConfig::for_model(&facts);
    scheduler.max_batch_tokens = max_batch_tokens;
    scheduler.max_waiting = 4;
    let mut n_drawn = 900;
    let node = Node::new(NodeConfig {
        node_id: NodeId::new("prefill-0").expect("valid"),
        incarnation: LIFE,
        facts,
        n_blocks,
        scheduler,
        control_address: "local:prefill-0".into(),
        endpoints: vec![Endpoint {
            transport: TransportKind::Local,
            address: "prefill-0".into(),
        }],
        draw_capability: Box::new(move || {
            n_drawn += 1;
            Capability(n_drawn)
        }),
    });
    Bench {
        node,
        now: T0,
        steps: VecDeque::new(),
        digests: VecDeque::new(),
        heard: Vec::new(),
    }
}

fn fresh() -> Bench {
    bench_of(32, 512)
}

fn spec(id: RequestId, n_prompt: u32, max_tokens: u32) -> SequenceSpec {
    let prompt: Vec<u32> = (0..n_prompt).map(|i| (i * 7 + 1) % VOCAB_SIZE).collect();
    SequenceSpec {
        request_id: id,
        block_hashes: block_hashes(&facts().layout.model_fingerprint, "", &prompt),
        prompt,
        emitted: Vec::new(),
        namespace: String::new(),
        sampling: SamplingParams::greedy(),
        stop: StopConditions {
            max_tokens,
            min_tokens: 0,
            stop_token_ids: vec![99],
        },
        logprobs: LogprobSpec::default(),
        deadline: T0.plus_us(3_600_000_000),
        traceparent: String::new(),
    }
}

fn compute(plan: &StepPlan, token: u32) -> StepOutput {
    let item = |item: &tidemill_engine::executor::StepItem| StepItemOutput {
        sequence_id: item.sequence_id,
        sampled: item.sample.as_ref().map(|sample| SampledToken {
            token,
            output_idx: sample.output_idx,
            logprob: None,
            top: Vec::new(),
            logits_digest: None,
        }),
        prompt_logprobs: Vec::new(),
        failure: None,
    };
    StepOutput {
        step_id: plan.step_id,
        items: plan.items.iter().map(item).collect(),
    }
}

impl Bench {
    fn apply(&mut self, event: Event) {
        let effects = self.node.apply(event, self.now);
        self.keep(effects);
    }

    fn maintain(&mut self) {
        let effects = self.node.maintain(self.now);
        self.keep(effects);
    }

    fn keep(&mut self, effects: Vec<Effect>) {
        self.node.audit().expect("nothing is lost");
        for effect in effects {
            match effect {
                Effect::RunStep(plan) => self.steps.push_back(plan),
                Effect::Digest { job, places } => self.digests.push_back((job, places)),
                other => self.heard.push(other),
            }
        }
    }

    fn submit(&mut self, call: CallId, spec: SequenceSpec) {
        let request = PrefillRequest { spec };
        self.apply(Event::Prefill {
            call,
            request,
            to: LIFE,
        });
        self.maintain();
    }

    /// Lets the step in flight end with this token.
    fn end_step(&mut self, token: u32) {
        let plan = self.steps.pop_front().expect("a step in flight");
        let result = Ok(compute(&plan, token));
        let step_id = plan.step_id;
        self.apply(Event::StepDone { step_id, result });
        self.maintain();
    }

    fn end_digests(&mut self) {
        while let Some((job, places)) = self.digests.pop_front() {
            let digests = places
                .iter()
                .map(|place| (place.slice, digest_of(place.slice)))
                .collect();
            self.apply(Event::Digested { job, digests });
        }
    }

    fn take_heard(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.heard)
    }

    fn handle(&self) -> KvHandle {
        let mut handles = self.heard.iter().filter_map(|effect| match effect {
            Effect::Prefill {
                event: PrefillEvent::Handle(handle),
                ..
            } => Some(handle.clone()),
            _ => None,
        });
        handles.next_back().expect("a handle was told")
    }

    fn first_tokens(&self) -> Vec<FirstToken> {
        let firsts = self.heard.iter().filter_map(|effect| match effect {
            Effect::Prefill {
                event: PrefillEvent::FirstToken(first),
                ..
            } => Some(first.clone()),
            _ => None,
        });
        firsts.collect()
    }

    fn failures(&self) -> Vec<(CallId, FailureCode)> {
        let failures = self.heard.iter().filter_map(|effect| match effect {
            Effect::Prefill {
                call,
                event: PrefillEvent::Failed(failure),
            }
            | Effect::Export {
                call,
                event: ExportEvent::Failed(failure),
            } => Some((*call, failure.code)),
            _ => None,
        });
        failures.collect()
    }

    fn claim(&mut self, call: CallId, handle: &KvHandle, importer: Incarnation, epoch: Epoch) {
        let claim = Claim {
            request_id: handle.request_id,
            capability: handle.capability,
            epoch,
            importer: NodeId::new("decode-0").expect("valid"),
            importer_incarnation: importer,
            layout_fingerprint: facts().layout.fingerprint(),
            deadline: self.now.plus_us(60_000_000),
        };
        self.apply(Event::Claim {
            call,
            claim,
            to: LIFE,
        });
    }

    fn read(&mut self, handle: &KvHandle, epoch: Epoch, importer: Incarnation, slices: Vec<Slice>) {
        let ask = ReadAsk {
            request_id: handle.request_id,
            capability: handle.capability,
            epoch,
            importer,
            slices,
        };
        self.apply(Event::ReadAsked {
            call: CallId(70),
            ask,
        });
    }

    fn last_grant(&self) -> Result<ReadGrant, Failure> {
        let mut decisions = self.heard.iter().filter_map(|effect| match effect {
            Effect::ReadDecided { result, .. } => Some(result.clone()),
            _ => None,
        });
        decisions.next_back().expect("a read was decided")
    }

    /// A complete, claimed lease of 40 tokens.
    fn lend(&mut self) -> KvHandle {
        self.submit(ROUTER, spec(REQUEST, 40, 8));
        let handle = self.handle();
        self.claim(CLAIM, &handle, IMPORTER, handle.epoch);
        self.end_step(5);
        self.end_digests();
        handle
    }

    fn cancel(&mut self, request_id: RequestId) {
        self.apply(Event::Cancel {
            request_id,
            to: LIFE,
        });
        self.maintain();
    }

    fn assert_idle(&mut self) {
        self.maintain();
        assert!(self.steps.is_empty(), "no step is in flight");
        assert!(self.node.is_idle(), "everything was given back");
    }
}

fn digest_of(slice: Slice) -> Digest {
    Digest(u64::from(slice.ordinal) * 1000 + u64::from(slice.group.0))
}

fn lease_ref(handle: &KvHandle) -> LeaseRef {
    LeaseRef {
        request_id: handle.request_id,
        capability: handle.capability,
        epoch: handle.epoch,
    }
}

fn slice(ordinal: u32, group: u32) -> Slice {
    Slice {
        ordinal,
        group: LayerGroupIdx(group),
    }
}

#[test]
fn a_prompt_becomes_a_handle_a_first_token_and_a_lease_that_is_released() {
    let mut bench = fresh();
    let handle = bench.lend();
    let heard = bench.take_heard();
    let position = |wanted: &dyn Fn(&Effect) -> bool| heard.iter().position(wanted);
    let handle_at = position(&|e| {
        matches!(
            e,
            Effect::Prefill {
                event: PrefillEvent::Handle(_),
                ..
            }
        )
    });
    let first_at = position(&|e| {
        matches!(
            e,
            Effect::Prefill {
                event: PrefillEvent::FirstToken(_),
                ..
            }
        )
    });
    let complete_at = position(&|e| {
        matches!(
            e,
            Effect::Export {
                event: ExportEvent::Complete(_),
                ..
            }
        )
    });
    assert!(handle_at < first_at && first_at < complete_at && complete_at.is_some());
    assert_eq!(bench.node.load_report().n_blocks_leased, 3);
    assert!(!bench.node.is_idle());
    bench.apply(Event::Release {
        lease: lease_ref(&handle),
        to: LIFE,
    });
    bench.assert_idle();
}

#[test]
fn slices_are_announced_while_later_layers_and_chunks_compute() {
    let mut bench = bench_of(32, 32);
    bench.submit(ROUTER, spec(REQUEST, 40, 8));
    let handle = bench.handle();
    bench.claim(CLAIM, &handle, IMPORTER, handle.epoch);
    let sequence_id = bench.steps[0].items[0].sequence_id;
    assert!(bench.steps[0].items[0].report_progress);
    bench.take_heard();
    // The first layer group of the first chunk is final while the second still computes.
    bench.apply(Event::LayersDone(LayerProgress {
        sequence_id,
        group: LayerGroupIdx(0),
        n_tokens: 32,
    }));
    bench.end_digests();
    let announced = |bench: &mut Bench| -> Vec<Slice> {
        let heard = bench.take_heard();
        let slices = heard.iter().filter_map(|effect| match effect {
            Effect::Export {
                event: ExportEvent::SlicesFinal(slices),
                ..
            } => Some(slices.iter().map(|(slice, _)| *slice)),
            _ => None,
        });
        slices.flatten().collect()
    };
    assert_eq!(announced(&mut bench), [slice(0, 0), slice(1, 0)]);
    // The end of the step implies what was not said, and repeats nothing.
    bench.end_step(5);
    bench.end_digests();
    assert_eq!(announced(&mut bench), [slice(0, 1), slice(1, 1)]);
    bench.end_step(5);
    assert_eq!(bench.first_tokens().len(), 1, "TTFT waits for no digest");
    bench.end_digests();
    let complete = bench.heard.iter().any(|effect| {
        matches!(
            effect,
            Effect::Export {
                event: ExportEvent::Complete(_),
                ..
            }
        )
    });
    assert!(complete);
    bench.cancel(REQUEST);
    bench.assert_idle();
}

#[test]
fn nobody_is_given_a_handle_when_the_first_token_ends_the_request() {
    for max_tokens in [0, 1] {
        let mut bench = fresh();
        bench.submit(ROUTER, spec(REQUEST, 20, max_tokens));
        assert!(!bench.steps[0].items[0].report_progress);
        bench.end_step(5);
        let firsts = bench.first_tokens();
        assert_eq!(firsts[0].token.is_some(), max_tokens == 1);
        assert_eq!(firsts[0].finish, Some(FinishReason::Length));
        assert_eq!(bench.heard.len(), 1, "nothing but the end");
        bench.assert_idle();
    }
}

#[test]
fn a_stop_token_closes_the_export() {
    let mut bench = fresh();
    bench.submit(ROUTER, spec(REQUEST, 20, 8));
    let handle = bench.handle();
    bench.claim(CLAIM, &handle, IMPORTER, handle.epoch);
    bench.end_step(99);
    bench.end_digests();
    assert_eq!(bench.first_tokens()[0].finish, Some(FinishReason::Stop));
    assert_eq!(bench.failures(), [(CLAIM, FailureCode::Gone)]);
    bench.assert_idle();
}

#[test]
fn a_cancel_frees_everything_in_every_state() {
    // Waiting behind another request's step.
    let mut waiting = bench_of(32, 32);
    waiting.submit(ROUTER, spec(RequestId(1), 200, 8));
    waiting.submit(CallId(2), spec(REQUEST, 40, 8));
    waiting.cancel(REQUEST);
    assert_eq!(waiting.failures(), [(CallId(2), FailureCode::Cancelled)]);
    waiting.cancel(RequestId(1));
    waiting.end_step(5);
    waiting.end_digests();
    waiting.assert_idle();

    // While its step is in flight: the blocks stay until it ends.
    let mut computing = fresh();
    computing.submit(ROUTER, spec(REQUEST, 40, 8));
    let handle = computing.handle();
    computing.claim(CLAIM, &handle, IMPORTER, handle.epoch);
    computing.cancel(REQUEST);
    assert!(!computing.node.is_idle());
    assert_eq!(computing.node.load_report().n_blocks_free, 29);
    computing.end_step(5);
    assert!(
        computing.first_tokens().is_empty(),
        "a cancelled one says no more"
    );
    computing.assert_idle();
    assert_eq!(
        computing.node.n_tokens_after_cancel(),
        40,
        "computed for nobody"
    );

    // While its digests are computed.
    let mut digested = fresh();
    digested.submit(ROUTER, spec(REQUEST, 40, 8));
    digested.end_step(5);
    digested.cancel(REQUEST);
    assert!(!digested.node.is_idle());
    digested.submit(CallId(9), spec(REQUEST, 40, 8));
    assert_eq!(
        digested.failures().last(),
        Some(&(CallId(9), FailureCode::InvalidRequest)),
        "its digests still name the id"
    );
    digested.end_digests();
    digested.assert_idle();

    // While it is lent, and again: idempotent.
    let mut lent = fresh();
    lent.lend();
    lent.cancel(REQUEST);
    lent.cancel(REQUEST);
    lent.cancel(RequestId(12345));
    lent.assert_idle();
}

#[test]
fn a_read_in_flight_outlives_the_cancel() {
    let mut bench = fresh();
    let handle = bench.lend();
    bench.read(
        &handle,
        handle.epoch,
        IMPORTER,
        vec![slice(0, 0), slice(0, 1), slice(2, 1)],
    );
    let grant = bench.last_grant().expect("a live lease");
    assert_eq!(grant.places.len(), 3);
    bench.cancel(REQUEST);
    assert_eq!(bench.node.load_report().n_blocks_free, 30);
    assert!(!bench.node.is_idle());
    bench.apply(Event::ReadEnded(grant.read));
    bench.assert_idle();
    // Told twice: nothing happens.
    bench.apply(Event::ReadEnded(grant.read));
    bench.assert_idle();
}

#[test]
fn forged_and_stale_rights_are_refused_alike() {
    let mut bench = fresh();
    let handle = bench.lend();
    let mut forged = handle.clone();
    forged.capability = Capability(1);
    let mut unknown = handle.clone();
    unknown.request_id = RequestId(99);
    for (wrong, epoch, importer) in [
        (&forged, handle.epoch, IMPORTER),
        (&unknown, handle.epoch, IMPORTER),
        (&handle, Epoch(9), IMPORTER),
        (&handle, handle.epoch, Incarnation(66)),
    ] {
        bench.read(wrong, epoch, importer, vec![slice(0, 0)]);
        assert_eq!(
            bench.last_grant().expect_err("no right").code,
            FailureCode::Gone
        );
        let stranger = CallId(77);
        bench.take_heard();
        bench.claim(stranger, wrong, importer, epoch);
        assert_eq!(bench.failures(), [(stranger, FailureCode::Gone)]);
        bench.apply(Event::Release {
            lease: LeaseRef {
                epoch,
                ..lease_ref(wrong)
            },
            to: Incarnation(4),
        });
    }
    bench.apply(Event::Release {
        lease: lease_ref(&forged),
        to: LIFE,
    });
    assert!(!bench.node.is_idle(), "nobody else ends a lease");
    bench.read(&handle, handle.epoch, IMPORTER, vec![slice(3, 0)]);
    assert_eq!(
        bench.last_grant().expect_err("no such block").code,
        FailureCode::InvalidRequest
    );
}

#[test]
fn another_life_is_answered_gone_and_changes_nothing() {
    let mut bench = fresh();
    let handle = bench.lend();
    bench.take_heard();
    let to = Incarnation(0xDEAD);
    bench.apply(Event::Prefill {
        call: CallId(2),
        request: PrefillRequest {
            spec: spec(RequestId(8), 20, 8),
        },
        to,
    });
    assert_eq!(bench.failures(), [(CallId(2), FailureCode::Gone)]);
    bench.apply(Event::Cancel {
        request_id: REQUEST,
        to,
    });
    bench.apply(Event::Release {
        lease: lease_ref(&handle),
        to,
    });
    bench.apply(Event::Renew {
        call: CallId(3),
        importer: IMPORTER,
        leases: vec![lease_ref(&handle)],
        to,
    });
    let renewed = Effect::Renewed {
        call: CallId(3),
        gone: vec![REQUEST],
        expires_at: T0,
    };
    assert_eq!(bench.heard.last(), Some(&renewed));
    bench.apply(Event::Rebind {
        call: CallId(4),
        lease: LeaseRef {
            epoch: Epoch(2),
            ..lease_ref(&handle)
        },
        to,
    });
    assert!(matches!(
        bench.heard.last(),
        Some(Effect::Rebound { result: Err(failure), .. }) if failure.code == FailureCode::Gone
    ));
    assert!(!bench.node.is_idle(), "the lease lives");
}

#[test]
fn a_lease_that_nobody_renews_ends_by_its_time() {
    let mut bench = fresh();
    let handle = bench.lend();
    assert_eq!(
        bench.node.next_wakeup(),
        Some(T0.plus_us(LEASE_TTL_US)),
        "before the deadline of any request"
    );
    bench.now = T0.plus_us(LEASE_TTL_US - 1);
    bench.apply(Event::Renew {
        call: CallId(3),
        importer: IMPORTER,
        leases: vec![lease_ref(&handle)],
        to: LIFE,
    });
    bench.now = T0.plus_us(2 * LEASE_TTL_US - 2);
    bench.maintain();
    assert!(!bench.node.is_idle());
    bench.now = T0.plus_us(2 * LEASE_TTL_US);
    bench.assert_idle();
}

#[test]
fn a_rebind_hands_the_lease_on_and_voids_the_former_claim() {
    let mut bench = fresh();
    bench.submit(ROUTER, spec(REQUEST, 40, 8));
    let handle = bench.handle();
    bench.claim(CLAIM, &handle, IMPORTER, handle.epoch);
    bench.take_heard();
    let next = Epoch(handle.epoch.0 + 1);
    bench.apply(Event::Rebind {
        call: CallId(4),
        lease: LeaseRef {
            epoch: next,
            ..lease_ref(&handle)
        },
        to: LIFE,
    });
    assert_eq!(bench.failures(), [(CLAIM, FailureCode::Gone)]);
    let second = Incarnation(0xDEC2);
    bench.claim(CallId(51), &handle, second, next);
    bench.end_step(5);
    bench.end_digests();
    bench.read(&handle, handle.epoch, IMPORTER, vec![slice(0, 0)]);
    assert!(bench.last_grant().is_err(), "the former importer is out");
    bench.read(&handle, next, second, vec![slice(0, 0)]);
    let grant = bench.last_grant().expect("the new one is in");
    bench.apply(Event::ReadEnded(grant.read));
    bench.cancel(REQUEST);
    bench.assert_idle();
}

#[test]
fn a_reader_that_leaves_before_the_first_token_cancels_and_an_importer_does_not() {
    let mut bench = fresh();
    bench.submit(ROUTER, spec(REQUEST, 40, 8));
    let handle = bench.handle();
    bench.claim(CLAIM, &handle, IMPORTER, handle.epoch);
    bench.apply(Event::CallEnded { call: CLAIM });
    assert!(bench.failures().is_empty());
    bench.apply(Event::CallEnded { call: ROUTER });
    bench.end_step(5);
    bench.assert_idle();

    // After the first token the stream has done its work: its end is no cancel.
    let mut lent = fresh();
    lent.lend();
    lent.apply(Event::CallEnded { call: ROUTER });
    assert_eq!(lent.node.load_report().n_blocks_leased, 3);
}

#[test]
fn a_cached_prefix_is_announced_before_anything_is_computed() {
    let mut bench = fresh();
    let handle = bench.lend();
    bench.apply(Event::Release {
        lease: lease_ref(&handle),
        to: LIFE,
    });
    bench.take_heard();
    bench.submit(ROUTER, spec(RequestId(8), 40, 8));
    assert_eq!(
        bench.steps[0].items[0].start_position, 32,
        "two blocks were cached"
    );
    assert_eq!(
        bench.digests.iter().map(|d| d.1.len()).sum::<usize>(),
        4,
        "two blocks of two groups"
    );
    bench.end_step(5);
    bench.end_digests();
    assert_eq!(bench.first_tokens()[0].n_cached_tokens, 32);
    assert_eq!(bench.first_tokens()[0].n_computed_tokens, 8);
    bench.cancel(RequestId(8));
    bench.assert_idle();
}

#[test]
fn whoever_loses_its_blocks_is_sent_elsewhere() {
    // 4 blocks; the older one needs them all in the end.
    let mut bench = bench_of(4, 32);
    bench.submit(ROUTER, spec(RequestId(1), 60, 8));
    let mut other = spec(REQUEST, 30, 8);
    other.prompt[0] = 50;
    other.block_hashes = block_hashes(&facts().layout.model_fingerprint, "", &other.prompt);
    bench.submit(CallId(2), other);
    for _ in 0..6 {
        if !bench.steps.is_empty() {
            bench.end_step(5);
            bench.end_digests();
        }
    }
    assert_eq!(bench.first_tokens().len(), 1, "the older one is through");
    bench.cancel(RequestId(1));
    while !bench.steps.is_empty() {
        bench.end_step(5);
        bench.end_digests();
    }
    // Either it waited its turn or it was told to go elsewhere; never a wrong handle.
    let gone_elsewhere = bench
        .failures()
        .contains(&(CallId(2), FailureCode::Overloaded));
    assert!(gone_elsewhere || bench.first_tokens().len() == 2);
    bench.cancel(REQUEST);
    bench.assert_idle();
}

#[test]
fn a_failed_step_fails_its_sequences_and_their_leases() {
    let mut bench = fresh();
    bench.submit(ROUTER, spec(REQUEST, 40, 8));
    let handle = bench.handle();
    bench.claim(CLAIM, &handle, IMPORTER, handle.epoch);
    let plan = bench.steps.pop_front().expect("a step");
    let step_id = plan.step_id;
    // A result that nobody asked for changes nothing.
    bench.apply(Event::StepDone {
        step_id: step_id + 10,
        result: Ok(StepOutput::default()),
    });
    assert!(bench.failures().is_empty());
    bench.apply(Event::StepDone {
        step_id,
        result: Err(Failure::new(FailureCode::Internal, "broken")),
    });
    assert_eq!(
        bench.failures(),
        [(CLAIM, FailureCode::Gone), (ROUTER, FailureCode::Internal)]
    );
    bench.assert_idle();
}

#[test]
fn bounds_and_duplicates_are_refused_by_name() {
    let mut bench = fresh();
    bench.submit(ROUTER, spec(REQUEST, 40, 8));
    bench.submit(CallId(2), spec(REQUEST, 40, 8));
    let mut wrong_hash = spec(RequestId(8), 40, 8);
    wrong_hash.block_hashes.pop();
    bench.submit(CallId(3), wrong_hash);
    let mut late = spec(RequestId(9), 40, 8);
    late.deadline = T0;
    bench.submit(CallId(4), late);
    bench.submit(CallId(5), spec(RequestId(10), 40, 600));
    assert_eq!(
        bench.failures(),
        [
            (CallId(2), FailureCode::InvalidRequest),
            (CallId(3), FailureCode::InvalidRequest),
            (CallId(4), FailureCode::DeadlineExceeded),
            (CallId(5), FailureCode::ContextLengthExceeded),
        ]
    );
    bench.take_heard();
    for idx in 0..5 {
        bench.apply(Event::Prefill {
            call: CallId(100 + idx),
            request: PrefillRequest {
                spec: spec(RequestId(u128::from(100 + idx)), 40, 8),
            },
            to: LIFE,
        });
    }
    assert_eq!(bench.failures(), [(CallId(104), FailureCode::Overloaded)]);
}

#[test]
fn a_drain_lets_work_finish_and_takes_none() {
    let mut bench = fresh();
    bench.submit(ROUTER, spec(REQUEST, 40, 8));
    bench.apply(Event::Drain);
    bench.submit(CallId(2), spec(RequestId(8), 40, 8));
    assert_eq!(bench.failures(), [(CallId(2), FailureCode::Draining)]);
    assert!(bench.node.is_draining() && bench.node.load_report().draining);
    let handle = bench.handle();
    bench.claim(CLAIM, &handle, IMPORTER, handle.epoch);
    bench.end_step(5);
    bench.end_digests();
    assert_eq!(bench.first_tokens().len(), 1);
    bench.apply(Event::Release {
        lease: lease_ref(&handle),
        to: LIFE,
    });
    bench.assert_idle();
}

#[test]
fn a_deadline_that_passes_ends_the_request() {
    let mut bench = bench_of(32, 32);
    bench.submit(ROUTER, spec(RequestId(1), 60, 8));
    let mut hasty = spec(REQUEST, 40, 8);
    hasty.deadline = T0.plus_us(1000);
    bench.submit(CallId(2), hasty);
    bench.now = T0.plus_us(1000);
    while !bench.steps.is_empty() {
        bench.end_step(5);
        bench.end_digests();
    }
    assert_eq!(
        bench.failures(),
        [(CallId(2), FailureCode::DeadlineExceeded)]
    );
    bench.cancel(RequestId(1));
    bench.assert_idle();
}
