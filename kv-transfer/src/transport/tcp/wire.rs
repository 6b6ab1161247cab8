//! Frames and raw bytes on one connection, each with its deadline.

use super::super::TransferError;
use super::super::frame::{Frame, HEAD_BYTES, parse_body, parse_head};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// A connection and the name that errors give to its far end.
pub(super) struct Wire {
    stream: TcpStream,
    peer: String,
}

impl Wire {
    pub(super) fn new(stream: TcpStream, peer: String) -> Self {
        // Questions are small and waited for; a socket that refuses the option still works.
        let _ = stream.set_nodelay(true);
        Self { stream, peer }
    }

    pub(super) fn peer(&self) -> &str {
        &self.peer
    }

    /// True while nothing has come that nobody asked for, the end included.
    pub(super) fn is_quiet(&self) -> bool {
        let mut byte = [0_u8; 1];
        matches!(
            self.stream.try_read(&mut byte),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock
        )
    }

    pub(super) async fn send(
        &mut self,
        frame: &Frame,
        stall: Duration,
    ) -> Result<(), TransferError> {
        self.send_bytes(&frame.encode(), stall).await
    }

    pub(super) async fn send_bytes(
        &mut self,
        mut bytes: &[u8],
        stall: Duration,
    ) -> Result<(), TransferError> {
        while !bytes.is_empty() {
            let n_sent = match timeout(stall, self.stream.write(bytes)).await {
                Err(_) => return Err(self.stalled(stall)),
                Ok(Err(error)) => return Err(self.lost(&error.to_string())),
                Ok(Ok(0)) => return Err(self.lost("it takes no more bytes")),
                Ok(Ok(n_sent)) => n_sent,
            };
            bytes = &bytes[n_sent..];
        }
        Ok(())
    }

    /// Fills `bytes`. Progress resets the wait; `stall` without a byte ends it.
    pub(super) async fn receive_bytes(
        &mut self,
        mut bytes: &mut [u8],
        stall: Duration,
    ) -> Result<(), TransferError> {
        while !bytes.is_empty() {
            let n_read = match timeout(stall, self.stream.read(bytes)).await {
                Err(_) => return Err(self.stalled(stall)),
                Ok(Err(error)) => return Err(self.lost(&error.to_string())),
                Ok(Ok(0)) => return Err(self.lost("closed by the peer")),
                Ok(Ok(n_read)) => n_read,
            };
            bytes = &mut bytes[n_read..];
        }
        Ok(())
    }

    /// The next frame; its first byte may take `wait`, the rest together `rest`.
    pub(super) async fn receive(
        &mut self,
        wait: Duration,
        rest: Duration,
    ) -> Result<Frame, TransferError> {
        let mut head = [0_u8; HEAD_BYTES];
        self.receive_bytes(&mut head[..1], wait).await?;
        let peer = self.peer.clone();
        let receive_rest = async {
            self.receive_bytes(&mut head[1..], rest).await?;
            let head = parse_head(head)?;
            let mut body = vec![0_u8; head.body_bytes()];
            self.receive_bytes(&mut body, rest).await?;
            Ok(parse_body(head, &body)?)
        };
        timeout(rest, receive_rest)
            .await
            .unwrap_or_else(|_| Err(stalled(&peer, rest)))
    }

    fn lost(&self, reason: &str) -> TransferError {
        TransferError::Lost {
            address: self.peer.clone(),
            reason: reason.to_owned(),
        }
    }

    fn stalled(&self, waited: Duration) -> TransferError {
        stalled(&self.peer, waited)
    }
}

pub(super) fn stalled(peer: &str, waited: Duration) -> TransferError {
    TransferError::Stalled {
        address: peer.to_owned(),
        waited_ms: u64::try_from(waited.as_millis()).unwrap_or(u64::MAX),
    }
}
