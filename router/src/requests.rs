//! The border between the front door and the machine behind it.
//!
//! HTTP turns a client's request into a `Job` (tokens, no text) and reads `Answer`s; dispatch serves `Submission`s.
//! Dropping `Answers` is the cancel: whatever way a handler ends, the request ends with it. A submission holds its
//! admission permit until it is dropped, so no exit path can leak one.

use crate::admission::{Admission, Permit};
use std::sync::Arc;
use tidemill_core::{
    Failure, FailureCode, FinishReason, LogprobSpec, SampledToken, SamplingParams, StopConditions,
    Timestamp, TokenId, TokenLogprob,
};
use tokio::sync::mpsc;

/// Answers that may wait for a slow client before its request waits too.
const ANSWERS_MAX: usize = 256;

/// What a client wants, as tokens. Every field has been checked against its bound.
#[derive(Clone, PartialEq, Debug)]
pub struct Job {
    /// Prompt tokens; at least one.
    pub prompt: Vec<TokenId>,
    /// Prefix-cache namespace; empty is the shared one.
    pub namespace: String,
    /// Sampling.
    pub sampling: SamplingParams,
    /// Ending, as far as the nodes know it: stop strings stay in `http`.
    pub stop: StopConditions,
    /// Log-probabilities.
    pub logprobs: LogprobSpec,
    /// Absolute.
    pub deadline: Timestamp,
    /// W3C `traceparent`; empty when there is none.
    pub traceparent: String,
}

/// What comes back for a job, in order: prompt log-probabilities, tokens, then exactly one of `Finished` and
/// `Failed`.
#[derive(Clone, PartialEq, Debug)]
pub enum Answer {
    /// For the next prompt tokens, from the second one on; several may come.
    PromptLogprobs(Vec<PromptLogprob>),
    /// The next output token.
    Token(SampledToken),
    /// The positive end.
    Finished(Finished),
    /// The negative end.
    Failed(Failure),
}

/// Log-probability of one prompt token and of its rivals.
#[derive(Clone, PartialEq, Debug)]
pub struct PromptLogprob {
    /// Natural log of the prompt token's probability.
    pub logprob: f32,
    /// The most likely tokens at its place, best first.
    pub top: Vec<TokenLogprob>,
}

/// How a job ended well.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Finished {
    /// Why.
    pub reason: FinishReason,
    /// Tokens given.
    pub n_output_tokens: u32,
    /// Prompt tokens that came from a prefix cache.
    pub n_cached_tokens: u32,
}

/// A job on its way to dispatch, with the way back.
pub struct Submission {
    /// What to do.
    pub job: Job,
    /// Where answers go. Closed when the client has left: that is the cancel.
    pub answers: mpsc::Sender<Answer>,
    /// Held until the request has ended on every node.
    pub permit: Permit,
    /// The client's request, as logs and traces know it.
    pub span: tracing::Span,
}

/// The way in. Clones share the admission.
#[derive(Clone)]
pub struct Requests {
    admission: Arc<Admission>,
    submissions: mpsc::Sender<Submission>,
}

impl Requests {
    /// A way in, and the queue that dispatch serves.
    pub fn new(admission: Arc<Admission>) -> (Self, mpsc::Receiver<Submission>) {
        let (submissions, queue) = mpsc::channel(admission.n_permits_max().max(1));
        let requests = Self {
            admission,
            submissions,
        };
        (requests, queue)
    }

    /// Takes a job in or refuses it at once; it never waits.
    ///
    /// # Errors
    /// `Overloaded` when every permit is taken, `Draining` when the router is leaving.
    pub fn submit(&self, job: Job) -> Result<Answers, Failure> {
        let permit = self.admission.try_admit()?;
        let (answers, receiver) = mpsc::channel(ANSWERS_MAX);
        let submission = Submission {
            job,
            answers,
            permit,
            span: tracing::Span::current(),
        };
        self.submissions
            .try_send(submission)
            .map_err(|refused| match refused {
                mpsc::error::TrySendError::Full(_) => Failure::new(
                    FailureCode::Overloaded,
                    "the router's queue is full; try again after the Retry-After time",
                ),
                mpsc::error::TrySendError::Closed(_) => Failure::new(
                    FailureCode::Draining,
                    "the router is leaving; send the request to another one",
                ),
            })?;
        Ok(Answers { receiver })
    }
}

impl Requests {
    /// Jobs that can be open at a time, when nobody else has any.
    pub fn n_places(&self) -> usize {
        self.admission.n_permits_max()
    }

    /// Seconds after which a refused client should ask again: longer, the more requests wait.
    pub fn retry_after_s(&self) -> u64 {
        self.admission.retry_after_s()
    }
}

/// The answers to one job. Dropping it cancels the job.
pub struct Answers {
    receiver: mpsc::Receiver<Answer>,
}

impl Answers {
    /// The next answer; `None` after the last. An end without `Finished` or `Failed` is a loss.
    pub async fn next(&mut self) -> Option<Answer> {
        self.receiver.recv().await
    }
}
