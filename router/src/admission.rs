//! Who may come in. A fixed count of permits for running requests and a fixed count for waiting ones; beyond
//! their sum the answer is "no" at once, with a time after which to ask again.
//!
//! Nodes queue by themselves, so an admitted request is dispatched without delay. A permit goes back when it is
//! dropped: no exit path can leak one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use tidemill_core::{Failure, FailureCode};

/// What a refused client is told to wait, at least.
const RETRY_AFTER_S_MIN: u64 = 1;
/// What it is told to wait when the queue is full too.
const RETRY_AFTER_S_MAX: u64 = 10;

/// The bounds, and how much of them is taken.
pub struct Admission {
    n_requests_max: usize,
    n_queue_max: usize,
    n_taken: Arc<AtomicUsize>,
    is_closed: AtomicBool,
}

/// The right to be served; dropping it gives it back.
#[derive(Debug)]
pub struct Permit {
    n_taken: Arc<AtomicUsize>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.n_taken.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Admission {
    /// At most `n_requests_max` (at least one) requests, and `n_queue_max` more that find the nodes busy.
    pub fn new(n_requests_max: usize, n_queue_max: usize) -> Self {
        Self {
            n_requests_max: n_requests_max.max(1),
            n_queue_max,
            n_taken: Arc::default(),
            is_closed: AtomicBool::new(false),
        }
    }

    /// Permits in all.
    pub fn n_permits_max(&self) -> usize {
        self.n_requests_max.saturating_add(self.n_queue_max)
    }

    /// Permits taken.
    pub fn n_taken(&self) -> usize {
        self.n_taken.load(Ordering::Acquire)
    }

    /// Takes a permit or refuses; never waits.
    ///
    /// # Errors
    /// `Overloaded` when every permit is taken, `Draining` after [`Admission::close`].
    pub fn try_admit(&self) -> Result<Permit, Failure> {
        if self.is_closed.load(Ordering::Acquire) {
            return Err(Failure::new(
                FailureCode::Draining,
                "the router is leaving; send the request to another one",
            ));
        }
        let max = self.n_permits_max();
        let taken = self
            .n_taken
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| {
                (n < max).then_some(n + 1)
            });
        match taken {
            Ok(_) => Ok(Permit {
                n_taken: Arc::clone(&self.n_taken),
            }),
            Err(n) => Err(Failure::new(
                FailureCode::Overloaded,
                format!("{n} requests are open; at most {max} are allowed; try again later"),
            )),
        }
    }

    /// Seconds for `Retry-After`: longer, the more requests wait.
    pub fn retry_after_s(&self) -> u64 {
        let n_waiting = self.n_taken().saturating_sub(self.n_requests_max) as u64;
        let n_requests_max = self.n_requests_max as u64;
        (RETRY_AFTER_S_MIN + n_waiting / n_requests_max).min(RETRY_AFTER_S_MAX)
    }

    /// Refuses everything from now on.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_house_is_refused_and_a_dropped_permit_is_free_again() {
        let admission = Admission::new(1, 1);
        let first = admission.try_admit().expect("free");
        let _second = admission.try_admit().expect("queue place");
        let refused = admission.try_admit().expect_err("full");
        assert_eq!(refused.code, FailureCode::Overloaded);
        assert!(refused.message.contains("at most 2"), "{refused}");
        drop(first);
        assert!(admission.try_admit().is_ok());
        assert_eq!(admission.n_taken(), 1);
    }

    #[test]
    fn permits_are_exact_under_threads() {
        let admission = Admission::new(3, 0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        if let Ok(permit) = admission.try_admit() {
                            assert!(admission.n_taken() <= 3);
                            drop(permit);
                        }
                    }
                });
            }
        });
        assert_eq!(admission.n_taken(), 0);
    }

    #[test]
    fn a_closed_door_says_draining() {
        let admission = Admission::new(1, 0);
        admission.close();
        let refused = admission.try_admit().expect_err("closed");
        assert_eq!(refused.code, FailureCode::Draining);
    }

    #[test]
    fn retry_after_grows_with_the_queue_and_is_bounded() {
        let admission = Admission::new(1, 100);
        assert_eq!(admission.retry_after_s(), 1);
        let permits: Vec<_> = (0..5)
            .map(|_| admission.try_admit().expect("room"))
            .collect();
        assert_eq!(admission.retry_after_s(), 5);
        let more: Vec<_> = (0..90)
            .map(|_| admission.try_admit().expect("room"))
            .collect();
        assert_eq!(admission.retry_after_s(), RETRY_AFTER_S_MAX);
        drop((permits, more));
    }
}
