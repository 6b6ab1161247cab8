//! The admin port: `/healthz` (the process turns), `/readyz` (it takes work, or what is missing), `/metrics`.
//!
//! Liveness never depends on load or on other processes, so that an orchestrator does not kill a busy node.

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus_client::registry::Registry;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// What a process shows at its admin port. Clones share it.
#[derive(Clone, Default)]
pub struct Admin {
    missing: Arc<Mutex<Option<String>>>,
    registry: Arc<Mutex<Registry>>,
}

impl Admin {
    /// An admin state that is not ready and says why.
    pub fn starting(reason: &str) -> Self {
        let admin = Self::default();
        admin.set_missing(Some(reason.to_owned()));
        admin
    }

    /// Declares the process ready (`None`), or names what is missing.
    pub fn set_missing(&self, missing: Option<String>) {
        *self.missing.lock().unwrap_or_else(PoisonError::into_inner) = missing;
    }

    /// What is missing; `None` when ready.
    pub fn missing(&self) -> Option<String> {
        self.missing
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Adds metrics.
    pub fn register<T>(&self, add: impl FnOnce(&mut Registry) -> T) -> T {
        add(&mut self.registry.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The routes of the admin port.
    pub fn routes(&self) -> Router {
        Router::new()
            .route("/healthz", get(|| async { "ok\n" }))
            .route("/readyz", get(ready))
            .route("/metrics", get(metrics))
            .with_state(self.clone())
    }

    /// Serves the admin port until `shutdown` is cancelled.
    ///
    /// # Errors
    /// When the listener fails.
    pub async fn serve(
        self,
        listener: TcpListener,
        shutdown: CancellationToken,
    ) -> std::io::Result<()> {
        axum::serve(listener, self.routes())
            .with_graceful_shutdown(async move { shutdown.cancelled().await })
            .await
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
    use tower::ServiceExt;

    async fn status(admin: &Admin, path: &str) -> StatusCode {
        let request = Request::get(path).body(Body::empty()).expect("a request");
        admin
            .routes()
            .oneshot(request)
            .await
            .expect("infallible")
            .status()
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
}
