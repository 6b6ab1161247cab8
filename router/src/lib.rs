//! The front door.
//!
//! A client's request comes in over HTTP, becomes tokens, takes a permit, is placed on nodes and lives in one
//! pure state machine (`dispatch`) until it has ended exactly once. `dispatch`, `placement` and `membership`
//! hold no channel, task, lock, clock or randomness, so the simulator drives the very same code; everything
//! that awaits lives beside them and only carries their effects out. The router holds the text (vocabulary,
//! template, stop strings); nodes see tokens only.
#![forbid(unsafe_code)]

pub mod admission;
pub mod dispatch;
pub mod http;
pub mod membership;
mod node_client;
pub mod placement;
pub mod requests;
mod run;
pub mod text;

pub use run::{RouterConfig, RouterEnd, Surroundings, run};
