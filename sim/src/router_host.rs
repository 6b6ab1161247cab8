//! The router of a history: its membership, and one dispatch machine for each open request.

use crate::coverage::FaultKind;
use crate::decode_host::process_at;
use crate::message::{Notice, ToClient, ToServer, to_router_generate, to_router_prefill};
use crate::network::{End, Process};
use crate::occurrence::Occurrence;
use crate::prefill_host;
use crate::world::World;
use std::collections::BTreeMap;
use tidemill_core::kv_layout::PROTOCOL_REVISION;
use tidemill_core::{CallId, Failure, FailureCode, RequestId, Role, Timestamp};
use tidemill_kv_transfer::export::LeaseRef;
use tidemill_proto::convert::NodeDescription;
use tidemill_router::dispatch::{Dispatch, DispatchConfig, Effect, Event, Note, Outside};
use tidemill_router::membership::{self, BookingId, Membership, MembershipConfig};
use tidemill_router::placement::{SplitPolicy, Target};
use tidemill_service::discovery::NodeEntry;

/// Least time between two load reports of a node.
const REPORT_GAP_US: u64 = 20_000;

/// The router's present life.
pub(crate) struct RouterHost {
    pub(crate) life: u32,
    pub(crate) is_up: bool,
    pub(crate) split: SplitPolicy,
    pub(crate) membership: Membership,
    pub(crate) open: BTreeMap<usize, Dispatch>,
    /// Whose call it is, and under which number.
    calls: BTreeMap<CallId, (usize, CallId)>,
    bookings: BTreeMap<(usize, CallId), BookingId>,
    /// Which nodes are watched, in which life.
    watched: BTreeMap<NodeEntry, tidemill_core::Incarnation>,
    membership_wake_at: Option<Timestamp>,
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
            self.requests[request_idx].lose();
            return;
        }
        let config = DispatchConfig {
            split: self.router.split,
            ..DispatchConfig::default()
        };
        let request = &mut self.requests[request_idx];
        request.has_arrived = true;
        let dispatch = Dispatch::new(config, request.job.clone());
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
                self.attempts.insert(request.spec.request_id, request_idx);
                let n_tokens = request.spec.n_context() as u64;
                let message = ToServer::Prefill(request, target.incarnation);
                self.call_node(request_idx, call, &target, n_tokens, message);
            }
            Effect::Generate {
                call,
                target,
                request,
            } => {
                self.attempts.insert(request.spec.request_id, request_idx);
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
                let message = ToServer::Rebind(lease, target.incarnation);
                self.call_node(request_idx, call, &target, 0, message);
            }
            Effect::DropCall(call) => self.drop_router_call(request_idx, call),
            Effect::Cancel { target, request_id } => {
                if let Some(to) = process_at(&target.address) {
                    let notice = Notice::Cancel(request_id, target.incarnation);
                    self.send_notice(Process::Router, to, notice);
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
        let number = self.open_call(Process::Router, server, message);
        self.router.calls.insert(number, (request_idx, call));
    }

    fn drop_router_call(&mut self, request_idx: usize, call: CallId) {
        self.unbook(request_idx, call);
        let known = self
            .router
            .calls
            .iter()
            .find(|(_, known)| **known == (request_idx, call));
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
            .filter(|(owner, _)| *owner == request_idx)
            .map(|(_, call)| *call)
            .collect();
        for call in calls {
            self.drop_router_call(request_idx, call);
        }
    }

    pub(crate) fn answer_router(&mut self, number: CallId, message: ToClient) {
        let Some(&(request_idx, call)) = self.router.calls.get(&number) else {
            return;
        };
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
        if let Some((request_idx, call)) = self.router.calls.remove(&number) {
            self.unbook(request_idx, call);
            let failure = Failure::new(FailureCode::Unavailable, "the connection broke");
            self.dispatch_event(request_idx, Event::CallLost { call, failure });
        }
    }

    // ---- Membership -------------------------------------------------------------------------------------------

    /// Discovery's list never changes: nodes come back at their addresses.
    pub(crate) fn begin_membership(&mut self) {
        let prefills = (0..self.prefills.len()).map(|i| NodeEntry {
            role: Role::Prefill,
            address: prefill_host::address(i),
        });
        let decodes = (0..self.decodes.len()).map(|i| NodeEntry {
            role: Role::Decode,
            address: crate::decode_host::address(i),
        });
        let entries = prefills.chain(decodes).collect();
        self.membership_event(membership::Event::Entries(entries));
    }

    pub(crate) fn membership_event(&mut self, event: membership::Event) {
        let effects = self.router.membership.apply(event, self.now);
        self.do_membership(effects);
    }

    fn do_membership(&mut self, effects: Vec<membership::Effect>) {
        for effect in effects {
            match effect {
                membership::Effect::Describe(entry) => {
                    if let Some(process) = process_at(&entry.address) {
                        let delay = self
                            .network
                            .delay_us(Process::Router, process, &mut self.rng);
                        self.after(2 * delay, Occurrence::Describe(process));
                    }
                }
                membership::Effect::Watch { entry, incarnation } => {
                    self.router.watched.insert(entry.clone(), incarnation);
                    if let Some(process) = process_at(&entry.address) {
                        self.after(100, Occurrence::LoadReport(self.end_of(process)));
                    }
                }
                membership::Effect::Unwatch(entry) => {
                    self.router.watched.remove(&entry);
                }
                membership::Effect::Tell { .. } => {}
            }
        }
        if let Some(at) = self.router.membership.next_wakeup() {
            let at = at.max(self.now.plus_us(1));
            if self
                .router
                .membership_wake_at
                .is_none_or(|planned| at < planned || planned <= self.now)
            {
                self.router.membership_wake_at = Some(at);
                self.schedule
                    .push(at, Occurrence::Describe(Process::Router));
            }
        }
    }

    fn entry_of(&self, process: Process) -> NodeEntry {
        match process {
            Process::Prefill(i) => NodeEntry {
                role: Role::Prefill,
                address: prefill_host::address(i),
            },
            Process::Decode(i) => NodeEntry {
                role: Role::Decode,
                address: crate::decode_host::address(i),
            },
            Process::Router => unreachable!("the router describes others"),
        }
    }

    /// A describe is answered; for the router itself: membership's time has come.
    pub(crate) fn describe(&mut self, process: Process) {
        if !self.router.is_up {
            return;
        }
        if process == Process::Router {
            self.router.membership_wake_at = None;
            return self.membership_event(membership::Event::Tick);
        }
        let is_reached = self.is_running(process) && self.network.is_up(Process::Router, process);
        let result = if is_reached {
            Ok(self.description(process))
        } else {
            Err("nobody answers".to_owned())
        };
        let entry = self.entry_of(process);
        self.membership_event(membership::Event::Described { entry, result });
    }

    fn description(&self, process: Process) -> NodeDescription {
        let (role, index, incarnation) = match process {
            Process::Prefill(i) => (Role::Prefill, i, self.prefills[i].incarnation),
            Process::Decode(i) => (Role::Decode, i, self.decodes[i].incarnation),
            Process::Router => unreachable!("the router describes others"),
        };
        NodeDescription {
            node_id: tidemill_core::NodeId::new(format!("{}-{index}", role.name())).expect("valid"),
            incarnation,
            role,
            model_name: "simulated".into(),
            model_fingerprint: self.layout.model_fingerprint,
            text_fingerprint: [2; 32],
            layout_fingerprint: self.layout.fingerprint(),
            protocol_revision: PROTOCOL_REVISION,
            vocab_size: prefill_host::facts(&self.layout).vocab_size,
            context_length: prefill_host::facts(&self.layout).context_length,
            endpoints: Vec::new(),
            version: "simulated".into(),
        }
    }

    /// Load reports flow a while after something has changed, never in a flood.
    pub(crate) fn report_load_soon(&mut self, end: End) {
        let reported_at = match end.process {
            Process::Prefill(i) => &mut self.prefills[i].reported_at,
            Process::Decode(i) => &mut self.decodes[i].reported_at,
            Process::Router => return,
        };
        if *reported_at <= self.now {
            *reported_at = self.now.plus_us(REPORT_GAP_US);
            self.schedule
                .push(*reported_at, Occurrence::LoadReport(end));
        }
    }

    pub(crate) fn report_load(&mut self, process: Process) {
        let entry = self.entry_of(process);
        let is_watched = self.router.is_up && self.router.watched.contains_key(&entry);
        if !is_watched || !self.network.is_up(Process::Router, process) {
            return;
        }
        let report = match process {
            Process::Prefill(i) => self.prefills[i]
                .core
                .as_mut()
                .map(|core| core.load_report()),
            Process::Decode(i) => self.decodes[i].core.as_mut().map(|core| core.load_report()),
            Process::Router => None,
        };
        if let Some(report) = report {
            self.membership_event(membership::Event::Reported { entry, report });
        }
    }

    /// The router's watches of a process end.
    pub(crate) fn end_watch(&mut self, process: Process) {
        let entry = self.entry_of(process);
        if let Some(incarnation) = self.router.watched.remove(&entry)
            && self.router.is_up
        {
            self.membership_event(membership::Event::WatchEnded { entry, incarnation });
        }
    }
}
