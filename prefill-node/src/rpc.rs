//! The wire side of the prefill node: messages in become events, answers out become messages.
//!
//! Nothing is decided here. Every conversion names the field that does not hold; a stream whose reader leaves
//! gives the loop one `CallEnded`.

use crate::node::{Event, FirstToken, PrefillEvent};
use crate::run::Input;
use futures::{Stream, StreamExt};
use std::pin::Pin;
use std::sync::Arc;
use tidemill_core::{CallId, Capability, Epoch, NodeId, PrefillRequest, RequestId, Timestamp};
use tidemill_engine::executor::PromptLogprob;
use tidemill_kv_transfer::export::{Claim, ExportEvent, LeaseRef};
use tidemill_proto::convert::{self, ConvertError, id_bytes};
use tidemill_proto::pd::v1;
use tidemill_proto::pd::v1::kv_export_server::{KvExport, KvExportServer};
use tidemill_proto::pd::v1::prefill_node_server::{PrefillNode, PrefillNodeServer};
use tidemill_service::streams::{CallIds, Replies};
use tidemill_service::trace_context::trace_of;
use tokio::sync::{mpsc, oneshot};
use tonic::{Request, Response, Status};

/// Largest message that a router may send: a prompt of the longest context, and room.
const MESSAGE_BYTES_MAX: usize = 16 << 20;
/// Most leases in one renewal.
const LEASES_MAX: usize = 4096;

/// Serves `PrefillNode` and `KvExport` by handing everything to the node's loop.
#[derive(Clone)]
pub struct Service {
    inputs: mpsc::Sender<Input>,
    calls: Arc<CallIds>,
}

type Wire<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl Service {
    /// A service in front of the loop that reads `inputs`.
    pub fn new(inputs: mpsc::Sender<Input>, calls: Arc<CallIds>) -> Self {
        Self { inputs, calls }
    }

    /// The two gRPC services.
    pub fn servers(self) -> (PrefillNodeServer<Self>, KvExportServer<Self>) {
        (
            PrefillNodeServer::new(self.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX),
            KvExportServer::new(self),
        )
    }

    async fn send(&self, input: Input) -> Result<(), Status> {
        self.inputs
            .send(input)
            .await
            .map_err(|_| Status::unavailable("the node has ended; ask another"))
    }

    /// Asks the loop and waits for its one answer.
    async fn ask<T>(&self, input: Input, answer: oneshot::Receiver<T>) -> Result<T, Status> {
        self.send(input).await?;
        answer
            .await
            .map_err(|_| Status::unavailable("the node ended before it answered"))
    }

    /// Opens an answering stream; its reader's leaving becomes `CallEnded`.
    fn stream<T: Send + 'static>(&self) -> (CallId, mpsc::Sender<T>, Replies<T, Input>) {
        let call = self.calls.next();
        let notice = Input::Event(Event::CallEnded { call });
        let (sender, replies) = Replies::new(self.inputs.clone(), notice);
        (call, sender, replies)
    }
}

#[tonic::async_trait]
impl PrefillNode for Service {
    type PrefillStream = Wire<v1::PrefillEvent>;

    #[tracing::instrument(name = "prefill", skip_all, fields(request_id, traceparent))]
    async fn prefill(
        &self,
        request: Request<v1::PrefillRequest>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        let wire = request.into_inner();
        let to = convert::incarnation("expected_incarnation", &wire.expected_incarnation)?;
        let request: PrefillRequest = wire.try_into()?;
        let span = tracing::Span::current();
        span.record(
            "request_id",
            tracing::field::display(request.spec.request_id),
        );
        span.record("traceparent", request.spec.traceparent.as_str());
        let (call, sender, replies) = self.stream();
        let event = Event::Prefill { call, request, to };
        self.send(Input::Prefill(call, event, sender)).await?;
        let wire = replies.map(move |event: PrefillEvent| {
            span.in_scope(|| trace(&event));
            Ok(wire_prefill_event(event))
        });
        Ok(Response::new(Box::pin(wire)))
    }

    #[tracing::instrument(name = "rebind", skip_all, fields(traceparent = trace_of(&request)))]
    async fn rebind(
        &self,
        request: Request<v1::RebindRequest>,
    ) -> Result<Response<v1::RebindReply>, Status> {
        let wire = request.into_inner();
        let to = convert::incarnation("expected_incarnation", &wire.expected_incarnation)?;
        let lease = read_lease(&v1::LeaseRef {
            request_id: wire.request_id,
            capability: wire.capability,
            epoch: wire.epoch,
        })?;
        let call = self.calls.next();
        let (reply, answer) = oneshot::channel();
        let event = Event::Rebind { call, lease, to };
        let result = self.ask(Input::Rebind(call, event, reply), answer).await?;
        let failed = result.err().as_ref().map(Into::into);
        Ok(Response::new(v1::RebindReply { failed }))
    }
}

#[tonic::async_trait]
impl KvExport for Service {
    type ClaimStream = Wire<v1::ExportEvent>;

    #[tracing::instrument(name = "export", skip_all, fields(request_id, traceparent = trace_of(&request)))]
    async fn claim(
        &self,
        request: Request<v1::ClaimRequest>,
    ) -> Result<Response<Self::ClaimStream>, Status> {
        let wire = request.into_inner();
        let to = convert::incarnation("expected_incarnation", &wire.expected_incarnation)?;
        let claim = read_claim(&wire)?;
        let span = tracing::Span::current();
        span.record("request_id", tracing::field::display(claim.request_id));
        let (call, sender, replies) = self.stream();
        let event = Event::Claim { call, claim, to };
        self.send(Input::Claim(call, event, sender)).await?;
        let wire = replies.map(move |event: ExportEvent| {
            if matches!(event, ExportEvent::Complete(_)) {
                tracing::debug!(parent: &span, "every slice is announced");
            }
            Ok(wire_export_event(event))
        });
        Ok(Response::new(Box::pin(wire)))
    }

    async fn renew(
        &self,
        request: Request<v1::RenewRequest>,
    ) -> Result<Response<v1::RenewReply>, Status> {
        let wire = request.into_inner();
        let to = convert::incarnation("expected_incarnation", &wire.expected_incarnation)?;
        let importer = convert::incarnation("importer_incarnation", &wire.importer_incarnation)?;
        if wire.leases.len() > LEASES_MAX {
            return Err(Status::invalid_argument(format!(
                "leases: has {} entries; at most {LEASES_MAX} are allowed",
                wire.leases.len()
            )));
        }
        let leases = wire
            .leases
            .iter()
            .map(read_lease)
            .collect::<Result<_, _>>()?;
        let call = self.calls.next();
        let (reply, answer) = oneshot::channel();
        let event = Event::Renew {
            call,
            importer,
            leases,
            to,
        };
        let (gone, expires_at): (Vec<RequestId>, Timestamp) =
            self.ask(Input::Renew(call, event, reply), answer).await?;
        Ok(Response::new(v1::RenewReply {
            gone: gone.into_iter().map(|id| id_bytes(id.0)).collect(),
            expires_at_us: expires_at.0,
        }))
    }

    async fn release(
        &self,
        request: Request<v1::ReleaseRequest>,
    ) -> Result<Response<v1::ReleaseReply>, Status> {
        let wire = request.into_inner();
        let to = convert::incarnation("expected_incarnation", &wire.expected_incarnation)?;
        let lease = wire
            .lease
            .ok_or_else(|| Status::invalid_argument("lease: is missing"))?;
        let lease = read_lease(&lease)?;
        self.send(Input::Event(Event::Release { lease, to }))
            .await?;
        Ok(Response::new(v1::ReleaseReply {}))
    }
}

/// The steps of a prefill, never their content.
fn trace(event: &PrefillEvent) {
    match event {
        PrefillEvent::Handle(_) => tracing::debug!("the first chunk is scheduled"),
        PrefillEvent::FirstToken(first) => tracing::debug!(
            first.n_cached_tokens,
            first.n_computed_tokens,
            "the first token is drawn"
        ),
        PrefillEvent::Failed(failure) => tracing::debug!(code = failure.code.name(), "failed"),
        PrefillEvent::PromptLogprobs(_) => {}
    }
}

fn wire_prefill_event(event: PrefillEvent) -> v1::PrefillEvent {
    use v1::prefill_event::Event as Wire;
    let event = match event {
        PrefillEvent::Handle(handle) => Wire::Handle((&handle).into()),
        PrefillEvent::PromptLogprobs(tokens) => Wire::PromptLogprobs(v1::PromptLogprobs {
            tokens: tokens.iter().map(wire_prompt_logprob).collect(),
        }),
        PrefillEvent::FirstToken(first) => Wire::FirstToken(wire_first_token(&first)),
        PrefillEvent::Failed(failure) => Wire::Failed((&failure).into()),
    };
    v1::PrefillEvent { event: Some(event) }
}

fn wire_prompt_logprob(entry: &PromptLogprob) -> v1::PromptLogprob {
    v1::PromptLogprob {
        logprob: entry.logprob,
        top: entry.top.iter().copied().map(Into::into).collect(),
    }
}

fn wire_first_token(first: &FirstToken) -> v1::FirstToken {
    v1::FirstToken {
        token: first.token.as_ref().map(Into::into),
        n_cached_tokens: first.n_cached_tokens,
        n_computed_tokens: first.n_computed_tokens,
        finish: v1::FinishReason::from(first.finish).into(),
    }
}

fn wire_export_event(event: ExportEvent) -> v1::ExportEvent {
    use v1::export_event::Event as Wire;
    let event = match event {
        ExportEvent::Claimed {
            n_tokens,
            expires_at,
        } => Wire::Claimed(v1::Claimed {
            n_tokens,
            expires_at_us: expires_at.0,
        }),
        ExportEvent::SlicesFinal(slices) => Wire::SlicesFinal(v1::SlicesFinal {
            slices: slices.into_iter().map(Into::into).collect(),
        }),
        ExportEvent::Complete(complete) => Wire::Complete(v1::Complete {
            n_tokens: complete.n_tokens,
            digest: complete.digest.0,
            first_token: Some((&complete.first_token).into()),
        }),
        ExportEvent::Failed(failure) => Wire::Failed((&failure).into()),
    };
    v1::ExportEvent { event: Some(event) }
}

fn read_lease(wire: &v1::LeaseRef) -> Result<LeaseRef, ConvertError> {
    Ok(LeaseRef {
        request_id: convert::request_id(&wire.request_id)?,
        capability: read_capability(&wire.capability)?,
        epoch: Epoch(wire.epoch),
    })
}

fn read_claim(wire: &v1::ClaimRequest) -> Result<Claim, ConvertError> {
    Ok(Claim {
        request_id: convert::request_id(&wire.request_id)?,
        capability: read_capability(&wire.capability)?,
        epoch: Epoch(wire.epoch),
        importer: NodeId::new(wire.importer_node_id.as_str()).map_err(|problem| ConvertError {
            field: "importer_node_id",
            problem,
        })?,
        importer_incarnation: convert::incarnation(
            "importer_incarnation",
            &wire.importer_incarnation,
        )?,
        layout_fingerprint: read_fixed("layout_fingerprint", &wire.layout_fingerprint)?,
        deadline: Timestamp(wire.deadline_us),
    })
}

fn read_capability(bytes: &[u8]) -> Result<Capability, ConvertError> {
    read_fixed("capability", bytes).map(|bytes| Capability(u128::from_le_bytes(bytes)))
}

fn read_fixed(field: &'static str, bytes: &[u8]) -> Result<[u8; 16], ConvertError> {
    bytes.try_into().map_err(|_| ConvertError {
        field,
        problem: format!("has {} bytes; exactly 16 are allowed", bytes.len()),
    })
}
