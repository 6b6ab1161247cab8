//! Nodes of one process around one model, as `tidemill serve` makes them, and clients to them.

use crate::axes::{Setup, Way};
use std::sync::Arc;
use std::time::Duration;
use tidemill_core::{NodeId, SystemClock};
use tidemill_decode_node as decode_node;
use tidemill_engine::intake::ModelFacts;
use tidemill_engine::model::Model;
use tidemill_kv_transfer::transport::local::Exchange;
use tidemill_prefill_node as prefill_node;
use tidemill_prefill_node::kv_server::KvServer;
use tidemill_proto::convert::id_bytes;
use tidemill_proto::pd::v1::decode_node_client::DecodeNodeClient;
use tidemill_proto::pd::v1::node_client::NodeClient;
use tidemill_proto::pd::v1::prefill_node_client::PrefillNodeClient;
use tidemill_service::grpc::Fabric;
use tidemill_service::health::Admin;
use tidemill_service::node_flags::NodeShape;
use tidemill_service::node_process::Surroundings;
use tidemill_service::running_node::RunningNode;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

/// Longest wait for a drain.
const PATIENCE: Duration = Duration::from_secs(60);

/// How to reach the nodes; clones share their connections.
#[derive(Clone)]
pub(crate) struct Connections {
    pub(crate) facts: ModelFacts,
    /// The prefill node and its life, when the roles are apart.
    pub(crate) prefill: Option<(PrefillNodeClient<Channel>, Vec<u8>)>,
    /// The decode node and its life.
    pub(crate) decode: (DecodeNodeClient<Channel>, Vec<u8>),
    /// All of them, for what every node is told.
    pub(crate) nodes: Vec<(NodeClient<Channel>, Vec<u8>)>,
}

/// Running nodes.
pub(crate) struct Deployment {
    connections: Connections,
    nodes: Vec<RunningNode>,
    drain: CancellationToken,
}

impl Deployment {
    /// Starts the nodes of `setup`; `model` has to be of its instruction set.
    pub(crate) async fn start(model: &Arc<Model>, setup: &Setup) -> Self {
        assert_eq!(model.isa(), setup.isa, "the model computes with its own");
        let (fabric, exchange) = (Fabric::default(), Exchange::default());
        let drain = CancellationToken::new();
        let around = || Surroundings {
            fabric: fabric.clone(),
            clock: Arc::new(SystemClock::new()),
            admin: Admin::starting("starting"),
            drain: drain.clone(),
        };
        let facts = model.facts(setup.kv_dtype);
        let (mut nodes, mut clients) = (Vec::new(), Vec::new());
        let mut prefill = None;
        if setup.way != Way::Colocated {
            let kv = match setup.way {
                Way::Tcp => KvServer::Tcp("127.0.0.1:0".to_owned()),
                _ => KvServer::Local(exchange.clone()),
            };
            let shape = shape("prefill-0", &facts, setup);
            let made = prefill_node::assemble::assemble(model, shape, kv, around());
            let (settings, parts) = made.expect("the shape fits");
            let node = prefill_node::run::start(settings, parts).await;
            let node = node.expect("the prefill node starts");
            let channel = fabric.connect(node.address()).expect("an address");
            let life = id_bytes(node.incarnation().0);
            clients.push((NodeClient::new(channel.clone()), life.clone()));
            prefill = Some((PrefillNodeClient::new(channel), life));
            nodes.push(node);
        }
        let exchange = (setup.way == Way::Local).then_some(exchange);
        let shape = shape("decode-0", &facts, setup);
        let made = decode_node::assemble::assemble(model, shape, exchange, around());
        let (settings, parts) = made.expect("the shape fits");
        let node = decode_node::run::start(settings, parts).await;
        let node = node.expect("the decode node starts");
        let channel = fabric.connect(node.address()).expect("an address");
        let life = id_bytes(node.incarnation().0);
        clients.push((NodeClient::new(channel.clone()), life.clone()));
        let decode = (DecodeNodeClient::new(channel), life);
        nodes.push(node);
        Self {
            connections: Connections {
                facts,
                prefill,
                decode,
                nodes: clients,
            },
            nodes,
            drain,
        }
    }

    pub(crate) fn connections(&self) -> Connections {
        self.connections.clone()
    }

    /// Drains the nodes: one that still held anything would not end.
    pub(crate) async fn end(self) {
        self.drain.cancel();
        for node in self.nodes {
            let ended = tokio::time::timeout(PATIENCE, node.ended()).await;
            ended.expect("it ends in time").expect("it ends well");
        }
    }
}

fn shape(name: &str, facts: &ModelFacts, setup: &Setup) -> NodeShape {
    NodeShape {
        node_id: NodeId::new(name).expect("a valid name"),
        listen: match setup.way {
            Way::Tcp => "127.0.0.1:0".to_owned(),
            Way::Colocated | Way::Local => format!("local:{name}"),
        },
        model_name: "m".to_owned(),
        text_fingerprint: [0; 32],
        kv_bytes: facts.layout.block_bytes() as u64 * u64::from(setup.n_blocks),
        kv_dtype: setup.kv_dtype,
        n_threads: setup.n_threads,
        max_batch_tokens: setup.chunk,
        max_sequences: 64,
    }
}
