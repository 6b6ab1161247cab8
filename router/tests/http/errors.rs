//! What a client is told when something does not hold, before the answer and in the middle of it.

use crate::support::{Door, byte_answers, say};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tidemill_core::{Failure, FailureCode};
use tidemill_router::admission::Admission;
use tidemill_router::requests::Answer;

#[tokio::test]
async fn a_failure_before_the_first_token_has_its_status() {
    for (code, status) in [
        (FailureCode::InvalidRequest, 400),
        (FailureCode::ContextLengthExceeded, 400),
        (FailureCode::Overloaded, 429),
        (FailureCode::DeadlineExceeded, 504),
        (FailureCode::Unavailable, 503),
        (FailureCode::TransferFailed, 503),
        (FailureCode::NumericFault, 500),
        (FailureCode::Internal, 500),
    ] {
        let door = Door::open(move |_| vec![Answer::Failed(Failure::new(code, "because"))]).await;
        for stream in [false, true] {
            let reply = door.chat("x", json!({"stream": stream})).await;
            assert_eq!(
                reply.error(),
                (status, code.name().to_owned(), String::new())
            );
            let is_later = reply.headers.contains_key("retry-after");
            assert_eq!(is_later, matches!(status, 429 | 503));
        }
    }
}

#[tokio::test]
async fn a_failure_mid_stream_is_an_error_event_and_no_done() {
    let door = Door::open(|job| {
        let mut answers = byte_answers(job, b"abc");
        answers.push(Answer::Failed(Failure::new(
            FailureCode::Unavailable,
            "node lost",
        )));
        answers
    })
    .await;
    let reply = door.chat("x", json!({"stream": true})).await;
    assert_eq!(reply.status, 200);
    let events = reply.events();
    assert!(!events.iter().any(|event| event == "[DONE]"));
    let last = events.last().expect("an event");
    let error: Value =
        serde_json::from_str(last.strip_prefix("error: ").expect("named")).expect("JSON");
    assert_eq!(error["error"]["code"], "unavailable");
    assert!(!reply.body.contains("\"finish_reason\":\"stop\""));
    assert_eq!(door.chat("x", json!({})).await.status, 503);
}

#[tokio::test]
async fn one_failed_choice_fails_the_request_and_cancels_the_others() {
    let door = Door::open(|job| match job.sampling.seed {
        1 => vec![Answer::Failed(Failure::new(
            FailureCode::Internal,
            "broken",
        ))],
        _ => byte_answers(job, b"endless"),
    })
    .await;
    for stream in [false, true] {
        let reply = door
            .chat("x", json!({"n": 3, "seed": 0, "stream": stream}))
            .await;
        assert!(!reply.body.contains("[DONE]"));
        assert!(reply.body.contains("\"internal\""), "{}", reply.body);
        door.all_ended().await;
    }
}

#[tokio::test]
async fn answers_that_break_off_are_a_failure() {
    let door = Door::open(|_| Vec::new()).await;
    for stream in [false, true] {
        let reply = door.complete("x", json!({"stream": stream})).await;
        assert_eq!(reply.error(), (500, "internal".to_owned(), String::new()));
    }
    assert_eq!(door.n_cancelled(), 0);
}

#[tokio::test]
async fn b020_the_context_limit_is_one_and_is_told() {
    let door = Door::open(|job| say(job, "y")).await;
    // 64 positions; every "b" is one token.
    for (n_prompt, more, status) in [
        (63, json!({"max_tokens": 1}), 200),
        (63, json!({}), 200),
        (64, json!({"max_tokens": 1}), 400),
        (64, json!({}), 400),
        (64, json!({"max_tokens": 0, "echo": true}), 200),
        (65, json!({"max_tokens": 0, "echo": true}), 400),
        (65, json!({}), 400),
        (10, json!({"max_tokens": 54}), 200),
        (10, json!({"max_tokens": 55}), 400),
    ] {
        let reply = door.complete("b".repeat(n_prompt), more.clone()).await;
        assert_eq!(reply.status, status, "{n_prompt} {more} {}", reply.body);
        if status == 400 {
            let expected = (
                400,
                "context_length_exceeded".to_owned(),
                "prompt".to_owned(),
            );
            assert_eq!(reply.error(), expected);
            let message = reply.json()["error"]["message"]
                .as_str()
                .expect("text")
                .to_owned();
            assert!(
                message.contains("64") && message.contains(&n_prompt.to_string()),
                "{message}"
            );
        }
    }
    door.complete("b".repeat(63), json!({})).await;
    assert_eq!(door.last_job().stop.max_tokens, 1);
    let reply = door.chat(&"b".repeat(100), json!({})).await;
    assert_eq!(reply.error().2, "messages");
    door.chat("b", json!({})).await;
    let job = door.last_job();
    assert_eq!(
        job.prompt.len() + job.stop.max_tokens as usize,
        64,
        "a chat may fill the context"
    );
}

#[tokio::test]
async fn b017_an_empty_prompt_is_refused() {
    let door = Door::open(|job| say(job, "y")).await;
    let refused = |param: &str| (400, "invalid_value".to_owned(), param.to_owned());
    assert_eq!(
        door.complete("", json!({})).await.error(),
        refused("prompt")
    );
    assert_eq!(
        door.complete(json!([""]), json!({})).await.error(),
        refused("prompt")
    );
    assert_eq!(
        door.complete(json!(["a", ""]), json!({})).await.error(),
        refused("prompt[1]")
    );
    assert_eq!(
        door.complete(json!([[]]), json!({})).await.error(),
        refused("prompt")
    );
    assert_eq!(door.n_jobs(), 0);
    // An empty message still has the template's tokens.
    assert_eq!(door.chat("", json!({})).await.status, 200);
}

#[tokio::test]
async fn b022_token_ids_are_checked_against_the_vocabulary() {
    let door = Door::open(|job| say(job, "y")).await;
    let n_tokens = door.model.vocab_size;
    let reply = door.complete(json!([1, n_tokens]), json!({})).await;
    assert_eq!(
        (reply.error().0, reply.error().2),
        (400, "prompt".to_owned())
    );
    let reply = door
        .complete("x", json!({"stop_token_ids": [n_tokens]}))
        .await;
    assert_eq!(
        (reply.error().0, reply.error().2),
        (400, "stop_token_ids".to_owned())
    );
    assert_eq!(door.n_jobs(), 0);
    assert_eq!(
        door.complete(json!([n_tokens - 1]), json!({})).await.status,
        200
    );
}

#[tokio::test]
async fn b021_a_bias_that_means_no_token_reaches_nobody() {
    let door = Door::open(|job| say(job, "y")).await;
    let beyond = door.model.vocab_size.to_string();
    for bias in [
        json!({beyond: 1}),
        json!({"-1": 1}),
        json!({"abc": 1}),
        json!({"": 1}),
        json!({"1": 1e9}),
        json!({"1": 1e308}),
        json!({"1": "1"}),
        json!([1]),
    ] {
        let more = json!({"logit_bias": &bias});
        for reply in [
            door.complete("x", more.clone()).await,
            door.chat("x", more).await,
        ] {
            let (status, _, param) = reply.error();
            assert_eq!((status, param.as_str()), (400, "logit_bias"), "{bias}");
        }
    }
    let body = br#"{"prompt":"x","logit_bias":{"1":NaN}}"#;
    let reply = door.post_bytes("/v1/completions", body.to_vec(), &[]).await;
    assert_eq!(reply.error().1, "invalid_json");
    assert_eq!(door.n_jobs(), 0);
    assert_eq!(door.complete("x", json!({})).await.status, 200);
}

#[tokio::test]
async fn another_model_and_other_paths_are_not_found() {
    let door = Door::open(|job| say(job, "y")).await;
    let reply = door.complete("x", json!({"model": "gpt-9"})).await;
    assert_eq!(
        reply.error(),
        (404, "model_not_found".to_owned(), "model".to_owned())
    );
    assert_eq!(door.complete("x", json!({"model": null})).await.status, 200);
    assert_eq!(door.get("/v1/embeddings").await.error().0, 404);
    assert_eq!(
        door.get("/v1/completions").await.error().1,
        "method_not_allowed"
    );
}

#[tokio::test]
async fn a_full_house_is_told_at_once() {
    let door = Door::open_with(Arc::new(Admission::new(2, 0)), |_| {}, |job| say(job, "y")).await;
    let taken = door.admission.try_admit().expect("a free place");
    let reply = door.chat("x", json!({"n": 2})).await;
    assert_eq!(
        (reply.error().0, reply.error().1.as_str()),
        (429, "overloaded")
    );
    assert_eq!(reply.headers["retry-after"], "1");
    drop(taken);
    door.all_ended().await;
    assert_eq!(door.chat("x", json!({"n": 2})).await.status, 200);
    // More choices than there are places can never be served: no use in trying again.
    let reply = door.chat("x", json!({"n": 3})).await;
    assert_eq!(
        (reply.error().0, reply.json()["error"]["param"].clone()),
        (400, json!("n"))
    );
    door.admission.close();
    assert_eq!(door.chat("x", json!({})).await.error().1, "draining");
}

#[tokio::test]
async fn b109_bodies_are_bounded_and_must_be_json() {
    let door = Door::open(|job| say(job, "y")).await;
    let path = "/v1/chat/completions";
    let post = |body: Vec<u8>| door.post_bytes(path, body, &[]);
    assert_eq!(post(vec![b' '; 9 << 20]).await.error().0, 413);
    for body in [
        &b"{"[..],
        b"\xef\xbb\xbf{}",
        b"{\"messages\":[],\"messages\":[]}",
        b"{\"temperature\":NaN}",
        b"{\"messages\":[{\"role\":\"user\",\"content\":\"\\ud800\"}]}",
    ] {
        assert_eq!(post(body.to_vec()).await.error().1, "invalid_json");
    }
    let deep = format!("{{\"x\":{}", "[".repeat(10_000));
    assert_eq!(post(deep.into_bytes()).await.error().1, "invalid_json");
    let text = door
        .post_bytes(path, "{}", &[("content-type", "text/plain")])
        .await;
    assert_eq!(text.error().0, 415);
    let gzip = door
        .post_bytes(path, "{}", &[("content-encoding", "gzip")])
        .await;
    assert_eq!(gzip.error().0, 415);
    let hidden = [
        ("content-encoding", "identity"),
        ("content-encoding", "gzip"),
    ];
    assert_eq!(door.post_bytes(path, "{}", &hidden).await.error().0, 415);
    let two = [
        ("content-type", "application/json"),
        ("content-type", "text/plain"),
    ];
    assert_eq!(door.post_bytes(path, "{}", &two).await.error().0, 415);
    assert_eq!(door.n_jobs(), 0);
    assert_eq!(door.chat("a\0b", json!({})).await.status, 200);
}

#[tokio::test]
async fn a_request_has_a_deadline_of_its_own() {
    let door = Door::open(|job| say(job, "y")).await;
    let body = json!({"prompt": "x"}).to_string();
    let path = "/v1/completions";
    door.post_bytes(path, body.clone(), &[("x-request-timeout-ms", "1000")])
        .await;
    let short = door.last_job().deadline;
    door.post_bytes(path, body.clone(), &[]).await;
    let left = door.last_job().deadline.since_us(short);
    assert!((598_000_000..=601_000_000).contains(&left), "{left}");
    let reply = door
        .post_bytes(path, body, &[("x-request-timeout-ms", "soon")])
        .await;
    assert_eq!(reply.error().2, "x-request-timeout-ms");
}

#[test]
fn requests_that_are_being_read_are_bounded() {
    /// As many as the door reads at once.
    const N_READ: usize = 256;
    // One thread for reading, and something else on it: requests wait for it, each with its place.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(1)
        .enable_all()
        .build();
    runtime.expect("a runtime").block_on(async {
        let admission = Arc::new(Admission::new(2 * N_READ, 0));
        let door = Door::open_with(admission, |_| {}, |job| say(job, "y")).await;
        let door = Arc::new(door);
        let (release, held) = std::sync::mpsc::channel::<()>();
        let busy = tokio::task::spawn_blocking(move || held.recv());
        let body = json!({"prompt": "x"}).to_string();
        let mut waiting = tokio::task::JoinSet::new();
        for _ in 0..=N_READ {
            let (door, body) = (Arc::clone(&door), body.clone());
            waiting.spawn(async move { door.post_bytes("/v1/completions", body, &[]).await });
        }
        // All but one wait; that one is told.
        let first = tokio::time::timeout(Duration::from_secs(20), waiting.join_next()).await;
        let refused = first.expect("one is told").expect("one").expect("no panic");
        assert_eq!(
            refused.error(),
            (429, "overloaded".to_owned(), String::new())
        );
        assert!(refused.body.contains("256 requests are being read"));
        assert!(refused.headers.contains_key("retry-after"));
        let next = tokio::time::timeout(Duration::from_millis(300), waiting.join_next()).await;
        assert!(next.is_err(), "no other is refused");
        release.send(()).expect("the thread waits");
        busy.await.expect("no panic").expect("released");
        while let Some(served) = waiting.join_next().await {
            assert_eq!(served.expect("no panic").status, 200);
        }
    });
}

#[tokio::test]
async fn b022_as_many_stop_tokens_as_allowed_go_beside_the_models_own() {
    let door = Door::open(|job| say(job, "y")).await;
    let ids: Vec<u32> = (100..164).collect();
    let reply = door.complete("x", json!({"stop_token_ids": ids})).await;
    assert_eq!(reply.status, 200);
    assert!(
        door.last_job().stop.stop_token_ids.len() > 64,
        "and its EOS"
    );
    let ids: Vec<u32> = (100..165).collect();
    let reply = door.complete("x", json!({"stop_token_ids": ids})).await;
    assert_eq!(
        (reply.error().0, reply.error().2.as_str()),
        (400, "stop_token_ids")
    );
}

#[tokio::test]
async fn b108_what_cannot_fit_is_refused_before_it_is_made_tokens() {
    let door = Door::open(|job| say(job, "y")).await;
    let text = " ".repeat(3 << 20);
    for reply in [
        door.complete(text.clone(), json!({})).await,
        door.chat(&text, json!({})).await,
    ] {
        let (status, code, _) = reply.error();
        assert_eq!((status, code.as_str()), (400, "context_length_exceeded"));
        let message = reply.json()["error"]["message"].to_string();
        assert!(
            message.contains("at least"),
            "it was not tokenised: {message}"
        );
    }
}
