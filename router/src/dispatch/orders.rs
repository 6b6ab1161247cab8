//! Random orders of legal and illegal events, and what must hold after each of them.
//!
//! The nodes here are not simulated: any open or long-gone call may say anything at any time. Whatever comes, a
//! request ends exactly once, the client gets a gap-free beginning of the output, and every node that was called
//! and did not end by itself hears of the end exactly once.

use super::tests::{DEADLINE, finished, handle_of, job, lost, node, token};
use super::*;
use crate::requests::Answer;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use tidemill_core::{RequestId, Role};

/// One throw: what happens, on which call, with which number.
#[derive(Clone, Debug)]
struct Throw {
    kind: u8,
    call: usize,
    offset: i8,
    advance_us: u64,
}

/// What the world knows about the request, kept beside the machine.
struct World {
    dispatch: Dispatch,
    nodes: Vec<Candidate>,
    now: Timestamp,
    n_ids: u128,
    calls: Vec<Call>,
    output: Vec<SampledToken>,
    cancels: Vec<(Target, RequestId)>,
    n_ends: usize,
    n_accounts: usize,
    /// Prefill nodes whose lease a decode node has given back, by attempt.
    released: BTreeSet<RequestId>,
}

#[derive(Clone)]
struct Call {
    id: CallId,
    target: Target,
    spec: Option<SequenceSpec>,
    request_id: RequestId,
    side: Option<Side>,
    /// The node said its last word, or the driver was told to stop listening.
    is_closed: bool,
    /// The node itself said that it holds nothing.
    is_settled: bool,
}

impl World {
    fn new(split: SplitPolicy, max_tokens: u32, n_nodes: usize) -> Self {
        let config = DispatchConfig {
            split,
            ..DispatchConfig::default()
        };
        let nodes = (0..n_nodes)
            .flat_map(|i| {
                [
                    node(&format!("p{i}"), Role::Prefill),
                    node(&format!("d{i}"), Role::Decode),
                ]
            })
            .collect();
        Self {
            dispatch: Dispatch::new(config, job(max_tokens)),
            nodes,
            now: Timestamp(1),
            n_ids: 0,
            calls: vec![],
            output: vec![],
            cancels: vec![],
            n_ends: 0,
            n_accounts: 0,
            released: BTreeSet::new(),
        }
    }

    fn apply(&mut self, event: Event) {
        let was_ended = self.dispatch.is_ended();
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
        let effects = self.dispatch.apply(event, &mut outside);
        assert!(
            !was_ended || effects.is_empty(),
            "an effect after the end: {effects:?}"
        );
        for effect in effects {
            self.take(effect);
        }
        assert_eq!(self.n_ends, usize::from(self.dispatch.is_ended()));
        assert_eq!(self.n_accounts, self.n_ends);
    }

    fn open(
        &mut self,
        id: CallId,
        target: Target,
        request_id: RequestId,
        of: Option<(Side, SequenceSpec)>,
    ) {
        assert!(
            self.calls.iter().all(|call| call.id != id),
            "a call id twice"
        );
        let (side, spec) = of.unzip();
        self.calls.push(Call {
            id,
            target,
            spec,
            request_id,
            side,
            is_closed: false,
            is_settled: false,
        });
    }

    fn take(&mut self, effect: Effect) {
        assert_eq!(self.n_ends, 0, "an effect after the last answer");
        match effect {
            Effect::Prefill {
                call,
                target,
                request,
            } => {
                let id = request.spec.request_id;
                self.open(call, target, id, Some((Side::Prefill, request.spec)));
            }
            Effect::Generate {
                call,
                target,
                request,
            } => {
                let id = request.spec.request_id;
                self.open(call, target, id, Some((Side::Decode, request.spec)));
            }
            Effect::Rebind {
                call,
                target,
                request_id,
                ..
            } => self.open(call, target, request_id, None),
            Effect::DropCall(id) => self.call_mut(id).is_closed = true,
            Effect::Cancel { target, request_id } => self.cancels.push((target, request_id)),
            Effect::Answer(Answer::Token(token)) => self.output.push(token),
            Effect::Answer(Answer::PromptLogprobs(_)) => panic!("nobody asked"),
            Effect::Answer(Answer::Finished(finished)) => {
                assert_eq!(finished.n_output_tokens as usize, self.output.len());
                self.n_ends += 1;
            }
            Effect::Answer(Answer::Failed(_)) => self.n_ends += 1,
            Effect::Account(_) => self.n_accounts += 1,
            Effect::Report { .. } | Effect::Note(_) => {}
        }
    }

    fn call_mut(&mut self, id: CallId) -> &mut Call {
        let call = self.calls.iter_mut().find(|call| call.id == id);
        call.expect("only known calls are dropped")
    }

    /// Makes one throw an event. What a call says is remembered as its node's own end only while it is open.
    fn throw(&mut self, throw: &Throw) {
        self.now = self.now.plus_us(throw.advance_us);
        match throw.kind {
            0 => return self.apply(Event::Start),
            1 => return self.apply(Event::Cancel),
            2 => return self.apply(Event::Tick),
            _ => {}
        }
        if self.calls.is_empty() {
            return;
        }
        // Late calls are interesting, but mostly the newest ones speak.
        let back = throw.call % self.calls.len().min(4);
        let call = self.calls[self.calls.len() - 1 - back].clone();
        let next = i64::try_from(self.output.len()).expect("small") + i64::from(throw.offset);
        let next = u32::try_from(next).unwrap_or(0);
        if throw.kind == 3 {
            self.call_mut(call.id).is_closed = true;
            return self.apply(Event::CallLost {
                call: call.id,
                failure: lost(),
            });
        }
        match (call.side, call.spec.clone()) {
            (Some(Side::Prefill), Some(spec)) => self.throw_prefill(throw, &call, &spec, next),
            (Some(Side::Decode), Some(_)) => self.throw_generate(throw, &call, next),
            _ => {
                self.call_mut(call.id).is_closed = true;
                self.apply(Event::Rebound {
                    call: call.id,
                    result: if throw.kind.is_multiple_of(2) {
                        Ok(())
                    } else {
                        Err(lost())
                    },
                });
            }
        }
    }

    fn throw_prefill(&mut self, throw: &Throw, call: &Call, spec: &SequenceSpec, next: u32) {
        let is_alone = spec.stop.max_tokens as usize <= spec.emitted.len() + 1;
        let event = match throw.kind % 5 {
            0 => PrefillEvent::Handle(handle_of(&call.target, spec)),
            1 => PrefillEvent::Failed(Failure::new(code(throw.kind), "told")),
            kind => {
                let ends = is_alone || kind == 2;
                let base = u32::try_from(spec.emitted.len()).expect("small");
                let idx = if throw.offset == 0 { base } else { next };
                PrefillEvent::FirstToken(FirstToken {
                    token: (spec.stop.max_tokens > 0).then(|| token(idx)),
                    n_cached_tokens: 0,
                    n_computed_tokens: 1,
                    finish: ends.then_some(FinishReason::Length),
                })
            }
        };
        let is_end = match &event {
            PrefillEvent::Failed(_) => true,
            PrefillEvent::FirstToken(first) => first.finish.is_some(),
            _ => false,
        };
        self.settle(call, event.is_last(), is_end);
        self.apply(Event::Prefill {
            call: call.id,
            event,
        });
    }

    fn throw_generate(&mut self, throw: &Throw, call: &Call, next: u32) {
        let event = match throw.kind % 7 {
            0 => GenerateEvent::Accepted,
            1 => GenerateEvent::KvReady(KvReady {
                first_token: token(
                    call.spec
                        .as_ref()
                        .map_or(0, |spec| u32::try_from(spec.emitted.len()).expect("small")),
                ),
                bytes_moved: 1,
                n_local_tokens: 0,
            }),
            2 => finished(next),
            3 => GenerateEvent::Failed(Failure::new(code(throw.kind), "told")),
            _ => GenerateEvent::Token(token(next)),
        };
        if matches!(event, GenerateEvent::Finished(_)) && !call.is_closed {
            self.released.insert(call.request_id);
        }
        self.settle(call, event.is_last(), event.is_last());
        self.apply(Event::Generate {
            call: call.id,
            event,
        });
    }

    fn settle(&mut self, call: &Call, is_last: bool, is_end: bool) {
        let known = self.call_mut(call.id);
        known.is_settled |= is_end && !known.is_closed;
        known.is_closed |= is_last;
    }

    /// What must hold whenever the request has ended.
    fn check(&self) {
        for (i, token) in self.output.iter().enumerate() {
            assert_eq!(token.output_idx as usize, i, "the output has a gap");
        }
        assert_eq!(self.output.len(), self.dispatch.emitted().len());
        let mut n_cancels: BTreeMap<(Target, RequestId), usize> = BTreeMap::new();
        for cancel in &self.cancels {
            *n_cancels.entry(cancel.clone()).or_default() += 1;
        }
        for ((target, id), n) in &n_cancels {
            assert_eq!(*n, 1, "{target:?} heard twice of {id}");
            let was_called = |call: &Call| call.target == *target && call.request_id == *id;
            assert!(self.calls.iter().any(was_called), "a cancel to a stranger");
        }
        if !self.dispatch.is_ended() {
            return;
        }
        for call in &self.calls {
            assert!(
                call.is_closed,
                "call {:?} is still listened to after the end",
                call.id
            );
        }
        for call in self.calls.iter().filter(|call| call.side.is_some()) {
            let is_released =
                call.side == Some(Side::Prefill) && self.released.contains(&call.request_id);
            let key = (call.target.clone(), call.request_id);
            assert!(
                call.is_settled || is_released || n_cancels.contains_key(&key),
                "{} never hears that {} is over",
                call.target.node_id,
                call.request_id
            );
        }
    }
}

fn code(kind: u8) -> FailureCode {
    [
        FailureCode::Overloaded,
        FailureCode::Gone,
        FailureCode::TransferFailed,
        FailureCode::Draining,
        FailureCode::Unavailable,
        FailureCode::Cancelled,
        FailureCode::InvalidRequest,
        FailureCode::Internal,
    ][usize::from(kind) % 8]
}

fn throws() -> impl Strategy<Value = Vec<Throw>> {
    let throw = (
        prop_oneof![1 => 0..4_u8, 12 => 4..200_u8],
        0..4_usize,
        prop_oneof![8 => Just(0_i8), 1 => -2..3_i8],
        prop_oneof![6 => Just(1_u64), 1 => 0..30_000_000_u64],
    );
    let throw = throw.prop_map(|(kind, call, offset, advance_us)| Throw {
        kind,
        call,
        offset,
        advance_us,
    });
    prop::collection::vec(throw, 0..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn whatever_comes_it_ends_once_and_nobody_is_forgotten(
        throws in throws(),
        split in prop_oneof![
            3 => Just(SplitPolicy::Prefer),
            1 => Just(SplitPolicy::Require),
            1 => Just(SplitPolicy::Never),
        ],
        max_tokens in 0..5_u32,
        n_nodes in 1..4_usize,
    ) {
        let mut world = World::new(split, max_tokens, n_nodes);
        world.apply(Event::Start);
        for throw in &throws {
            world.throw(throw);
            world.check();
        }
        // Nothing more is said: the deadline ends it.
        world.now = DEADLINE;
        world.apply(Event::Tick);
        prop_assert!(world.dispatch.is_ended());
        world.check();
        world.apply(Event::Tick);
    }
}
