//! Copies within one process: the importer reads the exporter's pool directly, after the same grant as over a wire.
//!
//! An `Exchange` is the meeting point of the nodes of one process; it is handed to them, not global, so that tests and
//! several deployments in one process do not see each other. An exporter that leaves takes its entry along. Between
//! two slices the task gives way, so that a long prompt does not hold up the runtime.

use super::gate::ReadGate;
use super::{Pending, PullOutcome, PullRequest, PullResult, TransferError, Transport};
use crate::export::{READ_SLICES_MAX, ReadAsk};
use crate::plan::plan;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use tidemill_core::kv_layout::SlicePlace;
use tidemill_core::{Endpoint, Failure, FailureCode, Incarnation, TransportKind};
use tidemill_kernels::memory::{KvArena, SliceAt};

/// What an exporter shows to its peers in the process.
#[derive(Clone, Debug)]
pub struct LocalExporter {
    /// Its life.
    pub incarnation: Incarnation,
    /// Its pool.
    pub arena: Arc<KvArena>,
    /// Its node.
    pub gate: ReadGate,
}

/// The exporters of one process, by the address in their `local` endpoint.
#[derive(Clone, Default, Debug)]
pub struct Exchange(Arc<Mutex<HashMap<String, LocalExporter>>>);

impl Exchange {
    /// Shows an exporter under an address until the result is dropped; a former one of that address is replaced.
    pub fn register(&self, address: impl Into<String>, exporter: LocalExporter) -> Registration {
        let address = address.into();
        let incarnation = exporter.incarnation;
        self.lock().insert(address.clone(), exporter);
        Registration {
            exchange: self.clone(),
            address,
            incarnation,
        }
    }

    fn find(&self, address: &str) -> Option<LocalExporter> {
        self.lock().get(address).cloned()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, LocalExporter>> {
        // Nothing in here can be half done when a holder panics.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps an exporter visible.
#[derive(Debug)]
pub struct Registration {
    exchange: Exchange,
    address: String,
    incarnation: Incarnation,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut exporters = self.exchange.lock();
        // A newer life under the same address stays.
        if exporters
            .get(&self.address)
            .is_some_and(|exporter| exporter.incarnation == self.incarnation)
        {
            exporters.remove(&self.address);
        }
    }
}

/// The importing side.
pub struct LocalTransport {
    importer: Incarnation,
    arena: Arc<KvArena>,
    exchange: Exchange,
}

impl LocalTransport {
    /// Reads from the exporters of `exchange` into `arena`.
    pub fn new(importer: Incarnation, arena: Arc<KvArena>, exchange: Exchange) -> Self {
        Self {
            importer,
            arena,
            exchange,
        }
    }

    fn meet(
        &self,
        endpoint: &Endpoint,
        meant: Incarnation,
    ) -> Result<LocalExporter, TransferError> {
        let exporter =
            self.exchange
                .find(&endpoint.address)
                .ok_or_else(|| TransferError::Unreachable {
                    address: endpoint.address.clone(),
                    reason: "no such exporter in this process".into(),
                })?;
        if exporter.incarnation != meant {
            return Err(TransferError::Refused(Failure::new(
                FailureCode::Gone,
                format!(
                    "{} is now incarnation {}, not {meant}",
                    endpoint.address, exporter.incarnation
                ),
            )));
        }
        plan(exporter.arena.layout(), self.arena.layout())?;
        Ok(exporter)
    }

    async fn copy(&self, endpoint: &Endpoint, request: &PullRequest) -> PullResult {
        let mut outcome = PullOutcome {
            digests: Vec::with_capacity(request.places.len()),
            n_bytes: 0,
        };
        let exporter = self.meet(endpoint, request.exporter)?;
        for places in request.places.chunks(READ_SLICES_MAX) {
            let ask = ReadAsk {
                request_id: request.request_id,
                capability: request.capability,
                epoch: request.epoch,
                importer: self.importer,
                slices: places.iter().map(|place| place.slice).collect(),
            };
            let held = exporter
                .gate
                .ask(ask)
                .await
                .map_err(TransferError::Refused)?;
            for (from, to) in held.places().iter().zip(places) {
                self.copy_slice(&exporter.arena, from, to, &mut outcome)?;
                tokio::task::yield_now().await;
            }
        }
        Ok(outcome)
    }

    fn copy_slice(
        &self,
        theirs: &KvArena,
        from: &SlicePlace,
        to: &SlicePlace,
        outcome: &mut PullOutcome,
    ) -> Result<(), TransferError> {
        let group = to.slice.group;
        theirs.check(from.block)?;
        self.arena.check(to.block)?;
        let n_bytes = self.arena.slice_bytes(group)?;
        let range = self.arena.layout().group_byte_range(group);
        // SAFETY: the held read makes us an owner of the exporter's block, whose final slices nobody writes; the
        // layouts are equal, so the range is the slice there too.
        let source = unsafe { theirs.slice(from.block, range) };
        let at = SliceAt {
            block: to.block,
            group,
        };
        self.arena.copy_in(at, source)?;
        outcome.digests.push((to.slice, self.arena.digest(at)?));
        outcome.n_bytes += n_bytes as u64;
        Ok(())
    }
}

impl Transport for LocalTransport {
    fn kind(&self) -> TransportKind {
        TransportKind::Local
    }

    fn reaches(&self, endpoint: &Endpoint) -> bool {
        self.exchange.find(&endpoint.address).is_some()
    }

    fn warm<'a>(
        &'a self,
        endpoint: &'a Endpoint,
        exporter: Incarnation,
    ) -> Pending<'a, Result<(), TransferError>> {
        Box::pin(async move { self.meet(endpoint, exporter).map(|_| ()) })
    }

    fn pull<'a>(
        &'a self,
        endpoint: &'a Endpoint,
        request: &'a PullRequest,
    ) -> Pending<'a, PullResult> {
        Box::pin(self.copy(endpoint, request))
    }
}
