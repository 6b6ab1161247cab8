//! A whole deployment in processes of its own: prefill nodes, decode nodes and a router, over TCP on loopback, on ports
//! that the operating system chooses. Or the same in one process, `tidemill serve`.

use crate::answer::{self, Answer, End};
use crate::metrics::Metrics;
use crate::model::ModelFile;
use crate::process::{Process, Ready};
use crate::{http, wait_until};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;
use tidemill_core::Role;

/// A node that has just become ready is known to the router within this time; one that was lost a moment ago is asked
/// again after a pause.
const KNOWN_PATIENCE: Duration = Duration::from_secs(20);

/// What a deployment is to be.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Prefill nodes.
    pub n_prefill: usize,
    /// Decode nodes.
    pub n_decode: usize,
    /// More flags of every node.
    pub node_flags: Vec<&'static str>,
    /// More flags of the router.
    pub router_flags: Vec<&'static str>,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            n_prefill: 1,
            n_decode: 1,
            node_flags: vec!["--kv-bytes", "67108864"],
            router_flags: Vec::new(),
        }
    }
}

/// One process and where it answers.
pub struct Member {
    /// The process.
    pub process: Process,
    /// Its addresses.
    pub ready: Ready,
    program: &'static str,
    arguments: Vec<String>,
}

impl Member {
    fn start(program: &'static str, arguments: Vec<String>) -> Result<Self> {
        let listen = ["--listen".to_owned(), "127.0.0.1:0".to_owned()];
        let all = [&listen[..], &arguments].concat();
        let (process, ready) = Process::spawn_ready(program, &all)?;
        Ok(Self {
            process,
            ready,
            program,
            arguments,
        })
    }

    /// Starts it again at the same address, after its end.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn start_again(&mut self) -> Result<()> {
        let address = self.ready.listen.to_string();
        let all = [&["--listen".to_owned(), address], &self.arguments[..]].concat();
        let (process, ready) = Process::spawn_ready(self.program, &all)?;
        self.process = process;
        self.ready = ready;
        Ok(())
    }

    /// What it tells at its admin port.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn metrics(&self) -> Result<Metrics> {
        Metrics::read(self.ready.admin)
    }

    /// One gauge of a node, by the part of its name after the role.
    ///
    /// # Errors
    /// When the node does not answer or has no such gauge.
    pub fn gauge(&self, name: &str) -> Result<f64> {
        let name = format!("tidemill_{}_{name}", self.ready.role);
        self.metrics()?.sum(&name)
    }
}

/// Router and nodes.
pub struct Deployment {
    /// The front door.
    pub router: Member,
    /// Prefill nodes.
    pub prefill: Vec<Member>,
    /// Decode nodes.
    pub decode: Vec<Member>,
}

impl Deployment {
    /// Starts all of it, nodes first, and waits until the router knows all nodes.
    ///
    /// # Errors
    /// When a process does not come up.
    pub fn start(model: &ModelFile, shape: &Shape) -> Result<Self> {
        let mut node_arguments = vec!["--model".to_owned(), model.argument()?];
        node_arguments.extend(["--threads", "1"].map(str::to_owned));
        node_arguments.extend(shape.node_flags.iter().map(|flag| (*flag).to_owned()));
        let nodes = |program, n_nodes: usize| -> Result<Vec<Member>> {
            (0..n_nodes)
                .map(|_| Member::start(program, node_arguments.clone()))
                .collect()
        };
        let prefill = nodes("prefill-node", shape.n_prefill)?;
        let decode = nodes("decode-node", shape.n_decode)?;
        let entries = prefill.iter().chain(&decode);
        let entries: Vec<String> = entries
            .map(|node| format!("{}={}", node.ready.role, node.ready.listen))
            .collect();
        let mut arguments = vec!["--model".to_owned(), model.argument()?];
        arguments.extend(["--nodes".to_owned(), entries.join(",")]);
        arguments.extend(shape.router_flags.iter().map(|flag| (*flag).to_owned()));
        let router = Member::start("router", arguments)?;
        let deployment = Self {
            router,
            prefill,
            decode,
        };
        deployment.wait_known(KNOWN_PATIENCE)?;
        Ok(deployment)
    }

    /// Waits until the router gives work to every node.
    ///
    /// # Errors
    /// Says how many of which role it knows.
    pub fn wait_known(&self, patience: Duration) -> Result<()> {
        wait_until(patience, || {
            let metrics = self.router.metrics()?;
            for (role, nodes) in [("prefill", &self.prefill), ("decode", &self.decode)] {
                let label = format!("role=\"{role}\"");
                let n_known = metrics.sum_where("tidemill_router_nodes", &label)?;
                let n_nodes = nodes.len();
                ensure!(
                    n_known == n_nodes as f64,
                    "the router knows {n_known} of {n_nodes} {role} nodes"
                );
            }
            Ok(())
        })
    }

    /// The public port.
    pub fn address(&self) -> SocketAddr {
        self.router.ready.listen
    }

    /// The nodes of a role.
    pub fn nodes(&mut self, role: Role) -> &mut Vec<Member> {
        match role {
            Role::Prefill => &mut self.prefill,
            Role::Decode => &mut self.decode,
        }
    }

    /// Every process.
    pub fn members(&self) -> impl Iterator<Item = &Member> {
        let nodes = self.prefill.iter().chain(&self.decode);
        nodes.chain(std::iter::once(&self.router))
    }

    /// How often recovery did this, by the name in the router's metrics.
    ///
    /// # Errors
    /// When the router does not answer.
    pub fn n_events(&self, event: &str) -> Result<f64> {
        let label = format!("event=\"{event}\"");
        let name = "tidemill_router_dispatch_events_total";
        self.router.metrics()?.sum_where(name, &label)
    }

    /// Waits until every pool and list of every living process is as before the first request.
    ///
    /// # Errors
    /// Names the first gauge that is not.
    pub fn wait_idle(&mut self, patience: Duration) -> Result<()> {
        wait_until(patience, || {
            let n_open = self
                .router
                .metrics()?
                .sum("tidemill_router_open_requests")?;
            ensure!(n_open == 0.0, "the router has {n_open} open requests");
            for node in self.prefill.iter_mut().chain(&mut self.decode) {
                if node.process.is_running()? {
                    check_idle(node)?;
                }
            }
            Ok(())
        })
    }

    /// Waits until a request is answered whole, and gives that answer.
    ///
    /// # Errors
    /// When none is within `patience`.
    pub fn wait_served(&self, patience: Duration) -> Result<Answer> {
        wait_served(self.address(), patience)
    }
}

/// Holds one node's gauges against their idle values.
///
/// # Errors
/// Names the gauge that is not idle.
pub fn check_idle(node: &Member) -> Result<()> {
    let metrics = node.metrics()?;
    let gauge = |name: &str| metrics.sum(&format!("tidemill_{}_{name}", node.ready.role));
    let who = &node.ready.role;
    for name in [
        "sequences_waiting",
        "sequences_running",
        "queued_tokens",
        "blocks_leased",
    ] {
        let value = gauge(name)?;
        ensure!(value == 0.0, "{name} of {who} is {value}, not 0");
    }
    let (n_free, n_blocks) = (gauge("blocks_free")?, gauge("blocks")?);
    ensure!(
        n_free == n_blocks && n_blocks > 0.0,
        "{n_free} of {n_blocks} blocks of {who} are free"
    );
    Ok(())
}

/// Waits until a short request is answered whole.
///
/// # Errors
/// When none is within `patience`.
pub fn wait_served(address: SocketAddr, patience: Duration) -> Result<Answer> {
    let body = greedy("The tide", 4);
    wait_until(patience, || {
        let answer = answer::ask(address, answer::COMPLETIONS, &body)?;
        ensure!(answer.end == End::Done, "{:?}", answer.end);
        Ok(answer)
    })
}

/// A completion of exactly so many tokens that is the same at every try, with its log-probabilities.
pub fn greedy(prompt: &str, max_tokens: u32) -> Value {
    json!({
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": true,
        "logprobs": 2,
    })
}

/// The same with tokens drawn by chance, from a seed: a text of many different tokens, each of which depends on all
/// before it.
pub fn seeded(prompt: &str, max_tokens: u32) -> Value {
    let mut body = greedy(prompt, max_tokens);
    body["temperature"] = json!(1);
    body["seed"] = json!(20);
    body
}

/// `tidemill serve` with more flags, and where it answers.
///
/// # Errors
/// When it does not come up.
pub fn serve(model: &ModelFile, flags: &[&str]) -> Result<(Process, Ready)> {
    let model = model.argument()?;
    let listen = ["serve", "--listen", "127.0.0.1:0", "--model", &model];
    let own = ["--threads", "1", "--kv-bytes", "67108864"];
    let all = [&listen[..], &own, flags].concat();
    let (process, ready) = Process::spawn_ready("tidemill", &all)?;
    let health = http::get(ready.listen, "/health").context("the public port")?;
    ensure!(health.status == 200, "ready, and /health is {health:?}");
    Ok((process, ready))
}
