//! Every failure of a request, decided in one place.
//!
//! Prefill lost: the prompt goes to another one. Decode lost before its first token: another decode node takes
//! over the same export. Decode lost later: prompt and emitted tokens are prefilled again and the stream goes on
//! with the same next token. Nothing possible: one failure with a stable code. What would fail anywhere (a
//! client's mistake, a deadline) is never tried twice.

use super::event::{Effect, Note, Outcome, Outside};
use super::{Dispatch, Side, deadline_passed};
use crate::placement::{Target, Unplaced, best_decode};
use tidemill_core::planted::PlantedBug;
use tidemill_core::{CallId, Epoch, Failure, FailureCode, FinishReason, Timestamp};

impl Dispatch {
    pub(super) fn lose_call(&mut self, call: CallId, failure: Failure, outside: &mut Outside<'_>) {
        let attempt = self.attempt.as_ref();
        if attempt.is_some_and(|a| a.is_prefill_call(call)) {
            self.leg(Side::Prefill).is_open = false;
            self.prefill_failed(failure, outside);
        } else if attempt.is_some_and(|a| a.is_decode_call(call)) {
            self.leg(Side::Decode).is_open = false;
            self.decode_failed(failure, outside);
        } else if attempt.is_some_and(|a| a.rebinding == Some(call)) {
            self.take_rebound(Err(failure), outside);
        } else {
            self.effects.push(Effect::Note(Note::LateEvent));
        }
    }

    pub(super) fn prefill_failed(&mut self, failure: Failure, outside: &mut Outside<'_>) {
        self.report_failure(Side::Prefill, failure.code);
        // The importer has everything already, first token included.
        if self.live().decode.as_ref().is_some_and(|leg| leg.has_kv) {
            return;
        }
        if !may_retry(failure.code) {
            return self.fail(failure);
        }
        let target = self.leg(Side::Prefill).target.clone();
        if failure.code == FailureCode::TransferFailed {
            self.suspects.push(target);
        } else {
            self.failed.push(target);
        }
        self.again(failure, outside);
    }

    pub(super) fn decode_failed(&mut self, failure: Failure, outside: &mut Outside<'_>) {
        let leg = self.leg(Side::Decode);
        let (target, is_accepted) = (leg.target.clone(), leg.is_accepted);
        match failure.code {
            // The lease is no more, or its bytes do not arrive: a new export, from another node if there is one.
            FailureCode::Gone if is_accepted => self.suspect_exporter(failure, outside),
            FailureCode::TransferFailed => self.suspect_exporter(failure, outside),
            code if may_retry(code) => {
                self.report_failure(Side::Decode, code);
                self.failed.push(target);
                self.take_over(failure, outside);
            }
            code => {
                self.report_failure(Side::Decode, code);
                self.fail(failure);
            }
        }
    }

    fn suspect_exporter(&mut self, failure: Failure, outside: &mut Outside<'_>) {
        let importer = self.leg(Side::Decode).target.clone();
        let exporter = self
            .live()
            .exporter
            .as_ref()
            .map(|node| node.target.clone());
        // Two exporters in a row that one importer could not read from: it may be the importer.
        if !self.suspects.is_empty() {
            self.suspects.push(importer);
        }
        self.suspects.extend(exporter);
        self.again(failure, outside);
    }

    /// Gives the export to another decode node, if that can still continue it; else starts again.
    fn take_over(&mut self, failure: Failure, outside: &mut Outside<'_>) {
        let can_attempt = self.usage.n_attempts < self.config.n_attempts_max;
        let attempt = self.live();
        let has_decoded = attempt.decode.as_ref().is_some_and(|leg| leg.n_tokens > 0);
        let has_lease = attempt.prefill.as_ref().is_some_and(|leg| leg.is_held)
            && attempt
                .handle
                .as_ref()
                .is_some_and(|handle| handle.expires_at > outside.now);
        let is_exporter_lost = attempt
            .prefill
            .as_ref()
            .is_some_and(|leg| !leg.is_open && !attempt.is_prefilled);
        let can_follow = has_lease && !has_decoded && !is_exporter_lost && can_attempt;
        if !can_follow || self.best_importer(outside).is_none() {
            return self.again(failure, outside);
        }
        let call = self.new_call();
        self.usage.n_attempts += 1;
        let attempt = self.attempt.as_mut().expect("looked at just above");
        attempt.leave_decode(&mut self.effects);
        attempt.rebinding = Some(call);
        let handle = attempt.handle.as_mut().expect("looked at just above");
        let epoch = Epoch(handle.epoch.0 + 1);
        handle.epoch = epoch;
        let exporter = attempt.prefill.as_ref().expect("looked at just above");
        self.effects.push(Effect::Note(Note::TakeOver));
        self.effects.push(Effect::Rebind {
            call,
            target: exporter.target.clone(),
            request_id: attempt.id,
            capability: handle.capability,
            epoch,
        });
        self.last_failure = Some(failure);
    }

    pub(super) fn take_rebound(&mut self, result: Result<(), Failure>, outside: &mut Outside<'_>) {
        self.live().rebinding = None;
        match result {
            Ok(()) => self.call_importer(outside),
            Err(_) if PlantedBug::RebindLossIgnored.is_on() => {}
            Err(failure) => {
                self.report_failure(Side::Prefill, failure.code);
                let target = self.leg(Side::Prefill).target.clone();
                self.suspects.push(target);
                self.again(failure, outside);
            }
        }
    }

    /// The least loaded decode node that this attempt has not called yet.
    pub(super) fn best_importer(&mut self, outside: &Outside<'_>) -> Option<Target> {
        let candidates = self.candidates(outside);
        let attempt = self.attempt.as_ref()?;
        let avoided = [&self.failed[..], &attempt.decoders[..]].concat();
        best_decode(&candidates, &self.want(&avoided), attempt.exporter.as_ref())
            .map(|node| node.target.clone())
    }

    /// Gives the attempt up and starts another, with what the client has as its beginning.
    pub(super) fn again(&mut self, failure: Failure, outside: &mut Outside<'_>) {
        // The last token has been given; what was lost is only the word that it was the last.
        if let Some(reason) = self.complete_reason() {
            return match self.has_prompt_logprobs() {
                true => self.finish(reason),
                // Nothing is left to compute, so nobody could tell the missing ones.
                false => self.fail(failure),
            };
        }
        if let Some(attempt) = self.attempt.take() {
            attempt.leave(&mut self.effects);
        }
        self.last_failure = Some(failure);
        let note = if self.emitted.is_empty() {
            Note::Retry
        } else {
            Note::Resume
        };
        self.effects.push(Effect::Note(note));
        self.start_attempt(outside);
    }

    /// Why nothing can follow what the client was given, if so.
    fn complete_reason(&self) -> Option<FinishReason> {
        let last = self.emitted.last()?;
        if self.job.stop.stop_token_ids.contains(last) {
            return Some(FinishReason::Stop);
        }
        let is_full = self.emitted.len() >= self.job.stop.max_tokens as usize;
        is_full.then_some(FinishReason::Length)
    }

    /// No attempt is left.
    pub(super) fn give_up(&mut self) {
        let n_attempts = self.usage.n_attempts;
        let last = self.last_failure.take();
        let last = last.expect("an attempt is used up by a failure");
        self.fail(Failure::new(
            client_code(last.code),
            format!(
                "{n_attempts} attempts failed; the last one: {}",
                last.message
            ),
        ));
    }

    pub(super) fn fail_unplaced(&mut self, unplaced: Unplaced) {
        let failure = match (self.last_failure.take(), unplaced) {
            (_, Unplaced::TooLong { .. }) => {
                Failure::new(FailureCode::ContextLengthExceeded, unplaced.to_string())
            }
            (None, _) => Failure::new(FailureCode::Unavailable, unplaced.to_string()),
            (Some(last), _) => Failure::new(
                client_code(last.code),
                format!("{}; {unplaced} is left to try again", last.message),
            ),
        };
        self.fail(failure);
    }

    /// Nodes disagree, or one breaks the order of its stream: no token after this could be trusted.
    pub(super) fn violate(&mut self, side: Side, what: &str) {
        let node_id = self.leg(side).target.node_id.clone();
        self.effects.push(Effect::Note(Note::Violation));
        self.report(side, Outcome::Failed);
        self.fail(Failure::new(
            FailureCode::Internal,
            format!("node {node_id} sent {what}"),
        ));
    }

    pub(super) fn watch_time(&mut self, outside: &mut Outside<'_>) {
        if self.job.deadline <= outside.now {
            return self.fail(deadline_passed());
        }
        if self.stall_at().is_none_or(|stall| outside.now < stall) {
            return;
        }
        let leg = self.leg(Side::Decode);
        let failure = Failure::new(
            FailureCode::Unavailable,
            format!(
                "node {} has said nothing for {} ms",
                leg.target.node_id,
                outside.now.since_us(leg.heard_at) / 1000
            ),
        );
        self.effects.push(Effect::Note(Note::Stall));
        self.decode_failed(failure, outside);
    }

    /// When the decode node counts as standing still; `None` while it may rightly be silent.
    pub(super) fn stall_at(&self) -> Option<Timestamp> {
        let attempt = self.attempt.as_ref()?;
        let leg = attempt.decode.as_ref().filter(|leg| leg.is_open)?;
        if PlantedBug::StallUnnoticed.is_on() {
            return None;
        }
        if leg.n_tokens > 0 {
            return Some(leg.heard_at.plus_us(self.config.gap_us_max));
        }
        if !leg.is_accepted {
            return Some(leg.heard_at.plus_us(self.config.start_us_max));
        }
        // An importer waits for prefill; one that prefills by itself may have a long queue.
        let (_, first_at) = attempt.first.as_ref()?;
        Some(
            leg.heard_at
                .max(*first_at)
                .plus_us(self.config.start_us_max),
        )
    }

    fn report_failure(&mut self, side: Side, code: FailureCode) {
        let outcome = match code {
            FailureCode::Unavailable | FailureCode::Internal | FailureCode::NumericFault => {
                Outcome::Failed
            }
            FailureCode::Gone => Outcome::Stale,
            // A client's mistake, a full queue or a drain says nothing about a node's health; a failed transfer
            // does not say which of two nodes is ill.
            _ => return,
        };
        self.report(side, outcome);
    }
}

/// Another node may do better. A node that cancels by itself is as good as lost.
fn may_retry(code: FailureCode) -> bool {
    code.is_retriable() || code == FailureCode::Cancelled
}

/// What the client is told: how nodes lose each other is not its business.
fn client_code(code: FailureCode) -> FailureCode {
    match code {
        FailureCode::Gone | FailureCode::Draining | FailureCode::Cancelled => {
            FailureCode::Unavailable
        }
        other => other,
    }
}
