//! What a request's headers say beside its body: a label, a trace, a time limit.
//!
//! A client's id is a label that is echoed and logged, never an identity of ours. A `traceparent` that does not
//! follow the W3C form is replaced by a fresh one, as that standard asks, not refused.

use super::error::{ApiError, shown};
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use std::time::Duration;
use tidemill_core::RequestId;

/// The client's label of a request, echoed in the answer.
pub(super) const REQUEST_LABEL: HeaderName = HeaderName::from_static("x-request-id");
/// Longest time that a request may take, in milliseconds.
pub(super) const TIMEOUT_MS: HeaderName = HeaderName::from_static("x-request-timeout-ms");
/// Largest value of `x-request-timeout-ms`.
pub(super) const TIMEOUT_MS_MAX: u64 = 3_600_000;
/// Longest label.
const LABEL_BYTES_MAX: usize = 128;
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// What names a request in every log line, span and message that is about it.
#[derive(Clone)]
pub(super) struct Identity {
    /// Ours.
    pub(super) id: RequestId,
    /// The trace that it belongs to.
    pub(super) traceparent: String,
}

/// The label to echo: the client's, or `own` when it gave none that is 1 to 128 visible ASCII characters.
pub(super) fn label(headers: &HeaderMap, own: RequestId) -> HeaderValue {
    let is_label = |value: &&HeaderValue| {
        let bytes = value.as_bytes();
        (1..=LABEL_BYTES_MAX).contains(&bytes.len()) && bytes.iter().all(u8::is_ascii_graphic)
    };
    let given = headers.get(REQUEST_LABEL).filter(is_label).cloned();
    given.unwrap_or_else(|| {
        HeaderValue::from_str(&own.to_string()).expect("hexadecimal digits are visible ASCII")
    })
}

/// Draws a request's identity and takes its trace over.
pub(super) fn identity(headers: &HeaderMap) -> Identity {
    Identity {
        id: RequestId::random(),
        traceparent: traceparent(headers),
    }
}

/// The time limit that the client asks for.
///
/// # Errors
/// 400 when it is not a whole number within its bound.
pub(super) fn timeout(headers: &HeaderMap) -> Result<Option<Duration>, ApiError> {
    let Some(value) = headers.get(TIMEOUT_MS) else {
        return Ok(None);
    };
    let text = value.to_str().unwrap_or("?");
    match text.parse::<u64>() {
        Ok(ms) if (1..=TIMEOUT_MS_MAX).contains(&ms) => Ok(Some(Duration::from_millis(ms))),
        _ => Err(ApiError::invalid(
            TIMEOUT_MS.as_str(),
            format!(
                "{TIMEOUT_MS} is {}; a whole number from 1 to {TIMEOUT_MS_MAX} is allowed",
                shown(text)
            ),
        )),
    }
}

/// The trace of this request: the client's when well formed, else a fresh one that is not sampled.
fn traceparent(headers: &HeaderMap) -> String {
    let given = headers
        .get(TRACEPARENT)
        .and_then(|value| value.to_str().ok());
    match given {
        Some(text) if is_traceparent(text) => text.to_owned(),
        _ => {
            let trace = RequestId::random().0 | 1;
            let span = (RequestId::random().0 as u64) | 1;
            format!("00-{trace:032x}-{span:016x}-00")
        }
    }
}

/// Version 00 of the W3C form: `00-<32 hex>-<16 hex>-<2 hex>`, lower case, ids not zero.
fn is_traceparent(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    let [version, trace, span, flags] = parts[..] else {
        return false;
    };
    let is_hex = |part: &str, n: usize| {
        part.len() == n
            && part
                .bytes()
                .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
    };
    let is_id = |part: &str, n| is_hex(part, n) && part.bytes().any(|b| b != b'0');
    version == "00" && is_id(trace, 32) && is_id(span, 16) && is_hex(flags, 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(name: HeaderName, value: &str) -> HeaderMap {
        let value = HeaderValue::from_bytes(value.as_bytes()).expect("a header value");
        HeaderMap::from_iter([(name, value)])
    }

    #[test]
    fn a_good_traceparent_is_kept_and_a_bad_one_replaced() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        assert_eq!(traceparent(&one(TRACEPARENT, good)), good);
        for bad in [
            "",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-x",
        ] {
            let fresh = traceparent(&one(TRACEPARENT, bad));
            assert!(fresh != bad && is_traceparent(&fresh), "{bad}");
        }
        assert!(is_traceparent(&traceparent(&HeaderMap::new())));
    }

    #[test]
    fn labels_are_bounded() {
        let own = RequestId(7);
        assert_eq!(label(&one(REQUEST_LABEL, "abc-1"), own), "abc-1");
        let long = "x".repeat(129);
        for bad in ["", "a b", "é", long.as_str()] {
            assert_eq!(
                label(&one(REQUEST_LABEL, bad), own),
                own.to_string().as_str()
            );
        }
    }

    #[test]
    fn timeouts_are_bounded() {
        let read = |text| timeout(&one(TIMEOUT_MS, text)).map_err(|error| error.param);
        assert_eq!(read("1500"), Ok(Some(Duration::from_millis(1500))));
        for bad in ["0", "-1", "1.5", "abc", "3600001", ""] {
            assert_eq!(read(bad), Err(Some("x-request-timeout-ms".to_owned())));
        }
        assert_eq!(timeout(&HeaderMap::new()), Ok(None));
    }
}
