//! A request's body, read with a limit on its kind, its size, its time and the memory of all bodies together.
//!
//! The limit is checked as bytes come in, so an endless or lying body costs no more than an honest one. The budget
//! is held until the body has become tokens, which bounds what many large bodies cost at once.

use super::error::ApiError;
use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, header};
use http_body_util::BodyExt;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};

/// Largest body.
pub const BODY_BYTES_MAX: usize = 8 << 20;
/// Longest time for a whole body.
pub(super) const BODY_TIME_MAX: Duration = Duration::from_secs(60);
/// Longest silence within a body.
pub(super) const BODY_SILENCE_MAX: Duration = Duration::from_secs(10);
/// What a refused client may still send, and for how long, before it is cut off. A client that sees its connection
/// closed while it sends would not read why.
const REST_BYTES_MAX: usize = 16 << 20;
const REST_TIME_MAX: Duration = Duration::from_secs(2);
/// What a permit of the budget stands for.
const BUDGET_UNIT_BYTES: usize = 64 << 10;
/// All bodies together.
const BUDGET_BYTES: usize = 256 << 20;

/// Memory for the bodies of all requests. Clones share it.
#[derive(Clone)]
pub(super) struct BodyBudget(Arc<Semaphore>);

/// A body, and its share of the budget.
pub(super) struct WholeBody {
    pub(super) bytes: Vec<u8>,
    _share: OwnedSemaphorePermit,
}

impl BodyBudget {
    pub(super) fn new() -> Self {
        Self(Arc::new(Semaphore::new(BUDGET_BYTES / BUDGET_UNIT_BYTES)))
    }

    fn take(&self, n_units: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        let n_units = u32::try_from(n_units).expect("a body has a limit");
        let taken = Arc::clone(&self.0).try_acquire_many_owned(n_units);
        taken.map_err(|_| {
            let mut error = ApiError::new(
                StatusCode::TOO_MANY_REQUESTS,
                "overloaded",
                "the bodies of other requests fill the router's memory for them; try again later",
            );
            error.retry_after = Some(Duration::from_secs(1));
            error
        })
    }
}

/// Checks what the headers say about the body.
///
/// # Errors
/// 415 for anything but plain JSON, 413 when the length is known to be too large.
pub(super) fn check_headers(headers: &HeaderMap) -> Result<(), ApiError> {
    // Every value of a name, since two readers of one message may each take another one.
    let texts = |name| {
        headers
            .get_all(name)
            .iter()
            .map(|value| value.to_str().unwrap_or("?"))
    };
    let unsupported = |message: String| {
        ApiError::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "unsupported_media_type",
            message,
        )
    };
    let kinds: Vec<&str> = texts(header::CONTENT_TYPE).collect();
    let [kind] = kinds[..] else {
        return Err(unsupported(format!(
            "{} content-type headers; one that says application/json is needed",
            kinds.len()
        )));
    };
    let essence = kind.split(';').next().unwrap_or_default().trim();
    if !essence.eq_ignore_ascii_case("application/json") {
        return Err(unsupported(format!(
            "content-type is {}; application/json is needed",
            super::error::shown(kind)
        )));
    }
    let is_plain = |encoding: &&str| encoding.trim().eq_ignore_ascii_case("identity");
    if let Some(encoding) = texts(header::CONTENT_ENCODING).find(|encoding| !is_plain(encoding)) {
        return Err(unsupported(format!(
            "content-encoding is {}; send the body without compression",
            super::error::shown(encoding)
        )));
    }
    // The parser has checked that it is a number and that there is one; too large for one is too large for us.
    let is_too_large = |length: &str| {
        length
            .parse::<u64>()
            .ok()
            .is_none_or(|n| n > BODY_BYTES_MAX as u64)
    };
    if texts(header::CONTENT_LENGTH).any(is_too_large) {
        return Err(too_large());
    }
    Ok(())
}

/// Reads the whole body.
///
/// # Errors
/// 413 past the limit, 408 when it comes too slowly, 429 when the budget is used up, 400 when it breaks off.
pub(super) async fn read(body: &mut Body, budget: &BodyBudget) -> Result<WholeBody, ApiError> {
    let deadline = Instant::now() + BODY_TIME_MAX;
    let mut share = budget.take(1)?;
    let mut bytes = Vec::new();
    loop {
        let frame = timeout_at(deadline, timeout(BODY_SILENCE_MAX, body.frame())).await;
        let Ok(Ok(frame)) = frame else {
            return Err(too_slow());
        };
        let Some(frame) = frame else {
            return Ok(WholeBody {
                bytes,
                _share: share,
            });
        };
        let frame = frame.map_err(|error| {
            let message = format!("the body broke off: {error}");
            ApiError::new(StatusCode::BAD_REQUEST, "incomplete_body", message)
        })?;
        let Ok(data) = frame.into_data() else {
            continue;
        };
        if bytes.len() + data.len() > BODY_BYTES_MAX {
            return Err(too_large());
        }
        bytes.extend_from_slice(&data);
        let n_units = bytes.len().div_ceil(BUDGET_UNIT_BYTES);
        if n_units > share.num_permits() {
            share.merge(budget.take(n_units - share.num_permits())?);
        }
    }
}

/// Throws away what a refused client still sends, within bounds.
pub(super) async fn discard(mut body: Body) {
    let mut n_bytes = 0;
    let reading = async {
        while let Some(Ok(frame)) = body.frame().await {
            n_bytes += frame.data_ref().map_or(0, |data| data.len());
            if n_bytes > REST_BYTES_MAX {
                return;
            }
        }
    };
    // Out of time is as good as out of bytes: the answer goes out either way.
    let _ = timeout(REST_TIME_MAX, reading).await;
}

fn too_large() -> ApiError {
    ApiError::new(
        StatusCode::PAYLOAD_TOO_LARGE,
        "body_too_large",
        format!("the body has more than {BODY_BYTES_MAX} bytes, the most that is allowed"),
    )
}

fn too_slow() -> ApiError {
    ApiError::new(
        StatusCode::REQUEST_TIMEOUT,
        "body_timeout",
        format!(
            "the body came too slowly; {} s without a byte and {} s in all are allowed",
            BODY_SILENCE_MAX.as_secs(),
            BODY_TIME_MAX.as_secs()
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::{HeaderName, HeaderValue};
    use futures::{StreamExt, stream};
    use std::convert::Infallible;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pairs = pairs.iter().map(|&(name, value)| {
            let name = HeaderName::from_static(name);
            (name, HeaderValue::from_static(value))
        });
        pairs.collect()
    }

    fn status(pairs: &[(&'static str, &'static str)]) -> u16 {
        check_headers(&headers(pairs)).map_or_else(|error| error.status.as_u16(), |()| 200)
    }

    #[test]
    fn b109_only_plain_json_of_a_fair_length() {
        assert_eq!(status(&[("content-type", "application/json")]), 200);
        assert_eq!(
            status(&[("content-type", "Application/JSON; charset=utf-8")]),
            200
        );
        assert_eq!(status(&[]), 415);
        assert_eq!(status(&[("content-type", "text/plain")]), 415);
        let json = ("content-type", "application/json");
        assert_eq!(status(&[json, ("content-encoding", "gzip")]), 415);
        assert_eq!(status(&[json, ("content-encoding", "identity")]), 200);
        assert_eq!(status(&[json, ("content-length", "100000000")]), 413);
        assert_eq!(status(&[json, ("content-length", "8388608")]), 200);
        assert_eq!(status(&[json, ("content-length", "8388609")]), 413);
    }

    #[test]
    fn b109_a_second_header_is_read_too() {
        let json = ("content-type", "application/json");
        let (plain, gzip) = (
            ("content-encoding", "identity"),
            ("content-encoding", "gzip"),
        );
        assert_eq!(status(&[json, plain, plain]), 200);
        for pair in [[plain, gzip], [gzip, plain]] {
            assert_eq!(status(&[json, pair[0], pair[1]]), 415);
        }
        assert_eq!(status(&[json, ("content-encoding", "identity, gzip")]), 415);
        assert_eq!(status(&[json, json]), 415);
        assert_eq!(status(&[json, ("content-type", "text/plain")]), 415);
        let (short, long) = (("content-length", "2"), ("content-length", "100000000"));
        assert_eq!(status(&[json, short, long]), 413);
    }

    #[tokio::test]
    async fn b109_an_endless_body_stops_at_the_limit() {
        let budget = BodyBudget::new();
        let endless = stream::repeat_with(|| Ok::<_, Infallible>(vec![b' '; 1 << 20]));
        let refused = read(&mut Body::from_stream(endless), &budget).await.err();
        assert_eq!(
            refused.expect("refused").status,
            StatusCode::PAYLOAD_TOO_LARGE
        );
        assert_eq!(
            budget.0.available_permits(),
            BUDGET_BYTES / BUDGET_UNIT_BYTES
        );
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_thrown_away_is_bounded_in_bytes_and_time() {
        let endless = stream::repeat_with(|| Ok::<_, Infallible>(vec![b' '; 1 << 20]));
        discard(Body::from_stream(endless)).await;
        discard(Body::from_stream(stream::pending::<
            Result<Vec<u8>, Infallible>,
        >()))
        .await;
    }

    #[tokio::test]
    async fn the_budget_bounds_all_bodies_together() {
        let budget = BodyBudget::new();
        let large = async || read(&mut Body::from(vec![b' '; BODY_BYTES_MAX]), &budget).await;
        let mut held = Vec::new();
        for _ in 0..BUDGET_BYTES / BODY_BYTES_MAX {
            let Ok(body) = large().await else {
                panic!("the budget has room for this body");
            };
            assert_eq!(body.bytes.len(), BODY_BYTES_MAX);
            held.push(body);
        }
        let refused = large().await.err().expect("refused");
        assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
        held.clear();
        assert!(large().await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn b077_a_body_that_drips_has_a_minute_in_all() {
        const PAUSE: Duration = Duration::from_secs(BODY_SILENCE_MAX.as_secs() - 1);
        let dripping = stream::repeat(()).then(async |()| {
            tokio::time::sleep(PAUSE).await;
            Ok::<_, Infallible>(vec![b' '])
        });
        let begin = Instant::now();
        let mut body = Body::from_stream(dripping);
        let budget = BodyBudget::new();
        let refused = timeout(10 * BODY_TIME_MAX, read(&mut body, &budget)).await;
        let refused = refused.expect("it ends").err().expect("refused");
        assert_eq!(refused.status, StatusCode::REQUEST_TIMEOUT);
        let took = begin.elapsed();
        assert!(
            took >= BODY_TIME_MAX && took < BODY_TIME_MAX + PAUSE,
            "{took:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn b077_a_silent_body_times_out() {
        let begin = Instant::now();
        let silent = stream::pending::<Result<Vec<u8>, Infallible>>();
        let refused = read(&mut Body::from_stream(silent), &BodyBudget::new())
            .await
            .err();
        assert_eq!(
            refused.expect("refused").status,
            StatusCode::REQUEST_TIMEOUT
        );
        let took = begin.elapsed();
        assert!(took < BODY_SILENCE_MAX + Duration::from_secs(1), "{took:?}");
    }
}
