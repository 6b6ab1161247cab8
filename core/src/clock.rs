//! Time, as an argument.
//!
//! The pure cores never read a clock: they are told `now`. This file is the one place that reads wall
//! time. A `Timestamp` counts microseconds since the Unix epoch, so that one absolute deadline can travel
//! in every message; within a process it never runs backwards, even when the wall clock is set back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A point in time: microseconds since the Unix epoch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Timestamp(pub u64);

impl Timestamp {
    /// The point `micros` later, saturating.
    #[must_use]
    pub fn plus_us(self, micros: u64) -> Self {
        Self(self.0.saturating_add(micros))
    }

    /// Microseconds from `earlier` to here; zero when `earlier` is later.
    pub fn since_us(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// Time left until here, zero when it has passed.
    pub fn left_from(self, now: Self) -> Duration {
        Duration::from_micros(self.since_us(now))
    }
}

/// Where `now` comes from.
pub trait Clock: Send + Sync {
    /// The present.
    fn now(&self) -> Timestamp;
}

/// The machine's clock: the wall time at start plus a monotonic count since then.
pub struct SystemClock {
    wall_at_start_us: u64,
    start: Instant,
}

impl SystemClock {
    /// Reads the wall clock once.
    pub fn new() -> Self {
        let wall = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .expect("the wall clock is past 1970");
        Self {
            wall_at_start_us: u64::try_from(wall.as_micros()).expect("fits until the year 586,000"),
            start: Instant::now(),
        }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        let run_us = u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX);
        Timestamp(self.wall_at_start_us.saturating_add(run_us))
    }
}

/// A clock that moves only when told. Clones share the time.
#[derive(Clone, Default)]
pub struct VirtualClock {
    now_us: Arc<AtomicU64>,
}

impl VirtualClock {
    /// Moves to `to`; earlier points are ignored.
    pub fn advance_to(&self, to: Timestamp) {
        self.now_us.fetch_max(to.0, Ordering::Relaxed);
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> Timestamp {
        Timestamp(self.now_us.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_virtual_clock_never_goes_back() {
        let clock = VirtualClock::default();
        clock.advance_to(Timestamp(10));
        clock.advance_to(Timestamp(5));
        assert_eq!(clock.now(), Timestamp(10));
    }

    #[test]
    fn time_left_is_zero_after_the_deadline() {
        assert_eq!(Timestamp(5).left_from(Timestamp(9)), Duration::ZERO);
    }
}
