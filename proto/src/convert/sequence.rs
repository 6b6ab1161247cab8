//! Requests and tokens.

use super::{ConvertError, id_bytes, required};
use crate::pd::v1;
use tidemill_core::{
    BlockHash, FinishReason, GenerateRequest, LogprobSpec, PrefillRequest, RequestId, SampledToken,
    SamplingParams, SequenceSpec, StopConditions, Timestamp, TokenBias, TokenLogprob,
};

/// One prompt token's log-probability, as it travels.
#[derive(Clone, PartialEq, Debug)]
pub struct PromptLogprobEntry {
    /// Natural log of the token's probability.
    pub logprob: f32,
    /// The most likely tokens at its place, best first.
    pub top: Vec<TokenLogprob>,
}

impl From<&SequenceSpec> for v1::SequenceSpec {
    fn from(spec: &SequenceSpec) -> Self {
        Self {
            request_id: id_bytes(spec.request_id.0),
            prompt: spec.prompt.clone(),
            emitted: spec.emitted.clone(),
            namespace: spec.namespace.clone(),
            block_hashes: spec.block_hashes.iter().flat_map(|hash| hash.0).collect(),
            sampling: Some((&spec.sampling).into()),
            stop: Some(v1::Stop {
                max_tokens: spec.stop.max_tokens,
                stop_token_ids: spec.stop.stop_token_ids.clone(),
                min_tokens: spec.stop.min_tokens,
            }),
            logprobs: Some(v1::Logprobs {
                output_top: spec.logprobs.output_top,
                prompt_top: spec.logprobs.prompt_top,
                logits_digest: spec.logprobs.logits_digest,
            }),
            deadline_us: spec.deadline.0,
            traceparent: spec.traceparent.clone(),
        }
    }
}

impl TryFrom<v1::SequenceSpec> for SequenceSpec {
    type Error = ConvertError;

    fn try_from(wire: v1::SequenceSpec) -> Result<Self, ConvertError> {
        let sampling = required("sampling", wire.sampling)?;
        let stop = required("stop", wire.stop)?;
        let logprobs = wire.logprobs.unwrap_or_default();
        Ok(Self {
            request_id: RequestId(super::id128("request_id", &wire.request_id)?),
            prompt: wire.prompt,
            emitted: wire.emitted,
            namespace: bounded_text("namespace", wire.namespace, 256)?,
            block_hashes: block_hashes(&wire.block_hashes)?,
            sampling: sampling.into(),
            stop: StopConditions {
                max_tokens: stop.max_tokens,
                min_tokens: stop.min_tokens,
                stop_token_ids: stop.stop_token_ids,
            },
            logprobs: LogprobSpec {
                output_top: logprobs.output_top,
                prompt_top: logprobs.prompt_top,
                logits_digest: logprobs.logits_digest,
            },
            deadline: Timestamp(wire.deadline_us),
            traceparent: bounded_text("traceparent", wire.traceparent, 256)?,
        })
    }
}

impl From<&SamplingParams> for v1::Sampling {
    fn from(params: &SamplingParams) -> Self {
        let bias = params.logit_bias.iter();
        let bias = bias.map(|&TokenBias { token, bias }| v1::TokenBias { token, bias });
        Self {
            temperature: params.temperature,
            top_k: params.top_k,
            top_p: params.top_p,
            seed: params.seed,
            min_p: params.min_p,
            typical_p: params.typical_p,
            repetition_penalty: params.repetition_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            logit_bias: bias.collect(),
        }
    }
}

impl From<v1::Sampling> for SamplingParams {
    fn from(wire: v1::Sampling) -> Self {
        let bias = wire.logit_bias.into_iter();
        let bias = bias.map(|v1::TokenBias { token, bias }| TokenBias { token, bias });
        Self {
            temperature: wire.temperature,
            top_k: wire.top_k,
            top_p: wire.top_p,
            seed: wire.seed,
            min_p: wire.min_p,
            typical_p: wire.typical_p,
            repetition_penalty: wire.repetition_penalty,
            presence_penalty: wire.presence_penalty,
            frequency_penalty: wire.frequency_penalty,
            logit_bias: bias.collect(),
        }
    }
}

fn bounded_text(
    field: &'static str,
    text: String,
    bytes_max: usize,
) -> Result<String, ConvertError> {
    if text.len() > bytes_max {
        return Err(ConvertError::new(
            field,
            format!("has {} bytes; at most {bytes_max} are allowed", text.len()),
        ));
    }
    Ok(text)
}

fn block_hashes(bytes: &[u8]) -> Result<Vec<BlockHash>, ConvertError> {
    let (hashes, rest) = bytes.as_chunks::<16>();
    if !rest.is_empty() {
        return Err(ConvertError::new(
            "block_hashes",
            format!("has {} bytes; a multiple of 16 is needed", bytes.len()),
        ));
    }
    Ok(hashes.iter().copied().map(BlockHash).collect())
}

impl From<&PrefillRequest> for v1::PrefillRequest {
    /// The caller fills in the incarnation that it chose.
    fn from(request: &PrefillRequest) -> Self {
        Self {
            spec: Some((&request.spec).into()),
            expected_incarnation: Vec::new(),
        }
    }
}

impl TryFrom<v1::PrefillRequest> for PrefillRequest {
    type Error = ConvertError;

    fn try_from(wire: v1::PrefillRequest) -> Result<Self, ConvertError> {
        Ok(Self {
            spec: required("spec", wire.spec)?.try_into()?,
        })
    }
}

impl From<&GenerateRequest> for v1::GenerateRequest {
    /// The caller fills in the incarnation that it chose.
    fn from(request: &GenerateRequest) -> Self {
        Self {
            spec: Some((&request.spec).into()),
            handle: request.handle.as_ref().map(Into::into),
            expected_incarnation: Vec::new(),
        }
    }
}

impl TryFrom<v1::GenerateRequest> for GenerateRequest {
    type Error = ConvertError;

    fn try_from(wire: v1::GenerateRequest) -> Result<Self, ConvertError> {
        let spec: SequenceSpec = required("spec", wire.spec)?.try_into()?;
        let handle: Option<tidemill_core::KvHandle> =
            wire.handle.map(TryInto::try_into).transpose()?;
        if handle
            .as_ref()
            .is_some_and(|h| h.request_id != spec.request_id)
        {
            return Err(ConvertError::new(
                "handle.request_id",
                "differs from spec.request_id",
            ));
        }
        Ok(Self { spec, handle })
    }
}

impl From<TokenLogprob> for v1::TokenLogprob {
    fn from(entry: TokenLogprob) -> Self {
        Self {
            token: entry.token,
            logprob: entry.logprob,
        }
    }
}

impl From<v1::TokenLogprob> for TokenLogprob {
    fn from(entry: v1::TokenLogprob) -> Self {
        Self {
            token: entry.token,
            logprob: entry.logprob,
        }
    }
}

impl From<&PromptLogprobEntry> for v1::PromptLogprob {
    fn from(entry: &PromptLogprobEntry) -> Self {
        Self {
            logprob: entry.logprob,
            top: entry.top.iter().copied().map(Into::into).collect(),
        }
    }
}

impl From<v1::PromptLogprob> for PromptLogprobEntry {
    fn from(entry: v1::PromptLogprob) -> Self {
        Self {
            logprob: entry.logprob,
            top: entry.top.into_iter().map(Into::into).collect(),
        }
    }
}

impl From<&SampledToken> for v1::SampledToken {
    fn from(sampled: &SampledToken) -> Self {
        Self {
            token: sampled.token,
            output_idx: sampled.output_idx,
            logprob: sampled.logprob,
            top: sampled.top.iter().copied().map(Into::into).collect(),
            logits_digest: sampled.logits_digest,
        }
    }
}

impl From<v1::SampledToken> for SampledToken {
    fn from(wire: v1::SampledToken) -> Self {
        Self {
            token: wire.token,
            output_idx: wire.output_idx,
            logprob: wire.logprob,
            top: wire.top.into_iter().map(Into::into).collect(),
            logits_digest: wire.logits_digest,
        }
    }
}

impl From<Option<FinishReason>> for v1::FinishReason {
    fn from(reason: Option<FinishReason>) -> Self {
        match reason {
            None => Self::Unspecified,
            Some(FinishReason::Stop) => Self::Stop,
            Some(FinishReason::Length) => Self::Length,
        }
    }
}

impl From<v1::FinishReason> for Option<FinishReason> {
    fn from(reason: v1::FinishReason) -> Self {
        match reason {
            v1::FinishReason::Unspecified => None,
            v1::FinishReason::Stop => Some(FinishReason::Stop),
            v1::FinishReason::Length => Some(FinishReason::Length),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> SequenceSpec {
        SequenceSpec {
            request_id: RequestId(77),
            prompt: vec![1, 2, 3],
            emitted: vec![4],
            namespace: "team".into(),
            block_hashes: vec![BlockHash([1; 16]), BlockHash([2; 16])],
            sampling: SamplingParams {
                temperature: 0.7,
                top_k: 40,
                top_p: 0.9,
                min_p: 0.05,
                typical_p: 0.95,
                repetition_penalty: 1.1,
                presence_penalty: -0.5,
                frequency_penalty: 1.5,
                logit_bias: [
                    TokenBias {
                        token: 3,
                        bias: -100.0,
                    },
                    TokenBias {
                        token: 9,
                        bias: 2.5,
                    },
                ]
                .into(),
                seed: 5,
            },
            stop: StopConditions {
                max_tokens: 9,
                min_tokens: 4,
                stop_token_ids: vec![2],
            },
            logprobs: LogprobSpec {
                output_top: Some(3),
                prompt_top: None,
                logits_digest: true,
            },
            deadline: Timestamp(123),
            traceparent: "00-ab-cd-01".into(),
        }
    }

    #[test]
    fn a_spec_survives_the_wire() {
        let wire = v1::SequenceSpec::from(&spec());
        assert_eq!(SequenceSpec::try_from(wire), Ok(spec()));
    }

    #[test]
    fn a_ragged_hash_list_is_refused_by_name() {
        let mut wire = v1::SequenceSpec::from(&spec());
        wire.block_hashes.pop();
        let error = SequenceSpec::try_from(wire).expect_err("31 bytes");
        assert_eq!(error.field, "block_hashes");
    }

    #[test]
    fn a_handle_of_another_request_is_refused() {
        let wire = v1::GenerateRequest {
            spec: Some((&spec()).into()),
            handle: Some(v1::KvHandle {
                request_id: id_bytes(78),
                node_id: "prefill-0".into(),
                incarnation: id_bytes(1),
                capability: id_bytes(2),
                layout_fingerprint: vec![0; 16],
                ..Default::default()
            }),
            expected_incarnation: vec![],
        };
        let error = GenerateRequest::try_from(wire).expect_err("another id");
        assert_eq!(error.field, "handle.request_id");
    }
}
