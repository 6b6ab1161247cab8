//! The words that every crate shares.
//!
//! Ids, tokens, requests, block hashes, the KV layout and handle, load reports and the clock: plain
//! values with their bounds, no I/O, no async, no device and no wire format. Everything above speaks
//! these types; `proto` translates them to bytes and back.
#![forbid(unsafe_code)]

pub mod block_hash;
pub mod bounds;
pub mod clock;
pub mod failure;
pub mod ids;
pub mod kv_handle;
pub mod kv_layout;
pub mod load_report;
pub mod planted;
pub mod request;
pub mod sampling;

pub use block_hash::{BlockHash, block_hashes};
pub use clock::{Clock, SystemClock, Timestamp, VirtualClock};
pub use failure::{Failure, FailureCode};
pub use ids::{
    BlockIdx, CallId, Capability, Digest, Epoch, Incarnation, LayerGroupIdx, NodeId, ReadId,
    RequestId, TokenId,
};
pub use kv_handle::{Endpoint, KvHandle, TransportKind};
pub use kv_layout::{KvDtype, KvLayout, LayoutError, Slice};
pub use load_report::{LoadReport, Role};
pub use request::{
    FinishReason, GenerateRequest, LogprobSpec, PrefillRequest, SampledToken, SequenceSpec,
    StopConditions, TokenLogprob,
};
pub use sampling::{SamplingParams, TokenBias};
