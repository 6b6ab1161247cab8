//! The decode node's loop: everything that awaits. It selects what happened, applies it to the pure core and
//! does what the core asks for: compute on the compute thread, pulls and calls to exporters in tasks of their
//! own, answers into bounded streams. It never waits for any of them, and a reader that does not keep up is a
//! reader that left.

use crate::exporters::Exporters;
use crate::node::{Effect, Event, GenerateEvent, Node, NodeConfig};
use crate::pulls::Pulls;
use crate::rpc::Service;
use std::collections::VecDeque;
use std::sync::Arc;
use tidemill_core::kv_layout::PROTOCOL_REVISION;
use tidemill_core::{CallId, Clock, Incarnation, NodeId, Role, Timestamp};
use tidemill_engine::executor::Executor;
use tidemill_engine::intake::ModelFacts;
use tidemill_engine::scheduler::SchedulerConfig;
use tidemill_engine::worker::{Report, Worker};
use tidemill_kernels::memory::KvArena;
use tidemill_kv_transfer::transport::local::Exchange;
use tidemill_proto::convert::NodeDescription;
use tidemill_service::grpc::{self, AddressError};
use tidemill_service::inbox::{BATCH_MAX, Happening, Inbox, InboxSenders};
use tidemill_service::load_board::LoadBoard;
use tidemill_service::node_process::Surroundings;
use tidemill_service::node_service::NodeService;
use tidemill_service::running_node::RunningNode;
use tidemill_service::streams::{CallIds, Streams};
use tokio::sync::mpsc;

/// What distinguishes this node from others.
pub struct Settings {
    /// Its name.
    pub node_id: NodeId,
    /// Where its control service listens: `host:port` or `local:NAME`.
    pub listen: String,
    /// Where exporters of this process are met; `None`: blocks are fetched over TCP alone.
    pub exchange: Option<Exchange>,
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
    /// A generate stream.
    Generate(CallId, Event, mpsc::Sender<GenerateEvent>),
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
    let description = NodeDescription {
        node_id: settings.node_id.clone(),
        incarnation,
        role: Role::Decode,
        model_name: settings.model_name,
        model_fingerprint: settings.facts.layout.model_fingerprint,
        text_fingerprint: settings.text_fingerprint,
        layout_fingerprint: settings.facts.layout.fingerprint(),
        protocol_revision: PROTOCOL_REVISION,
        vocab_size: settings.facts.vocab_size,
        context_length: settings.facts.context_length,
        endpoints: Vec::new(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    let pulls = Pulls::new(
        settings.exchange,
        &parts.arena,
        incarnation,
        senders.reports.clone(),
    );
    let mut node = Node::new(NodeConfig {
        node_id: settings.node_id.clone(),
        incarnation,
        facts: settings.facts,
        n_blocks: parts.arena.n_blocks(),
        scheduler: settings.scheduler,
    });
    let worker = start_worker(&settings.node_id, parts.executor, &senders)?;
    let (load, board) = LoadBoard::new(node.load_report(), &admin, clock.now());
    let routes = grpc::server()
        .add_service(NodeService::new(description, load, senders.cancels))
        .add_service(Service::new(senders.inputs, calls).server());
    let turn = Loop {
        node,
        inbox,
        worker,
        board,
        clock,
        generations: Streams::default(),
        exporters: Exporters::new(fabric, senders.reports),
        pulls,
        incarnation,
    };
    let name = settings.node_id;
    tracing::info!(node_id = %name, %incarnation, address = listener.address(), "decode node starts");
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
    let report = move |report| {
        // Nothing is exported here, so progress within a step is of no use.
        if let Report::Step { step_id, result } = report {
            // An ended loop needs no result.
            let _ = reports.blocking_send(Input::Event(Event::StepDone { step_id, result }));
        }
    };
    Worker::start(&format!("{node_id}-compute"), executor, report).map_err(StartError::Thread)
}

/// The one owner of a node at work.
struct Loop {
    node: Node,
    inbox: Inbox<Input>,
    worker: Worker,
    board: LoadBoard,
    clock: Arc<dyn Clock>,
    generations: Streams<GenerateEvent>,
    exporters: Exporters,
    pulls: Pulls,
    incarnation: Incarnation,
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
            if self.board.is_due(now) {
                self.board.publish(self.node.load_report(), now);
                self.board
                    .show_tokens_after_cancel(self.node.n_tokens_after_cancel());
            }
            if self.node.is_draining() && self.node.is_idle() {
                self.exporters.part().await;
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
        match input {
            Input::Event(event) => event,
            Input::Generate(call, event, sender) => {
                self.generations.open(call, sender);
                event
            }
        }
    }

    fn apply(&mut self, event: Event) {
        let now = self.clock.now();
        if let Event::CallEnded { call } = &event {
            self.generations.close(*call);
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
        match effect {
            Effect::RunStep(plan) => {
                let step_id = plan.step_id;
                let failure = self.worker.run(plan).err()?;
                let result = Err(failure);
                return Some(Event::StepDone { step_id, result });
            }
            Effect::Generate { call, event } => {
                let last = event.is_last();
                let lost = self.generations.send(call, event, last).err();
                return lost.map(|_| Event::CallEnded { call });
            }
            Effect::Claim {
                claim,
                exporter,
                ask,
                traceparent,
            } => self.exporters.claim(claim, &exporter, &ask, &traceparent),
            Effect::DropClaim(claim) => self.exporters.drop_claim(claim),
            Effect::Pull { pull, ask } => self.pulls.start(pull, ask),
            Effect::Renew { exporter, leases } => {
                self.exporters.renew(exporter, &leases, self.incarnation);
            }
            Effect::Release { exporter, lease } => self.exporters.release(&exporter, &lease),
        }
        None
    }
}
