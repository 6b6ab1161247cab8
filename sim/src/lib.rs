//! The shipped cores under a virtual clock.
//!
//! Prefill and decode nodes, the router's dispatch, placement and membership run exactly as they ship; the network,
//! the clock, chance and the faults are simulated. The model is replaced by one whose next token is a hash of all
//! the KV that it reads, so wrong KV shows as wrong tokens. What the network can do is what gRPC over TCP can do
//! (`calls`, `questions`). A seed is a whole history: `run(seed, …)` gives the same events every time, and a violation
//! names its seed.
#![forbid(unsafe_code)]

mod answers;
mod calls;
mod check;
mod coverage;
mod decode_host;
mod fault;
mod host;
mod left;
mod message;
mod network;
mod occurrence;
mod prefill_host;
mod questions;
mod reference;
mod rng;
mod router_host;
mod router_watch;
mod schedule;
mod sharing;
mod silence;
mod transfer;
mod workload;
mod world;

pub use coverage::{Coverage, FaultKind, Phase};
pub use world::{Outcome, SimConfig, Violation, run};
