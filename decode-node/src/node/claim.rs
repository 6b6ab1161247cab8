//! What an exporter says about a claimed lease. A peer's word is held against what was asked for: a claim that was
//! given up is nobody's, an announcement that does not agree with the handle ends the import.

use super::{ClaimId, Effect, Node};
use tidemill_core::{Failure, FailureCode, RequestId, SampledToken, SequenceSpec, Timestamp};
use tidemill_kv_transfer::export::{Complete, ExportEvent};

impl Node {
    pub(super) fn hear_exporter(&mut self, claim: ClaimId, event: ExportEvent, now: Timestamp) {
        let Some(&request_id) = self.claims.get(&claim) else {
            return;
        };
        let heard = match event {
            ExportEvent::Claimed { n_tokens, .. } => self.hear_claimed(request_id, n_tokens, now),
            ExportEvent::SlicesFinal(slices) => {
                self.fetch_of(request_id).import.announce(&slices, now)
            }
            ExportEvent::Complete(complete) => self.hear_complete(request_id, &complete, now),
            ExportEvent::Failed(failure) => Err(failure),
        };
        match heard {
            Ok(()) => self.finish_import(request_id),
            Err(failure) => self.fail_request(request_id, failure),
        }
    }

    fn hear_claimed(
        &mut self,
        request_id: RequestId,
        n_tokens: u32,
        now: Timestamp,
    ) -> Result<(), Failure> {
        let expected = self.imports[&request_id].handle.n_tokens;
        if n_tokens != expected {
            return Err(bad_transfer(format!(
                "claimed.n_tokens is {n_tokens}; the handle said {expected}"
            )));
        }
        self.fetch_of(request_id).import.heard(now);
        Ok(())
    }

    fn hear_complete(
        &mut self,
        request_id: RequestId,
        complete: &Complete,
        now: Timestamp,
    ) -> Result<(), Failure> {
        let spec = &self.imports[&request_id].spec;
        self.check_first_token(spec, &complete.first_token)?;
        let fetch = self.fetch_of(request_id);
        fetch.is_complete = true;
        fetch.import.complete(complete, now)
    }

    /// A peer's word is not trusted: a token outside the vocabulary would be fed to the model.
    fn check_first_token(&self, spec: &SequenceSpec, first: &SampledToken) -> Result<(), Failure> {
        let vocab_size = self.config.facts.vocab_size;
        if first.token >= vocab_size {
            return Err(bad_transfer(format!(
                "complete.first_token is beyond the vocabulary of {vocab_size}"
            )));
        }
        if first.output_idx as usize != spec.emitted.len() {
            return Err(bad_transfer(format!(
                "complete.first_token.output_idx is {}; {} tokens were emitted before",
                first.output_idx,
                spec.emitted.len()
            )));
        }
        if spec.stop.stop_token_ids.contains(&first.token) {
            return Err(bad_transfer(
                "complete.first_token is a stop token: nothing is left to decode".to_owned(),
            ));
        }
        Ok(())
    }

    /// The stream of a claim has ended; after `Complete` that is how it should be.
    pub(super) fn lose_claim(&mut self, claim: ClaimId) {
        let Some(&request_id) = self.claims.get(&claim) else {
            return;
        };
        if self.fetch_of(request_id).is_complete {
            return;
        }
        let failure = bad_transfer("the exporter's announcements ended early".to_owned());
        self.fail_request(request_id, failure);
    }

    pub(super) fn close_claim(&mut self, claim: ClaimId) {
        if self.claims.remove(&claim).is_some() {
            self.effects.push(Effect::DropClaim(claim));
        }
    }
}

fn bad_transfer(message: String) -> Failure {
    Failure::new(FailureCode::TransferFailed, message)
}
