//! Who can take work now: discovery's hints, proven.
//!
//! An entry is described, checked (role, text, protocol) and watched; only then is it a candidate, in that one
//! life. Failures that say something about a node eject it for a while that grows; it comes back through a probe
//! and one request at a time. Load is the node's last report plus what was booked since. Pure: `run` does the
//! effects, the simulator drives the same code.

mod health;
mod load;
#[cfg(test)]
mod tests;

pub use load::BookingId;

use self::health::{Health, State};
use self::load::Load;
use crate::dispatch::Outcome;
use crate::placement::{Candidate, SplitPolicy, Target, Want, place};
use std::collections::BTreeMap;
use tidemill_core::kv_layout::PROTOCOL_REVISION;
use tidemill_core::{Incarnation, LoadReport, Role, Timestamp};
use tidemill_proto::convert::NodeDescription;
use tidemill_service::discovery::NodeEntry;

/// What a router demands of its nodes.
#[derive(Clone, Debug)]
pub struct MembershipConfig {
    /// Vocabulary and template of the router's own model files.
    pub text_fingerprint: [u8; 32],
    /// What counts as ready.
    pub split: SplitPolicy,
}

/// What can happen to the list of nodes.
#[derive(Clone, PartialEq, Debug)]
pub enum Event {
    /// Discovery's present list.
    Entries(Vec<NodeEntry>),
    /// A describe was answered, or not (the reason in words).
    Described {
        /// Whom.
        entry: NodeEntry,
        /// What it says.
        result: Result<NodeDescription, String>,
    },
    /// A watched node reports its load.
    Reported {
        /// Who.
        entry: NodeEntry,
        /// How loaded it is.
        report: LoadReport,
    },
    /// A watch has ended: the node, or the way to it, is lost.
    WatchEnded {
        /// Which node.
        entry: NodeEntry,
        /// Which life was watched.
        incarnation: Incarnation,
    },
    /// Time has passed.
    Tick,
}

/// What membership wants done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Effect {
    /// Ask a node what it is; answered by `Described`.
    Describe(NodeEntry),
    /// Follow a node's load; answered by `Reported` and `WatchEnded`.
    Watch {
        /// Whom.
        entry: NodeEntry,
        /// Which life.
        incarnation: Incarnation,
    },
    /// Stop following; also drops the connection.
    Unwatch(NodeEntry),
    /// Tell the operator.
    Tell {
        /// Which node.
        entry: NodeEntry,
        /// What changed.
        change: Change,
    },
}

/// What an operator hears of a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// It takes work.
    Joined,
    /// It cannot be used, and why.
    Refused(String),
    /// It takes work, but no node of the other role can exchange KV with it, and why.
    Unpaired(String),
    /// It failed too often and is left alone for so many microseconds.
    Ejected(u64),
    /// It, or the way to it, was lost.
    Lost,
    /// Discovery does not name it any more.
    Left,
}

/// One entry of discovery and what is known about it.
struct Node {
    description: Option<NodeDescription>,
    /// The watch of the described life is on.
    is_watched: bool,
    health: Health,
    load: Load,
}

/// All nodes of a deployment, as one router sees them.
pub struct Membership {
    config: MembershipConfig,
    nodes: BTreeMap<NodeEntry, Node>,
    n_bookings: u64,
    bookings: BTreeMap<BookingId, (NodeEntry, Incarnation)>,
    effects: Vec<Effect>,
}

impl Membership {
    /// A router that knows nobody.
    pub fn new(config: MembershipConfig) -> Self {
        Self {
            config,
            nodes: BTreeMap::new(),
            n_bookings: 0,
            bookings: BTreeMap::new(),
            effects: Vec::new(),
        }
    }

    /// Takes one event in.
    pub fn apply(&mut self, event: Event, now: Timestamp) -> Vec<Effect> {
        match event {
            Event::Entries(entries) => self.take_entries(entries, now),
            Event::Described { entry, result } => self.take_description(entry, result, now),
            Event::Reported { entry, report } => self.take_report(&entry, report, now),
            Event::WatchEnded { entry, incarnation } => self.lose(&entry, incarnation, now),
            Event::Tick => {}
        }
        self.ask_due(now);
        std::mem::take(&mut self.effects)
    }

    /// When `Event::Tick` is due, if nothing happens before.
    pub fn next_wakeup(&self) -> Option<Timestamp> {
        self.nodes
            .values()
            .filter_map(|node| node.health.next_ask())
            .min()
    }

    /// A request tells how a node did. The client's mistakes are never told.
    pub fn report(&mut self, target: &Target, outcome: Outcome, now: Timestamp) -> Vec<Effect> {
        if let Some((entry, node)) = live_node(&mut self.nodes, target) {
            match outcome {
                Outcome::Served => node.health.served(),
                Outcome::Stale => node.health.ask_again(now),
                Outcome::Failed => {
                    if let Some(pause_us) = node.health.failed(now) {
                        self.effects.push(Effect::Tell {
                            entry: entry.clone(),
                            change: Change::Ejected(pause_us),
                        });
                    }
                }
            }
        }
        self.ask_due(now);
        std::mem::take(&mut self.effects)
    }

    /// Nodes that take work now.
    pub fn candidates(&self) -> Vec<Candidate> {
        self.nodes
            .iter()
            .filter_map(|(entry, node)| candidate(entry, node))
            .collect()
    }

    /// What keeps this router from serving; `None` when it can.
    pub fn missing(&self) -> Option<String> {
        let want = Want {
            n_context_tokens: 1,
            needs_decode: true,
            split: self.config.split,
            failed: &[],
        };
        place(&self.candidates(), &want)
            .err()
            .map(|unplaced| unplaced.to_string())
    }

    /// Books a call's load at a node until `unbook`. `None` when that life is not known any more.
    pub fn book(&mut self, target: &Target, n_tokens: u64, now: Timestamp) -> Option<BookingId> {
        let (entry, node) = live_node(&mut self.nodes, target)?;
        let entry = entry.clone();
        self.n_bookings += 1;
        let id = BookingId(self.n_bookings);
        node.load.book(id, n_tokens, now);
        self.bookings.insert(id, (entry, target.incarnation));
        Some(id)
    }

    /// Takes a booking back. A second time, or for a node that left, it changes nothing.
    pub fn unbook(&mut self, id: BookingId) {
        let Some((entry, incarnation)) = self.bookings.remove(&id) else {
            return;
        };
        let node = self.nodes.get_mut(&entry);
        if let Some(node) = node.filter(|node| incarnation_of(node) == Some(incarnation)) {
            node.load.unbook(id);
        }
    }

    /// Bookings that are open, over all nodes: zero when no request runs.
    pub fn n_booked(&self) -> usize {
        self.bookings.len()
    }

    fn take_entries(&mut self, entries: Vec<NodeEntry>, now: Timestamp) {
        let gone: Vec<NodeEntry> = self
            .nodes
            .keys()
            .filter(|known| !entries.contains(known))
            .cloned()
            .collect();
        for entry in gone {
            self.nodes.remove(&entry);
            self.effects.push(Effect::Unwatch(entry.clone()));
            let change = Change::Left;
            self.effects.push(Effect::Tell { entry, change });
        }
        for entry in entries {
            self.nodes.entry(entry).or_insert_with(|| Node {
                description: None,
                is_watched: false,
                health: Health::new(now),
                load: Load::default(),
            });
        }
    }

    fn take_description(
        &mut self,
        entry: NodeEntry,
        result: Result<NodeDescription, String>,
        now: Timestamp,
    ) {
        let twin = result
            .as_ref()
            .ok()
            .and_then(|description| self.twin(&entry, description));
        let unpaired = result.as_ref().ok().and_then(|it| self.unpaired(it));
        let config = &self.config;
        let Some(node) = self.nodes.get_mut(&entry) else {
            return;
        };
        let checked = result.and_then(|description| {
            twin.map_or(Ok(()), Err)?;
            check(config, &entry, &description)?;
            Ok(description)
        });
        match checked {
            Err(reason) => {
                if node.is_watched {
                    self.effects.push(Effect::Unwatch(entry.clone()));
                }
                node.description = None;
                node.is_watched = false;
                node.load = Load::default();
                if node.health.refused(&reason, now) {
                    let change = Change::Refused(reason);
                    self.effects.push(Effect::Tell { entry, change });
                }
            }
            Ok(description) => {
                let incarnation = description.incarnation;
                let is_new = incarnation_of(node) != Some(incarnation);
                node.health.described(is_new);
                node.description = Some(description);
                if is_new {
                    node.load = Load::default();
                    let told = [Some(Change::Joined), unpaired.map(Change::Unpaired)];
                    let told = told.into_iter().flatten().map(|change| Effect::Tell {
                        entry: entry.clone(),
                        change,
                    });
                    self.effects.extend(told);
                }
                if is_new || !node.is_watched {
                    node.is_watched = true;
                    self.effects.push(Effect::Watch { entry, incarnation });
                }
            }
        }
    }

    /// Another entry that already serves under this name.
    fn twin(&self, entry: &NodeEntry, description: &NodeDescription) -> Option<String> {
        self.nodes
            .iter()
            .find(|(known, node)| {
                *known != entry
                    && node.is_watched
                    && node
                        .description
                        .as_ref()
                        .is_some_and(|d| d.node_id == description.node_id)
            })
            .map(|(known, _)| {
                format!(
                    "node id {} is taken by the node at {}; give each node its own",
                    description.node_id, known.address
                )
            })
    }

    /// Why a node can exchange KV with none of the other role, while there are some.
    fn unpaired(&self, new: &NodeDescription) -> Option<String> {
        let mut others = self
            .nodes
            .values()
            .filter_map(|node| node.description.as_ref())
            .filter(|other| other.role != new.role)
            .peekable();
        let example = *others.peek()?;
        let is_pair = |other: &NodeDescription| {
            other.model_fingerprint == new.model_fingerprint
                && other.layout_fingerprint == new.layout_fingerprint
        };
        if others.any(is_pair) {
            return None;
        }
        let what = if example.model_fingerprint == new.model_fingerprint {
            "KV layout; give both the same --kv-dtype and release"
        } else {
            "model; give both the same --model"
        };
        Some(format!(
            "it differs from {} node {} in {what}",
            example.role.name(),
            example.node_id
        ))
    }

    fn take_report(&mut self, entry: &NodeEntry, report: LoadReport, now: Timestamp) {
        let Some(node) = self.nodes.get_mut(entry) else {
            return;
        };
        if incarnation_of(node) == Some(report.incarnation) {
            node.load.take_report(report, now);
        } else {
            node.health.ask_again(now);
        }
    }

    fn lose(&mut self, entry: &NodeEntry, incarnation: Incarnation, now: Timestamp) {
        let Some(node) = self.nodes.get_mut(entry) else {
            return;
        };
        if incarnation_of(node) != Some(incarnation) || !node.is_watched {
            return;
        }
        node.is_watched = false;
        node.health.ask_again(now);
        self.effects.push(Effect::Tell {
            entry: entry.clone(),
            change: Change::Lost,
        });
    }

    fn ask_due(&mut self, now: Timestamp) {
        for (entry, node) in &mut self.nodes {
            if node.health.take_due(now) {
                self.effects.push(Effect::Describe(entry.clone()));
            }
        }
    }
}

fn incarnation_of(node: &Node) -> Option<Incarnation> {
    node.description
        .as_ref()
        .map(|description| description.incarnation)
}

fn live_node<'a>(
    nodes: &'a mut BTreeMap<NodeEntry, Node>,
    target: &Target,
) -> Option<(&'a NodeEntry, &'a mut Node)> {
    nodes.iter_mut().find(|(entry, node)| {
        entry.address == target.address && incarnation_of(node) == Some(target.incarnation)
    })
}

fn candidate(entry: &NodeEntry, node: &Node) -> Option<Candidate> {
    let description = node.description.as_ref().filter(|_| node.is_watched)?;
    match node.health.state() {
        State::Usable => {}
        State::OnProbation if node.load.n_open() == 0 => {}
        State::OnProbation | State::Away => return None,
    }
    if node.load.is_draining() {
        return None;
    }
    Some(Candidate {
        target: Target {
            node_id: description.node_id.clone(),
            incarnation: description.incarnation,
            address: entry.address.clone(),
        },
        role: entry.role,
        model_fingerprint: description.model_fingerprint,
        layout_fingerprint: description.layout_fingerprint,
        queued_tokens: node.load.queued_tokens(),
        n_sequences: node.load.n_sequences(),
        n_blocks: node.load.n_blocks(),
        n_blocks_free: node.load.n_blocks_free(),
        n_open: node.load.n_open(),
    })
}

fn check(
    config: &MembershipConfig,
    entry: &NodeEntry,
    description: &NodeDescription,
) -> Result<(), String> {
    let role_name = |role: Role| role.name();
    if description.role != entry.role {
        return Err(format!(
            "it is a {} node, but discovery lists it as {}",
            role_name(description.role),
            role_name(entry.role)
        ));
    }
    if description.protocol_revision != PROTOCOL_REVISION {
        return Err(format!(
            "it speaks protocol revision {}, this router {PROTOCOL_REVISION}; use one release for all",
            description.protocol_revision
        ));
    }
    if description.text_fingerprint != config.text_fingerprint {
        return Err(
            "its vocabulary or template differs from this router's; give both the same --model"
                .into(),
        );
    }
    Ok(())
}
