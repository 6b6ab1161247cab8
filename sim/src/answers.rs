//! One request and what its client hears, held against what an undisturbed node gives.
//!
//! Tokens, their log-probabilities, top lists and digests are equal to the last bit, in order, each once; prompt
//! log-probabilities come before the first token; a good end comes after everything; whatever was not asked for never
//! comes.

use crate::coverage::Phase;
use crate::left::Place;
use crate::message::ToClient;
use crate::network::Process;
use crate::reference::Exact;
use crate::silence::Listening;
use crate::world::World;
use std::collections::BTreeSet;
use tidemill_core::{FailureCode, FinishReason, SampledToken, Timestamp, TokenId};
use tidemill_router::requests::{Answer, Finished, Job, PromptLogprob};

/// One request and what its client has seen.
pub(crate) struct Tracked {
    pub(crate) job: Job,
    /// What an undisturbed node gives.
    pub(crate) reference: Vec<TokenId>,
    /// Why it ends there.
    pub(crate) reason: FinishReason,
    /// The same with everything that was asked about it.
    pub(crate) exact: Option<Exact>,
    pub(crate) n_emitted: usize,
    /// Prompt log-probabilities that the client has.
    pub(crate) n_prompt_logprobs: usize,
    /// How long its client waits, and after what time it leaves, from the moment that it is taken in.
    pub(crate) patience_us: u64,
    pub(crate) leaves_after_us: Option<u64>,
    pub(crate) client_left: bool,
    /// How often it has ended.
    pub(crate) n_ends: u32,
    /// It has ended well.
    pub(crate) has_finished: bool,
    /// Its router died.
    pub(crate) is_lost: bool,
    pub(crate) phase: Option<Phase>,
    /// Nodes that were called for it.
    pub(crate) touched: BTreeSet<Process>,
    /// Nodes that the router has called for it and not left.
    pub(crate) legs: Vec<Place>,
    /// The decode node that the router listens to.
    pub(crate) listening: Option<Listening>,
    /// When the present attempt's first token was told.
    pub(crate) first_at: Option<Timestamp>,
    pub(crate) wake_at: Option<Timestamp>,
}

impl Tracked {
    pub(crate) fn new(job: Job, reference: Vec<TokenId>, reason: FinishReason) -> Self {
        Self {
            job,
            reference,
            reason,
            exact: None,
            n_emitted: 0,
            n_prompt_logprobs: 0,
            patience_us: 0,
            leaves_after_us: None,
            client_left: false,
            n_ends: 0,
            has_finished: false,
            is_lost: false,
            phase: None,
            touched: BTreeSet::new(),
            legs: Vec::new(),
            listening: None,
            first_at: None,
            wake_at: None,
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.n_ends > 0 || self.is_lost
    }

    /// Its client has lost the router.
    pub(crate) fn lose(&mut self) {
        self.is_lost = true;
        self.phase = None;
    }

    /// Prompt and output.
    pub(crate) fn context(&self) -> impl Iterator<Item = TokenId> {
        self.job.prompt.iter().chain(&self.reference).copied()
    }

    pub(crate) fn touch(&mut self, process: Process) {
        self.touched.insert(process);
        if matches!(process, Process::Prefill(_)) {
            self.phase = Some(Phase::Queued);
        }
    }

    /// Moves the phase on by what the router hears.
    pub(crate) fn see(&mut self, message: &ToClient) {
        use tidemill_decode_node::node::GenerateEvent;
        use tidemill_prefill_node::node::PrefillEvent;
        self.phase = match message {
            ToClient::Prefill(PrefillEvent::Handle(_)) => Some(Phase::Offered),
            ToClient::Prefill(PrefillEvent::FirstToken(_)) => match self.phase {
                Some(Phase::Decoding) => Some(Phase::Decoding),
                _ => Some(Phase::FirstToken),
            },
            ToClient::Generate(GenerateEvent::Accepted) => match self.phase {
                Some(Phase::Offered) => Some(Phase::Importing),
                // It prefills by itself.
                None => Some(Phase::Decoding),
                other => other,
            },
            ToClient::Generate(GenerateEvent::KvReady(_)) => Some(Phase::Decoding),
            _ => self.phase,
        };
    }
}

impl World {
    pub(crate) fn check_answer(&mut self, request_idx: usize, answer: Answer) {
        if self.requests[request_idx].n_ends > 0 {
            return self.violate(format!("request {request_idx} got an answer after its end"));
        }
        let problem = match answer {
            Answer::Token(token) => self.take_token(request_idx, &token),
            Answer::PromptLogprobs(entries) => self.take_prompt_logprobs(request_idx, &entries),
            Answer::Finished(finished) => self.take_end(request_idx, finished),
            Answer::Failed(failure) => {
                self.take_failure(request_idx, failure.code, &failure.message)
            }
        };
        if let Some(problem) = problem {
            self.violate(format!("request {request_idx}: {problem}"));
        }
    }

    fn take_token(&mut self, request_idx: usize, token: &SampledToken) -> Option<String> {
        let request = &mut self.requests[request_idx];
        let output_idx = request.n_emitted;
        let expected = request.reference.get(output_idx).copied();
        if token.output_idx as usize != output_idx || expected != Some(token.token) {
            return Some(format!(
                "output {} is {}, the reference has {expected:?}",
                token.output_idx, token.token
            ));
        }
        let is_exact = match &request.exact {
            Some(exact) => exact.output.get(output_idx) == Some(token),
            None => {
                token.logprob.is_none() && token.top.is_empty() && token.logits_digest.is_none()
            }
        };
        if !is_exact {
            return Some(format!("what is told about output {output_idx} is wrong"));
        }
        request.n_emitted += 1;
        self.outcome.n_tokens += 1;
        None
    }

    fn take_prompt_logprobs(
        &mut self,
        request_idx: usize,
        entries: &[PromptLogprob],
    ) -> Option<String> {
        let request = &mut self.requests[request_idx];
        let from = request.n_prompt_logprobs;
        let expected = request
            .exact
            .as_ref()
            .map_or(&[][..], |exact| &exact.prompt);
        let is_right = expected.len() >= from + entries.len()
            && expected[from..]
                .iter()
                .zip(entries)
                .all(|(of, entry)| of.logprob == entry.logprob && of.top == entry.top);
        if !is_right {
            return Some(format!(
                "{} prompt log-probabilities after {from} are not those that follow",
                entries.len()
            ));
        }
        if request.n_emitted > 0 {
            return Some("a prompt log-probability after a token".to_owned());
        }
        request.n_prompt_logprobs += entries.len();
        self.outcome.n_prompt_logprobs += entries.len() as u64;
        None
    }

    fn take_end(&mut self, request_idx: usize, finished: Finished) -> Option<String> {
        let request = &mut self.requests[request_idx];
        request.n_ends += 1;
        request.has_finished = true;
        request.phase = None;
        let n_prompt_logprobs = request.exact.as_ref().map_or(0, |exact| exact.prompt.len());
        let is_whole = request.n_emitted == request.reference.len()
            && finished.n_output_tokens as usize == request.n_emitted
            && finished.reason == request.reason
            && request.n_prompt_logprobs == n_prompt_logprobs;
        if !is_whole {
            return Some(format!(
                "it ended well ({:?}) after {} of {} tokens and {} of {n_prompt_logprobs} prompt log-probabilities",
                finished.reason,
                request.n_emitted,
                request.reference.len(),
                request.n_prompt_logprobs
            ));
        }
        self.outcome.n_finished += 1;
        None
    }

    fn take_failure(
        &mut self,
        request_idx: usize,
        code: FailureCode,
        message: &str,
    ) -> Option<String> {
        let now = self.now;
        let request = &mut self.requests[request_idx];
        request.n_ends += 1;
        request.phase = None;
        let is_late = request.job.deadline <= now;
        let is_right = match code {
            FailureCode::Cancelled => request.client_left,
            FailureCode::DeadlineExceeded => is_late,
            // Nothing of the load is invalid.
            FailureCode::InvalidRequest
            | FailureCode::ContextLengthExceeded
            | FailureCode::NumericFault => false,
            _ => true,
        };
        if !is_right {
            return Some(format!("it failed with {}: {message}", code.name()));
        }
        if code == FailureCode::Cancelled {
            self.outcome.n_cancelled += 1;
        } else {
            *self.outcome.failures.entry(code.name()).or_default() += 1;
        }
        None
    }
}
