//! B116: what a client writes stays between it and the model. With every log statement on, no log line, metric or error
//! text repeats a prompt or an answer.

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use std::io::Write;
use std::time::Duration;
use tidemill_tests::answer::{CHAT, COMPLETIONS, End, ask, ask_stream};
use tidemill_tests::deployment::{Deployment, Shape, greedy};
use tidemill_tests::http::{connect, post_bytes};
use tidemill_tests::model::ModelFile;

const CANARY: &str = "Kanarienvogel-7321";
const PATIENCE: Duration = Duration::from_secs(20);

/// Requests that carry the canary wherever a client may write.
fn questions() -> Vec<(&'static str, Value)> {
    let text = format!("the password is {CANARY}, tell nobody");
    let chat = json!({
        "messages": [{"role": "system", "content": text}, {"role": "user", "content": text}],
        "max_tokens": 8, "temperature": 0, "user": CANARY, "metadata": {"note": CANARY},
        "stop": [CANARY], "logprobs": true,
    });
    let mut echo = greedy(&text, 4);
    echo["echo"] = json!(true);
    let too_long = greedy(&text.repeat(2000), 4);
    let mut unsupported = greedy(&text, 4);
    unsupported["suffix"] = json!(CANARY);
    vec![
        (CHAT, chat),
        (COMPLETIONS, echo),
        (COMPLETIONS, greedy(&text, 12)),
        (COMPLETIONS, too_long),
        (COMPLETIONS, unsupported),
        (COMPLETIONS, json!({"prompt": text, "max_tokens": CANARY})),
    ]
}

#[test]
fn b116_a_prompt_appears_in_no_log_and_no_metric() -> Result<()> {
    let model = ModelFile::tiny()?;
    let shape = Shape {
        node_flags: vec!["--kv-bytes", "67108864", "--log", "trace"],
        router_flags: vec!["--log", "trace"],
        ..Shape::default()
    };
    let mut deployment = Deployment::start(&model, &shape)?;
    let address = deployment.address();
    let mut n_done = 0;
    for (path, body) in questions() {
        n_done += usize::from(ask(address, path, &body)?.end == End::Done);
        n_done += usize::from(ask_stream(address, path, &body)?.end == End::Done);
        // One that leaves, and one whose body is cut.
        let bytes = post_bytes(path, &body);
        for n_sent in [bytes.len(), bytes.len() - 2] {
            connect(address)?.write_all(&bytes[..n_sent])?;
        }
    }
    ensure!(n_done >= 6, "only {n_done} were served");
    // A request that fails within the deployment has its prompt at hand when the error is written.
    deployment.decode[0].process.kill()?;
    let failed = ask(address, COMPLETIONS, &questions()[2].1)?;
    ensure!(failed.end != End::Done, "{:?}", failed.end);
    for member in [&deployment.router, &deployment.prefill[0]] {
        let metrics = member.metrics()?;
        ensure!(!metrics.text().contains(CANARY), "in a metric");
    }
    deployment.decode[0].start_again()?;
    deployment.wait_served(PATIENCE)?;
    for member in deployment.members() {
        let (role, log) = (&member.ready.role, member.process.stderr());
        ensure!(log.lines().count() > 10, "{role} logs nothing: {log}");
        let leak = log.lines().find(|line| leaks(line));
        ensure!(leak.is_none(), "{role}: {leak:?}");
        ensure!(!member.process.stdout().contains(CANARY), "{role}");
    }
    Ok(())
}

/// The canary in any spelling that a log may use, or any list of so many numbers: tokens are as good as text.
fn leaks(line: &str) -> bool {
    let is_number = |word: &str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_digit());
    let mut n_numbers = 0;
    for word in line.split([',', '[', ']']).map(str::trim) {
        n_numbers = if is_number(word) { n_numbers + 1 } else { 0 };
        if n_numbers >= 8 {
            return true;
        }
    }
    let bytes: Vec<String> = CANARY.bytes().take(6).map(|b| b.to_string()).collect();
    line.contains(CANARY) || line.contains(&CANARY[..8]) || line.contains(&bytes.join(", "))
}

#[test]
fn a_leak_is_known_in_every_spelling() {
    for line in [
        "prompt=the password is Kanarienvogel-7321",
        "bytes=[75, 97, 110, 97, 114, 105]",
        "tokens=[1, 22, 333, 4, 5, 6, 7, 8]",
    ] {
        assert!(leaks(line), "{line}");
    }
    assert!(!leaks("node prefill-127.0.0.1:0 has 3, 4, 5 blocks"));
}
