//! Moving KV blocks between nodes.
//!
//! The importer pulls, the exporter only lends: nobody ever writes into another's pool. `export` decides who
//! may read which slices until when (`lease` is one such right), `import` decides what to fetch next and when
//! everything is here, `plan` decides whether two layouts may exchange at all; all three are pure. `transport`
//! does the copying. This crate knows no model, no scheduler and no control protocol.
#![deny(missing_docs)]
#![deny(unsafe_code)]

pub mod export;
pub mod import;
pub mod lease;
pub mod plan;
#[allow(unsafe_code)]
pub mod transport;
