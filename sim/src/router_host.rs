//! The router of a history: its membership, and one dispatch machine for each open request.

use crate::coverage::FaultKind;
use crate::decode_host::process_at;
use crate::left::Place;
use crate::message::{ToClient, ToServer, to_router_generate, to_router_prefill};
use crate::network::Process;
use crate::occurrence::Occurrence;
use crate::world::World;
use std::collections::BTreeMap;
use tidemill_core::{CallId, Failure, FailureCode, RequestId, Timestamp};
use tidemill_kv_transfer::export::LeaseRef;
use tidemill_router::dispatch::{Dispatch, DispatchConfig, Effect, Event, Note, Outside};
use tidemill_router::membership::{BookingId, Membership, MembershipConfig};
use tidemill_router::placement::{SplitPolicy, Target};
use tidemill_service::discovery::NodeEntry;

/// An open call of the router.
struct RouterCall {
    request_idx: usize,
    /// Its number within the request.
    call: CallId,
    is_rebind: bool,
}

/// The router's present life.
pub(crate) struct RouterHost {
    pub(crate) life: u32,
    pub(crate) is_up: bool,
    pub(crate) split: SplitPolicy,
    pub(crate) membership: Membership,
    pub(crate) open: BTreeMap<usize, Dispatch>,
    /// Whose call it is, and under which number.
    calls: BTreeMap<CallId, RouterCall>,
    bookings: BTreeMap<(usize, CallId), BookingId>,
    /// Which nodes are watched, in which life.
    pub(crate) watched: BTreeMap<NodeEntry, tidemill_core::Incarnation>,
    pub(crate) membership_wake_at: Option<Timestamp>,
}

impl RouterHost {
    pub(crate) fn new(split: SplitPolicy) -> Self {
        Self {
            life: 0,
            is_up: true,
            split,
            membership: new_membership(split),
            open: BTreeMap::new(),
            calls: BTreeMap::new(),
            bookings: BTreeMap::new(),
            watched: BTreeMap::new(),
            membership_wake_at: None,
        }
    }

    /// True while somebody listens to this call.
    pub(crate) fn listens_to(&self, number: CallId) -> bool {
        self.calls.contains_key(&number)
    }

    /// True while a request has an open call.
    pub(crate) fn has_calls(&self, request_idx: usize) -> bool {
        self.calls
            .values()
            .any(|known| known.request_idx == request_idx)
    }

    /// Takes everything away; returns the requests that were open.
    pub(crate) fn crash(&mut self) -> Vec<usize> {
        let open = self.open.keys().copied().collect();
        let life = self.life + 1;
        *self = Self {
            life,
            is_up: false,
            ..Self::new(self.split)
        };
        open
    }
}

fn new_membership(split: SplitPolicy) -> Membership {
    Membership::new(MembershipConfig {
        text_fingerprint: [2; 32],
        split,
    })
}

impl World {
    // ---- Requests ---------------------------------------------------------------------------------------------

    pub(crate) fn arrive(&mut self, request_idx: usize) {
        if !self.router.is_up {
            // Nobody took it in: its client comes again.
            self.outcome.n_turned_away += 1;
            let pause = self.rng.between(1_000, 500_000);
            return self.after(pause, Occurrence::Arrive(request_idx));
        }
        self.outcome.n_admitted += 1;
        let config = DispatchConfig {
            split: self.router.split,
            ..DispatchConfig::default()
        };
        let request = &mut self.requests[request_idx];
        request.job.deadline = self.now.plus_us(request.patience_us);
        let leaves = request.leaves_after_us;
        let dispatch = Dispatch::new(config, request.job.clone());
        if let Some(delay) = leaves {
            self.after(delay, Occurrence::ClientLeaves(request_idx));
        }
        self.router.open.insert(request_idx, dispatch);
        self.dispatch_event(request_idx, Event::Start);
    }

    pub(crate) fn client_leaves(&mut self, request_idx: usize) {
        if self.requests[request_idx].is_over() {
            return;
        }
        if let Some(phase) = self.requests[request_idx].phase {
            self.outcome.coverage.note(FaultKind::ClientLeaves, phase);
        }
        self.requests[request_idx].client_left = true;
        self.dispatch_event(request_idx, Event::Cancel);
    }

    pub(crate) fn wake_request(&mut self, request_idx: usize, at: Timestamp) {
        let is_due = self.requests[request_idx].wake_at == Some(at);
        if is_due && self.router.open.contains_key(&request_idx) {
            self.requests[request_idx].wake_at = None;
            self.dispatch_event(request_idx, Event::Tick);
        }
    }

    pub(crate) fn dispatch_event(&mut self, request_idx: usize, event: Event) {
        let now = self.now;
        let Some(dispatch) = self.router.open.get_mut(&request_idx) else {
            return;
        };
        let (membership, rng) = (&self.router.membership, &mut self.rng);
        let effects = dispatch.apply(
            event,
            &mut Outside {
                now,
                candidates: &|| membership.candidates(),
                draw_id: &mut || RequestId(rng.next_u128()),
            },
        );
        let (is_ended, wakeup) = (dispatch.is_ended(), dispatch.next_wakeup());
        for effect in effects {
            self.do_dispatch(request_idx, effect);
        }
        if is_ended {
            self.router.open.remove(&request_idx);
            self.forget_calls(request_idx);
            self.leave_all_legs(request_idx);
        } else if let Some(at) = wakeup.map(|at| at.max(self.now.plus_us(1))) {
            let planned = &mut self.requests[request_idx].wake_at;
            if planned.is_none_or(|planned| at < planned) {
                *planned = Some(at);
                self.schedule
                    .push(at, Occurrence::WakeRequest(request_idx, at));
            }
        }
        self.check_request(request_idx);
    }

    fn do_dispatch(&mut self, request_idx: usize, effect: Effect) {
        match effect {
            Effect::Prefill {
                call,
                target,
                request,
            } => {
                self.begin_attempt(request_idx, request.spec.request_id, &target);
                let n_tokens = request.spec.n_context() as u64;
                let message = ToServer::Prefill(request, target.incarnation);
                self.call_node(request_idx, call, &target, n_tokens, message);
            }
            Effect::Generate {
                call,
                target,
                request,
            } => {
                self.begin_attempt(request_idx, request.spec.request_id, &target);
                let n_tokens = request.spec.n_context() as u64;
                let message = ToServer::Generate(request, target.incarnation);
                self.call_node(request_idx, call, &target, n_tokens, message);
            }
            Effect::Rebind {
                call,
                target,
                request_id,
                capability,
                epoch,
            } => {
                let lease = LeaseRef {
                    request_id,
                    capability,
                    epoch,
                };
                self.leave_legs(request_idx, false, |place| {
                    place.request_id == request_id && matches!(place.process, Process::Decode(_))
                });
                let message = ToServer::Rebind(lease, target.incarnation);
                self.call_node(request_idx, call, &target, 0, message);
            }
            Effect::DropCall(call) => self.drop_router_call(request_idx, call),
            Effect::Cancel { target, request_id } => {
                if let Some(to) = process_at(&target.address) {
                    self.cancel(Place {
                        request_id,
                        process: to,
                        incarnation: target.incarnation,
                    });
                }
            }
            Effect::Answer(answer) => self.check_answer(request_idx, answer),
            Effect::Account(_) => {}
            Effect::Report { target, outcome } => {
                let effects = self.router.membership.report(&target, outcome, self.now);
                self.do_membership(effects);
            }
            Effect::Note(Note::Violation) => {
                self.violate(format!(
                    "request {request_idx}: dispatch says that a node broke its rules"
                ));
            }
            Effect::Note(note) => *self.outcome.notes.entry(note.name()).or_default() += 1,
        }
    }

    fn call_node(
        &mut self,
        request_idx: usize,
        call: CallId,
        target: &Target,
        n_tokens: u64,
        message: ToServer,
    ) {
        let Some(server) = process_at(&target.address) else {
            return self.violate(format!("placement chose {}", target.address));
        };
        self.requests[request_idx].touch(server);
        if n_tokens > 0
            && let Some(booking) = self.router.membership.book(target, n_tokens, self.now)
        {
            self.router.bookings.insert((request_idx, call), booking);
        }
        let is_rebind = matches!(message, ToServer::Rebind(..));
        let is_generate = matches!(message, ToServer::Generate(..));
        let number = self.open_call(Process::Router, server, message);
        let known = RouterCall {
            request_idx,
            call,
            is_rebind,
        };
        self.router.calls.insert(number, known);
        if is_generate {
            self.listen(request_idx, number);
        }
    }

    /// A node is called for an attempt that may be new.
    fn begin_attempt(&mut self, request_idx: usize, request_id: RequestId, target: &Target) {
        if self.attempts.insert(request_id, request_idx).is_none() {
            self.requests[request_idx].first_at = None;
        }
        if let Some(process) = process_at(&target.address) {
            let place = Place {
                request_id,
                process,
                incarnation: target.incarnation,
            };
            self.begin_leg(request_idx, place);
        }
    }

    fn drop_router_call(&mut self, request_idx: usize, call: CallId) {
        self.unbook(request_idx, call);
        let known = self
            .router
            .calls
            .iter()
            .find(|(_, known)| known.request_idx == request_idx && known.call == call);
        if let Some((&number, _)) = known {
            self.router.calls.remove(&number);
            self.leave_call(number);
        }
    }

    fn unbook(&mut self, request_idx: usize, call: CallId) {
        if let Some(booking) = self.router.bookings.remove(&(request_idx, call)) {
            self.router.membership.unbook(booking);
        }
    }

    /// The driver of a request drops every call that is still open when the machine has ended.
    fn forget_calls(&mut self, request_idx: usize) {
        let calls: Vec<CallId> = self
            .router
            .calls
            .values()
            .filter(|known| known.request_idx == request_idx)
            .map(|known| known.call)
            .collect();
        for call in calls {
            self.drop_router_call(request_idx, call);
        }
    }

    pub(crate) fn answer_router(&mut self, number: CallId, message: ToClient) {
        let Some(&RouterCall {
            request_idx, call, ..
        }) = self.router.calls.get(&number)
        else {
            return;
        };
        self.note_heard(request_idx, &message);
        if message.is_last() {
            self.router.calls.remove(&number);
            self.unbook(request_idx, call);
        }
        self.requests[request_idx].see(&message);
        let event = match message {
            ToClient::Prefill(event) => Event::Prefill {
                call,
                event: to_router_prefill(event),
            },
            ToClient::Generate(event) => Event::Generate {
                call,
                event: to_router_generate(event),
            },
            ToClient::Rebound(result) => Event::Rebound { call, result },
            ToClient::Export(_) | ToClient::Renewed(_) | ToClient::ReadRefused(_) => return,
        };
        self.dispatch_event(request_idx, event);
    }

    pub(crate) fn router_loses(&mut self, number: CallId) {
        let Some(known) = self.router.calls.remove(&number) else {
            return;
        };
        let RouterCall {
            request_idx, call, ..
        } = known;
        self.unbook(request_idx, call);
        let failure = Failure::new(FailureCode::Unavailable, "the connection broke");
        let event = if known.is_rebind {
            // The driver asks with a deadline and always has an answer.
            Event::Rebound {
                call,
                result: Err(failure),
            }
        } else {
            Event::CallLost { call, failure }
        };
        self.dispatch_event(request_idx, event);
    }
}
