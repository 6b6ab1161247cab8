//! The simulated network: processes, links between them, and calls.
//!
//! A call is what gRPC gives: one request, answers in order, and an end that each side may or may not hear of in
//! time. A single message within a stream is never lost on its own: what a stream can do is break (`calls`). A
//! question with one answer can be lost on its way there or on its way back, and be asked twice (`questions`).
//! Every message takes its time, on a slow link up to seconds.

use crate::rng::Rng;
use std::collections::BTreeMap;
use tidemill_core::{CallId, RequestId, Timestamp};

/// Longest time that a message takes.
pub(crate) const DELAY_US_MAX: u64 = 3_000_000;

/// Something that lives at an address.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Process {
    /// The router.
    Router,
    /// The prefill node with this index.
    Prefill(usize),
    /// The decode node with this index.
    Decode(usize),
}

/// One life of a process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct End {
    /// Who.
    pub(crate) process: Process,
    /// Which life, from 0.
    pub(crate) life: u32,
}

/// An open call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    /// Who asked.
    pub(crate) client: End,
    /// Who answers.
    pub(crate) server: End,
    /// The attempt that it is about, if it is about one.
    pub(crate) about: Option<RequestId>,
    /// The client listens no more; the server has not heard of it yet.
    pub(crate) client_gone: bool,
    /// The last time at which something reaches the server; later messages come after it.
    to_server_at: Timestamp,
    /// The same for the client.
    to_client_at: Timestamp,
}

/// What is wrong with a link, and since when all is well.
#[derive(Default)]
struct Link {
    is_cut: bool,
    is_slow: bool,
    /// Faults that have met no message yet.
    n_fresh: u64,
    /// When it became good again.
    healed_at: Option<Timestamp>,
}

/// Links and calls.
#[derive(Default)]
pub(crate) struct Network {
    calls: BTreeMap<CallId, Call>,
    n_calls: u64,
    links: BTreeMap<(Process, Process), Link>,
    n_struck: u64,
}

fn pair(a: Process, b: Process) -> (Process, Process) {
    if a < b { (a, b) } else { (b, a) }
}

impl Network {
    /// Opens a call; its request arrives at the returned time.
    pub(crate) fn open(
        &mut self,
        (client, server): (End, End),
        about: Option<RequestId>,
        now: Timestamp,
        rng: &mut Rng,
    ) -> (CallId, Timestamp) {
        self.n_calls += 1;
        let id = CallId(self.n_calls);
        let call = Call {
            client,
            server,
            about,
            client_gone: false,
            to_server_at: now,
            to_client_at: now,
        };
        self.calls.insert(id, call);
        let at = self.reach_server(id, now, rng).expect("just opened");
        (id, at)
    }

    /// The number of a call that nobody listens to.
    pub(crate) fn unheard(&mut self) -> CallId {
        self.n_calls += 1;
        CallId(self.n_calls)
    }

    /// An open call.
    pub(crate) fn call(&self, id: CallId) -> Option<Call> {
        self.calls.get(&id).copied()
    }

    /// The client listens no more; returns when the server hears of it.
    pub(crate) fn leave(&mut self, id: CallId, now: Timestamp, rng: &mut Rng) -> Option<Timestamp> {
        self.calls.get_mut(&id)?.client_gone = true;
        self.reach_server(id, now, rng)
    }

    /// Takes a call out: nothing of it arrives any more.
    pub(crate) fn close(&mut self, id: CallId) -> Option<Call> {
        self.calls.remove(&id)
    }

    /// When a message sent now reaches the call's server.
    pub(crate) fn reach_server(
        &mut self,
        id: CallId,
        now: Timestamp,
        rng: &mut Rng,
    ) -> Option<Timestamp> {
        let call = self.calls.get(&id)?;
        let at = now.plus_us(self.delay_us(call.client.process, call.server.process, rng));
        let call = self.calls.get_mut(&id)?;
        call.to_server_at = at.max(call.to_server_at.plus_us(1));
        Some(call.to_server_at)
    }

    /// When a message sent now reaches the call's client.
    pub(crate) fn reach_client(
        &mut self,
        id: CallId,
        now: Timestamp,
        rng: &mut Rng,
    ) -> Option<Timestamp> {
        let call = self.calls.get(&id)?;
        let at = now.plus_us(self.delay_us(call.server.process, call.client.process, rng));
        let call = self.calls.get_mut(&id)?;
        call.to_client_at = at.max(call.to_client_at.plus_us(1));
        Some(call.to_client_at)
    }

    /// How long a message takes now.
    pub(crate) fn delay_us(&mut self, from: Process, to: Process, rng: &mut Rng) -> u64 {
        match self.links.get_mut(&pair(from, to)) {
            Some(link) if link.is_slow => {
                self.n_struck += std::mem::take(&mut link.n_fresh);
                rng.between(10_000, DELAY_US_MAX)
            }
            _ => rng.between(20, 500),
        }
    }

    /// True while messages pass between two processes. Whoever asks has a message for this link.
    pub(crate) fn is_up(&mut self, a: Process, b: Process) -> bool {
        let Some(link) = self.links.get_mut(&pair(a, b)).filter(|link| link.is_cut) else {
            return true;
        };
        self.n_struck += std::mem::take(&mut link.n_fresh);
        false
    }

    /// Cuts a link; returns the open calls that ran over it.
    pub(crate) fn cut(&mut self, a: Process, b: Process) -> Vec<CallId> {
        let calls =
            self.calls_where(|call| pair(call.client.process, call.server.process) == pair(a, b));
        let link = self.links.entry(pair(a, b)).or_default();
        link.is_cut = true;
        link.n_fresh += 1;
        if !calls.is_empty() {
            self.n_struck += std::mem::take(&mut link.n_fresh);
        }
        calls
    }

    /// Slows a link down.
    pub(crate) fn slow(&mut self, a: Process, b: Process) {
        self.links.entry(pair(a, b)).or_default().is_slow = true;
    }

    /// Its being slow is a fault of its own, not a part of another one.
    pub(crate) fn note_slowed(&mut self, (a, b): (Process, Process)) {
        self.links.entry(pair(a, b)).or_default().n_fresh += 1;
    }

    /// Makes a link good again.
    pub(crate) fn heal(&mut self, a: Process, b: Process, now: Timestamp) {
        if let Some(link) = self.links.get_mut(&pair(a, b))
            && (link.is_cut || link.is_slow)
        {
            *link = Link {
                healed_at: Some(now),
                ..Link::default()
            };
        }
    }

    /// When a link has been good for so long that nothing late is on it any more.
    pub(crate) fn settled_at(&self, a: Process, b: Process, now: Timestamp) -> Timestamp {
        match self.links.get(&pair(a, b)) {
            None => Timestamp(0),
            Some(link) if link.is_cut || link.is_slow => now.plus_us(DELAY_US_MAX),
            Some(link) => link
                .healed_at
                .map_or(Timestamp(0), |at| at.plus_us(DELAY_US_MAX)),
        }
    }

    /// Faults of links that have met their first message since the last time somebody asked.
    pub(crate) fn take_struck(&mut self) -> u64 {
        std::mem::take(&mut self.n_struck)
    }

    /// The open calls of a process.
    pub(crate) fn calls_of(&self, process: Process) -> Vec<CallId> {
        self.calls_where(|call| call.client.process == process || call.server.process == process)
    }

    /// Open calls.
    pub(crate) fn n_calls(&self) -> usize {
        self.calls.len()
    }

    fn calls_where(&self, holds: impl Fn(&Call) -> bool) -> Vec<CallId> {
        let found = self.calls.iter().filter(|(_, call)| holds(call));
        found.map(|(id, _)| *id).collect()
    }
}
