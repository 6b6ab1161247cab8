//! Promise 1: split over processes, over threads, over sockets, or not split at all, the answer is the same.

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use std::net::SocketAddr;
use tidemill_tests::answer::{Answer, CHAT, COMPLETIONS, End, ask, ask_stream};
use tidemill_tests::deployment::{Deployment, Shape, greedy, serve};
use tidemill_tests::model::ModelFile;

/// What every form of deployment is asked: name, path, body.
fn questions() -> Vec<(&'static str, &'static str, Value)> {
    let long = "The tide comes in and the mill turns. ".repeat(24);
    let messages = json!([
        {"role": "system", "content": "You are a mill."},
        {"role": "user", "content": "What is the tide?"},
    ]);
    let seeded = json!({
        "messages": messages, "max_tokens": 40, "temperature": 0.9, "top_p": 0.95, "seed": 17,
        "logprobs": true, "top_logprobs": 2, "ignore_eos": true,
    });
    let greedy_chat = json!({"messages": messages, "max_tokens": 24, "temperature": 0});
    let mut unlike = greedy("The sea", 30);
    unlike["temperature"] = json!(1.3);
    unlike["top_k"] = json!(50);
    unlike["seed"] = json!(-5);
    vec![
        ("greedy completion", COMPLETIONS, greedy("The tide", 40)),
        ("long prompt", COMPLETIONS, greedy(&long, 33)),
        ("one token", COMPLETIONS, greedy("At the mill", 1)),
        ("seeded completion", COMPLETIONS, unlike),
        ("greedy chat", CHAT, greedy_chat),
        ("seeded chat", CHAT, seeded),
    ]
}

/// Asks everything twice each way; every way must agree, cached prefix or not.
fn answers(address: SocketAddr) -> Result<Vec<Answer>> {
    let mut all = Vec::new();
    for (name, path, body) in questions() {
        let whole = ask(address, path, &body)?;
        ensure!(whole.end == End::Done, "{name}: {:?}", whole.end);
        ensure!(!whole.text.is_empty(), "{name}: no text");
        let mut streaming = body.clone();
        streaming["stream_options"] = json!({"include_usage": true});
        for _ in 0..2 {
            let streamed = ask_stream(address, path, &streaming)?;
            ensure!(
                streamed.comparable() == whole.comparable(),
                "{name}: streamed {streamed:#?}\nin one piece {whole:#?}"
            );
        }
        all.push(whole);
    }
    Ok(all)
}

fn check_same(what: &str, got: &[Answer], wanted: &[Answer]) -> Result<()> {
    for ((name, ..), (got, wanted)) in questions().iter().zip(got.iter().zip(wanted)) {
        ensure!(
            got.comparable() == wanted.comparable(),
            "{what}, {name}: {got:#?}\nthree processes: {wanted:#?}"
        );
    }
    Ok(())
}

#[test]
fn the_answer_is_the_same_however_it_is_deployed() -> Result<()> {
    let model = ModelFile::tiny()?;
    let deployment = Deployment::start(&model, &Shape::default())?;
    let wanted = answers(deployment.address())?;
    let moved = "tidemill_router_kv_moved_bytes_total";
    let n_moved = deployment.router.metrics()?.sum(moved)?;
    ensure!(n_moved > 0.0, "nothing was handed from node to node");
    ensure!(deployment.n_events("split_exception")? == 0.0);
    drop(deployment);
    let forms: [&[&str]; 4] = [
        &[],
        &["--colocated"],
        &["--kv-transport", "tcp"],
        &[
            "--prefill",
            "2",
            "--decode",
            "2",
            "--max-batch-tokens",
            "32",
        ],
    ];
    for flags in forms {
        let (_process, ready) = serve(&model, flags)?;
        let got = answers(ready.listen)?;
        check_same(&format!("serve {flags:?}"), &got, &wanted)?;
    }
    Ok(())
}

#[test]
fn small_chunks_and_many_processes_change_nothing() -> Result<()> {
    let model = ModelFile::tiny()?;
    let shape = Shape {
        n_prefill: 2,
        n_decode: 2,
        node_flags: vec!["--kv-bytes", "8388608", "--max-batch-tokens", "24"],
        router_flags: vec!["--split", "require"],
    };
    let deployment = Deployment::start(&model, &shape)?;
    let got = answers(deployment.address())?;
    let (_process, ready) = serve(&model, &["--colocated"])?;
    check_same("serve --colocated", &answers(ready.listen)?, &got)
}

#[test]
fn many_at_once_get_what_each_gets_alone() -> Result<()> {
    let model = ModelFile::tiny()?;
    let deployment = Deployment::start(&model, &Shape::default())?;
    let address = deployment.address();
    let body = |i: usize| greedy(&format!("Mill number {i} by the sea"), 24);
    let alone: Vec<Answer> = (0..8)
        .map(|i| ask(address, COMPLETIONS, &body(i)))
        .collect::<Result<_>>()?;
    let together: Vec<Result<Answer>> = std::thread::scope(|scope| {
        let asking: Vec<_> = (0..24)
            .map(|i| scope.spawn(move || ask_stream(address, COMPLETIONS, &body(i % 8))))
            .collect();
        asking
            .into_iter()
            .map(|asked| asked.join().expect("no panic"))
            .collect()
    });
    for (i, answer) in together.into_iter().enumerate() {
        let (mut answer, mut wanted) = (answer?, alone[i % 8].clone());
        (answer.usage, wanted.usage) = (None, None);
        assert_eq!(answer, wanted, "question {}", i % 8);
    }
    Ok(())
}

#[test]
fn the_real_model_says_the_same_in_every_form() -> Result<()> {
    let model = ModelFile::real()?;
    let body = json!({
        "messages": [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
        "max_tokens": 24,
        "temperature": 0,
    });
    let deployment = Deployment::start(&model, &Shape::default())?;
    let wanted = ask(deployment.address(), CHAT, &body)?;
    let mut streaming = body.clone();
    streaming["stream_options"] = json!({"include_usage": true});
    let streamed = ask_stream(deployment.address(), CHAT, &streaming)?;
    assert_eq!(streamed.comparable(), wanted.comparable());
    drop(deployment);
    assert!(wanted.text.contains("Paris"), "{}", wanted.text);
    let usage = wanted.usage.clone().unwrap_or_default();
    let count = |key: &str| usage[key].as_u64().unwrap_or_default();
    assert!(count("prompt_tokens") > 10, "{usage}");
    assert!((1..=24).contains(&count("completion_tokens")), "{usage}");
    let sum = count("prompt_tokens") + count("completion_tokens");
    assert_eq!(count("total_tokens"), sum, "{usage}");
    for flags in [&[][..], &["--colocated"], &["--kv-transport", "tcp"]] {
        let (_process, ready) = serve(&model, flags)?;
        let got = ask(ready.listen, CHAT, &body)?;
        assert_eq!(got.comparable(), wanted.comparable(), "serve {flags:?}");
    }
    Ok(())
}
