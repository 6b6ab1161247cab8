//! Peers that do not keep to any protocol. A bad connection costs itself; whatever comes in at any port, the next good
//! request is served (B046, B109).

use anyhow::{Context, Result, ensure};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;
use tidemill_tests::answer::{COMPLETIONS, ask};
use tidemill_tests::deployment::{Deployment, Shape, greedy};
use tidemill_tests::http::{Answering, connect, post_bytes};
use tidemill_tests::model::ModelFile;
use tidemill_tests::sampled;

const PATIENCE: Duration = Duration::from_secs(20);
/// A body over the limit of 8 MiB.
const LARGE_BYTES: usize = 10_000_000;

/// Ports on loopback at which a process listens.
fn ports(pid: u32) -> Result<Vec<SocketAddr>> {
    let mut sockets = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let target = std::fs::read_link(entry?.path()).unwrap_or_default();
        let target = target.to_string_lossy();
        let inode = target
            .strip_prefix("socket:[")
            .and_then(|rest| rest.strip_suffix(']'));
        sockets.extend(inode.map(str::to_owned));
    }
    let table = std::fs::read_to_string(format!("/proc/{pid}/net/tcp"))?;
    let mut found = Vec::new();
    for line in table.lines().skip(1) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (Some(local), Some(&"0A"), Some(inode)) = (fields.get(1), fields.get(3), fields.get(9))
        else {
            continue;
        };
        if sockets.iter().any(|socket| socket == inode) {
            let (_, port) = local.split_once(':').context("address:port")?;
            let port = u16::from_str_radix(port, 16)?;
            found.push(SocketAddr::from(([127, 0, 0, 1], port)));
        }
    }
    Ok(found)
}

/// What is thrown at every port.
fn garbage(seed: u64) -> Vec<Vec<u8>> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut random = |n_bytes: usize| -> Vec<u8> { (0..n_bytes).map(|_| rng.random()).collect() };
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let mut all = vec![
        random(1),
        random(8),
        random(100),
        random(100_000),
        vec![0; 100_000],
        vec![0xff; 100_000],
        b"GET /v1/models HTTP/1.1\r\n".repeat(5_000),
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999999999999999\r\n\r\n".to_vec(),
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n".to_vec(),
    ];
    // A good preface, then frames of nonsense: some with a length that promises 16 MiB.
    all.push([&preface[..], &random(5_000)].concat());
    all.push([&preface[..], &[0xff; 64]].concat());
    // A frame of our own kind would begin with its length: largest, none, and one too many.
    for length in [u32::MAX, 0, 1 << 30] {
        for bytes in [length.to_le_bytes(), length.to_be_bytes()] {
            all.push([&bytes[..], &random(64)].concat());
        }
    }
    all
}

/// Sends and looks at what comes back for a moment; both may fail, that is the point.
fn throw(address: SocketAddr, bytes: &[u8]) -> Result<TcpStream> {
    let mut stream = connect(address)?;
    stream.set_read_timeout(Some(Duration::from_millis(20)))?;
    stream.set_write_timeout(Some(Duration::from_millis(500)))?;
    let _ = stream.write_all(bytes);
    let _ = stream.read(&mut [0; 4096]);
    Ok(stream)
}

#[test]
fn b046_garbage_at_any_port_costs_only_its_connection() -> Result<()> {
    let model = ModelFile::tiny()?;
    let mut deployment = Deployment::start(&model, &Shape::default())?;
    let wanted = deployment.wait_served(PATIENCE)?;
    // Half of the connections stay open beside the good requests.
    let mut held = Vec::new();
    let mut n_ports = 0;
    for member in deployment.members() {
        for address in ports(member.process.pid())? {
            n_ports += 1;
            for seed in 0..sampled(2, 20) as u64 {
                for (i, bytes) in garbage(seed).iter().enumerate() {
                    let stream = throw(address, bytes)
                        .with_context(|| format!("{} at {address}", member.ready.role))?;
                    if i % 2 == 0 && seed < 2 {
                        held.push(stream);
                    }
                }
            }
        }
    }
    // Public or control port, admin port, and the KV port of prefill.
    assert_eq!(n_ports, 7, "listening ports");
    let got = deployment.wait_served(PATIENCE)?;
    assert_eq!(got.comparable(), wanted.comparable());
    drop(held);
    deployment.wait_idle(PATIENCE)?;
    for role in [tidemill_core::Role::Prefill, tidemill_core::Role::Decode] {
        ensure!(deployment.nodes(role)[0].process.is_running()?);
    }
    Ok(())
}

#[test]
fn b109_large_bodies_are_refused_while_they_come() -> Result<()> {
    let model = ModelFile::tiny()?;
    let mut deployment = Deployment::start(&model, &Shape::default())?;
    let address = deployment.address();
    let large = greedy(&"x".repeat(LARGE_BYTES), 1);
    let declared = ask(address, COMPLETIONS, &large)?;
    // What the client still sends is read and thrown away, so that it sees why it was refused.
    let wanted = tidemill_tests::answer::End::Refused {
        status: 413,
        code: "body_too_large".to_owned(),
    };
    ensure!(declared.end == wanted, "{:?}", declared.end);
    let mut stream = connect(address)?;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\
                content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes())?;
    let chunk = [b"10000\r\n".as_slice(), &[b' '; 0x10000], b"\r\n"].concat();
    let mut n_sent = 0;
    // An endless body: 413 comes soon after the limit, whatever is still being sent.
    while n_sent < 64 << 20 && stream.write_all(&chunk).is_ok() {
        n_sent += chunk.len();
        stream.set_nonblocking(true)?;
        let is_answered = stream.peek(&mut [0; 1]).is_ok_and(|n| n > 0);
        stream.set_nonblocking(false)?;
        if is_answered {
            break;
        }
    }
    ensure!(n_sent < 32 << 20, "{n_sent} bytes were taken");
    if let Ok(answering) = Answering::read(stream) {
        assert_eq!(answering.status, 413);
    }
    deployment.wait_served(PATIENCE)?;
    deployment.wait_idle(PATIENCE)
}

#[test]
fn slow_and_half_open_clients_hold_up_nobody() -> Result<()> {
    let model = ModelFile::tiny()?;
    let mut deployment = Deployment::start(&model, &Shape::default())?;
    let wanted = deployment.wait_served(PATIENCE)?;
    let address = deployment.address();
    let mut held = Vec::new();
    let bytes = post_bytes(COMPLETIONS, &greedy("half", 4));
    for i in 0..sampled(200, 1_500) {
        let mut stream = connect(address)?;
        // Nothing at all, part of the head, or the head and part of the body.
        let n_sent = match i % 3 {
            0 => 0,
            1 => 20,
            _ => bytes.len() - 5,
        };
        stream.write_all(&bytes[..n_sent])?;
        held.push(stream);
    }
    let got = deployment.wait_served(PATIENCE)?;
    assert_eq!(got.comparable(), wanted.comparable());
    // The header has 10 s; after them the connection is closed from the other side.
    let mut slow = held.swap_remove(1);
    let mut left = Vec::new();
    slow.read_to_end(&mut left).context("not closed in time")?;
    drop(held);
    deployment.wait_idle(PATIENCE)
}
