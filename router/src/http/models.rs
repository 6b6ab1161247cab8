//! What is served, and whether it can be used: `/v1/models`, `/v1/models/{id}`, `/health`.
//!
//! One router serves one model. `/health` is for clients and load balancers without access to the admin port: it says
//! "ok" exactly when that port's `/readyz` does.

use super::App;
use super::plan::unknown_model;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderValue, Response, StatusCode, header};
use serde_json::{Value, json};
use std::sync::Arc;

pub(super) async fn list(State(app): State<Arc<App>>) -> Response<Body> {
    let body = json!({"object": "list", "data": [model(&app)]});
    respond(StatusCode::OK, &body)
}

pub(super) async fn one(State(app): State<Arc<App>>, Path(id): Path<String>) -> Response<Body> {
    if id == app.config.model_name {
        respond(StatusCode::OK, &model(&app))
    } else {
        unknown_model(&id, &app.config.model_name).response()
    }
}

pub(super) async fn health(State(app): State<Arc<App>>) -> Response<Body> {
    match app.config.admin.missing() {
        None => respond(StatusCode::OK, &json!({"status": "ok"})),
        Some(missing) => {
            let body = json!({"status": "not ready", "missing": missing});
            respond(StatusCode::SERVICE_UNAVAILABLE, &body)
        }
    }
}

fn model(app: &App) -> Value {
    json!({
        "id": app.config.model_name,
        "object": "model",
        "created": app.started.0 / 1_000_000,
        "owned_by": "tidemill",
        "max_model_len": app.model.context_length,
    })
}

fn respond(status: StatusCode, body: &Value) -> Response<Body> {
    let mut response = Response::new(Body::from(body.to_string()));
    *response.status_mut() = status;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}
