//! One choice of an answer: what dispatch tells about a job, turned into what a client is told.
//!
//! Streaming and collecting read the very same events, so that they cannot differ. A choice ends exactly once, with
//! a reason or with a failure; an answer stream that breaks off without either is a failure, never a quiet end.

use crate::requests::{Answer, Answers, PromptLogprob};
use crate::text::output::{OutputText, Piece, ScoredToken};
use futures::Stream;
use std::collections::VecDeque;
use tidemill_core::{Failure, FailureCode, FinishReason, SampledToken, TokenId};

/// What is told about a choice.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum ChoiceEvent {
    /// More output; never empty.
    Piece(Piece),
    /// The positive end.
    Ended(Ended),
    /// The negative end, of the whole request.
    Failed(Failure),
}

/// How a choice ended well.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Ended {
    pub(super) reason: FinishReason,
    /// Sampled tokens, a final stop token among them.
    pub(super) n_output_tokens: u32,
    /// Of all sampled tokens, a final stop token included; 0 when there is none. It means something only when
    /// log-probabilities were asked for.
    pub(super) mean_logprob: f64,
    /// Unknown when a stop string ended the output before the nodes told.
    pub(super) n_cached_tokens: Option<u32>,
}

/// The prompt, given back before the output.
pub(super) struct Echo {
    pub(super) text: String,
    /// The prompt's tokens, without log-probabilities; empty when none were asked for.
    pub(super) tokens: Vec<ScoredToken>,
}

/// A choice in progress.
pub(super) struct Choice {
    pub(super) output: OutputText,
    pub(super) stop_token_ids: Vec<TokenId>,
    pub(super) echo: Option<Echo>,
    pub(super) prompt_logprobs: Vec<PromptLogprob>,
    pub(super) n_output_tokens: u32,
    /// Of the sampled tokens' log-probabilities.
    pub(super) logprob_sum: f64,
}

impl Choice {
    pub(super) fn new(
        output: OutputText,
        stop_token_ids: Vec<TokenId>,
        echo: Option<Echo>,
    ) -> Self {
        Self {
            output,
            stop_token_ids,
            echo,
            prompt_logprobs: Vec::new(),
            n_output_tokens: 0,
            logprob_sum: 0.0,
        }
    }

    /// Takes the next answer (`None`: the answers broke off).
    fn apply(&mut self, answer: Option<Answer>, events: &mut VecDeque<ChoiceEvent>) {
        let applied = match answer {
            Some(Answer::PromptLogprobs(mut more)) => {
                if self
                    .echo
                    .as_ref()
                    .is_some_and(|echo| !echo.tokens.is_empty())
                {
                    self.prompt_logprobs.append(&mut more);
                }
                Ok(())
            }
            Some(Answer::Token(sampled)) => self.take_token(&sampled, events),
            Some(Answer::Finished(finished)) => self.give_echo(events).map(|()| {
                let piece = self.output.finish();
                let reason = if piece.stopped {
                    FinishReason::Stop
                } else {
                    finished.reason
                };
                push_piece(piece, events);
                events.push_back(self.ended(reason, Some(finished.n_cached_tokens)));
            }),
            Some(Answer::Failed(failure)) => Err(failure),
            None => Err(Failure::new(
                FailureCode::Internal,
                "the router lost this request; try again",
            )),
        };
        if let Err(failure) = applied {
            events.push_back(ChoiceEvent::Failed(failure));
        }
    }

    fn take_token(
        &mut self,
        sampled: &SampledToken,
        events: &mut VecDeque<ChoiceEvent>,
    ) -> Result<(), Failure> {
        self.give_echo(events)?;
        self.n_output_tokens += 1;
        // A token that nobody has scored makes its choice the last.
        self.logprob_sum += sampled.logprob.map_or(f64::NEG_INFINITY, f64::from);
        // A stop token is counted and not shown; `Finished` follows it.
        if self.stop_token_ids.contains(&sampled.token) {
            return Ok(());
        }
        let piece = self.output.push(sampled);
        let stopped = piece.stopped;
        push_piece(piece, events);
        if stopped {
            events.push_back(self.ended(FinishReason::Stop, None));
        }
        Ok(())
    }

    fn ended(&self, reason: FinishReason, n_cached_tokens: Option<u32>) -> ChoiceEvent {
        ChoiceEvent::Ended(Ended {
            reason,
            n_output_tokens: self.n_output_tokens,
            mean_logprob: self.logprob_sum / f64::from(self.n_output_tokens.max(1)),
            n_cached_tokens,
        })
    }

    /// Once: the prompt, with the log-probabilities that have come by now.
    fn give_echo(&mut self, events: &mut VecDeque<ChoiceEvent>) -> Result<(), Failure> {
        let Some(mut echo) = self.echo.take() else {
            return Ok(());
        };
        let logprobs = std::mem::take(&mut self.prompt_logprobs);
        let n_expected = echo.tokens.len().saturating_sub(1);
        if logprobs.len() != n_expected {
            return Err(Failure::new(
                FailureCode::Internal,
                format!(
                    "{} log-probabilities came for the prompt; {n_expected} were asked for",
                    logprobs.len()
                ),
            ));
        }
        for (token, logprob) in echo.tokens.iter_mut().skip(1).zip(logprobs) {
            token.logprob = Some(logprob.logprob);
            token.top = logprob.top;
        }
        let piece = Piece {
            text: echo.text,
            tokens: echo.tokens,
            stopped: false,
        };
        push_piece(piece, events);
        Ok(())
    }
}

fn push_piece(piece: Piece, events: &mut VecDeque<ChoiceEvent>) {
    if !piece.is_empty() {
        events.push_back(ChoiceEvent::Piece(piece));
    }
}

/// The events of a choice, up to and with its end. Dropping the stream cancels the job.
pub(super) fn events(choice: Choice, answers: Answers) -> impl Stream<Item = ChoiceEvent> + Send {
    let state = Some((choice, answers, VecDeque::new()));
    futures::stream::unfold(state, |state| async move {
        let (mut choice, mut answers, mut events) = state?;
        let event = loop {
            match events.pop_front() {
                Some(event) => break event,
                None => choice.apply(answers.next().await, &mut events),
            }
        };
        let is_end = !matches!(event, ChoiceEvent::Piece(_));
        Some((event, (!is_end).then_some((choice, answers, events))))
    })
}
