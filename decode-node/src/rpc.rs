//! The wire side of the decode node: messages in become events, answers out become messages.
//!
//! Nothing is decided here. Every conversion names the field that does not hold; a stream whose reader leaves
//! gives the loop one `CallEnded`. What this node says to exporters is in `exporter.rs`.

use crate::node::{Event, Finished, GenerateEvent, KvReady};
use crate::run::Input;
use futures::{Stream, StreamExt};
use std::pin::Pin;
use std::sync::Arc;
use tidemill_core::{CallId, GenerateRequest};
use tidemill_engine::executor::PromptLogprob;
use tidemill_proto::convert;
use tidemill_proto::pd::v1;
use tidemill_proto::pd::v1::decode_node_server::{DecodeNode, DecodeNodeServer};
use tidemill_service::streams::{CallIds, Replies};
use tokio::sync::mpsc;
use tonic::{Request, Response, Status};

/// Largest message that a router may send: a prompt of the longest context, and room.
const MESSAGE_BYTES_MAX: usize = 16 << 20;

/// Serves `DecodeNode` by handing everything to the node's loop.
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

    /// The gRPC service.
    pub fn server(self) -> DecodeNodeServer<Self> {
        DecodeNodeServer::new(self).max_decoding_message_size(MESSAGE_BYTES_MAX)
    }

    async fn send(&self, input: Input) -> Result<(), Status> {
        self.inputs
            .send(input)
            .await
            .map_err(|_| Status::unavailable("the node has ended; ask another"))
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
impl DecodeNode for Service {
    type GenerateStream = Wire<v1::GenerateEvent>;

    #[tracing::instrument(name = "generate", skip_all, fields(request_id, traceparent))]
    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let wire = request.into_inner();
        let to = convert::incarnation("expected_incarnation", &wire.expected_incarnation)?;
        let request: GenerateRequest = wire.try_into()?;
        let span = tracing::Span::current();
        span.record(
            "request_id",
            tracing::field::display(request.spec.request_id),
        );
        span.record("traceparent", request.spec.traceparent.as_str());
        let (call, sender, replies) = self.stream();
        let event = Event::Generate { call, request, to };
        self.send(Input::Generate(call, event, sender)).await?;
        let wire = replies.map(move |event: GenerateEvent| {
            span.in_scope(|| trace(&event));
            Ok(wire_generate_event(event))
        });
        Ok(Response::new(Box::pin(wire)))
    }
}

/// The steps of a generation, never their content.
fn trace(event: &GenerateEvent) {
    match event {
        GenerateEvent::Accepted => tracing::debug!("accepted"),
        GenerateEvent::KvReady(ready) => {
            tracing::debug!(
                ready.bytes_moved,
                ready.n_local_tokens,
                "every slice is here"
            );
        }
        GenerateEvent::Finished(finished) => {
            tracing::debug!(finished.n_output_tokens, "finished");
        }
        GenerateEvent::Failed(failure) => tracing::debug!(code = failure.code.name(), "failed"),
        GenerateEvent::Token(_) | GenerateEvent::PromptLogprobs(_) => {}
    }
}

fn wire_generate_event(event: GenerateEvent) -> v1::GenerateEvent {
    use v1::generate_event::Event as Wire;
    let event = match event {
        GenerateEvent::Accepted => Wire::Accepted(v1::Accepted {}),
        GenerateEvent::KvReady(ready) => Wire::KvReady(wire_kv_ready(&ready)),
        GenerateEvent::Token(token) => Wire::Token((&token).into()),
        GenerateEvent::PromptLogprobs(tokens) => Wire::PromptLogprobs(v1::PromptLogprobs {
            tokens: tokens.iter().map(wire_prompt_logprob).collect(),
        }),
        GenerateEvent::Finished(finished) => Wire::Finished(wire_finished(finished)),
        GenerateEvent::Failed(failure) => Wire::Failed((&failure).into()),
    };
    v1::GenerateEvent { event: Some(event) }
}

fn wire_kv_ready(ready: &KvReady) -> v1::KvReady {
    v1::KvReady {
        first_token: Some((&ready.first_token).into()),
        bytes_moved: ready.bytes_moved,
        n_local_tokens: ready.n_local_tokens,
    }
}

fn wire_prompt_logprob(entry: &PromptLogprob) -> v1::PromptLogprob {
    v1::PromptLogprob {
        logprob: entry.logprob,
        top: entry.top.iter().copied().map(Into::into).collect(),
    }
}

fn wire_finished(finished: Finished) -> v1::Finished {
    v1::Finished {
        reason: v1::FinishReason::from(Some(finished.reason)).into(),
        n_output_tokens: finished.n_output_tokens,
        n_cached_tokens: finished.n_cached_tokens,
        n_computed_tokens: finished.n_computed_tokens,
    }
}
