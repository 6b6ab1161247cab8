//! The driver against scripted nodes over in-process connections: real streams, real cancels, real bookings.

use super::*;
use crate::placement::SplitPolicy;
use crate::requests::{Answer, Answers, Job};
use futures::Stream;
use futures::stream::{self, StreamExt};
use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Mutex;
use tidemill_core::{
    Failure, FailureCode, Incarnation, LoadReport, LogprobSpec, NodeId, Role, SamplingParams,
    StopConditions, SystemClock,
};
use tidemill_proto::convert::{NodeDescription, id_bytes};
use tidemill_proto::pd::v1;
use tidemill_proto::pd::v1::decode_node_server::{DecodeNode, DecodeNodeServer};
use tidemill_proto::pd::v1::prefill_node_server::{PrefillNode, PrefillNodeServer};
use tidemill_service::discovery::{LocalDiscovery, NodeEntry};
use tidemill_service::grpc;
use tidemill_service::node_service::NodeService;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tonic::{Request as Call, Response, Status};

/// How a scripted node behaves.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Manner {
    /// Does all that is asked.
    Well,
    /// Ends its stream without a last word, after so many tokens.
    BreaksAfter(u32),
    /// Says nothing more after its first word.
    Hangs,
}

/// A node of either role whose output token is always its index plus 100.
#[derive(Clone)]
struct Script {
    node_id: String,
    incarnation: u128,
    manner: Manner,
}

type Wire<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn token(output_idx: u32) -> v1::SampledToken {
    v1::SampledToken {
        token: 100 + output_idx,
        output_idx,
        ..Default::default()
    }
}

/// The given events, then silence for ever when `hangs`.
fn replies<T: Send + 'static>(events: Vec<T>, hangs: bool) -> Response<Wire<T>> {
    let events = stream::iter(events.into_iter().map(Ok));
    let rest = if hangs {
        stream::pending().left_stream()
    } else {
        stream::empty().right_stream()
    };
    Response::new(Box::pin(events.chain(rest)))
}

#[tonic::async_trait]
impl PrefillNode for Script {
    type PrefillStream = Wire<v1::PrefillEvent>;

    async fn prefill(
        &self,
        call: Call<v1::PrefillRequest>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        use v1::prefill_event::Event;
        let spec = call.into_inner().spec.expect("a spec");
        let n_base = u32::try_from(spec.emitted.len()).expect("small");
        let is_last = spec.stop.expect("stop").max_tokens <= n_base + 1;
        let handle = v1::KvHandle {
            request_id: spec.request_id.clone(),
            node_id: self.node_id.clone(),
            incarnation: id_bytes(self.incarnation),
            capability: id_bytes(5),
            epoch: 1,
            n_tokens: u32::try_from(spec.prompt.len()).expect("small") + n_base,
            layout_fingerprint: vec![0; 16],
            control_address: format!("local:{}", self.node_id),
            endpoints: vec![],
            expires_at_us: u64::MAX,
        };
        let first = v1::FirstToken {
            token: Some(token(n_base)),
            n_computed_tokens: 3,
            finish: if is_last {
                v1::FinishReason::Length
            } else {
                v1::FinishReason::Unspecified
            }
            .into(),
            ..Default::default()
        };
        let mut events = Vec::new();
        if !is_last {
            events.push(Event::Handle(handle));
        }
        if self.manner == Manner::Well {
            events.push(Event::FirstToken(first));
        }
        let events = events
            .into_iter()
            .map(|event| v1::PrefillEvent { event: Some(event) });
        Ok(replies(events.collect(), self.manner == Manner::Hangs))
    }

    async fn rebind(
        &self,
        _call: Call<v1::RebindRequest>,
    ) -> Result<Response<v1::RebindReply>, Status> {
        Ok(Response::new(v1::RebindReply { failed: None }))
    }
}

#[tonic::async_trait]
impl DecodeNode for Script {
    type GenerateStream = Wire<v1::GenerateEvent>;

    async fn generate(
        &self,
        call: Call<v1::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        use v1::generate_event::Event;
        let request = call.into_inner();
        let spec = request.spec.expect("a spec");
        let max_tokens = spec.stop.expect("stop").max_tokens;
        let mut next = u32::try_from(spec.emitted.len()).expect("small");
        let mut events = vec![Event::Accepted(v1::Accepted {})];
        if request.handle.is_some() {
            events.push(Event::KvReady(v1::KvReady {
                first_token: Some(token(next)),
                bytes_moved: 9,
                n_local_tokens: 0,
            }));
            next += 1;
        }
        let n_max = match self.manner {
            Manner::Well => u32::MAX,
            Manner::BreaksAfter(n) => n,
            Manner::Hangs => 1,
        };
        events.extend(
            (next..max_tokens)
                .take(n_max as usize)
                .map(|i| Event::Token(token(i))),
        );
        if self.manner == Manner::Well {
            events.push(Event::Finished(v1::Finished {
                reason: v1::FinishReason::Length.into(),
                n_output_tokens: max_tokens,
                ..Default::default()
            }));
        }
        let events = events
            .into_iter()
            .map(|event| v1::GenerateEvent { event: Some(event) });
        Ok(replies(events.collect(), self.manner == Manner::Hangs))
    }
}

/// A router without HTTP, and its nodes.
struct House {
    shared: Arc<Shared>,
    requests: Requests,
    admission: Arc<Admission>,
    admin: Admin,
    fabric: Fabric,
    discovery: LocalDiscovery,
    /// Cancels that each node has heard.
    cancels: Arc<Mutex<BTreeMap<String, usize>>>,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for House {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl House {
    fn new(dispatch: DispatchConfig) -> Self {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
        let membership = Membership::new(MembershipConfig {
            text_fingerprint: [0; 32],
            split: dispatch.split,
        });
        let (fabric, admin) = (Fabric::default(), Admin::starting("no node is known yet"));
        let shared = Arc::new(Shared {
            members: Arc::new(Members::new(membership, Arc::clone(&clock))),
            calls: Arc::new(NodeCalls::new(fabric.clone())),
            clock,
            metrics: admin.register(Metrics::new),
            dispatch,
            tasks: TaskTracker::new(),
        });
        let admission = Arc::new(Admission::new(4, 0));
        let (requests, submissions) = Requests::new(Arc::clone(&admission));
        let (members, calls) = (Arc::clone(&shared.members), Arc::clone(&shared.calls));
        let (member_loop, events) = MemberLoop::new(members, calls, admin.clone());
        let discovery = LocalDiscovery::default();
        let tasks = vec![
            tokio::spawn(member_loop.run(Arc::new(discovery.clone()), events)),
            tokio::spawn(serve_submissions(Arc::clone(&shared), submissions)),
        ];
        Self {
            shared,
            requests,
            admission,
            admin,
            fabric,
            discovery,
            cancels: Arc::default(),
            tasks,
        }
    }

    async fn with_nodes(dispatch: DispatchConfig, nodes: &[(&str, Role, Manner)]) -> Self {
        let mut house = Self::new(dispatch);
        for (name, role, manner) in nodes {
            house.add(name, *role, *manner).await;
        }
        let is_there = || house.shared.members.candidates().len() == nodes.len();
        within_a_second(is_there).await;
        house
    }

    async fn add(&mut self, name: &str, role: Role, manner: Manner) {
        let node_id = NodeId::new(name).expect("valid");
        let incarnation = Incarnation(name.len() as u128);
        let script = Script {
            node_id: name.to_owned(),
            incarnation: incarnation.0,
            manner,
        };
        let (report, load) = watch::channel(LoadReport {
            node_id: node_id.clone(),
            incarnation,
            role,
            sequence_number: 1,
            n_waiting: 0,
            n_running: 0,
            queued_tokens: 0,
            n_blocks: 100,
            n_blocks_free: 100,
            n_blocks_leased: 0,
            draining: false,
        });
        let description = NodeDescription {
            node_id,
            incarnation,
            role,
            model_name: "m".into(),
            model_fingerprint: [1; 32],
            text_fingerprint: [0; 32],
            layout_fingerprint: [0; 16],
            protocol_revision: tidemill_core::kv_layout::PROTOCOL_REVISION,
            vocab_size: 1000,
            context_length: 100,
            endpoints: vec![],
            version: "0".into(),
        };
        let (cancels, mut heard) = mpsc::channel(16);
        let address = format!("local:{name}");
        let listener = self.fabric.bind(&address).await.expect("free");
        let routes = grpc::server()
            .add_service(NodeService::new(description, load, cancels))
            .add_service(PrefillNodeServer::new(script.clone()))
            .add_service(DecodeNodeServer::new(script));
        self.tasks.push(tokio::spawn(async move {
            let _report = report;
            let _ = grpc::serve(listener, routes, std::future::pending()).await;
        }));
        let (counts, name) = (Arc::clone(&self.cancels), name.to_owned());
        self.tasks.push(tokio::spawn(async move {
            while heard.recv().await.is_some() {
                *counts
                    .lock()
                    .expect("no panic")
                    .entry(name.clone())
                    .or_default() += 1;
            }
        }));
        self.discovery.register(NodeEntry { role, address });
    }

    fn submit(&self, max_tokens: u32) -> Answers {
        let job = Job {
            prompt: vec![1, 2, 3],
            namespace: String::new(),
            sampling: SamplingParams::greedy(),
            stop: StopConditions {
                max_tokens,
                min_tokens: 0,
                stop_token_ids: vec![],
            },
            logprobs: LogprobSpec::default(),
            deadline: self.shared.clock.now().plus_us(20_000_000),
            traceparent: String::new(),
        };
        self.requests.submit(job).expect("a permit")
    }

    fn cancels(&self) -> Vec<(String, usize)> {
        let cancels = self.cancels.lock().expect("no panic");
        cancels.iter().map(|(name, n)| (name.clone(), *n)).collect()
    }

    fn n_booked(&self) -> usize {
        self.shared.members.n_booked()
    }

    /// Everything that a request takes is back.
    async fn is_idle(&self) {
        within_a_second(|| self.admission.n_taken() == 0 && self.n_booked() == 0).await;
    }
}

async fn within_a_second(holds: impl Fn() -> bool) {
    for _ in 0..500 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("it did not come true in time");
}

async fn all(mut answers: Answers) -> (Vec<u32>, Answer) {
    let mut tokens = Vec::new();
    while let Some(answer) = answers.next().await {
        match answer {
            Answer::Token(token) => tokens.push(token.token),
            end => {
                assert!(answers.next().await.is_none(), "something after the end");
                return (tokens, end);
            }
        }
    }
    panic!("an end without a last answer");
}

fn failure(end: &Answer) -> &Failure {
    match end {
        Answer::Failed(failure) => failure,
        other => panic!("no failure but {other:?}"),
    }
}

#[tokio::test]
async fn a_split_request_runs_over_the_wire_and_leaves_nothing() {
    let nodes = [
        ("p0", Role::Prefill, Manner::Well),
        ("d0", Role::Decode, Manner::Well),
    ];
    let house = House::with_nodes(DispatchConfig::default(), &nodes).await;
    within_a_second(|| house.admin.missing().is_none()).await;
    let (tokens, end) = all(house.submit(5)).await;
    assert_eq!(tokens, [100, 101, 102, 103, 104]);
    assert!(matches!(end, Answer::Finished(_)), "{end:?}");
    house.is_idle().await;
    assert_eq!(house.cancels(), []);
}

#[tokio::test]
async fn one_token_needs_the_prefill_node_only() {
    let nodes = [
        ("p0", Role::Prefill, Manner::Well),
        ("d0", Role::Decode, Manner::Well),
    ];
    let house = House::with_nodes(DispatchConfig::default(), &nodes).await;
    let (tokens, end) = all(house.submit(1)).await;
    assert_eq!(tokens, [100]);
    assert!(matches!(end, Answer::Finished(_)), "{end:?}");
    house.is_idle().await;
}

#[tokio::test]
async fn a_decode_node_that_breaks_midway_is_replaced_without_a_gap() {
    let nodes = [
        ("p0", Role::Prefill, Manner::Well),
        ("d0", Role::Decode, Manner::BreaksAfter(2)),
        ("d1", Role::Decode, Manner::Well),
    ];
    let house = House::with_nodes(DispatchConfig::default(), &nodes).await;
    let (tokens, end) = all(house.submit(8)).await;
    assert_eq!(tokens, (100..108).collect::<Vec<_>>());
    assert!(matches!(end, Answer::Finished(_)), "{end:?}");
    house.is_idle().await;
    assert_eq!(house.cancels(), [("d0".into(), 1), ("p0".into(), 1)]);
}

#[tokio::test]
async fn a_decode_node_that_breaks_at_once_is_taken_over() {
    let nodes = [
        ("p0", Role::Prefill, Manner::Well),
        ("d0", Role::Decode, Manner::BreaksAfter(0)),
        ("d1", Role::Decode, Manner::Well),
    ];
    let house = House::with_nodes(DispatchConfig::default(), &nodes).await;
    let (tokens, end) = all(house.submit(4)).await;
    assert_eq!(tokens, (100..104).collect::<Vec<_>>());
    assert!(matches!(end, Answer::Finished(_)), "{end:?}");
    house.is_idle().await;
    assert_eq!(house.cancels(), [("d0".into(), 1)]);
}

#[tokio::test]
async fn a_client_that_leaves_is_heard_by_both_nodes_once() {
    let nodes = [
        ("p0", Role::Prefill, Manner::Well),
        ("d0", Role::Decode, Manner::Hangs),
    ];
    let house = House::with_nodes(DispatchConfig::default(), &nodes).await;
    let mut answers = house.submit(9);
    for _ in 0..2 {
        assert!(matches!(answers.next().await, Some(Answer::Token(_))));
    }
    drop(answers);
    house.is_idle().await;
    assert_eq!(house.cancels(), [("d0".into(), 1), ("p0".into(), 1)]);
}

#[tokio::test]
async fn a_node_that_stands_still_is_left_after_the_gap_bound() {
    let nodes = [
        ("p0", Role::Prefill, Manner::Well),
        ("d0", Role::Decode, Manner::Hangs),
        ("d1", Role::Decode, Manner::Well),
    ];
    let config = DispatchConfig {
        gap_us_max: 200_000,
        ..DispatchConfig::default()
    };
    let house = House::with_nodes(config, &nodes).await;
    let (tokens, end) = all(house.submit(5)).await;
    assert_eq!(tokens, (100..105).collect::<Vec<_>>());
    assert!(matches!(end, Answer::Finished(_)), "{end:?}");
    house.is_idle().await;
}

#[tokio::test]
async fn without_nodes_the_answer_is_unavailable_at_once_and_the_reason_is_shown() {
    let config = DispatchConfig {
        split: SplitPolicy::Require,
        ..DispatchConfig::default()
    };
    let house = House::with_nodes(config, &[]).await;
    within_a_second(|| house.admin.missing().is_some()).await;
    let (tokens, end) = all(house.submit(5)).await;
    assert!(tokens.is_empty());
    assert_eq!(failure(&end).code, FailureCode::Unavailable);
    house.is_idle().await;
}

#[tokio::test]
async fn nodes_that_come_later_are_used_and_broken_streams_leave_no_load() {
    let mut house = House::with_nodes(DispatchConfig::default(), &[]).await;
    assert!(house.admin.missing().is_some());
    house.add("p0", Role::Prefill, Manner::Well).await;
    house.add("d0", Role::Decode, Manner::BreaksAfter(1)).await;
    within_a_second(|| house.admin.missing().is_none()).await;
    for _ in 0..20 {
        let (_, end) = all(house.submit(6)).await;
        assert_eq!(failure(&end).code, FailureCode::Unavailable);
    }
    house.is_idle().await;
}

async fn ask(address: std::net::SocketAddr, request: &str) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::TcpStream::connect(address)
        .await
        .expect("listening");
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut answer = String::new();
    stream
        .read_to_string(&mut answer)
        .await
        .expect("an answer to its end");
    answer
}

#[tokio::test]
async fn a_router_without_nodes_starts_answers_503_and_drains() {
    let path = std::env::temp_dir().join(format!("tidemill-router-{}.gguf", std::process::id()));
    let spec = tidemill_model_files::testing::TinySpec::default();
    tidemill_model_files::testing::write_gguf(&path, &spec).expect("written");
    let model = tidemill_model_files::open_text(&path).expect("opens");
    std::fs::remove_file(&path).expect("just written");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("free");
    let address = listener.local_addr().expect("bound");
    let admin = Admin::starting("no node is known yet");
    let config = RouterConfig {
        listener,
        model_name: "tiny".into(),
        dispatch: DispatchConfig::default(),
        n_requests_max: 4,
        n_queue_max: 0,
        admin: admin.clone(),
    };
    let surroundings = Surroundings {
        fabric: Fabric::default(),
        discovery: Arc::new(LocalDiscovery::default()),
        clock: Arc::new(SystemClock::new()),
    };
    let shutdown = CancellationToken::new();
    let router = tokio::spawn(run(config, Arc::new(model), surroundings, shutdown.clone()));
    let body = r#"{"model":"tiny","prompt":"a","max_tokens":4}"#;
    let answer = ask(
        address,
        &format!(
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        ),
    )
    .await;
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    assert!(
        answer.to_ascii_lowercase().contains("\r\nretry-after:"),
        "{answer}"
    );
    assert!(answer.contains("no usable prefill node"), "{answer}");
    shutdown.cancel();
    let ended = tokio::time::timeout(Duration::from_secs(5), router).await;
    ended
        .expect("drains in time")
        .expect("no panic")
        .expect("a good end");
    assert_eq!(admin.missing().as_deref(), Some("the router is leaving"));
}
