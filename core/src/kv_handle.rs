//! The ticket that the router carries from the exporter to the importer. It names blocks by their place in
//! the request, never by address or length: what a peer may read is decided by the exporter alone.

use crate::clock::Timestamp;
use crate::ids::{Capability, Epoch, Incarnation, NodeId, RequestId};

/// A way to move blocks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum TransportKind {
    /// Both nodes live in one process.
    Local,
    /// Own framing over TCP.
    Tcp,
}

impl TransportKind {
    /// The name used in flags, handshakes and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Tcp => "tcp",
        }
    }
}

impl std::str::FromStr for TransportKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "local" => Ok(Self::Local),
            "tcp" => Ok(Self::Tcp),
            other => Err(format!("kv transport {other:?} is none of local, tcp")),
        }
    }
}

/// Where an exporter answers on one transport, e.g. `tcp` and `127.0.0.1:7102`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Endpoint {
    /// The transport.
    pub transport: TransportKind,
    /// `host:port` for tcp; the node id for local.
    pub address: String,
}

/// A lease on one request's exported KV, as the router and the importer see it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KvHandle {
    /// Whose KV it is.
    pub request_id: RequestId,
    /// Who exports it.
    pub node_id: NodeId,
    /// In which life.
    pub incarnation: Incarnation,
    /// The right to claim it.
    pub capability: Capability,
    /// Which claim: raised by the router's rebind.
    pub epoch: Epoch,
    /// Positions that will be final when the exporter says complete.
    pub n_tokens: u32,
    /// Layout of the exported blocks.
    pub layout_fingerprint: [u8; 16],
    /// `host:port` of the exporter's control service (Claim, Release).
    pub control_address: String,
    /// One endpoint for each transport that the exporter offers.
    pub endpoints: Vec<Endpoint>,
    /// When the lease ends unless renewed.
    pub expires_at: Timestamp,
}
