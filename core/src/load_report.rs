//! What a node tells the router about itself, in the node's own counts. Placement reads nothing else.

use crate::ids::{Incarnation, NodeId};

/// What a node does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Role {
    /// Prompt -> KV and first token.
    Prefill,
    /// KV and first token -> tokens.
    Decode,
}

impl Role {
    /// The name used in flags, logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// A node's state at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LoadReport {
    /// Who.
    pub node_id: NodeId,
    /// In which life; a report of another life is dropped.
    pub incarnation: Incarnation,
    /// Which role it plays now.
    pub role: Role,
    /// Rises with every report; an older one is dropped.
    pub sequence_number: u64,
    /// Sequences waiting (queued or waiting for KV).
    pub n_waiting: u32,
    /// Sequences in the running batch.
    pub n_running: u32,
    /// Prompt tokens that are queued and not yet computed.
    pub queued_tokens: u64,
    /// Blocks of the pool.
    pub n_blocks: u32,
    /// Blocks free or evictable at once, less what is reserved.
    pub n_blocks_free: u32,
    /// Blocks under a lease for importers.
    pub n_blocks_leased: u32,
    /// Takes no new work.
    pub draining: bool,
}
