//! The prefill role: a prompt comes in, its KV and first token go out, lent to whichever decode node the router
//! chose.
//!
//! `node` is the whole logic as a pure machine; `run` is its loop, the only place that awaits; `rpc` translates
//! messages; `kv_server` and `digester` are the hands that lend and check blocks; `assemble` makes a
//! node around a loaded model. The decode node has its
//! twins of all but the hands, so that the difference between the roles is a diff.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod assemble;
mod digester;
pub mod kv_server;
pub mod node;
pub mod rpc;
pub mod run;
