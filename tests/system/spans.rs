//! One request, followed through the processes: each step of its life has its span, and all of them name its trace.

use anyhow::{Result, ensure};
use serde_json::json;
use std::io::Write;
use std::time::Duration;
use tidemill_tests::answer::CHAT;
use tidemill_tests::deployment::{Deployment, Member, Shape};
use tidemill_tests::http::{Answering, connect, post_bytes};
use tidemill_tests::model::ModelFile;
use tidemill_tests::wait_until;

const PATIENCE: Duration = Duration::from_secs(20);
const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const LABEL: &str = "label-of-mine";

/// The spans called `name` that have ended, each with its parents before it, as a log line writes them.
fn ended_spans(member: &Member, name: &str) -> Vec<String> {
    let log = member.process.stderr();
    let ends = log.lines().filter(|line| line.contains(": close "));
    let chains = ends.filter_map(|line| line.split_once(": tidemill_"));
    chains
        .map(|(chain, _)| chain.to_owned())
        .filter(|chain| chain.rsplit([':', ' ']).any(|last| last.starts_with(name)))
        .collect()
}

#[test]
fn every_step_of_a_request_has_its_span() -> Result<()> {
    let model = ModelFile::tiny()?;
    let shape = Shape {
        node_flags: vec!["--kv-bytes", "67108864", "--log", "debug"],
        router_flags: vec!["--log", "debug"],
        ..Shape::default()
    };
    let deployment = Deployment::start(&model, &shape)?;
    let body = json!({
        "messages": [{"role": "user", "content": "to be followed"}],
        "max_tokens": 4, "temperature": 0, "ignore_eos": true,
    });
    let request = String::from_utf8(post_bytes(CHAT, &body))?;
    let headers = format!("\r\nx-request-id: {LABEL}\r\ntraceparent: {TRACE}\r\n");
    let request = request.replacen("\r\n", &headers, 1);
    let mut stream = connect(deployment.address())?;
    stream.write_all(request.as_bytes())?;
    ensure!(Answering::read(stream)?.whole()?.status == 200);
    let (router, prefill, decode) = (
        &deployment.router,
        &deployment.prefill[0],
        &deployment.decode[0],
    );
    for (member, names) in [
        (router, &["tokenise", "dispatch", "request"][..]),
        (prefill, &["step", "export", "prefill"]),
        (decode, &["claim", "pull", "step", "generate"]),
    ] {
        for name in names {
            wait_until(PATIENCE, || {
                let role = &member.ready.role;
                let ended = ended_spans(member, name);
                ensure!(!ended.is_empty(), "no span {name} of the {role} has ended");
                Ok(())
            })?;
        }
    }
    // The router's spans hang together under one that carries our id, the client's label and the trace.
    for name in ["tokenise", "dispatch"] {
        let chains = ended_spans(router, name);
        let parent = format!("label=\"{LABEL}\" traceparent=\"{TRACE}\"}}:{name}");
        let is_ours =
            |chain: &String| chain.contains("request{request_id=") && chain.contains(&parent);
        ensure!(chains.iter().any(is_ours), "{chains:?}");
    }
    // The trace travels in every message.
    for (member, name) in [
        (prefill, "prefill"),
        (prefill, "export"),
        (decode, "generate"),
        (decode, "claim"),
    ] {
        let chains = ended_spans(member, name);
        let of_trace = chains.iter().any(|chain| chain.contains(TRACE));
        ensure!(of_trace, "{chains:?}");
    }
    Ok(())
}
