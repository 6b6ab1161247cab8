//! The `decode-node` command: one decode node in a process of its own.
#![forbid(unsafe_code)]

use anyhow::Context;
use clap::Parser;
use std::process::ExitCode;
use std::sync::Arc;
use tidemill_core::Role;
use tidemill_decode_node::assemble::assemble;
use tidemill_decode_node::run;
use tidemill_engine::model::Model;
use tidemill_kernels::cpu::Isa;
use tidemill_model_files::{open, open_text};
use tidemill_service::node_flags::{NodeFlags, NodeShape};
use tidemill_service::node_process::Surroundings;
use tidemill_service::running_node::RunningNode;
use tidemill_service::version::VERSION;
use tidemill_service::{config, node_process};

/// Fetches KV from prefill nodes and generates tokens.
#[derive(Parser, Debug)]
#[command(name = "decode-node", version = VERSION)]
struct Flags {
    #[command(flatten)]
    node: NodeFlags,
}

fn main() -> ExitCode {
    let flags: Flags = config::parse();
    node_process::run(Role::Decode, &flags.node, load, async |loaded, around| {
        start(loaded, around).await
    })
}

/// A model in memory, and the node that is to be around it.
type Loaded = (Arc<Model>, NodeShape);

fn load(flags: &NodeFlags) -> anyhow::Result<Loaded> {
    let named = || format!("--model {}", flags.model.display());
    let text = open_text(&flags.model).with_context(named)?;
    let files = open(&flags.model).with_context(named)?;
    let model = Model::load(&files, Isa::detect()).with_context(named)?;
    let shape = flags.shape(Role::Decode, &text.name, text.text_fingerprint);
    // What does not fit is a bad configuration, found before a port is bound.
    shape.n_blocks(model.facts(shape.kv_dtype).layout.block_bytes())?;
    Ok((Arc::new(model), shape))
}

async fn start((model, shape): Loaded, around: Surroundings) -> anyhow::Result<RunningNode> {
    let (settings, parts) = assemble(&model, shape, None, around)?;
    Ok(run::start(settings, parts).await?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_model_files::testing::{TinySpec, write_gguf};

    #[test]
    fn the_model_goes_by_its_files_name_as_at_the_router() {
        let stem = format!("decode-node-{}-named", std::process::id());
        let path = std::env::temp_dir().join(format!("{stem}.gguf"));
        write_gguf(&path, &TinySpec::default()).expect("the temporary directory is writable");
        let model = path.to_str().expect("an ASCII path");
        let flags = ["decode-node", "--listen", "127.0.0.1:0", "--model", model];
        let flags: Flags = Flags::parse_from(flags);
        let loaded = load(&flags.node);
        std::fs::remove_file(path).expect("just written");
        let (model, shape) = loaded.expect("it loads");
        assert_eq!(model.name(), "tiny");
        assert_eq!(shape.model_name, stem);
    }
}
