//! Answers as server-sent events.
//!
//! Order: for each choice its opening, its pieces, then one chunk with an empty delta and the reason; after the last
//! choice the usage when asked for, then `[DONE]`. A failure is one `error` event and the end, without `[DONE]`:
//! a stream that has broken must not look complete. While nothing is to be told a comment line keeps proxies from
//! closing the connection, and finds out clients that have left.

use super::choice::ChoiceEvent;
use super::error::ApiError;
use super::generate::Running;
use axum::body::Body;
use axum::http::{HeaderValue, Response, header};
use bytes::Bytes;
use serde_json::Value;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

/// Longest silence on a stream.
pub(super) const SILENCE_MAX: Duration = Duration::from_secs(15);

struct EventStream {
    running: Running,
    ready: VecDeque<Bytes>,
    has_ended: bool,
}

/// The response that tells what `running` comes to, beginning with `first` when that is known already.
pub(super) fn respond(running: Running, first: Option<(usize, ChoiceEvent)>) -> Response<Body> {
    let mut events = EventStream {
        running,
        ready: VecDeque::new(),
        has_ended: false,
    };
    for index in 0..events.running.n_choices() {
        if let Some(chunk) = events.running.shape.opening(index) {
            events.ready.push_back(data(&chunk));
        }
    }
    if let Some((index, event)) = first {
        events.tell(index, event);
    }
    let body = futures::stream::unfold(events, |mut events| async move {
        let bytes = events.next().await?;
        Some((Ok::<_, Infallible>(bytes), events))
    });
    let mut response = Response::new(Body::from_stream(body));
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream; charset=utf-8"),
    );
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

impl EventStream {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(bytes) = self.ready.pop_front() {
                return Some(bytes);
            }
            if self.has_ended {
                return None;
            }
            match tokio::time::timeout(SILENCE_MAX, self.running.next()).await {
                Err(_) => return Some(Bytes::from_static(b": still working\n\n")),
                Ok(Some((index, event))) => self.tell(index, event),
                Ok(None) => self.end(),
            }
        }
    }

    fn tell(&mut self, index: usize, event: ChoiceEvent) {
        let shape = &self.running.shape;
        match event {
            ChoiceEvent::Piece(piece) => self.ready.push_back(data(&shape.piece(index, &piece))),
            ChoiceEvent::Ended(ended) => {
                self.ready
                    .push_back(data(&shape.ending(index, ended.reason)));
            }
            ChoiceEvent::Failed(failure) => {
                let body = ApiError::from(failure).body();
                self.ready
                    .push_back(Bytes::from(format!("event: error\ndata: {body}\n\n")));
                self.running.cancel();
                self.has_ended = true;
            }
        }
    }

    fn end(&mut self) {
        let shape = &self.running.shape;
        if shape.include_usage {
            self.ready
                .push_back(data(&shape.usage(self.running.usage())));
        }
        self.ready
            .push_back(Bytes::from_static(b"data: [DONE]\n\n"));
        self.has_ended = true;
    }
}

fn data(chunk: &Value) -> Bytes {
    Bytes::from(format!("data: {chunk}\n\n"))
}
