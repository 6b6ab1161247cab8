//! Whether a node is fit for work: asked again with a growing pause while it is away, ejected after failures in a
//! row, and let back in through a probe and one request at a time.

use tidemill_core::Timestamp;

/// Failures in a row that eject a node. One may be chance, and a request tries at most four nodes.
const FAILURES_MAX: u32 = 3;
/// First pause before a node is asked again.
const PAUSE_US_MIN: u64 = 250_000;
/// Longest pause.
const PAUSE_US_MAX: u64 = 10_000_000;
/// First pause of an ejected node.
const EJECTION_US_MIN: u64 = 1_000_000;
/// Longest pause of an ejected node.
const EJECTION_US_MAX: u64 = 60_000_000;
/// A question that was never answered is asked again after this.
const ANSWER_US_MAX: u64 = 10_000_000;

/// How fit a node is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// As far as is known.
    Usable,
    /// It has failed before and has not served since: one request at a time.
    OnProbation,
    /// Not described yet, refused, or ejected.
    Away,
}

/// One node's record. It outlives requests, but not the node's entry.
#[derive(Clone, Debug)]
pub(super) struct Health {
    state: State,
    n_failures: u32,
    /// Ejections since it last served.
    n_ejections: u32,
    /// Refusals in a row.
    n_refusals: u32,
    last_reason: Option<String>,
    next_ask: Option<Timestamp>,
}

impl Health {
    /// An unknown node, to be asked at once.
    pub(super) fn new(now: Timestamp) -> Self {
        Self {
            state: State::Away,
            n_failures: 0,
            n_ejections: 0,
            n_refusals: 0,
            last_reason: None,
            next_ask: Some(now),
        }
    }

    pub(super) fn state(&self) -> State {
        self.state
    }

    pub(super) fn next_ask(&self) -> Option<Timestamp> {
        self.next_ask
    }

    /// True when it is to be described now.
    pub(super) fn take_due(&mut self, now: Timestamp) -> bool {
        let is_due = self.next_ask.is_some_and(|at| at <= now);
        if is_due {
            self.next_ask = Some(now.plus_us(ANSWER_US_MAX));
        }
        is_due
    }

    /// It answered as it should. A new life has a clean record.
    pub(super) fn described(&mut self, is_new_life: bool) {
        self.next_ask = None;
        self.n_refusals = 0;
        self.last_reason = None;
        if is_new_life {
            self.n_failures = 0;
            self.n_ejections = 0;
        }
        self.state = if self.n_ejections > 0 {
            State::OnProbation
        } else {
            State::Usable
        };
    }

    /// It did not answer, or cannot be used. True when the reason is news.
    pub(super) fn refused(&mut self, reason: &str, now: Timestamp) -> bool {
        self.state = State::Away;
        let pause_us = doubled(PAUSE_US_MIN, self.n_refusals, PAUSE_US_MAX);
        self.n_refusals += 1;
        self.next_ask = Some(now.plus_us(pause_us));
        let is_news = self.last_reason.as_deref() != Some(reason);
        self.last_reason = Some(reason.to_owned());
        is_news
    }

    /// Something does not fit what is known: ask soon. A question under way is not repeated.
    pub(super) fn ask_again(&mut self, now: Timestamp) {
        if self.next_ask.is_none() {
            self.next_ask = Some(now);
        }
    }

    /// It served a request to the end.
    pub(super) fn served(&mut self) {
        self.n_failures = 0;
        // What was begun before an ejection may end well; only the probe brings it back.
        if self.state != State::Away {
            self.n_ejections = 0;
            self.state = State::Usable;
        }
    }

    /// It failed a request. Gives the pause when that ejects it.
    pub(super) fn failed(&mut self, now: Timestamp) -> Option<u64> {
        if self.state == State::Away {
            return None;
        }
        self.n_failures += 1;
        if self.state == State::Usable && self.n_failures < FAILURES_MAX {
            return None;
        }
        let pause_us = doubled(EJECTION_US_MIN, self.n_ejections, EJECTION_US_MAX);
        self.state = State::Away;
        self.n_failures = 0;
        self.n_ejections += 1;
        self.next_ask = Some(now.plus_us(pause_us));
        Some(pause_us)
    }
}

fn doubled(first_us: u64, n_times: u32, us_max: u64) -> u64 {
    first_us
        .saturating_mul(1_u64 << n_times.min(20))
        .min(us_max)
}
