//! One node's load: its last report, and what this router has given it since.
//!
//! A report counts what had reached the node when it was made, so a booking adds to the load only until a report
//! comes that is young enough to know it. The count of open calls is exact at all times.

use std::collections::BTreeMap;
use tidemill_core::{LoadReport, Timestamp};

/// A report that comes this long after a booking knows of it.
const SETTLE_US: u64 = 100_000;

/// One booking, unique within the router's life.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BookingId(pub(super) u64);

#[derive(Clone, Copy, Debug)]
struct Booking {
    n_tokens: u64,
    at: Timestamp,
}

/// The load of one life of one node.
#[derive(Clone, Default, Debug)]
pub(super) struct Load {
    report: Option<(LoadReport, Timestamp)>,
    bookings: BTreeMap<BookingId, Booking>,
}

impl Load {
    /// Takes a report in, unless a newer one is known.
    pub(super) fn take_report(&mut self, report: LoadReport, now: Timestamp) {
        let is_newer = self
            .report
            .as_ref()
            .is_none_or(|(known, _)| known.sequence_number < report.sequence_number);
        if is_newer {
            self.report = Some((report, now));
        }
    }

    pub(super) fn book(&mut self, id: BookingId, n_tokens: u64, at: Timestamp) {
        self.bookings.insert(id, Booking { n_tokens, at });
    }

    pub(super) fn unbook(&mut self, id: BookingId) {
        self.bookings.remove(&id);
    }

    pub(super) fn is_draining(&self) -> bool {
        self.report
            .as_ref()
            .is_some_and(|(report, _)| report.draining)
    }

    pub(super) fn n_open(&self) -> u64 {
        self.bookings.len() as u64
    }

    pub(super) fn queued_tokens(&self) -> u64 {
        let reported = self
            .report
            .as_ref()
            .map_or(0, |(report, _)| report.queued_tokens);
        reported
            + self
                .unreported()
                .map(|booking| booking.n_tokens)
                .sum::<u64>()
    }

    pub(super) fn n_sequences(&self) -> u64 {
        let reported = self.report.as_ref().map_or(0, |(report, _)| {
            u64::from(report.n_waiting) + u64::from(report.n_running)
        });
        reported + self.unreported().count() as u64
    }

    pub(super) fn n_blocks(&self) -> Option<u64> {
        let (report, _) = self.report.as_ref()?;
        Some(u64::from(report.n_blocks))
    }

    pub(super) fn n_blocks_free(&self) -> Option<u64> {
        let (report, _) = self.report.as_ref()?;
        Some(u64::from(report.n_blocks_free))
    }

    fn unreported(&self) -> impl Iterator<Item = &Booking> {
        let known_until = self.report.as_ref().map(|(_, at)| *at);
        self.bookings
            .values()
            .filter(move |booking| known_until.is_none_or(|at| at.since_us(booking.at) < SETTLE_US))
    }
}
