//! The simulated network: processes, links between them, and calls.
//!
//! A call is what gRPC gives: one request, answers in order, and an end that each side may or may not hear of in
//! time. A single datagram of a call is never lost on its own; what can be lost is the whole call. Questions without
//! a stream (cancel, release) are single messages: they can be lost, doubled and late, and they reach whoever
//! lives at the address by then.

use crate::rng::Rng;
use std::collections::{BTreeMap, BTreeSet};
use tidemill_core::{CallId, Timestamp};

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
    /// The client listens no more; the server has not heard of it yet.
    pub(crate) client_gone: bool,
    /// The last time at which something reaches the server; later messages come after it.
    to_server_at: Timestamp,
    /// The same for the client.
    to_client_at: Timestamp,
}

/// Links and calls.
#[derive(Default)]
pub(crate) struct Network {
    calls: BTreeMap<CallId, Call>,
    n_calls: u64,
    cut: BTreeSet<(Process, Process)>,
    slow: BTreeSet<(Process, Process)>,
}

fn pair(a: Process, b: Process) -> (Process, Process) {
    if a < b { (a, b) } else { (b, a) }
}

impl Network {
    /// Opens a call; its request arrives at the returned time.
    pub(crate) fn open(
        &mut self,
        client: End,
        server: End,
        now: Timestamp,
        rng: &mut Rng,
    ) -> (CallId, Timestamp) {
        self.n_calls += 1;
        let id = CallId(self.n_calls);
        let call = Call {
            client,
            server,
            client_gone: false,
            to_server_at: now,
            to_client_at: now,
        };
        self.calls.insert(id, call);
        let at = self.reach_server(id, now, rng).expect("just opened");
        (id, at)
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
    pub(crate) fn delay_us(&self, from: Process, to: Process, rng: &mut Rng) -> u64 {
        if self.slow.contains(&pair(from, to)) {
            rng.between(10_000, 3_000_000)
        } else {
            rng.between(20, 500)
        }
    }

    /// True while messages pass between two processes.
    pub(crate) fn is_up(&self, a: Process, b: Process) -> bool {
        !self.cut.contains(&pair(a, b))
    }

    /// Cuts a link; returns the open calls that ran over it.
    pub(crate) fn cut(&mut self, a: Process, b: Process) -> Vec<CallId> {
        self.cut.insert(pair(a, b));
        self.calls_where(|call| pair(call.client.process, call.server.process) == pair(a, b))
    }

    /// Slows a link down.
    pub(crate) fn slow(&mut self, a: Process, b: Process) {
        self.slow.insert(pair(a, b));
    }

    /// Makes a link good again.
    pub(crate) fn heal(&mut self, a: Process, b: Process) {
        self.cut.remove(&pair(a, b));
        self.slow.remove(&pair(a, b));
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
