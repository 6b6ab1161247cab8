//! What a client sees of a good answer: text, order of chunks, reasons, usage, log-probabilities.

use crate::support::{Door, EOS, byte_answers, byte_token, finished, say, token_answers};
use serde_json::{Value, json};
use tidemill_core::FinishReason;

/// Text and reason of each choice of a streamed answer, chat or completion.
fn told(chunks: &[Value], index: u64) -> (String, Vec<String>) {
    let choices = chunks
        .iter()
        .flat_map(|chunk| chunk["choices"].as_array().expect("choices"));
    let mut text = String::new();
    let mut reasons = Vec::new();
    for choice in choices.filter(|choice| choice["index"] == index) {
        let piece = choice["text"]
            .as_str()
            .or(choice["delta"]["content"].as_str());
        let piece = piece.unwrap_or_default();
        assert!(
            choice
                .as_object()
                .expect("an object")
                .contains_key("finish_reason")
        );
        if let Some(reason) = choice["finish_reason"].as_str() {
            assert_eq!(piece, "", "text and reason share a chunk");
            reasons.push(reason.to_owned());
        }
        text.push_str(piece);
    }
    (text, reasons)
}

#[tokio::test]
async fn b036_the_order_of_chunks_of_a_chat() {
    let door = Door::open(|job| say(job, "Hi!")).await;
    let more = json!({"stream": true, "stream_options": {"include_usage": true}});
    let reply = door.chat("hello", more).await;
    assert_eq!(reply.status, 200);
    assert!(
        reply.headers["content-type"]
            .to_str()
            .expect("text")
            .starts_with("text/event-stream")
    );
    let chunks = reply.chunks();
    let deltas: Vec<&Value> = chunks[..5]
        .iter()
        .map(|chunk| &chunk["choices"][0]["delta"])
        .collect();
    assert_eq!(deltas[0], &json!({"role": "assistant", "content": ""}));
    assert_eq!(
        deltas[1..4],
        [
            &json!({"content": "H"}),
            &json!({"content": "i"}),
            &json!({"content": "!"})
        ]
    );
    assert_eq!(deltas[4], &json!({}));
    for chunk in &chunks[..4] {
        assert_eq!(chunk["choices"][0]["finish_reason"], Value::Null);
        assert_eq!(chunk["usage"], Value::Null);
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert_eq!(chunk["id"], chunks[0]["id"]);
    }
    assert_eq!(chunks[4]["choices"][0]["finish_reason"], "stop");
    assert_eq!(chunks[5]["choices"], json!([]));
    let usage = &chunks[5]["usage"];
    assert_eq!(
        usage["completion_tokens"], 4,
        "the end-of-turn token counts"
    );
    assert_eq!(usage["prompt_tokens"], door.last_job().prompt.len());
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 7);
    assert_eq!(chunks.len(), 6);
}

#[tokio::test]
async fn streamed_and_whole_answers_are_equal() {
    let door = Door::open(|job| say(job, "ab\u{1f600}c STOP d")).await;
    for (stop, expected) in [
        (json!(null), "ab\u{1f600}c STOP d"),
        (json!("STOP"), "ab\u{1f600}c "),
        (json!(["xyz", "d!"]), "ab\u{1f600}c STOP d"),
    ] {
        for more in [
            json!({"n": 1}),
            json!({"logprobs": true, "top_logprobs": 2}),
        ] {
            let mut more = more;
            more["stop"] = stop.clone();
            let whole = door.chat("x", more.clone()).await.json();
            more["stream"] = json!(true);
            let chunks = door.chat("x", more).await.chunks();
            let (text, reasons) = told(&chunks, 0);
            assert_eq!(text, expected);
            assert_eq!(whole["choices"][0]["message"]["content"], expected);
            assert_eq!(reasons, ["stop"]);
            let streamed: Vec<Value> = chunks
                .iter()
                .filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array())
                .flatten()
                .cloned()
                .collect();
            let content = whole["choices"][0]["logprobs"]["content"].as_array();
            assert_eq!(streamed, content.cloned().unwrap_or_default());
        }
    }
}

#[tokio::test]
async fn b011_no_part_of_a_stop_string_gets_out_on_either_endpoint() {
    let door = Door::open(|job| say(job, "ABCDEFGHIJKL")).await;
    let more = json!({"stream": true, "stop": ["DEFGHIJ"], "logprobs": 0});
    let chunks = door.complete("x", more).await.chunks();
    assert_eq!(
        told(&chunks, 0),
        ("ABC".to_owned(), vec!["stop".to_owned()])
    );
    let tokens: Vec<&Value> = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["tokens"].as_array())
        .flatten()
        .collect();
    assert_eq!(tokens, ["A", "B", "C"]);
    let more = json!({"stream": true, "stop": "DEFGHIJ"});
    let chunks = door.chat("x", more).await.chunks();
    assert_eq!(
        told(&chunks, 0),
        ("ABC".to_owned(), vec!["stop".to_owned()])
    );
    door.all_ended().await;
}

#[tokio::test]
async fn b012_held_text_is_flushed_at_every_end() {
    for (reason, name) in [
        (FinishReason::Stop, "stop"),
        (FinishReason::Length, "length"),
    ] {
        let door = Door::open(move |job| {
            let mut answers = byte_answers(job, b"line\nUs");
            answers.push(finished(reason, 7));
            answers
        })
        .await;
        let more = json!({"stream": true, "stop": ["\nUser:"]});
        let chunks = door.complete("x", more).await.chunks();
        assert_eq!(
            told(&chunks, 0),
            ("line\nUs".to_owned(), vec![name.to_owned()])
        );
    }
}

#[tokio::test]
async fn b014_a_stop_string_ends_the_job_behind_it() {
    let door = Door::open(|job| byte_answers(job, b"one two three")).await;
    let whole = door.complete("x", json!({"stop": "two"})).await.json();
    assert_eq!(whole["choices"][0]["text"], "one ");
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    assert_eq!(whole["usage"]["completion_tokens"], 7);
    door.all_ended().await;
    assert_eq!(door.n_cancelled(), 1, "the nodes were told to stop");
}

#[tokio::test]
async fn b015_characters_over_token_boundaries_and_invalid_bytes() {
    let text = "\u{4f60}\u{597d}\u{1f44b}\u{1f3fd}";
    let door = Door::open(move |job| say(job, text)).await;
    let reply = door.complete("x", json!({"stream": true})).await;
    assert_eq!(told(&reply.chunks(), 0).0, text);
    assert!(!reply.body.contains('\u{fffd}'));
    let door = Door::open(|job| {
        let mut answers = byte_answers(job, b"a\xff\xe4\xbd b\xf0\x9f");
        answers.push(finished(FinishReason::Length, 8));
        answers
    })
    .await;
    let whole = door.complete("x", json!({})).await.json();
    assert_eq!(whole["choices"][0]["text"], "a\u{fffd}\u{fffd} b\u{fffd}");
}

#[tokio::test]
async fn b037_exactly_one_reason_for_each_choice() {
    let door = Door::open(|job| {
        let mut answers = byte_answers(job, b"abc");
        answers.push(finished(FinishReason::Length, 3));
        answers
    })
    .await;
    let more = json!({"stream": true, "n": 3, "stream_options": {"include_usage": true}});
    let chunks = door.chat("x", more).await.chunks();
    for index in 0..3 {
        assert_eq!(
            told(&chunks, index),
            ("abc".to_owned(), vec!["length".to_owned()])
        );
    }
    let usage = &chunks.last().expect("usage")["usage"];
    assert_eq!(usage["completion_tokens"], 9);
    assert_eq!(
        usage["prompt_tokens"],
        door.last_job().prompt.len(),
        "the prompt counts once"
    );
}

#[tokio::test]
async fn stop_tokens_are_counted_and_not_shown() {
    let door = Door::open(|job| {
        let mut answers = token_answers(job, &[byte_token(b'a'), byte_token(b'Q')]);
        answers.push(finished(FinishReason::Stop, 2));
        answers
    })
    .await;
    let more = json!({"stop_token_ids": [byte_token(b'Q')], "logprobs": 1});
    let whole = door.complete("x", more).await.json();
    assert_eq!(whole["choices"][0]["text"], "a");
    assert_eq!(whole["choices"][0]["logprobs"]["tokens"], json!(["a"]));
    assert_eq!(whole["usage"]["completion_tokens"], 2);
    assert_eq!(door.last_job().stop.stop_token_ids, [EOS, byte_token(b'Q')]);
    door.complete("x", json!({"ignore_eos": true})).await;
    assert!(door.last_job().stop.stop_token_ids.is_empty());
}

#[tokio::test]
async fn logprobs_have_openais_shape() {
    let door = Door::open(|job| say(job, "h\u{e9}")).await;
    let whole = door
        .chat("x", json!({"logprobs": true, "top_logprobs": 2}))
        .await
        .json();
    let content = whole["choices"][0]["logprobs"]["content"]
        .as_array()
        .expect("content");
    assert_eq!(content.len(), 3);
    assert_eq!(content[0]["token"], "h");
    assert_eq!(content[0]["logprob"], -0.5);
    assert_eq!(content[0]["bytes"], json!([104]));
    assert_eq!(content[0]["top_logprobs"].as_array().expect("top").len(), 2);
    assert_eq!(content[1]["token"], "bytes:\\xc3");
    assert_eq!(content[1]["bytes"], json!([0xc3]));
    let whole = door.complete("x", json!({"logprobs": 2})).await.json();
    let logprobs = &whole["choices"][0]["logprobs"];
    assert_eq!(logprobs["token_logprobs"], json!([-0.5, -0.5, -0.5]));
    assert_eq!(logprobs["text_offset"], json!([0, 1, 1]));
    assert_eq!(logprobs["top_logprobs"][0], json!({"h": -0.5, "1": -1.5}));
    let whole = door.chat("x", json!({})).await.json();
    assert_eq!(whole["choices"][0]["logprobs"], Value::Null);
    assert!(door.last_job().logprobs.output_top.is_none());
}

#[tokio::test]
async fn b018_scoring_a_prompt_generates_nothing() {
    let door = Door::open(|job| {
        let mut answers = token_answers(job, &[]);
        answers.push(finished(FinishReason::Length, 0));
        answers
    })
    .await;
    for stream in [false, true] {
        let more = json!({"max_tokens": 0, "echo": true, "logprobs": 1, "stream": stream});
        let reply = door.complete("abc", more).await;
        let job = door.last_job();
        assert_eq!(job.stop.max_tokens, 0);
        assert_eq!(job.logprobs.prompt_top, Some(1));
        let choice = match stream {
            false => reply.json()["choices"][0].clone(),
            true => reply.chunks()[0]["choices"][0].clone(),
        };
        assert_eq!(choice["text"], "abc");
        let logprobs = &choice["logprobs"];
        assert_eq!(logprobs["tokens"], json!(["a", "b", "c"]));
        assert_eq!(logprobs["token_logprobs"], json!([null, -2.0, -2.0]));
        assert_eq!(logprobs["top_logprobs"][0], Value::Null);
        assert_eq!(logprobs["text_offset"], json!([0, 1, 2]));
    }
}

#[tokio::test]
async fn an_echo_goes_before_the_output_and_shifts_its_offsets() {
    let door = Door::open(|job| say(job, "!")).await;
    let whole = door
        .complete("<|im_start|>h\u{e9}", json!({"echo": true, "logprobs": 0}))
        .await
        .json();
    assert_eq!(whole["choices"][0]["text"], "<|im_start|>h\u{e9}!");
    assert_eq!(
        whole["choices"][0]["logprobs"]["text_offset"],
        json!([0, 12, 13, 13, 14])
    );
    let tokens = json!([1, byte_token(b'h')]);
    let whole = door.complete(tokens, json!({"echo": true})).await.json();
    assert_eq!(whole["choices"][0]["text"], "<|im_start|>h!");
}
