//! Server-sent events out of a byte stream. Events end at a blank line, wherever the network cuts the bytes.

use anyhow::{Result, bail};
use bytes::Bytes;
use futures::{Stream, StreamExt, stream};

/// Longest event that is kept.
const EVENT_BYTES_MAX: usize = 4 << 20;

/// The `data` of each event. A stream that ends inside an event is an error.
pub(super) fn events<S>(bytes: S) -> impl Stream<Item = Result<String>>
where
    S: Stream<Item = Result<Bytes>>,
{
    let state = (Box::pin(bytes), Vec::new());
    stream::unfold(Some(state), |state| async move {
        let (mut bytes, mut held) = state?;
        loop {
            match take_event(&mut held) {
                Ok(Some(data)) => return Some((Ok(data), Some((bytes, held)))),
                Ok(None) => {}
                Err(error) => return Some((Err(error), None)),
            }
            match bytes.next().await {
                Some(Ok(part)) => held.extend_from_slice(&part),
                Some(Err(error)) => return Some((Err(error), None)),
                None if held.iter().all(u8::is_ascii_whitespace) => return None,
                None => {
                    let error = anyhow::anyhow!("the stream ended inside an event");
                    return Some((Err(error), None));
                }
            }
        }
    })
}

/// Takes the first whole event that has data out of `held`.
fn take_event(held: &mut Vec<u8>) -> Result<Option<String>> {
    while let Some((end, next)) = event_end(held) {
        let event = String::from_utf8_lossy(&held[..end]).into_owned();
        held.drain(..next);
        let data: Vec<&str> = event
            .lines()
            .filter_map(|line| line.strip_prefix("data:"))
            .map(|data| data.strip_prefix(' ').unwrap_or(data))
            .collect();
        if !data.is_empty() {
            return Ok(Some(data.join("\n")));
        }
    }
    if held.len() > EVENT_BYTES_MAX {
        bail!("the server sent an event of more than {EVENT_BYTES_MAX} bytes");
    }
    Ok(None)
}

fn event_end(held: &[u8]) -> Option<(usize, usize)> {
    (0..held.len()).find_map(|at| {
        let rest = &held[at..];
        if rest.starts_with(b"\n\n") {
            Some((at, at + 2))
        } else if rest.starts_with(b"\r\n\r\n") {
            Some((at, at + 4))
        } else {
            None
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn collect(parts: Vec<&'static [u8]>) -> Vec<Result<String>> {
        let bytes = stream::iter(parts.into_iter().map(|part| Ok(Bytes::from_static(part))));
        events(bytes).collect().await
    }

    #[tokio::test]
    async fn the_network_may_cut_anywhere() {
        let whole: &[u8] = b"data: one\n\n: keep-alive\n\ndata: two\r\n\r\ndata: thr\xc3\xa9e\n\n";
        let at_once = collect(vec![whole]).await;
        let one_by_one = collect(whole.chunks(1).collect()).await;
        for events in [at_once, one_by_one] {
            let events: Vec<String> = events.into_iter().map(|e| e.expect("whole")).collect();
            assert_eq!(events, ["one", "two", "thrée"]);
        }
    }

    #[tokio::test]
    async fn an_end_inside_an_event_is_told() {
        let events = collect(vec![b"data: one\n\ndata: tw"]).await;
        assert!(events[0].is_ok() && events[1].is_err());
    }
}
