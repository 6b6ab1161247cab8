//! `tidemill serve`: router, prefill and decode nodes in one process, with one copy of the weights.
//!
//! The same libraries as the separate binaries, connected within the process. It says that it serves only when a real
//! generation has gone all the way through.

mod first_request;
mod nodes;

use crate::model_name;
use anyhow::{Context, Result};
use clap::Args;
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tidemill_core::{Clock, KvDtype, SystemClock, TransportKind};
use tidemill_engine::model::Model;
use tidemill_kernels::cpu::Isa;
use tidemill_model_files::{ModelText, open, open_text};
use tidemill_router::dispatch::DispatchConfig;
use tidemill_router::placement::SplitPolicy;
use tidemill_router::{RouterConfig, Surroundings};
use tidemill_service::discovery::LocalDiscovery;
use tidemill_service::grpc::Fabric;
use tidemill_service::health::Admin;
use tidemill_service::telemetry::LogFormat;
use tidemill_service::{bind_guard, config, drain, telemetry};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Flags of `tidemill serve`.
#[derive(Args, Debug)]
pub(crate) struct ServeArgs {
    /// A TOML file with any of these flags as keys.
    #[arg(long, env = "TIDEMILL_CONFIG")]
    config: Option<PathBuf>,
    /// GGUF file, Hugging Face directory, or a name that `tidemill pull` knows.
    #[arg(long, env = "TIDEMILL_MODEL", default_value = "smollm2-135m")]
    model: String,
    /// The name under which clients ask for the model; that of its file or directory unless given.
    #[arg(long, env = "TIDEMILL_MODEL_NAME")]
    model_name: Option<String>,
    /// Address of the public port.
    #[arg(long, env = "TIDEMILL_LISTEN", default_value = "127.0.0.1:8000")]
    listen: SocketAddr,
    /// Address of the admin port: /healthz, /readyz, /metrics.
    #[arg(long, env = "TIDEMILL_ADMIN_LISTEN", default_value = "127.0.0.1:0")]
    admin_listen: SocketAddr,
    /// Prefill nodes.
    #[arg(long, env = "TIDEMILL_PREFILL", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    prefill: u32,
    /// Decode nodes.
    #[arg(long, env = "TIDEMILL_DECODE", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    decode: u32,
    /// How KV blocks travel between the nodes: local (within the process) or tcp.
    #[arg(long, env = "TIDEMILL_KV_TRANSPORT", default_value = "local")]
    kv_transport: TransportKind,
    /// One decode node that also prefills, and no split: the baseline to compare with.
    #[arg(long, env = "TIDEMILL_COLOCATED", conflicts_with = "split")]
    colocated: bool,
    /// When prompts are prefilled on a node of their own: require, prefer or never.
    #[arg(long, env = "TIDEMILL_SPLIT", default_value = "prefer")]
    split: SplitPolicy,
    /// Memory for KV blocks of each node, in bytes.
    #[arg(long, env = "TIDEMILL_KV_BYTES", default_value_t = 1 << 30)]
    kv_bytes: u64,
    /// Element type of KV: f16, bf16 or f32.
    #[arg(long, env = "TIDEMILL_KV_DTYPE", default_value = "f16")]
    kv_dtype: KvDtype,
    /// Compute threads of each node; all cores unless given.
    #[arg(long, env = "TIDEMILL_THREADS", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Most tokens that one step feeds.
    #[arg(long, env = "TIDEMILL_MAX_BATCH_TOKENS", default_value_t = 512,
          value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    max_batch_tokens: u32,
    /// Most sequences that run at once on a node.
    #[arg(long, env = "TIDEMILL_MAX_SEQUENCES", default_value_t = 64,
          value_parser = clap::value_parser!(u32).range(1..=65_536))]
    max_sequences: u32,
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
    #[arg(long, env = "TIDEMILL_LOG", default_value = "warn")]
    log: String,
    /// Shape of log lines: text or json.
    #[arg(long, env = "TIDEMILL_LOG_FORMAT", default_value = "text")]
    log_format: LogFormat,
}

/// A model that has been opened whole.
struct Opened {
    model: Arc<Model>,
    text: Arc<ModelText>,
    name: String,
}

/// Everything that can be wrong before a port is bound.
///
/// # Errors
/// Names the flag or the file, and what to do.
pub(crate) fn check(args: &ServeArgs) -> Result<impl FnOnce() -> Result<()>> {
    telemetry::start(&args.log, args.log_format)?;
    bind_guard::check("--listen", args.listen, args.insecure_network)?;
    bind_guard::check("--admin-listen", args.admin_listen, args.insecure_network)?;
    let path = model_name::resolve(&args.model)?;
    progress(&format!("loading {}", path.display()));
    let opened = open_model(args, &path)?;
    let shape = nodes::shape(args, &opened, tidemill_core::Role::Decode, 0)?;
    shape.n_blocks(opened.model.facts(args.kv_dtype).layout.block_bytes())?;
    Ok(move || {
        if args.check_config {
            config::say_valid("serve", &args.listen.to_string(), &path);
            return Ok(());
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build();
        runtime
            .context("the runtime does not start")?
            .block_on(serve(args, opened))
    })
}

fn open_model(args: &ServeArgs, path: &Path) -> Result<Opened> {
    let named = || format!("--model {}", path.display());
    let text = open_text(path).with_context(named)?;
    let files = open(path).with_context(named)?;
    let model = Model::load(&files, Isa::detect()).with_context(named)?;
    Ok(Opened {
        model: Arc::new(model),
        name: args.model_name.clone().unwrap_or_else(|| text.name.clone()),
        text: Arc::new(text),
    })
}

async fn serve(args: &ServeArgs, opened: Opened) -> Result<()> {
    let shutdown = drain::on_signal()?;
    let listener = bind("--listen", args.listen).await?;
    let admin_listener = bind("--admin-listen", args.admin_listen).await?;
    let (address, admin_address) = (listener.local_addr()?, admin_listener.local_addr()?);
    let admin = Admin::starting("no node is known yet");
    let admin_stop = CancellationToken::new();
    let admin_server = tokio::spawn(admin.clone().serve(admin_listener, admin_stop.clone()));

    let (fabric, discovery) = (Fabric::default(), LocalDiscovery::default());
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
    // The nodes leave after the router, which may still need them to end its requests.
    let nodes_stop = CancellationToken::new();
    let outside = (&fabric, &discovery);
    let running = nodes::start(args, &opened, outside, (&clock, &admin), &nodes_stop).await?;
    let split = if args.colocated {
        SplitPolicy::Never
    } else {
        args.split
    };
    let router = RouterConfig {
        listener,
        model_name: opened.name.clone(),
        dispatch: DispatchConfig {
            split,
            ..DispatchConfig::default()
        },
        n_requests_max: args.max_requests as usize,
        n_queue_max: args.max_queue as usize,
        admin: admin.clone(),
    };
    let surroundings = Surroundings {
        fabric,
        discovery: Arc::new(discovery),
        clock,
    };
    let router = tidemill_router::run(
        router,
        Arc::clone(&opened.text),
        surroundings,
        shutdown.clone(),
    );
    let announce = async {
        first_request::send(address, &opened.name).await?;
        announce(args, address, admin_address, &opened.name);
        std::future::pending::<Result<()>>().await
    };
    let told = async {
        shutdown.cancelled().await;
        progress("draining: open requests may end; once more ends at once");
        std::future::pending::<Result<()>>().await
    };
    tokio::select! {
        ended = told => ended?,
        ended = router => ended?,
        ended = announce => ended?,
        ended = nodes::first_end(running) => ended?,
    }
    nodes_stop.cancel();
    admin_stop.cancel();
    admin_server.await.context("the admin port panicked")??;
    Ok(())
}

async fn bind(flag: &str, address: SocketAddr) -> Result<TcpListener> {
    let bound = TcpListener::bind(address).await;
    bound.with_context(|| {
        format!("{flag} {address} cannot be bound; choose another or end its owner")
    })
}

/// One line for scripts, then what a person does next.
fn announce(args: &ServeArgs, address: SocketAddr, admin_address: SocketAddr, name: &str) {
    let shape = if args.colocated {
        "colocated".to_owned()
    } else {
        format!(
            "{} prefill + {} decode, KV over {}",
            args.prefill,
            args.decode,
            args.kv_transport.name()
        )
    };
    let url = format!("http://{}", first_request::reachable(address));
    let program =
        std::env::current_exe().map_or("tidemill".into(), |path| path.display().to_string());
    let mut out = std::io::stdout();
    // A closed standard output is no reason to stop serving.
    let _ = writeln!(
        out,
        "ready role=serve listen={address} admin={admin_address}\n\n\
         {name} is served ({shape}). Paste this:\n\n\
         curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '\
         {{\"model\": \"{name}\", \"stream\": true, \"messages\": [{{\"role\": \"user\", \"content\": \"What is a tide mill?\"}}]}}'\n\n\
         or chat in another terminal: {program} chat --url {url}\n\
         Ctrl-C here ends the server."
    );
    let _ = out.flush();
}

fn progress(text: &str) {
    // Nobody reads a closed standard error.
    let _ = writeln!(std::io::stderr(), "tidemill: {text}");
}
