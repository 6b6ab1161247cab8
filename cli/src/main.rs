//! The `tidemill` command. Each subcommand is one file; this one only chooses.
#![forbid(unsafe_code)]

mod bench;
mod chat;
mod model_name;
mod openai;
mod pull;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Disaggregated LLM serving: prefill and decode on separate pools.
#[derive(Parser, Debug)]
#[command(name = "tidemill", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
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
    let cli: Cli = tidemill_service::config::parse();
    let result = match cli.command {
        Command::Chat(args) => client_runtime().and_then(|rt| rt.block_on(chat::run(args))),
        Command::Bench(args) => client_runtime().and_then(|rt| rt.block_on(bench::run(args))),
        Command::Pull { name } => pull::pull(&name).map(|path| say(&path.display().to_string())),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tidemill: {error:#}");
            ExitCode::FAILURE
        }
    }
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
