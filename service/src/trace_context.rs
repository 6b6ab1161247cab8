//! The trace of a message that carries no sequence, as gRPC metadata `traceparent` (W3C Trace Context).
//!
//! `Prefill` and `Generate` hand it on inside the sequence, since it outlives their call; claims, rebinds and cancels
//! are calls of their own and name it here. Renewals gather many requests and belong to none.

use tonic::Request;
use tonic::metadata::MetadataValue;

const TRACEPARENT: &str = "traceparent";
/// `00-<32>-<16>-<2>`.
const TRACEPARENT_BYTES: usize = 55;

/// A message with its trace.
pub fn with_trace<T>(message: T, traceparent: &str) -> Request<T> {
    let mut request = Request::new(message);
    if let Ok(value) = MetadataValue::try_from(traceparent)
        && !traceparent.is_empty()
    {
        request.metadata_mut().insert(TRACEPARENT, value);
    }
    request
}

/// The trace that a message names; empty when it names none, or something that is none.
pub fn trace_of<T>(request: &Request<T>) -> &str {
    let value = request.metadata().get(TRACEPARENT);
    let text = value.and_then(|value| value.to_str().ok());
    text.filter(|text| text.len() == TRACEPARENT_BYTES)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_goes_along_and_anything_else_does_not() {
        let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        assert_eq!(trace_of(&with_trace((), trace)), trace);
        for other in ["", "short", "with\nline", &"x".repeat(4096)] {
            assert_eq!(trace_of(&with_trace((), other)), "");
        }
    }
}
