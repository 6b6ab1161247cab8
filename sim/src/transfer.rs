//! Slices on their way: real bytes, copied out of one arena and into another at points in time, slice by slice,
//! so that whatever writes in between shows.

use crate::calls::BREAK_PER_MILLE;
use crate::coverage::FaultKind;
use crate::decode_host::{process_at, unreachable};
use crate::message::{ToClient, ToServer};
use crate::network::{End, Process};
use crate::occurrence::Occurrence;
use crate::prefill_host::at;
use crate::world::World;
use tidemill_core::kv_layout::SlicePlace;
use tidemill_core::{CallId, Epoch, Failure, RequestId};
use tidemill_decode_node::node::{Event, PullId};
use tidemill_kv_transfer::export::{ReadAsk, ReadGrant};
use tidemill_kv_transfer::transport::{PullOutcome, PullRequest, PullResult};
use tidemill_prefill_node::node as prefill;

/// One pull.
pub(crate) struct Transfer {
    pull: PullId,
    importer: End,
    pub(crate) request_id: RequestId,
    pub(crate) epoch: Epoch,
    /// Where the slices go.
    places: Vec<SlicePlace>,
    /// What the exporter lends; `None` until it has decided and after its last byte.
    grant: Option<ReadGrant>,
    n_bytes: u64,
    n_arrived: usize,
    /// The importer has heard its end.
    is_told: bool,
}

impl World {
    pub(crate) fn begin_pull(&mut self, decode_idx: usize, pull: PullId, ask: PullRequest) {
        let me = Process::Decode(decode_idx);
        let importer = self.end_of(me);
        let server = ask
            .endpoints
            .iter()
            .find_map(|endpoint| process_at(&endpoint.address));
        let read = ReadAsk {
            request_id: ask.request_id,
            capability: ask.capability,
            epoch: ask.epoch,
            importer: self.decodes[decode_idx].incarnation,
            slices: ask.places.iter().map(|place| place.slice).collect(),
        };
        let Some(server) = server else {
            let result = Err(unreachable());
            return self.decode_event(decode_idx, Event::PullDone { pull, result });
        };
        let call = self.open_call(me, server, ToServer::Read(read, ask.exporter));
        let transfer = Transfer {
            pull,
            importer,
            request_id: ask.request_id,
            epoch: ask.epoch,
            places: ask.places,
            grant: None,
            n_bytes: 0,
            n_arrived: 0,
            is_told: false,
        };
        self.transfers.insert(call, transfer);
    }

    /// The exporter's node has decided.
    pub(crate) fn decide_read(
        &mut self,
        prefill_idx: usize,
        call: CallId,
        result: Result<ReadGrant, Failure>,
    ) {
        match result {
            Err(failure) => self.answer(call, ToClient::ReadRefused(failure)),
            Ok(grant) => {
                self.check_granted(call);
                let is_open = self.network.call(call).is_some();
                match self.transfers.get_mut(&call) {
                    Some(transfer) if is_open => {
                        transfer.grant = Some(grant);
                        let delay = self.rng.between(1, 50);
                        self.after(delay, Occurrence::CopyOut(call, 0));
                    }
                    // The importer is gone: the read ends before it begins.
                    _ => self.prefill_event(prefill_idx, prefill::Event::ReadEnded(grant.read)),
                }
            }
        }
    }

    /// A slice leaves the exporter's arena.
    pub(crate) fn copy_out(&mut self, call: CallId, place_idx: usize) {
        let (Some(open), Some(transfer)) = (self.network.call(call), self.transfers.get(&call))
        else {
            return;
        };
        let (Process::Prefill(prefill_idx), Some(grant)) = (open.server.process, &transfer.grant)
        else {
            return;
        };
        let place = grant.places[place_idx];
        let n_places = grant.places.len();
        let arena = &self.prefills[prefill_idx].arena;
        let mut bytes = vec![
            0;
            arena
                .slice_bytes(place.slice.group)
                .expect("a group of the layout")
        ];
        arena
            .copy_out(at(place.slice, &place), &mut bytes)
            .expect("the core grants blocks of its pool");
        let about = Some(transfer.request_id);
        if self.strikes(FaultKind::CorruptSlice, 100, about) {
            let byte_idx = usize::try_from(self.rng.below(bytes.len() as u64)).expect("an index");
            bytes[byte_idx] ^= 1 << self.rng.below(8);
        }
        if self.strikes(FaultKind::DropMessage, BREAK_PER_MILLE, about) {
            return self.break_call(call);
        }
        if let Some(arrives) = self.network.reach_client(call, self.now, &mut self.rng) {
            self.schedule
                .push(arrives, Occurrence::CopyIn(call, place_idx, bytes));
        }
        if place_idx + 1 == n_places {
            self.end_lent_read(prefill_idx, call);
        } else {
            let delay = if self.rng.chance(20) {
                self.rng.between(1_000, 2_000_000)
            } else {
                self.rng.between(1, 60)
            };
            self.after(delay, Occurrence::CopyOut(call, place_idx + 1));
        }
    }

    /// A slice reaches the importer's arena.
    pub(crate) fn copy_in(&mut self, call: CallId, place_idx: usize, bytes: &[u8]) {
        if self.network.call(call).is_none() {
            return;
        }
        let Some(transfer) = self.transfers.get_mut(&call) else {
            return;
        };
        let Process::Decode(decode_idx) = transfer.importer.process else {
            return;
        };
        // Both sides name the same slices in the same order.
        let place = transfer.places[place_idx];
        self.decodes[decode_idx]
            .arena
            .copy_in(at(place.slice, &place), bytes)
            .expect("our own places");
        transfer.n_bytes += bytes.len() as u64;
        transfer.n_arrived += 1;
        if transfer.n_arrived == transfer.places.len() {
            let arena = &self.decodes[decode_idx].arena;
            let digests = transfer
                .places
                .iter()
                .map(|place| {
                    (
                        place.slice,
                        arena
                            .digest(at(place.slice, place))
                            .expect("our own places"),
                    )
                })
                .collect();
            let n_bytes = transfer.n_bytes;
            self.network.close(call);
            self.end_pull(call, Ok(PullOutcome { digests, n_bytes }));
        }
    }

    /// Tells the importer, once, that nobody writes to its blocks any more.
    pub(crate) fn end_pull(&mut self, call: CallId, result: PullResult) {
        let Some(transfer) = self
            .transfers
            .get_mut(&call)
            .filter(|transfer| !transfer.is_told)
        else {
            return;
        };
        transfer.is_told = true;
        let (importer, pull) = (transfer.importer, transfer.pull);
        if transfer.grant.is_none() {
            self.transfers.remove(&call);
        }
        if let Process::Decode(decode_idx) = importer.process
            && self.is_alive(importer)
        {
            self.decode_event(decode_idx, Event::PullDone { pull, result });
        }
    }

    /// Tells the exporter, once, that nobody reads its blocks any more.
    pub(crate) fn end_lent_read(&mut self, prefill_idx: usize, call: CallId) {
        let Some(transfer) = self.transfers.get_mut(&call) else {
            return;
        };
        let Some(grant) = transfer.grant.take() else {
            return;
        };
        if transfer.is_told || !self.is_alive_importer(call) {
            self.transfers.remove(&call);
        }
        self.prefill_event(prefill_idx, prefill::Event::ReadEnded(grant.read));
    }

    /// True while a read of this exporter is under way.
    pub(crate) fn is_lending(&self, prefill_idx: usize) -> bool {
        self.transfers.iter().any(|(call, transfer)| {
            transfer.grant.is_some()
                && self
                    .network
                    .call(*call)
                    .is_none_or(|open| open.server.process == Process::Prefill(prefill_idx))
        })
    }

    /// True while a pull of this importer is under way.
    pub(crate) fn is_pulling(&self, decode_idx: usize) -> bool {
        let me = self.end_of(Process::Decode(decode_idx));
        self.transfers
            .values()
            .any(|transfer| transfer.importer == me && !transfer.is_told)
    }

    fn is_alive_importer(&self, call: CallId) -> bool {
        self.transfers
            .get(&call)
            .is_some_and(|transfer| self.is_alive(transfer.importer))
    }
}
