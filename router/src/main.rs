//! The `router` command: reads its flags, opens the text half of the model, binds its ports and runs.
//!
//! Everything that a flag can get wrong is found before a port is bound; the exit status is 64 then.
#![forbid(unsafe_code)]

use anyhow::Context;
use clap::Parser;
use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tidemill_core::SystemClock;
use tidemill_model_files::{ModelText, open_text};
use tidemill_router::dispatch::DispatchConfig;
use tidemill_router::placement::SplitPolicy;
use tidemill_router::{RouterConfig, Surroundings};
use tidemill_service::discovery::StaticDiscovery;
use tidemill_service::grpc::Fabric;
use tidemill_service::health::Admin;
use tidemill_service::telemetry::LogFormat;
use tidemill_service::version::VERSION;
use tidemill_service::{bind_guard, config, drain, telemetry};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// How often readiness is looked at until the ready line is printed.
const READY_PAUSE: Duration = Duration::from_millis(20);

/// The front door of a Tidemill deployment.
#[derive(Parser, Debug)]
#[command(name = "router", version = VERSION)]
struct Flags {
    /// A TOML file with any of these flags as keys.
    #[arg(long, env = "TIDEMILL_CONFIG")]
    config: Option<PathBuf>,
    /// Address of the public port.
    #[arg(long, env = "TIDEMILL_LISTEN", default_value = "127.0.0.1:8000")]
    listen: SocketAddr,
    /// Address of the admin port: /healthz, /readyz, /metrics.
    #[arg(long, env = "TIDEMILL_ADMIN_LISTEN", default_value = "127.0.0.1:0")]
    admin_listen: SocketAddr,
    /// GGUF file or Hugging Face directory; only its text half is read.
    #[arg(long, env = "TIDEMILL_MODEL")]
    model: PathBuf,
    /// The name under which clients ask for the model; that of its file or directory unless given.
    #[arg(long, env = "TIDEMILL_MODEL_NAME")]
    model_name: Option<String>,
    /// Where nodes are found.
    #[arg(long, env = "TIDEMILL_DISCOVERY", default_value = "static", value_parser = ["static"])]
    discovery: String,
    /// The nodes of static discovery: role=host:port,role=host:port.
    #[arg(long, env = "TIDEMILL_NODES")]
    nodes: StaticDiscovery,
    /// When prompts are prefilled on a node of their own: require, prefer or never.
    #[arg(long, env = "TIDEMILL_SPLIT", default_value = "prefer")]
    split: SplitPolicy,
    /// Requests in work at a time.
    #[arg(long, env = "TIDEMILL_MAX_REQUESTS", default_value_t = 512,
          value_parser = clap::value_parser!(u32).range(1..=65_536))]
    max_requests: u32,
    /// Requests beyond that which may wait for busy nodes; more are answered with 429.
    #[arg(long, env = "TIDEMILL_MAX_QUEUE", default_value_t = 512,
          value_parser = clap::value_parser!(u32).range(0..=65_536))]
    max_queue: u32,
    /// Allow ports that other machines reach although nothing on them is encrypted.
    #[arg(long, env = "TIDEMILL_INSECURE_NETWORK")]
    insecure_network: bool,
    /// Check flags and model, then exit.
    #[arg(long)]
    check_config: bool,
    /// What is logged, e.g. info,tidemill_router=debug.
    #[arg(long, env = "TIDEMILL_LOG", default_value = "info")]
    log: String,
    /// Shape of log lines: text or json.
    #[arg(long, env = "TIDEMILL_LOG_FORMAT", default_value = "text")]
    log_format: LogFormat,
}

fn main() -> ExitCode {
    let flags: Flags = config::parse();
    let model = match check(&flags) {
        Ok(model) => model,
        Err(error) => return refuse(&error, config::EXIT_CONFIG),
    };
    if flags.check_config {
        config::say_valid("router", &flags.listen.to_string(), &flags.model);
        return ExitCode::SUCCESS;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build();
    let ended = runtime
        .context("the runtime does not start")
        .and_then(|runtime| runtime.block_on(serve(flags, model)));
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => refuse(&error, 1),
    }
}

fn refuse(error: &anyhow::Error, status: i32) -> ExitCode {
    // Nobody reads a closed standard error.
    let _ = writeln!(std::io::stderr(), "router: {error:#}");
    ExitCode::from(u8::try_from(status).unwrap_or(1))
}

/// Everything that can be wrong before a port is bound.
fn check(flags: &Flags) -> anyhow::Result<ModelText> {
    telemetry::start(&flags.log, flags.log_format)?;
    bind_guard::check("--listen", flags.listen, flags.insecure_network)?;
    bind_guard::check("--admin-listen", flags.admin_listen, flags.insecure_network)?;
    open_text(&flags.model).with_context(|| format!("--model {}", flags.model.display()))
}

async fn serve(flags: Flags, model: ModelText) -> anyhow::Result<()> {
    let shutdown = drain::on_signal()?;
    let listener = bind("--listen", flags.listen).await?;
    let admin_listener = bind("--admin-listen", flags.admin_listen).await?;
    let admin = Admin::starting("no node is known yet");
    let ready = announce(
        admin.clone(),
        listener.local_addr()?,
        admin_listener.local_addr()?,
    );
    let admin_stop = CancellationToken::new();
    let admin_server = tokio::spawn(admin.clone().serve(admin_listener, admin_stop.clone()));
    let router = RouterConfig {
        listener,
        model_name: flags.model_name.unwrap_or_else(|| model.name.clone()),
        dispatch: DispatchConfig {
            split: flags.split,
            ..DispatchConfig::default()
        },
        n_requests_max: flags.max_requests as usize,
        n_queue_max: flags.max_queue as usize,
        admin,
    };
    let surroundings = Surroundings {
        fabric: Fabric::default(),
        discovery: Arc::new(flags.nodes),
        clock: Arc::new(SystemClock::new()),
    };
    let router = tidemill_router::run(router, Arc::new(model), surroundings, shutdown);
    let ended = tokio::select! {
        ended = router => ended,
        () = ready => unreachable!("it waits after its one line"),
    };
    // The last look at the metrics and at readiness is possible until here.
    admin_stop.cancel();
    admin_server.await.context("the admin port panicked")??;
    Ok(ended?)
}

async fn bind(flag: &str, address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address)
        .await
        .with_context(|| format!("{flag} {address} cannot be bound"))
}

/// Prints the ready line once nodes are there.
async fn announce(admin: Admin, listen: SocketAddr, admin_listen: SocketAddr) {
    while admin.missing().is_some() {
        tokio::time::sleep(READY_PAUSE).await;
    }
    let mut out = std::io::stdout();
    // A closed standard output is no reason to stop serving.
    let _ = writeln!(
        out,
        "ready role=router listen={listen} admin={admin_listen}"
    );
    let _ = out.flush();
    std::future::pending::<()>().await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(more: &[&str]) -> Result<Flags, clap::Error> {
        let given = [
            "router",
            "--model",
            "m.gguf",
            "--nodes",
            "decode=127.0.0.1:7002",
        ];
        let all = given.iter().chain(more).map(Into::into).collect();
        config::parse_from(all)
    }

    #[test]
    fn the_fixed_command_line_parses() {
        let flags = parse(&[
            "--listen",
            "127.0.0.1:0",
            "--split",
            "require",
            "--max-requests",
            "9",
            "--max-queue",
            "0",
            "--admin-listen",
            "127.0.0.1:0",
            "--insecure-network",
            "--check-config",
        ]);
        let flags = flags.expect("valid");
        assert_eq!(flags.split, SplitPolicy::Require);
        assert_eq!((flags.max_requests, flags.max_queue), (9, 0));
        assert!(flags.insecure_network && flags.check_config);
    }

    #[test]
    fn values_out_of_bounds_are_refused_with_their_flag() {
        for (flag, value) in [
            ("--split", "sometimes"),
            ("--max-requests", "0"),
            ("--listen", "nowhere"),
            ("--discovery", "rumour"),
        ] {
            let error = parse(&[flag, value]).expect_err(flag).to_string();
            assert!(error.contains(flag), "{error}");
        }
        let error = config::parse_from::<Flags>(
            ["router", "--model", "m", "--nodes", "both=1.2.3.4:5"]
                .map(Into::into)
                .to_vec(),
        );
        assert!(
            error
                .expect_err("no such role")
                .to_string()
                .contains("both")
        );
    }

    #[test]
    fn an_open_port_needs_a_word() {
        let flags = parse(&["--listen", "0.0.0.0:8000"]).expect("parses");
        let refused = bind_guard::check("--listen", flags.listen, flags.insecure_network);
        assert!(refused.is_err());
    }
}
