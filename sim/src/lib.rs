//! The shipped cores under a virtual clock.
//!
//! Prefill and decode nodes, the router's dispatch, placement and membership run exactly as they ship; the network,
//! the clock, chance and the faults are simulated. The model is replaced by one whose next token is a hash of all
//! the KV that it reads, so wrong KV shows as wrong tokens. A seed is a whole history: `run(seed, …)` gives the
//! same events every time, and a violation names its seed.
#![forbid(unsafe_code)]

mod check;
mod coverage;
mod decode_host;
mod fault;
mod host;
mod message;
mod network;
mod occurrence;
mod prefill_host;
mod rng;
mod router_host;
mod schedule;
mod transfer;
mod workload;
mod world;

pub use coverage::{Coverage, FaultKind, Phase};
pub use world::{Outcome, SimConfig, Violation, run};
