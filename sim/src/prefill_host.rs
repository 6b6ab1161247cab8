//! Prefill nodes of a history: questions in, effects done.

use crate::host::{Host, VOCAB_SIZE};
use crate::message::{ToClient, ToServer};
use crate::network::Process;
use crate::occurrence::Occurrence;
use crate::rng::Rng;
use crate::world::World;
use tidemill_core::kv_layout::SlicePlace;
use tidemill_core::{
    CallId, Capability, Endpoint, Failure, FailureCode, Incarnation, KvLayout, NodeId, ReadId,
    Slice, TransportKind,
};
use tidemill_engine::intake::ModelFacts;
use tidemill_engine::scheduler::SchedulerConfig;
use tidemill_kernels::memory::SliceAt;
use tidemill_prefill_node::node::{Effect, Event, Node, NodeConfig};

/// Where a prefill node answers, on both planes.
pub(crate) fn address(prefill_idx: usize) -> String {
    format!("prefill-{prefill_idx}:1")
}

/// A core in a new life.
pub(crate) fn new_core(
    prefill_idx: usize,
    facts: &ModelFacts,
    n_blocks: u32,
    scheduler: SchedulerConfig,
    rng: &mut Rng,
) -> (Incarnation, Node) {
    let incarnation = Incarnation(rng.next_u128());
    let mut capabilities = Rng::new(rng.next_u64());
    let node = Node::new(NodeConfig {
        node_id: NodeId::new(format!("prefill-{prefill_idx}")).expect("a valid name"),
        incarnation,
        facts: facts.clone(),
        n_blocks,
        scheduler,
        control_address: address(prefill_idx),
        endpoints: vec![Endpoint {
            transport: TransportKind::Local,
            address: address(prefill_idx),
        }],
        draw_capability: Box::new(move || Capability(capabilities.next_u128())),
    });
    (incarnation, node)
}

impl World {
    pub(crate) fn ask_prefill(&mut self, prefill_idx: usize, call: CallId, message: ToServer) {
        self.note_renewals(prefill_idx, &message);
        let event = match message {
            ToServer::Prefill(request, to) => {
                let request_id = request.spec.request_id;
                self.note_arrived(Process::Prefill(prefill_idx), request_id);
                self.note_given(Process::Prefill(prefill_idx), request_id);
                let held = self.prefill_holds(prefill_idx, request_id);
                self.prefill_event(prefill_idx, Event::Prefill { call, request, to });
                if !held && self.prefill_holds(prefill_idx, request_id) {
                    self.check_life(Process::Prefill(prefill_idx), to);
                }
                return;
            }
            ToServer::Rebind(lease, to) => {
                self.rebinding.insert(call, (lease.request_id, lease.epoch));
                Event::Rebind { call, lease, to }
            }
            ToServer::Claim(claim, to) => Event::Claim { call, claim, to },
            ToServer::Renew(importer, leases, to) => Event::Renew {
                call,
                importer,
                leases,
                to,
            },
            ToServer::Read(ask, to) => {
                // The data plane's handshake names the life that it means.
                if to != self.prefills[prefill_idx].incarnation {
                    let gone = Failure::new(FailureCode::Gone, "another incarnation");
                    return self.answer(call, ToClient::ReadRefused(gone));
                }
                Event::ReadAsked { call, ask }
            }
            ToServer::Generate(..) => return,
        };
        self.prefill_event(prefill_idx, event);
    }

    /// What starts the time of a lease again.
    fn note_renewals(&mut self, prefill_idx: usize, message: &ToServer) {
        let me = Process::Prefill(prefill_idx);
        match message {
            ToServer::Renew(_, leases, _) => {
                for lease in leases {
                    self.note_renewed(me, lease.request_id);
                }
            }
            ToServer::Rebind(lease, _) => self.note_renewed(me, lease.request_id),
            ToServer::Claim(claim, _) => self.note_renewed(me, claim.request_id),
            ToServer::Prefill(..) | ToServer::Read(..) | ToServer::Generate(..) => {}
        }
    }

    pub(crate) fn prefill_event(&mut self, prefill_idx: usize, event: Event) {
        let now = self.now;
        let Some(core) = self.prefills[prefill_idx].core.as_mut() else {
            return;
        };
        let effects = core.apply(event, now);
        self.do_prefill(prefill_idx, effects);
        self.maintain_prefill(prefill_idx);
    }

    pub(crate) fn maintain_prefill(&mut self, prefill_idx: usize) {
        let now = self.now;
        let Some(core) = self.prefills[prefill_idx].core.as_mut() else {
            return;
        };
        let effects = core.maintain(now);
        self.do_prefill(prefill_idx, effects);
        let end = self.end_of(Process::Prefill(prefill_idx));
        let Some(core) = self.prefills[prefill_idx].core.as_ref() else {
            return;
        };
        let wakeup = core.next_wakeup();
        self.wake_node_at(end, wakeup);
        self.check_prefill(prefill_idx);
        self.report_load_soon(end);
    }

    fn do_prefill(&mut self, prefill_idx: usize, effects: Vec<Effect>) {
        let end = self.end_of(Process::Prefill(prefill_idx));
        for effect in effects {
            match effect {
                Effect::RunStep(plan) => {
                    let step_id = plan.step_id;
                    let begun = self.prefills[prefill_idx].begin_step(plan, &mut self.rng);
                    self.schedule_step(end, step_id, begun);
                }
                Effect::Digest { job, places } => {
                    self.prefills[prefill_idx].n_digesting += 1;
                    let delay = self.rng.between(10, 300);
                    self.after(delay, Occurrence::Digest(end, job, places));
                }
                Effect::Prefill { call, event } => self.answer(call, ToClient::Prefill(event)),
                Effect::Export { call, event } => self.answer(call, ToClient::Export(event)),
                Effect::Renewed { call, gone, .. } => self.answer(call, ToClient::Renewed(gone)),
                Effect::Rebound { call, result } => {
                    if let Some((request_id, epoch)) = self.rebinding.remove(&call)
                        && result.is_ok()
                    {
                        self.epochs.insert(request_id, epoch);
                    }
                    self.answer(call, ToClient::Rebound(result));
                }
                Effect::ReadDecided { call, result } => self.decide_read(prefill_idx, call, result),
            }
        }
    }

    pub(crate) fn digest(&mut self, end: crate::network::End, job: ReadId, places: &[SlicePlace]) {
        let Process::Prefill(prefill_idx) = end.process else {
            return;
        };
        let host = &mut self.prefills[prefill_idx];
        host.n_digesting -= 1;
        let digests = places
            .iter()
            .map(|place| (place.slice, digest_of(host, place)))
            .collect();
        self.prefill_event(prefill_idx, Event::Digested { job, digests });
    }
}

fn digest_of(host: &Host<Node>, place: &SlicePlace) -> tidemill_core::Digest {
    host.arena
        .digest(at(place.slice, place))
        .expect("the core names blocks of its pool")
}

/// Where a slice lies.
pub(crate) fn at(slice: Slice, place: &SlicePlace) -> SliceAt {
    SliceAt {
        block: place.block,
        group: slice.group,
    }
}

/// What every node of a history serves.
pub(crate) fn facts(layout: &KvLayout) -> ModelFacts {
    ModelFacts {
        vocab_size: VOCAB_SIZE,
        context_length: 256,
        layout: layout.clone(),
    }
}
