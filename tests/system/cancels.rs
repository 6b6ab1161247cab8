//! Clients that go away. Whatever the moment, every block and every place comes back (what leaks in rare
//! moments kills a server in a week).

use anyhow::{Context, Result, ensure};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::io::Write;
use std::net::{Shutdown, SocketAddr};
use std::time::Duration;
use tidemill_tests::answer::COMPLETIONS;
use tidemill_tests::deployment::{Deployment, Shape, greedy};
use tidemill_tests::http::{connect, post_bytes};
use tidemill_tests::model::ModelFile;
use tidemill_tests::sampled;

const N_CLIENTS: u64 = 10;
/// What no cancel has to wait for: the time of a lease that nobody releases.
const IDLE_PATIENCE: Duration = Duration::from_secs(20);

/// One client that sends requests and leaves each at a random moment.
fn leave_at_random(address: SocketAddr, seed: u64, n_requests: usize) -> Result<()> {
    let mut rng = SmallRng::seed_from_u64(seed);
    for _ in 0..n_requests {
        let n_words = rng.random_range(1..80);
        let shared = "the tide turns the mill ".repeat(n_words);
        let prompt = match rng.random_bool(0.5) {
            true => shared,
            false => format!("{:x} {shared}", rng.random::<u32>()),
        };
        let mut body = greedy(&prompt, rng.random_range(1..200));
        body["stream"] = rng.random_bool(0.7).into();
        let mut stream = connect(address)?;
        let bytes = post_bytes(COMPLETIONS, &body);
        // Some leave within their own request.
        let n_sent = match rng.random_bool(0.1) {
            true => rng.random_range(0..bytes.len()),
            false => bytes.len(),
        };
        stream.write_all(&bytes[..n_sent])?;
        // Moments of every scale: before the request is read, while it waits, between its tokens.
        let longest_us = [1_000, 20_000, 150_000][rng.random_range(0..3)];
        std::thread::sleep(Duration::from_micros(rng.random_range(0..longest_us)));
        // Half of them close, half reset: unread bytes make a reset of a close.
        if rng.random_bool(0.5) {
            // The server may have answered and closed already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
    Ok(())
}

#[test]
fn a_thousand_cancels_leave_nothing_behind() -> Result<()> {
    let model = ModelFile::tiny()?;
    let shape = Shape {
        n_prefill: 2,
        n_decode: 2,
        node_flags: vec!["--kv-bytes", "8388608", "--max-batch-tokens", "128"],
        router_flags: vec!["--max-requests", "64"],
    };
    let mut deployment = Deployment::start(&model, &shape)?;
    let wanted = deployment.wait_served(IDLE_PATIENCE)?;
    let address = deployment.address();
    let n_requests = sampled(1_000, 20_000) / N_CLIENTS as usize;
    let clients: Vec<Result<()>> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..N_CLIENTS)
            .map(|seed| scope.spawn(move || leave_at_random(address, seed, n_requests)))
            .collect();
        let ends = running.into_iter();
        ends.map(|client| client.join().expect("no panic"))
            .collect()
    });
    for client in clients {
        client?;
    }
    deployment
        .wait_idle(IDLE_PATIENCE)
        .context("after the cancels")?;
    let metrics = deployment.router.metrics()?;
    let n_cancelled = metrics.sum_where("tidemill_router_requests_total", "end=\"cancelled\"")?;
    ensure!(
        n_cancelled > n_requests as f64,
        "only {n_cancelled} were cancelled: this has tested little"
    );
    let got = deployment.wait_served(IDLE_PATIENCE)?;
    assert_eq!(got.comparable(), wanted.comparable());
    deployment.wait_idle(IDLE_PATIENCE)
}
