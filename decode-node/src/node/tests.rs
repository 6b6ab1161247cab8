//! The decode core as lists of events. `Bench` answers what the loop's threads and an exporter would answer;
//! after every event the node proves that nothing is lost.

use super::*;
use tidemill_core::bounds::LEASE_TTL_US;
use tidemill_core::{
    Capability, Digest, Endpoint, Epoch, KvDtype, KvHandle, KvLayout, LayerGroupIdx, LogprobSpec,
    SamplingParams, SequenceSpec, Slice, StopConditions, TransportKind, block_hashes,
};
use tidemill_engine::executor::{StepItem, StepItemOutput};
use tidemill_kv_transfer::export::{Complete, digest_of_digests};
use tidemill_kv_transfer::transport::{PullOutcome, TransferError};

const LIFE: Incarnation = Incarnation(0xDEC);
const EXPORTER: Incarnation = Incarnation(0xA11);
const ROUTER: CallId = CallId(1);
const REQUEST: RequestId = RequestId(7);
const T0: Timestamp = Timestamp(1_000_000);
const VOCAB_SIZE: u32 = 100;
const N_GROUPS: u32 = 2;

struct Bench {
    node: Node,
    now: Timestamp,
    steps: VecDeque<StepPlan>,
    claims: Vec<(ClaimId, Claim)>,
    pulls: VecDeque<(PullId, PullRequest)>,
    heard: Vec<Effect>,
}

fn facts() -> ModelFacts {
    let mut layout = KvLayout::new([3; 32], 4, 1, 8, KvDtype::F32).expect("small");
    layout.group_layers = 4 / N_GROUPS;
    ModelFacts {
        vocab_size: VOCAB_SIZE,
        context_length: 512,
        layout,
    }
}

fn bench_of(n_blocks: u32) -> Bench {
    let facts = facts();
    let mut scheduler = SchedulerConfig::for_model(&facts);
    scheduler.max_waiting = 4;
    let node = Node::new(NodeConfig {
        node_id: NodeId::new("decode-0").expect("valid"),
        incarnation: LIFE,
        facts,
        n_blocks,
        scheduler,
    });
    Bench {
        node,
        now: T0,
        steps: VecDeque::new(),
        claims: Vec::new(),
        pulls: VecDeque::new(),
        heard: Vec::new(),
    }
}

fn fresh() -> Bench {
    bench_of(32)
}

fn spec(id: RequestId, n_prompt: u32, max_tokens: u32) -> SequenceSpec {
    let salt = u32::try_from(id.0).expect("small") * 13;
    let prompt: Vec<u32> = (0..n_prompt)
        .map(|i| (i * 7 + salt) % (VOCAB_SIZE - 1))
        .collect();
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

fn handle_of(spec: &SequenceSpec) -> KvHandle {
    KvHandle {
        request_id: spec.request_id,
        node_id: NodeId::new("prefill-0").expect("valid"),
        incarnation: EXPORTER,
        capability: Capability(900),
        epoch: Epoch(1),
        n_tokens: count(spec.n_context()),
        layout_fingerprint: facts().layout.fingerprint(),
        control_address: "local:prefill-0".into(),
        endpoints: vec![Endpoint {
            transport: TransportKind::Local,
            address: "prefill-0".into(),
        }],
        expires_at: T0.plus_us(LEASE_TTL_US),
    }
}

fn token(token: u32, output_idx: u32) -> SampledToken {
    SampledToken {
        token,
        output_idx,
        logprob: None,
        top: Vec::new(),
        logits_digest: None,
    }
}

fn digest_of(slice: Slice) -> Digest {
    Digest(u64::from(slice.ordinal) * 1000 + u64::from(slice.group.0))
}

fn slices(n_tokens: u32) -> Vec<(Slice, Digest)> {
    let slices = facts().layout.slices_for(n_tokens);
    slices.map(|slice| (slice, digest_of(slice))).collect()
}

fn complete(n_tokens: u32, first_token: SampledToken) -> ExportEvent {
    ExportEvent::Complete(Complete {
        n_tokens,
        digest: digest_of_digests(slices(n_tokens).into_iter().map(|(_, digest)| digest)),
        first_token,
    })
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
                Effect::Claim {
                    claim,
                    ask,
                    exporter,
                    traceparent: _,
                } => {
                    assert_eq!(exporter.control_address, "local:prefill-0");
                    self.claims.push((claim, ask));
                }
                Effect::Pull { pull, ask } => self.pulls.push_back((pull, ask)),
                other => self.heard.push(other),
            }
        }
    }

    fn generate(&mut self, call: CallId, spec: SequenceSpec, handle: Option<KvHandle>) {
        self.apply(Event::Generate {
            call,
            request: GenerateRequest { spec, handle },
            to: LIFE,
        });
        self.maintain();
    }

    fn import(&mut self, call: CallId, spec: SequenceSpec) {
        let handle = handle_of(&spec);
        self.generate(call, spec, Some(handle));
    }

    fn exporter_says(&mut self, claim: ClaimId, event: ExportEvent) {
        self.apply(Event::Exporter { claim, event });
        self.maintain();
    }

    /// Everything that the exporter has to say about a claim.
    fn export(&mut self, claim: ClaimId, n_tokens: u32, first_token: SampledToken) {
        let expires_at = self.now.plus_us(LEASE_TTL_US);
        self.exporter_says(
            claim,
            ExportEvent::Claimed {
                n_tokens,
                expires_at,
            },
        );
        self.exporter_says(claim, ExportEvent::SlicesFinal(slices(n_tokens)));
        self.exporter_says(claim, complete(n_tokens, first_token));
        self.apply(Event::ClaimEnded { claim });
    }

    fn end_pull(&mut self, flip: u64) {
        let (pull, ask) = self.pulls.pop_front().expect("a pull in flight");
        let digests = ask
            .places
            .iter()
            .map(|place| (place.slice, Digest(digest_of(place.slice).0 ^ flip)))
            .collect();
        let result = Ok(PullOutcome {
            digests,
            n_bytes: 1,
        });
        self.apply(Event::PullDone { pull, result });
        self.maintain();
    }

    fn end_pulls(&mut self) {
        while !self.pulls.is_empty() {
            self.end_pull(0);
        }
    }

    fn end_step(&mut self, drawn: u32) {
        let plan = self.steps.pop_front().expect("a step in flight");
        let item = |item: &StepItem| StepItemOutput {
            sequence_id: item.sequence_id,
            sampled: item.sample.as_ref().map(|s| token(drawn, s.output_idx)),
            prompt_logprobs: Vec::new(),
            failure: None,
        };
        let output = StepOutput {
            step_id: plan.step_id,
            items: plan.items.iter().map(item).collect(),
        };
        self.apply(Event::StepDone {
            step_id: plan.step_id,
            result: Ok(output),
        });
        self.maintain();
    }

    fn told(&self, call: CallId) -> Vec<GenerateEvent> {
        let told = self.heard.iter().filter_map(|effect| match effect {
            Effect::Generate { call: to, event } if *to == call => Some(event.clone()),
            _ => None,
        });
        told.collect()
    }

    fn failure(&self, call: CallId) -> Option<FailureCode> {
        match self.told(call).last() {
            Some(GenerateEvent::Failed(failure)) => Some(failure.code),
            _ => None,
        }
    }

    fn releases(&self) -> usize {
        let is_release = |effect: &&Effect| matches!(effect, Effect::Release { .. });
        self.heard.iter().filter(is_release).count()
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
        assert!(self.node.is_idle(), "everything was given back");
    }
}

#[test]
fn an_imported_prompt_goes_on_after_its_first_token_and_gives_the_lease_back() {
    let mut bench = fresh();
    bench.import(ROUTER, spec(REQUEST, 40, 3));
    let (claim, ask) = bench.claims[0].clone();
    assert_eq!(ask.importer_incarnation, LIFE);
    assert_eq!(bench.told(ROUTER), [GenerateEvent::Accepted]);
    bench.export(claim, 40, token(5, 0));
    bench.end_pulls();
    let ready = GenerateEvent::KvReady(KvReady {
        first_token: token(5, 0),
        bytes_moved: 3 * facts().layout.block_bytes() as u64,
        n_local_tokens: 0,
    });
    assert_eq!(bench.told(ROUTER).last(), Some(&ready));
    let item = &bench.steps[0].items[0];
    assert_eq!((item.start_position, &item.tokens[..]), (40, &[5][..]));
    assert_eq!(item.block_table.len(), 3);
    assert_eq!(bench.releases(), 0, "until it is sure to go on");
    bench.end_step(6);
    assert_eq!(bench.releases(), 1);
    bench.end_step(7);
    let told = bench.told(ROUTER);
    assert_eq!(told[2], GenerateEvent::Token(token(6, 1)));
    assert_eq!(told[3], GenerateEvent::Token(token(7, 2)));
    let GenerateEvent::Finished(finished) = &told[4] else {
        panic!("expected the end, got {:?}", told[4])
    };
    assert_eq!(finished.reason, FinishReason::Length);
    assert_eq!(finished.n_output_tokens, 3);
    assert_eq!(bench.releases(), 1);
    bench.assert_idle();
}

#[test]
fn pulls_begin_with_the_first_announcement() {
    let mut bench = fresh();
    bench.import(ROUTER, spec(REQUEST, 40, 3));
    let claim = bench.claims[0].0;
    bench.exporter_says(claim, ExportEvent::SlicesFinal(slices(40)[..1].to_vec()));
    assert_eq!(bench.pulls.len(), 1);
    assert_eq!(bench.pulls[0].1.places.len(), 1);
    // What is announced meanwhile gathers into few pulls.
    for one in &slices(40)[1..] {
        bench.exporter_says(claim, ExportEvent::SlicesFinal(vec![*one]));
    }
    assert_eq!(bench.pulls.len(), 2);
    bench.end_pull(0);
    assert_eq!(bench.pulls.len(), 2);
    let n_places: usize = bench.pulls.iter().map(|(_, ask)| ask.places.len()).sum();
    assert_eq!(n_places, 5);
    bench.cancel(REQUEST);
    bench.end_pulls();
    bench.assert_idle();
}

#[test]
fn a_prefix_that_is_here_is_not_moved() {
    let mut bench = fresh();
    bench.import(ROUTER, spec(REQUEST, 40, 3));
    bench.export(bench.claims[0].0, 40, token(5, 0));
    bench.end_pulls();
    bench.end_step(6);
    bench.end_step(7);
    let mut again = spec(REQUEST, 40, 3);
    again.request_id = RequestId(8);
    bench.import(CallId(2), again);
    bench.export(bench.claims[1].0, 40, token(5, 0));
    let places = bench.pulls[0].1.places.clone();
    assert!(places.iter().all(|place| place.slice.ordinal == 2));
    bench.end_pulls();
    let told = bench.told(CallId(2));
    assert!(
        matches!(&told[1], GenerateEvent::KvReady(ready) if ready.n_local_tokens == 32),
        "{told:?}"
    );
    bench.cancel(RequestId(8));
    bench.end_step(6);
    bench.assert_idle();
}

#[test]
fn a_cancel_frees_everything_in_every_state() {
    // Waiting for blocks.
    let mut queued = bench_of(4);
    queued.import(ROUTER, spec(RequestId(1), 40, 3));
    queued.import(CallId(2), spec(REQUEST, 40, 3));
    assert_eq!(queued.claims.len(), 1);
    queued.cancel(REQUEST);
    assert_eq!(queued.failure(CallId(2)), Some(FailureCode::Cancelled));
    queued.cancel(RequestId(1));
    queued.assert_idle();

    // Claimed, nothing pulled yet.
    let mut claimed = fresh();
    claimed.import(ROUTER, spec(REQUEST, 40, 3));
    claimed.cancel(REQUEST);
    let drop = Effect::DropClaim(claimed.claims[0].0);
    assert!(claimed.heard.contains(&drop));
    claimed.assert_idle();

    // With a pull in flight: its blocks stay until it ends.
    let mut pulling = fresh();
    pulling.import(ROUTER, spec(REQUEST, 40, 3));
    pulling.exporter_says(
        pulling.claims[0].0,
        ExportEvent::SlicesFinal(slices(40)[..2].to_vec()),
    );
    pulling.cancel(REQUEST);
    assert_eq!(pulling.node.load_report().n_blocks_free, 31);
    assert!(!pulling.node.is_idle());
    pulling.import(CallId(2), spec(REQUEST, 40, 3));
    assert_eq!(
        pulling.failure(CallId(2)),
        Some(FailureCode::InvalidRequest),
        "the pull still names the id"
    );
    pulling.end_pull(0);
    pulling.assert_idle();

    // While its step is in flight.
    let mut computing = fresh();
    computing.import(ROUTER, spec(REQUEST, 40, 3));
    computing.export(computing.claims[0].0, 40, token(5, 0));
    computing.end_pulls();
    computing.apply(Event::CallEnded { call: ROUTER });
    assert!(!computing.node.is_idle());
    let n_told = computing.told(ROUTER).len();
    computing.end_step(6);
    assert_eq!(
        computing.told(ROUTER).len(),
        n_told,
        "no token after a cancel"
    );
    computing.assert_idle();
    assert_eq!(
        computing.node.n_tokens_after_cancel(),
        1,
        "computed for nobody"
    );

    // Ended, unknown, and of another life: nothing happens.
    computing.cancel(REQUEST);
    computing.cancel(RequestId(999));
    computing.import(ROUTER, spec(RequestId(9), 40, 3));
    computing.apply(Event::Cancel {
        request_id: RequestId(9),
        to: Incarnation(1),
    });
    assert!(!computing.node.is_idle());
}

#[test]
fn a_slice_that_arrives_wrong_is_fetched_again_three_times_at_most() {
    let mut bench = fresh();
    bench.import(ROUTER, spec(REQUEST, 10, 3));
    bench.export(bench.claims[0].0, 10, token(5, 0));
    bench.end_pull(1);
    assert_eq!(bench.failure(ROUTER), None);
    bench.end_pull(0);
    assert!(matches!(
        bench.told(ROUTER).last(),
        Some(GenerateEvent::KvReady(_))
    ));
    bench.cancel(REQUEST);
    bench.end_step(6);
    bench.assert_idle();

    let mut hopeless = fresh();
    hopeless.import(ROUTER, spec(REQUEST, 10, 3));
    hopeless.export(hopeless.claims[0].0, 10, token(5, 0));
    for _ in 0..3 {
        hopeless.end_pull(1);
    }
    assert_eq!(hopeless.failure(ROUTER), Some(FailureCode::TransferFailed));
    assert_eq!(hopeless.releases(), 0, "another node may still take over");
    hopeless.assert_idle();
}

#[test]
fn a_lying_or_broken_exporter_ends_the_import_and_never_starts_the_sequence() {
    let lies: Vec<(ExportEvent, FailureCode)> = vec![
        (
            ExportEvent::Claimed {
                n_tokens: 41,
                expires_at: T0,
            },
            FailureCode::TransferFailed,
        ),
        (complete(40, token(5, 0)), FailureCode::TransferFailed),
        (
            ExportEvent::SlicesFinal(vec![(
                Slice {
                    ordinal: 3,
                    group: LayerGroupIdx(0),
                },
                Digest(0),
            )]),
            FailureCode::TransferFailed,
        ),
        (
            ExportEvent::Failed(Failure::new(FailureCode::Gone, "no lease")),
            FailureCode::Gone,
        ),
    ];
    for (lie, code) in lies {
        let mut bench = fresh();
        bench.import(ROUTER, spec(REQUEST, 40, 3));
        bench.exporter_says(bench.claims[0].0, lie);
        assert_eq!(bench.failure(ROUTER), Some(code));
        bench.assert_idle();
    }
    // A first token outside the vocabulary, at the wrong place, or one that ends the request.
    for first in [token(VOCAB_SIZE, 0), token(5, 1), token(99, 0)] {
        let mut bench = fresh();
        bench.import(ROUTER, spec(REQUEST, 40, 3));
        bench.export(bench.claims[0].0, 40, first);
        bench.end_pulls();
        assert_eq!(bench.failure(ROUTER), Some(FailureCode::TransferFailed));
        assert!(bench.steps.is_empty());
        bench.assert_idle();
    }
    // The stream ends before everything was said.
    let mut lost = fresh();
    lost.import(ROUTER, spec(REQUEST, 40, 3));
    let claim = lost.claims[0].0;
    lost.apply(Event::ClaimEnded { claim });
    assert_eq!(lost.failure(ROUTER), Some(FailureCode::TransferFailed));
    lost.assert_idle();
}

#[test]
fn answers_to_a_given_up_claim_or_pull_change_nothing() {
    let mut bench = fresh();
    bench.import(ROUTER, spec(REQUEST, 40, 3));
    let old = bench.claims[0].0;
    bench.cancel(REQUEST);
    bench.import(CallId(2), spec(REQUEST, 40, 3));
    bench.export(old, 40, token(5, 0));
    assert!(bench.pulls.is_empty());
    bench.apply(Event::PullDone {
        pull: PullId(77),
        result: Err(TransferError::Digest),
    });
    assert_eq!(bench.failure(CallId(2)), None);
    bench.export(bench.claims[1].0, 40, token(5, 0));
    bench.end_pulls();
    assert!(matches!(
        bench.told(CallId(2)).last(),
        Some(GenerateEvent::KvReady(_))
    ));
    // Late words after the end of the import.
    bench.exporter_says(bench.claims[1].0, ExportEvent::SlicesFinal(slices(40)));
    bench.cancel(REQUEST);
    bench.end_step(6);
    bench.assert_idle();
}

#[test]
fn a_silent_exporter_and_a_full_pool_have_deadlines() {
    let mut silent = fresh();
    silent.import(ROUTER, spec(REQUEST, 40, 3));
    silent.exporter_says(silent.claims[0].0, ExportEvent::SlicesFinal(slices(40)));
    let pull = silent.pulls[0].0;
    silent.now = silent.now.plus_us(10_000_001);
    silent.maintain();
    assert_eq!(silent.failure(ROUTER), Some(FailureCode::TransferFailed));
    assert!(!silent.node.is_idle(), "the pull still writes");
    let result = Err(TransferError::Digest);
    silent.apply(Event::PullDone { pull, result });
    silent.pulls.pop_front();
    silent.end_pulls();
    silent.assert_idle();

    let mut full = bench_of(4);
    full.import(ROUTER, spec(RequestId(1), 40, 3));
    full.import(CallId(2), spec(REQUEST, 40, 3));
    full.now = full.now.plus_us(10_000_001);
    assert!(full.node.next_wakeup().is_some_and(|at| at <= full.now));
    full.exporter_says(full.claims[0].0, ExportEvent::SlicesFinal(Vec::new()));
    full.maintain();
    assert_eq!(full.failure(CallId(2)), Some(FailureCode::Overloaded));
    assert_eq!(full.failure(ROUTER), None);

    let mut hasty = fresh();
    let mut late = spec(REQUEST, 40, 3);
    late.deadline = T0.plus_us(1000);
    hasty.import(ROUTER, late);
    hasty.now = T0.plus_us(1000);
    hasty.maintain();
    assert_eq!(hasty.failure(ROUTER), Some(FailureCode::DeadlineExceeded));
    hasty.assert_idle();
}

#[test]
fn leases_are_renewed_also_while_the_import_waits_for_blocks() {
    let mut bench = bench_of(4);
    bench.import(ROUTER, spec(RequestId(1), 40, 3));
    bench.import(CallId(2), spec(REQUEST, 40, 3));
    let wakeup = bench.node.next_wakeup().expect("a renewal is planned");
    assert!(wakeup <= T0.plus_us(LEASE_TTL_US / 3));
    bench.now = T0.plus_us(LEASE_TTL_US / 3 - 1);
    bench.maintain();
    assert!(
        bench
            .heard
            .iter()
            .all(|e| !matches!(e, Effect::Renew { .. }))
    );
    // Keep the queue alive beyond its own deadline check.
    bench.now = T0.plus_us(9_999_999);
    bench.node.next_renewal = Some(bench.now);
    bench.maintain();
    let renewals: Vec<_> = bench
        .heard
        .iter()
        .filter_map(|effect| match effect {
            Effect::Renew { exporter, leases } => Some((exporter.clone(), leases.len())),
            _ => None,
        })
        .collect();
    let exporter = Exporter {
        control_address: "local:prefill-0".into(),
        incarnation: EXPORTER,
    };
    assert_eq!(renewals, [(exporter.clone(), 2)]);
    bench.apply(Event::Renewed {
        exporter: Exporter {
            incarnation: Incarnation(5),
            ..exporter.clone()
        },
        gone: vec![REQUEST],
    });
    assert_eq!(bench.failure(CallId(2)), None, "another life's word");
    bench.apply(Event::Renewed {
        exporter,
        gone: vec![REQUEST, RequestId(12345)],
    });
    assert_eq!(bench.failure(CallId(2)), Some(FailureCode::Gone));
    bench.cancel(RequestId(1));
    bench.assert_idle();
}

#[test]
fn reservations_are_granted_in_arrival_order_all_or_nothing() {
    let mut bench = bench_of(6);
    bench.import(ROUTER, spec(RequestId(1), 40, 3));
    bench.import(CallId(2), spec(RequestId(2), 60, 3));
    bench.import(CallId(3), spec(RequestId(3), 10, 3));
    assert_eq!(bench.claims.len(), 1, "the small one does not overtake");
    assert_eq!(bench.node.load_report().n_blocks_free, 3);
    bench.cancel(RequestId(1));
    assert_eq!(bench.claims.len(), 3);
    bench.cancel(RequestId(2));
    bench.cancel(RequestId(3));
    bench.assert_idle();
    // What never fits is said at once.
    bench.import(CallId(4), spec(RequestId(4), 96, 3));
    assert_eq!(bench.failure(CallId(4)), Some(FailureCode::Overloaded));
}

#[test]
fn a_node_prefills_by_itself_when_it_is_given_no_handle() {
    let mut bench = fresh();
    let mut resumed = spec(REQUEST, 40, 4);
    resumed.emitted = vec![11, 12];
    bench.generate(ROUTER, resumed, None);
    assert_eq!(bench.told(ROUTER), [GenerateEvent::Accepted]);
    let item = &bench.steps[0].items[0];
    assert_eq!(item.tokens.len(), 42);
    assert!(!item.report_progress);
    bench.end_step(6);
    bench.end_step(7);
    let told = bench.told(ROUTER);
    assert_eq!(told[1], GenerateEvent::Token(token(6, 2)));
    assert_eq!(told[2], GenerateEvent::Token(token(7, 3)));
    assert!(matches!(&told[3], GenerateEvent::Finished(f) if f.n_output_tokens == 4));
    assert_eq!(bench.releases(), 0);
    bench.assert_idle();
}

#[test]
fn a_preempted_sequence_is_computed_again_here_and_gives_the_same_stream() {
    // 5 blocks: both fit at first (3 and 2), then the younger one has to wait.
    let mut bench = bench_of(5);
    bench.generate(ROUTER, spec(RequestId(1), 46, 6), None);
    bench.import(CallId(2), spec(RequestId(2), 30, 40));
    bench.export(bench.claims[0].0, 30, token(5, 0));
    bench.end_pulls();
    for drawn in 20..80 {
        if bench.steps.is_empty() {
            break;
        }
        bench.end_step(drawn);
    }
    for (call, n_output) in [(ROUTER, 6), (CallId(2), 40)] {
        let told = bench.told(call);
        assert!(
            matches!(told.last(), Some(GenerateEvent::Finished(f)) if f.n_output_tokens == n_output),
            "{told:?}"
        );
        let idx: Vec<u32> = told
            .iter()
            .filter_map(|event| match event {
                GenerateEvent::Token(token) => Some(token.output_idx),
                _ => None,
            })
            .collect();
        let first = if call == ROUTER { 0 } else { 1 };
        assert_eq!(idx, (first..n_output).collect::<Vec<_>>());
    }
    assert_eq!(bench.releases(), 1);
    bench.assert_idle();
}

#[test]
fn bad_handles_are_refused_by_name() {
    let mut bench = fresh();
    let spec = spec(REQUEST, 40, 3);
    let good = handle_of(&spec);
    let mut layout = good.clone();
    layout.layout_fingerprint = [9; 16];
    let mut n_tokens = good.clone();
    n_tokens.n_tokens = 41;
    let mut expired = good.clone();
    expired.expires_at = T0;
    for (handle, code, word) in [
        (layout, FailureCode::InvalidRequest, "layout_fingerprint"),
        (n_tokens, FailureCode::InvalidRequest, "n_tokens"),
        (expired, FailureCode::Gone, "expired"),
    ] {
        bench.generate(ROUTER, spec.clone(), Some(handle));
        let told = bench.told(ROUTER);
        let Some(GenerateEvent::Failed(failure)) = told.last() else {
            panic!("expected a refusal, got {told:?}")
        };
        assert_eq!(failure.code, code);
        assert!(failure.message.contains(word), "{}", failure.message);
    }
    let mut short = spec.clone();
    short.stop.max_tokens = 1;
    bench.generate(ROUTER, short, Some(good));
    assert_eq!(bench.failure(ROUTER), Some(FailureCode::InvalidRequest));
    assert!(bench.claims.is_empty());
    bench.assert_idle();
}

#[test]
fn another_life_a_duplicate_and_a_drain_are_refused() {
    let mut bench = fresh();
    let request = GenerateRequest {
        spec: spec(REQUEST, 40, 3),
        handle: None,
    };
    bench.apply(Event::Generate {
        call: ROUTER,
        request,
        to: Incarnation(4),
    });
    assert_eq!(bench.failure(ROUTER), Some(FailureCode::Gone));
    bench.import(CallId(2), spec(REQUEST, 40, 3));
    bench.import(CallId(3), spec(REQUEST, 40, 3));
    assert_eq!(bench.failure(CallId(3)), Some(FailureCode::InvalidRequest));
    bench.apply(Event::Drain);
    bench.import(CallId(4), spec(RequestId(8), 40, 3));
    assert_eq!(bench.failure(CallId(4)), Some(FailureCode::Draining));
    assert!(bench.node.load_report().draining);
    // What was taken in is finished.
    bench.export(bench.claims[0].0, 40, token(5, 0));
    bench.end_pulls();
    bench.end_step(6);
    bench.end_step(7);
    assert!(matches!(
        bench.told(CallId(2)).last(),
        Some(GenerateEvent::Finished(_))
    ));
    bench.assert_idle();
}

#[test]
fn a_failed_step_fails_its_sequences_alone() {
    let mut bench = fresh();
    bench.generate(ROUTER, spec(REQUEST, 40, 3), None);
    bench.import(CallId(2), spec(RequestId(2), 40, 3));
    let step_id = bench.steps.pop_front().expect("a step").step_id;
    let failure = Failure::new(FailureCode::Internal, "broken");
    bench.apply(Event::StepDone {
        step_id: step_id + 1,
        result: Err(failure.clone()),
    });
    assert_eq!(bench.failure(ROUTER), None, "no such step is in flight");
    bench.apply(Event::StepDone {
        step_id,
        result: Err(failure),
    });
    assert_eq!(bench.failure(ROUTER), Some(FailureCode::Internal));
    assert_eq!(bench.failure(CallId(2)), None);
    bench.cancel(RequestId(2));
    bench.assert_idle();
}
