//! The door between a transport's exporting side and the node whose blocks it reads.
//!
//! Every read is asked for and every granted read is reported ended exactly once, on every path: the grant travels
//! inside a guard, so that a connection that breaks, a task that is dropped or an answer that nobody takes reports
//! the end by itself. Room for that report is set aside before the question is asked, so it can neither be lost nor
//! wait; the number of reads at a time is bounded.

use crate::export::{ReadAsk, ReadGrant};
use std::sync::Arc;
use tidemill_core::kv_layout::SlicePlace;
use tidemill_core::{Failure, FailureCode, ReadId};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

/// What a node hears from its transports.
#[derive(Debug)]
pub enum ReadCall {
    /// Somebody wants to read; the node decides and answers.
    Ask {
        /// What, with which right.
        ask: ReadAsk,
        /// Takes the decision.
        reply: ReadReply,
    },
    /// A granted read is over: nobody touches its blocks any more.
    Ended(ReadId),
}

/// A transport's way to its node.
#[derive(Clone, Debug)]
pub struct ReadGate {
    calls: mpsc::Sender<ReadCall>,
    reads: Arc<Semaphore>,
}

/// A gate for at most `n_reads_max` reads at a time, and the node's end of it.
pub fn read_gate(n_reads_max: usize) -> (ReadGate, mpsc::Receiver<ReadCall>) {
    // One place for each read's question, one for its end.
    let (calls, receiver) = mpsc::channel(2 * n_reads_max.max(1));
    let reads = Arc::new(Semaphore::new(n_reads_max.max(1)));
    (ReadGate { calls, reads }, receiver)
}

impl ReadGate {
    /// Asks the node for a read.
    ///
    /// # Errors
    /// The node's refusal; `unavailable` when the node has ended.
    pub async fn ask(&self, ask: ReadAsk) -> Result<HeldRead, Failure> {
        let turn = Arc::clone(&self.reads)
            .acquire_owned()
            .await
            .map_err(|_| node_ended())?;
        let room = self
            .calls
            .clone()
            .reserve_owned()
            .await
            .map_err(|_| node_ended())?;
        let (answer, decision) = oneshot::channel();
        let reply = ReadReply {
            answer,
            end: EndReport { room, _turn: turn },
        };
        self.calls
            .send(ReadCall::Ask { ask, reply })
            .await
            .map_err(|_| node_ended())?;
        decision.await.map_err(|_| node_ended())?
    }
}

fn node_ended() -> Failure {
    Failure::new(FailureCode::Unavailable, "the exporting node has ended")
}

/// Takes a node's decision to the transport that waits for it.
#[derive(Debug)]
pub struct ReadReply {
    answer: oneshot::Sender<Result<HeldRead, Failure>>,
    end: EndReport,
}

impl ReadReply {
    /// Answers. When nobody waits any more, the read is reported ended at once.
    pub fn answer(self, decision: Result<ReadGrant, Failure>) {
        let held = decision.map(|grant| HeldRead {
            grant,
            end: Some(self.end),
        });
        // An answer that comes back is dropped here, and reports its end.
        let _ = self.answer.send(held);
    }
}

#[derive(Debug)]
struct EndReport {
    room: mpsc::OwnedPermit<ReadCall>,
    _turn: OwnedSemaphorePermit,
}

/// A granted read. Dropping it tells the node that the read is over.
#[derive(Debug)]
pub struct HeldRead {
    grant: ReadGrant,
    end: Option<EndReport>,
}

impl HeldRead {
    /// Where the slices lie, in the order asked.
    pub fn places(&self) -> &[SlicePlace] {
        &self.grant.places
    }
}

impl Drop for HeldRead {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            end.room.send(ReadCall::Ended(self.grant.read));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_core::{Capability, Epoch, Incarnation, RequestId};

    fn ask() -> ReadAsk {
        ReadAsk {
            request_id: RequestId(1),
            capability: Capability(2),
            epoch: Epoch(1),
            importer: Incarnation(3),
            slices: Vec::new(),
        }
    }

    fn grant(read: u64) -> ReadGrant {
        ReadGrant {
            read: ReadId(read),
            places: Vec::new(),
        }
    }

    async fn next_ask(calls: &mut mpsc::Receiver<ReadCall>) -> ReadReply {
        match calls.recv().await {
            Some(ReadCall::Ask { reply, .. }) => reply,
            other => panic!("expected a question, got {other:?}"),
        }
    }

    #[tokio::test]
    async fn a_dropped_read_is_reported_ended() {
        let (gate, mut calls) = read_gate(1);
        let asking = tokio::spawn(async move { gate.ask(ask()).await });
        next_ask(&mut calls).await.answer(Ok(grant(5)));
        drop(asking.await.expect("no panic").expect("granted"));
        assert!(matches!(
            calls.recv().await,
            Some(ReadCall::Ended(ReadId(5)))
        ));
    }

    #[tokio::test]
    async fn a_grant_that_nobody_takes_is_reported_ended() {
        let (gate, mut calls) = read_gate(1);
        let asking = tokio::spawn(async move { gate.ask(ask()).await });
        let reply = next_ask(&mut calls).await;
        asking.abort();
        assert!(asking.await.is_err());
        reply.answer(Ok(grant(6)));
        assert!(matches!(
            calls.recv().await,
            Some(ReadCall::Ended(ReadId(6)))
        ));
    }

    #[tokio::test]
    async fn a_refusal_reports_no_end_and_frees_its_turn() {
        let (gate, mut calls) = read_gate(1);
        for _ in 0..3 {
            let gate = gate.clone();
            let asking = tokio::spawn(async move { gate.ask(ask()).await });
            let refusal = Failure::new(FailureCode::Gone, "no");
            next_ask(&mut calls).await.answer(Err(refusal.clone()));
            assert_eq!(asking.await.expect("no panic").err(), Some(refusal));
        }
        assert!(calls.try_recv().is_err());
    }

    #[tokio::test]
    async fn an_ended_node_is_an_answer() {
        let (gate, calls) = read_gate(1);
        drop(calls);
        let failure = gate.ask(ask()).await.expect_err("nobody there");
        assert_eq!(failure.code, FailureCode::Unavailable);
    }
}
