//! OpenAI's HTTP interface: `/v1/chat/completions`, `/v1/completions`, `/v1/models`, `/health`.
//!
//! A body is read within its bounds (`body`, `json`), becomes a typed request (`chat_request`, `completion_request`),
//! then jobs (`plan`), and what dispatch answers becomes events of choices (`choice`) that are told as a stream (`sse`)
//! or in one piece (`generate`), in one of two shapes (`shape`). docs/api.md
//! states every field, bound and error.

mod body;
mod chat_request;
mod choice;
mod completion_request;
mod error;
mod fields;
mod generate;
mod headers;
mod json;
mod models;
mod plan;
mod request;
mod sampling;
mod shape;
mod sse;
mod unsupported;

pub use body::BODY_BYTES_MAX;
pub use chat_request::{ChatRequest, parse_chat};
pub use completion_request::{CompletionRequest, parse_completion};
pub use error::ApiError;
pub use request::Common;
pub use sampling::SamplingWish;

use crate::requests::Requests;
use axum::Router;
use axum::body::Body;
use axum::extract::{Extension, Request, State};
use axum::http::{Response, StatusCode};
use axum::middleware::{self, Next};
use axum::routing::{get, post};
use headers::Identity;
use shape::Endpoint;
use std::sync::Arc;
use std::time::Duration;
use tidemill_core::{Clock, SystemClock, Timestamp};
use tidemill_model_files::text::ModelText;
use tidemill_service::accept::{self, ConnectionLimits, HEADERS_MAX};
use tidemill_service::health::Admin;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

/// How the public port behaves.
#[derive(Clone)]
pub struct HttpConfig {
    /// The name under which the model is served.
    pub model_name: String,
    /// Longest time of a request that does not ask for its own.
    pub request_time_max: Duration,
    /// Bounds of the accept loop.
    pub connections: ConnectionLimits,
    /// Where deadlines are counted from.
    pub clock: Arc<dyn Clock>,
    /// What `/health` tells.
    pub admin: Admin,
}

impl HttpConfig {
    /// The defaults for a model.
    pub fn new(model_name: impl Into<String>) -> Self {
        Self {
            model_name: model_name.into(),
            request_time_max: Duration::from_secs(600),
            connections: ConnectionLimits::PUBLIC,
            clock: Arc::new(SystemClock::new()),
            admin: Admin::default(),
        }
    }
}

/// What the handlers share.
struct App {
    config: HttpConfig,
    model: Arc<ModelText>,
    requests: Requests,
    body_budget: body::BodyBudget,
    text_jobs: Arc<Semaphore>,
    started: Timestamp,
}

/// Serves the public port until `shutdown`, then until the open requests have ended (or the drain's time is over).
///
/// # Errors
/// When the listener is of no use.
pub async fn serve(
    listener: TcpListener,
    config: HttpConfig,
    model: Arc<ModelText>,
    requests: Requests,
    shutdown: CancellationToken,
) -> std::io::Result<()> {
    let limits = config.connections;
    accept::serve(listener, routes(config, model, requests), limits, shutdown).await
}

fn routes(config: HttpConfig, model: Arc<ModelText>, requests: Requests) -> Router {
    let app = Arc::new(App {
        started: config.clock.now(),
        config,
        model,
        requests,
        body_budget: body::BodyBudget::new(),
        text_jobs: Arc::new(Semaphore::new(generate::TEXT_JOBS_MAX)),
    });
    Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completions))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/health", get(models::health))
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn(check_header_count))
        .layer(middleware::from_fn(name_request))
        .with_state(app)
}

async fn chat(
    State(app): State<Arc<App>>,
    Extension(identity): Extension<Identity>,
    request: Request,
) -> Response<Body> {
    generate::serve(app, Endpoint::Chat, identity, request).await
}

async fn completions(
    State(app): State<Arc<App>>,
    Extension(identity): Extension<Identity>,
    request: Request,
) -> Response<Body> {
    generate::serve(app, Endpoint::Completions, identity, request).await
}

async fn unknown_path(request: Request) -> Response<Body> {
    let path = error::shown(request.uri().path());
    let message = format!("there is nothing at {path}");
    ApiError::new(StatusCode::NOT_FOUND, "not_found", message).response()
}

async fn wrong_method(request: Request) -> Response<Body> {
    let message = format!(
        "{} does not take {}",
        error::shown(request.uri().path()),
        error::shown(request.method().as_str())
    );
    ApiError::new(
        StatusCode::METHOD_NOT_ALLOWED,
        "method_not_allowed",
        message,
    )
    .response()
}

/// Gives every request its id, its span and, in the answer, its label.
async fn name_request(mut request: Request, next: Next) -> Response<Body> {
    let identity = headers::identity(request.headers());
    let label = headers::label(request.headers(), identity.id);
    let span = tracing::info_span!(
        "request",
        request_id = %identity.id,
        label = label.to_str().unwrap_or_default(),
        traceparent = identity.traceparent.as_str()
    );
    request.extensions_mut().insert(identity);
    let mut response = next.run(request).instrument(span).await;
    response.headers_mut().insert(headers::REQUEST_LABEL, label);
    response
}

/// HTTP/1 has this bound in its parser, HTTP/2 only one in bytes.
async fn check_header_count(request: Request, next: Next) -> Response<Body> {
    let n_headers = request.headers().len();
    if n_headers <= HEADERS_MAX {
        return next.run(request).await;
    }
    let message = format!("{n_headers} header fields; at most {HEADERS_MAX} are allowed");
    let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
    ApiError::new(status, "headers_too_large", message).response()
}
