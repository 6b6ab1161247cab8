//! `tidemill chat` and `tidemill bench` against a server: what a person at a terminal gets, and what a script reads.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;
use tidemill_tests::answer::{CHAT, End, ask};
use tidemill_tests::deployment::serve;
use tidemill_tests::model::{ModelFile, Scratch};
use tidemill_tests::process::Process;

const PATIENCE: Duration = Duration::from_secs(60);

/// Runs a client to its end; gives what it said on standard output.
fn run(arguments: &[&str], input: &str) -> Result<String> {
    let mut process = Process::spawn_with_input("tidemill", arguments, input)?;
    let status = process.wait_exit(PATIENCE)?;
    ensure!(
        status.success(),
        "{arguments:?} ended with {status}: {} {}",
        process.stdout(),
        process.stderr()
    );
    Ok(process.stdout())
}

/// A message that the model answers with a text, and that text.
fn answered(address: SocketAddr) -> Result<(String, String)> {
    for word in ["tide", "mill", "river", "stone", "wheel", "grain"] {
        let body = json!({
            "messages": [{"role": "user", "content": word}],
            "temperature": 0,
            "max_tokens": 12,
        });
        let answer = ask(address, CHAT, &body)?;
        ensure!(answer.end == End::Done, "{:?}", answer.end);
        if !answer.text.trim().is_empty() {
            return Ok((word.to_owned(), answer.text));
        }
    }
    bail!("every answer is empty");
}

#[test]
fn a_chat_answers_each_line_and_ends_with_its_input() -> Result<()> {
    let model = ModelFile::tiny()?;
    let (_server, ready) = serve(&model, &[])?;
    let (word, wanted) = answered(ready.listen)?;
    let url = format!("http://{}", ready.listen);
    let chat = ["chat", "--url", &url, "--temperature", "0"];
    let chat = [&chat[..], &["--max-tokens", "12"]].concat();
    // The last line has no end of its own; an empty one is no message.
    let said = run(&chat, &format!("{word}\n\n/new\n{word}"))?;
    let n_answers = said.matches(&wanted).count();
    assert_eq!(n_answers, 2, "{wanted:?} in {said:?}");
    let nothing = run(&chat, "")?;
    ensure!(!nothing.contains(&wanted), "{nothing:?}");
    let left = run(&chat, &format!("/quit\n{word}\n"))?;
    ensure!(!left.contains(&wanted), "{left:?}");
    Ok(())
}

#[test]
fn a_client_without_a_server_says_so_and_fails() -> Result<()> {
    for client in ["chat", "bench"] {
        let arguments = [client, "--url", "http://127.0.0.1:1"];
        let mut process = Process::spawn_with_input("tidemill", &arguments, "")?;
        assert_eq!(process.wait_exit(PATIENCE)?.code(), Some(1));
        let said = process.stderr();
        ensure!(said.contains("no answer from http://127.0.0.1:1"), "{said}");
    }
    Ok(())
}

/// Checks what has to hold in every report; gives the report.
fn report(text: &str, n_requests: u64) -> Result<Value> {
    let report: Value = serde_json::from_str(text).with_context(|| text.to_owned())?;
    assert_eq!(report["n_ok"], json!(n_requests), "{text}");
    assert_eq!(report["n_failed"], json!(0));
    assert_eq!(report["first_error"], Value::Null);
    let number = |value: &Value| value.as_f64().with_context(|| format!("{value} in {text}"));
    for spread in ["ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"] {
        let mut last = 0.0;
        for rank in ["p50", "p90", "p99", "max"] {
            let value = number(&report[spread][rank])?;
            ensure!(value >= last, "{rank} of {spread} is {value}, below {last}");
            last = value;
        }
        let mean = number(&report[spread]["mean"])?;
        ensure!(mean > 0.0 && mean <= last, "mean of {spread} is {mean}");
    }
    for rank in ["p50", "p90", "p99", "max"] {
        let (ttft, e2e) = (&report["ttft_ms"][rank], &report["e2e_ms"][rank]);
        ensure!(number(ttft)? <= number(e2e)?, "{rank}: {ttft} and {e2e}");
    }
    for rate in ["requests_per_s", "output_tokens_per_s", "wall_s"] {
        ensure!(number(&report[rate])? > 0.0, "{rate} in {text}");
    }
    ensure!(number(&report["goodput_per_s"])? <= number(&report["requests_per_s"])?);
    Ok(report)
}

#[test]
fn a_bench_reports_a_closed_and_an_open_loop_and_a_trace() -> Result<()> {
    let model = ModelFile::tiny()?;
    let (_server, ready) = serve(&model, &[])?;
    let url = format!("http://{}", ready.listen);
    let bench = ["bench", "--url", &url, "--json", "--ignore-eos"];
    let alike = [
        "--requests",
        "6",
        "--prompt-tokens",
        "40",
        "--output-tokens",
        "5",
    ];
    let alike = [&bench[..], &alike].concat();
    let closed = run(&[&alike[..], &["--concurrency", "2"]].concat(), "")?;
    let closed = report(&closed, 6)?;
    assert_eq!(closed["output_tokens_mean"], json!(5.0));
    let n_prompt = closed["prompt_tokens_mean"].as_f64().unwrap_or(0.0);
    ensure!(
        (20.0..=80.0).contains(&n_prompt),
        "{n_prompt}, not about 40"
    );
    let open = run(&[&alike[..], &["--rate", "100"]].concat(), "")?;
    assert_eq!(report(&open, 6)?["output_tokens_mean"], json!(5.0));

    let scratch = Scratch::new()?;
    let trace = scratch.path().join("trace.jsonl");
    let lines = [(0, 30, 2), (100, 60, 4), (300, 90, 6)].map(|(timestamp, input, output)| {
        let line = json!({
            "timestamp": timestamp,
            "input_length": input,
            "output_length": output,
            "hash_ids": [1],
        });
        format!("{line}\n")
    });
    std::fs::write(&trace, lines.concat())?;
    let trace = trace.to_str().context("a path of ASCII")?;
    let traced = run(&[&bench[..], &["--trace", trace]].concat(), "")?;
    let traced = report(&traced, 3)?;
    assert_eq!(traced["output_tokens_mean"], json!(4.0));
    let wall_s = traced["wall_s"].as_f64().unwrap_or(0.0);
    ensure!(
        wall_s >= 0.3,
        "the last request was due after 0.3 s, not {wall_s}"
    );
    Ok(())
}

#[test]
fn a_bench_prints_a_table_and_fails_when_every_request_does() -> Result<()> {
    let model = ModelFile::tiny()?;
    let (_server, ready) = serve(&model, &[])?;
    let url = format!("http://{}", ready.listen);
    let bench = [
        "bench",
        "--url",
        &url,
        "--requests",
        "3",
        "--output-tokens",
        "4",
    ];
    let table = run(&[&bench[..], &["--prompt-tokens", "20"]].concat(), "")?;
    for part in ["3 ok, 0 failed", "TTFT", "ITL", "TPOT", "E2E", "goodput"] {
        ensure!(table.contains(part), "{part} is missing: {table}");
    }
    // Longer than the context: each is refused.
    let long = [&bench[..], &["--prompt-tokens", "100000"]].concat();
    let mut process = Process::spawn_with_input("tidemill", &long, "")?;
    assert_eq!(process.wait_exit(PATIENCE)?.code(), Some(1));
    let said = process.stderr();
    ensure!(said.contains("every request failed"), "{said}");
    ensure!(said.contains("context_length_exceeded"), "{said}");
    Ok(())
}
