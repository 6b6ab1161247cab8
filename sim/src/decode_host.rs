//! Decode nodes of a history: questions in, effects done.

use crate::message::{ToClient, ToServer};
use crate::network::{End, Process};
use crate::rng::Rng;
use crate::world::World;
use tidemill_core::{CallId, Failure, FailureCode, Incarnation, NodeId};
use tidemill_decode_node::node::{ClaimId, Effect, Event, Exporter, Node, NodeConfig};
use tidemill_engine::intake::ModelFacts;
use tidemill_engine::scheduler::SchedulerConfig;
use tidemill_kv_transfer::transport::TransferError;

/// Where a decode node answers.
pub(crate) fn address(decode_idx: usize) -> String {
    format!("decode-{decode_idx}:1")
}

/// A core in a new life.
pub(crate) fn new_core(
    decode_idx: usize,
    facts: &ModelFacts,
    n_blocks: u32,
    scheduler: SchedulerConfig,
    rng: &mut Rng,
) -> (Incarnation, Node) {
    let incarnation = Incarnation(rng.next_u128());
    let node = Node::new(NodeConfig {
        node_id: NodeId::new(format!("decode-{decode_idx}")).expect("a valid name"),
        incarnation,
        facts: facts.clone(),
        n_blocks,
        scheduler,
    });
    (incarnation, node)
}

/// The process behind an address of ours.
pub(crate) fn process_at(address: &str) -> Option<Process> {
    let (name, _) = address.split_once(':')?;
    let (role, index) = name.split_once('-')?;
    let index = index.parse().ok()?;
    match role {
        "prefill" => Some(Process::Prefill(index)),
        "decode" => Some(Process::Decode(index)),
        _ => None,
    }
}

impl World {
    pub(crate) fn ask_decode(&mut self, decode_idx: usize, call: CallId, message: ToServer) {
        if let ToServer::Generate(request, to) = message {
            self.generating.insert(call, request.spec.request_id);
            let request_id = request.spec.request_id;
            self.note_arrived(Process::Decode(decode_idx), request_id);
            self.note_given(Process::Decode(decode_idx), request_id);
            let held = self.decode_holds(decode_idx, request_id);
            self.decode_event(decode_idx, Event::Generate { call, request, to });
            if !held && self.decode_holds(decode_idx, request_id) {
                self.check_life(Process::Decode(decode_idx), to);
            }
        }
    }

    pub(crate) fn answer_decode(&mut self, decode_idx: usize, call: CallId, message: ToClient) {
        match message {
            ToClient::Export(event) => {
                if let Some(&claim) = self.claims.get(&call) {
                    let is_last = event.is_last();
                    self.decode_event(decode_idx, Event::Exporter { claim, event });
                    if is_last {
                        self.claims.remove(&call);
                        self.decode_event(decode_idx, Event::ClaimEnded { claim });
                    }
                }
            }
            ToClient::Renewed(gone) => {
                if let Some(exporter) = self.renewals.remove(&call) {
                    self.decode_event(decode_idx, Event::Renewed { exporter, gone });
                }
            }
            ToClient::ReadRefused(failure) => {
                self.end_pull(call, Err(TransferError::Refused(failure)));
            }
            ToClient::Prefill(_) | ToClient::Generate(_) | ToClient::Rebound(_) => {}
        }
    }

    /// A call of a decode node has broken, or could not be made.
    pub(crate) fn decode_loses(&mut self, decode_idx: usize, call: CallId) {
        self.renewals.remove(&call);
        if let Some(claim) = self.claims.remove(&call) {
            self.decode_event(decode_idx, Event::ClaimEnded { claim });
        }
        let lost = TransferError::Lost {
            address: "the exporter".to_owned(),
            reason: "the connection broke".to_owned(),
        };
        self.end_pull(call, Err(lost));
    }

    pub(crate) fn decode_event(&mut self, decode_idx: usize, event: Event) {
        let now = self.now;
        let Some(core) = self.decodes[decode_idx].core.as_mut() else {
            return;
        };
        let effects = core.apply(event, now);
        self.do_decode(decode_idx, effects);
        self.maintain_decode(decode_idx);
    }

    pub(crate) fn maintain_decode(&mut self, decode_idx: usize) {
        let now = self.now;
        let Some(core) = self.decodes[decode_idx].core.as_mut() else {
            return;
        };
        let effects = core.maintain(now);
        self.do_decode(decode_idx, effects);
        let end = self.end_of(Process::Decode(decode_idx));
        let Some(core) = self.decodes[decode_idx].core.as_ref() else {
            return;
        };
        let wakeup = core.next_wakeup();
        self.wake_node_at(end, wakeup);
        self.check_decode(decode_idx);
        self.report_load_soon(end);
    }

    fn do_decode(&mut self, decode_idx: usize, effects: Vec<Effect>) {
        let me = Process::Decode(decode_idx);
        let end = self.end_of(me);
        for effect in effects {
            match effect {
                Effect::RunStep(plan) => {
                    let step_id = plan.step_id;
                    let begun = self.decodes[decode_idx].begin_step(plan, &mut self.rng);
                    self.schedule_step(end, step_id, begun);
                }
                Effect::Generate { call, event } => self.answer(call, ToClient::Generate(event)),
                Effect::Claim {
                    claim,
                    exporter,
                    ask,
                    traceparent: _,
                } => {
                    if let Some(server) = self.exporter_process(&exporter) {
                        let message = ToServer::Claim(ask, exporter.incarnation);
                        let call = self.open_call(me, server, message);
                        self.claims.insert(call, claim);
                    }
                }
                Effect::DropClaim(claim) => self.drop_claim(end, claim),
                Effect::Pull { pull, ask } => self.begin_pull(decode_idx, pull, ask),
                Effect::Renew { exporter, leases } => {
                    if let Some(server) = self.exporter_process(&exporter) {
                        let importer = self.decodes[decode_idx].incarnation;
                        let message = ToServer::Renew(importer, leases, exporter.incarnation);
                        let call = self.open_call(me, server, message);
                        self.renewals.insert(call, exporter);
                    }
                }
                Effect::Release { exporter, lease } => {
                    if let Some(server) = self.exporter_process(&exporter) {
                        self.release((me, server), lease, exporter.incarnation);
                    }
                }
            }
        }
    }

    fn drop_claim(&mut self, end: End, claim: ClaimId) {
        let network = &self.network;
        let is_it = |call: &CallId| network.call(*call).is_some_and(|open| open.client == end);
        let calls = self.claims.iter().filter(|(_, known)| **known == claim);
        if let Some(call) = calls.map(|(call, _)| *call).find(is_it) {
            self.claims.remove(&call);
            self.leave_call(call);
        }
    }

    fn exporter_process(&mut self, exporter: &Exporter) -> Option<Process> {
        let process = process_at(&exporter.control_address);
        if process.is_none() {
            self.violate(format!("nobody lives at {}", exporter.control_address));
        }
        process
    }
}

/// What a pull from an exporter that is not there ends with.
pub(crate) fn unreachable() -> TransferError {
    TransferError::Refused(Failure::new(
        FailureCode::Unavailable,
        "no endpoint of this history",
    ))
}
