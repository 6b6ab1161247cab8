//! What an attempt asks for: the nodes that may serve it, and the sequence that they are given.

use super::event::Outside;
use super::{Dispatch, Hashes, n_prompt_logprobs};
use crate::placement::{Candidate, Placement, Target, Unplaced, Want, place};
use tidemill_core::planted::PlantedBug;
use tidemill_core::{RequestId, SequenceSpec, block_hashes};

impl Dispatch {
    /// Nodes that may serve this request. What the client has seen came from one model: the rest must too.
    pub(super) fn candidates(&self, outside: &Outside<'_>) -> Vec<Candidate> {
        let mut candidates = (outside.candidates)();
        let has_begun = !self.emitted.is_empty() || self.n_prompt_logprobs > 0;
        if let Some(hashes) = self.hashes.as_ref().filter(|_| has_begun) {
            candidates.retain(|node| node.model_fingerprint == hashes.model_fingerprint);
        }
        candidates
    }

    pub(super) fn place(&self, candidates: &[Candidate]) -> Result<Placement, Unplaced> {
        let avoided = [&self.failed[..], &self.suspects[..]].concat();
        place(candidates, &self.want(&avoided))
            .or_else(|_| place(candidates, &self.want(&self.failed)))
    }

    pub(super) fn want<'a>(&self, failed: &'a [Target]) -> Want<'a> {
        Want {
            n_context_tokens: (self.job.prompt.len() + self.emitted.len()) as u64,
            needs_decode: self.job.stop.max_tokens as usize > self.emitted.len() + 1,
            split: self.config.split,
            failed,
        }
    }

    pub(super) fn spec(
        &mut self,
        request_id: RequestId,
        model_fingerprint: &[u8; 32],
    ) -> SequenceSpec {
        let job = &self.job;
        if self
            .hashes
            .as_ref()
            .is_none_or(|h| h.model_fingerprint != *model_fingerprint)
        {
            self.hashes = Some(Hashes {
                model_fingerprint: *model_fingerprint,
                of_prompt: block_hashes(model_fingerprint, &job.namespace, &job.prompt),
            });
        }
        let mut emitted = self.emitted.clone();
        if PlantedBug::EmittedForgotten.is_on() {
            emitted.clear();
        }
        let hashes = self.hashes.as_ref().expect("computed just above");
        let mut logprobs = job.logprobs;
        if self.n_prompt_logprobs == n_prompt_logprobs(job) {
            logprobs.prompt_top = None;
        }
        SequenceSpec {
            request_id,
            prompt: job.prompt.clone(),
            emitted,
            namespace: job.namespace.clone(),
            block_hashes: hashes.of_prompt.clone(),
            sampling: job.sampling.clone(),
            stop: job.stop.clone(),
            logprobs,
            deadline: job.deadline,
            traceparent: job.traceparent.clone(),
        }
    }
}
