//! The decode role: KV and a first token come in from a prefill node, tokens go out.
//!
//! `node` is the whole logic as a pure machine; `run` is its loop, the only place that awaits; `rpc` translates
//! messages; `exporters` and `pulls` are the hands that claim and fetch blocks; `assemble` makes a
//! node around a loaded model. The prefill node has its
//! twins of all but the hands, so that the difference between the roles is a diff.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod assemble;
mod exporters;
pub mod node;
mod pulls;
pub mod rpc;
pub mod run;
