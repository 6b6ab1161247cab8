//! The `Node` service, which every node serves in the same way: what it is, how loaded it is, and cancel.
//!
//! Cancels travel to the node's loop in a queue of their own, so that they never wait behind new work.

use crate::trace_context::trace_of;
use futures::Stream;
use std::pin::Pin;
use tidemill_core::{Incarnation, LoadReport, RequestId};
use tidemill_proto::convert::{NodeDescription, incarnation, request_id};
use tidemill_proto::pd::v1;
use tidemill_proto::pd::v1::node_server;
use tokio::sync::{mpsc, watch};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::WatchStream;
use tonic::{Request, Response, Status};

/// Cancels waiting for the loop before callers wait too.
pub const CANCEL_QUEUE_MAX: usize = 1024;

/// A cancel on its way to the node's loop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cancel {
    /// Which attempt.
    pub request_id: RequestId,
    /// The life that the caller means.
    pub to: Incarnation,
}

/// Serves `Describe`, `WatchLoad` and `Cancel` for one node.
pub struct NodeService {
    description: NodeDescription,
    load: watch::Receiver<LoadReport>,
    cancels: mpsc::Sender<Cancel>,
}

impl NodeService {
    /// A service that tells `description` and `load` and hands cancels to `cancels`.
    pub fn new(
        description: NodeDescription,
        load: watch::Receiver<LoadReport>,
        cancels: mpsc::Sender<Cancel>,
    ) -> node_server::NodeServer<Self> {
        node_server::NodeServer::new(Self {
            description,
            load,
            cancels,
        })
    }
}

type Reports = Pin<Box<dyn Stream<Item = Result<v1::LoadReport, Status>> + Send>>;

#[tonic::async_trait]
impl node_server::Node for NodeService {
    async fn describe(
        &self,
        _request: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::NodeDescription>, Status> {
        Ok(Response::new((&self.description).into()))
    }

    type WatchLoadStream = Reports;

    async fn watch_load(
        &self,
        _request: Request<v1::WatchLoadRequest>,
    ) -> Result<Response<Reports>, Status> {
        let reports = WatchStream::new(self.load.clone()).map(|report| Ok((&report).into()));
        Ok(Response::new(Box::pin(reports)))
    }

    #[tracing::instrument(name = "cancel", skip_all, fields(traceparent = trace_of(&request)))]
    async fn cancel(
        &self,
        request: Request<v1::CancelRequest>,
    ) -> Result<Response<v1::CancelReply>, Status> {
        let request = request.into_inner();
        let cancel = Cancel {
            request_id: request_id(&request.request_id)?,
            to: incarnation("expected_incarnation", &request.expected_incarnation)?,
        };
        // An ended loop holds nothing that could be cancelled.
        let _ = self.cancels.send(cancel).await;
        Ok(Response::new(v1::CancelReply {}))
    }
}
