//! What a client is told when something does not hold, in the shape that OpenAI's clients read:
//! `{"error": {"message", "type", "param", "code"}}`.
//!
//! The status says who can help: 4xx is the client's to change, 429 is "later", 503 is "another try may work",
//! 5xx is ours. The code is stable; the message names the field, the value and the bound.

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use serde_json::{Value, json};
use std::time::Duration;
use tidemill_core::{Failure, FailureCode};

/// Longest part of a client's own value that an error repeats.
const SHOWN_CHARS_MAX: usize = 64;

/// A refusal, or a failure of a request, as the client sees it.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// Stable code, see docs/api.md.
    pub code: &'static str,
    /// The field that does not hold.
    pub param: Option<String>,
    /// For a person.
    pub message: String,
    /// When to come again.
    pub retry_after: Option<Duration>,
}

impl ApiError {
    /// An error that names no field.
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            code,
            param: None,
            message: message.into(),
            retry_after: None,
        }
    }

    /// Asks the client to come back after `seconds`, where it is asked to come back at all.
    #[must_use]
    pub(crate) fn with_patience(mut self, seconds: u64) -> Self {
        self.retry_after = self.retry_after.map(|_| Duration::from_secs(seconds));
        self
    }

    /// 400: field `param` does not hold.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            param: Some(param.into()),
            ..Self::new(StatusCode::BAD_REQUEST, "invalid_value", message)
        }
    }

    /// 400: field `param` asks for something that this server does not do.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            code: "unsupported_parameter",
            ..Self::invalid(param, message)
        }
    }

    /// The body that clients parse.
    pub fn body(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind(),
            "param": self.param,
            "code": self.code,
        }})
    }

    /// OpenAI's coarse `type`.
    fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::NOT_FOUND => "not_found_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "server_error",
        }
    }

    /// The whole answer.
    pub fn response(&self) -> Response<Body> {
        let mut response = Response::new(Body::from(self.body().to_string()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/json"),
        );
        if let Some(after) = self.retry_after {
            let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds.max(1)));
        }
        response
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> Self {
        use FailureCode as F;
        let status = match failure.code {
            F::InvalidRequest | F::ContextLengthExceeded => StatusCode::BAD_REQUEST,
            F::Overloaded => StatusCode::TOO_MANY_REQUESTS,
            F::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            F::Cancelled | F::Gone | F::TransferFailed | F::Draining | F::Unavailable => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            F::NumericFault | F::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let is_later = matches!(
            status,
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
        );
        Self {
            retry_after: is_later.then_some(Duration::from_secs(1)),
            ..Self::new(status, failure.code.name(), failure.message)
        }
    }
}

/// A client's text for an error message: quoted, control characters escaped, cut when long.
pub(super) fn shown(text: &str) -> String {
    let mut chars = text.chars();
    let head: String = chars.by_ref().take(SHOWN_CHARS_MAX).collect();
    match chars.next() {
        None => format!("{head:?}"),
        Some(_) => format!("{head:?}..."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_is_asked_of_refused_clients_only() {
        let busy: ApiError = Failure::new(FailureCode::Overloaded, "full").into();
        let shown = busy.with_patience(7).response();
        assert_eq!(shown.headers()[header::RETRY_AFTER], "7");
        let wrong: ApiError = Failure::new(FailureCode::InvalidRequest, "no").into();
        let shown = wrong.with_patience(7).response();
        assert!(!shown.headers().contains_key(header::RETRY_AFTER));
    }

    #[test]
    fn the_body_has_the_four_keys() {
        let body = ApiError::invalid("top_p", "top_p is 2").body();
        let error = body["error"].as_object().expect("an object");
        assert_eq!(error.len(), 4);
        assert_eq!(error["type"], "invalid_request_error");
        assert_eq!(error["param"], "top_p");
    }

    #[test]
    fn a_later_has_its_header_and_never_says_now() {
        for (left, shown) in [(0, "1"), (1_000, "1"), (1_001, "2")] {
            let mut error = ApiError::from(Failure::new(FailureCode::Overloaded, "full"));
            error.retry_after = Some(Duration::from_millis(left));
            assert_eq!(error.response().headers()[header::RETRY_AFTER], shown);
        }
    }

    #[test]
    fn long_values_are_cut() {
        assert!(shown(&"x".repeat(1000)).len() < 80);
        assert_eq!(shown("a\n"), "\"a\\n\"");
    }
}
