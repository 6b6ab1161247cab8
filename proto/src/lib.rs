//! The wire, and nothing but the wire.
//!
//! `pd::v1` holds the generated messages and services of `pd/v1/pd.proto`; `convert` turns them into core's
//! types and back. A message from a peer is only trusted after its conversion has succeeded: each
//! `TryFrom` names the field that does not hold. No other crate names a wire type outside its `rpc.rs`.
#![forbid(unsafe_code)]

/// Generated types, one module for each proto package.
pub mod pd {
    /// Version 1 of the hand-off.
    #[allow(missing_docs, unreachable_pub, unused_qualifications, clippy::all)]
    pub mod v1 {
        tonic::include_proto!("tidemill.pd.v1");
    }
}

pub mod convert;

pub use convert::ConvertError;
