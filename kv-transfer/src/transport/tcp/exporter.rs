//! The exporting side: accepts importers, asks the node for each read and sends slices out of pool memory.
//!
//! A connection is a task of its own, and a bad one ends alone. While a read's bytes are sent its grant is held, so
//! the node keeps the blocks; once written, bytes are the kernel's and the blocks are free to go.

use super::super::TransferError;
use super::super::frame::{Frame, FrameError, Hello, Read};
use super::super::gate::{HeldRead, ReadGate};
use super::Limits;
use super::wire::{Wire, stalled};
use crate::export::ReadAsk;
use crate::plan::plan;
use std::sync::Arc;
use std::time::Duration;
use tidemill_core::kv_layout::SlicePlace;
use tidemill_core::{Failure, FailureCode, Incarnation};
use tidemill_kernels::memory::KvArena;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// After an accept that failed (no descriptors left): give others time to close.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// What is exported.
#[derive(Clone, Debug)]
pub struct TcpExporter {
    /// The node's life.
    pub incarnation: Incarnation,
    /// Its pool.
    pub arena: Arc<KvArena>,
    /// Its decisions.
    pub gate: ReadGate,
    /// Bounds.
    pub limits: Limits,
}

/// Serves importers for as long as the future is polled; dropping it closes every connection, and every read in
/// flight is reported ended.
pub async fn serve(listener: TcpListener, exporter: TcpExporter) {
    let room = Arc::new(Semaphore::new(exporter.limits.n_connections_max));
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
        };
        let (stream, address) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept an importer's connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(place) = Arc::clone(&room).try_acquire_owned() else {
            tracing::warn!(%address, "closed an importer's connection: too many are open");
            continue;
        };
        let exporter = exporter.clone();
        connections.spawn(async move {
            let mut connection = Connection {
                wire: Wire::new(stream, address.to_string()),
                exporter,
            };
            if let Err(error) = connection.run().await {
                tracing::debug!(peer = connection.wire.peer(), %error, "an importer's connection ended");
            }
            drop(place);
        });
    }
}

struct Connection {
    wire: Wire,
    exporter: TcpExporter,
}

impl Connection {
    async fn run(&mut self) -> Result<(), TransferError> {
        let importer = self.welcome().await?;
        loop {
            let limits = self.exporter.limits;
            let read = match self.wire.receive(limits.idle, limits.answer).await {
                Ok(Frame::Read(read)) => read,
                Ok(other) => return self.refuse_frame(unexpected(&other, "read")).await,
                Err(TransferError::Malformed(error)) => return self.refuse_frame(error).await,
                Err(error) => return Err(error),
            };
            if read.importer != importer {
                let error = FrameError::Field {
                    field: "importer",
                    reason: "it differs from the hello of this connection".into(),
                };
                return self.refuse_frame(error).await;
            }
            self.answer(read).await?;
        }
    }

    /// Takes the importer's hello; afterwards both know that slices fit.
    async fn welcome(&mut self) -> Result<Incarnation, TransferError> {
        let limits = self.exporter.limits;
        let hello = match self.wire.receive(limits.answer, limits.answer).await {
            Ok(Frame::Hello(hello)) => hello,
            Ok(other) => {
                self.refuse_frame(unexpected(&other, "hello")).await?;
                return Err(unexpected(&other, "hello").into());
            }
            Err(TransferError::Malformed(error)) => {
                self.refuse_frame(error.clone()).await?;
                return Err(error.into());
            }
            Err(error) => return Err(error),
        };
        if let Err(failure) = self.check(&hello) {
            self.refuse(failure.clone()).await?;
            return Err(TransferError::Refused(failure));
        }
        let welcome = Frame::Welcome {
            exporter: self.exporter.incarnation,
        };
        self.wire.send(&welcome, limits.stall).await?;
        Ok(hello.importer)
    }

    fn check(&self, hello: &Hello) -> Result<(), Failure> {
        if hello.exporter != self.exporter.incarnation {
            return Err(Failure::new(
                FailureCode::Gone,
                format!(
                    "this exporter is incarnation {}, not {}",
                    self.exporter.incarnation, hello.exporter
                ),
            ));
        }
        plan(self.exporter.arena.layout(), &hello.layout)
            .map(|_| ())
            .map_err(|error| Failure::new(FailureCode::InvalidRequest, error.to_string()))
    }

    async fn answer(&mut self, read: Read) -> Result<(), TransferError> {
        let ask = ReadAsk {
            request_id: read.request_id,
            capability: read.capability,
            epoch: read.epoch,
            importer: read.importer,
            slices: read.slices,
        };
        let limits = self.exporter.limits;
        // Half of what the importer waits, so that it hears a refusal and keeps the connection.
        let held = timeout(limits.answer / 2, self.exporter.gate.ask(ask))
            .await
            .unwrap_or_else(|_| {
                Err(Failure::new(
                    FailureCode::Overloaded,
                    "the exporting node has too many reads; try again",
                ))
            });
        match held {
            Ok(held) => self.send_slices(&held).await,
            Err(failure) => self.refuse(failure).await,
        }
    }

    async fn send_slices(&mut self, held: &HeldRead) -> Result<(), TransferError> {
        let layout = self.exporter.arena.layout();
        let n_bytes = held
            .places()
            .iter()
            .map(|place| layout.group_byte_range(place.slice.group).len() as u64)
            .sum();
        let limits = self.exporter.limits;
        let peer = self.wire.peer().to_owned();
        let send = async {
            self.wire
                .send(&Frame::Data { n_bytes }, limits.stall)
                .await?;
            for place in held.places() {
                self.send_slice(place).await?;
            }
            Ok(())
        };
        timeout(limits.whole(n_bytes), send)
            .await
            .unwrap_or_else(|_| Err(stalled(&peer, limits.whole(n_bytes))))
    }

    async fn send_slice(&mut self, place: &SlicePlace) -> Result<(), TransferError> {
        let arena = &self.exporter.arena;
        arena.check(place.block)?;
        let range = arena.layout().group_byte_range(place.slice.group);
        // SAFETY: the caller holds the read, so the node keeps us as an owner of the block, and nobody writes its
        // final slices while it is owned; the kernel has copied every byte when `send_bytes` ends.
        let bytes = unsafe { arena.slice(place.block, range) };
        self.wire
            .send_bytes(bytes, self.exporter.limits.stall)
            .await
    }

    /// Answers what is not our protocol, as far as the peer still listens; the connection ends.
    async fn refuse_frame(&mut self, error: FrameError) -> Result<(), TransferError> {
        self.refuse(Failure::new(FailureCode::InvalidRequest, error.to_string()))
            .await
    }

    async fn refuse(&mut self, failure: Failure) -> Result<(), TransferError> {
        self.wire
            .send(&Frame::Refused(failure), self.exporter.limits.stall)
            .await
    }
}

fn unexpected(came: &Frame, expected: &'static str) -> FrameError {
    FrameError::Unexpected {
        came: came.name(),
        expected,
    }
}
