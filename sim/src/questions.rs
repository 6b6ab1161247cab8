//! Cancels and releases: questions whose answer says nothing but that they were heard.
//!
//! A cancel is asked again until it was heard or five seconds have passed, as the router's driver does it; a release
//! is asked once, and a lost one is made good by the end of the lease. Both reach whoever lives at the address by
//! then, both can be heard twice.

use crate::calls::LOSS_PER_MILLE;
use crate::coverage::FaultKind;
use crate::left::Place;
use crate::message::Notice;
use crate::network::{End, Process};
use crate::occurrence::Occurrence;
use crate::world::World;
use tidemill_core::{Incarnation, Timestamp};
use tidemill_kv_transfer::export::LeaseRef;
use tidemill_prefill_node::node as prefill;

/// How long a cancel is repeated.
const CANCEL_US_MAX: u64 = 5_000_000;
/// From one try of a cancel to the next: the wait for an answer, and a pause.
pub(crate) const RETRY_US: u64 = 2_200_000;
/// The same when nobody is there to be asked.
const REFUSED_US: u64 = 200_000;

/// A cancel that may not have been heard yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cancelling {
    from: End,
    place: Place,
    until: Timestamp,
}

impl World {
    /// The router gives an attempt up.
    pub(crate) fn cancel(&mut self, place: Place) {
        self.try_cancel(Cancelling {
            from: self.end_of(Process::Router),
            place,
            until: self.now.plus_us(CANCEL_US_MAX),
        });
    }

    pub(crate) fn try_cancel(&mut self, cancel: Cancelling) {
        let Place {
            process: to,
            request_id,
            incarnation,
        } = cancel.place;
        if !self.is_alive(cancel.from) || cancel.until <= self.now {
            return self.leave_to_its_lease(cancel.place);
        }
        let router = Process::Router;
        if !self.is_running(to) {
            self.after(REFUSED_US, Occurrence::CancelAgain(cancel));
            return;
        }
        if !self.network.is_up(router, to) {
            self.after(RETRY_US, Occurrence::CancelAgain(cancel));
            return;
        }
        if self.strikes(FaultKind::DropMessage, LOSS_PER_MILLE, Some(request_id)) {
            self.after(RETRY_US, Occurrence::CancelAgain(cancel));
            // It may be its answer that is lost.
            if self.rng.chance(500) {
                return;
            }
        }
        self.tell(router, to, Notice::Cancel(request_id, incarnation));
    }

    /// A decode node gives a lease back.
    pub(crate) fn release(
        &mut self,
        (from, to): (Process, Process),
        lease: LeaseRef,
        incarnation: Incarnation,
    ) {
        let is_lost = !self.network.is_up(from, to)
            || self.strikes(
                FaultKind::DropMessage,
                LOSS_PER_MILLE,
                Some(lease.request_id),
            );
        if !is_lost {
            self.tell(from, to, Notice::Release(lease, incarnation));
        }
    }

    fn tell(&mut self, from: Process, to: Process, notice: Notice) {
        let delay = self.network.delay_us(from, to, &mut self.rng);
        let about = Some(notice.request_id());
        if self.strikes(FaultKind::DuplicateMessage, LOSS_PER_MILLE, about) {
            let later = delay + self.rng.between(1, 3_000_000);
            self.after(later, Occurrence::Notice(to, notice.clone()));
        }
        self.after(delay, Occurrence::Notice(to, notice));
    }

    pub(crate) fn take_notice(&mut self, to: Process, notice: Notice) {
        if let Notice::Cancel(request_id, incarnation) = &notice {
            self.note_overtaken(Place {
                request_id: *request_id,
                process: to,
                incarnation: *incarnation,
            });
        }
        match (to, notice) {
            (Process::Prefill(i), Notice::Cancel(request_id, to)) => {
                let held = self.prefill_holds(i, request_id);
                self.prefill_event(i, prefill::Event::Cancel { request_id, to });
                let holds = self.prefill_holds(i, request_id);
                self.check_cancelled(Process::Prefill(i), to, (held, holds));
            }
            (Process::Prefill(i), Notice::Release(lease, to)) => {
                let held = self.prefill_holds(i, lease.request_id);
                self.prefill_event(i, prefill::Event::Release { lease, to });
                let holds = self.prefill_holds(i, lease.request_id);
                if held && !holds {
                    self.check_right(Process::Prefill(i), to, (lease.request_id, lease.epoch));
                }
            }
            (Process::Decode(i), Notice::Cancel(request_id, to)) => {
                let held = self.decode_holds(i, request_id);
                self.decode_event(
                    i,
                    tidemill_decode_node::node::Event::Cancel { request_id, to },
                );
                let holds = self.decode_holds(i, request_id);
                self.check_cancelled(Process::Decode(i), to, (held, holds));
            }
            _ => {}
        }
    }
}
