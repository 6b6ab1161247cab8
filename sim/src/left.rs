//! Attempts that the router has left, and what their nodes still hold.
//!
//! Whether an attempt is left is seen from outside: its request has ended, goes on under another id, or went to
//! another decode node. From then on a cancel is due, and over a good link it arrives within milliseconds. A node that
//! holds the attempt later than that was never told. Where no cancel can come (the router died, the link was down
//! for longer than a cancel is repeated, the cancel came before the request, the importer gave a finished request's
//! lease back and that was lost) the end of the lease is the bound.

use crate::network::{DELAY_US_MAX, Process};
use crate::occurrence::Occurrence;
use crate::questions::RETRY_US;
use crate::world::World;
use tidemill_core::bounds::LEASE_TTL_US;
use tidemill_core::{Incarnation, RequestId, Timestamp};

/// Twice the longest way over a good link, several times over.
const MARGIN_US: u64 = 100_000;
/// Until a node hears that a call of its was lost, at the latest.
const BREAK_US_MAX: u64 = 10_000_000;

/// One life of a node, called for one attempt.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Place {
    pub(crate) request_id: RequestId,
    pub(crate) process: Process,
    pub(crate) incarnation: Incarnation,
}

/// What a node may hold of one attempt.
pub(crate) struct Leg {
    /// The node has read the request.
    has_arrived: bool,
    /// Nobody will tell the node: what it lends ends with the lease.
    waits_for_lease: bool,
    /// When the router left it, or the lease's time last began.
    since: Timestamp,
}

impl World {
    /// The router calls a node for an attempt; what it had begun elsewhere for the same part of it is left.
    pub(crate) fn begin_leg(&mut self, request_idx: usize, place: Place) {
        let is_decode = matches!(place.process, Process::Decode(_));
        self.leave_legs(request_idx, false, |known| {
            known.request_id != place.request_id
                || is_decode && matches!(known.process, Process::Decode(_))
        });
        let request = &mut self.requests[request_idx];
        if request.legs.is_empty() {
            request.touched.clear();
        }
        request.legs.push(place);
        let leg = Leg {
            has_arrived: false,
            waits_for_lease: false,
            since: self.now,
        };
        self.legs.insert(place, leg);
    }

    /// The router leaves some nodes of a request.
    pub(crate) fn leave_legs(
        &mut self,
        request_idx: usize,
        waits_for_lease: bool,
        is_left: impl Fn(&Place) -> bool,
    ) {
        let places = std::mem::take(&mut self.requests[request_idx].legs);
        for place in places {
            if !is_left(&place) {
                self.requests[request_idx].legs.push(place);
                continue;
            }
            if let Some(leg) = self.legs.get_mut(&place) {
                leg.since = self.now;
                leg.waits_for_lease |= waits_for_lease;
                self.after(MARGIN_US, Occurrence::MustBeGone(place));
            }
        }
    }

    /// The request has ended: every node is left. After a good end a prefill node hears it from the importer.
    pub(crate) fn leave_all_legs(&mut self, request_idx: usize) {
        let is_well = self.requests[request_idx].has_finished;
        self.leave_legs(request_idx, is_well, |place| {
            matches!(place.process, Process::Prefill(_))
        });
        self.leave_legs(request_idx, false, |_| true);
    }

    /// A node has read an attempt's request.
    pub(crate) fn note_arrived(&mut self, process: Process, request_id: RequestId) {
        if let Some(leg) = self.present_leg(process, request_id) {
            leg.has_arrived = true;
        }
    }

    /// The lease's time begins again.
    pub(crate) fn note_renewed(&mut self, process: Process, request_id: RequestId) {
        let now = self.now;
        if let Some(leg) = self.present_leg(process, request_id) {
            leg.since = now;
        }
    }

    /// A cancel has come; when it came before the request it changes nothing.
    pub(crate) fn note_overtaken(&mut self, place: Place) {
        if let Some(leg) = self.legs.get_mut(&place) {
            leg.waits_for_lease |= !leg.has_arrived;
        }
    }

    /// The router's driver has given up telling this node.
    pub(crate) fn leave_to_its_lease(&mut self, place: Place) {
        if let Some(leg) = self.legs.get_mut(&place) {
            leg.waits_for_lease = true;
        }
    }

    fn present_leg(&mut self, process: Process, request_id: RequestId) -> Option<&mut Leg> {
        let incarnation = self.incarnation_of(process)?;
        self.legs.get_mut(&Place {
            request_id,
            process,
            incarnation,
        })
    }

    /// An attempt was left a while ago: its node holds nothing of it any more.
    pub(crate) fn check_gone(&mut self, place: Place) {
        let Place {
            request_id,
            process,
            incarnation,
        } = place;
        let Some(leg) = self.legs.get(&place) else {
            return;
        };
        let holds = match process {
            Process::Prefill(i) => self.prefill_holds(i, request_id),
            Process::Decode(i) => self.decode_holds(i, request_id),
            Process::Router => false,
        };
        if self.incarnation_of(process) != Some(incarnation) {
            return;
        }
        let mut due = self.told_at(process);
        if leg.waits_for_lease {
            // A prefill that ends after a standstill begins its lease then.
            let since = leg.since.max(self.stands_until(process));
            due = due.max(since.plus_us(LEASE_TTL_US + BREAK_US_MAX));
        }
        if due > self.now {
            let at = due.plus_us(MARGIN_US);
            self.schedule.push(at, Occurrence::MustBeGone(place));
        } else if holds {
            let since_ms = self.now.since_us(leg.since) / 1000;
            self.violate(format!(
                "{process:?} holds attempt {request_id}, which was left {since_ms} ms ago"
            ));
        }
    }

    /// From when on whatever the router had to tell this node has been told.
    fn told_at(&self, process: Process) -> Timestamp {
        let link = self.network.settled_at(Process::Router, process, self.now);
        let loss = self
            .drops
            .until()
            .map_or(Timestamp(0), |until| until.plus_us(RETRY_US + DELAY_US_MAX));
        link.max(loss).max(self.stands_until(process))
    }
}
