//! What is asked for: prompts and sampling that depend on small numbers alone, so that every deployment of every test
//! is asked the same.

use std::sync::Arc;
use tidemill_core::{
    Clock, LogprobSpec, RequestId, SamplingParams, SequenceSpec, StopConditions, SystemClock,
    TokenBias, TokenId, block_hashes,
};
use tidemill_engine::intake::ModelFacts;

/// Longest wait for one answer.
const PATIENCE_US: u64 = 120_000_000;

/// One request as a client means it; how it is served is decided elsewhere.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) prompt: Arc<[TokenId]>,
    /// Given before; a resume when there are any.
    pub(crate) emitted: Vec<TokenId>,
    pub(crate) max_tokens: u32,
    pub(crate) sampling: SamplingParams,
    pub(crate) namespace: String,
    /// Log-probabilities of the prompt's tokens with so many alternatives.
    pub(crate) prompt_top: Option<u32>,
}

impl Ask {
    pub(crate) fn new(prompt: Arc<[TokenId]>, max_tokens: u32, sampling: SamplingParams) -> Self {
        Self {
            prompt,
            emitted: Vec::new(),
            max_tokens,
            sampling,
            namespace: String::new(),
            prompt_top: None,
        }
    }

    /// The same, where only requests of this namespace share a prefix cache.
    pub(crate) fn within(mut self, namespace: &str) -> Self {
        self.namespace = namespace.to_owned();
        self
    }

    /// An attempt at it: with an id of its own.
    pub(crate) fn spec(&self, facts: &ModelFacts) -> SequenceSpec {
        let fingerprint = &facts.layout.model_fingerprint;
        SequenceSpec {
            request_id: RequestId::random(),
            prompt: self.prompt.to_vec(),
            emitted: self.emitted.clone(),
            namespace: self.namespace.clone(),
            block_hashes: block_hashes(fingerprint, &self.namespace, &self.prompt),
            sampling: self.sampling.clone(),
            stop: StopConditions {
                max_tokens: self.max_tokens,
                min_tokens: 0,
                stop_token_ids: Vec::new(),
            },
            logprobs: LogprobSpec {
                output_top: None,
                prompt_top: self.prompt_top,
                logits_digest: true,
            },
            deadline: SystemClock::new().now().plus_us(PATIENCE_US),
            traceparent: String::new(),
        }
    }
}

/// A prompt of `n` tokens. Those of one `salt` are prefixes of each other.
pub(crate) fn prompt(n: usize, salt: u64, vocab_size: u32) -> Arc<[TokenId]> {
    let token = |idx: u64| {
        let mixed = (idx + 1 + salt * 1_000_003).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        u32::try_from((mixed >> 33) % u64::from(vocab_size)).expect("below a u32")
    };
    (0..n as u64).map(token).collect()
}

/// The first `n_shared` tokens of one salt, then `n_own` of another.
pub(crate) fn forked_prompt(
    (n_shared, salt): (usize, u64),
    (n_own, own_salt): (usize, u64),
    vocab_size: u32,
) -> Arc<[TokenId]> {
    let shared = prompt(n_shared, salt, vocab_size);
    let own = prompt(n_own, own_salt, vocab_size);
    shared.iter().chain(own.iter()).copied().collect()
}

/// Draws that a seed decides; for even seeds they depend on every token given before as well.
pub(crate) fn seeded(seed: u64) -> SamplingParams {
    let plain = SamplingParams {
        temperature: 0.9,
        top_p: 0.95,
        seed,
        ..SamplingParams::greedy()
    };
    if !seed.is_multiple_of(2) {
        return plain;
    }
    let bias = |token| TokenBias { token, bias: 1.5 };
    SamplingParams {
        top_k: 200,
        typical_p: 0.98,
        min_p: 0.01,
        repetition_penalty: 1.2,
        presence_penalty: 0.3,
        frequency_penalty: 0.7,
        logit_bias: [3, 5, 8, 13, 21].map(bias).into(),
        ..plain
    }
}

/// True for the long form.
pub(crate) fn is_soak() -> bool {
    std::env::var_os("TIDEMILL_SOAK").is_some_and(|value| value == "1")
}
