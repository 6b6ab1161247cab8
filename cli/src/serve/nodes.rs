//! The nodes of one process: each with its own blocks and threads, all with the same weights.

use super::{Opened, ServeArgs, progress};
use anyhow::{Result, anyhow};
use futures::FutureExt;
use futures::future::select_all;
use std::sync::Arc;
use tidemill_core::{Clock, NodeId, Role, TransportKind};
use tidemill_decode_node as decode_node;
use tidemill_kv_transfer::transport::local::Exchange;
use tidemill_prefill_node as prefill_node;
use tidemill_prefill_node::kv_server::KvServer;
use tidemill_service::discovery::{LocalDiscovery, NodeEntry};
use tidemill_service::grpc::Fabric;
use tidemill_service::health::Admin;
use tidemill_service::node_flags::NodeShape;
use tidemill_service::node_process::Surroundings;
use tidemill_service::running_node::RunningNode;
use tokio_util::sync::CancellationToken;

/// What one node is to be.
pub(super) fn shape(
    args: &ServeArgs,
    opened: &Opened,
    role: Role,
    node_idx: u32,
) -> Result<NodeShape> {
    let name = format!("{}-{node_idx}", role.name());
    let n_cores = || std::thread::available_parallelism().map_or(1, usize::from);
    Ok(NodeShape {
        node_id: NodeId::new(name.as_str()).map_err(|problem| anyhow!(problem))?,
        listen: format!("local:{name}"),
        model_name: opened.name.clone(),
        text_fingerprint: opened.text.text_fingerprint,
        kv_bytes: args.kv_bytes,
        kv_dtype: args.kv_dtype,
        n_threads: args.threads.map_or_else(n_cores, usize::from),
        max_batch_tokens: args.max_batch_tokens,
        max_sequences: args.max_sequences,
    })
}

/// Starts and registers every node that the flags ask for.
pub(super) async fn start(
    args: &ServeArgs,
    opened: &Opened,
    (fabric, discovery): (&Fabric, &LocalDiscovery),
    (clock, admin): (&Arc<dyn Clock>, &Admin),
    stop: &CancellationToken,
) -> Result<Vec<RunningNode>> {
    let exchange = Exchange::default();
    let around = || Surroundings {
        fabric: fabric.clone(),
        clock: Arc::clone(clock),
        admin: admin.part(),
        drain: stop.clone(),
    };
    let (n_prefill, n_decode) = if args.colocated {
        (0, 1)
    } else {
        (args.prefill, args.decode)
    };
    let mut running = Vec::new();
    for node_idx in 0..n_prefill {
        let shape = shape(args, opened, Role::Prefill, node_idx)?;
        let kv = match args.kv_transport {
            TransportKind::Local => KvServer::Local(exchange.clone()),
            TransportKind::Tcp => KvServer::Tcp("127.0.0.1:0".to_owned()),
        };
        let (settings, parts) =
            prefill_node::assemble::assemble(&opened.model, shape, kv, around())?;
        let node = prefill_node::run::start(settings, parts).await?;
        register(discovery, Role::Prefill, &node);
        running.push(node);
    }
    for node_idx in 0..n_decode {
        let shape = shape(args, opened, Role::Decode, node_idx)?;
        let local = (args.kv_transport == TransportKind::Local).then(|| exchange.clone());
        let (settings, parts) =
            decode_node::assemble::assemble(&opened.model, shape, local, around())?;
        let node = decode_node::run::start(settings, parts).await?;
        register(discovery, Role::Decode, &node);
        running.push(node);
    }
    progress(&format!(
        "{n_prefill} prefill and {n_decode} decode nodes are up"
    ));
    Ok(running)
}

fn register(discovery: &LocalDiscovery, role: Role, node: &RunningNode) {
    discovery.register(NodeEntry {
        role,
        address: node.address().to_owned(),
    });
}

/// Waits until any node ends: before the drain that is a fault.
pub(super) async fn first_end(running: Vec<RunningNode>) -> Result<()> {
    let ends = running.into_iter().map(|node| node.ended().boxed());
    let (ended, _, rest) = select_all(ends).await;
    ended?;
    drop(rest);
    Ok(())
}
