//! The ways in which bytes move between two pools.
//!
//! A transport reads slices of a peer's pool into blocks of its own; the exporter's node grants every read and hears
//! of its end (`gate`). `local` copies within a process, `tcp` has its own framing (`frame`). The rule that keeps
//! memory whole: a pull writes to its target blocks only while its future runs, so that whoever has its result, or
//! has dropped it, may use the blocks again.

#[cfg(test)]
mod conformance;
pub mod frame;
pub mod gate;
pub mod local;
pub mod tcp;

use self::frame::FrameError;
use crate::plan::PlanError;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tidemill_core::kv_layout::SlicePlace;
use tidemill_core::{
    Capability, Digest, Endpoint, Epoch, Failure, FailureCode, Incarnation, RequestId, Slice,
    TransportKind,
};
use tidemill_kernels::memory::MemoryError;

/// A future on the heap: what a trait object can return.
pub type Pending<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What to read, from whom, into which blocks of ours.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PullRequest {
    /// Whose KV.
    pub request_id: RequestId,
    /// The right to it.
    pub capability: Capability,
    /// Under which epoch.
    pub epoch: Epoch,
    /// The exporter's life; another one is refused.
    pub exporter: Incarnation,
    /// Where the exporter answers (`KvHandle::endpoints`).
    pub endpoints: Vec<Endpoint>,
    /// The slices and the blocks of *our* pool that take them.
    pub places: Vec<SlicePlace>,
}

/// What a pull has brought.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PullOutcome {
    /// Checksums of the bytes as they lie in our pool now.
    pub digests: Vec<(Slice, Digest)>,
    /// Bytes copied.
    pub n_bytes: u64,
}

/// How a pull ends.
pub type PullResult = Result<PullOutcome, TransferError>;

/// Why bytes did not arrive. None of these leaves anything running.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TransferError {
    /// The exporter said no.
    #[error("the exporter refused: {0}")]
    Refused(Failure),
    /// Nobody answers there.
    #[error("no connection to {address}: {reason}")]
    Unreachable {
        /// The endpoint's address.
        address: String,
        /// Why.
        reason: String,
    },
    /// The connection broke.
    #[error("the connection to {address} broke: {reason}")]
    Lost {
        /// The endpoint's address.
        address: String,
        /// Why.
        reason: String,
    },
    /// The peer keeps the connection and sends nothing.
    #[error("{address} sent nothing for {waited_ms} ms")]
    Stalled {
        /// The endpoint's address.
        address: String,
        /// How long.
        waited_ms: u64,
    },
    /// The peer does not speak our protocol.
    #[error("malformed frame: {0}")]
    Malformed(FrameError),
    /// The two pools cannot exchange slices.
    #[error(transparent)]
    Layout(#[from] PlanError),
    /// The copied bytes are not those that were announced.
    #[error("the copied bytes differ from their announced digest")]
    Digest,
    /// A place that our own pool does not have.
    #[error("{0}")]
    Place(String),
    /// The exporter offers no transport that we have.
    #[error("no common transport: the exporter offers [{offered}], this node has [{ours}]")]
    NoTransport {
        /// Its kinds.
        offered: String,
        /// Our kinds.
        ours: String,
    },
}

impl TransferError {
    /// The failure that a request ends with.
    pub fn to_failure(&self) -> Failure {
        match self {
            Self::Refused(failure) => failure.clone(),
            other => Failure::new(FailureCode::TransferFailed, other.to_string()),
        }
    }
}

/// What a request is told is one text, so this is no source but a part of it.
impl From<FrameError> for TransferError {
    fn from(error: FrameError) -> Self {
        Self::Malformed(error)
    }
}

impl From<MemoryError> for TransferError {
    fn from(error: MemoryError) -> Self {
        Self::Place(error.to_string())
    }
}

/// One way to read from a peer's pool into ours.
pub trait Transport: Send + Sync {
    /// Which one.
    fn kind(&self) -> TransportKind;

    /// True when an endpoint of this kind can be tried from here at all.
    fn reaches(&self, endpoint: &Endpoint) -> bool;

    /// Shakes hands with an exporter, so that the first pull finds a connection and a wrong address, layout or life is
    /// found before there is work.
    fn warm<'a>(
        &'a self,
        endpoint: &'a Endpoint,
        exporter: Incarnation,
    ) -> Pending<'a, Result<(), TransferError>>;

    /// Reads slices from `endpoint` into our blocks. The caller owns the blocks of `request.places`, each slice once,
    /// until the future has ended or is dropped; nothing writes to them afterwards.
    fn pull<'a>(
        &'a self,
        endpoint: &'a Endpoint,
        request: &'a PullRequest,
    ) -> Pending<'a, PullResult>;
}

/// The transports of a node, best first.
pub struct Transports {
    ours: Vec<Arc<dyn Transport>>,
    n_fallbacks: AtomicU64,
}

impl Transports {
    /// Tries them in this order.
    pub fn new(ours: Vec<Arc<dyn Transport>>) -> Self {
        Self {
            ours,
            n_fallbacks: AtomicU64::new(0),
        }
    }

    /// Pulls over the best transport that both sides have.
    ///
    /// # Errors
    /// See `TransferError`.
    pub async fn pull(&self, request: &PullRequest) -> PullResult {
        let (transport, endpoint) = self.choose(&request.endpoints)?;
        transport.pull(endpoint, request).await
    }

    /// Shakes hands over the best transport that both sides have, and names it.
    ///
    /// # Errors
    /// See `TransferError`.
    pub async fn warm(
        &self,
        endpoints: &[Endpoint],
        exporter: Incarnation,
    ) -> Result<TransportKind, TransferError> {
        let (transport, endpoint) = self.choose(endpoints)?;
        transport.warm(endpoint, exporter).await?;
        Ok(transport.kind())
    }

    /// Pulls that could not use a better transport that the exporter had offered.
    pub fn n_fallbacks(&self) -> u64 {
        self.n_fallbacks.load(Ordering::Relaxed)
    }

    fn choose<'a>(
        &'a self,
        offered: &'a [Endpoint],
    ) -> Result<(&'a dyn Transport, &'a Endpoint), TransferError> {
        let mut is_fallback = false;
        for transport in &self.ours {
            let kind = transport.kind();
            for endpoint in offered.iter().filter(|offer| offer.transport == kind) {
                if transport.reaches(endpoint) {
                    if is_fallback {
                        self.n_fallbacks.fetch_add(1, Ordering::Relaxed);
                    }
                    return Ok((transport.as_ref(), endpoint));
                }
                is_fallback = true;
            }
        }
        let names = |kinds: &mut dyn Iterator<Item = TransportKind>| {
            kinds
                .map(TransportKind::name)
                .collect::<Vec<_>>()
                .join(", ")
        };
        Err(TransferError::NoTransport {
            offered: names(&mut offered.iter().map(|endpoint| endpoint.transport)),
            ours: names(&mut self.ours.iter().map(|transport| transport.kind())),
        })
    }
}
