//! Each bound of the accept loop, over loopback, from both of its sides: what it allows passes, one more does not.
//!
//! HTTP/2 is written frame by frame here, since a library would keep to the bounds by itself.

use super::*;
use axum::body::{Body, Bytes};
use axum::routing::get;
use futures::StreamExt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;

/// Longest wait of a test; every bound here is far below it.
const PATIENCE: Duration = Duration::from_secs(4);
const SHORT: Duration = Duration::from_millis(200);
const GET_SMALL: &[u8] = b"GET /small HTTP/1.1\r\nhost: x\r\n\r\n";

const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;
/// Setting: bytes of a stream that may be sent before the peer asks for more.
const INITIAL_WINDOW_SIZE: u8 = 4;
/// Largest payload without an agreement.
const FRAME_BYTES_MAX: usize = 16 << 10;
const REFUSED_STREAM: [u8; 4] = [0, 0, 0, 7];
const ENHANCE_YOUR_CALM: [u8; 4] = [0, 0, 0, 11];

/// Far from every bound, so that a test meets only its own.
const WIDE: ConnectionLimits = ConnectionLimits {
    connections_max: 100,
    connections_per_address_max: 100,
    header_time_max: Duration::from_secs(60),
    stall_time_max: Duration::from_secs(60),
    ping_interval: Duration::from_secs(60),
    drain_time_max: Duration::from_secs(60),
};

struct Port {
    address: SocketAddr,
    /// Handlers that wait for ever, and endless answers, at this moment.
    n_open: Arc<AtomicUsize>,
    shutdown: CancellationToken,
    served: tokio::task::JoinHandle<std::io::Result<()>>,
}

/// Counted while it lives.
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(n_open: &Arc<AtomicUsize>) -> Self {
        n_open.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(n_open))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Port {
    async fn open(limits: ConnectionLimits) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let n_open = Arc::new(AtomicUsize::new(0));
        let (pending, endless) = (Arc::clone(&n_open), Arc::clone(&n_open));
        let routes = Router::new()
            .route("/small", get(async || "small"))
            .route(
                "/pending",
                get(async move || {
                    let _counted = Counted::new(&pending);
                    std::future::pending::<&'static str>().await
                }),
            )
            .route(
                "/endless",
                get(async move || {
                    let counted = Counted::new(&endless);
                    let parts = futures::stream::repeat(Bytes::from(vec![b'x'; 64 << 10]));
                    Body::from_stream(parts.map(move |part| {
                        let _ = &counted;
                        Ok::<_, std::convert::Infallible>(part)
                    }))
                }),
            );
        let shutdown = CancellationToken::new();
        let served = tokio::spawn(serve(listener, routes, limits, shutdown.clone()));
        Self {
            address,
            n_open,
            shutdown,
            served,
        }
    }

    async fn connect(&self) -> TcpStream {
        let connected = TcpStream::connect(self.address).await;
        connected.expect("the port is open")
    }

    /// Waits until so many handlers are open.
    async fn wait_open(&self, n_wanted: usize) {
        let start = Instant::now();
        while self.n_open.load(Ordering::SeqCst) != n_wanted {
            let n_open = self.n_open.load(Ordering::SeqCst);
            assert!(start.elapsed() < PATIENCE, "{n_open}, not {n_wanted}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Asks for `/small`; true when it is answered within `patience`.
async fn is_served(stream: &mut TcpStream, patience: Duration) -> bool {
    if stream.write_all(GET_SMALL).await.is_err() {
        return false;
    }
    let mut start = [0; 15];
    let answer = tokio::time::timeout(patience, stream.read_exact(&mut start)).await;
    matches!(answer, Ok(Ok(_))) && &start == b"HTTP/1.1 200 OK"
}

/// Waits until the peer closes.
async fn wait_closed(stream: &mut TcpStream) {
    let mut buffer = vec![0; 64 << 10];
    let closed = async { while matches!(stream.read(&mut buffer).await, Ok(n) if n > 0) {} };
    let waited = tokio::time::timeout(PATIENCE, closed).await;
    waited.expect("closed in time");
}

fn frame(kind: u8, flags: u8, stream_id: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a small payload");
    let mut bytes = length.to_be_bytes()[1..].to_vec();
    bytes.extend([kind, flags]);
    bytes.extend(stream_id.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// A field that enters no table; values up to 16 KiB.
fn literal(name: &str, value: &str) -> Vec<u8> {
    let mut bytes = vec![0];
    for text in [name, value] {
        // A prefix of 7 bits, then 7 bits a byte, the lowest first.
        match text.len() {
            n @ 0..127 => bytes.push(n as u8),
            n => {
                let rest = n - 127;
                bytes.extend([127, (rest & 127) as u8 | 128, (rest >> 7) as u8]);
            }
        }
        bytes.extend(text.as_bytes());
    }
    bytes
}

/// The fields of `GET <path>`.
fn fields(path: &str) -> Vec<u8> {
    [&[0x82, 0x86][..], &literal(":path", path)].concat()
}

/// A whole request in one frame.
fn request(stream_id: u32, path: &str) -> Vec<u8> {
    let flags = END_STREAM | END_HEADERS;
    frame(HEADERS, flags, stream_id, &fields(path))
}

/// The n-th stream of a client.
fn stream_id(n: u32) -> u32 {
    2 * n + 1
}

/// A peer that speaks frames and keeps to nothing.
struct Peer(TcpStream);

struct Frame {
    kind: u8,
    flags: u8,
    stream_id: u32,
    payload: Vec<u8>,
}

impl Peer {
    async fn connect(port: &Port, settings: &[u8]) -> Self {
        let mut stream = port.connect().await;
        let hello = [PREFACE, &frame(SETTINGS, 0, 0, settings)].concat();
        stream.write_all(&hello).await.expect("written");
        Self(stream)
    }

    async fn send(&mut self, bytes: &[u8]) {
        // It may be closed already, which the next read tells.
        let _ = self.0.write_all(bytes).await;
    }

    /// The next frame; `None` when the connection is closed.
    async fn next(&mut self) -> Option<Frame> {
        let reading = async {
            let mut head = [0; 9];
            self.0.read_exact(&mut head).await.ok()?;
            let [a, b, c, kind, flags, stream_id @ ..] = head;
            let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
            self.0.read_exact(&mut payload).await.ok()?;
            Some(Frame {
                kind,
                flags,
                stream_id: u32::from_be_bytes(stream_id),
                payload,
            })
        };
        let read = tokio::time::timeout(PATIENCE, reading).await;
        read.expect("a frame or an end in time")
    }

    /// The next frame of a kind; `None` when the connection ends before.
    async fn next_of(&mut self, kind: u8) -> Option<Frame> {
        loop {
            let frame = self.next().await?;
            if frame.kind == kind && !(kind == SETTINGS && frame.flags == ACK) {
                return Some(frame);
            }
        }
    }

    /// True when the connection still answers a PING.
    async fn is_alive(&mut self) -> bool {
        self.send(&frame(PING, 0, 0, b"00000000")).await;
        loop {
            match self.next().await {
                Some(frame) if frame.kind == PING && frame.flags == ACK => return true,
                Some(frame) if frame.kind != GOAWAY => {}
                _ => return false,
            }
        }
    }

    /// The status of the answer on a stream, as HPACK spells it.
    async fn status(&mut self, stream_id: u32) -> String {
        loop {
            let frame = self.next().await.expect("an answer");
            if frame.stream_id == stream_id && frame.kind == HEADERS {
                return match frame.payload[..] {
                    [0x88, ..] => "200".to_owned(),
                    // A literal status: index 8, then its three digits, plain or in Huffman code.
                    [0x48, length, ref rest @ ..] => {
                        format!("{:02x?}", &rest[..usize::from(length & 127)])
                    }
                    ref other => panic!("{other:?}"),
                };
            }
        }
    }
}

#[tokio::test]
async fn connections_beyond_the_most_wait_for_a_place() {
    let port = Port::open(ConnectionLimits {
        connections_max: 2,
        ..WIDE
    })
    .await;
    let (mut first, mut second) = (port.connect().await, port.connect().await);
    assert!(is_served(&mut first, PATIENCE).await);
    assert!(is_served(&mut second, PATIENCE).await);
    let mut third = port.connect().await;
    assert!(!is_served(&mut third, SHORT).await, "there is no place");
    drop(first);
    let mut start = [0; 15];
    let answer = tokio::time::timeout(PATIENCE, third.read_exact(&mut start)).await;
    answer.expect("in time").expect("a place came free");
}

#[tokio::test]
async fn connections_of_one_address_leave_room_for_others() {
    let port = Port::open(ConnectionLimits {
        connections_per_address_max: 2,
        ..WIDE
    })
    .await;
    let (mut first, mut second) = (port.connect().await, port.connect().await);
    assert!(is_served(&mut first, PATIENCE).await);
    assert!(is_served(&mut second, PATIENCE).await);
    let mut third = port.connect().await;
    assert!(!is_served(&mut third, PATIENCE).await, "one too many");
    let other = TcpSocket::new_v4().expect("a socket");
    let elsewhere = "127.0.0.2:0".parse().expect("an address");
    other.bind(elsewhere).expect("all of 127/8 is ours");
    let mut other = other.connect(port.address).await.expect("open");
    assert!(is_served(&mut other, PATIENCE).await, "another address");
}

#[tokio::test]
async fn b077_a_header_has_its_time() {
    let port = Port::open(ConnectionLimits {
        header_time_max: SHORT,
        ..WIDE
    })
    .await;
    for start in [&b""[..], b"G", b"PRI * HT", b"GET /small HTTP/1.1\r\nhost"] {
        let mut slow = port.connect().await;
        slow.write_all(start).await.expect("written");
        let begin = Instant::now();
        wait_closed(&mut slow).await;
        assert!(begin.elapsed() >= SHORT / 2, "not before its time");
    }
    let mut idle = port.connect().await;
    assert!(is_served(&mut idle, PATIENCE).await);
    wait_closed(&mut idle).await;
}

#[tokio::test]
async fn a_client_that_takes_nothing_of_its_answer_is_closed() {
    let port = Port::open(ConnectionLimits {
        stall_time_max: SHORT,
        ..WIDE
    })
    .await;
    let mut client = port.connect().await;
    let get = b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n";
    client.write_all(get).await.expect("written");
    port.wait_open(1).await;
    port.wait_open(0).await;
}

#[tokio::test]
async fn a_client_that_goes_on_reading_is_not() {
    let port = Port::open(ConnectionLimits {
        stall_time_max: SHORT,
        ..WIDE
    })
    .await;
    let mut client = port.connect().await;
    let get = b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n";
    client.write_all(get).await.expect("written");
    let mut buffer = vec![0; 16 << 20];
    let begin = Instant::now();
    while begin.elapsed() < 4 * SHORT {
        // Enough at a time to open the window again, with long rests between.
        let mut n_read = 0;
        while n_read < 8 << 20 {
            let reading = client.read(&mut buffer).await;
            n_read += reading.expect("still open");
        }
        tokio::time::sleep(SHORT / 4).await;
    }
    assert_eq!(port.n_open.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn an_http2_peer_that_takes_nothing_of_its_answer_is_closed() {
    let port = Port::open(ConnectionLimits {
        stall_time_max: SHORT,
        ..WIDE
    })
    .await;
    // Windows as wide as they can be: only the socket holds the answer up.
    let wide = [0, INITIAL_WINDOW_SIZE, 0x7f, 0xff, 0xff, 0xff];
    let mut peer = Peer::connect(&port, &wide).await;
    let more = frame(WINDOW_UPDATE, 0, 0, &0x7fff_0000_u32.to_be_bytes());
    peer.send(&more).await;
    peer.send(&request(1, "/endless")).await;
    port.wait_open(1).await;
    port.wait_open(0).await;
}

#[tokio::test]
async fn an_http2_peer_that_answers_no_ping_is_closed() {
    let port = Port::open(ConnectionLimits {
        ping_interval: SHORT,
        ..WIDE
    })
    .await;
    let mut silent = Peer::connect(&port, &[]).await;
    silent.send(&request(1, "/pending")).await;
    port.wait_open(1).await;
    assert!(silent.next_of(PING).await.is_some(), "it is asked first");
    wait_closed(&mut silent.0).await;
    port.wait_open(0).await;
}

#[tokio::test]
async fn an_http2_peer_that_answers_every_ping_stays() {
    let port = Port::open(ConnectionLimits {
        ping_interval: SHORT,
        ..WIDE
    })
    .await;
    let mut alive = Peer::connect(&port, &[]).await;
    alive.send(&request(1, "/pending")).await;
    for _ in 0..4 {
        let ping = alive.next_of(PING).await.expect("still open");
        alive.send(&frame(PING, ACK, 0, &ping.payload)).await;
    }
    port.wait_open(1).await;
}

#[tokio::test]
async fn requests_of_one_http2_connection_are_bounded() {
    let port = Port::open(WIDE).await;
    let mut peer = Peer::connect(&port, &[]).await;
    for n in 0..STREAMS_MAX {
        peer.send(&request(stream_id(n), "/pending")).await;
    }
    port.wait_open(STREAMS_MAX as usize).await;
    let one_more = stream_id(STREAMS_MAX);
    peer.send(&request(one_more, "/pending")).await;
    let refused = peer.next_of(RST_STREAM).await.expect("an answer");
    assert_eq!(refused.stream_id, one_more);
    assert_eq!(refused.payload, REFUSED_STREAM);
    // One ends, and there is a place again.
    peer.send(&frame(RST_STREAM, 0, 1, &[0; 4])).await;
    port.wait_open(STREAMS_MAX as usize - 1).await;
    peer.send(&request(one_more + 2, "/small")).await;
    assert_eq!(peer.status(one_more + 2).await, "200");
}

/// Requests that are taken back before anybody looks at them, in one piece.
fn taken_back(n_requests: usize) -> Vec<u8> {
    let ids = (0..n_requests as u32).map(stream_id);
    let each = ids.map(|id| [request(id, "/pending"), frame(RST_STREAM, 0, id, &[0; 4])].concat());
    each.collect::<Vec<_>>().concat()
}

#[tokio::test]
async fn b100_resets_of_one_http2_connection_are_bounded() {
    let port = Port::open(WIDE).await;
    let mut peer = Peer::connect(&port, &[]).await;
    assert!(peer.is_alive().await);
    peer.send(&taken_back(RESETS_MAX)).await;
    assert!(peer.is_alive().await, "as many as are allowed");
    let mut peer = Peer::connect(&port, &[]).await;
    assert!(peer.is_alive().await);
    peer.send(&taken_back(RESETS_MAX + 1)).await;
    let goaway = peer.next_of(GOAWAY).await.expect("it is told why");
    assert_eq!(goaway.payload[4..8], ENHANCE_YOUR_CALM);
    wait_closed(&mut peer.0).await;
    port.wait_open(0).await;
}

#[tokio::test]
async fn b100_resets_that_a_peer_provokes_are_bounded() {
    let port = Port::open(WIDE).await;
    let mut peer = Peer::connect(&port, &[]).await;
    assert!(peer.is_alive().await);
    // A field that HTTP/2 does not have: each such request is reset by us.
    let malformed = [fields("/small"), literal("connection", "close")].concat();
    for n in 0..=RESETS_MAX as u32 {
        let flags = END_STREAM | END_HEADERS;
        peer.send(&frame(HEADERS, flags, stream_id(n), &malformed))
            .await;
    }
    let goaway = peer.next_of(GOAWAY).await.expect("it is told why");
    assert_eq!(goaway.payload[4..8], ENHANCE_YOUR_CALM);
}

/// A request with one long field, over as many frames as it needs.
fn long_request(stream_id: u32, n_bytes: usize) -> Vec<u8> {
    let mut block = fields("/small");
    for n in 0..n_bytes / 8000 {
        block.extend(literal(&format!("x-{n}"), &"y".repeat(8000)));
    }
    let frames: Vec<&[u8]> = block.chunks(FRAME_BYTES_MAX).collect();
    let mut bytes = Vec::new();
    for (idx, part) in frames.iter().enumerate() {
        let kind = if idx == 0 { HEADERS } else { CONTINUATION };
        let first = if idx == 0 { END_STREAM } else { 0 };
        let last = if idx + 1 == frames.len() {
            END_HEADERS
        } else {
            0
        };
        bytes.extend(frame(kind, first | last, stream_id, part));
    }
    bytes
}

#[tokio::test]
async fn b085_an_http2_header_is_bounded_in_bytes() {
    let port = Port::open(WIDE).await;
    let mut peer = Peer::connect(&port, &[]).await;
    let settings = peer.next_of(SETTINGS).await.expect("a hello").payload;
    let told = settings.chunks(6).find(|setting| setting[..2] == [0, 6]);
    let told = told.map(|setting| setting[2..].to_vec());
    assert_eq!(told, Some((HEADER_BYTES_MAX as u32).to_be_bytes().to_vec()));
    peer.send(&long_request(1, 56_000)).await;
    assert_eq!(peer.status(1).await, "200");
    peer.send(&long_request(3, 72_000)).await;
    assert_ne!(peer.status(3).await, "200");
    assert!(peer.is_alive().await, "one bad request costs only itself");
}

#[tokio::test]
async fn b085_a_header_without_end_is_cut_off() {
    let port = Port::open(WIDE).await;
    let mut peer = Peer::connect(&port, &[]).await;
    peer.send(&frame(HEADERS, END_STREAM, 1, &fields("/small")))
        .await;
    let part = frame(CONTINUATION, 0, 1, &literal("x", &"y".repeat(8000)));
    let mut n_sent = 0;
    while n_sent < 16 << 20 && peer.0.write_all(&part).await.is_ok() {
        n_sent += part.len();
    }
    assert!(n_sent < 16 << 20, "all of {n_sent} bytes were taken");
    wait_closed(&mut peer.0).await;
}

#[tokio::test]
async fn a_drain_has_its_time() {
    let port = Port::open(ConnectionLimits {
        drain_time_max: SHORT,
        ..WIDE
    })
    .await;
    let mut client = port.connect().await;
    let get = b"GET /pending HTTP/1.1\r\nhost: x\r\n\r\n";
    client.write_all(get).await.expect("written");
    port.wait_open(1).await;
    port.shutdown.cancel();
    let served = tokio::time::timeout(PATIENCE, port.served).await;
    served.expect("in time").expect("no panic").expect("served");
    wait_closed(&mut client).await;
}
