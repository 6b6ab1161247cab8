//! How a leg of a request fails. The code decides what the router does (retry elsewhere, tell the client);
//! the text tells a person what to do next.

use std::fmt;

/// Stable codes; also the `code` of the client's error body.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum FailureCode {
    /// A field of the request does not hold. The client's mistake; never retried.
    InvalidRequest,
    /// Prompt and output do not fit the context.
    ContextLengthExceeded,
    /// A queue or pool is full. Retried elsewhere, else 429.
    Overloaded,
    /// The absolute deadline has passed.
    DeadlineExceeded,
    /// Cancelled by its owner.
    Cancelled,
    /// The lease, capability, epoch or incarnation named is not (or no longer) known.
    Gone,
    /// KV bytes did not arrive whole. Retried elsewhere.
    TransferFailed,
    /// The node is leaving. Retried elsewhere.
    Draining,
    /// The node (or the way to it) was lost. Retried elsewhere.
    Unavailable,
    /// Model produced no usable numbers for this row (NaN).
    NumericFault,
    /// A broken invariant, contained to this request.
    Internal,
}

impl FailureCode {
    /// The stable spelling.
    pub fn name(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request",
            Self::ContextLengthExceeded => "context_length_exceeded",
            Self::Overloaded => "overloaded",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::Cancelled => "cancelled",
            Self::Gone => "gone",
            Self::TransferFailed => "transfer_failed",
            Self::Draining => "draining",
            Self::Unavailable => "unavailable",
            Self::NumericFault => "numeric_fault",
            Self::Internal => "internal",
        }
    }

    /// True when another node may well succeed.
    pub fn is_retriable(self) -> bool {
        matches!(
            self,
            Self::Overloaded
                | Self::Gone
                | Self::TransferFailed
                | Self::Draining
                | Self::Unavailable
        )
    }
}

/// A failure with its reason in words. The text never holds prompt text, tokens or keys.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// What the router acts on.
    pub code: FailureCode,
    /// What a person reads: the field, the value, the bound, the next step.
    pub message: String,
}

impl Failure {
    /// A failure out of its parts.
    pub fn new(code: FailureCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code.name(), self.message)
    }
}

impl std::error::Error for Failure {}
