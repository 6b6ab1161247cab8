//! What exporters and importers say to each other about a lease, as plain values.
//!
//! Nothing here names an address, a length or a block of the other side, except the grant, which stays within the
//! exporter: what a peer may read is decided by its owner alone.

use super::LeaseRef;
use std::collections::BTreeSet;
use tidemill_core::kv_layout::SlicePlace;
use tidemill_core::{
    BlockIdx, Capability, Digest, Epoch, Failure, Incarnation, NodeId, ReadId, RequestId,
    SampledToken, Slice, Timestamp,
};
use xxhash_rust::xxh3::Xxh3Default;

/// An importer's claim of a lease.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Claim {
    /// Whose KV.
    pub request_id: RequestId,
    /// The right to it.
    pub capability: Capability,
    /// Under which epoch.
    pub epoch: Epoch,
    /// Who claims.
    pub importer: NodeId,
    /// In which life; the lease is bound to it.
    pub importer_incarnation: Incarnation,
    /// The layout of the importer's pool.
    pub layout_fingerprint: [u8; 16],
    /// Absolute; a late claim binds nothing.
    pub deadline: Timestamp,
}

impl Claim {
    /// The lease that is meant.
    pub fn lease(&self) -> LeaseRef {
        LeaseRef {
            request_id: self.request_id,
            capability: self.capability,
            epoch: self.epoch,
        }
    }
}

/// What an importer hears about its claim: claimed, announcements, then at most one of complete and failed.
#[derive(Clone, PartialEq, Debug)]
pub enum ExportEvent {
    /// The lease is bound to this importer.
    Claimed {
        /// Positions that will be final.
        n_tokens: u32,
        /// When the lease ends unless renewed.
        expires_at: Timestamp,
    },
    /// These slices may be read; their bytes have these checksums.
    SlicesFinal(Vec<(Slice, Digest)>),
    /// Everything has been announced: the positive end.
    Complete(Complete),
    /// The negative end.
    Failed(Failure),
}

impl ExportEvent {
    /// True when nothing follows on its stream.
    pub fn is_last(&self) -> bool {
        matches!(self, Self::Complete(_) | Self::Failed(_))
    }
}

/// The exporter's positive word that everything is final.
#[derive(Clone, PartialEq, Debug)]
pub struct Complete {
    /// Positions.
    pub n_tokens: u32,
    /// `digest_of_digests` over all slices.
    pub digest: Digest,
    /// What the exporter sampled after the last position.
    pub first_token: SampledToken,
}

/// An importer's wish to read slices.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReadAsk {
    /// Whose KV.
    pub request_id: RequestId,
    /// The right to it.
    pub capability: Capability,
    /// Under which epoch.
    pub epoch: Epoch,
    /// The importer's life.
    pub importer: Incarnation,
    /// What to read, in the order in which the bytes shall come.
    pub slices: Vec<Slice>,
}

/// The right to read these blocks until the read has ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReadGrant {
    /// Which read.
    pub read: ReadId,
    /// Where the slices lie at the exporter, in the order asked.
    pub places: Vec<SlicePlace>,
}

impl ReadGrant {
    /// Each block of the read once, in order.
    pub fn distinct_blocks(&self) -> BTreeSet<BlockIdx> {
        self.places.iter().map(|place| place.block).collect()
    }
}

/// What a handle tells about a fresh export.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Opened {
    /// The first epoch.
    pub epoch: Epoch,
    /// When the lease ends unless renewed or still computed.
    pub expires_at: Timestamp,
}

/// xxh3 over the digests of all slices as little-endian `u64`, in (ordinal, group) order.
pub fn digest_of_digests(digests: impl Iterator<Item = Digest>) -> Digest {
    let mut hasher = Xxh3Default::new();
    for digest in digests {
        hasher.update(&digest.0.to_le_bytes());
    }
    Digest(hasher.digest())
}
