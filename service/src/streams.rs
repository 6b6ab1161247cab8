//! Answers to peers' calls, sent by a loop that must never wait.
//!
//! A node's loop owns one `Streams` for each kind of stream. Sending never blocks: a reader that is gone or
//! too slow is reported by `send`, and its owner cancels the work. `Replies` tells the loop when a reader leaves
//! without a word; that notice waits for room in the loop's queue, so that no cancel is lost.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use tidemill_core::CallId;
use tokio::sync::mpsc;

/// Messages that a stream holds for a slow reader before the reader counts as gone.
pub const STREAM_MESSAGES_MAX: usize = 1024;

/// Draws ids for calls, unique within the process.
#[derive(Default)]
pub struct CallIds(AtomicU64);

impl CallIds {
    /// The next id.
    pub fn next(&self) -> CallId {
        CallId(self.0.fetch_add(1, Ordering::Relaxed))
    }
}

/// The open streams of one kind, by call.
pub struct Streams<T> {
    senders: HashMap<CallId, mpsc::Sender<T>>,
}

/// The reader of a stream is gone or too slow; the stream has been dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReaderLost;

impl<T> Default for Streams<T> {
    fn default() -> Self {
        Self {
            senders: HashMap::new(),
        }
    }
}

impl<T> Streams<T> {
    /// Takes a call's stream in.
    pub fn open(&mut self, call: CallId, sender: mpsc::Sender<T>) {
        self.senders.insert(call, sender);
    }

    /// Sends without waiting; `last` closes the stream after it. A call that is unknown (already closed) takes
    /// the message to nowhere.
    ///
    /// # Errors
    /// When the reader has left or does not keep up; the stream is closed then.
    pub fn send(&mut self, call: CallId, message: T, last: bool) -> Result<(), ReaderLost> {
        let Some(sender) = self.senders.get(&call) else {
            return Ok(());
        };
        let sent = sender.try_send(message).map_err(|_| ReaderLost);
        if last || sent.is_err() {
            self.senders.remove(&call);
        }
        sent
    }

    /// Closes a stream.
    pub fn close(&mut self, call: CallId) {
        self.senders.remove(&call);
    }

    /// Open streams.
    pub fn len(&self) -> usize {
        self.senders.len()
    }

    /// True when none is open.
    pub fn is_empty(&self) -> bool {
        self.senders.is_empty()
    }
}

/// The reading end that goes into a tonic response. However it ends (dropped, reset, read to its end), the
/// loop gets one notice, which it takes as a no-op when the call has already ended.
pub struct Replies<T, N: Send + 'static> {
    receiver: mpsc::Receiver<T>,
    notice: Option<(mpsc::Sender<N>, N)>,
}

impl<T, N: Send + 'static> Replies<T, N> {
    /// A stream of bounded length and the sender for the loop; `notice` goes to `notices` when it ends.
    pub fn new(notices: mpsc::Sender<N>, notice: N) -> (mpsc::Sender<T>, Self) {
        let (sender, receiver) = mpsc::channel(STREAM_MESSAGES_MAX);
        let notice = Some((notices, notice));
        (sender, Self { receiver, notice })
    }
}

impl<T, N: Send + Unpin + 'static> futures::Stream for Replies<T, N> {
    type Item = T;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        self.receiver.poll_recv(cx)
    }
}

impl<T, N: Send + 'static> Drop for Replies<T, N> {
    fn drop(&mut self) {
        let Some((notices, notice)) = self.notice.take() else {
            return;
        };
        // A full queue must not lose the notice; an ended loop has nothing left to cancel.
        if let Err(mpsc::error::TrySendError::Full(notice)) = notices.try_send(notice)
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(async move {
                let _ = notices.send(notice).await;
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::StreamExt;

    #[tokio::test]
    async fn a_slow_reader_is_reported_and_dropped() {
        let mut streams = Streams::default();
        let (sender, _reader) = mpsc::channel(1);
        streams.open(CallId(1), sender);
        assert_eq!(streams.send(CallId(1), 'a', false), Ok(()));
        assert_eq!(streams.send(CallId(1), 'b', false), Err(ReaderLost));
        assert!(streams.is_empty());
        assert_eq!(streams.send(CallId(1), 'c', false), Ok(()), "a no-op");
    }

    #[tokio::test]
    async fn a_leaving_reader_is_noticed_even_when_the_queue_is_full() {
        let (notices, mut queue) = mpsc::channel(1);
        notices.send(0).await.expect("room");
        let (sender, reader) = Replies::<u8, i32>::new(notices, 7);
        drop(reader);
        assert!(sender.is_closed());
        assert_eq!(queue.recv().await, Some(0));
        assert_eq!(queue.recv().await, Some(7));
    }

    #[tokio::test]
    async fn a_closed_stream_ends_for_its_reader() {
        let (notices, _queue) = mpsc::channel::<()>(1);
        let (sender, mut reader) = Replies::new(notices, ());
        let mut streams = Streams::default();
        streams.open(CallId(1), sender);
        assert_eq!(streams.send(CallId(1), 'z', true), Ok(()));
        assert_eq!(reader.next().await, Some('z'));
        assert_eq!(reader.next().await, None);
    }
}
