//! The prefill node's loop: everything that awaits. It selects what happened, applies it to the pure core and
//! does what the core asks for: compute on the compute thread, digests on the digest thread, answers into
//! bounded streams. It never waits for any of them, and a reader that does not keep up is a reader that left.

use crate::digester::{Digester, Job};
use crate::kv_server::{KvServer, RunningKvServer};
use crate::node::{Effect, Event, Node, NodeConfig, PrefillEvent};
use crate::rpc::Service;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use tidemill_core::kv_layout::PROTOCOL_REVISION;
use tidemill_core::{
    CallId, Capability, Clock, Failure, Incarnation, NodeId, RequestId, Role, Timestamp,
};
use tidemill_engine::executor::Executor;
use tidemill_engine::intake::ModelFacts;
use tidemill_engine::scheduler::SchedulerConfig;
use tidemill_engine::worker::{Report, Worker};
use tidemill_kernels::memory::KvArena;
use tidemill_kv_transfer::export::ExportEvent;
use tidemill_kv_transfer::transport::gate::{ReadCall, ReadReply};
use tidemill_proto::convert::NodeDescription;
use tidemill_service::grpc::{self, AddressError};
use tidemill_service::inbox::{BATCH_MAX, Happening, Inbox, InboxSenders};
use tidemill_service::load_board::LoadBoard;
use tidemill_service::node_process::Surroundings;
use tidemill_service::node_service::NodeService;
use tidemill_service::running_node::RunningNode;
use tidemill_service::streams::{CallIds, Streams};
use tokio::sync::{mpsc, oneshot};

/// What distinguishes this node from others.
pub struct Settings {
    /// Its name.
    pub node_id: NodeId,
    /// Where its control service listens: `host:port` or `local:NAME`.
    pub listen: String,
    /// How it lends its blocks.
    pub kv: KvServer,
    /// The name under which clients ask for the model.
    pub model_name: String,
    /// Vocabulary and template: what router and node must share.
    pub text_fingerprint: [u8; 32],
    /// The model that it serves.
    pub facts: ModelFacts,
    /// Bounds of a step and of the queue.
    pub scheduler: SchedulerConfig,
}

/// What a node is made of; nothing here is made by the node itself.
pub struct Parts {
    /// Computes steps over `arena`.
    pub executor: Box<dyn Executor>,
    /// Its block memory.
    pub arena: Arc<KvArena>,
    /// What it finds around it.
    pub surroundings: Surroundings,
}

/// An event, and where its answer goes; the answer is addressed to the call that the event names.
pub enum Input {
    /// Nobody waits.
    Event(Event),
    /// A prefill stream.
    Prefill(CallId, Event, mpsc::Sender<PrefillEvent>),
    /// A claim's stream.
    Claim(CallId, Event, mpsc::Sender<ExportEvent>),
    /// A renewal: leases that are gone, and when the others end.
    Renew(CallId, Event, oneshot::Sender<(Vec<RequestId>, Timestamp)>),
    /// A rebind.
    Rebind(CallId, Event, oneshot::Sender<Result<(), Failure>>),
    /// A transport that wants to read, or has read.
    Read(ReadCall),
}

/// Why a node could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An address is malformed or taken.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// The operating system gives no thread.
    #[error("a thread of the node cannot be started")]
    Thread(#[source] std::io::Error),
    /// The address of the KV server is malformed or taken.
    #[error("--kv-listen {address:?} cannot be bound; choose another or end its owner")]
    KvListen {
        /// The address.
        address: String,
        /// The operating system's reason.
        source: std::io::Error,
    },
}

/// Starts a node; it takes work once this returns.
///
/// # Errors
/// When an address cannot be bound or a thread cannot be started.
pub async fn start(settings: Settings, parts: Parts) -> Result<RunningNode, StartError> {
    let incarnation = Incarnation::random();
    let Surroundings {
        fabric,
        clock,
        admin,
        drain,
    } = parts.surroundings;
    let listener = fabric.bind(&settings.listen).await?;
    let (senders, inbox) = Inbox::new(drain);
    let calls = Arc::new(CallIds::default());
    let kv_server = settings
        .kv
        .start(
            &settings.node_id,
            incarnation,
            Arc::clone(&parts.arena),
            senders.reports.clone(),
        )
        .await?;
    let endpoints = kv_server.endpoints.clone();
    let description = NodeDescription {
        node_id: settings.node_id.clone(),
        incarnation,
        role: Role::Prefill,
        model_name: settings.model_name,
        model_fingerprint: settings.facts.layout.model_fingerprint,
        text_fingerprint: settings.text_fingerprint,
        layout_fingerprint: settings.facts.layout.fingerprint(),
        protocol_revision: PROTOCOL_REVISION,
        vocab_size: settings.facts.vocab_size,
        context_length: settings.facts.context_length,
        endpoints: endpoints.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    let mut node = Node::new(NodeConfig {
        node_id: settings.node_id.clone(),
        incarnation,
        facts: settings.facts,
        n_blocks: parts.arena.n_blocks(),
        scheduler: settings.scheduler,
        control_address: listener.address().to_owned(),
        endpoints,
        draw_capability: Box::new(Capability::random),
    });
    let worker = start_worker(&settings.node_id, parts.executor, &senders)?;
    let digester = start_digester(&settings.node_id, parts.arena, &senders)?;
    let (load, board) = LoadBoard::new(node.load_report(), &admin, clock.now());
    let (prefill, export) = Service::new(senders.inputs, Arc::clone(&calls)).servers();
    let routes = grpc::server()
        .add_service(NodeService::new(description, load, senders.cancels))
        .add_service(prefill)
        .add_service(export);
    let turn = Loop {
        node,
        inbox,
        worker,
        digester,
        board,
        clock,
        calls,
        answers: Answers::default(),
        kv_server,
    };
    let name = settings.node_id;
    tracing::info!(node_id = %name, %incarnation, address = listener.address(), "prefill node starts");
    Ok(RunningNode::start(
        incarnation,
        listener,
        routes,
        admin,
        turn.run(),
    ))
}

fn start_worker(
    node_id: &NodeId,
    executor: Box<dyn Executor>,
    senders: &InboxSenders<Input>,
) -> Result<Worker, StartError> {
    let reports = senders.reports.clone();
    let report = move |report| match report {
        // Only a hint: the compute thread waits for nobody.
        Report::Layers(progress) => {
            let _ = reports.try_send(Input::Event(Event::LayersDone(progress)));
        }
        // An ended loop needs no result.
        Report::Step { step_id, result } => {
            let _ = reports.blocking_send(Input::Event(Event::StepDone { step_id, result }));
        }
    };
    Worker::start(&format!("{node_id}-compute"), executor, report).map_err(StartError::Thread)
}

fn start_digester(
    node_id: &NodeId,
    arena: Arc<KvArena>,
    senders: &InboxSenders<Input>,
) -> Result<Digester, StartError> {
    let reports = senders.reports.clone();
    let report = move |digested| {
        // An ended loop needs no digest.
        let _ = reports.blocking_send(Input::Event(digested));
    };
    Digester::start(&format!("{node_id}-digest"), arena, report).map_err(StartError::Thread)
}

/// The streams and questions that wait for an answer.
#[derive(Default)]
struct Answers {
    prefills: Streams<PrefillEvent>,
    exports: Streams<ExportEvent>,
    renewals: HashMap<CallId, oneshot::Sender<(Vec<RequestId>, Timestamp)>>,
    rebinds: HashMap<CallId, oneshot::Sender<Result<(), Failure>>>,
    reads: HashMap<CallId, ReadReply>,
}

/// The one owner of a node at work.
struct Loop {
    node: Node,
    inbox: Inbox<Input>,
    worker: Worker,
    digester: Digester,
    board: LoadBoard,
    clock: Arc<dyn Clock>,
    calls: Arc<CallIds>,
    answers: Answers,
    kv_server: RunningKvServer,
}

impl Loop {
    /// Turns until the node is drained.
    async fn run(mut self) -> Result<(), String> {
        loop {
            let wait = self
                .board
                .wait_until(self.node.next_wakeup(), self.clock.now());
            let mut happening = Some(self.inbox.next(wait).await);
            for _ in 0..BATCH_MAX {
                let Some(happened) = happening else { break };
                self.take(happened);
                happening = self.inbox.try_next();
            }
            let now = self.clock.now();
            let effects = self.node.maintain(now);
            self.carry_out(effects, now);
            self.digester.flush()?;
            self.kv_server.check()?;
            if self.board.is_due(now) {
                self.board.publish(self.node.load_report(), now);
                self.board
                    .show_tokens_after_cancel(self.node.n_tokens_after_cancel());
            }
            if self.node.is_draining() && self.node.is_idle() {
                return Ok(());
            }
        }
    }

    fn take(&mut self, happening: Happening<Input>) {
        let event = match happening {
            Happening::Due => return,
            Happening::Drain => Event::Drain,
            Happening::Cancel(cancel) => Event::Cancel {
                request_id: cancel.request_id,
                to: cancel.to,
            },
            Happening::Input(input) => self.register(input),
        };
        self.apply(event);
    }

    /// Remembers who waits, before the event can be answered.
    fn register(&mut self, input: Input) -> Event {
        let answers = &mut self.answers;
        match input {
            Input::Event(event) => event,
            Input::Prefill(call, event, sender) => {
                answers.prefills.open(call, sender);
                event
            }
            Input::Claim(call, event, sender) => {
                answers.exports.open(call, sender);
                event
            }
            Input::Renew(call, event, sender) => {
                answers.renewals.insert(call, sender);
                event
            }
            Input::Rebind(call, event, sender) => {
                answers.rebinds.insert(call, sender);
                event
            }
            Input::Read(ReadCall::Ask { ask, reply }) => {
                let call = self.calls.next();
                answers.reads.insert(call, reply);
                Event::ReadAsked { call, ask }
            }
            Input::Read(ReadCall::Ended(read)) => Event::ReadEnded(read),
        }
    }

    fn apply(&mut self, event: Event) {
        let now = self.clock.now();
        if let Event::CallEnded { call } = &event {
            self.answers.prefills.close(*call);
            self.answers.exports.close(*call);
        }
        let effects = self.node.apply(event, now);
        self.carry_out(effects, now);
    }

    fn carry_out(&mut self, effects: Vec<Effect>, now: Timestamp) {
        let mut effects = VecDeque::from(effects);
        while let Some(effect) = effects.pop_front() {
            if let Some(consequence) = self.carry_out_one(effect) {
                effects.extend(self.node.apply(consequence, now));
            }
        }
    }

    /// Does one effect; what has gone wrong on the way is an event of its own.
    fn carry_out_one(&mut self, effect: Effect) -> Option<Event> {
        let answers = &mut self.answers;
        match effect {
            Effect::RunStep(plan) => {
                let step_id = plan.step_id;
                let failure = self.worker.run(plan).err()?;
                let result = Err(failure);
                return Some(Event::StepDone { step_id, result });
            }
            Effect::Digest { job, places } => self.digester.push(Job { job, places }),
            Effect::Prefill { call, event } => {
                let last = event.is_last();
                let lost = answers.prefills.send(call, event, last).err();
                return lost.map(|_| Event::CallEnded { call });
            }
            Effect::Export { call, event } => {
                let last = event.is_last();
                let lost = answers.exports.send(call, event, last).err();
                return lost.map(|_| Event::CallEnded { call });
            }
            // Whoever asked may have left meanwhile.
            Effect::Renewed {
                call,
                gone,
                expires_at,
            } => answer(&mut answers.renewals, call, (gone, expires_at)),
            Effect::Rebound { call, result } => answer(&mut answers.rebinds, call, result),
            // A grant that nobody takes comes back as a read that has ended.
            Effect::ReadDecided { call, result } => {
                if let Some(reply) = answers.reads.remove(&call) {
                    reply.answer(result);
                }
            }
        }
        None
    }
}

fn answer<T>(waiting: &mut HashMap<CallId, oneshot::Sender<T>>, call: CallId, value: T) {
    if let Some(sender) = waiting.remove(&call) {
        let _ = sender.send(value);
    }
}
