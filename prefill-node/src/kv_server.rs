//! The side of the node that importers read blocks from: one transport, chosen by configuration, behind one gate.
//!
//! A transport asks the node's loop for every read and reports every end; those questions travel to the loop among
//! the reports of the node's own threads, since each of them holds blocks.

use crate::run::{Input, StartError};
use std::sync::Arc;
use tidemill_core::{Endpoint, Incarnation, NodeId, TransportKind};
use tidemill_kernels::memory::KvArena;
use tidemill_kv_transfer::transport::gate::{ReadCall, ReadGate, read_gate};
use tidemill_kv_transfer::transport::local::{Exchange, LocalExporter, Registration};
use tidemill_kv_transfer::transport::tcp::{self, Limits, TcpExporter};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Reads at a time, of all importers together.
const READS_MAX: usize = 1024;

/// How a node lends its blocks.
pub enum KvServer {
    /// To nodes of this process.
    Local(Exchange),
    /// Over TCP, at this `host:port`.
    Tcp(String),
}

/// A transport that serves. It ends when this is dropped.
pub(crate) struct RunningKvServer {
    /// What handles say about it.
    pub(crate) endpoints: Vec<Endpoint>,
    tasks: Vec<JoinHandle<()>>,
    _registration: Option<Registration>,
}

impl KvServer {
    /// Serves the blocks of `arena`; questions and ends go to `reports`.
    pub(crate) async fn start(
        self,
        node_id: &NodeId,
        incarnation: Incarnation,
        arena: Arc<KvArena>,
        reports: mpsc::Sender<Input>,
    ) -> Result<RunningKvServer, StartError> {
        let (gate, calls) = read_gate(READS_MAX);
        let forward = tokio::spawn(forward(calls, reports));
        let mut running = match self {
            Self::Local(exchange) => serve_local(node_id, incarnation, arena, gate, &exchange),
            Self::Tcp(address) => serve_tcp(address, incarnation, arena, gate).await?,
        };
        running.tasks.push(forward);
        Ok(running)
    }
}

fn serve_local(
    node_id: &NodeId,
    incarnation: Incarnation,
    arena: Arc<KvArena>,
    gate: ReadGate,
    exchange: &Exchange,
) -> RunningKvServer {
    let address = node_id.as_str().to_owned();
    let exporter = LocalExporter {
        incarnation,
        arena,
        gate,
    };
    let registration = exchange.register(address.clone(), exporter);
    RunningKvServer {
        endpoints: vec![Endpoint {
            transport: TransportKind::Local,
            address,
        }],
        tasks: Vec::new(),
        _registration: Some(registration),
    }
}

async fn serve_tcp(
    address: String,
    incarnation: Incarnation,
    arena: Arc<KvArena>,
    gate: ReadGate,
) -> Result<RunningKvServer, StartError> {
    let listen_error = |source| StartError::KvListen {
        address: address.clone(),
        source,
    };
    let listener = TcpListener::bind(&address).await.map_err(listen_error)?;
    let bound = listener.local_addr().map_err(listen_error)?;
    let exporter = TcpExporter {
        incarnation,
        arena,
        gate,
        limits: Limits::default(),
    };
    Ok(RunningKvServer {
        endpoints: vec![Endpoint {
            transport: TransportKind::Tcp,
            address: bound.to_string(),
        }],
        tasks: vec![tokio::spawn(tcp::serve(listener, exporter))],
        _registration: None,
    })
}

impl RunningKvServer {
    /// Is it still there?
    ///
    /// # Errors
    /// When one of its tasks has ended: nobody can read from this node any more.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.tasks.iter().any(JoinHandle::is_finished) {
            return Err("the KV server has ended".to_owned());
        }
        Ok(())
    }
}

impl Drop for RunningKvServer {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

async fn forward(mut calls: mpsc::Receiver<ReadCall>, reports: mpsc::Sender<Input>) {
    while let Some(call) = calls.recv().await {
        if reports.send(Input::Read(call)).await.is_err() {
            return;
        }
    }
}
