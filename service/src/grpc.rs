//! Connections between router and nodes: TCP (`host:port`) or within one process (`local:NAME`).
//!
//! Both give the same tonic channel and server, so one process and many run the same code. A peer that
//! vanishes without a word is noticed by HTTP/2 PINGs within ten seconds, also while nothing is sent; a
//! connect never takes longer than two.

use hyper_util::rt::TokioIo;
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::Sleep;
use tonic::transport::server::{Connected, Router};
use tonic::transport::{Channel, Endpoint};

/// Prefix of in-process addresses.
const LOCAL_PREFIX: &str = "local:";
/// Bytes in flight on an in-process connection, each way.
const DUPLEX_BYTES: usize = 256 * 1024;
/// In-process connections waiting to be accepted.
const LOCAL_BACKLOG: usize = 64;
/// Longest wait for a connection.
const CONNECT_DEADLINE: Duration = Duration::from_secs(2);
/// PING interval and the wait for its answer: a silent peer is dropped within their sum.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// Rest after a failed accept: without file descriptors it would fail again at once, and turn at full speed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Streams that one connection may hold open at a node.
const STREAMS_MAX: u32 = 4096;

/// The in-process listeners of one deployment. Clones share them.
#[derive(Clone, Default)]
pub struct Fabric {
    listeners: Arc<Mutex<HashMap<String, mpsc::Sender<DuplexStream>>>>,
}

/// Why an address could not be bound or used.
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    /// Not `host:port` and not `local:NAME`.
    #[error("address {0:?} is neither host:port nor local:NAME")]
    Malformed(String),
    /// Somebody else has it.
    #[error("address {address:?} cannot be bound; choose another or end its owner")]
    Bind {
        /// The address.
        address: String,
        /// The operating system's reason.
        source: io::Error,
    },
}

/// A bound address that accepts connections.
pub struct Listener {
    address: String,
    kind: ListenerKind,
}

enum ListenerKind {
    Tcp {
        listener: TcpListener,
        rest: Rest,
    },
    Local {
        incoming: mpsc::Receiver<DuplexStream>,
        _registration: Registration,
    },
}

/// Takes the name out of the fabric when the listener goes.
struct Registration {
    fabric: Fabric,
    name: String,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.fabric.lock().remove(&self.name);
    }
}

impl Fabric {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, mpsc::Sender<DuplexStream>>> {
        self.listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Binds `host:port` (port 0 picks a free one) or `local:NAME`.
    ///
    /// # Errors
    /// When the address is malformed or taken.
    pub async fn bind(&self, address: &str) -> Result<Listener, AddressError> {
        let bind_error = |source| AddressError::Bind {
            address: address.to_owned(),
            source,
        };
        if let Some(name) = address.strip_prefix(LOCAL_PREFIX) {
            let (sender, incoming) = mpsc::channel(LOCAL_BACKLOG);
            let mut listeners = self.lock();
            if listeners.contains_key(name) {
                return Err(bind_error(io::ErrorKind::AddrInUse.into()));
            }
            listeners.insert(name.to_owned(), sender);
            drop(listeners);
            return Ok(Listener {
                address: address.to_owned(),
                kind: ListenerKind::Local {
                    incoming,
                    _registration: Registration {
                        fabric: self.clone(),
                        name: name.to_owned(),
                    },
                },
            });
        }
        check_host_port(address)?;
        let listener = TcpListener::bind(address).await.map_err(bind_error)?;
        let address = listener.local_addr().map_err(bind_error)?.to_string();
        Ok(Listener {
            address,
            kind: ListenerKind::Tcp {
                listener,
                rest: Rest::default(),
            },
        })
    }

    /// A channel to `address`. It connects when first used and again whenever the connection is lost.
    ///
    /// # Errors
    /// When the address is malformed.
    pub fn connect(&self, address: &str) -> Result<Channel, AddressError> {
        let malformed = || AddressError::Malformed(address.to_owned());
        if let Some(name) = address.strip_prefix(LOCAL_PREFIX) {
            let (fabric, name) = (self.clone(), name.to_owned());
            let connector = tower::service_fn(move |_uri: http::Uri| {
                let (fabric, name) = (fabric.clone(), name.clone());
                async move { fabric.connect_local(&name).await.map(TokioIo::new) }
            });
            let endpoint = Endpoint::from_static("http://in-process");
            return Ok(tuned(endpoint, KEEP_ALIVE).connect_with_connector_lazy(connector));
        }
        check_host_port(address)?;
        let endpoint =
            Endpoint::from_shared(format!("http://{address}")).map_err(|_| malformed())?;
        Ok(tuned(endpoint, KEEP_ALIVE).connect_lazy())
    }

    async fn connect_local(&self, name: &str) -> io::Result<DuplexStream> {
        let sender = self.lock().get(name).cloned();
        let sender = sender.ok_or(io::ErrorKind::ConnectionRefused)?;
        let (ours, theirs) = tokio::io::duplex(DUPLEX_BYTES);
        sender
            .send(theirs)
            .await
            .map_err(|_| io::ErrorKind::ConnectionRefused)?;
        Ok(ours)
    }
}

fn check_host_port(address: &str) -> Result<(), AddressError> {
    let valid = address
        .rsplit_once(':')
        .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
    valid
        .then_some(())
        .ok_or_else(|| AddressError::Malformed(address.to_owned()))
}

fn tuned(endpoint: Endpoint, keep_alive: Duration) -> Endpoint {
    endpoint
        .connect_timeout(CONNECT_DEADLINE)
        .http2_keep_alive_interval(keep_alive)
        .keep_alive_timeout(keep_alive)
        .keep_alive_while_idle(true)
        .tcp_nodelay(true)
}

impl Listener {
    /// Where peers reach it: the real port, also when 0 was asked for.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The socket address, for a TCP listener.
    pub fn socket_address(&self) -> Option<SocketAddr> {
        self.address.parse().ok()
    }
}

/// A server with this house's limits, ready for `add_service`.
pub fn server() -> tonic::transport::Server {
    server_with(KEEP_ALIVE)
}

fn server_with(keep_alive: Duration) -> tonic::transport::Server {
    tonic::transport::Server::builder()
        .http2_keepalive_interval(Some(keep_alive))
        .http2_keepalive_timeout(Some(keep_alive))
        .max_concurrent_streams(STREAMS_MAX)
        .tcp_nodelay(true)
}

/// Serves `routes` on `listener` until `shutdown` resolves; open streams are then let finish.
///
/// # Errors
/// When the transport fails as a whole; a bad connection only ends itself.
pub async fn serve(
    listener: Listener,
    routes: Router,
    shutdown: impl Future<Output = ()>,
) -> Result<(), tonic::transport::Error> {
    routes
        .serve_with_incoming_shutdown(listener, shutdown)
        .await
}

/// A failed accept concerns nobody who waits: it is logged, and tried again after a pause.
#[derive(Default)]
struct Rest(Option<Pin<Box<Sleep>>>);

impl Rest {
    fn poll_after_failures<T>(
        &mut self,
        cx: &mut Context<'_>,
        mut accept: impl FnMut(&mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> Poll<T> {
        loop {
            if let Some(pause) = &mut self.0 {
                ready!(pause.as_mut().poll(cx));
                self.0 = None;
            }
            match ready!(accept(cx)) {
                Ok(accepted) => return Poll::Ready(accepted),
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    self.0 = Some(Box::pin(tokio::time::sleep(ACCEPT_PAUSE)));
                }
            }
        }
    }
}

impl futures::Stream for Listener {
    type Item = io::Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        match &mut self.kind {
            ListenerKind::Tcp { listener, rest } => {
                let accepted = rest.poll_after_failures(cx, |cx| listener.poll_accept(cx));
                accepted.map(|(stream, _peer)| {
                    // Without it a token waits for the previous one's acknowledgement.
                    let _ = stream.set_nodelay(true);
                    Some(Ok(Connection::Tcp(stream)))
                })
            }
            ListenerKind::Local { incoming, .. } => incoming
                .poll_recv(cx)
                .map(|stream| stream.map(|stream| Ok(Connection::Local(stream)))),
        }
    }
}

/// One accepted connection.
pub enum Connection {
    /// From a socket.
    Tcp(TcpStream),
    /// From this process.
    Local(DuplexStream),
}

impl Connected for Connection {
    type ConnectInfo = ();

    fn connect_info(&self) -> Self::ConnectInfo {}
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(cx, buffer),
            Self::Local(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Local(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Self::Local(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Local(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tonic::service::Routes;

    const SHORT: Duration = Duration::from_millis(200);
    /// Far above the bounds of a test, far below the defaults of the library.
    const PATIENCE: Duration = Duration::from_secs(4);
    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    const EMPTY_SETTINGS: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];
    /// Head of a PING frame that is no answer.
    const PING: &[u8] = &[0, 0, 8, 6, 0, 0, 0, 0, 0];

    /// Reads, and answers nothing, until the peer closes; returns what it said.
    async fn read_in_silence(mut stream: TcpStream) -> Vec<u8> {
        let mut said = Vec::new();
        let closed = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut said)).await;
        assert!(closed.is_ok(), "a silent peer is kept: {said:?}");
        said
    }

    fn has_ping(said: &[u8]) -> bool {
        said.windows(PING.len()).any(|bytes| bytes == PING)
    }

    #[tokio::test]
    async fn a_server_drops_a_client_that_answers_no_ping() {
        let listener = Fabric::default().bind("127.0.0.1:0").await.expect("bound");
        let address = listener.address().to_owned();
        let routes = server_with(SHORT).add_routes(Routes::default());
        let served = tokio::spawn(serve(listener, routes, std::future::pending()));
        let mut client = TcpStream::connect(&address).await.expect("open");
        let hello = [PREFACE, EMPTY_SETTINGS].concat();
        client.write_all(&hello).await.expect("written");
        assert!(has_ping(&read_in_silence(client).await));
        served.abort();
    }

    #[tokio::test]
    async fn a_client_drops_a_server_that_answers_no_ping_also_when_idle() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("a URI");
        let connecting = tokio::spawn(async move { tuned(endpoint, SHORT).connect().await });
        let (mut server, _) = listener.accept().await.expect("a client");
        server.write_all(EMPTY_SETTINGS).await.expect("written");
        let channel = connecting.await.expect("no panic").expect("connected");
        assert!(has_ping(&read_in_silence(server).await));
        drop(channel);
    }

    #[tokio::test]
    async fn a_local_name_has_one_owner_at_a_time() {
        let fabric = Fabric::default();
        let first = fabric.bind("local:prefill-0").await.expect("free");
        assert!(fabric.bind("local:prefill-0").await.is_err());
        drop(first);
        assert!(fabric.bind("local:prefill-0").await.is_ok());
    }

    #[tokio::test]
    async fn port_zero_reports_the_real_port() {
        let listener = Fabric::default().bind("127.0.0.1:0").await.expect("bound");
        assert_ne!(listener.socket_address().expect("tcp").port(), 0);
    }

    #[tokio::test]
    async fn a_missing_local_peer_refuses() {
        let error = Fabric::default().connect_local("nobody").await;
        assert_eq!(
            error.expect_err("nobody listens").kind(),
            io::ErrorKind::ConnectionRefused
        );
    }

    #[test]
    fn malformed_addresses_are_refused() {
        for bad in ["", "host", "host:", ":80", "host:99999"] {
            assert!(Fabric::default().connect(bad).is_err(), "{bad:?}");
        }
    }

    #[tokio::test]
    async fn a_failed_accept_is_tried_again_after_a_pause() {
        let (mut rest, mut n_accepts) = (Rest::default(), 0);
        let begin = tokio::time::Instant::now();
        let accepted = std::future::poll_fn(|cx| {
            rest.poll_after_failures(cx, |_| {
                n_accepts += 1;
                Poll::Ready(match n_accepts {
                    1 | 2 => Err(io::Error::other("no file descriptor is left")),
                    _ => Ok("a connection"),
                })
            })
        });
        assert_eq!(accepted.await, "a connection");
        assert_eq!(n_accepts, 3);
        assert!(begin.elapsed() >= 2 * ACCEPT_PAUSE);
    }
}
