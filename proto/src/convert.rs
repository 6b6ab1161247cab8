//! Conversions between wire messages and core's types.
//!
//! Towards core each conversion checks lengths and enums and names the field that does not hold; towards the
//! wire none can fail. Values that came from a client are checked again by `SequenceSpec::check` at the node.

mod export;
mod node;
mod sequence;

pub use node::NodeDescription;
pub use sequence::PromptLogprobEntry;

use crate::pd::v1;
use tidemill_core::{Failure, FailureCode, Incarnation, RequestId};

/// A field of a message that does not hold.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct ConvertError {
    /// The field's name in the proto file.
    pub field: &'static str,
    /// What is wrong, with the bound.
    pub problem: String,
}

impl ConvertError {
    pub(crate) fn new(field: &'static str, problem: impl Into<String>) -> Self {
        Self {
            field,
            problem: problem.into(),
        }
    }
}

impl From<ConvertError> for Failure {
    fn from(error: ConvertError) -> Self {
        Self::new(FailureCode::InvalidRequest, error.to_string())
    }
}

impl From<ConvertError> for tonic::Status {
    fn from(error: ConvertError) -> Self {
        Self::invalid_argument(error.to_string())
    }
}

/// Reads a fixed count of bytes.
pub(crate) fn fixed<const N: usize>(
    field: &'static str,
    bytes: &[u8],
) -> Result<[u8; N], ConvertError> {
    bytes.try_into().map_err(|_| {
        ConvertError::new(
            field,
            format!("has {} bytes; exactly {N} are allowed", bytes.len()),
        )
    })
}

/// Reads a 128-bit id (little-endian).
pub(crate) fn id128(field: &'static str, bytes: &[u8]) -> Result<u128, ConvertError> {
    fixed::<16>(field, bytes).map(u128::from_le_bytes)
}

/// Reads a request id.
///
/// # Errors
/// When it is not 16 bytes.
pub fn request_id(bytes: &[u8]) -> Result<RequestId, ConvertError> {
    id128("request_id", bytes).map(RequestId)
}

/// Reads an incarnation out of the named field.
///
/// # Errors
/// When it is not 16 bytes.
pub fn incarnation(field: &'static str, bytes: &[u8]) -> Result<Incarnation, ConvertError> {
    id128(field, bytes).map(Incarnation)
}

/// Writes a 128-bit id.
pub fn id_bytes(id: u128) -> Vec<u8> {
    id.to_le_bytes().to_vec()
}

pub(crate) fn required<T>(field: &'static str, value: Option<T>) -> Result<T, ConvertError> {
    value.ok_or_else(|| ConvertError::new(field, "is missing"))
}

impl From<&Failure> for v1::Failure {
    fn from(failure: &Failure) -> Self {
        Self {
            code: failure.code.name().to_owned(),
            message: failure.message.clone(),
        }
    }
}

const ALL_CODES: [FailureCode; 11] = [
    FailureCode::InvalidRequest,
    FailureCode::ContextLengthExceeded,
    FailureCode::Overloaded,
    FailureCode::DeadlineExceeded,
    FailureCode::Cancelled,
    FailureCode::Gone,
    FailureCode::TransferFailed,
    FailureCode::Draining,
    FailureCode::Unavailable,
    FailureCode::NumericFault,
    FailureCode::Internal,
];

impl From<v1::Failure> for Failure {
    /// A code that a newer peer invented counts as `internal`: never retried blindly, never success.
    fn from(failure: v1::Failure) -> Self {
        let code = ALL_CODES
            .into_iter()
            .find(|code| code.name() == failure.code)
            .unwrap_or(FailureCode::Internal);
        let mut message = failure.message;
        if message.len() > 1024 {
            let end = (0..=1024).rev().find(|&i| message.is_char_boundary(i));
            message.truncate(end.unwrap_or(0));
        }
        Self { code, message }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_survives_the_wire() {
        for code in ALL_CODES {
            let failure = Failure::new(code, "why");
            assert_eq!(Failure::from(v1::Failure::from(&failure)), failure);
        }
    }

    #[test]
    fn an_unknown_code_is_internal() {
        let failure = Failure::from(v1::Failure {
            code: "brand_new".into(),
            message: String::new(),
        });
        assert_eq!(failure.code, FailureCode::Internal);
    }

    #[test]
    fn short_ids_are_refused_by_name() {
        let error = request_id(&[1, 2, 3]).expect_err("three bytes");
        assert_eq!(error.field, "request_id");
    }
}
