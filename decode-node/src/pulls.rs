//! Pulls on their way: each in a task of its own that reads slices from an exporter straight into this node's
//! blocks and reports its end, whatever happens. Until that report nobody else uses the blocks.

use crate::node::{Event, PullId};
use crate::run::Input;
use futures::FutureExt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use tidemill_core::Incarnation;
use tidemill_kernels::memory::KvArena;
use tidemill_kv_transfer::transport::local::{Exchange, LocalTransport};
use tidemill_kv_transfer::transport::tcp::{Limits, TcpTransport};
use tidemill_kv_transfer::transport::{PullRequest, TransferError, Transport, Transports};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// The transports of a node and the pulls that use them.
pub(crate) struct Pulls {
    transports: Arc<Transports>,
    tasks: JoinSet<()>,
    reports: mpsc::Sender<Input>,
}

impl Pulls {
    /// Reads within the process where `exchange` knows the exporter, else over TCP.
    pub(crate) fn new(
        exchange: Option<Exchange>,
        arena: &Arc<KvArena>,
        importer: Incarnation,
        reports: mpsc::Sender<Input>,
    ) -> Self {
        let mut ours: Vec<Arc<dyn Transport>> = Vec::new();
        if let Some(exchange) = exchange {
            let local = LocalTransport::new(importer, Arc::clone(arena), exchange);
            ours.push(Arc::new(local));
        }
        let tcp = TcpTransport::new(importer, Arc::clone(arena), Limits::default());
        ours.push(Arc::new(tcp));
        Self {
            transports: Arc::new(Transports::new(ours)),
            tasks: JoinSet::new(),
            reports,
        }
    }

    /// Starts a pull. The core bounds how many there are.
    pub(crate) fn start(&mut self, pull: PullId, ask: PullRequest) {
        while self.tasks.try_join_next().is_some() {}
        let transports = Arc::clone(&self.transports);
        let reports = self.reports.clone();
        let span = tracing::debug_span!("pull", request_id = %ask.request_id);
        let pulling = async move {
            let copying = AssertUnwindSafe(transports.pull(&ask)).catch_unwind();
            let result = copying.await.unwrap_or_else(|_| {
                Err(TransferError::Lost {
                    address: "the exporter".to_owned(),
                    reason: "the pull panicked".to_owned(),
                })
            });
            match &result {
                Ok(outcome) => tracing::debug!(outcome.n_bytes, "pulled"),
                Err(error) => tracing::debug!(%error, "a pull has failed"),
            }
            // An ended loop has no blocks any more.
            let _ = reports
                .send(Input::Event(Event::PullDone { pull, result }))
                .await;
        };
        self.tasks
            .spawn(tracing::Instrument::instrument(pulling, span));
    }
}
