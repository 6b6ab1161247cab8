//! Memory and operations of one device.
//!
//! `memory` holds the KV blocks; `cpu` holds one file per operation, each with a scalar reference and vector forms
//! that agree with it bit for bit. Nothing here knows a request, a sequence or a network.

pub mod cpu;
pub mod memory;
