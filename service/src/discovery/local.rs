//! Nodes of this process: they register when they serve and leave when they drain.

use super::{Discovery, NodeEntry};
use tokio::sync::watch;

/// An in-memory list. Clones share it.
#[derive(Clone)]
pub struct LocalDiscovery {
    entries: watch::Sender<Vec<NodeEntry>>,
}

impl Default for LocalDiscovery {
    fn default() -> Self {
        Self {
            entries: watch::Sender::new(Vec::new()),
        }
    }
}

impl LocalDiscovery {
    /// Adds an entry; a second registration of the same entry changes nothing.
    pub fn register(&self, entry: NodeEntry) {
        self.entries.send_if_modified(|entries| {
            if entries.contains(&entry) {
                return false;
            }
            entries.push(entry);
            true
        });
    }

    /// Takes an entry out.
    pub fn deregister(&self, entry: &NodeEntry) {
        self.entries.send_if_modified(|entries| {
            let n_before = entries.len();
            entries.retain(|known| known != entry);
            entries.len() != n_before
        });
    }
}

impl Discovery for LocalDiscovery {
    fn watch(&self) -> watch::Receiver<Vec<NodeEntry>> {
        self.entries.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_core::Role;

    #[test]
    fn watchers_see_registrations_and_departures() {
        let discovery = LocalDiscovery::default();
        let watcher = discovery.watch();
        let entry = NodeEntry {
            role: Role::Prefill,
            address: "local:prefill-0".into(),
        };
        discovery.register(entry.clone());
        discovery.register(entry.clone());
        assert_eq!(*watcher.borrow(), vec![entry.clone()]);
        discovery.deregister(&entry);
        assert!(watcher.borrow().is_empty());
    }
}
