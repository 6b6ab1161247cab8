//! A connection whose peer has stopped reading is closed.
//!
//! A reader that takes nothing for a minute holds a connection, a request and its buffers for nothing; none of the
//! clocks of the parser sees it, since no one reads from the socket while an answer waits to be written.

use std::future::Future;
use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// An I/O object whose writes fail when the peer takes nothing for too long.
pub(super) struct StallGuard<T> {
    inner: T,
    /// Longest time that a write waits for its reader.
    stall_time_max: Duration,
    /// Running while a write waits.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl<T> StallGuard<T> {
    pub(super) fn new(inner: T, stall_time_max: Duration) -> Self {
        Self {
            inner,
            stall_time_max,
            stalled: None,
        }
    }

    fn watch<R>(&mut self, cx: &mut Context<'_>, written: Poll<Result<R>>) -> Poll<Result<R>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let stall_time_max = self.stall_time_max;
        let stalled = self
            .stalled
            .get_or_insert_with(|| Box::pin(sleep(stall_time_max)));
        ready!(stalled.as_mut().poll(cx));
        Poll::Ready(Err(Error::new(
            ErrorKind::TimedOut,
            "the peer has stopped reading",
        )))
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for StallGuard<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buffer)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for StallGuard<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write(cx, bytes);
        self.watch(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write_vectored(cx, slices);
        self.watch(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let flushed = Pin::new(&mut self.inner).poll_flush(cx);
        self.watch(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    const STALL_TIME_MAX: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_never_reads_is_given_up() {
        let (ours, _theirs) = tokio::io::duplex(16);
        let mut ours = StallGuard::new(ours, STALL_TIME_MAX);
        let error = ours.write_all(&[0; 64]).await.expect_err("stalled");
        assert_eq!(error.kind(), ErrorKind::TimedOut);
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_reader_is_not() {
        let (ours, mut theirs) = tokio::io::duplex(16);
        let mut ours = StallGuard::new(ours, STALL_TIME_MAX);
        let reader = tokio::spawn(async move {
            let mut n_read = 0;
            let mut buffer = [0; 8];
            while n_read < 64 {
                sleep(STALL_TIME_MAX / 2).await;
                n_read += theirs.read(&mut buffer).await.expect("readable");
            }
        });
        ours.write_all(&[0; 64])
            .await
            .expect("taken piece by piece");
        reader.await.expect("no panic");
    }
}
