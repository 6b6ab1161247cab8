//! What a node is asked to do, and what it answers, as plain values.
//!
//! Prompt and output travel apart: a resumed request is (prompt, tokens already given), so that sampling,
//! which counts positions of the output, goes on exactly where it stopped. All numbers were checked at
//! the router's edge; `check` is the one shared check that nodes run again, since an internal port does
//! not trust its network.

use crate::block_hash::BlockHash;
use crate::bounds;
use crate::clock::Timestamp;
use crate::failure::{Failure, FailureCode};
use crate::ids::{RequestId, TokenId};
use crate::kv_handle::KvHandle;
use crate::sampling::SamplingParams;

/// When generation ends on the node. Stop *strings* are the router's, which holds the text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StopConditions {
    /// Most output tokens, those already emitted included. 0: only prompt log-probabilities.
    pub max_tokens: u32,
    /// Stop tokens are not drawn before so many output tokens; at most `max_tokens`.
    pub min_tokens: u32,
    /// Tokens that end generation; the token itself is reported, its text is not shown.
    pub stop_token_ids: Vec<TokenId>,
}

/// Which log-probabilities to report (natural log, of the raw distribution before temperature).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LogprobSpec {
    /// Report each output token with this many top alternatives; `None` reports nothing.
    pub output_top: Option<u32>,
    /// Report each prompt token (from the second on) with this many top alternatives.
    pub prompt_top: Option<u32>,
    /// Report an xxh3 digest of each output token's logits row, for bit-equality checks.
    pub logits_digest: bool,
}

/// The part of a request that both roles need.
#[derive(Clone, PartialEq, Debug)]
pub struct SequenceSpec {
    /// Ours, unique for ever.
    pub request_id: RequestId,
    /// Prompt tokens; at least one.
    pub prompt: Vec<TokenId>,
    /// Output tokens already given to the client (resume); empty on the first try.
    pub emitted: Vec<TokenId>,
    /// Prefix-cache namespace; empty is the shared one.
    pub namespace: String,
    /// Hashes of the full blocks of `prompt`, computed by the router and recomputed here.
    pub block_hashes: Vec<BlockHash>,
    /// Sampling.
    pub sampling: SamplingParams,
    /// Ending.
    pub stop: StopConditions,
    /// Log-probabilities.
    pub logprobs: LogprobSpec,
    /// Absolute; expired work never starts.
    pub deadline: Timestamp,
    /// W3C `traceparent`, passed on unchanged in meaning; empty when there is none.
    pub traceparent: String,
}

impl SequenceSpec {
    /// Tokens whose KV must exist before the next token can be drawn.
    pub fn n_context(&self) -> usize {
        self.prompt.len() + self.emitted.len()
    }

    /// The one shared check of everything that came from a client.
    ///
    /// # Errors
    /// Names the field, the value and the bound.
    pub fn check(&self, vocab_size: u32, context_length: u32) -> Result<(), Failure> {
        self.check_tokens(vocab_size)?;
        self.sampling.check(vocab_size)?;
        self.check_output()?;
        let n_total = self.prompt.len() + self.stop.max_tokens as usize;
        let limit = context_length.min(bounds::SEQUENCE_TOKENS_MAX) as usize;
        if n_total > limit {
            return Err(Failure::new(
                FailureCode::ContextLengthExceeded,
                format!(
                    "prompt has {} tokens and max_tokens is {}; together at most {limit}",
                    self.prompt.len(),
                    self.stop.max_tokens
                ),
            ));
        }
        Ok(())
    }

    fn check_tokens(&self, vocab_size: u32) -> Result<(), Failure> {
        if self.prompt.is_empty() {
            return Err(invalid("prompt is empty; it needs at least one token"));
        }
        let max = self.stop.max_tokens as usize;
        if !self.emitted.is_empty() && self.emitted.len() >= max {
            return Err(invalid(format!(
                "emitted has {} tokens; fewer than max_tokens ({max}) are allowed",
                self.emitted.len()
            )));
        }
        if self.stop.stop_token_ids.len() > bounds::SEQUENCE_STOP_TOKENS_MAX {
            return Err(invalid(format!(
                "stop_token_ids has {} entries; at most {} are allowed",
                self.stop.stop_token_ids.len(),
                bounds::SEQUENCE_STOP_TOKENS_MAX
            )));
        }
        let fields = [
            ("prompt", &self.prompt),
            ("emitted", &self.emitted),
            ("stop_token_ids", &self.stop.stop_token_ids),
        ];
        for (field, tokens) in fields {
            if let Some(token) = tokens.iter().find(|&&t| t >= vocab_size) {
                return Err(invalid(format!(
                    "{field} holds token id {token}; the vocabulary has ids below {vocab_size}"
                )));
            }
        }
        Ok(())
    }

    fn check_output(&self) -> Result<(), Failure> {
        let StopConditions {
            min_tokens,
            max_tokens,
            ..
        } = self.stop;
        if min_tokens > max_tokens {
            return Err(invalid(format!(
                "min_tokens is {min_tokens}; at most max_tokens ({max_tokens}) is allowed"
            )));
        }
        for (field, top) in [
            ("logprobs", self.logprobs.output_top),
            ("prompt_logprobs", self.logprobs.prompt_top),
        ] {
            if let Some(top) = top.filter(|&top| top > bounds::TOP_LOGPROBS_MAX) {
                return Err(invalid(format!(
                    "{field} is {top}; at most {} are allowed",
                    bounds::TOP_LOGPROBS_MAX
                )));
            }
        }
        Ok(())
    }
}

pub(crate) fn invalid(message: impl Into<String>) -> Failure {
    Failure::new(FailureCode::InvalidRequest, message)
}

/// Router -> prefill node.
#[derive(Clone, PartialEq, Debug)]
pub struct PrefillRequest {
    /// What to compute.
    pub spec: SequenceSpec,
}

/// Router -> decode node.
#[derive(Clone, PartialEq, Debug)]
pub struct GenerateRequest {
    /// What to continue.
    pub spec: SequenceSpec,
    /// Where its KV is; `None`: the decode node prefills by itself.
    pub handle: Option<KvHandle>,
}

/// One token with its log-probability.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TokenLogprob {
    /// The token.
    pub token: TokenId,
    /// Natural log of its probability.
    pub logprob: f32,
}

/// One sampled token and what was asked about it.
#[derive(Clone, PartialEq, Debug)]
pub struct SampledToken {
    /// The token.
    pub token: TokenId,
    /// Place in the output, from 0.
    pub output_idx: u32,
    /// Its log-probability, when asked.
    pub logprob: Option<f32>,
    /// The most likely tokens, best first, when asked.
    pub top: Vec<TokenLogprob>,
    /// Digest of the logits row, when asked.
    pub logits_digest: Option<u64>,
}

/// Why generation ended well.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FinishReason {
    /// A stop token or stop string.
    Stop,
    /// `max_tokens` or the context is used up.
    Length,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> SequenceSpec {
        SequenceSpec {
            request_id: RequestId(1),
            prompt: vec![1, 2, 3],
            emitted: vec![],
            namespace: String::new(),
            block_hashes: vec![],
            sampling: SamplingParams::greedy(),
            stop: StopConditions {
                max_tokens: 5,
                min_tokens: 0,
                stop_token_ids: vec![],
            },
            logprobs: LogprobSpec::default(),
            deadline: Timestamp(1),
            traceparent: String::new(),
        }
    }

    #[test]
    fn the_context_limit_is_inclusive() {
        assert_eq!(spec().check(10, 8), Ok(()));
        let error = spec().check(10, 7).expect_err("one too many");
        assert_eq!(error.code, FailureCode::ContextLengthExceeded);
        assert!(error.message.contains('7') && error.message.contains('3'));
    }

    #[test]
    fn every_token_id_field_is_checked() {
        for field in ["prompt", "emitted", "stop_token_ids"] {
            let mut bad = spec();
            match field {
                "prompt" => bad.prompt[1] = 10,
                "emitted" => bad.emitted = vec![10],
                _ => bad.stop.stop_token_ids = vec![10],
            }
            let error = bad.check(10, 100).expect_err(field);
            assert!(error.message.starts_with(field), "{error}");
        }
    }

    #[test]
    fn what_is_told_of_the_output_is_bounded() {
        let mut bad = spec();
        bad.stop.min_tokens = 5;
        assert_eq!(bad.check(10, 100), Ok(()));
        bad.stop.min_tokens = 6;
        let error = bad.check(10, 100).expect_err("more than max_tokens");
        assert!(error.message.starts_with("min_tokens is 6"), "{error}");
        let mut bad = spec();
        bad.logprobs.output_top = Some(21);
        assert!(bad.check(10, 100).is_err());
        let mut bad = spec();
        bad.sampling.min_p = 1.5;
        assert!(bad.check(10, 100).is_err());
    }
}
