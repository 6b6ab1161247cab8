//! One model on one node, with no idea of a network.
//!
//! Read in this order: `sequence` (tokens of one request), `block_pool` and `prefix_cache` (where KV lives),
//! `scheduler` (what the next step holds), `executor` (computing it), `sampler` (drawing the token).
#![forbid(unsafe_code)]

pub mod block_pool;
pub mod executor;
pub mod intake;
pub mod model;
mod prefix_cache;
pub mod sampler;
pub mod scheduler;
pub mod sequence;
pub mod worker;
