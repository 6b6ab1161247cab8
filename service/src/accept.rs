//! The accept loop of every HTTP port: the router's public one and the admin ports.
//!
//! The stock loops install no timer and no limits, so that a connection which sends one byte a minute, or none,
//! stays for ever. Here every connection has to send a whole header within its time (an idle HTTP/1 connection is
//! closed by the same clock), headers are bounded in bytes and count, HTTP/2 peers must answer PING, peers must
//! read (`stall`), and connections are bounded in all and for each address. The loop owns the counts: a connection
//! that ends, however it does, reports its address.

mod stall;
#[cfg(test)]
mod tests;

use self::stall::StallGuard;
use axum::Router;
use hyper::server::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulConnection;
use hyper_util::service::TowerToHyperService;
use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Most bytes of a request's header.
pub const HEADER_BYTES_MAX: usize = 64 << 10;
/// Most header fields.
pub const HEADERS_MAX: usize = 100;
/// Most requests at once on one HTTP/2 connection.
const STREAMS_MAX: u32 = 256;
/// HTTP/2: streams that a peer may reset before we have looked at them, before the connection is closed.
const RESETS_MAX: usize = 64;
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Pause after the system refuses a connection (no file descriptors), and between two looks at a partial preface.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Bounds of the accept loop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConnectionLimits {
    /// Most connections.
    pub connections_max: usize,
    /// Most connections from one address.
    pub connections_per_address_max: usize,
    /// Longest time for a request's header, and longest idle time of an HTTP/1 connection.
    pub header_time_max: Duration,
    /// Longest time that a write waits for its peer to take anything.
    pub stall_time_max: Duration,
    /// HTTP/2: a PING after this silence, and this long for its answer.
    pub ping_interval: Duration,
    /// Longest wait for open requests after shutdown begins.
    pub drain_time_max: Duration,
}

impl ConnectionLimits {
    /// Those of a port that clients come to.
    pub const PUBLIC: Self = Self {
        connections_max: 4096,
        connections_per_address_max: 2048,
        header_time_max: Duration::from_secs(10),
        stall_time_max: Duration::from_secs(60),
        ping_interval: Duration::from_secs(5),
        drain_time_max: Duration::from_secs(60),
    };
    /// Those of a port for probes and metrics.
    pub const ADMIN: Self = Self {
        connections_max: 64,
        connections_per_address_max: 64,
        header_time_max: Duration::from_secs(5),
        stall_time_max: Duration::from_secs(60),
        ping_interval: Duration::from_secs(5),
        drain_time_max: Duration::from_secs(5),
    };
}

/// Serves `routes` until `shutdown`, then waits for the open requests.
///
/// # Errors
/// When the listener is of no use.
pub async fn serve(
    listener: TcpListener,
    routes: Router,
    limits: ConnectionLimits,
    shutdown: CancellationToken,
) -> std::io::Result<()> {
    listener.local_addr()?;
    let mut connections = JoinSet::new();
    let mut n_by_address: HashMap<IpAddr, usize> = HashMap::new();
    loop {
        tokio::select! {
            () = shutdown.cancelled() => break,
            Some(ended) = connections.join_next(), if !connections.is_empty() => {
                if let Ok(address) = ended {
                    forget(&mut n_by_address, address);
                }
            }
            accepted = listener.accept(), if connections.len() < limits.connections_max => {
                let Ok((stream, peer)) = accepted else {
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                };
                let n_open = n_by_address.entry(peer.ip()).or_default();
                if *n_open >= limits.connections_per_address_max {
                    tracing::debug!(address = %peer.ip(), "too many connections from one address");
                    continue;
                }
                *n_open += 1;
                let connection = serve_connection(stream, routes.clone(), limits, shutdown.clone());
                connections.spawn(async move {
                    // A panic within one request is contained here; its address must still come back.
                    let served = tokio::spawn(connection);
                    AbortOnDrop(served).joined().await;
                    peer.ip()
                });
            }
        }
    }
    drop(listener);
    let drained = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(limits.drain_time_max, drained)
        .await
        .is_err()
    {
        tracing::warn!("requests were still open at the end of the drain; they are cancelled");
    }
    Ok(())
}

fn forget(n_by_address: &mut HashMap<IpAddr, usize>, address: IpAddr) {
    if let Some(n_open) = n_by_address.get_mut(&address) {
        *n_open -= 1;
        if *n_open == 0 {
            n_by_address.remove(&address);
        }
    }
}

/// A task that ends with its owner.
struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl AbortOnDrop {
    async fn joined(mut self) {
        if let Err(error) = (&mut self.0).await {
            tracing::error!(%error, "a connection's task ended badly");
        }
    }
}

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn serve_connection(
    stream: TcpStream,
    routes: Router,
    limits: ConnectionLimits,
    shutdown: CancellationToken,
) {
    // Small events must not wait for each other.
    let _ = stream.set_nodelay(true);
    let is_http2 = tokio::select! {
        is_http2 = tokio::time::timeout(limits.header_time_max, is_http2(&stream)) => is_http2,
        () = shutdown.cancelled() => return,
    };
    let served = match is_http2 {
        Ok(Ok(true)) => serve_http2(stream, routes, limits, shutdown).await,
        Ok(Ok(false)) => serve_http1(stream, routes, limits, shutdown).await,
        Ok(Err(_)) | Err(_) => return,
    };
    if let Err(error) = served {
        let error = anyhow::Error::new(error);
        tracing::debug!("a connection ended: {error:#}");
    }
}

/// Looks at the first bytes without taking them.
async fn is_http2(stream: &TcpStream) -> std::io::Result<bool> {
    let mut start = [0; PREFACE.len()];
    loop {
        let n_seen = stream.peek(&mut start).await?;
        if n_seen == 0 || start[..n_seen] != PREFACE[..n_seen] {
            return Ok(false);
        }
        if n_seen == PREFACE.len() {
            return Ok(true);
        }
        tokio::time::sleep(ACCEPT_PAUSE).await;
    }
}

async fn serve_http1(
    stream: TcpStream,
    routes: Router,
    limits: ConnectionLimits,
    shutdown: CancellationToken,
) -> hyper::Result<()> {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_time_max)
        .max_headers(HEADERS_MAX)
        .max_header_size(HEADER_BYTES_MAX)
        .serve_connection(
            TokioIo::new(StallGuard::new(stream, limits.stall_time_max)),
            TowerToHyperService::new(routes),
        );
    until(connection, shutdown).await
}

async fn serve_http2(
    stream: TcpStream,
    routes: Router,
    limits: ConnectionLimits,
    shutdown: CancellationToken,
) -> hyper::Result<()> {
    let header_bytes_max = u32::try_from(HEADER_BYTES_MAX).expect("64 KiB");
    let connection = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .keep_alive_interval(limits.ping_interval)
        .keep_alive_timeout(limits.ping_interval)
        .max_concurrent_streams(STREAMS_MAX)
        .max_header_list_size(header_bytes_max)
        .max_pending_accept_reset_streams(RESETS_MAX)
        .max_local_error_reset_streams(RESETS_MAX)
        .serve_connection(
            TokioIo::new(StallGuard::new(stream, limits.stall_time_max)),
            TowerToHyperService::new(routes),
        );
    until(connection, shutdown).await
}

/// Serves a connection to its end; from `shutdown` on it takes no new request.
async fn until<C: GracefulConnection>(
    connection: C,
    shutdown: CancellationToken,
) -> Result<(), C::Error> {
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        served = connection.as_mut() => served,
        () = shutdown.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    }
}
