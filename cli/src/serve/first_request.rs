//! The first request of a deployment, sent by itself: "ready" means that a real generation has gone all the way
//! through, from HTTP in to text out.

use super::progress;
use crate::openai::{Client, Piece};
use anyhow::{Context, Result, bail};
use futures::StreamExt;
use serde::Serialize;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

/// Longest wait for nodes to be known and the first answer to come.
const PATIENCE: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(100);

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    prompt: &'a str,
    max_tokens: u32,
    temperature: f32,
    stream: bool,
}

/// Sends one short completion until it is answered.
pub(super) async fn send(address: SocketAddr, model: &str) -> Result<()> {
    progress("sending a first request through all of it");
    let client = Client::new(&format!("http://{}", reachable(address)))?;
    let attempts = async {
        // Nodes become known within moments.
        while try_once(&client, model).await.is_err() {
            tokio::time::sleep(PAUSE).await;
        }
    };
    if tokio::time::timeout(PATIENCE, attempts).await.is_ok() {
        return Ok(());
    }
    let last = try_once(&client, model).await;
    last.context("no generation went through within two minutes; run with --log info to see why")
}

async fn try_once(client: &Client, model: &str) -> Result<()> {
    // More than one token, so that a decode node takes part.
    let body = Body {
        model,
        prompt: "The tide",
        max_tokens: 4,
        temperature: 0.0,
        stream: true,
    };
    let mut pieces = std::pin::pin!(client.stream("completions", &body).await?);
    while let Some(piece) = pieces.next().await {
        if piece? == Piece::Done {
            return Ok(());
        }
    }
    bail!("the stream ended without [DONE]")
}

/// An address that this process itself can call.
pub(super) fn reachable(address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), address.port())
    } else {
        address
    }
}
