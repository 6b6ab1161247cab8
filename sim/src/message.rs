//! What travels between simulated processes. The nodes' own types, not the wire's: conversions have their own tests.

use tidemill_core::{Failure, GenerateRequest, Incarnation, PrefillRequest, RequestId};
use tidemill_decode_node::node as decode;
use tidemill_kv_transfer::export::{Claim, ExportEvent, LeaseRef, ReadAsk};
use tidemill_prefill_node::node as prefill;

/// The request of a call.
#[derive(Clone, Debug)]
pub(crate) enum ToServer {
    /// Router -> prefill.
    Prefill(PrefillRequest, Incarnation),
    /// Router -> decode.
    Generate(GenerateRequest, Incarnation),
    /// Router -> prefill.
    Rebind(LeaseRef, Incarnation),
    /// Decode -> prefill.
    Claim(Claim, Incarnation),
    /// Decode -> prefill: the importer's life, its leases, the exporter's life.
    Renew(Incarnation, Vec<LeaseRef>, Incarnation),
    /// Decode -> prefill, on the data plane.
    Read(ReadAsk, Incarnation),
}

impl ToServer {
    /// The attempt that it is about.
    pub(crate) fn request_id(&self) -> Option<RequestId> {
        match self {
            Self::Prefill(request, _) => Some(request.spec.request_id),
            Self::Generate(request, _) => Some(request.spec.request_id),
            Self::Rebind(lease, _) => Some(lease.request_id),
            Self::Claim(claim, _) => Some(claim.request_id),
            Self::Read(ask, _) => Some(ask.request_id),
            Self::Renew(..) => None,
        }
    }

    /// How long its client waits for the one answer; `None` when it opens a stream.
    pub(crate) fn answer_us_max(&self) -> Option<u64> {
        match self {
            Self::Rebind(..) => Some(2_000_000),
            Self::Renew(..) => Some(5_000_000),
            Self::Prefill(..) | Self::Generate(..) | Self::Claim(..) | Self::Read(..) => None,
        }
    }
}

/// An answer within a call.
#[derive(Clone, Debug)]
pub(crate) enum ToClient {
    /// Prefill -> router.
    Prefill(prefill::PrefillEvent),
    /// Decode -> router.
    Generate(decode::GenerateEvent),
    /// Prefill -> router.
    Rebound(Result<(), Failure>),
    /// Prefill -> decode.
    Export(ExportEvent),
    /// Prefill -> decode.
    Renewed(Vec<RequestId>),
    /// Prefill -> decode, on the data plane.
    ReadRefused(Failure),
}

impl ToClient {
    /// True when nothing follows on the call.
    pub(crate) fn is_last(&self) -> bool {
        match self {
            Self::Prefill(event) => event.is_last(),
            Self::Generate(event) => event.is_last(),
            Self::Export(event) => event.is_last(),
            Self::Rebound(_) | Self::Renewed(_) | Self::ReadRefused(_) => true,
        }
    }

    /// True when it is the one answer to a question, not part of a stream.
    pub(crate) fn answers_question(&self) -> bool {
        matches!(self, Self::Rebound(_) | Self::Renewed(_))
    }
}

/// A question whose answer says nothing but that it was heard.
#[derive(Clone, Debug)]
pub(crate) enum Notice {
    /// Router -> any node.
    Cancel(RequestId, Incarnation),
    /// Decode -> prefill.
    Release(LeaseRef, Incarnation),
}

impl Notice {
    /// Whose attempt it is about.
    pub(crate) fn request_id(&self) -> RequestId {
        match self {
            Self::Cancel(request_id, _) => *request_id,
            Self::Release(lease, _) => lease.request_id,
        }
    }
}

/// A prefill node's answer as the router's dispatch hears it.
pub(crate) fn to_router_prefill(
    event: prefill::PrefillEvent,
) -> tidemill_router::dispatch::PrefillEvent {
    use tidemill_router::dispatch::PrefillEvent as To;
    match event {
        prefill::PrefillEvent::Handle(handle) => To::Handle(handle),
        prefill::PrefillEvent::PromptLogprobs(entries) => {
            To::PromptLogprobs(prompt_logprobs(entries))
        }
        prefill::PrefillEvent::FirstToken(first) => {
            To::FirstToken(tidemill_router::dispatch::FirstToken {
                token: first.token,
                n_cached_tokens: first.n_cached_tokens,
                n_computed_tokens: first.n_computed_tokens,
                finish: first.finish,
            })
        }
        prefill::PrefillEvent::Failed(failure) => To::Failed(failure),
    }
}

/// A decode node's answer as the router's dispatch hears it.
pub(crate) fn to_router_generate(
    event: decode::GenerateEvent,
) -> tidemill_router::dispatch::GenerateEvent {
    use tidemill_router::dispatch::GenerateEvent as To;
    match event {
        decode::GenerateEvent::Accepted => To::Accepted,
        decode::GenerateEvent::KvReady(ready) => To::KvReady(tidemill_router::dispatch::KvReady {
            first_token: ready.first_token,
            bytes_moved: ready.bytes_moved,
            n_local_tokens: ready.n_local_tokens,
        }),
        decode::GenerateEvent::Token(token) => To::Token(token),
        decode::GenerateEvent::PromptLogprobs(entries) => {
            To::PromptLogprobs(prompt_logprobs(entries))
        }
        decode::GenerateEvent::Finished(finished) => {
            To::Finished(tidemill_router::dispatch::Finished {
                reason: finished.reason,
                n_output_tokens: finished.n_output_tokens,
                n_cached_tokens: finished.n_cached_tokens,
                n_computed_tokens: finished.n_computed_tokens,
            })
        }
        decode::GenerateEvent::Failed(failure) => To::Failed(failure),
    }
}

fn prompt_logprobs(
    entries: Vec<tidemill_engine::executor::PromptLogprob>,
) -> Vec<tidemill_router::requests::PromptLogprob> {
    let convert = |entry: tidemill_engine::executor::PromptLogprob| {
        tidemill_router::requests::PromptLogprob {
            logprob: entry.logprob,
            top: entry.top,
        }
    };
    entries.into_iter().map(convert).collect()
}
