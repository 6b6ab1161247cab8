//! The importing side: a few connections to each exporter's life, and reads straight into our blocks.
//!
//! A pull takes a connection out of its peer's set and puts it back only after a clean answer; so a pull that fails or
//! is dropped half-way closes its connection, and with it everything that could still write. A kept connection that the
//! exporter has closed meanwhile is replaced once, silently.

use super::super::frame::{Frame, FrameError, Hello, Read};
use super::super::{Pending, PullOutcome, PullRequest, PullResult, TransferError, Transport};
use super::Limits;
use super::wire::{Wire, stalled};
use crate::export::READ_SLICES_MAX;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tidemill_core::kv_layout::SlicePlace;
use tidemill_core::{Endpoint, Incarnation, TransportKind};
use tidemill_kernels::memory::{KvArena, SliceAt};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Exporters whose connections are kept.
const PEERS_MAX: usize = 1024;

/// Reads from exporters over TCP.
pub struct TcpTransport {
    importer: Incarnation,
    arena: Arc<KvArena>,
    limits: Limits,
    /// One life of an exporter for each address.
    peers: Mutex<HashMap<String, (Incarnation, Arc<Peer>)>>,
}

struct Peer {
    turns: Semaphore,
    kept: Mutex<Vec<Kept>>,
}

struct Kept {
    wire: Wire,
    since: Instant,
}

impl TcpTransport {
    /// Reads into `arena`.
    pub fn new(importer: Incarnation, arena: Arc<KvArena>, limits: Limits) -> Self {
        Self {
            importer,
            arena,
            limits,
            peers: Mutex::new(HashMap::new()),
        }
    }

    /// The connections to one life of an exporter. Those to a former life are closed here.
    fn peer(&self, address: &str, exporter: Incarnation) -> Arc<Peer> {
        let mut peers = lock(&self.peers);
        if let Some((incarnation, peer)) = peers.get(address)
            && *incarnation == exporter
        {
            return Arc::clone(peer);
        }
        if peers.len() >= PEERS_MAX {
            // Only those that nobody uses right now; they are made again when needed.
            peers.retain(|_, (_, peer)| Arc::strong_count(peer) > 1);
        }
        let peer = Arc::new(Peer {
            turns: Semaphore::new(self.limits.n_streams.max(1)),
            kept: Mutex::new(Vec::new()),
        });
        peers.insert(address.to_owned(), (exporter, Arc::clone(&peer)));
        peer
    }

    async fn connect(&self, address: &str, exporter: Incarnation) -> Result<Wire, TransferError> {
        let limit = self.limits.connect;
        let unreachable = |reason: String| TransferError::Unreachable {
            address: address.to_owned(),
            reason,
        };
        let shake_hands = async {
            let stream = TcpStream::connect(address)
                .await
                .map_err(|error| unreachable(error.to_string()))?;
            let mut wire = Wire::new(stream, address.to_owned());
            let hello = Frame::Hello(Hello {
                exporter,
                importer: self.importer,
                layout: self.arena.layout().clone(),
            });
            // The deadline around all of this ends first.
            wire.send(&hello, limit * 2).await?;
            match wire.receive(limit * 2, limit * 2).await? {
                Frame::Welcome { exporter: life } if life == exporter => Ok(wire),
                Frame::Welcome { .. } => Err(unreachable("another life answers there".into())),
                Frame::Refused(failure) => Err(TransferError::Refused(failure)),
                other => Err(unexpected(&other, "welcome")),
            }
        };
        timeout(limit, shake_hands)
            .await
            .unwrap_or_else(|_| Err(unreachable(format!("no welcome within {limit:?}"))))
    }

    async fn read(&self, endpoint: &Endpoint, request: &PullRequest) -> PullResult {
        let mut outcome = PullOutcome {
            digests: Vec::with_capacity(request.places.len()),
            n_bytes: 0,
        };
        if request.places.is_empty() {
            return Ok(outcome);
        }
        for place in &request.places {
            self.arena.check(place.block)?;
            self.arena.slice_bytes(place.slice.group)?;
        }
        let peer = self.peer(&endpoint.address, request.exporter);
        let _turn = peer
            .turns
            .acquire()
            .await
            .expect("the turns are never closed");
        let mut kept = peer.take(self.limits);
        for places in request.places.chunks(READ_SLICES_MAX) {
            let (mut wire, answer) = self.ask(kept.take(), endpoint, request, places).await?;
            match answer {
                Frame::Data { n_bytes } => {
                    self.take_slices(&mut wire, places, n_bytes, &mut outcome)
                        .await?;
                }
                Frame::Refused(failure) => {
                    peer.keep(wire);
                    return Err(TransferError::Refused(failure));
                }
                other => return Err(unexpected(&other, "data")),
            }
            kept = Some(wire);
        }
        if let Some(wire) = kept {
            peer.keep(wire);
        }
        Ok(outcome)
    }

    /// Asks for slices, over the kept connection when it still lives, and waits for the answer.
    async fn ask(
        &self,
        kept: Option<Wire>,
        endpoint: &Endpoint,
        request: &PullRequest,
        places: &[SlicePlace],
    ) -> Result<(Wire, Frame), TransferError> {
        let question = Frame::Read(Read {
            request_id: request.request_id,
            capability: request.capability,
            epoch: request.epoch,
            importer: self.importer,
            slices: places.iter().map(|place| place.slice).collect(),
        });
        if let Some(mut wire) = kept {
            match self.put(&mut wire, &question).await {
                // The exporter closed it between two reads: asking again is harmless.
                Err(TransferError::Lost { .. }) => {}
                answer => return Ok((wire, answer?)),
            }
        }
        let mut wire = self.connect(&endpoint.address, request.exporter).await?;
        let answer = self.put(&mut wire, &question).await?;
        Ok((wire, answer))
    }

    async fn put(&self, wire: &mut Wire, question: &Frame) -> Result<Frame, TransferError> {
        let answer = self.limits.answer;
        wire.send(question, self.limits.stall).await?;
        wire.receive(answer, answer).await
    }

    /// Takes the raw bytes of an answer.
    async fn take_slices(
        &self,
        wire: &mut Wire,
        places: &[SlicePlace],
        n_bytes: u64,
        outcome: &mut PullOutcome,
    ) -> Result<(), TransferError> {
        let layout = self.arena.layout();
        let expected: u64 = places
            .iter()
            .map(|place| layout.group_byte_range(place.slice.group).len() as u64)
            .sum();
        if n_bytes != expected {
            return Err(TransferError::Malformed(FrameError::Length {
                field: "n_bytes",
                value: n_bytes,
                bound: expected.to_string(),
            }));
        }
        let limit = self.limits.whole(n_bytes);
        let peer = wire.peer().to_owned();
        let take = async {
            for place in places {
                self.take_slice(wire, place, outcome).await?;
            }
            Ok(())
        };
        timeout(limit, take)
            .await
            .unwrap_or_else(|_| Err(stalled(&peer, limit)))
    }

    async fn take_slice(
        &self,
        wire: &mut Wire,
        place: &SlicePlace,
        outcome: &mut PullOutcome,
    ) -> Result<(), TransferError> {
        let group = place.slice.group;
        let range = self.arena.layout().group_byte_range(group);
        let n_bytes = range.len() as u64;
        // SAFETY: the caller of `pull` owns the block until this future has ended or is dropped, names each slice
        // once, and nobody else touches an import's slices before they are whole. `read` checked block and group.
        let target = unsafe { self.arena.slice_mut(place.block, range) };
        wire.receive_bytes(target, self.limits.stall).await?;
        let digest = self.arena.digest(SliceAt {
            block: place.block,
            group,
        })?;
        outcome.digests.push((place.slice, digest));
        outcome.n_bytes += n_bytes;
        Ok(())
    }
}

impl Peer {
    /// A kept connection on which nothing has happened since.
    fn take(&self, limits: Limits) -> Option<Wire> {
        let mut kept = lock(&self.kept);
        while let Some(Kept { wire, since }) = kept.pop() {
            if since.elapsed() < limits.idle && wire.is_quiet() {
                return Some(wire);
            }
        }
        None
    }

    /// Keeps a connection that is between two questions. Never more than there are turns.
    fn keep(&self, wire: Wire) {
        let since = Instant::now();
        lock(&self.kept).push(Kept { wire, since });
    }
}

impl Transport for TcpTransport {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn reaches(&self, _endpoint: &Endpoint) -> bool {
        true
    }

    fn warm<'a>(
        &'a self,
        endpoint: &'a Endpoint,
        exporter: Incarnation,
    ) -> Pending<'a, Result<(), TransferError>> {
        Box::pin(async move {
            let peer = self.peer(&endpoint.address, exporter);
            let _turn = peer
                .turns
                .acquire()
                .await
                .expect("the turns are never closed");
            let wire = match peer.take(self.limits) {
                Some(wire) => wire,
                None => self.connect(&endpoint.address, exporter).await?,
            };
            peer.keep(wire);
            Ok(())
        })
    }

    fn pull<'a>(
        &'a self,
        endpoint: &'a Endpoint,
        request: &'a PullRequest,
    ) -> Pending<'a, PullResult> {
        Box::pin(self.read(endpoint, request))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing in here can be half done when a holder panics.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unexpected(came: &Frame, expected: &'static str) -> TransferError {
    TransferError::Malformed(FrameError::Unexpected {
        came: came.name(),
        expected,
    })
}
