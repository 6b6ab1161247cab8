//! The readers of request bodies against anything: seeds of every kind, mutated, never panic and always answer with a
//! typed request or with a refusal that says why.

use proptest::prelude::*;
use tidemill_router::http::{ApiError, parse_chat, parse_completion};

/// Bodies that reach every field and most refusals.
const SEEDS: &[&str] = &[
    "",
    "{}",
    "[]",
    "null",
    r#"{"messages":[{"role":"user","content":"hi"}]}"#,
    r#"{"model":"m","messages":[{"role":"system","content":[{"type":"text","text":"a"}]}],"stream":true,"stream_options":{"include_usage":true},"n":2,"seed":-1,"temperature":0.5,"top_p":0.9,"top_k":40,"stop":["a","b"],"logprobs":true,"top_logprobs":5,"max_completion_tokens":10}"#,
    r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://x/"}}]}]}"#,
    r#"{"messages":[{"role":"tool","content":"x","tool_call_id":"1"}],"tools":[{"type":"function"}]}"#,
    r#"{"messages":[{"role":"user","content":"\ud83d\ude00\u0000"}],"logit_bias":{"50256":-100}}"#,
    r#"{"messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_object"}}"#,
    r#"{"prompt":"hi","max_tokens":0,"echo":true,"logprobs":1}"#,
    r#"{"prompt":[1,2,3],"stop_token_ids":[1],"ignore_eos":true}"#,
    r#"{"prompt":[[1],[2]],"n":8,"best_of":1}"#,
    r#"{"prompt":["a","b"],"presence_penalty":0.1}"#,
    r#"{"prompt":"a","min_p":0.1,"typical_p":0.9,"repetition_penalty":1.1,"frequency_penalty":-2,"min_tokens":3,"n":2,"best_of":4,"logit_bias":{"0":1.5,"7":-100}}"#,
    r#"{"prompt":"a","temperature":1e999}"#,
    r#"{"prompt":"a","max_tokens":18446744073709551616}"#,
    r#"{"prompt":"a","a":1,"a":2}"#,
    "{\"prompt\":\"a\",\"x\":[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]}",
];

fn read(body: &[u8]) {
    check(parse_chat(body).err());
    check(parse_completion(body).err());
}

fn check(refusal: Option<ApiError>) {
    let Some(error) = refusal else { return };
    assert_eq!(error.status.as_u16(), 400);
    assert!(
        !error.message.is_empty() && error.message.len() < 1000,
        "{error}"
    );
    assert!(["invalid_json", "invalid_value", "unsupported_parameter"].contains(&error.code));
    assert_eq!(
        error.param.is_none(),
        error.code == "invalid_json",
        "{error:?}"
    );
}

#[test]
fn every_seed_is_answered() {
    for seed in SEEDS {
        read(seed.as_bytes());
        // Cut anywhere.
        for end in 0..seed.len() {
            read(&seed.as_bytes()[..end]);
        }
    }
}

/// Values that fields are not made for.
const ODD: &[&str] = &[
    "null",
    "true",
    "-1",
    "0",
    "1.5",
    "-0.0",
    "1e308",
    "18446744073709551615",
    "9223372036854775808",
    "\"\"",
    "\"x\"",
    "[]",
    "[[]]",
    "{}",
    "[null]",
    "{\"type\":5}",
    "\"\\ud800\"",
    "NaN",
];

#[test]
fn every_field_survives_every_odd_value() {
    let fields = [
        "model",
        "messages",
        "prompt",
        "stream",
        "stream_options",
        "n",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
        "top_logprobs",
        "echo",
        "best_of",
        "suffix",
        "tools",
        "tool_choice",
        "response_format",
        "logit_bias",
        "modalities",
        "presence_penalty",
        "min_p",
        "guided_json",
        "unknown",
    ];
    for field in fields {
        for odd in ODD {
            read(format!("{{\"{field}\":{odd}}}").as_bytes());
            read(format!("{{\"prompt\":\"a\",\"{field}\":{odd}}}").as_bytes());
            let messages = r#""messages":[{"role":"user","content":"x"}]"#;
            read(format!("{{{messages},\"{field}\":{odd}}}").as_bytes());
            read(
                format!(
                    "{{\"messages\":[{{\"role\":\"user\",\"content\":\"x\",\"{field}\":{odd}}}]}}"
                )
                .as_bytes(),
            );
        }
        read(format!("{{\"messages\":[{{\"role\":{field:?},\"content\":\"x\"}}]}}").as_bytes());
    }
    for odd in ODD {
        for field in ["role", "content", "name", "tool_calls"] {
            let body = format!(
                "{{\"messages\":[{{\"role\":\"user\",\"content\":\"x\",\"z\":1,\"{field}\":{odd}}}]}}"
            );
            read(body.as_bytes());
            read(format!("{{\"messages\":[{{\"{field}\":{odd}}}]}}").as_bytes());
        }
        read(format!("{{\"messages\":[{{\"role\":\"user\",\"content\":[{odd}]}}]}}").as_bytes());
    }
}

proptest! {
    #[test]
    fn mutated_seeds_are_answered(
        seed in 0..SEEDS.len(),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
    ) {
        let mut body = SEEDS[seed].as_bytes().to_vec();
        for (place, byte) in changes {
            if body.is_empty() {
                break;
            }
            let at = place.index(body.len());
            match byte % 4 {
                0 => body[at] = byte,
                1 => body.insert(at, byte),
                2 => { body.remove(at); }
                _ => {
                    let copied = body[at..].to_vec();
                    body.extend(copied);
                }
            }
        }
        read(&body);
    }

    #[test]
    fn any_bytes_are_answered(body in proptest::collection::vec(any::<u8>(), 0..200)) {
        read(&body);
    }
}
