//! One request's driver: it carries out what `dispatch` wants and brings back what happens.
//!
//! Answers go to the client without waiting; when the client is slow, the nodes' streams wait with it. The client's
//! leaving is the cancel. The permit and the cancels on their way outlive the task, so that the next request finds
//! the room that this one had.

use super::Shared;
use super::members::Booking;
use super::metrics::OpenRequest;
use crate::admission::Permit;
use crate::dispatch::{Dispatch, Effect, Event, Outside};
use crate::placement::Target;
use crate::requests::{Answer, Submission};
use futures::stream::{AbortHandle, BoxStream, SelectAll, StreamExt, abortable};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tidemill_core::{CallId, RequestId, SequenceSpec, Timestamp};
use tokio::sync::mpsc;
use tracing::Instrument;

/// A client that does not read its last answers for so long is taken for gone.
const PARTING_TIME_MAX: Duration = Duration::from_secs(30);

/// A call that is being listened to.
struct OpenCall {
    listening: AbortHandle,
    _booking: Option<Booking>,
}

pub(super) struct Request {
    shared: Arc<Shared>,
    machine: Dispatch,
    deadline: Timestamp,
    traceparent: String,
    calls: SelectAll<BoxStream<'static, Event>>,
    open: HashMap<CallId, OpenCall>,
    answers: mpsc::Sender<Answer>,
    /// Answers that the client has no room for yet.
    backlog: VecDeque<Answer>,
    permit: Arc<Permit>,
    started_at: Timestamp,
    last_token_at: Option<Timestamp>,
    _open: OpenRequest,
}

impl Request {
    pub(super) fn new(shared: Arc<Shared>, submission: Submission) -> Self {
        let Submission {
            job,
            answers,
            permit,
            span: _,
        } = submission;
        Self {
            deadline: job.deadline,
            traceparent: job.traceparent.clone(),
            machine: Dispatch::new(shared.dispatch, job),
            calls: SelectAll::new(),
            open: HashMap::new(),
            answers,
            backlog: VecDeque::new(),
            permit: Arc::new(permit),
            started_at: shared.clock.now(),
            last_token_at: None,
            _open: shared.metrics.open(),
            shared,
        }
    }

    /// Lives the request to its end.
    pub(super) async fn run(mut self) {
        self.step(Event::Start);
        while !self.machine.is_ended() {
            let event = self.next_event().await;
            if let Some(event) = event {
                self.step(event);
            }
        }
        let parting = async {
            while let Some(answer) = self.backlog.pop_front() {
                if self.answers.send(answer).await.is_err() {
                    return;
                }
            }
        };
        if tokio::time::timeout(PARTING_TIME_MAX, parting)
            .await
            .is_err()
        {
            tracing::info!("the client does not read its last answers");
        }
    }

    /// `None` when only the backlog has moved.
    async fn next_event(&mut self) -> Option<Event> {
        let is_waiting = !self.backlog.is_empty();
        // Nodes must not be blamed for a slow client: only the deadline counts then.
        let wakeup = if is_waiting {
            self.deadline
        } else {
            self.machine.next_wakeup().unwrap_or(self.deadline)
        };
        let wait = wakeup.left_from(self.shared.clock.now());
        tokio::select! {
            biased;
            () = self.answers.closed() => Some(Event::Cancel),
            Ok(room) = self.answers.reserve(), if is_waiting => {
                if let Some(answer) = self.backlog.pop_front() {
                    room.send(answer);
                }
                None
            }
            Some(event) = self.calls.next(), if !is_waiting => Some(event),
            () = tokio::time::sleep(wait) => Some(Event::Tick),
        }
    }

    fn step(&mut self, event: Event) {
        // A call's last word ends its booking, whatever the machine makes of it.
        if let Some(call) = ended_call(&event) {
            self.open.remove(&call);
        }
        let members = &self.shared.members;
        let mut outside = Outside {
            now: self.shared.clock.now(),
            candidates: &|| members.candidates(),
            draw_id: &mut RequestId::random,
        };
        for effect in self.machine.apply(event, &mut outside) {
            self.perform(effect);
        }
    }

    fn perform(&mut self, effect: Effect) {
        let calls = &self.shared.calls;
        match effect {
            Effect::Prefill {
                call,
                target,
                request,
            } => {
                log_call("prefill", &target, &request.spec);
                let events = calls.prefill(call, &target, &request);
                self.listen(call, events, Some((&target, request.spec.n_context())));
            }
            Effect::Generate {
                call,
                target,
                request,
            } => {
                log_call("generate", &target, &request.spec);
                let events = calls.generate(call, &target, &request);
                self.listen(call, events, Some((&target, request.spec.n_context())));
            }
            Effect::Rebind {
                call,
                target,
                request_id,
                capability,
                epoch,
            } => {
                let events = calls.rebind(
                    call,
                    &target,
                    request_id,
                    (capability, epoch),
                    &self.traceparent,
                );
                self.listen(call, events, None);
            }
            Effect::DropCall(call) => {
                if let Some(open) = self.open.remove(&call) {
                    open.listening.abort();
                }
            }
            Effect::Cancel { target, request_id } => self.cancel(target, request_id),
            Effect::Answer(answer) => self.answer(answer),
            Effect::Account(usage) => self.shared.metrics.account(&usage),
            Effect::Report { target, outcome } => self.shared.members.report(&target, outcome),
            Effect::Note(note) => {
                tracing::debug!(event = note.name(), "dispatch");
                self.shared.metrics.noted(note);
            }
        }
    }

    fn listen(
        &mut self,
        call: CallId,
        events: BoxStream<'static, Event>,
        load: Option<(&Target, usize)>,
    ) {
        let booking = load.and_then(|(target, n)| self.shared.members.book(target, n as u64));
        let (events, listening) = abortable(events);
        self.calls.push(events.boxed());
        let open = OpenCall {
            listening,
            _booking: booking,
        };
        self.open.insert(call, open);
    }

    fn cancel(&self, target: Target, request_id: RequestId) {
        let calls = Arc::clone(&self.shared.calls);
        let permit = Arc::clone(&self.permit);
        let traceparent = self.traceparent.clone();
        let telling = async move {
            calls.cancel(&target, request_id, &traceparent).await;
            drop(permit);
        };
        self.shared.tasks.spawn(telling.in_current_span());
    }

    fn answer(&mut self, answer: Answer) {
        self.measure(&answer);
        if !self.backlog.is_empty() {
            return self.backlog.push_back(answer);
        }
        match self.answers.try_send(answer) {
            // A closed way back is noticed by `next_event`.
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => {}
            Err(mpsc::error::TrySendError::Full(answer)) => self.backlog.push_back(answer),
        }
    }

    fn measure(&mut self, answer: &Answer) {
        let metrics = &self.shared.metrics;
        match answer {
            Answer::PromptLogprobs(_) => {}
            Answer::Token(_) => {
                let now = self.shared.clock.now();
                match self.last_token_at.replace(now) {
                    None => metrics.first_token(now.since_us(self.started_at)),
                    Some(before) => metrics.next_token(now.since_us(before)),
                }
            }
            Answer::Finished(finished) => metrics.ended(match finished.reason {
                tidemill_core::FinishReason::Stop => "stop",
                tidemill_core::FinishReason::Length => "length",
            }),
            Answer::Failed(failure) => {
                let code = failure.code.name();
                metrics.ended(code);
                tracing::info!(code, message = %failure.message, "a request has failed");
            }
        }
    }
}

fn ended_call(event: &Event) -> Option<CallId> {
    match event {
        Event::Prefill { call, event } if event.is_last() => Some(*call),
        Event::Generate { call, event } if event.is_last() => Some(*call),
        Event::CallLost { call, .. } | Event::Rebound { call, .. } => Some(*call),
        _ => None,
    }
}

fn log_call(kind: &'static str, target: &Target, spec: &SequenceSpec) {
    tracing::debug!(
        kind,
        node = %target.node_id,
        attempt = %spec.request_id,
        n_prompt = spec.prompt.len(),
        n_emitted = spec.emitted.len(),
        "calling a node"
    );
}
