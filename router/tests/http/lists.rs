//! Models, health, and several prompts in one request.

use crate::support::{Door, MODEL, byte_token, say};
use serde_json::{Value, json};

#[tokio::test]
async fn the_served_model_is_listed() {
    let door = Door::open(|job| say(job, "y")).await;
    let list = door.get("/v1/models").await.json();
    assert_eq!(list["object"], "list");
    assert_eq!(list["data"][0]["id"], MODEL);
    assert_eq!(list["data"][0]["object"], "model");
    assert_eq!(door.get("/v1/models/tiny").await.json(), list["data"][0]);
    let reply = door.get("/v1/models/some/other").await;
    assert_eq!(
        reply.error(),
        (404, "model_not_found".to_owned(), "model".to_owned())
    );
}

#[tokio::test]
async fn health_says_what_readiness_says() {
    let admin = tidemill_service::health::Admin::starting("no decode node");
    let shown = admin.clone();
    let admission = std::sync::Arc::new(tidemill_router::admission::Admission::new(1, 0));
    let door = Door::open_with(
        admission,
        |config| config.admin = shown,
        |job| say(job, "y"),
    )
    .await;
    let reply = door.get("/health").await;
    assert_eq!(
        (reply.status, &reply.json()["missing"]),
        (503, &json!("no decode node"))
    );
    admin.set_missing(None);
    assert_eq!(door.get("/health").await.json(), json!({"status": "ok"}));
}

#[tokio::test]
async fn choices_of_several_prompts_are_numbered_prompt_by_prompt() {
    let door = Door::open(|job| {
        let first = char::from(u8::try_from(job.prompt[0] - 3).expect("a byte's token"));
        say(job, &format!("{first}{}", job.sampling.seed))
    })
    .await;
    let more = json!({"n": 2, "seed": 5});
    let whole = door.complete(json!(["a", "b"]), more.clone()).await.json();
    let choices = whole["choices"].as_array().expect("choices");
    let texts: Vec<&Value> = choices.iter().map(|choice| &choice["text"]).collect();
    assert_eq!(texts, ["a5", "a6", "b5", "b6"]);
    let indices: Vec<&Value> = choices.iter().map(|choice| &choice["index"]).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    assert_eq!(whole["object"], "text_completion");
    assert_eq!(whole["usage"]["prompt_tokens"], 2);
    assert_eq!(whole["usage"]["prompt_tokens_details"]["cached_tokens"], 14);
    let tokens = json!([[byte_token(b'a')], [byte_token(b'b')]]);
    let whole_by_tokens = door.complete(tokens, more).await.json();
    assert_eq!(whole_by_tokens["choices"], whole["choices"]);
}
