//! Membership's driver: one lock around the pure list, one loop that asks, watches and tells.
//!
//! Requests read candidates and book their calls through the same lock, for as long as it takes to look at a list;
//! what their reports want done is left for the loop, which is woken. A booking is a guard: it ends with its call.

use super::metrics::NodeCounts;
use crate::dispatch::Outcome;
use crate::membership::{BookingId, Change, Effect, Event, Membership};
use crate::node_client::NodeCalls;
use crate::placement::{Candidate, Target};
use futures::StreamExt;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tidemill_core::{Clock, Incarnation, Timestamp};
use tidemill_service::discovery::{Discovery, NodeEntry};
use tidemill_service::health::Admin;
use tokio::sync::{Notify, mpsc};
use tokio::task::{AbortHandle, JoinSet};

/// Answers of nodes that wait for the loop.
const EVENTS_MAX: usize = 1024;
/// Load reports change readiness only through draining, which may be seen this late.
const READY_CHECK_US: u64 = 100_000;

/// The list of nodes, shared by all requests.
pub(super) struct Members {
    state: Mutex<State>,
    changed: Notify,
    clock: Arc<dyn Clock>,
}

struct State {
    membership: Membership,
    /// Effects that reports of requests left behind.
    left: Vec<Effect>,
}

/// Load that this router has given a node; dropping it takes it back.
pub(super) struct Booking {
    members: Arc<Members>,
    id: BookingId,
}

impl Drop for Booking {
    fn drop(&mut self) {
        self.members.lock().membership.unbook(self.id);
    }
}

impl Members {
    pub(super) fn new(membership: Membership, clock: Arc<dyn Clock>) -> Self {
        let left = Vec::new();
        Self {
            state: Mutex::new(State { membership, left }),
            changed: Notify::new(),
            clock,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nodes that take work now.
    pub(super) fn candidates(&self) -> Vec<Candidate> {
        self.lock().membership.candidates()
    }

    /// Books a call; `None` when that life of the node has just gone.
    pub(super) fn book(self: &Arc<Self>, target: &Target, n_tokens: u64) -> Option<Booking> {
        let now = self.clock.now();
        let id = self.lock().membership.book(target, n_tokens, now)?;
        let members = Arc::clone(self);
        Some(Booking { members, id })
    }

    /// Tells how a node did.
    pub(super) fn report(&self, target: &Target, outcome: Outcome) {
        let now = self.clock.now();
        let mut state = self.lock();
        let effects = state.membership.report(target, outcome, now);
        if !effects.is_empty() {
            state.left.extend(effects);
            self.changed.notify_one();
        }
    }

    /// Bookings that are open.
    #[cfg(test)]
    pub(super) fn n_booked(&self) -> usize {
        self.lock().membership.n_booked()
    }

    fn apply(&self, event: Event, now: Timestamp) -> Vec<Effect> {
        let mut state = self.lock();
        let mut effects = std::mem::take(&mut state.left);
        effects.extend(state.membership.apply(event, now));
        effects
    }

    fn next_wakeup(&self) -> Option<Timestamp> {
        self.lock().membership.next_wakeup()
    }

    fn missing(&self) -> Option<String> {
        self.lock().membership.missing()
    }
}

/// The loop's own belongings.
pub(super) struct MemberLoop {
    members: Arc<Members>,
    calls: Arc<NodeCalls>,
    admin: Admin,
    counts: NodeCounts,
    questions: JoinSet<()>,
    watches: HashMap<NodeEntry, AbortHandle>,
    sender: mpsc::Sender<Event>,
    checked_at: Timestamp,
}

impl MemberLoop {
    pub(super) fn new(
        members: Arc<Members>,
        calls: Arc<NodeCalls>,
        admin: Admin,
    ) -> (Self, mpsc::Receiver<Event>) {
        let (sender, events) = mpsc::channel(EVENTS_MAX);
        let this = Self {
            members,
            calls,
            counts: admin.register(NodeCounts::new),
            admin,
            questions: JoinSet::new(),
            watches: HashMap::new(),
            sender,
            checked_at: Timestamp(0),
        };
        (this, events)
    }

    /// Follows discovery and the nodes until it is dropped.
    pub(super) async fn run(
        mut self,
        discovery: Arc<dyn Discovery>,
        mut events: mpsc::Receiver<Event>,
    ) {
        let mut entries = discovery.watch();
        let present = entries.borrow_and_update().clone();
        self.take(Event::Entries(present));
        let mut is_listed = true;
        loop {
            let now = self.members.clock.now();
            let wait = self.members.next_wakeup().map(|at| at.left_from(now));
            let event = tokio::select! {
                changed = entries.changed(), if is_listed => {
                    // A source that ends leaves its last list behind.
                    is_listed = changed.is_ok();
                    Event::Entries(entries.borrow_and_update().clone())
                }
                Some(event) = events.recv() => event,
                () = self.members.changed.notified() => Event::Tick,
                () = tokio::time::sleep(wait.unwrap_or(Duration::from_secs(60))) => Event::Tick,
                Some(_) = self.questions.join_next() => continue,
            };
            self.take(event);
        }
    }

    fn take(&mut self, event: Event) {
        let now = self.members.clock.now();
        let is_report = matches!(event, Event::Reported { .. });
        for effect in self.members.apply(event, now) {
            self.perform(effect);
        }
        if !is_report || now.since_us(self.checked_at) >= READY_CHECK_US {
            self.checked_at = now;
            self.counts.set(&self.members.candidates());
            self.admin.set_missing(self.members.missing());
        }
    }

    fn perform(&mut self, effect: Effect) {
        match effect {
            Effect::Describe(entry) => {
                let (calls, sender) = (Arc::clone(&self.calls), self.sender.clone());
                self.questions.spawn(async move {
                    let result = calls.describe(&entry.address).await;
                    let _ = sender.send(Event::Described { entry, result }).await;
                });
            }
            Effect::Watch { entry, incarnation } => self.watch(entry, incarnation),
            Effect::Unwatch(entry) => {
                if let Some(watch) = self.watches.remove(&entry) {
                    watch.abort();
                }
                self.calls.forget(&entry.address);
            }
            Effect::Tell { entry, change } => tell(&entry, &change),
        }
    }

    fn watch(&mut self, entry: NodeEntry, incarnation: Incarnation) {
        let (mut reports, sender) = (self.calls.watch_load(&entry.address), self.sender.clone());
        let watched = entry.clone();
        let watch = self.questions.spawn(async move {
            while let Some(report) = reports.next().await {
                let entry = watched.clone();
                let _ = sender.send(Event::Reported { entry, report }).await;
            }
            let entry = watched;
            let _ = sender.send(Event::WatchEnded { entry, incarnation }).await;
        });
        if let Some(old) = self.watches.insert(entry, watch) {
            old.abort();
        }
    }
}

fn tell(entry: &NodeEntry, change: &Change) {
    let (role, address) = (entry.role.name(), entry.address.as_str());
    match change {
        Change::Joined => tracing::info!(role, address, "a node takes work"),
        Change::Left => tracing::info!(role, address, "a node has left"),
        Change::Lost => tracing::warn!(role, address, "a node is lost"),
        Change::Refused(reason) => {
            tracing::warn!(role, address, %reason, "a node cannot be used");
        }
        Change::Unpaired(reason) => {
            tracing::warn!(role, address, %reason, "a node cannot be used for a split");
        }
        Change::Ejected(pause_us) => {
            let pause_ms = pause_us / 1000;
            tracing::warn!(
                role,
                address,
                pause_ms,
                "a node fails its requests; it gets a pause"
            );
        }
    }
}
