//! One suite for every transport: what a pull promises must hold whichever way the bytes go. Each test runs once for
//! each kind, against a real export table behind a real gate.

use super::gate::{ReadCall, read_gate};
use super::local::{Exchange, LocalExporter, LocalTransport, Registration};
use super::tcp::{Limits, TcpExporter, TcpTransport, serve};
use super::*;
use crate::export::{Claim, ExportTable, READ_SLICES_MAX};
use std::sync::Mutex;
use std::time::Duration;
use tidemill_core::{
    BlockIdx, KvDtype, KvLayout, LayerGroupIdx, NodeId, ReadId, SampledToken, Timestamp,
};
use tidemill_kernels::memory::{KvArena, SliceAt};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;

pub(super) const REQUEST: RequestId = RequestId(1);
pub(super) const CAPABILITY: Capability = Capability(77);
pub(super) const IMPORTER: Incarnation = Incarnation(5);
pub(super) const EXPORTER: Incarnation = Incarnation(6);
const BOTH: [TransportKind; 2] = [TransportKind::Local, TransportKind::Tcp];

pub(super) fn limits() -> Limits {
    Limits {
        connect: Duration::from_millis(2000),
        answer: Duration::from_millis(2000),
        stall: Duration::from_millis(1000),
        ..Limits::default()
    }
}

/// `n_layers` groups of one layer each; a slice has `2 * n_kv_heads * block_tokens * head_dim * 2` bytes.
pub(super) fn layout(n_layers: u32, n_kv_heads: u32, block_tokens: u32, head_dim: u32) -> KvLayout {
    let layout = KvLayout {
        n_layers,
        n_kv_heads,
        head_dim,
        block_tokens,
        dtype: KvDtype::F16,
        group_layers: 1,
        tp_degree: 1,
        model_fingerprint: [1; 32],
    };
    layout.check().expect("valid");
    layout
}

/// An exporting node: its table, its pool, and a task that answers for it.
pub(super) struct Exporter {
    pub(super) arena: Arc<KvArena>,
    pub(super) table: Arc<Mutex<ExportTable>>,
    pub(super) endpoint: Endpoint,
    /// Closed: the node answers no question.
    pub(super) door: Arc<Semaphore>,
    node: JoinHandle<()>,
    server: Option<JoinHandle<()>>,
    registration: Option<Registration>,
}

/// An exporter with one request of `n_tokens`, everything announced and claimed by `IMPORTER`, and an importer.
pub(super) struct Pair {
    pub(super) exporter: Exporter,
    pub(super) importer: Arc<KvArena>,
    pub(super) transport: Arc<dyn Transport>,
    pub(super) n_tokens: u32,
    exchange: Exchange,
}

impl Exporter {
    pub(super) async fn start(
        kind: TransportKind,
        layout: &KvLayout,
        n_blocks: u32,
        exchange: &Exchange,
        address: &str,
    ) -> Self {
        let arena = KvArena::new(layout, n_blocks).expect("small");
        let table = Arc::new(Mutex::new(ExportTable::new(layout.clone())));
        let (gate, calls) = read_gate(8);
        let door = Arc::new(Semaphore::new(1));
        let node = tokio::spawn(answer(calls, Arc::clone(&table), Arc::clone(&door)));
        let (mut server, mut registration) = (None, None);
        let address = match kind {
            TransportKind::Local => {
                let exporter = LocalExporter {
                    incarnation: EXPORTER,
                    arena: Arc::clone(&arena),
                    gate,
                };
                registration = Some(exchange.register("prefill-0", exporter));
                "prefill-0".to_owned()
            }
            TransportKind::Tcp => {
                let listener = TcpListener::bind(address).await.expect("free port");
                let address = listener.local_addr().expect("bound").to_string();
                let exporter = TcpExporter {
                    incarnation: EXPORTER,
                    arena: Arc::clone(&arena),
                    gate,
                    limits: limits(),
                };
                server = Some(tokio::spawn(serve(listener, exporter)));
                address
            }
        };
        let endpoint = Endpoint {
            transport: kind,
            address,
        };
        Self {
            arena,
            table,
            endpoint,
            door,
            node,
            server,
            registration,
        }
    }

    /// Fills the first blocks with bytes of their own, announces them and binds the lease to `IMPORTER`.
    pub(super) fn lend(&self, n_tokens: u32) {
        let layout = self.arena.layout();
        let mut table = self.table.lock().expect("whole");
        table.open(REQUEST, CAPABILITY, n_tokens, Timestamp(0));
        let blocks: Vec<BlockIdx> = (0..layout.n_blocks_for(n_tokens)).map(BlockIdx).collect();
        table.set_blocks(REQUEST, &blocks);
        for group in 0..layout.n_groups() {
            let places = table.layers_done(REQUEST, LayerGroupIdx(group), n_tokens);
            let mut digests = Vec::new();
            for place in places {
                let at = at(place);
                fill(
                    &self.arena,
                    at,
                    u64::from(at.block.0) << 32 | u64::from(group),
                );
                digests.push((place.slice, self.arena.digest(at).expect("exists")));
            }
            table.digested(REQUEST, &digests);
        }
        let claim = Claim {
            request_id: REQUEST,
            capability: CAPABILITY,
            epoch: Epoch(1),
            importer: NodeId::new("decode-0").expect("valid"),
            importer_incarnation: IMPORTER,
            layout_fingerprint: layout.fingerprint(),
            deadline: Timestamp(u64::MAX),
        };
        table.claim(&claim, Timestamp(1)).expect("live");
        let first = SampledToken {
            token: 1,
            output_idx: 0,
            logprob: None,
            top: Vec::new(),
            logits_digest: None,
        };
        table.complete(REQUEST, first, Timestamp(1));
    }

    /// The process is killed: nothing answers any more.
    pub(super) async fn stop(&mut self) {
        self.registration.take();
        if let Some(server) = self.server.take() {
            server.abort();
            let _ = server.await;
        }
    }

    /// Waits until no read is in flight; fails when that does not come.
    pub(super) async fn wait_idle(&self) {
        for _ in 0..1000 {
            if self.table.lock().expect("whole").n_reads() == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("a read was never reported ended");
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        self.node.abort();
        if let Some(server) = &self.server {
            server.abort();
        }
    }
}

async fn answer(
    mut calls: mpsc::Receiver<ReadCall>,
    table: Arc<Mutex<ExportTable>>,
    door: Arc<Semaphore>,
) {
    let mut next_read = 0;
    while let Some(call) = calls.recv().await {
        match call {
            ReadCall::Ask { ask, reply } => {
                let _open = door.acquire().await.expect("open");
                next_read += 1;
                let decision =
                    table
                        .lock()
                        .expect("whole")
                        .read(&ask, ReadId(next_read), Timestamp(2));
                reply.answer(decision);
            }
            ReadCall::Ended(read) => {
                assert!(table.lock().expect("whole").end_read(read), "ended once");
            }
        }
    }
}

impl Pair {
    pub(super) async fn start(kind: TransportKind, layout: &KvLayout, n_blocks: u32) -> Self {
        let n_tokens = n_blocks * layout.block_tokens;
        let exchange = Exchange::default();
        let exporter = Exporter::start(kind, layout, n_blocks, &exchange, "127.0.0.1:0").await;
        exporter.lend(n_tokens);
        let importer = KvArena::new(layout, n_blocks + 2).expect("small");
        let transport = importing(kind, &importer, &exchange);
        Self {
            exporter,
            importer,
            transport,
            n_tokens,
            exchange,
        }
    }

    /// Everything, into our blocks in reverse order, above one that stays untouched.
    pub(super) fn request(&self) -> PullRequest {
        let layout = self.importer.layout();
        let n_blocks = layout.n_blocks_for(self.n_tokens);
        let places = layout.slices_for(self.n_tokens).map(|slice| SlicePlace {
            slice,
            block: BlockIdx(n_blocks - slice.ordinal),
        });
        PullRequest {
            request_id: REQUEST,
            capability: CAPABILITY,
            epoch: Epoch(1),
            exporter: EXPORTER,
            endpoints: vec![self.exporter.endpoint.clone()],
            places: places.collect(),
        }
    }

    pub(super) async fn pull(&self, request: &PullRequest) -> PullResult {
        self.transport.pull(&self.exporter.endpoint, request).await
    }

    /// Every byte of the places is the exporter's, and the digests say so.
    pub(super) fn check(&self, request: &PullRequest, outcome: &PullOutcome) {
        assert_eq!(outcome.digests.len(), request.places.len());
        let mut n_bytes = 0;
        for (place, (slice, digest)) in request.places.iter().zip(&outcome.digests) {
            let theirs = SliceAt {
                block: BlockIdx(place.slice.ordinal),
                group: place.slice.group,
            };
            let (sent, here) = (
                bytes(&self.exporter.arena, theirs),
                bytes(&self.importer, at(*place)),
            );
            assert!(sent == here, "{place:?} differs");
            assert_eq!(*slice, place.slice);
            assert_eq!(*digest, self.exporter.arena.digest(theirs).expect("exists"));
            n_bytes += here.len() as u64;
        }
        assert_eq!(outcome.n_bytes, n_bytes);
        self.check_untouched(BlockIdx(0));
        self.check_untouched(BlockIdx(self.importer.n_blocks() - 1));
    }

    fn check_untouched(&self, block: BlockIdx) {
        for group in 0..self.importer.layout().n_groups() {
            let group = LayerGroupIdx(group);
            let bytes = bytes(&self.importer, SliceAt { block, group });
            assert!(bytes.iter().all(|&byte| byte == 0), "{block:?} was written");
        }
    }
}

fn importing(kind: TransportKind, arena: &Arc<KvArena>, exchange: &Exchange) -> Arc<dyn Transport> {
    let arena = Arc::clone(arena);
    match kind {
        TransportKind::Local => Arc::new(LocalTransport::new(IMPORTER, arena, exchange.clone())),
        TransportKind::Tcp => Arc::new(TcpTransport::new(IMPORTER, arena, limits())),
    }
}

pub(super) fn at(place: SlicePlace) -> SliceAt {
    SliceAt {
        block: place.block,
        group: place.slice.group,
    }
}

pub(super) fn bytes(arena: &KvArena, at: SliceAt) -> Vec<u8> {
    let mut bytes = vec![0; arena.slice_bytes(at.group).expect("exists")];
    arena.copy_out(at, &mut bytes).expect("exists");
    bytes
}

/// Bytes that differ from slice to slice and from place to place.
fn fill(arena: &KvArena, at: SliceAt, seed: u64) {
    let n_bytes = arena.slice_bytes(at.group).expect("exists");
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let bytes: Vec<u8> = (0..n_bytes)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect();
    arena.copy_in(at, &bytes).expect("exists");
}

/// B081: lengths around every power that a transport might stumble over.
#[tokio::test]
async fn every_size_is_right() {
    for kind in BOTH {
        for (n_kv_heads, block_tokens, head_dim) in [
            (1, 1, 1),
            (1, 1, 127),
            (1, 1, 128),
            (1, 1, 129),
            (1, 1, 1023),
            (1, 1, 1024),
            (1, 16, 1023),
            (1, 16, 1024),
            (5, 13, 1009),
            (16, 16, 1024),
            (17, 16, 1024),
        ] {
            let layout = layout(3, n_kv_heads, block_tokens, head_dim);
            let pair = Pair::start(kind, &layout, 3).await;
            let request = pair.request();
            let outcome = pair.pull(&request).await.expect("moves");
            pair.check(&request, &outcome);
            pair.exporter.wait_idle().await;
        }
    }
}

#[tokio::test]
async fn a_smaller_last_group_is_right() {
    for kind in BOTH {
        let mut layout = layout(5, 2, 16, 64);
        layout.group_layers = 2;
        let pair = Pair::start(kind, &layout, 4).await;
        let request = pair.request();
        let outcome = pair.pull(&request).await.expect("moves");
        pair.check(&request, &outcome);
    }
}

#[tokio::test]
async fn nothing_asked_is_nothing_moved() {
    for kind in BOTH {
        let pair = Pair::start(kind, &layout(1, 1, 16, 8), 1).await;
        let mut request = pair.request();
        request.places.clear();
        let outcome = pair.pull(&request).await.expect("nothing to do");
        assert_eq!(outcome.n_bytes, 0);
        assert!(outcome.digests.is_empty());
    }
}

#[tokio::test]
async fn a_pull_of_more_slices_than_a_read_takes_is_split() {
    for kind in BOTH {
        let n_blocks = u32::try_from(READ_SLICES_MAX).expect("small") + 3;
        let pair = Pair::start(kind, &layout(2, 1, 1, 1), n_blocks).await;
        let request = pair.request();
        let outcome = pair.pull(&request).await.expect("moves");
        pair.check(&request, &outcome);
    }
}

#[tokio::test]
async fn a_refused_slice_refuses_the_read_and_writes_nothing() {
    for kind in BOTH {
        let pair = Pair::start(kind, &layout(2, 1, 16, 8), 3).await;
        let good = pair.request();
        let mut bad = pair.request();
        bad.places[5].slice.ordinal = 3;
        let error = pair.pull(&bad).await.expect_err("no such slice");
        let TransferError::Refused(failure) = error else {
            panic!("{error}")
        };
        assert_eq!(failure.code, FailureCode::InvalidRequest);
        assert!(failure.message.contains("ordinal 3"), "{failure}");
        for block in 0..5 {
            pair.check_untouched(BlockIdx(block));
        }
        // The way to the exporter is as good as before.
        let outcome = pair.pull(&good).await.expect("moves");
        pair.check(&good, &outcome);
        pair.exporter.wait_idle().await;
    }
}

#[tokio::test]
async fn a_wrong_right_reads_nothing() {
    for kind in BOTH {
        let pair = Pair::start(kind, &layout(1, 1, 16, 8), 2).await;
        let changes: [fn(&mut PullRequest); 4] = [
            |r| r.capability = Capability(78),
            |r| r.epoch = Epoch(2),
            |r| r.request_id = RequestId(2),
            |r| r.exporter = Incarnation(7),
        ];
        for change in changes {
            let mut request = pair.request();
            change(&mut request);
            let error = pair.pull(&request).await.expect_err("no right");
            assert!(
                matches!(&error, TransferError::Refused(failure) if failure.code == FailureCode::Gone),
                "{error}"
            );
        }
        // Another importer's life.
        let arena = Arc::clone(&pair.importer);
        let stranger: Arc<dyn Transport> = match kind {
            TransportKind::Local => Arc::new(LocalTransport::new(
                Incarnation(9),
                arena,
                pair.exchange.clone(),
            )),
            TransportKind::Tcp => Arc::new(TcpTransport::new(Incarnation(9), arena, limits())),
        };
        let error = stranger
            .pull(&pair.exporter.endpoint, &pair.request())
            .await
            .expect_err("no right");
        assert_eq!(error.to_failure().code, FailureCode::Gone);
        for block in 0..4 {
            pair.check_untouched(BlockIdx(block));
        }
        pair.exporter.wait_idle().await;
    }
}

/// B045: what was announced is not what lies there.
#[tokio::test]
async fn one_changed_byte_shows_in_the_digest_of_the_copy() {
    for kind in BOTH {
        let pair = Pair::start(kind, &layout(2, 1, 16, 64), 2).await;
        let place = SliceAt {
            block: BlockIdx(1),
            group: LayerGroupIdx(1),
        };
        let announced = pair.exporter.arena.digest(place).expect("exists");
        let mut changed = bytes(&pair.exporter.arena, place);
        changed[77] ^= 1;
        pair.exporter
            .arena
            .copy_in(place, &changed)
            .expect("exists");
        let request = pair.request();
        let outcome = pair.pull(&request).await.expect("moves");
        let slice = Slice {
            ordinal: 1,
            group: place.group,
        };
        let copied = outcome.digests.iter().find(|(of, _)| *of == slice);
        assert_ne!(copied.expect("asked").1, announced);
        pair.check(&request, &outcome);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_pulls_do_not_mix() {
    for kind in BOTH {
        let pair = Arc::new(Pair::start(kind, &layout(4, 2, 16, 64), 40).await);
        let whole = pair.request();
        let pulls: Vec<_> = whole
            .places
            .chunks(4)
            .map(|places| {
                let pair = Arc::clone(&pair);
                let request = PullRequest {
                    places: places.to_vec(),
                    ..whole.clone()
                };
                tokio::spawn(async move { pair.pull(&request).await })
            })
            .collect();
        let mut outcome = PullOutcome {
            digests: Vec::new(),
            n_bytes: 0,
        };
        for pull in pulls {
            let part = pull.await.expect("no panic").expect("moves");
            outcome.digests.extend(part.digests);
            outcome.n_bytes += part.n_bytes;
        }
        pair.check(&whole, &outcome);
        pair.exporter.wait_idle().await;
    }
}

/// B041: whoever has dropped a pull may use the blocks at once, and the exporter hears of the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_pull_writes_no_more() {
    for kind in BOTH {
        let pair = Pair::start(kind, &layout(8, 16, 16, 128), 64).await;
        let request = pair.request();
        let mut n_cut = 0;
        for n_polls in [1_u32, 2, 5, 9, 20, 50] {
            let mut pull = pair.transport.pull(&pair.exporter.endpoint, &request);
            let mut polls = 0;
            let ended = std::future::poll_fn(|context| {
                polls += 1;
                match pull.as_mut().poll(context) {
                    std::task::Poll::Pending if polls >= n_polls => std::task::Poll::Ready(false),
                    other => other.map(|_| true),
                }
            })
            .await;
            drop(pull);
            n_cut += u32::from(!ended);
            for block in 0..pair.importer.n_blocks() {
                pair.importer.zero(BlockIdx(block)).expect("exists");
            }
            pair.exporter.wait_idle().await;
            for block in 0..pair.importer.n_blocks() {
                pair.check_untouched(BlockIdx(block));
            }
        }
        assert!(n_cut > 0, "{kind:?}: no pull was cut short");
        let outcome = pair.pull(&request).await.expect("moves");
        pair.check(&request, &outcome);
    }
}

#[tokio::test]
async fn an_exporter_that_is_gone_is_an_error_at_once() {
    for kind in BOTH {
        let mut pair = Pair::start(kind, &layout(1, 1, 16, 8), 2).await;
        let request = pair.request();
        pair.pull(&request).await.expect("moves");
        pair.exporter.stop().await;
        let error = pair.pull(&request).await.expect_err("gone");
        assert!(
            matches!(error, TransferError::Unreachable { .. }),
            "{error}"
        );
        assert_eq!(error.to_failure().code, FailureCode::TransferFailed);
        pair.exporter.wait_idle().await;
    }
}

#[tokio::test]
async fn an_exporting_node_that_has_ended_refuses() {
    for kind in BOTH {
        let pair = Pair::start(kind, &layout(1, 1, 16, 8), 2).await;
        pair.exporter.node.abort();
        tokio::task::yield_now().await;
        let error = pair.pull(&pair.request()).await.expect_err("no node");
        assert_eq!(error.to_failure().code, FailureCode::Unavailable, "{error}");
    }
}

/// B009: layouts that differ are found by the handshake, in words.
#[tokio::test]
async fn different_layouts_are_refused_by_name() {
    for kind in BOTH {
        let pair = Pair::start(kind, &layout(2, 2, 16, 8), 2).await;
        let other = KvArena::new(&layout(2, 1, 16, 8), 4).expect("small");
        let transport = importing(kind, &other, &pair.exchange);
        let error = transport
            .warm(&pair.exporter.endpoint, EXPORTER)
            .await
            .expect_err("differs");
        assert!(error.to_string().contains("n_kv_heads is 2"), "{error}");
        let error = transport
            .pull(&pair.exporter.endpoint, &pair.request())
            .await
            .expect_err("differs");
        assert!(error.to_string().contains("n_kv_heads is 2"), "{error}");
    }
}

#[tokio::test]
async fn a_place_that_our_pool_lacks_is_refused() {
    for kind in BOTH {
        let pair = Pair::start(kind, &layout(1, 1, 16, 8), 2).await;
        let mut request = pair.request();
        request.places[1].block = BlockIdx(99);
        let error = pair.pull(&request).await.expect_err("no such block");
        assert!(
            matches!(&error, TransferError::Place(text) if text.contains("99")),
            "{error}"
        );
        pair.exporter.wait_idle().await;
    }
}

#[tokio::test]
async fn the_best_common_transport_is_taken_and_a_fallback_counted() {
    let pair = Pair::start(TransportKind::Tcp, &layout(1, 1, 16, 8), 2).await;
    let exchange = Exchange::default();
    let transports = Transports::new(vec![
        importing(TransportKind::Local, &pair.importer, &exchange),
        Arc::clone(&pair.transport),
    ]);
    let mut request = pair.request();
    transports.pull(&request).await.expect("tcp alone");
    assert_eq!(transports.n_fallbacks(), 0);
    request.endpoints.push(Endpoint {
        transport: TransportKind::Local,
        address: "prefill-elsewhere".into(),
    });
    let outcome = transports.pull(&request).await.expect("falls back");
    pair.check(&request, &outcome);
    assert_eq!(transports.n_fallbacks(), 1);
    let kind = transports.warm(&request.endpoints, EXPORTER).await;
    assert_eq!(kind, Ok(TransportKind::Tcp));

    request.endpoints.clear();
    let error = transports
        .pull(&request)
        .await
        .expect_err("nothing offered");
    assert!(error.to_string().contains("local, tcp"), "{error}");
}
