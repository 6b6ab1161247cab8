//! What a node checks before it takes a sequence in, the same for both roles.
//!
//! An internal port does not trust its network: everything that the router has checked is checked again here,
//! and block hashes are computed again, since a wrong hash would share one prompt's KV with another.

use tidemill_core::{
    BlockHash, Failure, FailureCode, KvLayout, SequenceSpec, Timestamp, block_hashes,
};

/// The facts of the loaded model that a request is held against.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ModelFacts {
    /// Token ids lie below this.
    pub vocab_size: u32,
    /// Most tokens in a sequence.
    pub context_length: u32,
    /// Shape of KV blocks; holds the identity of the weights.
    pub layout: KvLayout,
}

/// Checks a request and returns the hashes of all full blocks of its context (prompt, then emitted tokens).
///
/// # Errors
/// `DeadlineExceeded` when it comes too late; `InvalidRequest` or `ContextLengthExceeded` with the field, the
/// value and the bound.
pub fn check(
    facts: &ModelFacts,
    spec: &SequenceSpec,
    now: Timestamp,
) -> Result<Vec<BlockHash>, Failure> {
    if spec.deadline <= now {
        return Err(Failure::new(
            FailureCode::DeadlineExceeded,
            format!(
                "the deadline passed {} ms before the request arrived",
                now.since_us(spec.deadline) / 1000
            ),
        ));
    }
    spec.check(facts.vocab_size, facts.context_length)?;
    let context: Vec<_> = spec.prompt.iter().chain(&spec.emitted).copied().collect();
    let hashes = block_hashes(&facts.layout.model_fingerprint, &spec.namespace, &context);
    let n_prompt = spec.prompt.len() / tidemill_core::bounds::HASH_BLOCK_TOKENS;
    if spec.block_hashes[..] != hashes[..n_prompt] {
        return Err(Failure::new(
            FailureCode::InvalidRequest,
            format!(
                "block_hashes ({} given) differ from those of this prompt under this model ({n_prompt} \
                 expected); router and node must serve the same model files",
                spec.block_hashes.len()
            ),
        ));
    }
    Ok(hashes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_core::{KvDtype, LogprobSpec, RequestId, SamplingParams, StopConditions};

    fn facts() -> ModelFacts {
        ModelFacts {
            vocab_size: 100,
            context_length: 64,
            layout: KvLayout::new([7; 32], 2, 1, 8, KvDtype::F32).expect("valid"),
        }
    }

    fn spec() -> SequenceSpec {
        let prompt: Vec<u32> = (0..20).collect();
        SequenceSpec {
            request_id: RequestId(1),
            block_hashes: block_hashes(&[7; 32], "", &prompt),
            prompt,
            emitted: vec![],
            namespace: String::new(),
            sampling: SamplingParams::greedy(),
            stop: StopConditions {
                max_tokens: 16,
                min_tokens: 0,
                stop_token_ids: vec![],
            },
            logprobs: LogprobSpec::default(),
            deadline: Timestamp(1_000_000),
            traceparent: String::new(),
        }
    }

    #[test]
    fn hashes_reach_over_prompt_and_emitted_tokens() {
        let mut resumed = spec();
        resumed.emitted = (0..12).collect();
        let hashes = check(&facts(), &resumed, Timestamp(0)).expect("valid");
        assert_eq!(hashes.len(), 2);
        assert_eq!(hashes[0], resumed.block_hashes[0]);
    }

    #[test]
    fn late_and_forged_requests_are_refused() {
        let late = check(&facts(), &spec(), Timestamp(1_000_000)).expect_err("late");
        assert_eq!(late.code, FailureCode::DeadlineExceeded);
        let mut forged = spec();
        forged.block_hashes[0].0[0] ^= 1;
        let error = check(&facts(), &forged, Timestamp(0)).expect_err("forged");
        assert_eq!(error.code, FailureCode::InvalidRequest);
        assert!(error.message.starts_with("block_hashes"));
        forged.block_hashes.clear();
        assert!(check(&facts(), &forged, Timestamp(0)).is_err());
    }
}
