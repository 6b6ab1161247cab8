//! The flags of a node process, the same for every role, and what they amount to.
//!
//! A flag that cannot work is refused before any port is bound: addresses that other machines reach without
//! `--insecure-network`, addresses that peers could not use, transports that a node process does not have.

use crate::bind_guard::{self, OpenBind};
use crate::telemetry::LogFormat;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use tidemill_core::{Incarnation, KvDtype, NodeId, Role};

/// Flags of `prefill-node`, `decode-node` and `tidemill node`.
#[derive(clap::Args, Clone, Debug)]
pub struct NodeFlags {
    /// A TOML file with any of these flags as keys.
    #[arg(long, env = "TIDEMILL_CONFIG")]
    pub config: Option<PathBuf>,
    /// GGUF file or Hugging Face directory.
    #[arg(long, env = "TIDEMILL_MODEL")]
    pub model: PathBuf,
    /// The name under which clients ask for the model; that of its file or directory unless given.
    #[arg(long, env = "TIDEMILL_MODEL_NAME")]
    pub model_name: Option<String>,
    /// Address of the control port, as the router (and for prefill also decode nodes) reach it.
    #[arg(long, env = "TIDEMILL_LISTEN")]
    pub listen: String,
    /// Name within the deployment; role and address unless given.
    #[arg(long, env = "TIDEMILL_NODE_ID", value_parser = parse_node_id)]
    pub node_id: Option<NodeId>,
    /// Address of the admin port: /healthz, /readyz, /metrics.
    #[arg(long, env = "TIDEMILL_ADMIN_LISTEN", default_value = "127.0.0.1:0")]
    pub admin_listen: SocketAddr,
    /// How KV blocks travel between nodes of several processes; those of `tidemill serve` have another way.
    #[arg(long, env = "TIDEMILL_KV_TRANSPORT", default_value = "tcp", value_parser = ["tcp"])]
    pub kv_transport: String,
    /// Address at which a prefill node lends its blocks; the host of --listen and a free port unless given.
    #[arg(long, env = "TIDEMILL_KV_LISTEN")]
    pub kv_listen: Option<String>,
    /// Memory for KV blocks, in bytes.
    #[arg(long, env = "TIDEMILL_KV_BYTES", default_value_t = 1 << 30)]
    pub kv_bytes: u64,
    /// Element type of KV: f16, bf16 or f32; the same on all nodes.
    #[arg(long, env = "TIDEMILL_KV_DTYPE", default_value = "f16")]
    pub kv_dtype: KvDtype,
    /// What computes.
    #[arg(long, env = "TIDEMILL_DEVICE", default_value = "cpu", value_parser = ["cpu"])]
    pub device: String,
    /// Compute threads; all cores unless given.
    #[arg(long, env = "TIDEMILL_THREADS", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Most tokens that one step feeds.
    #[arg(long, env = "TIDEMILL_MAX_BATCH_TOKENS", default_value_t = 512,
          value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub max_batch_tokens: u32,
    /// Most sequences that run at once.
    #[arg(long, env = "TIDEMILL_MAX_SEQUENCES", default_value_t = 64,
          value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub max_sequences: u32,
    /// Allow ports that other machines reach although nothing on them is encrypted.
    #[arg(long, env = "TIDEMILL_INSECURE_NETWORK")]
    pub insecure_network: bool,
    /// Check flags and model, then exit.
    #[arg(long)]
    pub check_config: bool,
    /// What is logged, e.g. info,tidemill_prefill_node=debug.
    #[arg(long, env = "TIDEMILL_LOG", default_value = "info")]
    pub log: String,
    /// Shape of log lines: text or json.
    #[arg(long, env = "TIDEMILL_LOG_FORMAT", default_value = "text")]
    pub log_format: LogFormat,
}

/// What a node is to be, whatever process it runs in.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NodeShape {
    /// Its name.
    pub node_id: NodeId,
    /// Where its control service listens: `host:port` or `local:NAME`.
    pub listen: String,
    /// The name under which clients ask for the model.
    pub model_name: String,
    /// Vocabulary and template: what router and node must share.
    pub text_fingerprint: [u8; 32],
    /// Memory for KV blocks.
    pub kv_bytes: u64,
    /// Element type of KV.
    pub kv_dtype: KvDtype,
    /// Compute threads.
    pub n_threads: usize,
    /// Most tokens that one step feeds.
    pub max_batch_tokens: u32,
    /// Most sequences that run at once.
    pub max_sequences: u32,
}

/// A flag that does not hold.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FlagError {
    /// A port that other machines reach.
    #[error(transparent)]
    Open(#[from] OpenBind),
    /// No address, or a name that nobody knows.
    #[error("{flag} {address:?} is no host:port of this machine: {reason}")]
    Address {
        /// The flag.
        flag: &'static str,
        /// Its value.
        address: String,
        /// Why.
        reason: String,
    },
    /// All interfaces: an address that peers cannot call.
    #[error(
        "{flag} is {address}: decode nodes are told this address, so it has to name a host or an interface"
    )]
    Everywhere {
        /// The flag.
        flag: &'static str,
        /// Its value.
        address: String,
    },
    /// A pool that holds too few or too many blocks.
    #[error(
        "--kv-bytes is {kv_bytes}; a block has {block_bytes} bytes, and 2 to {} blocks are allowed",
        u32::MAX
    )]
    KvBytes {
        /// The flag.
        kv_bytes: u64,
        /// Bytes of a block.
        block_bytes: usize,
    },
}

fn parse_node_id(text: &str) -> Result<NodeId, String> {
    NodeId::new(text)
}

impl NodeFlags {
    /// Checks what clap cannot: addresses.
    ///
    /// # Errors
    /// Names the flag and what to do instead.
    pub fn check(&self, role: Role) -> Result<(), FlagError> {
        bind_guard::check("--admin-listen", self.admin_listen, self.insecure_network)?;
        let listen = self.check_address("--listen", &self.listen)?;
        let kv_listen = match &self.kv_listen {
            Some(address) => self.check_address("--kv-listen", address)?,
            None => listen,
        };
        if role == Role::Prefill {
            self.check_callable("--listen", listen)?;
            self.check_callable("--kv-listen", kv_listen)?;
        }
        Ok(())
    }

    fn check_address(&self, flag: &'static str, address: &str) -> Result<IpAddr, FlagError> {
        let error = |reason: String| FlagError::Address {
            flag,
            address: address.to_owned(),
            reason,
        };
        let resolved: Vec<SocketAddr> = address
            .to_socket_addrs()
            .map_err(|source| error(source.to_string()))?
            .collect();
        for socket in &resolved {
            bind_guard::check(flag, *socket, self.insecure_network)?;
        }
        let first = resolved.first().map(SocketAddr::ip);
        first.ok_or_else(|| error("it resolves to nothing".to_owned()))
    }

    fn check_callable(&self, flag: &'static str, ip: IpAddr) -> Result<(), FlagError> {
        if ip.is_unspecified() {
            return Err(FlagError::Everywhere {
                flag,
                address: ip.to_string(),
            });
        }
        Ok(())
    }

    /// Where a prefill node lends its blocks.
    pub fn kv_address(&self) -> String {
        let host = self.listen.rsplit_once(':').map_or("", |(host, _)| host);
        self.kv_listen.clone().unwrap_or(format!("{host}:0"))
    }

    /// What the flags amount to for a model whose text half has this name.
    pub fn shape(&self, role: Role, text_name: &str, text_fingerprint: [u8; 32]) -> NodeShape {
        let by_address = || {
            let mut name = format!("{}-{}", role.name(), self.listen).replace(['[', ']'], "");
            if self.listen.ends_with(":0") {
                // Every node whose port is still to be chosen has this address; a name is one node's.
                name = format!("{name}-{:08x}", Incarnation::random().0 as u32);
            }
            NodeId::new(name).unwrap_or_else(|_| {
                NodeId::new(role.name()).expect("the name of a role is a node id")
            })
        };
        let n_cores = || std::thread::available_parallelism().map_or(1, usize::from);
        NodeShape {
            node_id: self.node_id.clone().unwrap_or_else(by_address),
            listen: self.listen.clone(),
            model_name: self
                .model_name
                .clone()
                .unwrap_or_else(|| text_name.to_owned()),
            text_fingerprint,
            kv_bytes: self.kv_bytes,
            kv_dtype: self.kv_dtype,
            n_threads: self.threads.map_or_else(n_cores, usize::from),
            max_batch_tokens: self.max_batch_tokens,
            max_sequences: self.max_sequences,
        }
    }
}

impl NodeShape {
    /// Blocks of this size that fit.
    ///
    /// # Errors
    /// When that is fewer than two or more than can be counted.
    pub fn n_blocks(&self, block_bytes: usize) -> Result<u32, FlagError> {
        let n_blocks = self.kv_bytes / (block_bytes as u64).max(1);
        u32::try_from(n_blocks)
            .ok()
            .filter(|&n| n >= 2)
            .ok_or(FlagError::KvBytes {
                kv_bytes: self.kv_bytes,
                block_bytes,
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::parse_from;
    use clap::{CommandFactory, Parser};

    #[derive(Parser, Debug)]
    struct Flags {
        #[command(flatten)]
        node: NodeFlags,
    }

    fn parse(more: &[&str]) -> Result<NodeFlags, clap::Error> {
        let given = ["node", "--model", "m.gguf"];
        let all = given.iter().chain(more).map(Into::into).collect();
        parse_from::<Flags>(all).map(|flags| flags.node)
    }

    #[test]
    fn the_fixed_command_line_parses() {
        let flags = parse(&[
            "--listen",
            "127.0.0.1:7001",
            "--node-id",
            "prefill-3",
            "--kv-transport",
            "tcp",
            "--kv-listen",
            "127.0.0.1:7101",
            "--kv-bytes",
            "1000000",
            "--kv-dtype",
            "f32",
            "--threads",
            "2",
            "--max-batch-tokens",
            "128",
            "--max-sequences",
            "8",
            "--admin-listen",
            "127.0.0.1:9001",
            "--check-config",
        ]);
        let flags = flags.expect("valid");
        assert_eq!(flags.check(Role::Prefill), Ok(()));
        assert_eq!(flags.kv_address(), "127.0.0.1:7101");
        let shape = flags.shape(Role::Prefill, "own", [1; 32]);
        assert_eq!(shape.node_id.as_str(), "prefill-3");
        assert_eq!((shape.n_threads, shape.model_name.as_str()), (2, "own"));
        assert_eq!(shape.n_blocks(1000), Ok(1000));
        assert!(shape.n_blocks(600_000).is_err(), "one block serves nobody");
    }

    #[test]
    fn what_is_not_given_follows_from_what_is() {
        let flags = parse(&["--listen", "127.0.0.1:7001"]).expect("valid");
        assert_eq!(flags.kv_address(), "127.0.0.1:0");
        let shape = flags.shape(Role::Decode, "own", [1; 32]);
        assert_eq!(shape.node_id.as_str(), "decode-127.0.0.1:7001");
        assert!(shape.n_threads > 0);
    }

    #[test]
    fn two_nodes_without_a_port_of_their_own_have_two_names() {
        let flags = parse(&["--listen", "127.0.0.1:0"]).expect("valid");
        let name = || flags.shape(Role::Decode, "own", [1; 32]).node_id;
        assert!(name().as_str().starts_with("decode-127.0.0.1:0-"));
        assert_ne!(name(), name());
    }

    #[test]
    fn help_and_error_name_the_transports_that_are_taken_and_no_other() {
        for transport in ["local", "shm", "ucx", "pigeon"] {
            let given = ["--listen", "127.0.0.1:0", "--kv-transport", transport];
            let error = parse(&given).expect_err("not here").to_string();
            assert!(error.contains("[possible values: tcp]"), "{error}");
        }
        let help = Flags::command().render_long_help().to_string();
        for transport in ["local,", "local]", "shm", "ucx"] {
            assert!(!help.contains(transport), "{transport}: {help}");
        }
        assert!(help.contains("[possible values: tcp]"), "{help}");
    }

    #[test]
    fn addresses_that_are_open_or_cannot_be_called_are_refused() {
        let open = parse(&["--listen", "0.0.0.0:7001"]).expect("parses");
        let error = open.check(Role::Decode).expect_err("open");
        assert!(error.to_string().contains("--insecure-network"), "{error}");
        let everywhere = ["--listen", "0.0.0.0:7001", "--insecure-network"];
        let everywhere = parse(&everywhere).expect("parses");
        assert_eq!(everywhere.check(Role::Decode), Ok(()));
        let error = everywhere.check(Role::Prefill).expect_err("not callable");
        assert!(error.to_string().contains("--listen"), "{error}");
        for (role, flag) in [
            (Role::Prefill, "--kv-listen"),
            (Role::Decode, "--kv-listen"),
            (Role::Prefill, "--admin-listen"),
        ] {
            for open in ["0.0.0.0:7101", "10.0.0.1:7101", "[::]:7101"] {
                let given = ["--listen", "127.0.0.1:7001", flag, open];
                let error = parse(&given).expect("parses").check(role).expect_err(open);
                let FlagError::Open(refused) = error else {
                    panic!("{flag} {open}: {error}");
                };
                assert_eq!((refused.flag, refused.address.port()), (flag, 7101));
            }
        }
        let given = ["--listen", "127.0.0.1:7001", "--kv-listen", "0.0.0.0:7101"];
        let everywhere = [&given[..], &["--insecure-network"]].concat();
        let error = parse(&everywhere).expect("parses").check(Role::Prefill);
        let error = error.expect_err("decode nodes could not call it");
        assert!(error.to_string().contains("--kv-listen"), "{error}");
        let malformed = parse(&["--listen", "nowhere"]).expect("parses");
        assert!(malformed.check(Role::Decode).is_err());
    }
}
