//! What the client hears: tokens and prompt log-probabilities in order and once, over all attempts, and one end.
//!
//! The end leaves every node first and is the machine's last effect.

use super::event::Effect;
use super::{Dispatch, Side, count, n_prompt_logprobs};
use crate::requests::{self, Answer, PromptLogprob};
use tidemill_core::planted::PlantedBug;
use tidemill_core::{Failure, FinishReason, SampledToken};

impl Dispatch {
    /// Gives the client the next token, or ends the request when it is not exactly the next.
    pub(super) fn emit(&mut self, token: SampledToken, side: Side) -> bool {
        let n_emitted = self.emitted.len();
        if token.output_idx as usize != n_emitted {
            self.violate(side, "a token out of order");
            return false;
        }
        if n_emitted >= self.job.stop.max_tokens as usize {
            self.violate(side, "more tokens than max_tokens");
            return false;
        }
        self.emitted.push(token.token);
        self.effects.push(Effect::Answer(Answer::Token(token)));
        true
    }

    /// A later attempt tells them again from the start; the client gets each once.
    pub(super) fn take_prompt_logprobs(&mut self, entries: Vec<PromptLogprob>, side: Side) {
        let n_known = self.n_prompt_logprobs;
        let attempt = self.live();
        let n_before = attempt.n_prompt_logprobs;
        attempt.n_prompt_logprobs += entries.len();
        let n_now = attempt.n_prompt_logprobs;
        if n_now > n_prompt_logprobs(&self.job) {
            return self.violate(side, "more prompt log-probabilities than were asked for");
        }
        let n_again = if PlantedBug::PromptLogprobsAgain.is_on() {
            0
        } else {
            n_known.saturating_sub(n_before)
        };
        let new: Vec<_> = entries.into_iter().skip(n_again).collect();
        if !new.is_empty() {
            self.n_prompt_logprobs += new.len();
            self.effects
                .push(Effect::Answer(Answer::PromptLogprobs(new)));
        }
    }

    pub(super) fn has_prompt_logprobs(&self) -> bool {
        self.n_prompt_logprobs == n_prompt_logprobs(&self.job)
    }

    pub(super) fn note_cached(&mut self, n_tokens: u32) {
        // Later attempts find what earlier ones of the same request left behind.
        if self.usage.n_attempts == 1 {
            self.usage.n_cached_tokens = n_tokens;
        }
    }

    /// The positive end.
    pub(super) fn finish(&mut self, reason: FinishReason) {
        let finished = requests::Finished {
            reason,
            n_output_tokens: count(self.emitted.len()),
            n_cached_tokens: self.usage.n_cached_tokens,
        };
        self.end(Answer::Finished(finished));
    }

    /// The negative end.
    pub(super) fn fail(&mut self, failure: Failure) {
        self.end(Answer::Failed(failure));
    }

    fn end(&mut self, answer: Answer) {
        if let Some(attempt) = self.attempt.take() {
            attempt.leave(&mut self.effects);
        }
        self.usage.n_output_tokens = count(self.emitted.len());
        self.effects.push(Effect::Account(self.usage));
        self.effects.push(Effect::Answer(answer));
        self.is_ended = true;
    }
}
