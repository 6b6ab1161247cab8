//! A prefill node and a decode node at work in one process, with this test as their router: over in-process
//! connections and over TCP the tokens are those of one undisturbed node, whatever is cancelled meanwhile, and a
//! drain ends both with nothing left in their pools.

use std::sync::Arc;
use std::time::Duration;
use tidemill_core::{
    Clock, Incarnation, KvDtype, KvLayout, LogprobSpec, NodeId, RequestId, SamplingParams,
    SequenceSpec, StopConditions, SystemClock, TokenId, block_hashes,
};
use tidemill_decode_node::run as decode;
use tidemill_engine::executor::simulated::{SimulatedExecutor, SimulatedModel};
use tidemill_engine::intake::ModelFacts;
use tidemill_engine::scheduler::SchedulerConfig;
use tidemill_kernels::memory::KvArena;
use tidemill_kv_transfer::transport::local::Exchange;
use tidemill_prefill_node::kv_server::KvServer;
use tidemill_prefill_node::run as prefill;
use tidemill_proto::convert::id_bytes;
use tidemill_proto::pd::v1;
use tidemill_proto::pd::v1::decode_node_client::DecodeNodeClient;
use tidemill_proto::pd::v1::generate_event::Event as Generated;
use tidemill_proto::pd::v1::node_client::NodeClient;
use tidemill_proto::pd::v1::prefill_event::Event as Prefilled;
use tidemill_proto::pd::v1::prefill_node_client::PrefillNodeClient;
use tidemill_service::grpc::Fabric;
use tidemill_service::health::Admin;
use tidemill_service::node_process::Surroundings;
use tidemill_service::running_node::RunningNode;
use tokio_util::sync::CancellationToken;

const VOCAB_SIZE: u32 = 500;
const N_BLOCKS: u32 = 48;
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Local,
    Tcp,
}

struct Pair {
    fabric: Fabric,
    prefill: RunningNode,
    decode: RunningNode,
    drain: CancellationToken,
}

fn facts() -> ModelFacts {
    let mut layout = KvLayout::new([3; 32], 4, 2, 8, KvDtype::F16).expect("small");
    layout.group_layers = 2;
    ModelFacts {
        vocab_size: VOCAB_SIZE,
        context_length: 1024,
        layout,
    }
}

fn scheduler() -> SchedulerConfig {
    let mut scheduler = SchedulerConfig::for_model(&facts());
    // Small chunks: prompts take several steps.
    scheduler.max_batch_tokens = 64;
    scheduler
}

fn node_id(name: &str) -> NodeId {
    NodeId::new(name).expect("a valid name")
}

async fn pair(way: Way) -> Pair {
    let (fabric, exchange) = (Fabric::default(), Exchange::default());
    let drain = CancellationToken::new();
    let surroundings = Surroundings {
        fabric: fabric.clone(),
        clock: Arc::new(SystemClock::new()),
        admin: Admin::starting("starting"),
        drain: drain.clone(),
    };
    let listen = |name: &str| match way {
        Way::Local => format!("local:{name}"),
        Way::Tcp => "127.0.0.1:0".to_owned(),
    };
    let arena = || KvArena::new(&facts().layout, N_BLOCKS).expect("memory");
    let prefill_arena = arena();
    let prefill = prefill::start(
        prefill::Settings {
            node_id: node_id("prefill-0"),
            listen: listen("prefill-0"),
            kv: match way {
                Way::Local => KvServer::Local(exchange.clone()),
                Way::Tcp => KvServer::Tcp("127.0.0.1:0".to_owned()),
            },
            model_name: "simulated".into(),
            text_fingerprint: [0; 32],
            facts: facts(),
            scheduler: scheduler(),
        },
        prefill::Parts {
            executor: Box::new(SimulatedExecutor::new(
                Arc::clone(&prefill_arena),
                VOCAB_SIZE,
            )),
            arena: prefill_arena,
            surroundings: surroundings.clone(),
        },
    );
    let decode_arena = arena();
    let decode = decode::start(
        decode::Settings {
            node_id: node_id("decode-0"),
            listen: listen("decode-0"),
            exchange: (way == Way::Local).then(|| exchange.clone()),
            model_name: "simulated".into(),
            text_fingerprint: [0; 32],
            facts: facts(),
            scheduler: scheduler(),
        },
        decode::Parts {
            executor: Box::new(SimulatedExecutor::new(
                Arc::clone(&decode_arena),
                VOCAB_SIZE,
            )),
            arena: decode_arena,
            surroundings: surroundings.clone(),
        },
    );
    Pair {
        fabric,
        prefill: prefill.await.expect("starts"),
        decode: decode.await.expect("starts"),
        drain,
    }
}

fn spec(n_prompt: u32, max_tokens: u32, salt: u32) -> SequenceSpec {
    // Prompts share their first 40 tokens, so that prefixes are found on both sides.
    let prompt: Vec<TokenId> = (0..n_prompt)
        .map(|i| (i * 7 + if i < 40 { 0 } else { salt }) % VOCAB_SIZE)
        .collect();
    SequenceSpec {
        request_id: RequestId::random(),
        block_hashes: block_hashes(&facts().layout.model_fingerprint, "", &prompt),
        prompt,
        emitted: Vec::new(),
        namespace: String::new(),
        sampling: SamplingParams {
            temperature: 0.8,
            top_k: 0,
            top_p: 0.95,
            seed: u64::from(salt),
            ..SamplingParams::greedy()
        },
        stop: StopConditions {
            max_tokens,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
        },
        logprobs: LogprobSpec::default(),
        deadline: SystemClock::new().now().plus_us(60_000_000),
        traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into(),
    }
}

fn reference(spec: &SequenceSpec) -> Vec<TokenId> {
    SimulatedModel::new(facts().layout, VOCAB_SIZE).reference(
        &spec.prompt,
        &spec.sampling,
        spec.stop.max_tokens,
    )
}

/// What went wrong, in a peer's words.
type Trouble = String;

async fn next_prefilled(
    events: &mut tonic::Streaming<v1::PrefillEvent>,
) -> Result<Prefilled, Trouble> {
    let event = events.message().await.map_err(|s| s.to_string())?;
    match event.and_then(|event| event.event) {
        Some(Prefilled::Failed(failure)) => Err(failure.message),
        Some(event) => Ok(event),
        None => Err("the prefill was lost".into()),
    }
}

async fn first_token(events: &mut tonic::Streaming<v1::PrefillEvent>) -> Result<TokenId, Trouble> {
    match next_prefilled(events).await? {
        Prefilled::FirstToken(first) => Ok(first.token.ok_or("no token")?.token),
        other => Err(format!("unexpected: {other:?}")),
    }
}

impl Pair {
    /// Plays the router for one request: prefill, hand-off, decode.
    async fn ask(&self, spec: &SequenceSpec) -> Result<Vec<TokenId>, Trouble> {
        let channel = self.fabric.connect(self.prefill.address());
        let mut prefill = PrefillNodeClient::new(channel.expect("an address"));
        let request = v1::PrefillRequest {
            spec: Some(spec.into()),
            expected_incarnation: id_bytes(self.prefill.incarnation().0),
        };
        let answer = prefill.prefill(request).await;
        let mut events = answer.map_err(|s| s.to_string())?.into_inner();
        match next_prefilled(&mut events).await? {
            Prefilled::Handle(handle) => {
                // Decode pulls while prefill computes.
                let generate = self.generate(spec, Some(handle));
                let (first, decoded) = tokio::join!(first_token(&mut events), generate);
                let (first, (told_first, rest)) = (first?, decoded?);
                assert_eq!(told_first, Some(first), "both sides tell the same");
                Ok(std::iter::once(first).chain(rest).collect())
            }
            Prefilled::FirstToken(first) => {
                let token = first.token.ok_or("a first token was asked for")?;
                Ok(vec![token.token])
            }
            other => Err(format!("unexpected: {other:?}")),
        }
    }

    /// The first token as told by the import, and the tokens after it.
    async fn generate(
        &self,
        spec: &SequenceSpec,
        handle: Option<v1::KvHandle>,
    ) -> Result<(Option<TokenId>, Vec<TokenId>), Trouble> {
        let channel = self.fabric.connect(self.decode.address());
        let mut decode = DecodeNodeClient::new(channel.expect("an address"));
        let request = v1::GenerateRequest {
            spec: Some(spec.into()),
            handle,
            expected_incarnation: id_bytes(self.decode.incarnation().0),
        };
        let answer = decode.generate(request).await;
        let mut events = answer.map_err(|s| s.to_string())?.into_inner();
        let (mut first, mut tokens) = (None, Vec::new());
        loop {
            let event = events.message().await.map_err(|s| s.to_string())?;
            match event.and_then(|event| event.event) {
                Some(Generated::KvReady(ready)) => first = ready.first_token.map(|t| t.token),
                Some(Generated::Token(token)) => tokens.push(token.token),
                Some(Generated::Finished(_)) => return Ok((first, tokens)),
                Some(Generated::Failed(failure)) => return Err(failure.message),
                Some(Generated::Accepted(_) | Generated::PromptLogprobs(_)) => {}
                None => return Err("the generation was lost".into()),
            }
        }
    }

    async fn cancel(&self, node: &RunningNode, request_id: RequestId) {
        let channel = self.fabric.connect(node.address()).expect("an address");
        let request = v1::CancelRequest {
            request_id: id_bytes(request_id.0),
            expected_incarnation: id_bytes(node.incarnation().0),
        };
        let cancelled = NodeClient::new(channel).cancel(request).await;
        cancelled.expect("a cancel is always taken");
    }

    /// Waits until a node holds no block; the load report is what everybody else sees.
    async fn wait_until_empty(&self, node: &RunningNode) {
        let channel = self.fabric.connect(node.address()).expect("an address");
        let watched = NodeClient::new(channel)
            .watch_load(v1::WatchLoadRequest {})
            .await;
        let mut reports = watched.expect("watched").into_inner();
        let empty = async {
            loop {
                let report = reports.message().await.expect("alive").expect("alive");
                if report.n_blocks_free == N_BLOCKS && report.n_running + report.n_waiting == 0 {
                    return;
                }
            }
        };
        let waited = tokio::time::timeout(PATIENCE, empty).await;
        waited.expect("every block is given back");
    }

    /// Both pools are idle: a drain proves it, since a node with anything left does not end.
    async fn drain(self) {
        self.wait_until_empty(&self.prefill).await;
        self.wait_until_empty(&self.decode).await;
        self.drain.cancel();
        for node in [self.prefill, self.decode] {
            let ended = tokio::time::timeout(PATIENCE, node.ended()).await;
            ended.expect("it ends").expect("well");
        }
    }
}

async fn split_equals_whole(way: Way) {
    let pair = Arc::new(pair(way).await);
    let sizes = [(1, 8), (15, 5), (16, 1), (17, 20), (40, 12), (150, 9)];
    let mut asked = Vec::new();
    for round in 0..4 {
        for (idx, (n_prompt, max_tokens)) in sizes.into_iter().enumerate() {
            let salt = round * 10 + u32::try_from(idx).expect("small");
            let (pair, spec) = (Arc::clone(&pair), spec(n_prompt, max_tokens, salt));
            asked.push(tokio::spawn(async move {
                let tokens = pair.ask(&spec).await;
                assert_eq!(tokens, Ok(reference(&spec)), "{n_prompt} prompt tokens");
            }));
        }
    }
    for request in asked {
        let answered = tokio::time::timeout(PATIENCE, request).await;
        answered.expect("in time").expect("as the reference");
    }
    Arc::into_inner(pair).expect("all are done").drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn split_equals_whole_within_one_process() {
    split_equals_whole(Way::Local).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn split_equals_whole_over_tcp() {
    split_equals_whole(Way::Tcp).await;
}

async fn cancels_leave_nothing(way: Way) {
    let pair = Arc::new(pair(way).await);
    let mut asked = Vec::new();
    for salt in 0..24 {
        let (pair, spec) = (Arc::clone(&pair), spec(60 + salt * 5, 200, salt));
        asked.push(tokio::spawn(async move {
            // Each is given up at another moment: by messages, or by a reader that just leaves.
            let until = Duration::from_micros(u64::from(salt) * 900);
            let answer = tokio::time::timeout(until, pair.ask(&spec)).await;
            if let Ok(Ok(tokens)) = answer {
                assert_eq!(tokens, reference(&spec));
            }
            pair.cancel(&pair.prefill, spec.request_id).await;
            if salt % 2 == 0 {
                pair.cancel(&pair.decode, spec.request_id).await;
            }
        }));
    }
    for request in asked {
        request.await.expect("nothing panics");
    }
    let spec = spec(70, 10, 99);
    assert_eq!(pair.ask(&spec).await, Ok(reference(&spec)), "still at work");
    Arc::into_inner(pair).expect("all are done").drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancels_leave_nothing_within_one_process() {
    cancels_leave_nothing(Way::Local).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancels_leave_nothing_over_tcp() {
    cancels_leave_nothing(Way::Tcp).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_node_alone_gives_the_same_tokens_and_resumes() {
    let pair = pair(Way::Local).await;
    let mut spec = spec(50, 20, 5);
    let whole = reference(&spec);
    let alone = pair.generate(&spec, None).await;
    assert_eq!(alone, Ok((None, whole.clone())));
    spec.request_id = RequestId::random();
    spec.emitted = whole[..7].to_vec();
    let resumed = pair.generate(&spec, None).await;
    assert_eq!(resumed, Ok((None, whole[7..].to_vec())));
    // The same through a prefill node that is given what was emitted.
    spec.request_id = RequestId::random();
    assert_eq!(pair.ask(&spec).await, Ok(whole[7..].to_vec()));
    pair.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_prefill_node_is_a_failure_and_the_decode_node_lives_on() {
    let Pair {
        fabric,
        prefill,
        decode,
        drain,
    } = pair(Way::Tcp).await;
    let spec = spec(60, 30, 3);
    let handle = {
        let channel = fabric.connect(prefill.address()).expect("an address");
        let request = v1::PrefillRequest {
            spec: Some((&spec).into()),
            expected_incarnation: id_bytes(prefill.incarnation().0),
        };
        let answer = PrefillNodeClient::new(channel).prefill(request).await;
        let mut events = answer.expect("taken").into_inner();
        let first = events.message().await.expect("alive").expect("alive");
        match first.event {
            Some(Prefilled::Handle(handle)) => handle,
            other => panic!("expected a handle, got {other:?}"),
        }
    };
    drop(prefill);
    // Let the crash happen before the hand-off begins.
    tokio::time::sleep(Duration::from_millis(50)).await;
    let survivor = Pair {
        fabric: fabric.clone(),
        // A node that is never asked: the type wants one.
        prefill: pair(Way::Local).await.prefill,
        decode,
        drain,
    };
    let lost = survivor.generate(&spec, Some(handle)).await;
    lost.expect_err("nobody lends the KV");
    let mut again = spec.clone();
    again.request_id = RequestId::random();
    let alone = survivor.generate(&again, None).await;
    assert_eq!(alone, Ok((None, reference(&again))));
    survivor.wait_until_empty(&survivor.decode).await;
    survivor.drain.cancel();
    let ended = tokio::time::timeout(PATIENCE, survivor.decode.ended()).await;
    ended.expect("it ends").expect("well");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_for_another_life_is_refused() {
    let pair = pair(Way::Local).await;
    let spec = spec(20, 4, 1);
    let channel = pair.fabric.connect(pair.decode.address()).expect("address");
    let request = v1::GenerateRequest {
        spec: Some((&spec).into()),
        handle: None,
        expected_incarnation: id_bytes(Incarnation::random().0),
    };
    let answer = DecodeNodeClient::new(channel).generate(request).await;
    let mut events = answer.expect("a stream").into_inner();
    let event = events.message().await.expect("alive").and_then(|e| e.event);
    assert!(matches!(event, Some(Generated::Failed(failure)) if failure.code == "gone"));
    pair.drain().await;
}
