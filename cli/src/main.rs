//! The `tidemill` command. Each subcommand is one file; this one only chooses.
#![forbid(unsafe_code)]

mod bench;
mod chat;
mod model_name;
mod openai;
mod pull;
mod serve;

use clap::{Parser, Subcommand};
use std::io::Write;
use std::process::ExitCode;
use tidemill_service::config;
use tidemill_service::version::VERSION;

/// Disaggregated LLM serving: prefill and decode on separate pools.
#[derive(Parser, Debug)]
#[command(name = "tidemill", version = VERSION)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Serve a model: router, prefill and decode nodes in this one process.
    Serve(Box<serve::ServeArgs>),
    /// Chat in the terminal.
    Chat(chat::ChatArgs),
    /// Put load on a server and print what its clients feel.
    Bench(bench::BenchArgs),
    /// Fetch a model into the cache.
    Pull {
        /// `smollm2-135m` (the default model) or a Hugging Face name like owner/model.
        name: String,
    },
}

fn main() -> ExitCode {
    let cli: Cli = config::parse();
    let result = match cli.command {
        Command::Serve(args) => match serve::check(&args) {
            Ok(serve) => serve(),
            Err(error) => return end_with(&error, config::EXIT_CONFIG),
        },
        Command::Chat(args) => client_runtime().and_then(|rt| rt.block_on(chat::run(args))),
        Command::Bench(args) => client_runtime().and_then(|rt| rt.block_on(bench::run(args))),
        Command::Pull { name } => pull::pull(&name).map(|path| say(&path.display().to_string())),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => end_with(&error, 1),
    }
}

fn end_with(error: &anyhow::Error, status: i32) -> ExitCode {
    // Nobody reads a closed standard error.
    let _ = writeln!(std::io::stderr(), "tidemill: {error:#}");
    ExitCode::from(u8::try_from(status).unwrap_or(1))
}

fn client_runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?)
}

#[allow(clippy::print_stdout, reason = "the path is the command's answer")]
fn say(text: &str) {
    println!("{text}");
}
