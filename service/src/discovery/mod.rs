//! Who exists. Discovery is a hint: the router describes each entry, checks its incarnation and watches its
//! health before it sends work, so a wrong or late entry costs a connection attempt and nothing more.

mod local;
mod static_list;

pub use local::LocalDiscovery;
pub use static_list::{NodeListError, StaticDiscovery};

use tidemill_core::Role;
use tokio::sync::watch;

/// One node as discovery knows it.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct NodeEntry {
    /// The role it was registered for.
    pub role: Role,
    /// `host:port` or `local:NAME`.
    pub address: String,
}

/// A source of entries.
pub trait Discovery: Send + Sync {
    /// The present entries, and every later change.
    fn watch(&self) -> watch::Receiver<Vec<NodeEntry>>;
}
