//! A node that runs: its loop and its control server, which live and end together.
//!
//! The loop's good end (drained, nothing left) lets the server finish its open streams and then stop. Any other
//! end of either takes readiness down at once and is told with its reason, so that no node stays ready without
//! the task that makes it one. Dropping a `RunningNode` ends both at once, like a crash.

use crate::grpc::{self, Listener};
use crate::health::Admin;
use std::time::Duration;
use tidemill_core::Incarnation;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Router;

/// How long open streams may take to end after the loop has.
const GRACE: Duration = Duration::from_secs(5);

/// Why a node ended other than by a drain.
#[derive(Debug, thiserror::Error)]
pub enum NodeEnd {
    /// The control server ended by itself.
    #[error("the control server of the node ended: {0}")]
    Server(String),
    /// The loop cannot go on.
    #[error("the node's loop ended: {0}")]
    Loop(String),
}

/// A node at work.
pub struct RunningNode {
    address: String,
    incarnation: Incarnation,
    task: JoinHandle<Result<(), NodeEnd>>,
}

impl RunningNode {
    /// Runs `turn` (the loop) and serves `routes` on `listener`; must be called within a tokio runtime.
    pub fn start(
        incarnation: Incarnation,
        listener: Listener,
        routes: Router,
        admin: Admin,
        turn: impl Future<Output = Result<(), String>> + Send + 'static,
    ) -> Self {
        let address = listener.address().to_owned();
        let shutdown = CancellationToken::new();
        let stopped = shutdown.clone();
        let server = grpc::serve(listener, routes, async move { stopped.cancelled().await });
        admin.set_missing(None);
        // Both in tasks of their own: a panic in one is an end like any other.
        let task = tokio::spawn(supervise(
            Ended(tokio::spawn(turn)),
            Ended(tokio::spawn(server)),
            shutdown,
            admin,
        ));
        Self {
            address,
            incarnation,
            task,
        }
    }

    /// Where its control service answers.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Which life this is.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// When it was not a drain that ended it.
    pub async fn ended(mut self) -> Result<(), NodeEnd> {
        match (&mut self.task).await {
            Ok(ended) => ended,
            Err(error) => Err(NodeEnd::Loop(error.to_string())),
        }
    }
}

impl Drop for RunningNode {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A task that ends with its owner.
struct Ended<T>(JoinHandle<T>);

impl<T> Drop for Ended<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn supervise(
    mut turn: Ended<Result<(), String>>,
    mut server: Ended<Result<(), tonic::transport::Error>>,
    shutdown: CancellationToken,
    admin: Admin,
) -> Result<(), NodeEnd> {
    let end = tokio::select! {
        ended = &mut turn.0 => match ended {
            Ok(Ok(())) => Ok(()),
            Ok(Err(reason)) => Err(NodeEnd::Loop(reason)),
            Err(error) => Err(NodeEnd::Loop(error.to_string())),
        },
        ended = &mut server.0 => Err(NodeEnd::Server(match ended {
            Ok(Ok(())) => "it stopped listening".to_owned(),
            // As a text: it goes to readiness too, which has no chain to print.
            Ok(Err(error)) => format!("{:#}", anyhow::Error::new(error)),
            Err(error) => error.to_string(),
        })),
    };
    let missing = match &end {
        Ok(()) => "drained".to_owned(),
        Err(reason) => reason.to_string(),
    };
    admin.set_missing(Some(missing));
    if !server.0.is_finished() {
        shutdown.cancel();
        // Whoever still holds a stream open after that has been told everything there is.
        let _ = tokio::time::timeout(GRACE, &mut server.0).await;
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grpc::Fabric;

    async fn node(
        turn: impl Future<Output = Result<(), String>> + Send + 'static,
    ) -> (RunningNode, Admin) {
        let admin = Admin::starting("not yet");
        let listener = Fabric::default().bind("local:n").await.expect("free");
        let routes = grpc::server().add_service(crate::node_service::NodeService::new(
            description(),
            crate::load_board::LoadBoard::new(report(), &admin, tidemill_core::Timestamp(0)).0,
            tokio::sync::mpsc::channel(1).0,
        ));
        let node = RunningNode::start(Incarnation(7), listener, routes, admin.clone(), turn);
        (node, admin)
    }

    fn node_id() -> tidemill_core::NodeId {
        tidemill_core::NodeId::new("n").expect("a valid name")
    }

    fn report() -> tidemill_core::LoadReport {
        tidemill_core::LoadReport {
            node_id: node_id(),
            incarnation: Incarnation(7),
            role: tidemill_core::Role::Decode,
            sequence_number: 1,
            n_waiting: 0,
            n_running: 0,
            queued_tokens: 0,
            n_blocks: 1,
            n_blocks_free: 1,
            n_blocks_leased: 0,
            draining: false,
        }
    }

    fn description() -> tidemill_proto::convert::NodeDescription {
        tidemill_proto::convert::NodeDescription {
            node_id: node_id(),
            incarnation: Incarnation(7),
            role: tidemill_core::Role::Decode,
            model_name: "m".into(),
            model_fingerprint: [0; 32],
            text_fingerprint: [0; 32],
            layout_fingerprint: [0; 16],
            protocol_revision: 1,
            vocab_size: 1,
            context_length: 1,
            endpoints: Vec::new(),
            version: "0".into(),
        }
    }

    #[tokio::test]
    async fn a_drained_loop_ends_the_node_well() {
        let (node, admin) = node(async { Ok(()) }).await;
        assert_eq!(node.address(), "local:n");
        node.ended().await.expect("a good end");
        assert_eq!(admin.missing().as_deref(), Some("drained"));
    }

    #[tokio::test]
    async fn a_broken_or_panicking_loop_takes_readiness_down() {
        let (broken, admin) = node(async { Err("no compute thread".to_owned()) }).await;
        let end = broken.ended().await.expect_err("a bad end");
        assert!(end.to_string().contains("no compute thread"), "{end}");
        assert!(admin.missing().is_some());
        let (panicking, admin) = node(async { panic!("a broken invariant") }).await;
        panicking.ended().await.expect_err("a bad end");
        assert!(admin.missing().is_some());
    }
}
