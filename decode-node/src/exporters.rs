//! What a decode node says to the nodes that lend it KV: claims, renewals and releases, each in a task of its
//! own with a deadline, answered by events. The loop never waits for another node.
//!
//! Nothing here is needed for correctness: a lost claim is noticed by the import's own deadline, a lost renewal is
//! tried again, and a lost release is made good by the end of the lease.

use crate::node::{ClaimId, Event, Exporter};
use crate::run::Input;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;
use tidemill_core::{Digest, Failure, FailureCode, Timestamp};
use tidemill_kv_transfer::export::{Claim, Complete, ExportEvent, LeaseRef};
use tidemill_proto::convert::{self, ConvertError, id_bytes};
use tidemill_proto::pd::v1;
use tidemill_proto::pd::v1::kv_export_client::KvExportClient;
use tidemill_service::grpc::Fabric;
use tidemill_service::trace_context::with_trace;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tonic::transport::Channel;

/// Longest wait for a claim's answer, a renewal or a release.
const CALL_DEADLINE: Duration = Duration::from_secs(5);
/// Longest wait for the last releases when the node ends.
const PARTING_DEADLINE: Duration = Duration::from_secs(2);
/// Exporters whose connection is kept.
const CHANNELS_MAX: usize = 256;
/// Calls in flight; beyond it renewals wait for the next round and leases end by their time.
const CALLS_MAX: usize = 4096;

/// The calls in flight and the connections that carry them.
pub(crate) struct Exporters {
    fabric: Fabric,
    channels: BTreeMap<String, Channel>,
    claims: HashMap<ClaimId, AbortHandle>,
    calls: JoinSet<()>,
    reports: mpsc::Sender<Input>,
}

impl Exporters {
    pub(crate) fn new(fabric: Fabric, reports: mpsc::Sender<Input>) -> Self {
        Self {
            fabric,
            channels: BTreeMap::new(),
            claims: HashMap::new(),
            calls: JoinSet::new(),
            reports,
        }
    }

    /// Claims a lease. The answers, and the end of them, come as events.
    pub(crate) fn claim(
        &mut self,
        claim: ClaimId,
        exporter: &Exporter,
        ask: &Claim,
        traceparent: &str,
    ) {
        let wire = v1::ClaimRequest {
            request_id: id_bytes(ask.request_id.0),
            capability: id_bytes(ask.capability.0),
            epoch: ask.epoch.0,
            expected_incarnation: id_bytes(exporter.incarnation.0),
            importer_node_id: ask.importer.as_str().to_owned(),
            importer_incarnation: id_bytes(ask.importer_incarnation.0),
            layout_fingerprint: ask.layout_fingerprint.to_vec(),
            deadline_us: ask.deadline.0,
        };
        let span = tracing::debug_span!("claim", request_id = %ask.request_id, traceparent);
        let wire = with_trace(wire, traceparent);
        let channel = self.channel(&exporter.control_address);
        let reports = self.reports.clone();
        let listening = async move {
            if let Err(failure) = listen(claim, channel, wire, &reports).await {
                tracing::debug!(code = failure.code.name(), "the claim has failed");
                let event = ExportEvent::Failed(failure);
                report(&reports, Event::Exporter { claim, event }).await;
            }
            report(&reports, Event::ClaimEnded { claim }).await;
        };
        let task = self.spawn(tracing::Instrument::instrument(listening, span));
        self.claims.retain(|_, task| !task.is_finished());
        self.claims.insert(claim, task);
    }

    /// Stops listening to a claim; the exporter sees its reader leave.
    pub(crate) fn drop_claim(&mut self, claim: ClaimId) {
        if let Some(task) = self.claims.remove(&claim) {
            task.abort();
        }
    }

    /// Renews leases. An answer comes as an event, a lost one does not.
    pub(crate) fn renew(
        &mut self,
        exporter: Exporter,
        leases: &[LeaseRef],
        importer: tidemill_core::Incarnation,
    ) {
        if self.is_full() {
            return;
        }
        let wire = v1::RenewRequest {
            importer_incarnation: id_bytes(importer.0),
            leases: leases.iter().map(wire_lease).collect(),
            expected_incarnation: id_bytes(exporter.incarnation.0),
        };
        let Ok(channel) = self.channel(&exporter.control_address) else {
            return;
        };
        let reports = self.reports.clone();
        self.spawn(async move {
            let mut client = KvExportClient::new(channel);
            let answer = tokio::time::timeout(CALL_DEADLINE, client.renew(wire)).await;
            let Ok(Ok(reply)) = answer else {
                tracing::debug!(address = %exporter.control_address, "a renewal was lost");
                return;
            };
            let gone = reply.into_inner().gone;
            if let Ok(gone) = gone.iter().map(|id| convert::request_id(id)).collect() {
                report(&reports, Event::Renewed { exporter, gone }).await;
            }
        });
    }

    /// Gives a lease back.
    pub(crate) fn release(&mut self, exporter: &Exporter, lease: &LeaseRef) {
        if self.is_full() {
            return;
        }
        let wire = v1::ReleaseRequest {
            lease: Some(wire_lease(lease)),
            expected_incarnation: id_bytes(exporter.incarnation.0),
        };
        let Ok(channel) = self.channel(&exporter.control_address) else {
            return;
        };
        self.spawn(async move {
            let mut client = KvExportClient::new(channel);
            let released = tokio::time::timeout(CALL_DEADLINE, client.release(wire)).await;
            if !matches!(released, Ok(Ok(_))) {
                tracing::debug!("a release was lost; the lease ends by its time");
            }
        });
    }

    /// Lets the last releases out.
    pub(crate) async fn part(mut self) {
        let last = async { while self.calls.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(PARTING_DEADLINE, last).await;
    }

    fn is_full(&mut self) -> bool {
        while self.calls.try_join_next().is_some() {}
        self.calls.len() >= CALLS_MAX
    }

    fn spawn(&mut self, call: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        while self.calls.try_join_next().is_some() {}
        self.calls.spawn(call)
    }

    fn channel(&mut self, address: &str) -> Result<Channel, Failure> {
        if let Some(channel) = self.channels.get(address) {
            return Ok(channel.clone());
        }
        if self.channels.len() >= CHANNELS_MAX {
            // Calls in flight hold their own clone; whoever is still needed connects again.
            self.channels.clear();
        }
        let channel = self.fabric.connect(address).map_err(|error| {
            Failure::new(
                FailureCode::InvalidRequest,
                format!("handle.control_address: {error}"),
            )
        })?;
        self.channels.insert(address.to_owned(), channel.clone());
        Ok(channel)
    }
}

/// Follows one claim to its end.
async fn listen(
    claim: ClaimId,
    channel: Result<Channel, Failure>,
    wire: tonic::Request<v1::ClaimRequest>,
    reports: &mpsc::Sender<Input>,
) -> Result<(), Failure> {
    let mut client = KvExportClient::new(channel?);
    let answer = tokio::time::timeout(CALL_DEADLINE, client.claim(wire))
        .await
        .map_err(|_| lost("the exporter did not answer the claim"))?;
    let mut events = answer.map_err(|status| refused(&status))?.into_inner();
    loop {
        let wire = events.message().await.map_err(|status| refused(&status))?;
        let Some(wire) = wire else { return Ok(()) };
        let event = read_export_event(wire)?;
        let is_last = event.is_last();
        report(reports, Event::Exporter { claim, event }).await;
        if is_last {
            return Ok(());
        }
    }
}

async fn report(reports: &mpsc::Sender<Input>, event: Event) {
    // An ended loop needs no news.
    let _ = reports.send(Input::Event(event)).await;
}

/// The exporter, or the way to it, is lost. The router hears of it from this node, whose own health it does not touch.
fn lost(why: &str) -> Failure {
    Failure::new(FailureCode::TransferFailed, why)
}

fn refused(status: &tonic::Status) -> Failure {
    let code = match status.code() {
        tonic::Code::InvalidArgument => FailureCode::InvalidRequest,
        _ => FailureCode::TransferFailed,
    };
    Failure::new(code, format!("the exporter: {}", status.message()))
}

fn wire_lease(lease: &LeaseRef) -> v1::LeaseRef {
    v1::LeaseRef {
        request_id: id_bytes(lease.request_id.0),
        capability: id_bytes(lease.capability.0),
        epoch: lease.epoch.0,
    }
}

fn read_export_event(wire: v1::ExportEvent) -> Result<ExportEvent, ConvertError> {
    use v1::export_event::Event as Wire;
    let missing = |field| ConvertError {
        field,
        problem: "is missing".to_owned(),
    };
    Ok(match wire.event.ok_or_else(|| missing("event"))? {
        Wire::Claimed(claimed) => ExportEvent::Claimed {
            n_tokens: claimed.n_tokens,
            expires_at: Timestamp(claimed.expires_at_us),
        },
        Wire::SlicesFinal(news) => {
            ExportEvent::SlicesFinal(news.slices.into_iter().map(Into::into).collect())
        }
        Wire::Complete(complete) => ExportEvent::Complete(Complete {
            n_tokens: complete.n_tokens,
            digest: Digest(complete.digest),
            first_token: complete
                .first_token
                .ok_or_else(|| missing("first_token"))?
                .into(),
        }),
        Wire::Failed(failure) => ExportEvent::Failed(failure.into()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_exporter_is_a_failed_transfer_and_not_the_importers_end() {
        let broken = tonic::Status::unknown("h2 protocol error");
        for failure in [refused(&broken), lost("no answer")] {
            assert_eq!(failure.code, FailureCode::TransferFailed);
        }
        let status = tonic::Status::invalid_argument("capability is missing");
        assert_eq!(refused(&status).code, FailureCode::InvalidRequest);
    }
}
