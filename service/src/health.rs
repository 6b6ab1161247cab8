//! The admin port: `/healthz` (the process turns), `/readyz` (it takes work, or what is missing), `/metrics`.
//!
//! Liveness never depends on load or on other processes, so that an orchestrator does not kill a busy node.

use crate::accept::{self, ConnectionLimits};
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Metric, Registry};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tidemill_core::NodeId;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// What a process shows at its admin port. Clones share it.
#[derive(Clone, Default)]
pub struct Admin {
    readiness: Arc<Mutex<Readiness>>,
    registry: Arc<Mutex<Registry>>,
    nodes: NodeFamilies,
}

/// The metrics of this process's nodes, by name. Nodes of one role share a family and are told apart by a label: a
/// name that is registered again would be a second family of that name, which scrapers refuse.
#[derive(Clone, Default)]
struct NodeFamilies {
    gauges: Arc<Mutex<BTreeMap<String, Family<NodeLabel, Gauge>>>>,
    counters: Arc<Mutex<BTreeMap<String, Family<NodeLabel, Counter>>>>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct NodeLabel {
    node_id: String,
}

#[derive(Default)]
struct Readiness {
    missing: Option<String>,
    /// It is leaving: nothing makes it ready again.
    is_closed: bool,
}

impl Admin {
    /// An admin state that is not ready and says why.
    pub fn starting(reason: &str) -> Self {
        let admin = Self::default();
        admin.set_missing(Some(reason.to_owned()));
        admin
    }

    /// Another readiness whose metrics are shown at the same port: for a part of this process.
    #[must_use]
    pub fn part(&self) -> Self {
        Self {
            readiness: Arc::default(),
            registry: Arc::clone(&self.registry),
            nodes: self.nodes.clone(),
        }
    }

    /// Declares the process ready (`None`), or names what is missing.
    pub fn set_missing(&self, missing: Option<String>) {
        let mut readiness = self.lock();
        if !readiness.is_closed {
            readiness.missing = missing;
        }
    }

    /// Declares the process not ready for good, since it is leaving.
    pub fn close(&self, reason: &str) {
        *self.lock() = Readiness {
            missing: Some(reason.to_owned()),
            is_closed: true,
        };
    }

    fn lock(&self) -> MutexGuard<'_, Readiness> {
        self.readiness
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// What is missing; `None` when ready.
    pub fn missing(&self) -> Option<String> {
        self.lock().missing.clone()
    }

    /// Adds metrics.
    pub fn register<T>(&self, add: impl FnOnce(&mut Registry) -> T) -> T {
        add(&mut self.registry.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The gauge of a node of this process, in a family with those of its other nodes.
    pub fn node_gauge(&self, name: &str, help: &str, node_id: &NodeId) -> Gauge {
        self.of_node(&self.nodes.gauges, (name, help), node_id)
    }

    /// The counter of a node of this process, in a family with those of its other nodes.
    pub fn node_counter(&self, name: &str, help: &str, node_id: &NodeId) -> Counter {
        self.of_node(&self.nodes.counters, (name, help), node_id)
    }

    fn of_node<M>(
        &self,
        families: &Mutex<BTreeMap<String, Family<NodeLabel, M>>>,
        (name, help): (&str, &str),
        node_id: &NodeId,
    ) -> M
    where
        M: Clone + Default + Send + Sync + 'static,
        Family<NodeLabel, M>: Metric,
    {
        let mut families = families.lock().unwrap_or_else(PoisonError::into_inner);
        let family = families.entry(name.to_owned()).or_insert_with(|| {
            let family = Family::default();
            self.register(|registry| registry.register(name, help, family.clone()));
            family
        });
        let label = NodeLabel {
            node_id: node_id.to_string(),
        };
        family.get_or_create(&label).clone()
    }

    /// The routes of the admin port.
    pub fn routes(&self) -> Router {
        Router::new()
            .route("/healthz", get(|| async { "ok\n" }))
            .route("/readyz", get(ready))
            .route("/metrics", get(metrics))
            .with_state(self.clone())
    }

    /// Serves the admin port until `shutdown` is cancelled. A client that says nothing more keeps no process alive.
    ///
    /// # Errors
    /// When the listener fails.
    pub async fn serve(
        self,
        listener: TcpListener,
        shutdown: CancellationToken,
    ) -> std::io::Result<()> {
        accept::serve(listener, self.routes(), ConnectionLimits::ADMIN, shutdown).await
    }
}

async fn ready(State(admin): State<Admin>) -> Response {
    match admin.missing() {
        None => "ready\n".into_response(),
        Some(missing) => (
            StatusCode::SERVICE_UNAVAILABLE,
            format!("not ready: {missing}\n"),
        )
            .into_response(),
    }
}

async fn metrics(State(admin): State<Admin>) -> Response {
    let mut text = String::new();
    let registry = admin
        .registry
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    match prometheus_client::encoding::text::encode(&mut text, &registry) {
        Ok(()) => (
            [(
                header::CONTENT_TYPE,
                "application/openmetrics-text; version=1.0.0; charset=utf-8",
            )],
            text,
        )
            .into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;
    use axum::http::Request;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tower::ServiceExt;

    const LIMITS: ConnectionLimits = ConnectionLimits::ADMIN;

    async fn status(admin: &Admin, path: &str) -> StatusCode {
        let request = Request::get(path).body(Body::empty()).expect("a request");
        admin
            .routes()
            .oneshot(request)
            .await
            .expect("infallible")
            .status()
    }

    #[test]
    fn who_leaves_is_not_ready_again_and_parts_have_a_readiness_of_their_own() {
        let admin = Admin::starting("not yet");
        let part = admin.part();
        part.set_missing(None);
        assert!(admin.missing().is_some() && part.missing().is_none());
        admin.set_missing(None);
        admin.close("leaving");
        admin.set_missing(None);
        assert_eq!(admin.missing().as_deref(), Some("leaving"));
    }

    #[tokio::test]
    async fn liveness_does_not_follow_readiness() {
        let admin = Admin::starting("model is loading");
        assert_eq!(status(&admin, "/healthz").await, StatusCode::OK);
        assert_eq!(
            status(&admin, "/readyz").await,
            StatusCode::SERVICE_UNAVAILABLE
        );
        admin.set_missing(None);
        assert_eq!(status(&admin, "/readyz").await, StatusCode::OK);
        assert_eq!(status(&admin, "/metrics").await, StatusCode::OK);
    }

    #[tokio::test]
    async fn a_silent_client_does_not_hold_the_end_up() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let shutdown = CancellationToken::new();
        let serving = Admin::default().serve(listener, shutdown.clone());
        let serving = tokio::spawn(serving);
        let mut client = TcpStream::connect(address).await.expect("listening");
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
        client.write_all(preface).await.expect("taken");
        // Its first frame: the connection is open, and from now on waits for a client that never answers.
        client.read_exact(&mut [0; 9]).await.expect("a frame");
        shutdown.cancel();
        let ended = tokio::time::timeout(LIMITS.drain_time_max * 2, serving).await;
        ended
            .expect("in time")
            .expect("no panic")
            .expect("no error");
    }

    #[tokio::test]
    async fn silent_clients_neither_stay_nor_pile_up() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let shutdown = CancellationToken::new();
        let serving = tokio::spawn(Admin::default().serve(listener, shutdown.clone()));
        let mut silent = Vec::new();
        for _ in 0..LIMITS.connections_max {
            silent.push(TcpStream::connect(address).await.expect("listening"));
        }
        let mut probe = TcpStream::connect(address).await.expect("listening");
        let request = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
        probe.write_all(request).await.expect("taken");
        let answer = async {
            let mut answer = String::new();
            probe.read_to_string(&mut answer).await.expect("an answer");
            answer
        };
        tokio::pin!(answer);
        let early = tokio::time::timeout(LIMITS.header_time_max / 4, &mut answer).await;
        assert!(early.is_err(), "all places are taken: {early:?}");
        let answer = tokio::time::timeout(LIMITS.header_time_max * 2, answer).await;
        assert!(answer.expect("in time").starts_with("HTTP/1.1 200"));
        for stream in &mut silent {
            let mut rest = [0; 512];
            let end = tokio::time::timeout(LIMITS.header_time_max, stream.read(&mut rest));
            let n_read = end.await.expect("in time").expect("closed in order");
            assert_eq!(n_read, 0, "nothing was asked, nothing is answered");
        }
        shutdown.cancel();
        serving.await.expect("no panic").expect("no error");
    }
}
