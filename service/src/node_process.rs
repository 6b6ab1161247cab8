//! The life of a node process, the same for every role: check everything, serve the admin port, start the node,
//! say that it is ready, end with it.
//!
//! Exit status 0 after a clean drain, 64 when a flag or the model does not hold, 1 when the node ended otherwise.

use crate::config::{self, EXIT_CONFIG};
use crate::grpc::Fabric;
use crate::health::Admin;
use crate::node_flags::NodeFlags;
use crate::running_node::RunningNode;
use crate::{drain, telemetry};
use anyhow::Context;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use tidemill_core::{Clock, Role, SystemClock};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// What a node finds around it.
#[derive(Clone)]
pub struct Surroundings {
    /// The in-process connections of this deployment.
    pub fabric: Fabric,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Probes and metrics.
    pub admin: Admin,
    /// Cancelled when the process is leaving.
    pub drain: CancellationToken,
}

/// Runs a node process to its end. `open` does everything that can be wrong before a port is bound; `start` makes
/// the node of what it gave.
pub fn run<M>(
    role: Role,
    flags: &NodeFlags,
    open: impl FnOnce(&NodeFlags) -> anyhow::Result<M>,
    start: impl AsyncFnOnce(M, Surroundings) -> anyhow::Result<RunningNode>,
) -> ExitCode {
    let opened = telemetry::start(&flags.log, flags.log_format)
        .and_then(|()| Ok(flags.check(role)?))
        .and_then(|()| open(flags));
    let opened = match opened {
        Ok(opened) => opened,
        Err(error) => return refuse(role, &error, EXIT_CONFIG),
    };
    if flags.check_config {
        config::say_valid(role.name(), &flags.listen, &flags.model);
        return ExitCode::SUCCESS;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build();
    let ended = runtime
        .context("the runtime does not start")
        .and_then(|runtime| runtime.block_on(serve(role, flags, opened, start)));
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => refuse(role, &error, 1),
    }
}

fn refuse(role: Role, error: &anyhow::Error, status: i32) -> ExitCode {
    // Nobody reads a closed standard error.
    let _ = writeln!(std::io::stderr(), "{}-node: {error:#}", role.name());
    ExitCode::from(u8::try_from(status).unwrap_or(1))
}

async fn serve<M>(
    role: Role,
    flags: &NodeFlags,
    opened: M,
    start: impl AsyncFnOnce(M, Surroundings) -> anyhow::Result<RunningNode>,
) -> anyhow::Result<()> {
    let drain = drain::on_signal()?;
    let admin_listener = TcpListener::bind(flags.admin_listen)
        .await
        .with_context(|| format!("--admin-listen {} cannot be bound", flags.admin_listen))?;
    let admin_address = admin_listener.local_addr()?;
    let admin = Admin::starting("the node is starting");
    let admin_stop = CancellationToken::new();
    let admin_server = tokio::spawn(admin.clone().serve(admin_listener, admin_stop.clone()));
    let surroundings = Surroundings {
        fabric: Fabric::default(),
        clock: Arc::new(SystemClock::new()),
        admin: admin.clone(),
        drain: drain.clone(),
    };
    let node = start(opened, surroundings).await?;
    let mut out = std::io::stdout();
    // A closed standard output is no reason to stop serving.
    let _ = writeln!(
        out,
        "ready role={} listen={} admin={admin_address}",
        role.name(),
        node.address()
    );
    let _ = out.flush();
    let ended = node.ended();
    tokio::pin!(ended);
    let ended = tokio::select! {
        ended = &mut ended => ended,
        () = drain.cancelled() => {
            admin.close("draining");
            ended.await
        }
    };
    // The last look at the metrics and at readiness is possible until here.
    admin_stop.cancel();
    admin_server.await.context("the admin port panicked")??;
    Ok(ended?)
}
