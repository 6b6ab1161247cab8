use super::super::conformance::{EXPORTER, Exporter, IMPORTER, Pair, layout, limits};
use super::super::frame::{Frame, HEAD_BYTES, Hello, Read, parse_frame};
use super::super::local::Exchange;
use super::super::{TransferError, Transport};
use super::*;
use std::sync::Arc;
use std::time::Instant;
use tidemill_core::{
    Capability, Endpoint, Epoch, FailureCode, Incarnation, LayerGroupIdx, RequestId, Slice,
    TransportKind,
};
use tidemill_kernels::memory::KvArena;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const TCP: TransportKind = TransportKind::Tcp;

async fn pair() -> Pair {
    Pair::start(TCP, &layout(2, 1, 16, 64), 3).await
}

fn hello(pair: &Pair) -> Frame {
    Frame::Hello(Hello {
        exporter: EXPORTER,
        importer: IMPORTER,
        layout: pair.importer.layout().clone(),
    })
}

fn read(ordinals: std::ops::Range<u32>) -> Read {
    Read {
        request_id: RequestId(1),
        capability: Capability(77),
        epoch: Epoch(1),
        importer: IMPORTER,
        slices: ordinals
            .map(|ordinal| Slice {
                ordinal,
                group: LayerGroupIdx(0),
            })
            .collect(),
    }
}

async fn dial(pair: &Pair) -> TcpStream {
    TcpStream::connect(&pair.exporter.endpoint.address)
        .await
        .expect("listens")
}

async fn next_frame(stream: &mut TcpStream) -> Frame {
    let mut bytes = vec![0; HEAD_BYTES];
    stream.read_exact(&mut bytes).await.expect("a head");
    let n_body = u32::from_le_bytes(bytes[4..].try_into().expect("four")) as usize;
    bytes.resize(HEAD_BYTES + n_body, 0);
    stream
        .read_exact(&mut bytes[HEAD_BYTES..])
        .await
        .expect("a body");
    parse_frame(&bytes).expect("ours")
}

/// The far end closes, with or without a last word.
async fn expect_end(stream: &mut TcpStream) {
    let mut rest = Vec::new();
    let ended = tokio::time::timeout(limits().answer * 3, stream.read_to_end(&mut rest)).await;
    assert!(ended.is_ok(), "the connection was left open");
}

/// An exporter of our own making behind an endpoint.
async fn fake<F, Fut>(serve: F) -> Endpoint
where
    F: Fn(TcpStream) -> Fut + Send + 'static,
    Fut: Future<Output = ()> + Send,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("free port");
    let address = listener.local_addr().expect("bound").to_string();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            serve(stream).await;
        }
    });
    Endpoint {
        transport: TCP,
        address,
    }
}

/// Welcomes, takes the question and answers with these bytes; then keeps the connection open.
async fn fake_answer(answer: Vec<u8>) -> Endpoint {
    fake(move |mut stream| {
        let answer = answer.clone();
        async move {
            next_frame(&mut stream).await;
            let welcome = Frame::Welcome { exporter: EXPORTER };
            stream.write_all(&welcome.encode()).await.expect("open");
            next_frame(&mut stream).await;
            stream.write_all(&answer).await.expect("open");
            let _ = stream.read(&mut [0; 1]).await;
        }
    })
    .await
}

/// B046: whatever comes in costs its own connection only.
#[tokio::test]
async fn malformed_frames_cost_their_own_connection_only() {
    let pair = pair().await;
    let request = pair.request();
    pair.pull(&request).await.expect("before");
    let mut too_long = Frame::Data { n_bytes: 1 }.encode();
    too_long[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    let mut bad_layout = hello(&pair).encode();
    let last = bad_layout.len() - 1;
    bad_layout[last] ^= 1;
    for opening in [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        vec![0; 100],
        vec![0xff; HEAD_BYTES],
        too_long,
        bad_layout,
        Frame::Read(read(0..1)).encode(),
        Frame::Welcome { exporter: EXPORTER }.encode(),
    ] {
        let mut stream = dial(&pair).await;
        stream.write_all(&opening).await.expect("open");
        expect_end(&mut stream).await;
        let outcome = pair.pull(&request).await.expect("others are not touched");
        pair.check(&request, &outcome);
    }
    // After a good hello.
    for second in [
        hello(&pair).encode(),
        Frame::Data { n_bytes: 9 }.encode(),
        vec![b'K', b'V', 1, 3, 0, 0, 0, 0],
        Frame::Read(Read {
            importer: Incarnation(9),
            ..read(0..1)
        })
        .encode(),
    ] {
        let mut stream = dial(&pair).await;
        stream
            .write_all(&hello(&pair).encode())
            .await
            .expect("open");
        assert!(matches!(
            next_frame(&mut stream).await,
            Frame::Welcome { .. }
        ));
        stream.write_all(&second).await.expect("open");
        let Frame::Refused(failure) = next_frame(&mut stream).await else {
            panic!("refused in words")
        };
        assert_eq!(failure.code, FailureCode::InvalidRequest);
        expect_end(&mut stream).await;
    }
    let outcome = pair.pull(&request).await.expect("after");
    pair.check(&request, &outcome);
}

#[tokio::test]
async fn a_peer_that_says_nothing_is_dropped() {
    let pair = pair().await;
    let mut silent = dial(&pair).await;
    let mut half = dial(&pair).await;
    half.write_all(&hello(&pair).encode()[..20])
        .await
        .expect("open");
    expect_end(&mut silent).await;
    expect_end(&mut half).await;
}

/// An importer that asks and never takes the bytes: its read ends, its blocks are free.
#[tokio::test]
async fn an_importer_that_takes_nothing_is_dropped() {
    // 32 MiB: more than any socket buffers.
    let pair = Pair::start(TCP, &layout(1, 64, 16, 1024), 8).await;
    let mut stream = dial(&pair).await;
    stream
        .write_all(&hello(&pair).encode())
        .await
        .expect("open");
    next_frame(&mut stream).await;
    let question = Frame::Read(read(0..8)).encode();
    stream.write_all(&question).await.expect("open");
    next_frame(&mut stream).await;
    assert_eq!(pair.exporter.table.lock().expect("whole").n_reads(), 1);
    let start = Instant::now();
    pair.exporter.wait_idle().await;
    assert!(start.elapsed() < limits().stall * 4);
}

/// B048: an address where nobody speaks our protocol is found within the connect deadline.
#[tokio::test]
async fn a_silent_address_is_unreachable_within_the_deadline() {
    let pair = pair().await;
    let endpoint = fake(|stream| async move {
        tokio::time::sleep(limits().connect * 3).await;
        drop(stream);
    })
    .await;
    let start = Instant::now();
    let error = pair.transport.warm(&endpoint, EXPORTER).await;
    assert!(
        matches!(error, Err(TransferError::Unreachable { .. })),
        "{error:?}"
    );
    assert!(start.elapsed() < limits().connect * 2);

    let nobody = Endpoint {
        transport: TCP,
        address: "127.0.0.1:1".into(),
    };
    let error = pair.transport.warm(&nobody, EXPORTER).await;
    assert!(
        matches!(error, Err(TransferError::Unreachable { .. })),
        "{error:?}"
    );
}

#[tokio::test]
async fn an_exporter_that_stalls_half_way_is_given_up() {
    let pair = pair().await;
    let request = pair.request();
    let n_bytes = 3 * pair.importer.block_bytes() as u64;
    let head = Frame::Data { n_bytes }.encode();
    let mut half = head.clone();
    half.extend(vec![1; 5000]);
    for answer in [Vec::new(), head[..3].to_vec(), head, half] {
        let endpoint = fake_answer(answer).await;
        let error = pair.transport.pull(&endpoint, &request).await;
        assert!(
            matches!(error, Err(TransferError::Stalled { .. })),
            "{error:?}"
        );
    }
}

#[tokio::test]
async fn an_exporter_that_sends_the_wrong_thing_is_malformed() {
    let pair = pair().await;
    let request = pair.request();
    let n_bytes = 3 * pair.importer.block_bytes() as u64;
    for answer in [
        Frame::Data {
            n_bytes: n_bytes - 1,
        }
        .encode(),
        Frame::Data { n_bytes: u64::MAX }.encode(),
        Frame::Welcome { exporter: EXPORTER }.encode(),
        b"HTTP/1.1 400 Bad Request".to_vec(),
    ] {
        let endpoint = fake_answer(answer).await;
        let error = pair.transport.pull(&endpoint, &request).await;
        assert!(
            matches!(error, Err(TransferError::Malformed(_))),
            "{error:?}"
        );
    }
}

#[tokio::test]
async fn an_exporter_that_closes_half_way_is_lost() {
    let pair = pair().await;
    let n_bytes = 3 * pair.importer.block_bytes() as u64;
    let endpoint = fake(move |mut stream| async move {
        next_frame(&mut stream).await;
        let welcome = Frame::Welcome { exporter: EXPORTER };
        stream.write_all(&welcome.encode()).await.expect("open");
        next_frame(&mut stream).await;
        let mut answer = Frame::Data { n_bytes }.encode();
        answer.extend(vec![1; 100]);
        stream.write_all(&answer).await.expect("open");
    })
    .await;
    let error = pair.transport.pull(&endpoint, &pair.request()).await;
    assert!(
        matches!(error, Err(TransferError::Lost { .. })),
        "{error:?}"
    );
}

/// Forwards to the exporter one byte at a time, and changes the byte at `flip` of what comes back.
async fn proxy(to: String, flip: usize) -> Endpoint {
    fake(move |client| {
        let to = to.clone();
        async move {
            let server = TcpStream::connect(to).await.expect("listens");
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_server, mut to_server) = server.into_split();
            let there = tokio::spawn(async move {
                let mut byte = [0; 1];
                while let Ok(1) = from_client.read(&mut byte).await {
                    if to_server.write_all(&byte).await.is_err() {
                        break;
                    }
                }
            });
            let mut byte = [0; 1];
            let mut at = 0;
            while let Ok(1) = from_server.read(&mut byte).await {
                byte[0] ^= u8::from(at == flip);
                at += 1;
                if to_client.write_all(&byte).await.is_err() {
                    break;
                }
            }
            there.abort();
        }
    })
    .await
}

/// B045, on the wire: wherever a bit flips, it is an error or shows in a digest.
#[tokio::test]
async fn a_flipped_bit_on_the_way_never_passes() {
    let pair = Pair::start(TCP, &layout(2, 1, 16, 8), 2).await;
    let address = pair.exporter.endpoint.address.clone();
    let request = pair.request();
    let whole = pair.pull(&request).await.expect("moves");
    let n_welcome = HEAD_BYTES + 16;
    let n_data = HEAD_BYTES + 8;
    let n_all = n_welcome + n_data + 2 * pair.importer.block_bytes();
    for flip in (0..n_welcome + n_data).chain([n_welcome + n_data, n_all - 700, n_all - 1]) {
        // A flipped length makes both sides wait; where bytes do come, a loaded machine may be slow.
        let waits = if flip < n_welcome + n_data {
            short()
        } else {
            limits()
        };
        // A transport of its own: no kept connection.
        let transport = TcpTransport::new(IMPORTER, Arc::clone(&pair.importer), waits);
        let endpoint = proxy(address.clone(), flip).await;
        match transport.pull(&endpoint, &request).await {
            Err(_) => assert!(flip < n_welcome + n_data, "{flip}"),
            Ok(outcome) => {
                assert!(flip >= n_welcome + n_data, "{flip} passed unseen");
                let n_bad = outcome
                    .digests
                    .iter()
                    .zip(&whole.digests)
                    .filter(|(came, sent)| came != sent)
                    .count();
                assert_eq!(n_bad, 1, "{flip}");
            }
        }
    }
    // Byte by byte and unchanged.
    let endpoint = proxy(address, usize::MAX).await;
    let outcome = pair
        .transport
        .pull(&endpoint, &request)
        .await
        .expect("moves");
    pair.check(&request, &outcome);
}

fn short() -> Limits {
    Limits {
        connect: Duration::from_millis(200),
        answer: Duration::from_millis(200),
        stall: Duration::from_millis(100),
        ..limits()
    }
}

/// B006: a new life at the same address is not the old one.
#[tokio::test]
async fn a_restart_at_the_same_address_is_noticed() {
    let mut pair = pair().await;
    let request = pair.request();
    pair.pull(&request).await.expect("moves");
    pair.exporter.stop().await;
    let listener = TcpListener::bind(&pair.exporter.endpoint.address)
        .await
        .expect("free again");
    let (gate, mut calls) = super::super::gate::read_gate(1);
    let second = TcpExporter {
        incarnation: Incarnation(60),
        arena: Arc::clone(&pair.exporter.arena),
        gate,
        limits: limits(),
    };
    let server = tokio::spawn(serve(listener, second));
    let error = pair.pull(&request).await.expect_err("the former life");
    assert_eq!(error.to_failure().code, FailureCode::Gone, "{error}");
    assert!(calls.try_recv().is_err(), "the new life was not even asked");
    let warmed = pair
        .transport
        .warm(&pair.exporter.endpoint, Incarnation(60))
        .await;
    assert_eq!(warmed, Ok(()));
    server.abort();
}

#[tokio::test]
async fn a_kept_connection_that_was_closed_is_replaced_silently() {
    let exchange = Exchange::default();
    let pair = pair().await;
    let request = pair.request();
    for _ in 0..3 {
        pair.pull(&request).await.expect("moves");
    }
    // The same node's server starts again: every kept connection is dead.
    let mut first = pair.exporter;
    first.stop().await;
    let address = first.endpoint.address.clone();
    let again = Exporter::start(TCP, first.arena.layout(), 3, &exchange, &address).await;
    again.lend(pair.n_tokens);
    let outcome = pair
        .transport
        .pull(&again.endpoint, &request)
        .await
        .expect("moves");
    assert_eq!(outcome.digests.len(), 6);
}

#[tokio::test]
async fn connections_are_kept_and_few() {
    let pair = Arc::new(Pair::start(TCP, &layout(2, 1, 16, 64), 8).await);
    let (address, seen) = counting_proxy(pair.exporter.endpoint.address.clone()).await;
    let endpoint = Endpoint {
        transport: TCP,
        address,
    };
    let arena = KvArena::new(pair.importer.layout(), 400).expect("small");
    let transport = Arc::new(TcpTransport::new(IMPORTER, arena, limits()));
    let pulls: Vec<_> = (0..40)
        .map(|n| {
            let (transport, endpoint) = (Arc::clone(&transport), endpoint.clone());
            let mut request = pair.request();
            for place in &mut request.places {
                place.block.0 += n * 9;
            }
            tokio::spawn(async move { transport.pull(&endpoint, &request).await })
        })
        .collect();
    for pull in pulls {
        pull.await.expect("no panic").expect("moves");
    }
    let n_connections = seen.load(std::sync::atomic::Ordering::Relaxed);
    assert!(n_connections <= limits().n_streams, "{n_connections}");
}

async fn counting_proxy(to: String) -> (String, Arc<std::sync::atomic::AtomicUsize>) {
    let seen = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("free port");
    let address = listener.local_addr().expect("bound").to_string();
    let counted = Arc::clone(&seen);
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let mut server = TcpStream::connect(&to).await.expect("listens");
            tokio::spawn(async move {
                let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    (address, seen)
}

#[tokio::test]
async fn a_node_that_does_not_decide_in_time_is_overloaded() {
    let pair = pair().await;
    let closed = Arc::clone(&pair.exporter.door)
        .acquire_owned()
        .await
        .expect("open");
    let error = pair.pull(&pair.request()).await.expect_err("no decision");
    assert_eq!(error.to_failure().code, FailureCode::Overloaded, "{error}");
    drop(closed);
    // The late grant was reported ended though nobody waited for it.
    pair.exporter.wait_idle().await;
    let request = pair.request();
    let outcome = pair.pull(&request).await.expect("moves");
    pair.check(&request, &outcome);
}

#[tokio::test]
async fn more_connections_than_allowed_are_closed_and_room_comes_back() {
    let layout = layout(1, 1, 16, 8);
    let arena = KvArena::new(&layout, 1).expect("small");
    let (gate, _calls) = super::super::gate::read_gate(1);
    let exporter = TcpExporter {
        incarnation: EXPORTER,
        arena: Arc::clone(&arena),
        gate,
        limits: Limits {
            n_connections_max: 1,
            ..limits()
        },
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("free port");
    let endpoint = Endpoint {
        transport: TCP,
        address: listener.local_addr().expect("bound").to_string(),
    };
    let server = tokio::spawn(serve(listener, exporter));
    let first = TcpTransport::new(IMPORTER, Arc::clone(&arena), limits());
    let second = TcpTransport::new(IMPORTER, arena, limits());
    first.warm(&endpoint, EXPORTER).await.expect("room");
    second.warm(&endpoint, EXPORTER).await.expect_err("full");
    drop(first);
    let mut warmed = second.warm(&endpoint, EXPORTER).await;
    for _ in 0..100 {
        if warmed.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
        warmed = second.warm(&endpoint, EXPORTER).await;
    }
    warmed.expect("room again");
    server.abort();
}
