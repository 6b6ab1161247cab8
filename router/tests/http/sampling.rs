//! Sampling fields from a client's body to the job that nodes are asked for, on both endpoints, and `best_of`.

use crate::support::{Door, EOS, byte_answers, finished, say};
use serde_json::{Value, json};
use tidemill_core::{FinishReason, SamplingParams, TokenBias};
use tidemill_router::requests::Answer;

fn everything() -> Value {
    json!({
        "temperature": 0.25, "top_p": 0.5, "top_k": 9, "min_p": 0.125, "typical_p": 0.75, "seed": 4,
        "repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 2,
        "logit_bias": {"9": -100, "4": 2.5}, "min_tokens": 3, "max_tokens": 5, "stop_token_ids": [7],
    })
}

#[tokio::test]
async fn every_field_is_passed_on_by_both_endpoints() {
    let door = Door::open(|job| say(job, "y")).await;
    let bias = |token, bias| TokenBias { token, bias };
    let expected = SamplingParams {
        temperature: 0.25,
        top_k: 9,
        top_p: 0.5,
        min_p: 0.125,
        typical_p: 0.75,
        repetition_penalty: 1.5,
        presence_penalty: -0.5,
        frequency_penalty: 2.0,
        logit_bias: [bias(4, 2.5), bias(9, -100.0)].into(),
        seed: 4,
    };
    for chat in [true, false] {
        let reply = match chat {
            true => door.chat("x", everything()).await,
            false => door.complete("x", everything()).await,
        };
        assert_eq!(reply.status, 200, "{}", reply.body);
        let job = door.last_job();
        assert_eq!(job.sampling, expected);
        assert_eq!((job.stop.min_tokens, job.stop.max_tokens), (3, 5));
        assert_eq!(job.stop.stop_token_ids, [EOS, 7]);
    }
    door.chat("x", json!({"seed": 0, "temperature": 0})).await;
    assert_eq!(door.last_job().sampling, SamplingParams::greedy());
    assert_eq!(door.last_job().stop.min_tokens, 0);
}

#[tokio::test]
async fn b021_b022_b110_what_the_model_cannot_take_is_refused_by_name() {
    let door = Door::open(|job| say(job, "y")).await;
    let vocab_size = door.model.vocab_size;
    let last = vocab_size - 1;
    for (field, more) in [
        (
            "logit_bias",
            json!({"logit_bias": {vocab_size.to_string(): 1}}),
        ),
        ("logit_bias", json!({"logit_bias": {"4294967295": 1}})),
        ("logit_bias", json!({"logit_bias": {"-1": 1}})),
        ("logit_bias", json!({"logit_bias": {"1": 1e308}})),
        (
            "stop_token_ids",
            json!({"stop_token_ids": [vocab_size], "min_tokens": 1}),
        ),
        ("min_tokens", json!({"min_tokens": 6, "max_tokens": 5})),
        ("min_tokens", json!({"min_tokens": 64})),
        ("min_p", json!({"min_p": 1.5})),
        ("typical_p", json!({"typical_p": 0})),
        ("repetition_penalty", json!({"repetition_penalty": 0})),
        ("presence_penalty", json!({"presence_penalty": 2.5})),
        ("frequency_penalty", json!({"frequency_penalty": "much"})),
    ] {
        for reply in [
            door.chat("x", more.clone()).await,
            door.complete("x", more.clone()).await,
        ] {
            let (status, code, param) = reply.error();
            assert_eq!((status, param.as_str()), (400, field), "{}", reply.body);
            assert!(["invalid_value", "invalid_request"].contains(&code.as_str()));
        }
    }
    assert_eq!(door.n_jobs(), 0, "nothing of it reached a node");
    let most = json!({"logit_bias": {last.to_string(): 1}, "stop_token_ids": [last]});
    assert_eq!(door.chat("x", most).await.status, 200);
}

/// Says the seed's digit; the higher the digit, the likelier each of its tokens, and the more tokens.
fn rated(job: &tidemill_router::requests::Job) -> Vec<Answer> {
    let digit = u8::try_from(job.sampling.seed).expect("small");
    let text = vec![b'0' + digit; usize::from(digit) + 1];
    let mut answers = byte_answers(job, &text);
    for answer in &mut answers {
        if let Answer::Token(token) = answer {
            assert!(token.logprob.is_some(), "asked about to be ranked");
            token.logprob = Some(f32::from(digit % 5) - 9.0);
        }
    }
    answers.push(finished(FinishReason::Length, text.len() as u32));
    answers
}

#[tokio::test]
async fn best_of_answers_the_likeliest_candidates_per_token() {
    let door = Door::open(rated).await;
    let texts = |reply: &Value| -> Vec<(u64, String)> {
        let choices = reply["choices"].as_array().expect("choices").iter();
        let text = |choice: &Value| choice["text"].as_str().expect("text").to_owned();
        choices
            .map(|choice| (choice["index"].as_u64().expect("index"), text(choice)))
            .collect()
    };
    let more = json!({"best_of": 7, "n": 3, "seed": 0});
    let reply = door.complete(json!(["x", "y"]), more).await.json();
    // By digit modulo 5: 4, then 3, then 2; among equals the earlier.
    let expected = ["44444", "3333", "222", "44444", "3333", "222"];
    let expected = expected.iter().enumerate();
    let expected: Vec<_> = expected
        .map(|(idx, text)| (idx as u64, (*text).to_owned()))
        .collect();
    assert_eq!(texts(&reply), expected);
    assert_eq!(
        reply["choices"][0]["logprobs"],
        Value::Null,
        "not asked for"
    );
    // All candidates were computed; a prompt counts once.
    let usage = &reply["usage"];
    assert_eq!(usage["completion_tokens"], 2 * (1..=7).sum::<u64>());
    assert_eq!(usage["prompt_tokens"], 2);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 14);
    let asked = json!({"best_of": 5, "seed": 0, "logprobs": 0, "echo": true});
    let reply = door.complete("x", asked).await.json();
    assert_eq!(texts(&reply), [(0, "x44444".to_owned())]);
    let logprobs = &reply["choices"][0]["logprobs"]["token_logprobs"];
    assert_eq!(logprobs, &json!([null, -5.0, -5.0, -5.0, -5.0, -5.0]));
}

#[tokio::test]
async fn as_many_candidates_as_choices_are_not_ranked() {
    let door = Door::open(|job| {
        assert_eq!(job.logprobs.output_top, None);
        let mut answers = byte_answers(job, b"y");
        answers.push(finished(FinishReason::Length, 1));
        answers
    })
    .await;
    let more = json!({"best_of": 2, "n": 2, "stream": true});
    assert_eq!(door.complete("x", more).await.status, 200);
    let chat = door.chat("x", json!({"best_of": 2})).await;
    assert_eq!(
        chat.error(),
        (
            400,
            "unsupported_parameter".to_owned(),
            "best_of".to_owned()
        )
    );
    let more = json!({"best_of": 20});
    let reply = door.complete(json!(["x", "y"]), more).await;
    let (status, _, param) = reply.error();
    assert_eq!((status, param.as_str()), (400, "best_of"), "32 places");
}
