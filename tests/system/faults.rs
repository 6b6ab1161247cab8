//! kill -9 at the worst moments. With a second node of the role the client's text is the undisturbed one; without, the
//! answer ends openly. It never ends like a whole answer that is not whole.

use anyhow::{Context, Result, bail, ensure};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rustix::process::Signal;
use std::net::SocketAddr;
use std::thread::ScopedJoinHandle;
use std::time::Duration;
use tidemill_core::Role;
use tidemill_tests::answer::{Answer, COMPLETIONS, End, Events, ask, ask_stream};
use tidemill_tests::deployment::{Deployment, Member, Shape, check_idle, greedy, seeded};
use tidemill_tests::model::ModelFile;
use tidemill_tests::{sampled, wait_until};

/// A request comes to its node within this time.
const PATIENCE: Duration = Duration::from_secs(30);
/// A lease that nobody releases ends by itself within 30 s.
const LEASE_PATIENCE: Duration = Duration::from_secs(45);

/// A prompt of many chunks, none of which another prompt shares.
fn prompt(name: &str) -> String {
    format!("{name}: {}", "the tide turns the mill, ".repeat(160))
}

fn shape(n_prefill: usize, n_decode: usize, split: &'static str) -> Shape {
    Shape {
        n_prefill,
        n_decode,
        node_flags: vec!["--kv-bytes", "67108864", "--max-batch-tokens", "64"],
        router_flags: vec!["--split", split],
    }
}

/// Waits until a node of the role works on a request, and tells which.
fn wait_node(
    deployment: &mut Deployment,
    role: Role,
    works: impl Fn(&Member) -> Result<bool>,
) -> Result<usize> {
    let nodes = deployment.nodes(role);
    wait_until(PATIENCE, || {
        for (idx, node) in nodes.iter_mut().enumerate() {
            if node.process.is_running()? && works(node)? {
                return Ok(idx);
            }
        }
        bail!("no {} node works on it", role.name())
    })
}

/// True when blocks of its pool belong to somebody.
fn holds_blocks(node: &Member) -> Result<bool> {
    Ok(node.gauge("blocks_free")? < node.gauge("blocks")?)
}

/// True when a sequence is in its running batch.
fn runs(node: &Member) -> Result<bool> {
    Ok(node.gauge("sequences_running")? > 0.0)
}

fn joined(asking: ScopedJoinHandle<'_, Result<Answer>>) -> Result<Answer> {
    asking.join().expect("a client does not panic")
}

/// Asks, and meanwhile does something to the deployment.
fn disturbed(
    deployment: &mut Deployment,
    (prompt, stream): (&str, bool),
    disturb: impl FnOnce(&mut Deployment) -> Result<()>,
) -> Result<Answer> {
    // Gauges that still show the request before would lead to the wrong node.
    deployment.wait_idle(LEASE_PATIENCE)?;
    let address = deployment.address();
    let body = long(prompt);
    std::thread::scope(|scope| {
        let asking = scope.spawn(move || match stream {
            true => ask_stream(address, COMPLETIONS, &body),
            false => ask(address, COMPLETIONS, &body),
        });
        let disturbance = disturb(deployment);
        let answer = joined(asking);
        disturbance?;
        answer
    })
}

/// An answer that lasts long enough for a test to come between two of its tokens, also on a fast machine.
fn long(prompt: &str) -> serde_json::Value {
    let mut body = seeded(prompt, 400);
    body["ignore_eos"] = true.into();
    body
}

/// The answer that nothing disturbs.
fn undisturbed(model: &ModelFile, names: &[&str]) -> Result<Vec<Answer>> {
    let deployment = Deployment::start(model, &shape(1, 1, "require"))?;
    let ask_one = |name: &&str| {
        let answer = ask(deployment.address(), COMPLETIONS, &long(&prompt(name)))?;
        ensure!(answer.end == End::Done, "{:?}", answer.end);
        Ok(answer)
    };
    names.iter().map(ask_one).collect()
}

fn check_same(got: &Answer, wanted: &Answer) -> Result<()> {
    ensure!(
        got.end == End::Done && got.text == wanted.text && got.tokens == wanted.tokens,
        "disturbed {:?} {} {:?}\nundisturbed {:?}",
        got.end,
        got.message,
        got.text,
        wanted.text
    );
    ensure!(got.finish_reason == wanted.finish_reason);
    Ok(())
}

fn kill(deployment: &mut Deployment, role: Role, idx: usize) -> Result<()> {
    deployment.nodes(role)[idx].process.kill()
}

/// Prefill, while it computes later chunks and a decode node reads the blocks of the first.
fn kill_exporter(deployment: &mut Deployment) -> Result<()> {
    wait_node(deployment, Role::Decode, holds_blocks)?;
    let idx = wait_node(deployment, Role::Prefill, holds_blocks)?;
    kill(deployment, Role::Prefill, idx)
}

/// Decode, while it reads.
fn kill_importer(deployment: &mut Deployment) -> Result<()> {
    let idx = wait_node(deployment, Role::Decode, holds_blocks)?;
    kill(deployment, Role::Decode, idx)
}

/// Decode, between two tokens.
fn kill_decoder(deployment: &mut Deployment) -> Result<()> {
    let idx = wait_node(deployment, Role::Decode, runs)?;
    kill(deployment, Role::Decode, idx)
}

/// How often the router has helped itself.
fn n_recovered(deployment: &Deployment) -> Result<f64> {
    let events = ["retry", "take_over", "resume"].into_iter();
    events.map(|event| deployment.n_events(event)).sum()
}

/// Starts every node again that has ended, and waits until the router knows it.
fn restart_lost(deployment: &mut Deployment) -> Result<()> {
    for role in [Role::Prefill, Role::Decode] {
        for node in deployment.nodes(role).iter_mut() {
            if !node.process.is_running()? {
                node.start_again()?;
            }
        }
    }
    deployment.wait_known(PATIENCE)
}

#[test]
fn another_node_of_the_role_finishes_the_same_text() -> Result<()> {
    let model = ModelFile::slow()?;
    let wanted = undisturbed(&model, &["one", "two", "three"])?;

    let mut deployment = Deployment::start(&model, &shape(2, 2, "require"))?;
    let got = disturbed(&mut deployment, (&prompt("one"), true), kill_exporter)?;
    check_same(&got, &wanted[0]).context("prefill lost while its blocks are read")?;
    ensure!(n_recovered(&deployment)? >= 1.0, "nothing was retried");

    let got = disturbed(&mut deployment, (&prompt("two"), false), kill_importer)?;
    check_same(&got, &wanted[1]).context("decode lost before its first token")?;
    // On a busy machine the kill may come when the first token is already there.
    ensure!(n_recovered(&deployment)? >= 2.0, "nobody took over");

    // The lost ones come back under their addresses, so that there is a second node again.
    restart_lost(&mut deployment)?;
    let got = disturbed(&mut deployment, (&prompt("three"), true), kill_decoder)?;
    check_same(&got, &wanted[2]).context("decode lost between two tokens")?;
    ensure!(deployment.n_events("resume")? >= 1.0, "nothing was resumed");
    Ok(())
}

type Kill = fn(&mut Deployment) -> Result<()>;

#[test]
fn without_another_node_the_answer_ends_openly() -> Result<()> {
    let model = ModelFile::slow()?;
    let kills: [(&str, Kill); 3] = [
        ("prefill", kill_exporter),
        ("decode before its first token", kill_importer),
        ("decode between two tokens", kill_decoder),
    ];
    for (lost, kill) in kills {
        for stream in [true, false] {
            let mut deployment = Deployment::start(&model, &shape(1, 1, "require"))?;
            let got = disturbed(&mut deployment, (&prompt("alone"), stream), kill)?;
            ensure!(
                got.has_failed_openly(),
                "{lost} lost, stream {stream}: {:?} {:?}",
                got.end,
                got.text
            );
            let nodes = deployment.prefill.iter_mut().chain(&mut deployment.decode);
            for node in nodes {
                if node.process.is_running()? {
                    wait_until(LEASE_PATIENCE, || check_idle(node))
                        .with_context(|| format!("{lost} lost, stream {stream}"))?;
                }
            }
        }
    }
    Ok(())
}

/// Without prefill nodes and a policy that allows it, decode nodes do the whole work; the text is the same.
#[test]
fn a_decode_node_alone_finishes_when_the_policy_allows_it() -> Result<()> {
    let model = ModelFile::slow()?;
    let wanted = undisturbed(&model, &["prefer"])?;
    let mut deployment = Deployment::start(&model, &shape(1, 1, "prefer"))?;
    let got = disturbed(&mut deployment, (&prompt("prefer"), true), kill_exporter)?;
    check_same(&got, &wanted[0])?;
    ensure!(deployment.n_events("split_exception")? >= 1.0);
    deployment.wait_idle(LEASE_PATIENCE)
}

#[test]
fn a_lost_router_breaks_streams_and_frees_the_nodes() -> Result<()> {
    let model = ModelFile::slow()?;
    let mut deployment = Deployment::start(&model, &shape(1, 1, "require"))?;
    let address = deployment.address();
    let body = seeded(&prompt("router"), 1000);
    let mut events = open(address, &body)?;
    events.read_texts(3)?;
    deployment.router.process.kill()?;
    let broken = events.finish()?;
    assert_eq!(broken.end, End::Broken);
    for node in deployment.prefill.iter().chain(&deployment.decode) {
        wait_until(LEASE_PATIENCE, || check_idle(node))?;
    }
    deployment.router.start_again()?;
    deployment.wait_served(PATIENCE)?;
    deployment.wait_idle(PATIENCE)
}

fn open(address: SocketAddr, body: &serde_json::Value) -> Result<Events> {
    Events::open(address, COMPLETIONS, body)
        .map_err(|answer| anyhow::anyhow!("no stream: {:?}", answer.end))
}

#[test]
fn a_node_that_comes_back_is_used_again() -> Result<()> {
    let model = ModelFile::tiny()?;
    let mut deployment = Deployment::start(&model, &shape(1, 1, "require"))?;
    let wanted = deployment.wait_served(PATIENCE)?;
    for role in [Role::Prefill, Role::Decode] {
        for signal in [Signal::KILL, Signal::TERM] {
            let node = &mut deployment.nodes(role)[0];
            node.process.signal(signal)?;
            node.process.wait_exit(PATIENCE)?;
            let address = deployment.address();
            let gone = ask(address, COMPLETIONS, &greedy("The tide", 4))?;
            ensure!(
                gone.has_failed_openly(),
                "{} gone: {:?}",
                role.name(),
                gone.end
            );
            deployment.nodes(role)[0].start_again()?;
            let got = deployment.wait_served(PATIENCE)?;
            assert_eq!(got.comparable(), wanted.comparable());
        }
    }
    deployment.wait_idle(PATIENCE)
}

/// B073: a decode node that stands still without closing its connections.
#[test]
fn b073_a_decode_node_that_stands_still_is_replaced() -> Result<()> {
    let model = ModelFile::slow()?;
    let wanted = undisturbed(&model, &["still"])?;
    let mut deployment = Deployment::start(&model, &shape(1, 2, "require"))?;
    let got = disturbed(&mut deployment, (&prompt("still"), true), |deployment| {
        let idx = wait_node(deployment, Role::Decode, runs)?;
        deployment.decode[idx].process.signal(Signal::STOP)
    })?;
    check_same(&got, &wanted[0])?;
    ensure!(deployment.n_events("resume")? >= 1.0, "nothing was resumed");
    Ok(())
}

/// Kills the node of a role that works on something after a while, or any when none does.
fn kill_after(deployment: &mut Deployment, role: Role, delay: Duration) -> Result<()> {
    std::thread::sleep(delay);
    let mut victim = 0;
    for (idx, node) in deployment.nodes(role).iter().enumerate() {
        if holds_blocks(node)? {
            victim = idx;
        }
    }
    kill(deployment, role, victim)
}

/// Any moment, either role, streaming or not.
#[test]
fn a_node_lost_at_a_random_moment_changes_nothing() -> Result<()> {
    let model = ModelFile::slow()?;
    let n_rounds = sampled(6, 100);
    let names: Vec<String> = (0..n_rounds)
        .map(|round| format!("round {round}"))
        .collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let wanted = undisturbed(&model, &names)?;
    let mut deployment = Deployment::start(&model, &shape(2, 2, "require"))?;
    let mut rng = SmallRng::seed_from_u64(73);
    for (name, wanted) in names.iter().zip(&wanted) {
        let role = match rng.random_bool(0.5) {
            true => Role::Prefill,
            false => Role::Decode,
        };
        let delay = Duration::from_millis(rng.random_range(0..1_000));
        let stream = rng.random_bool(0.5);
        let got = disturbed(&mut deployment, (&prompt(name), stream), |deployment| {
            kill_after(deployment, role, delay)
        })?;
        let what = || format!("{name}: {} lost after {delay:?}", role.name());
        check_same(&got, wanted).with_context(what)?;
        restart_lost(&mut deployment)?;
    }
    let n_recovered = n_recovered(&deployment)?;
    ensure!(n_recovered >= 1.0, "no moment was one that matters");
    deployment.wait_idle(LEASE_PATIENCE)
}
