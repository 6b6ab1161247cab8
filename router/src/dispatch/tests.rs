//! Each phase and each failure branch as a list of events.

use super::*;
use crate::requests::{Answer, PromptLogprob};
use tidemill_core::{
    Capability, Endpoint, Epoch, Incarnation, LogprobSpec, NodeId, RequestId, Role, SamplingParams,
    StopConditions, TransportKind, block_hashes,
};

pub(super) const DEADLINE: Timestamp = Timestamp(600_000_000);

pub(super) fn job(max_tokens: u32) -> Job {
    Job {
        prompt: (0..20).collect(),
        namespace: String::new(),
        sampling: SamplingParams::greedy(),
        stop: StopConditions {
            max_tokens,
            min_tokens: 0,
            stop_token_ids: vec![],
        },
        logprobs: LogprobSpec::default(),
        deadline: DEADLINE,
        traceparent: String::new(),
    }
}

pub(super) fn node(name: &str, role: Role) -> Candidate {
    Candidate {
        target: Target {
            node_id: NodeId::new(name).expect("valid"),
            incarnation: Incarnation(7),
            address: format!("local:{name}"),
        },
        role,
        model_fingerprint: [1; 32],
        layout_fingerprint: [2; 16],
        queued_tokens: 0,
        n_sequences: 0,
        n_blocks: Some(1000),
        n_blocks_free: Some(1000),
        n_open: 0,
    }
}

pub(super) fn token(output_idx: u32) -> SampledToken {
    SampledToken {
        token: 100 + output_idx,
        output_idx,
        logprob: None,
        top: vec![],
        logits_digest: None,
    }
}

pub(super) fn handle_of(target: &Target, spec: &SequenceSpec) -> KvHandle {
    KvHandle {
        request_id: spec.request_id,
        node_id: target.node_id.clone(),
        incarnation: target.incarnation,
        capability: Capability(9),
        epoch: Epoch(1),
        n_tokens: u32::try_from(spec.n_context()).expect("small"),
        layout_fingerprint: [2; 16],
        control_address: target.address.clone(),
        endpoints: vec![Endpoint {
            transport: TransportKind::Local,
            address: target.node_id.to_string(),
        }],
        expires_at: DEADLINE,
    }
}

pub(super) fn lost() -> Failure {
    Failure::new(FailureCode::Unavailable, "connection reset")
}

pub(super) fn finished(n_output_tokens: u32) -> GenerateEvent {
    GenerateEvent::Finished(Finished {
        reason: FinishReason::Length,
        n_output_tokens,
        n_cached_tokens: 0,
        n_computed_tokens: 0,
    })
}

fn first(output_idx: u32, finish: Option<FinishReason>) -> PrefillEvent {
    PrefillEvent::FirstToken(FirstToken {
        token: Some(token(output_idx)),
        n_cached_tokens: 16,
        n_computed_tokens: 4,
        finish,
    })
}

fn ready(output_idx: u32) -> GenerateEvent {
    GenerateEvent::KvReady(KvReady {
        first_token: token(output_idx),
        bytes_moved: 10,
        n_local_tokens: 0,
    })
}

struct Rig {
    dispatch: Dispatch,
    nodes: Vec<Candidate>,
    now: Timestamp,
    n_ids: u128,
    last: Vec<Effect>,
    all: Vec<Effect>,
}

impl Rig {
    fn new(config: DispatchConfig, job: Job) -> Self {
        let nodes = vec![
            node("p0", Role::Prefill),
            node("p1", Role::Prefill),
            node("d0", Role::Decode),
            node("d1", Role::Decode),
        ];
        Self {
            dispatch: Dispatch::new(config, job),
            nodes,
            now: Timestamp(1),
            n_ids: 0,
            last: vec![],
            all: vec![],
        }
    }

    fn started(max_tokens: u32) -> Self {
        let mut rig = Self::new(DispatchConfig::default(), job(max_tokens));
        rig.apply(Event::Start);
        rig
    }

    /// Up to the moment where p0 computes and d0 has been called.
    fn split(max_tokens: u32) -> Self {
        let mut rig = Self::started(max_tokens);
        rig.give_handle();
        rig
    }

    /// Up to the second token, which d0 decoded.
    fn decoding(max_tokens: u32) -> Self {
        let mut rig = Self::split(max_tokens);
        rig.prefill(first(0, None));
        rig.generate(GenerateEvent::Accepted);
        rig.generate(ready(0));
        rig.generate(GenerateEvent::Token(token(1)));
        rig
    }

    fn apply(&mut self, event: Event) {
        let nodes = self.nodes.clone();
        let mut draw_id = || {
            self.n_ids += 1;
            RequestId(self.n_ids)
        };
        let mut outside = Outside {
            now: self.now,
            candidates: &|| nodes.clone(),
            draw_id: &mut draw_id,
        };
        self.last = self.dispatch.apply(event, &mut outside);
        self.all.extend(self.last.clone());
    }

    fn give_handle(&mut self) {
        let (call, target, request) = self.last_prefill();
        let handle = handle_of(&target, &request.spec);
        let event = PrefillEvent::Handle(handle);
        self.apply(Event::Prefill { call, event });
    }

    fn last_prefill(&self) -> (CallId, Target, PrefillRequest) {
        self.all
            .iter()
            .rev()
            .find_map(|effect| match effect {
                Effect::Prefill {
                    call,
                    target,
                    request,
                } => Some((*call, target.clone(), request.clone())),
                _ => None,
            })
            .expect("a prefill call")
    }

    fn last_generate(&self) -> (CallId, Target, GenerateRequest) {
        self.all
            .iter()
            .rev()
            .find_map(|effect| match effect {
                Effect::Generate {
                    call,
                    target,
                    request,
                } => Some((*call, target.clone(), request.clone())),
                _ => None,
            })
            .expect("a generate call")
    }

    fn last_rebind(&self) -> (CallId, Epoch) {
        self.all
            .iter()
            .rev()
            .find_map(|effect| match effect {
                Effect::Rebind { call, epoch, .. } => Some((*call, *epoch)),
                _ => None,
            })
            .expect("a rebind call")
    }

    fn prefill(&mut self, event: PrefillEvent) {
        let call = self.last_prefill().0;
        self.apply(Event::Prefill { call, event });
    }

    fn generate(&mut self, event: GenerateEvent) {
        let call = self.last_generate().0;
        self.apply(Event::Generate { call, event });
    }

    fn lose_prefill(&mut self) {
        let call = self.last_prefill().0;
        self.apply(Event::CallLost {
            call,
            failure: lost(),
        });
    }

    fn lose_decode(&mut self) {
        let call = self.last_generate().0;
        self.apply(Event::CallLost {
            call,
            failure: lost(),
        });
    }

    fn tokens(&self) -> Vec<TokenId> {
        self.all
            .iter()
            .filter_map(|effect| match effect {
                Effect::Answer(Answer::Token(token)) => Some(token.token),
                _ => None,
            })
            .collect()
    }

    fn end(&self) -> Option<&Answer> {
        let mut ends = self.all.iter().filter_map(|effect| match effect {
            Effect::Answer(answer @ (Answer::Finished(_) | Answer::Failed(_))) => Some(answer),
            _ => None,
        });
        let end = ends.next();
        assert!(ends.next().is_none(), "two ends");
        end
    }

    fn failure_code(&self) -> FailureCode {
        match self.end() {
            Some(Answer::Failed(failure)) => failure.code,
            other => panic!("no failure but {other:?}"),
        }
    }

    fn reason(&self) -> FinishReason {
        match self.end() {
            Some(Answer::Finished(finished)) => finished.reason,
            other => panic!("no positive end but {other:?}"),
        }
    }

    /// `node/attempt` of each cancel, in order.
    fn cancels(&self) -> Vec<String> {
        self.all
            .iter()
            .filter_map(|effect| match effect {
                Effect::Cancel { target, request_id } => {
                    Some(format!("{}/{}", target.node_id, request_id.0))
                }
                _ => None,
            })
            .collect()
    }

    fn notes(&self) -> Vec<Note> {
        self.all
            .iter()
            .filter_map(|effect| match effect {
                Effect::Note(note) => Some(*note),
                _ => None,
            })
            .collect()
    }
}

#[test]
fn a_split_request_streams_the_first_token_at_once_and_ends_without_cancels() {
    let mut rig = Rig::split(3);
    let (_, decode, request) = rig.last_generate();
    assert_eq!(decode.node_id.as_str(), "d0");
    assert_eq!(
        request.handle.expect("a handle").request_id,
        request.spec.request_id
    );
    rig.prefill(first(0, None));
    assert_eq!(rig.tokens(), [100]);
    rig.generate(GenerateEvent::Accepted);
    rig.generate(ready(0));
    rig.generate(GenerateEvent::Token(token(1)));
    rig.generate(GenerateEvent::Token(token(2)));
    rig.generate(finished(3));
    assert_eq!(rig.tokens(), [100, 101, 102]);
    assert_eq!(rig.reason(), FinishReason::Length);
    assert!(rig.cancels().is_empty());
    assert!(rig.dispatch.is_ended() && rig.dispatch.next_wakeup().is_none());
    let usage = rig.all.iter().find_map(|effect| match effect {
        Effect::Account(usage) => Some(*usage),
        _ => None,
    });
    let usage = usage.expect("accounted");
    assert_eq!((usage.n_prompt_tokens, usage.n_output_tokens), (20, 3));
    assert_eq!(
        (usage.n_cached_tokens, usage.n_prefill_computed_tokens),
        (16, 4)
    );
    assert_eq!((usage.bytes_moved, usage.n_attempts), (10, 1));
}

#[test]
fn block_hashes_are_those_of_the_chosen_nodes_model() {
    let rig = Rig::started(3);
    let expected = block_hashes(&[1; 32], "", &job(3).prompt);
    assert_eq!(rig.last_prefill().2.spec.block_hashes, expected);
}

#[test]
fn the_importer_may_tell_the_first_token_first() {
    let mut rig = Rig::split(3);
    rig.generate(ready(0));
    rig.generate(GenerateEvent::Token(token(1)));
    rig.prefill(first(0, None));
    assert_eq!(rig.tokens(), [100, 101]);
    assert!(rig.end().is_none());
}

#[test]
fn first_tokens_that_differ_end_in_internal() {
    let mut rig = Rig::split(3);
    rig.prefill(first(0, None));
    let other = SampledToken {
        token: 5,
        ..token(0)
    };
    rig.generate(GenerateEvent::KvReady(KvReady {
        first_token: other,
        bytes_moved: 0,
        n_local_tokens: 0,
    }));
    assert_eq!(rig.failure_code(), FailureCode::Internal);
    assert_eq!(rig.cancels(), ["d0/1", "p0/1"]);
}

#[test]
fn one_token_and_no_token_need_no_decode_node() {
    for (max_tokens, tokens) in [(0, vec![]), (1, vec![100])] {
        let mut rig = Rig::started(max_tokens);
        rig.prefill(PrefillEvent::FirstToken(FirstToken {
            token: (max_tokens == 1).then(|| token(0)),
            n_cached_tokens: 0,
            n_computed_tokens: 20,
            finish: Some(FinishReason::Length),
        }));
        assert_eq!(rig.tokens(), tokens);
        assert_eq!(rig.reason(), FinishReason::Length);
        assert!(rig.cancels().is_empty());
        assert!(!rig.all.iter().any(|e| matches!(e, Effect::Generate { .. })));
    }
}

#[test]
fn a_stop_token_from_prefill_ends_and_cancels_the_called_decode_node() {
    let mut rig = Rig::split(9);
    rig.prefill(first(0, Some(FinishReason::Stop)));
    assert_eq!(rig.reason(), FinishReason::Stop);
    assert_eq!(rig.tokens(), [100]);
    assert_eq!(rig.cancels(), ["d0/1"]);
}

#[test]
fn a_lost_prefill_is_replaced_under_a_fresh_id() {
    let mut rig = Rig::split(3);
    rig.lose_prefill();
    assert_eq!(rig.cancels(), ["d0/1", "p0/1"]);
    let (_, target, request) = rig.last_prefill();
    assert_eq!(target.node_id.as_str(), "p1");
    assert_eq!(request.spec.request_id, RequestId(2));
    assert!(request.spec.emitted.is_empty());
    assert_eq!(rig.notes(), [Note::Retry]);
}

#[test]
fn a_lost_prefill_changes_nothing_once_the_importer_has_the_kv() {
    let mut rig = Rig::split(3);
    rig.generate(ready(0));
    rig.lose_prefill();
    rig.generate(GenerateEvent::Token(token(1)));
    rig.generate(GenerateEvent::Token(token(2)));
    rig.generate(finished(3));
    assert_eq!(rig.tokens(), [100, 101, 102]);
    assert_eq!(rig.reason(), FinishReason::Length);
}

#[test]
fn a_prefill_that_refuses_by_itself_gets_no_cancel() {
    let mut rig = Rig::started(3);
    rig.prefill(PrefillEvent::Failed(Failure::new(
        FailureCode::Overloaded,
        "full",
    )));
    assert!(rig.cancels().is_empty());
    assert_eq!(rig.last_prefill().1.node_id.as_str(), "p1");
    let reported = rig.all.iter().any(|e| matches!(e, Effect::Report { .. }));
    assert!(!reported, "a full queue is no illness");
}

#[test]
fn a_clients_mistake_is_told_at_once_and_held_against_nobody() {
    let mut rig = Rig::started(3);
    rig.prefill(PrefillEvent::Failed(Failure::new(
        FailureCode::ContextLengthExceeded,
        "too long",
    )));
    assert_eq!(rig.failure_code(), FailureCode::ContextLengthExceeded);
    assert!(!rig.all.iter().any(|e| matches!(e, Effect::Report { .. })));
}

#[test]
fn a_context_that_no_pool_can_ever_hold_is_the_clients_mistake() {
    let mut rig = Rig::new(DispatchConfig::default(), job(3));
    for node in &mut rig.nodes {
        node.n_blocks = Some(1);
    }
    rig.apply(Event::Start);
    assert_eq!(rig.failure_code(), FailureCode::ContextLengthExceeded);
    assert!(rig.cancels().is_empty(), "no node was asked");
}

#[test]
fn decode_lost_before_its_first_token_is_taken_over_with_a_raised_epoch() {
    let mut rig = Rig::split(3);
    rig.prefill(first(0, None));
    rig.lose_decode();
    assert_eq!(rig.cancels(), ["d0/1"]);
    let (call, epoch) = rig.last_rebind();
    assert_eq!(epoch, Epoch(2));
    rig.apply(Event::Rebound {
        call,
        result: Ok(()),
    });
    let (_, target, request) = rig.last_generate();
    assert_eq!(target.node_id.as_str(), "d1");
    assert_eq!(request.handle.expect("a handle").epoch, Epoch(2));
    assert_eq!(request.spec.request_id, RequestId(1));
    assert!(request.spec.emitted.is_empty(), "as the exporter began");
    rig.generate(ready(0));
    rig.generate(GenerateEvent::Token(token(1)));
    rig.generate(GenerateEvent::Token(token(2)));
    rig.generate(finished(3));
    assert_eq!(rig.tokens(), [100, 101, 102]);
    assert_eq!(rig.cancels(), ["d0/1"]);
}

#[test]
fn a_refused_rebind_starts_again_with_what_the_client_has() {
    let mut rig = Rig::split(5);
    rig.prefill(first(0, None));
    rig.lose_decode();
    let (call, _) = rig.last_rebind();
    rig.apply(Event::Rebound {
        call,
        result: Err(Failure::new(FailureCode::Gone, "no such lease")),
    });
    let (_, target, request) = rig.last_prefill();
    assert_eq!(target.node_id.as_str(), "p1");
    assert_eq!(request.spec.emitted, [100]);
    assert_eq!(rig.cancels(), ["d0/1", "p0/1"]);
}

#[test]
fn prefill_lost_while_rebinding_starts_again() {
    let mut rig = Rig::split(5);
    rig.lose_decode();
    let (call, _) = rig.last_rebind();
    rig.lose_prefill();
    assert_eq!(rig.last_prefill().2.spec.request_id, RequestId(2));
    rig.apply(Event::Rebound {
        call,
        result: Ok(()),
    });
    assert_eq!(rig.notes(), [Note::TakeOver, Note::Retry, Note::LateEvent]);
}

#[test]
fn decode_lost_later_resumes_with_the_same_next_token() {
    let mut rig = Rig::decoding(4);
    rig.lose_decode();
    assert_eq!(rig.cancels(), ["d0/1", "p0/1"]);
    let (_, _, request) = rig.last_prefill();
    assert_eq!(request.spec.emitted, [100, 101]);
    assert_eq!(request.spec.request_id, RequestId(2));
    rig.give_handle();
    let (_, target, request) = rig.last_generate();
    assert_eq!(target.node_id.as_str(), "d1");
    assert_eq!(request.spec.emitted, [100, 101]);
    rig.prefill(first(2, None));
    rig.generate(ready(2));
    rig.generate(GenerateEvent::Token(token(3)));
    rig.generate(finished(4));
    assert_eq!(rig.tokens(), [100, 101, 102, 103]);
    assert_eq!(rig.notes(), [Note::Resume]);
}

#[test]
fn decode_lost_after_the_last_token_loses_only_the_word_that_it_was_the_last() {
    let mut rig = Rig::decoding(2);
    rig.lose_decode();
    assert_eq!(rig.tokens(), [100, 101]);
    assert_eq!(rig.reason(), FinishReason::Length);
    assert_eq!(rig.cancels(), ["d0/1", "p0/1"]);
    let mut job = job(9);
    job.stop.stop_token_ids = vec![101];
    let mut rig = Rig::new(DispatchConfig::default(), job);
    rig.apply(Event::Start);
    rig.give_handle();
    rig.generate(ready(0));
    rig.generate(GenerateEvent::Token(token(1)));
    rig.lose_decode();
    assert_eq!(rig.reason(), FinishReason::Stop);
}

#[test]
fn an_end_while_the_prefill_call_still_talks_leaves_that_call_and_cancels_it() {
    let mut rig = Rig::split(2);
    rig.generate(ready(0));
    rig.generate(GenerateEvent::Token(token(1)));
    rig.generate(finished(2));
    assert_eq!(rig.reason(), FinishReason::Length);
    assert_eq!(rig.cancels(), ["p0/1"]);
    let prefill = rig.last_prefill().0;
    assert!(rig.all.contains(&Effect::DropCall(prefill)));
}

#[test]
fn a_resume_with_one_token_left_needs_prefill_only() {
    let mut rig = Rig::decoding(3);
    rig.lose_decode();
    rig.prefill(first(2, Some(FinishReason::Length)));
    assert_eq!(rig.tokens(), [100, 101, 102]);
    assert_eq!(rig.reason(), FinishReason::Length);
}

#[test]
fn a_resume_stays_on_the_model_that_began() {
    let mut rig = Rig::decoding(4);
    for node in &mut rig.nodes {
        node.model_fingerprint = [3; 32];
    }
    rig.lose_decode();
    assert_eq!(rig.failure_code(), FailureCode::Unavailable);
}

#[test]
fn a_failed_transfer_is_exported_anew_elsewhere() {
    let mut rig = Rig::split(4);
    rig.prefill(first(0, None));
    rig.generate(GenerateEvent::Accepted);
    rig.generate(GenerateEvent::Failed(Failure::new(
        FailureCode::TransferFailed,
        "digest",
    )));
    let (_, target, request) = rig.last_prefill();
    assert_eq!(target.node_id.as_str(), "p1");
    assert_eq!(request.spec.emitted, [100]);
    assert_eq!(rig.cancels(), ["p0/1"]);
}

#[test]
fn a_failed_transfer_between_the_only_two_nodes_is_not_the_end() {
    let mut rig = Rig::new(
        DispatchConfig {
            split: SplitPolicy::Require,
            ..DispatchConfig::default()
        },
        job(4),
    );
    rig.nodes.remove(3);
    rig.nodes.remove(1);
    rig.apply(Event::Start);
    rig.give_handle();
    rig.generate(GenerateEvent::Failed(Failure::new(
        FailureCode::TransferFailed,
        "digest",
    )));
    let (_, target, request) = rig.last_prefill();
    assert_eq!(target.node_id.as_str(), "p0");
    assert_eq!(request.spec.request_id, RequestId(2));
}

#[test]
fn attempts_are_bounded_and_the_last_failure_is_told() {
    let mut rig = Rig::started(3);
    rig.nodes = (0..9)
        .flat_map(|i| {
            [
                node(&format!("p{i}"), Role::Prefill),
                node(&format!("d{i}"), Role::Decode),
            ]
        })
        .collect();
    for _ in 0..9 {
        rig.lose_prefill();
    }
    assert_eq!(rig.failure_code(), FailureCode::Unavailable);
    assert_eq!(rig.cancels(), ["p0/1", "p1/2", "p2/3", "p3/4"]);
}

#[test]
fn nobody_there_is_unavailable_at_once() {
    let mut rig = Rig::new(DispatchConfig::default(), job(3));
    rig.nodes.clear();
    rig.apply(Event::Start);
    assert_eq!(rig.failure_code(), FailureCode::Unavailable);
}

#[test]
fn without_prefill_nodes_the_decode_node_does_everything_and_that_is_counted() {
    let mut rig = Rig::new(DispatchConfig::default(), job(2));
    rig.nodes.drain(..2);
    rig.apply(Event::Start);
    assert_eq!(rig.notes(), [Note::SplitException]);
    rig.generate(GenerateEvent::Accepted);
    rig.generate(GenerateEvent::Token(token(0)));
    rig.generate(GenerateEvent::Token(token(1)));
    rig.generate(finished(2));
    assert_eq!(rig.tokens(), [100, 101]);
    assert_eq!(rig.reason(), FinishReason::Length);
}

#[test]
fn a_cancel_reaches_every_node_once_in_every_phase() {
    let mut waiting = Rig::new(DispatchConfig::default(), job(5));
    waiting.apply(Event::Cancel);
    assert!(waiting.cancels().is_empty());
    let mut prefilling = Rig::started(5);
    prefilling.apply(Event::Cancel);
    assert_eq!(prefilling.cancels(), ["p0/1"]);
    // Between the two legs: prefill has ended, and decode has not answered yet.
    let mut between = Rig::split(5);
    between.prefill(first(0, None));
    between.apply(Event::Cancel);
    assert_eq!(between.cancels(), ["d0/1", "p0/1"]);
    let mut decoding = Rig::decoding(5);
    decoding.apply(Event::Cancel);
    assert_eq!(decoding.cancels(), ["d0/1", "p0/1"]);
    let mut rebinding = Rig::split(5);
    rebinding.lose_decode();
    rebinding.apply(Event::Cancel);
    assert_eq!(rebinding.cancels(), ["d0/1", "p0/1"]);
    for mut rig in [waiting, prefilling, between, decoding, rebinding] {
        assert_eq!(rig.failure_code(), FailureCode::Cancelled);
        rig.apply(Event::Cancel);
        assert!(rig.last.is_empty());
    }
}

#[test]
fn a_gap_over_the_bound_is_a_failure_and_late_tokens_are_dropped() {
    let mut rig = Rig::decoding(5);
    let old = rig.last_generate().0;
    let due = rig.dispatch.next_wakeup().expect("watched");
    assert_eq!(due, rig.now.plus_us(DispatchConfig::default().gap_us_max));
    rig.now = due;
    rig.apply(Event::Tick);
    assert_eq!(rig.cancels(), ["d0/1", "p0/1"]);
    assert_eq!(rig.notes(), [Note::Stall, Note::Resume]);
    rig.apply(Event::Generate {
        call: old,
        event: GenerateEvent::Token(token(2)),
    });
    assert_eq!(rig.tokens(), [100, 101]);
    assert!(rig.end().is_none());
}

#[test]
fn the_deadline_ends_everything() {
    let mut rig = Rig::split(5);
    rig.now = DEADLINE;
    rig.apply(Event::Tick);
    assert_eq!(rig.failure_code(), FailureCode::DeadlineExceeded);
    assert_eq!(rig.cancels(), ["d0/1", "p0/1"]);
    let mut late = Rig::new(DispatchConfig::default(), job(5));
    late.now = DEADLINE;
    late.apply(Event::Start);
    assert_eq!(late.failure_code(), FailureCode::DeadlineExceeded);
}

#[test]
fn a_token_out_of_order_is_never_given() {
    for wrong in [1, 3] {
        let mut rig = Rig::decoding(9);
        rig.generate(GenerateEvent::Token(token(wrong)));
        assert_eq!(rig.failure_code(), FailureCode::Internal);
        assert_eq!(rig.tokens(), [100, 101]);
    }
    let mut rig = Rig::decoding(2);
    rig.generate(GenerateEvent::Token(token(2)));
    assert_eq!(
        rig.failure_code(),
        FailureCode::Internal,
        "beyond max_tokens"
    );
}

#[test]
fn an_end_that_counts_other_tokens_is_no_success() {
    let mut rig = Rig::decoding(3);
    rig.generate(finished(3));
    assert_eq!(rig.failure_code(), FailureCode::Internal);
}

#[test]
fn decode_may_not_speak_before_its_kv_is_complete() {
    let mut rig = Rig::split(3);
    rig.prefill(first(0, None));
    rig.generate(GenerateEvent::Token(token(1)));
    assert_eq!(rig.failure_code(), FailureCode::Internal);
}

#[test]
fn a_handle_of_another_life_is_refused() {
    let mut rig = Rig::started(3);
    let (call, target, request) = rig.last_prefill();
    let mut handle = handle_of(&target, &request.spec);
    handle.incarnation = Incarnation(8);
    let event = PrefillEvent::Handle(handle);
    rig.apply(Event::Prefill { call, event });
    assert_eq!(rig.failure_code(), FailureCode::Internal);
}

#[test]
fn prompt_logprobs_are_told_once_over_all_attempts_and_never_missing() {
    let entry = |i: usize| PromptLogprob {
        logprob: i as f32,
        top: vec![],
    };
    let with_logprobs = || {
        let mut job = job(1);
        job.logprobs.prompt_top = Some(0);
        let mut rig = Rig::new(DispatchConfig::default(), job);
        rig.apply(Event::Start);
        rig
    };
    let mut rig = with_logprobs();
    rig.prefill(PrefillEvent::PromptLogprobs((0..5).map(entry).collect()));
    rig.lose_prefill();
    rig.prefill(PrefillEvent::PromptLogprobs((0..3).map(entry).collect()));
    rig.prefill(PrefillEvent::PromptLogprobs((3..19).map(entry).collect()));
    rig.prefill(first(0, Some(FinishReason::Length)));
    let told: Vec<f32> = rig
        .all
        .iter()
        .filter_map(|effect| match effect {
            Effect::Answer(Answer::PromptLogprobs(entries)) => Some(entries.clone()),
            _ => None,
        })
        .flatten()
        .map(|entry| entry.logprob)
        .collect();
    assert_eq!(told, (0..19).map(|i| i as f32).collect::<Vec<_>>());
    assert_eq!(rig.reason(), FinishReason::Length);
    let mut short = with_logprobs();
    short.prefill(PrefillEvent::PromptLogprobs((0..5).map(entry).collect()));
    short.prefill(first(0, Some(FinishReason::Length)));
    assert_eq!(short.failure_code(), FailureCode::Internal);
}

/// A split request of three tokens that wants its prompt's log-probabilities, up to where the decode node has all KV and
/// talks, but the prefill node has not told them yet.
fn decoding_before_the_prompt_logprobs() -> Rig {
    let mut job = job(3);
    job.logprobs.prompt_top = Some(0);
    let mut rig = Rig::new(DispatchConfig::default(), job);
    rig.apply(Event::Start);
    rig.give_handle();
    rig.generate(GenerateEvent::Accepted);
    rig.generate(ready(0));
    rig.generate(GenerateEvent::Token(token(1)));
    assert!(rig.tokens().is_empty(), "the prompt comes first");
    assert_eq!(rig.end(), None);
    rig
}

fn prompt_entries(n: usize) -> PrefillEvent {
    let entry = PromptLogprob {
        logprob: -1.0,
        top: vec![],
    };
    PrefillEvent::PromptLogprobs(vec![entry; n])
}

#[test]
fn a_decode_node_that_overtakes_the_prompt_logprobs_waits_for_them() {
    let mut rig = decoding_before_the_prompt_logprobs();
    rig.prefill(prompt_entries(10));
    assert!(rig.tokens().is_empty());
    rig.prefill(prompt_entries(9));
    assert_eq!(rig.tokens(), [100, 101]);
    rig.prefill(first(0, None));
    rig.generate(GenerateEvent::Token(token(2)));
    rig.generate(finished(3));
    assert_eq!(rig.tokens(), [100, 101, 102]);
    assert_eq!(rig.reason(), FinishReason::Length);
}

#[test]
fn a_prefill_lost_before_the_prompt_logprobs_is_replaced_and_no_other_node_is_blamed() {
    let mut rig = decoding_before_the_prompt_logprobs();
    rig.lose_prefill();
    assert_eq!(rig.last_prefill().1.node_id.as_str(), "p1");
    let blamed: Vec<_> = rig
        .all
        .iter()
        .filter_map(|effect| match effect {
            Effect::Report {
                target,
                outcome: Outcome::Failed,
            } => Some(target.node_id.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(blamed, ["p0"]);
    assert_eq!(rig.end(), None);
}
