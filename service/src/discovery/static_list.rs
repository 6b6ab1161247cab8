//! A fixed list out of `--nodes role=addr,role=addr`.

use super::{Discovery, NodeEntry};
use http::uri::Authority;
use std::str::FromStr;
use tidemill_core::Role;
use tokio::sync::watch;

/// Most entries in a list.
const NODES_MAX: usize = 1024;

/// Why a list was refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NodeListError {
    /// No entry at all.
    #[error("--nodes names no node; role=host:port,role=host:port is expected")]
    Empty,
    /// An entry is not `role=host:port`.
    #[error("--nodes entry {0:?} is not role=host:port, like decode=127.0.0.1:7002")]
    Malformed(String),
    /// A role that does not exist.
    #[error("--nodes entry {entry:?} has role {role:?}; prefill or decode is allowed")]
    UnknownRole {
        /// The whole entry.
        entry: String,
        /// Its role.
        role: String,
    },
    /// The same node twice.
    #[error("--nodes names {0:?} twice")]
    Duplicate(String),
    /// Too long.
    #[error("--nodes has {0} entries; at most {NODES_MAX} are allowed")]
    TooMany(usize),
}

/// Entries that never change.
#[derive(Clone, Debug)]
pub struct StaticDiscovery {
    entries: watch::Sender<Vec<NodeEntry>>,
}

impl FromStr for StaticDiscovery {
    type Err = NodeListError;

    fn from_str(list: &str) -> Result<Self, NodeListError> {
        let mut entries: Vec<NodeEntry> = Vec::new();
        for text in list.split(',').map(str::trim).filter(|t| !t.is_empty()) {
            let entry = parse_entry(text)?;
            if entries.iter().any(|known| known.address == entry.address) {
                return Err(NodeListError::Duplicate(entry.address));
            }
            entries.push(entry);
        }
        if entries.is_empty() {
            return Err(NodeListError::Empty);
        }
        if entries.len() > NODES_MAX {
            return Err(NodeListError::TooMany(entries.len()));
        }
        Ok(Self {
            entries: watch::Sender::new(entries),
        })
    }
}

fn parse_entry(text: &str) -> Result<NodeEntry, NodeListError> {
    let (role, address) = text
        .split_once('=')
        .filter(|(_, address)| is_host_port(address))
        .ok_or_else(|| NodeListError::Malformed(text.to_owned()))?;
    let role = [Role::Prefill, Role::Decode]
        .into_iter()
        .find(|known| known.name() == role)
        .ok_or_else(|| NodeListError::UnknownRole {
            entry: text.to_owned(),
            role: role.to_owned(),
        })?;
    Ok(NodeEntry {
        role,
        address: address.to_owned(),
    })
}

/// Nodes of a list are other processes, so `local:NAME` is none, and nobody listens at port 0.
fn is_host_port(address: &str) -> bool {
    address.parse::<Authority>().is_ok_and(|authority| {
        let has_port = authority.port_u16().is_some_and(|port| port > 0);
        has_port && !authority.host().is_empty() && !address.contains('@')
    })
}

impl Discovery for StaticDiscovery {
    fn watch(&self) -> watch::Receiver<Vec<NodeEntry>> {
        self.entries.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_parses() {
        let list: StaticDiscovery = "prefill=127.0.0.1:7001, decode=127.0.0.1:7002"
            .parse()
            .expect("valid");
        let entries = list.watch().borrow().clone();
        assert_eq!(entries.len(), 2);
        assert_eq!(entries[1].role, Role::Decode);
        assert_eq!(entries[1].address, "127.0.0.1:7002");
    }

    #[test]
    fn bad_lists_are_refused_by_entry() {
        for (bad, named) in [
            ("", "names no node"),
            (" , ", "names no node"),
            ("prefill", "\"prefill\""),
            ("prefill=", "\"prefill=\""),
            ("prefill=a:1,decode=localhost", "\"decode=localhost\""),
            ("decode=a:", "\"decode=a:\""),
            ("decode=:7002", "\"decode=:7002\""),
            ("decode=a:0", "\"decode=a:0\""),
            ("decode=a:70000", "\"decode=a:70000\""),
            ("decode=::1:7002", "\"decode=::1:7002\""),
            ("decode=http://a:1", "\"decode=http://a:1\""),
            ("decode=local:decode-0", "\"decode=local:decode-0\""),
            ("both=127.0.0.1:1", "prefill or decode"),
            ("decode=a:1,prefill=a:1", "\"a:1\" twice"),
        ] {
            let error = bad.parse::<StaticDiscovery>().expect_err(bad).to_string();
            assert!(error.contains(named), "{error}");
            let says_form = error.contains("role=host:port");
            assert!(
                says_form || error.contains("allowed") || error.contains("twice"),
                "{error}"
            );
        }
        for good in ["decode=[::1]:7002", "decode=node-1.example:7002"] {
            assert!(good.parse::<StaticDiscovery>().is_ok(), "{good:?}");
        }
    }
}
