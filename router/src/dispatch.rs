//! The order of one request's life, as a pure machine: events in, effects out, phases readable downward.
//!
//! Place; prefill; at its handle the decode node is called while prefill still computes; the first token goes to
//! the client as soon as either node tells it, and both must agree; then the decode node's tokens; then exactly
//! one end. `recover` decides every failure. The machine owns the cancels: each node that may hold something of
//! the request hears of its end exactly once, whatever the order of events.

mod attempt;
mod choice;
mod client;
mod event;
#[cfg(test)]
mod orders;
mod recover;
#[cfg(test)]
mod tests;

pub use event::{
    Effect, Event, Finished, FirstToken, GenerateEvent, KvReady, Note, Outcome, Outside,
    PrefillEvent, Usage,
};

use self::attempt::{Attempt, Leg};
use crate::placement::{Candidate, Placement, SplitPolicy, Target, Unplaced};
use crate::requests::Job;
use tidemill_core::{
    BlockHash, CallId, Failure, FailureCode, FinishReason, GenerateRequest, KvHandle,
    PrefillRequest, SampledToken, SequenceSpec, Timestamp, TokenId,
};

/// The bounds of a request's life on the nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DispatchConfig {
    /// When prompts are prefilled on a node of their own.
    pub split: SplitPolicy,
    /// Attempts and take-overs together.
    pub n_attempts_max: u32,
    /// Longest gap between two tokens of a decode node before it counts as standing still.
    pub gap_us_max: u64,
    /// Longest silence of a decode node while nothing but itself keeps it from starting.
    pub start_us_max: u64,
}

impl Default for DispatchConfig {
    fn default() -> Self {
        Self {
            split: SplitPolicy::default(),
            n_attempts_max: 4,
            gap_us_max: 20_000_000,
            start_us_max: 60_000_000,
        }
    }
}

/// Who said something.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Side {
    Prefill,
    Decode,
}

/// A prompt's block hashes under one model.
struct Hashes {
    model_fingerprint: [u8; 32],
    of_prompt: Vec<BlockHash>,
}

/// One request, from its permit to its end.
pub struct Dispatch {
    config: DispatchConfig,
    job: Job,
    /// Every token that the client was given.
    emitted: Vec<TokenId>,
    /// Prompt log-probabilities that the client was given.
    n_prompt_logprobs: usize,
    attempt: Option<Attempt>,
    /// Nodes that this request never calls again.
    failed: Vec<Target>,
    /// Nodes that it calls again only when nobody else is there.
    suspects: Vec<Target>,
    hashes: Option<Hashes>,
    last_failure: Option<Failure>,
    usage: Usage,
    n_calls: u64,
    is_started: bool,
    is_ended: bool,
    effects: Vec<Effect>,
}

impl Dispatch {
    /// A request that has not started.
    pub fn new(config: DispatchConfig, job: Job) -> Self {
        let usage = Usage {
            n_prompt_tokens: count(job.prompt.len()),
            ..Usage::default()
        };
        Self {
            config,
            job,
            emitted: Vec::new(),
            n_prompt_logprobs: 0,
            attempt: None,
            failed: Vec::new(),
            suspects: Vec::new(),
            hashes: None,
            last_failure: None,
            usage,
            n_calls: 0,
            is_started: false,
            is_ended: false,
            effects: Vec::new(),
        }
    }

    /// True after the last answer; nothing is wanted any more.
    pub fn is_ended(&self) -> bool {
        self.is_ended
    }

    /// Tokens given to the client so far.
    pub fn emitted(&self) -> &[TokenId] {
        &self.emitted
    }

    /// Takes one event in. An event of a call that was given up changes nothing.
    pub fn apply(&mut self, event: Event, outside: &mut Outside<'_>) -> Vec<Effect> {
        if !self.is_ended {
            self.take_event(event, outside);
        }
        std::mem::take(&mut self.effects)
    }

    /// When `Event::Tick` is due, if nothing happens before.
    pub fn next_wakeup(&self) -> Option<Timestamp> {
        if self.is_ended {
            return None;
        }
        Some(
            self.stall_at()
                .map_or(self.job.deadline, |stall| stall.min(self.job.deadline)),
        )
    }

    fn take_event(&mut self, event: Event, outside: &mut Outside<'_>) {
        let attempt = self.attempt.as_ref();
        match event {
            Event::Start if !self.is_started => {
                self.is_started = true;
                self.start_attempt(outside);
            }
            Event::Start => {}
            Event::Prefill { call, event } if attempt.is_some_and(|a| a.is_prefill_call(call)) => {
                self.take_prefill(event, outside);
            }
            Event::Generate { call, event } if attempt.is_some_and(|a| a.is_decode_call(call)) => {
                self.take_generate(event, outside);
            }
            Event::Rebound { call, result }
                if attempt.is_some_and(|a| a.rebinding == Some(call)) =>
            {
                self.take_rebound(result, outside);
            }
            Event::CallLost { call, failure } => self.lose_call(call, failure, outside),
            Event::Cancel => self.fail(Failure::new(
                FailureCode::Cancelled,
                "cancelled by its client",
            )),
            Event::Tick => self.watch_time(outside),
            Event::Prefill { .. } | Event::Generate { .. } | Event::Rebound { .. } => {
                self.effects.push(Effect::Note(Note::LateEvent));
            }
        }
    }

    // ---- Phase 1: place, and call the first node --------------------------------------------------------------

    fn start_attempt(&mut self, outside: &mut Outside<'_>) {
        if self.job.deadline <= outside.now {
            return self.fail(deadline_passed());
        }
        if self.usage.n_attempts >= self.config.n_attempts_max {
            return self.give_up();
        }
        let candidates = self.candidates(outside);
        let placement = match self.place(&candidates) {
            Ok(placement) => placement,
            Err(unplaced) => return self.fail_unplaced(unplaced),
        };
        self.usage.n_attempts += 1;
        let (target, is_split) = match placement {
            Placement::Split { prefill, .. } => (prefill, true),
            Placement::PrefillOnly { prefill } => (prefill, false),
            Placement::Whole {
                decode,
                is_exception,
            } => {
                if is_exception {
                    self.effects.push(Effect::Note(Note::SplitException));
                }
                return self.start_whole(decode, &candidates, outside);
            }
        };
        let exporter = find(&candidates, &target);
        let id = (outside.draw_id)();
        let spec = self.spec(id, &exporter.model_fingerprint);
        let call = self.new_call();
        let mut attempt = Attempt::new(id, self.emitted.len(), Some(exporter), is_split);
        attempt.prefill = Some(Leg::new(call, target.clone(), outside.now));
        self.attempt = Some(attempt);
        self.effects.push(Effect::Prefill {
            call,
            target,
            request: PrefillRequest { spec },
        });
    }

    fn start_whole(&mut self, target: Target, candidates: &[Candidate], outside: &mut Outside<'_>) {
        let id = (outside.draw_id)();
        let spec = self.spec(id, &find(candidates, &target).model_fingerprint);
        self.attempt = Some(Attempt::new(id, self.emitted.len(), None, false));
        self.call_generate(target, spec, None, outside.now);
    }

    fn new_call(&mut self) -> CallId {
        self.n_calls += 1;
        CallId(self.n_calls)
    }

    // ---- Phase 2: prefill -------------------------------------------------------------------------------------

    fn take_prefill(&mut self, event: PrefillEvent, outside: &mut Outside<'_>) {
        match event {
            PrefillEvent::Handle(handle) => self.take_handle(handle, outside),
            PrefillEvent::PromptLogprobs(entries) => {
                self.take_prompt_logprobs(entries, Side::Prefill);
                self.take_early(outside);
            }
            PrefillEvent::FirstToken(first) => self.end_prefill(first, outside.now),
            PrefillEvent::Failed(failure) => {
                self.leg(Side::Prefill).end();
                self.prefill_failed(failure, outside);
            }
        }
    }

    fn take_handle(&mut self, handle: KvHandle, outside: &mut Outside<'_>) {
        let n_context = self.job.prompt.len() + self.live().n_base;
        let attempt = self.live();
        let exporter = attempt.prefill.as_ref().map(|leg| &leg.target);
        let is_ours = attempt.is_split
            && attempt.handle.is_none()
            && handle.request_id == attempt.id
            && handle.n_tokens as usize == n_context
            && exporter.is_some_and(|target| {
                target.incarnation == handle.incarnation && target.node_id == handle.node_id
            });
        if !is_ours {
            return self.violate(Side::Prefill, "a KV handle that does not fit its request");
        }
        self.live().handle = Some(handle);
        self.call_importer(outside);
    }

    fn end_prefill(&mut self, first: FirstToken, now: Timestamp) {
        self.leg(Side::Prefill).is_open = false;
        self.live().is_prefilled = true;
        self.usage.n_prefill_computed_tokens += first.n_computed_tokens;
        self.note_cached(first.n_cached_tokens);
        self.report(Side::Prefill, Outcome::Served);
        if !self.has_prompt_logprobs() {
            return self.violate(Side::Prefill, "an end before all prompt log-probabilities");
        }
        let wants_token = self.job.stop.max_tokens > 0;
        match first.token {
            Some(token) if wants_token => {
                if !self.take_first(token, Side::Prefill, now) {
                    return;
                }
            }
            None if !wants_token => {}
            _ => return self.violate(Side::Prefill, "a first token where none belongs, or none"),
        }
        let is_alone = !self.live().is_split;
        match first.finish {
            Some(_) if self.emitted.len() > self.live().n_base + 1 => {
                self.violate(Side::Prefill, "an end after which the decode node went on");
            }
            Some(reason) => {
                self.leg(Side::Prefill).end();
                self.finish(reason);
            }
            None if !wants_token || is_alone => {
                if self.emitted.len() < self.job.stop.max_tokens as usize {
                    return self.violate(Side::Prefill, "a first token that should be the last");
                }
                self.leg(Side::Prefill).end();
                self.finish(FinishReason::Length);
            }
            None if self.live().handle.is_none() => {
                self.violate(Side::Prefill, "a first token without a KV handle");
            }
            None => {}
        }
    }

    /// The first token of an attempt, told by the prefill call, the importer, or both: then they must agree.
    fn take_first(&mut self, token: SampledToken, side: Side, now: Timestamp) -> bool {
        if let Some((known, _)) = &self.live().first {
            let is_same = known.token == token.token
                && known.output_idx == token.output_idx
                && known.logits_digest == token.logits_digest;
            if !is_same {
                self.violate(side, "a first token that differs from the other node's");
            }
            return is_same;
        }
        let is_next = self.emit(token.clone(), side);
        if is_next {
            self.live().first = Some((token, now));
        }
        is_next
    }

    // ---- Phase 3: decode --------------------------------------------------------------------------------------

    /// Calls a decode node that can pull from the attempt's exporter.
    fn call_importer(&mut self, outside: &mut Outside<'_>) {
        let Some(target) = self.best_importer(outside) else {
            let nobody = Failure::new(FailureCode::Unavailable, Unplaced::NoDecode.to_string());
            return self.again(nobody, outside);
        };
        let attempt = self.live();
        let (id, n_base, handle) = (attempt.id, attempt.n_base, attempt.handle.clone());
        let exporter = attempt
            .exporter
            .as_ref()
            .expect("only exporters give handles");
        let fingerprint = exporter.model_fingerprint;
        attempt.decoders.push(target.clone());
        let mut spec = self.spec(id, &fingerprint);
        // The importer continues what the exporter began, first token included.
        spec.emitted.truncate(n_base);
        spec.logprobs.prompt_top = None;
        self.call_generate(target, spec, handle, outside.now);
    }

    fn call_generate(
        &mut self,
        target: Target,
        spec: SequenceSpec,
        handle: Option<KvHandle>,
        now: Timestamp,
    ) {
        let call = self.new_call();
        self.live().decode = Some(Leg::new(call, target.clone(), now));
        self.effects.push(Effect::Generate {
            call,
            target,
            request: GenerateRequest { spec, handle },
        });
    }

    fn take_generate(&mut self, event: GenerateEvent, outside: &mut Outside<'_>) {
        self.leg(Side::Decode).heard_at = outside.now;
        let is_news = !matches!(event, GenerateEvent::Accepted | GenerateEvent::Failed(_));
        if is_news && self.live().is_split && !self.has_prompt_logprobs() {
            self.live().early.push(event);
            return;
        }
        let lacks_kv = self.live().is_split && !self.leg(Side::Decode).has_kv;
        match event {
            GenerateEvent::Accepted => self.leg(Side::Decode).is_accepted = true,
            GenerateEvent::KvReady(ready) if lacks_kv => {
                self.leg(Side::Decode).has_kv = true;
                self.usage.bytes_moved += ready.bytes_moved;
                self.take_first(ready.first_token, Side::Decode, outside.now);
            }
            GenerateEvent::Failed(failure) => {
                self.leg(Side::Decode).end();
                self.decode_failed(failure, outside);
            }
            GenerateEvent::KvReady(_) => self.violate(Side::Decode, "KV that it did not import"),
            _ if lacks_kv => self.violate(Side::Decode, "tokens before its KV was complete"),
            GenerateEvent::Token(token) => {
                if self.emit(token, Side::Decode) {
                    self.leg(Side::Decode).n_tokens += 1;
                }
            }
            GenerateEvent::PromptLogprobs(entries) => {
                self.take_prompt_logprobs(entries, Side::Decode);
            }
            GenerateEvent::Finished(finished) => self.end_decode(finished),
        }
    }

    /// All prompt log-probabilities are there: what the decode node has said meanwhile follows.
    fn take_early(&mut self, outside: &mut Outside<'_>) {
        if self.is_ended || !self.has_prompt_logprobs() {
            return;
        }
        for event in std::mem::take(&mut self.live().early) {
            if !self.is_ended {
                self.take_generate(event, outside);
            }
        }
    }

    fn end_decode(&mut self, finished: Finished) {
        if finished.n_output_tokens as usize != self.emitted.len() {
            return self.violate(Side::Decode, "an end that counts other tokens than it gave");
        }
        if !self.has_prompt_logprobs() {
            return self.violate(Side::Decode, "an end before all prompt log-probabilities");
        }
        self.usage.n_decode_computed_tokens += finished.n_computed_tokens;
        if self.live().exporter.is_none() {
            self.note_cached(finished.n_cached_tokens);
        }
        self.report(Side::Decode, Outcome::Served);
        self.leg(Side::Decode).end();
        // It has given the lease back after its first token; a prefill call that still talks is cancelled.
        let attempt = self.live();
        if let Some(prefill) = attempt.prefill.as_mut().filter(|leg| !leg.is_open) {
            prefill.end();
        }
        self.finish(finished.reason);
    }

    fn live(&mut self) -> &mut Attempt {
        self.attempt
            .as_mut()
            .expect("its call was open a moment ago")
    }

    fn leg(&mut self, side: Side) -> &mut Leg {
        let attempt = self.live();
        let leg = match side {
            Side::Prefill => attempt.prefill.as_mut(),
            Side::Decode => attempt.decode.as_mut(),
        };
        leg.expect("its call was open a moment ago")
    }

    fn report(&mut self, side: Side, outcome: Outcome) {
        let target = self.leg(side).target.clone();
        self.effects.push(Effect::Report { target, outcome });
    }
}

fn find(candidates: &[Candidate], target: &Target) -> Candidate {
    candidates
        .iter()
        .find(|node| node.target == *target)
        .cloned()
        .expect("placement chooses among the candidates")
}

/// How many prompt log-probabilities were asked for.
fn n_prompt_logprobs(job: &Job) -> usize {
    if job.logprobs.prompt_top.is_some() {
        job.prompt.len().saturating_sub(1)
    } else {
        0
    }
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn deadline_passed() -> Failure {
    Failure::new(
        FailureCode::DeadlineExceeded,
        "the request's deadline has passed",
    )
}
