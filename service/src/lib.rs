//! What every Tidemill process needs, whatever its role.
//!
//! `grpc` connects nodes (over TCP or within one process, the same code either way), `discovery` says who
//! exists, `bind_guard` keeps ports private by default, `accept` serves HTTP within bounds, `health` answers probes
//! and metrics, `drain` turns signals into an orderly end, `telemetry` sets up logs, `version` names the build,
//! `config` reads flags, environment and file, `streams` answers calls without ever waiting, `node_service` is what
//! every node tells about itself, `inbox` and `load_board` are the ears and the voice of a node's loop,
//! `running_node` keeps loop and server together, `node_flags` and `node_process` are the process around them.
#![forbid(unsafe_code)]

pub mod accept;
pub mod bind_guard;
pub mod config;
pub mod discovery;
pub mod drain;
pub mod grpc;
pub mod health;
pub mod inbox;
pub mod load_board;
pub mod node_flags;
pub mod node_process;
pub mod node_service;
pub mod running_node;
pub mod streams;
pub mod telemetry;
pub mod trace_context;
pub mod version;
