//! The router at work: everything that awaits.
//!
//! One task follows the nodes, one takes submissions, one serves HTTP, and each request has a task that holds its
//! machine. A drain refuses new requests, lets the open ones end, and waits for the last cancels to be heard.

mod members;
mod metrics;
mod request;
#[cfg(test)]
mod tests;

use self::members::{MemberLoop, Members};
use self::metrics::Metrics;
use self::request::Request;
use crate::admission::Admission;
use crate::dispatch::DispatchConfig;
use crate::http::{self, HttpConfig};
use crate::membership::{Membership, MembershipConfig};
use crate::node_client::NodeCalls;
use crate::requests::{Requests, Submission};
use std::sync::Arc;
use std::time::Duration;
use tidemill_core::Clock;
use tidemill_model_files::ModelText;
use tidemill_service::discovery::Discovery;
use tidemill_service::grpc::Fabric;
use tidemill_service::health::Admin;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument;

/// How long requests and cancels may take to end once the public port is closed.
const PARTING_TIME_MAX: Duration = Duration::from_secs(10);

/// What a router is told at its start.
pub struct RouterConfig {
    /// The public port, bound.
    pub listener: TcpListener,
    /// The name under which clients ask for the model.
    pub model_name: String,
    /// Bounds of a request's life on the nodes, and the split policy.
    pub dispatch: DispatchConfig,
    /// Requests in work at a time.
    pub n_requests_max: usize,
    /// Requests beyond that which are taken in while nodes are busy.
    pub n_queue_max: usize,
    /// Told whether this router can serve, and what it counts.
    pub admin: Admin,
}

/// What a router stands in: real, or one process, or a test's.
pub struct Surroundings {
    /// Reaches nodes.
    pub fabric: Fabric,
    /// Knows nodes.
    pub discovery: Arc<dyn Discovery>,
    /// Tells the time.
    pub clock: Arc<dyn Clock>,
}

/// Why a router ended other than by a drain.
#[derive(Debug, thiserror::Error)]
pub enum RouterEnd {
    /// The public port is of no use.
    #[error("the public port ended")]
    Http(#[from] std::io::Error),
    /// A task that the router cannot do without has ended.
    #[error("the router's {0} ended by itself")]
    Task(&'static str),
}

/// What every request's task shares.
struct Shared {
    members: Arc<Members>,
    calls: Arc<NodeCalls>,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
    dispatch: DispatchConfig,
    /// Requests, and cancels that outlive them.
    tasks: TaskTracker,
}

/// Serves until `shutdown` is cancelled, then drains.
///
/// # Errors
/// [`RouterEnd`] when it could not go on.
pub async fn run(
    config: RouterConfig,
    model: Arc<ModelText>,
    surroundings: Surroundings,
    shutdown: CancellationToken,
) -> Result<(), RouterEnd> {
    let Surroundings {
        fabric,
        discovery,
        clock,
    } = surroundings;
    let membership = Membership::new(MembershipConfig {
        text_fingerprint: model.text_fingerprint,
        split: config.dispatch.split,
    });
    let shared = Arc::new(Shared {
        members: Arc::new(Members::new(membership, Arc::clone(&clock))),
        calls: Arc::new(NodeCalls::new(fabric)),
        clock: Arc::clone(&clock),
        metrics: config.admin.register(Metrics::new),
        dispatch: config.dispatch,
        tasks: TaskTracker::new(),
    });
    let admission = Arc::new(Admission::new(config.n_requests_max, config.n_queue_max));
    let (requests, submissions) = Requests::new(Arc::clone(&admission));
    let http_config = HttpConfig {
        clock,
        admin: config.admin.clone(),
        ..HttpConfig::new(config.model_name)
    };
    let stop = shutdown.clone();
    let serving = http::serve(config.listener, http_config, model, requests, stop);
    let (member_loop, events) = MemberLoop::new(
        Arc::clone(&shared.members),
        Arc::clone(&shared.calls),
        config.admin.clone(),
    );
    let closing = async {
        shutdown.cancelled().await;
        admission.close();
        config.admin.close("the router is leaving");
        std::future::pending::<()>().await;
    };
    let end = tokio::select! {
        served = serving => served.map_err(RouterEnd::Http),
        () = member_loop.run(discovery, events) => Err(RouterEnd::Task("member loop")),
        () = serve_submissions(Arc::clone(&shared), submissions) => Err(RouterEnd::Task("request queue")),
        () = closing => Err(RouterEnd::Task("door keeper")),
    };
    config.admin.close("the router is leaving");
    shared.tasks.close();
    if tokio::time::timeout(PARTING_TIME_MAX, shared.tasks.wait())
        .await
        .is_err()
    {
        tracing::warn!(
            n_tasks = shared.tasks.len(),
            "requests are cut off by the end of the drain"
        );
    }
    end
}

/// Gives every submission a task. Admission bounds how many there are.
async fn serve_submissions(shared: Arc<Shared>, mut submissions: mpsc::Receiver<Submission>) {
    while let Some(submission) = submissions.recv().await {
        let outer = submission.span.clone();
        let inner = tracing::debug_span!(parent: &outer, "dispatch");
        let request = Request::new(Arc::clone(&shared), submission);
        let life = request.run().instrument(inner);
        shared.tasks.spawn(life.instrument(outer));
    }
    // The public port is closed; its own end ends the router.
    std::future::pending::<()>().await;
}
