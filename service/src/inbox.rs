//! What a node's loop waits for, in the order in which it must not wait: cancels overtake everything, then what
//! the node's own threads report, then the drain, then new work, then time.
//!
//! Each source has a bounded queue of its own, so that a flood of requests delays neither a cancel nor the end
//! of a step. The loop takes many happenings in before it considers the next step; it never waits elsewhere.

use crate::node_service::Cancel;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Peers' messages waiting for the loop before their senders wait.
pub const INPUT_QUEUE_MAX: usize = 1024;
/// Reports of the node's own threads waiting for the loop. They come a few per step.
pub const REPORT_QUEUE_MAX: usize = 1024;
/// Happenings taken in before the next step is considered.
pub const BATCH_MAX: usize = 256;

/// One thing that has happened.
#[derive(Debug)]
pub enum Happening<I> {
    /// A request is given up.
    Cancel(Cancel),
    /// A peer or one of the node's own threads has something to say.
    Input(I),
    /// The process is leaving. Told once.
    Drain,
    /// The time that was waited for has come.
    Due,
}

/// Everything that a node's loop listens to.
pub struct Inbox<I> {
    cancels: mpsc::Receiver<Cancel>,
    reports: mpsc::Receiver<I>,
    inputs: mpsc::Receiver<I>,
    drain: CancellationToken,
    drain_told: bool,
}

/// The sending ends of an inbox.
pub struct InboxSenders<I> {
    /// For `NodeService`.
    pub cancels: mpsc::Sender<Cancel>,
    /// For the node's own threads and tasks.
    pub reports: mpsc::Sender<I>,
    /// For the node's services.
    pub inputs: mpsc::Sender<I>,
}

impl<I> Inbox<I> {
    /// An inbox that also hears `drain`.
    pub fn new(drain: CancellationToken) -> (InboxSenders<I>, Self) {
        let (cancel_sender, cancels) = mpsc::channel(crate::node_service::CANCEL_QUEUE_MAX);
        let (report_sender, reports) = mpsc::channel(REPORT_QUEUE_MAX);
        let (input_sender, inputs) = mpsc::channel(INPUT_QUEUE_MAX);
        let senders = InboxSenders {
            cancels: cancel_sender,
            reports: report_sender,
            inputs: input_sender,
        };
        let inbox = Self {
            cancels,
            reports,
            inputs,
            drain,
            drain_told: false,
        };
        (senders, inbox)
    }

    /// Waits for the next happening, at most for `wait`.
    pub async fn next(&mut self, wait: Duration) -> Happening<I> {
        let happening = tokio::select! {
            biased;
            Some(cancel) = self.cancels.recv() => Happening::Cancel(cancel),
            Some(report) = self.reports.recv() => Happening::Input(report),
            () = self.drain.cancelled(), if !self.drain_told => Happening::Drain,
            Some(input) = self.inputs.recv() => Happening::Input(input),
            () = tokio::time::sleep(wait) => Happening::Due,
        };
        self.drain_told |= matches!(happening, Happening::Drain);
        happening
    }

    /// What has already happened, without waiting.
    pub fn try_next(&mut self) -> Option<Happening<I>> {
        if let Ok(cancel) = self.cancels.try_recv() {
            return Some(Happening::Cancel(cancel));
        }
        if let Ok(report) = self.reports.try_recv() {
            return Some(Happening::Input(report));
        }
        self.inputs.try_recv().ok().map(Happening::Input)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_core::{Incarnation, RequestId};

    const LONG: Duration = Duration::from_secs(3600);

    fn cancel() -> Cancel {
        Cancel {
            request_id: RequestId(1),
            to: Incarnation(2),
        }
    }

    #[tokio::test]
    async fn a_cancel_overtakes_reports_and_work() {
        let (senders, mut inbox) = Inbox::new(CancellationToken::new());
        senders.inputs.try_send("work").expect("room");
        senders.reports.try_send("report").expect("room");
        senders.cancels.try_send(cancel()).expect("room");
        assert!(matches!(inbox.next(LONG).await, Happening::Cancel(_)));
        assert!(matches!(inbox.next(LONG).await, Happening::Input("report")));
        assert!(matches!(inbox.try_next(), Some(Happening::Input("work"))));
        assert!(inbox.try_next().is_none());
    }

    #[tokio::test]
    async fn a_drain_is_told_once_and_before_new_work() {
        let drain = CancellationToken::new();
        let (senders, mut inbox) = Inbox::new(drain.clone());
        drain.cancel();
        senders.inputs.try_send(()).expect("room");
        assert!(matches!(inbox.next(LONG).await, Happening::Drain));
        assert!(matches!(inbox.next(LONG).await, Happening::Input(())));
    }

    #[tokio::test]
    async fn time_passes_also_when_nobody_is_left_to_speak() {
        let (senders, mut inbox) = Inbox::<()>::new(CancellationToken::new());
        drop(senders);
        assert!(matches!(
            inbox.next(Duration::from_millis(1)).await,
            Happening::Due
        ));
    }
}
