//! Decode nodes that say nothing although their connection lives: the router gives them up in a bounded time.
//!
//! The bounds are dispatch's own (`DispatchConfig`), the measuring is not: what a request's present decode node has
//! said is counted where its answers arrive. Whoever is still listened to past the bound stands still unnoticed.

use crate::message::ToClient;
use crate::occurrence::Occurrence;
use crate::world::World;
use tidemill_core::{CallId, Timestamp};
use tidemill_decode_node::node::GenerateEvent;
use tidemill_prefill_node::node::PrefillEvent;
use tidemill_router::dispatch::DispatchConfig;

/// How late the router may be.
const MARGIN_US: u64 = 1_000_000;

/// What a request's present decode node has said.
#[derive(Clone, Copy)]
pub(crate) struct Listening {
    call: CallId,
    heard_at: Timestamp,
    is_accepted: bool,
    has_given_tokens: bool,
}

impl World {
    /// The router calls a decode node.
    pub(crate) fn listen(&mut self, request_idx: usize, call: CallId) {
        self.requests[request_idx].listening = Some(Listening {
            call,
            heard_at: self.now,
            is_accepted: false,
            has_given_tokens: false,
        });
        let gap_us_max = DispatchConfig::default().gap_us_max;
        self.after(gap_us_max, Occurrence::CheckSilence(request_idx, call));
    }

    /// The router hears something for a request.
    pub(crate) fn note_heard(&mut self, request_idx: usize, message: &ToClient) {
        let now = self.now;
        let request = &mut self.requests[request_idx];
        let tells_first = matches!(
            message,
            ToClient::Prefill(PrefillEvent::FirstToken(_))
                | ToClient::Generate(GenerateEvent::KvReady(_))
        );
        if tells_first {
            request.first_at.get_or_insert(now);
        }
        if let (ToClient::Generate(event), Some(listening)) = (message, &mut request.listening) {
            listening.heard_at = now;
            listening.is_accepted |= matches!(event, GenerateEvent::Accepted);
            listening.has_given_tokens |= matches!(event, GenerateEvent::Token(_));
        }
    }

    /// Whether the router should have given this call up.
    pub(crate) fn check_silence(&mut self, request_idx: usize, call: CallId) {
        let request = &self.requests[request_idx];
        let Some(listening) = request.listening.filter(|listening| listening.call == call) else {
            return;
        };
        if !self.router.listens_to(call) {
            return;
        }
        let bounds = DispatchConfig::default();
        let first_at = request.first_at.map(|at| at.max(listening.heard_at));
        let silent_until = if listening.has_given_tokens {
            Some(listening.heard_at.plus_us(bounds.gap_us_max))
        } else if listening.is_accepted {
            // An importer waits for prefill; one that prefills by itself may have a long queue.
            first_at.map(|at| at.plus_us(bounds.start_us_max))
        } else {
            Some(listening.heard_at.plus_us(bounds.start_us_max))
        };
        let due = silent_until.map(|at| at.plus_us(MARGIN_US));
        if due.is_some_and(|due| due <= self.now) {
            let silent_ms = self.now.since_us(listening.heard_at) / 1000;
            return self.violate(format!(
                "request {request_idx} still listens to a decode node that said nothing for {silent_ms} ms"
            ));
        }
        let next = due.unwrap_or_else(|| self.now.plus_us(bounds.gap_us_max));
        self.schedule
            .push(next, Occurrence::CheckSilence(request_idx, call));
    }
}
