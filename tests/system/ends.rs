//! How processes begin and end: a ready line that scripts can read, a drain that loses nothing, and bad settings refused
//! with their name before any port is bound.

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::json;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;
use tidemill_tests::answer::{COMPLETIONS, End, Events, ask, ask_stream};
use tidemill_tests::deployment::{Deployment, Shape, greedy, serve};
use tidemill_tests::http;
use tidemill_tests::metrics::Metrics;
use tidemill_tests::model::{ModelFile, Scratch};
use tidemill_tests::process::{Process, Ready};
use tidemill_tests::wait_until;

const PATIENCE: Duration = Duration::from_secs(20);
const BAD_CONFIG: i32 = 64;

/// Runs a program to its end.
fn run(program: &str, arguments: &[&str]) -> Result<(Option<i32>, String, String)> {
    let mut process = Process::spawn(program, arguments)?;
    let status = process.wait_exit(PATIENCE)?;
    Ok((status.code(), process.stdout(), process.stderr()))
}

/// Every program with the flags that make it whole.
fn programs(model: &str) -> Vec<(&'static str, Vec<String>)> {
    let own = |words: &[&str]| -> Vec<String> {
        let model = ["--model", model, "--listen", "127.0.0.1:0"];
        words
            .iter()
            .chain(&model)
            .map(ToString::to_string)
            .collect()
    };
    vec![
        ("router", own(&["--nodes", "decode=127.0.0.1:1"])),
        ("prefill-node", own(&[])),
        ("decode-node", own(&[])),
        ("tidemill", own(&["serve"])),
    ]
}

fn with<'a>(whole: &'a [String], flag: &'a str, value: &'a str) -> Vec<&'a str> {
    let mut all: Vec<&str> = whole.iter().map(String::as_str).collect();
    match all.iter().position(|known| *known == flag) {
        Some(idx) => all[idx + 1] = value,
        None => all.extend([flag, value].iter().filter(|word| !word.is_empty())),
    }
    all
}

#[test]
fn bad_settings_end_with_64_and_name_the_flag() -> Result<()> {
    let model = ModelFile::tiny()?;
    let scratch = Scratch::new()?;
    let no_model = scratch.path().join("no-model.gguf").display().to_string();
    let text = scratch.path().join("text.gguf");
    std::fs::write(&text, "this is no model")?;
    let text = text.display().to_string();
    let config = scratch.path().join("config.toml");
    std::fs::write(&config, "mdoel = \"x\"\n")?;
    let config = config.display().to_string();
    for (program, whole) in programs(&model.argument()?) {
        let cases = [
            ("--no-such-flag", "", "--no-such-flag"),
            ("--model", no_model.as_str(), "--model"),
            ("--model", text.as_str(), "--model"),
            ("--listen", "0.0.0.0:0", "--listen"),
            ("--listen", "nowhere", "--listen"),
            ("--admin-listen", "0.0.0.0:0", "--admin-listen"),
            ("--log-format", "verse", "--log-format"),
            ("--config", config.as_str(), "mdoel"),
        ];
        for (flag, value, named) in cases {
            let arguments = with(&whole, flag, value);
            let (status, stdout, stderr) = run(program, &arguments)?;
            let case = format!("{program} {flag} {value}: {status:?} {stderr}");
            ensure!(status == Some(BAD_CONFIG), "{case}");
            ensure!(stderr.contains(named), "{case}");
            ensure!(stdout.is_empty(), "{case} said {stdout}");
            if value.starts_with("0.0.0.0") {
                ensure!(stderr.contains("--insecure-network"), "{case}");
            }
        }
    }
    for program in ["prefill-node", "decode-node"] {
        let (_, whole) = programs(&model.argument()?)
            .into_iter()
            .find(|(name, _)| *name == program)
            .context("a node")?;
        for (flag, value) in [
            ("--kv-transport", "ucx"),
            ("--kv-transport", "local"),
            ("--kv-bytes", "1"),
            ("--kv-bytes", "many"),
            ("--kv-dtype", "f7"),
            ("--threads", "0"),
            ("--device", "cuda:9"),
        ] {
            let (status, _, stderr) = run(program, &with(&whole, flag, value))?;
            let case = format!("{program} {flag} {value}: {status:?} {stderr}");
            ensure!(
                status == Some(BAD_CONFIG) && stderr.contains(flag),
                "{case}"
            );
        }
    }
    Ok(())
}

#[test]
fn a_list_of_nodes_that_cannot_be_called_is_refused() -> Result<()> {
    let model = ModelFile::tiny()?;
    let (program, whole) = programs(&model.argument()?).swap_remove(0);
    for nodes in ["", "decode=localhost", "decode=127.0.0.1:1,prefill=a:0"] {
        let (status, _, stderr) = run(program, &with(&whole, "--nodes", nodes))?;
        let case = format!("--nodes {nodes:?}: {status:?} {stderr}");
        ensure!(status == Some(BAD_CONFIG), "{case}");
        let last = nodes.rsplit(',').next().unwrap_or_default();
        ensure!(
            stderr.contains(last) && stderr.contains("role=host:port"),
            "{case}"
        );
    }
    Ok(())
}

#[test]
fn several_nodes_of_one_process_share_their_metrics() -> Result<()> {
    let model = ModelFile::tiny()?;
    let (_process, ready) = serve(&model, &["--prefill", "2", "--decode", "2"])?;
    let metrics = Metrics::read(ready.admin)?;
    let comments: Vec<&str> = metrics
        .text()
        .lines()
        .filter(|line| line.starts_with("# TYPE ") || line.starts_with("# HELP "))
        .collect();
    let told: BTreeSet<&str> = comments.iter().copied().collect();
    ensure!(told.len() == comments.len(), "{}", metrics.text());
    for role in ["prefill", "decode"] {
        let blocks = format!("tidemill_{role}_blocks");
        for node_idx in 0..2 {
            let label = format!("node_id=\"{role}-{node_idx}\"");
            ensure!(
                metrics.sum_where(&blocks, &label)? > 0.0,
                "{blocks} {label}"
            );
        }
    }
    Ok(())
}

#[test]
fn check_config_checks_and_ends() -> Result<()> {
    let model = ModelFile::tiny()?;
    for (program, whole) in programs(&model.argument()?) {
        let (status, stdout, stderr) = run(program, &with(&whole, "--check-config", ""))?;
        ensure!(status == Some(0), "{program}: {status:?} {stderr}");
        let start = "configuration is valid: role=";
        let is_one_line = stdout.lines().count() == 1 && stdout.starts_with(start);
        ensure!(is_one_line, "{program}: {stdout}");
        ensure!(stdout.contains(&model.argument()?), "{program}: {stdout}");
    }
    Ok(())
}

#[test]
fn the_ready_line_is_the_first_and_has_its_fixed_form() -> Result<()> {
    let model = ModelFile::tiny()?;
    let deployment = Deployment::start(&model, &Shape::default())?;
    for member in deployment.members() {
        let Ready {
            role,
            listen,
            admin,
        } = &member.ready;
        let wanted = format!("ready role={role} listen={listen} admin={admin}");
        assert_eq!(member.process.stdout(), wanted);
        for (path, status) in [("/healthz", 200), ("/readyz", 200), ("/metrics", 200)] {
            assert_eq!(http::get(*admin, path)?.status, status, "{role} {path}");
        }
    }
    assert_eq!(deployment.router.ready.role, "router");
    assert_eq!(deployment.prefill[0].ready.role, "prefill");
    assert_eq!(deployment.decode[0].ready.role, "decode");
    let (process, ready) = serve(&model, &[])?;
    assert_eq!(ready.role, "serve");
    let first = process.stdout();
    assert!(first.starts_with("ready role=serve "), "{first}");
    Ok(())
}

#[test]
fn a_port_that_is_taken_is_named() -> Result<()> {
    let model = ModelFile::tiny()?;
    let deployment = Deployment::start(&model, &Shape::default())?;
    let taken = deployment.address().to_string();
    for (program, whole) in programs(&model.argument()?) {
        for flag in ["--listen", "--admin-listen"] {
            let (status, stdout, stderr) = run(program, &with(&whole, flag, &taken))?;
            let case = format!("{program} {flag} {taken}: {status:?} {stderr}");
            ensure!(status == Some(1), "{case}");
            ensure!(stderr.contains(&taken), "{case}");
            ensure!(stdout.is_empty(), "{case} said {stdout}");
        }
    }
    deployment.wait_served(PATIENCE)?;
    Ok(())
}

/// True when a new request is not taken: no connection, a break, or a 503.
fn is_refused(address: SocketAddr) -> bool {
    let answer = ask(address, COMPLETIONS, &greedy("late", 4));
    answer.is_ok_and(|answer| answer.end == End::Broken || answer.has_failed_openly())
}

fn open(address: SocketAddr, n_tokens: u32) -> Result<Events> {
    let mut body = greedy("The mill turns while it drains", n_tokens);
    body["stream_options"] = json!({"include_usage": true});
    let mut events = Events::open(address, COMPLETIONS, &body)
        .map_err(|answer| anyhow::anyhow!("no stream: {:?}", answer.end))?;
    events.read_texts(3)?;
    Ok(events)
}

/// The stream comes to its own end although its process is leaving.
fn check_whole(events: Events, n_tokens: u32) -> Result<()> {
    let answer = events.finish()?;
    ensure!(answer.end == End::Done, "{:?}", answer.end);
    let usage = answer.usage.context("usage was asked for")?;
    ensure!(usage["completion_tokens"] == n_tokens, "{usage}");
    Ok(())
}

#[test]
fn a_router_and_nodes_that_drain_finish_what_runs() -> Result<()> {
    let n_tokens = 400;
    let model = ModelFile::slow()?;
    let mut deployment = Deployment::start(&model, &Shape::default())?;
    let address = deployment.address();
    let events = open(address, n_tokens)?;
    for node in deployment.prefill.iter().chain(&deployment.decode) {
        node.process.signal(Signal::TERM)?;
    }
    // The nodes tell that they drain, or are gone; either way nothing new is taken.
    wait_until(PATIENCE, || {
        ensure!(is_refused(address), "a new request is still served");
        Ok(())
    })?;
    let decode = &mut deployment.decode[0].process;
    ensure!(decode.is_running()?, "decode left before its stream ended");
    deployment.router.process.signal(Signal::TERM)?;
    wait_until(PATIENCE, || {
        ensure!(http::connect(address).is_err(), "the port is still open");
        Ok(())
    })?;
    check_whole(events, n_tokens)?;
    let nodes = deployment.prefill.iter_mut().chain(&mut deployment.decode);
    for member in nodes.chain(std::iter::once(&mut deployment.router)) {
        let status = member.process.wait_exit(PATIENCE)?;
        let role = &member.ready.role;
        ensure!(
            status.code() == Some(0),
            "{role}: {status} {}",
            member.process.stderr()
        );
    }
    Ok(())
}

#[test]
fn serve_drains_too() -> Result<()> {
    let n_tokens = 400;
    let model = ModelFile::slow()?;
    let (mut process, ready) = serve(&model, &[])?;
    let events = open(ready.listen, n_tokens)?;
    process.signal(Signal::TERM)?;
    wait_until(PATIENCE, || {
        ensure!(is_refused(ready.listen), "a new request is still served");
        Ok(())
    })?;
    check_whole(events, n_tokens)?;
    let status = process.wait_exit(PATIENCE)?;
    ensure!(status.code() == Some(0), "{status} {}", process.stderr());
    Ok(())
}

#[test]
fn a_second_signal_ends_at_once() -> Result<()> {
    let model = ModelFile::slow()?;
    let (mut process, ready) = serve(&model, &[])?;
    let events = open(ready.listen, 2000)?;
    process.signal(Signal::TERM)?;
    std::thread::sleep(Duration::from_millis(100));
    ensure!(process.is_running()?, "a drain waits for its stream");
    process.signal(Signal::TERM)?;
    let status = process.wait_exit(Duration::from_secs(3))?;
    ensure!(status.code() == Some(130), "{status}");
    let answer = events.finish()?;
    ensure!(answer.end == End::Broken, "{:?}", answer.end);
    Ok(())
}

/// Whoever reads the logs may end first. No line that nobody reads may keep a process from its work or from its drain.
#[test]
fn a_log_that_nobody_reads_is_no_reason_to_stop() -> Result<()> {
    let model = ModelFile::tiny()?;
    let path = model.argument()?;
    let listen = [
        "--listen",
        "127.0.0.1:0",
        "--log",
        "debug",
        "--model",
        &path,
    ];
    let mut decode = Process::spawn_unheard("decode-node", &listen)?;
    let entry = format!("decode={}", decode.ready()?.listen);
    let flags = [&listen[..], &["--nodes", &entry, "--split", "never"]].concat();
    let mut router = Process::spawn_unheard("router", &flags)?;
    let address = router.ready()?.listen;
    for stream in [true, false] {
        let body = greedy("unheard", 8);
        let answer = match stream {
            true => ask_stream(address, COMPLETIONS, &body)?,
            false => ask(address, COMPLETIONS, &body)?,
        };
        ensure!(answer.end == End::Done, "{:?}", answer.end);
    }
    for process in [&mut router, &mut decode] {
        process.signal(Signal::TERM)?;
        let status = process.wait_exit(PATIENCE)?;
        ensure!(status.code() == Some(0), "{status}");
    }
    Ok(())
}
