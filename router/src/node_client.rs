//! What the router says to nodes, over gRPC: calls become streams of dispatch's events, wire types stop here.
//!
//! A call that ends without its last message, or whose message does not convert, is lost; the machine decides what
//! that means. Dropping a call's stream closes it at the node too. Connections are kept by address and shared.

use crate::dispatch::{Event, Finished, FirstToken, GenerateEvent, KvReady, PrefillEvent};
use crate::placement::Target;
use crate::requests::PromptLogprob;
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tidemill_core::{
    CallId, Capability, Epoch, Failure, FailureCode, FinishReason, GenerateRequest, LoadReport,
    PrefillRequest, RequestId,
};
use tidemill_proto::ConvertError;
use tidemill_proto::convert::{NodeDescription, PromptLogprobEntry, id_bytes};
use tidemill_proto::pd::v1;
use tidemill_proto::pd::v1::decode_node_client::DecodeNodeClient;
use tidemill_proto::pd::v1::node_client::NodeClient;
use tidemill_proto::pd::v1::prefill_node_client::PrefillNodeClient;
use tidemill_service::grpc::Fabric;
use tidemill_service::trace_context::with_trace;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

/// Longest wait for the answer to a question (describe, rebind, one try of a cancel).
const ANSWER_TIME_MAX: Duration = Duration::from_secs(2);
/// How long a cancel is repeated; afterwards the node is taken for lost, and its own deadlines clean up.
const CANCEL_TIME_MAX: Duration = Duration::from_secs(5);
/// Pause between two tries of a cancel.
const CANCEL_PAUSE: Duration = Duration::from_millis(200);
/// A node reports its load ten times a second; one that is silent for so long is lost.
const REPORT_GAP_MAX: Duration = Duration::from_secs(5);

/// The connections to all nodes.
pub(crate) struct NodeCalls {
    fabric: Fabric,
    channels: Mutex<HashMap<String, Channel>>,
}

impl NodeCalls {
    pub(crate) fn new(fabric: Fabric) -> Self {
        Self {
            fabric,
            channels: Mutex::default(),
        }
    }

    /// The shared connection to an address.
    fn channel(&self, address: &str) -> Result<Channel, Failure> {
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(channel) = channels.get(address) {
            return Ok(channel.clone());
        }
        let channel = self
            .fabric
            .connect(address)
            .map_err(|error| Failure::new(FailureCode::Unavailable, error.to_string()))?;
        channels.insert(address.to_owned(), channel.clone());
        Ok(channel)
    }

    /// Closes the connection to an address once its open calls have ended.
    pub(crate) fn forget(&self, address: &str) {
        self.channels
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(address);
    }

    /// Calls `Prefill`.
    pub(crate) fn prefill(
        &self,
        call: CallId,
        target: &Target,
        request: &PrefillRequest,
    ) -> BoxStream<'static, Event> {
        let mut wire = v1::PrefillRequest::from(request);
        wire.expected_incarnation = id_bytes(target.incarnation.0);
        let channel = self.channel(&target.address);
        let opening = Box::pin(async move {
            let answer = PrefillNodeClient::new(channel?).prefill(wire).await;
            answer
                .map(tonic::Response::into_inner)
                .map_err(|status| lost(&status))
        });
        let wrap = |call, event| Event::Prefill { call, event };
        call_events(call, opening, read_prefill, PrefillEvent::is_last, wrap)
    }

    /// Calls `Generate`.
    pub(crate) fn generate(
        &self,
        call: CallId,
        target: &Target,
        request: &GenerateRequest,
    ) -> BoxStream<'static, Event> {
        let mut wire = v1::GenerateRequest::from(request);
        wire.expected_incarnation = id_bytes(target.incarnation.0);
        let channel = self.channel(&target.address);
        let opening = Box::pin(async move {
            let answer = DecodeNodeClient::new(channel?).generate(wire).await;
            answer
                .map(tonic::Response::into_inner)
                .map_err(|status| lost(&status))
        });
        let wrap = |call, event| Event::Generate { call, event };
        call_events(call, opening, read_generate, GenerateEvent::is_last, wrap)
    }

    /// Calls `Rebind`.
    pub(crate) fn rebind(
        &self,
        call: CallId,
        target: &Target,
        request_id: RequestId,
        (capability, epoch): (Capability, Epoch),
        traceparent: &str,
    ) -> BoxStream<'static, Event> {
        let wire = v1::RebindRequest {
            request_id: id_bytes(request_id.0),
            capability: id_bytes(capability.0),
            epoch: epoch.0,
            expected_incarnation: id_bytes(target.incarnation.0),
        };
        let wire = with_trace(wire, traceparent);
        let channel = self.channel(&target.address);
        let asking = async move {
            let mut client = PrefillNodeClient::new(channel?);
            let reply = within(ANSWER_TIME_MAX, client.rebind(wire)).await?;
            reply.failed.map_or(Ok(()), |failure| Err(failure.into()))
        };
        stream::once(async move {
            Event::Rebound {
                call,
                result: asking.await,
            }
        })
        .boxed()
    }

    /// Tells a node to give an attempt up; repeats it until it was heard or the node is taken for lost.
    pub(crate) async fn cancel(&self, target: &Target, request_id: RequestId, traceparent: &str) {
        let wire = v1::CancelRequest {
            request_id: id_bytes(request_id.0),
            expected_incarnation: id_bytes(target.incarnation.0),
        };
        let telling = async {
            loop {
                let told = match self.channel(&target.address) {
                    Ok(channel) => {
                        let mut client = NodeClient::new(channel);
                        within(
                            ANSWER_TIME_MAX,
                            client.cancel(with_trace(wire.clone(), traceparent)),
                        )
                        .await
                        .map(drop)
                    }
                    Err(failure) => Err(failure),
                };
                match told {
                    Ok(()) => return,
                    Err(_) => tokio::time::sleep(CANCEL_PAUSE).await,
                }
            }
        };
        if tokio::time::timeout(CANCEL_TIME_MAX, telling)
            .await
            .is_err()
        {
            tracing::warn!(%request_id, node = %target.node_id, "a cancel was not heard; the node seems lost");
        }
    }

    /// Asks a node what it is.
    ///
    /// # Errors
    /// The reason in words.
    pub(crate) async fn describe(&self, address: &str) -> Result<NodeDescription, String> {
        let channel = self.channel(address).map_err(|failure| failure.message)?;
        let mut client = NodeClient::new(channel);
        let wire = within(ANSWER_TIME_MAX, client.describe(v1::DescribeRequest {})).await;
        let wire = wire.map_err(|failure| failure.message)?;
        wire.try_into()
            .map_err(|error: ConvertError| error.to_string())
    }

    /// Follows a node's load. Ends when the node, or the way to it, is lost.
    pub(crate) fn watch_load(&self, address: &str) -> BoxStream<'static, LoadReport> {
        let channel = self.channel(address);
        let opening = async move {
            let mut client = NodeClient::new(channel.ok()?);
            within(ANSWER_TIME_MAX, client.watch_load(v1::WatchLoadRequest {}))
                .await
                .ok()
        };
        let reports = stream::once(opening).filter_map(|messages| async { messages });
        let reports = reports.flat_map(|messages| {
            stream::unfold(messages, |mut messages| async {
                let next = tokio::time::timeout(REPORT_GAP_MAX, messages.message()).await;
                let wire = next.ok()?.ok()??;
                Some((LoadReport::try_from(wire).ok()?, messages))
            })
        });
        reports.boxed()
    }
}

/// One question with a deadline.
async fn within<T>(
    time_max: Duration,
    asking: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Failure> {
    match tokio::time::timeout(time_max, asking).await {
        Ok(Ok(reply)) => Ok(reply.into_inner()),
        Ok(Err(status)) => Err(lost(&status)),
        Err(_) => Err(Failure::new(
            FailureCode::Unavailable,
            format!(
                "the node has not answered within {} ms",
                time_max.as_millis()
            ),
        )),
    }
}

/// A stream that is being opened, is open, or is over.
enum Reading<W> {
    Opening(BoxFuture<'static, Result<Streaming<W>, Failure>>),
    Open(Box<Streaming<W>>),
    Over,
}

/// The events of one call, the last of which is the node's own last word or `CallLost`.
fn call_events<W: Send + 'static, E: Send + 'static>(
    call: CallId,
    opening: BoxFuture<'static, Result<Streaming<W>, Failure>>,
    read: fn(W) -> Result<E, Failure>,
    is_last: fn(&E) -> bool,
    wrap: fn(CallId, E) -> Event,
) -> BoxStream<'static, Event> {
    let events = stream::unfold(Reading::Opening(opening), move |reading| async move {
        let opened = match reading {
            Reading::Opening(opening) => opening.await.map(Box::new),
            Reading::Open(messages) => Ok(messages),
            Reading::Over => return None,
        };
        let next = match opened {
            Ok(messages) => next_event(messages, read).await,
            Err(failure) => Err(failure),
        };
        match next {
            Ok((event, _)) if is_last(&event) => Some((wrap(call, event), Reading::Over)),
            Ok((event, messages)) => Some((wrap(call, event), Reading::Open(messages))),
            Err(failure) => Some((Event::CallLost { call, failure }, Reading::Over)),
        }
    });
    events.boxed()
}

async fn next_event<W, E>(
    mut messages: Box<Streaming<W>>,
    read: fn(W) -> Result<E, Failure>,
) -> Result<(E, Box<Streaming<W>>), Failure> {
    match messages.message().await {
        Ok(Some(wire)) => Ok((read(wire)?, messages)),
        Ok(None) => Err(Failure::new(
            FailureCode::Unavailable,
            "the node's stream ended without its last message",
        )),
        Err(status) => Err(lost(&status)),
    }
}

/// Nodes tell their own failures in messages; a status is the connection's, or a refused message.
fn lost(status: &Status) -> Failure {
    tracing::debug!(code = ?status.code(), message = status.message(), "a call was lost");
    match status.code() {
        Code::InvalidArgument => Failure::new(FailureCode::InvalidRequest, status.message()),
        code => Failure::new(
            FailureCode::Unavailable,
            format!("the call to the node was lost ({code:?})"),
        ),
    }
}

fn garbled(error: &ConvertError) -> Failure {
    Failure::new(
        FailureCode::Internal,
        format!("a node's answer does not hold: {error}"),
    )
}

fn missing(field: &str) -> Failure {
    Failure::new(
        FailureCode::Internal,
        format!("a node's answer lacks {field}"),
    )
}

fn read_prefill(wire: v1::PrefillEvent) -> Result<PrefillEvent, Failure> {
    use v1::prefill_event::Event as Wire;
    Ok(match wire.event.ok_or_else(|| missing("event"))? {
        Wire::Handle(handle) => {
            PrefillEvent::Handle(handle.try_into().map_err(|error| garbled(&error))?)
        }
        Wire::PromptLogprobs(entries) => {
            PrefillEvent::PromptLogprobs(read_prompt_logprobs(entries))
        }
        Wire::FirstToken(first) => PrefillEvent::FirstToken(FirstToken {
            finish: first.finish().into(),
            token: first.token.map(Into::into),
            n_cached_tokens: first.n_cached_tokens,
            n_computed_tokens: first.n_computed_tokens,
        }),
        Wire::Failed(failure) => PrefillEvent::Failed(failure.into()),
    })
}

fn read_generate(wire: v1::GenerateEvent) -> Result<GenerateEvent, Failure> {
    use v1::generate_event::Event as Wire;
    Ok(match wire.event.ok_or_else(|| missing("event"))? {
        Wire::Accepted(_) => GenerateEvent::Accepted,
        Wire::KvReady(ready) => GenerateEvent::KvReady(KvReady {
            first_token: ready
                .first_token
                .ok_or_else(|| missing("first_token"))?
                .into(),
            bytes_moved: ready.bytes_moved,
            n_local_tokens: ready.n_local_tokens,
        }),
        Wire::Token(token) => GenerateEvent::Token(token.into()),
        Wire::PromptLogprobs(entries) => {
            GenerateEvent::PromptLogprobs(read_prompt_logprobs(entries))
        }
        Wire::Finished(finished) => {
            let reason: Option<FinishReason> = finished.reason().into();
            GenerateEvent::Finished(Finished {
                reason: reason.ok_or_else(|| missing("reason"))?,
                n_output_tokens: finished.n_output_tokens,
                n_cached_tokens: finished.n_cached_tokens,
                n_computed_tokens: finished.n_computed_tokens,
            })
        }
        Wire::Failed(failure) => GenerateEvent::Failed(failure.into()),
    })
}

fn read_prompt_logprobs(wire: v1::PromptLogprobs) -> Vec<PromptLogprob> {
    wire.tokens
        .into_iter()
        .map(PromptLogprobEntry::from)
        .map(|entry| PromptLogprob {
            logprob: entry.logprob,
            top: entry.top,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_core::Incarnation;

    #[test]
    fn what_does_not_hold_is_internal_and_never_the_clients_mistake() {
        let empty = read_prefill(v1::PrefillEvent { event: None }).expect_err("no event");
        assert_eq!(empty.code, FailureCode::Internal);
        let handle = v1::KvHandle::default();
        let event = Some(v1::prefill_event::Event::Handle(handle));
        let bad = read_prefill(v1::PrefillEvent { event }).expect_err("an empty handle");
        assert_eq!(bad.code, FailureCode::Internal);
        let event = Some(v1::generate_event::Event::Finished(v1::Finished::default()));
        let bad = read_generate(v1::GenerateEvent { event }).expect_err("no reason");
        assert_eq!(bad.code, FailureCode::Internal);
    }

    #[test]
    fn a_lost_connection_is_unavailable_and_a_refused_message_is_not_retried() {
        let code = |status: Status| lost(&status).code;
        assert_eq!(code(Status::unavailable("reset")), FailureCode::Unavailable);
        assert_eq!(code(Status::internal("h2")), FailureCode::Unavailable);
        assert_eq!(
            code(Status::invalid_argument("spec: is missing")),
            FailureCode::InvalidRequest
        );
    }

    #[tokio::test]
    async fn nobody_at_an_address_is_a_lost_call() {
        let calls = NodeCalls::new(Fabric::default());
        let target = Target {
            node_id: tidemill_core::NodeId::new("p0").expect("valid"),
            incarnation: Incarnation(1),
            address: "local:nobody".into(),
        };
        let key = (Capability(1), Epoch(2));
        let mut events = calls.rebind(CallId(3), &target, RequestId(4), key, "");
        let event = events.next().await.expect("one event");
        let Event::Rebound { call, result } = event else {
            panic!("not an answer: {event:?}");
        };
        assert_eq!(call, CallId(3));
        assert_eq!(result.expect_err("nobody").code, FailureCode::Unavailable);
        assert!(calls.watch_load("local:nobody").next().await.is_none());
    }
}
