//! What whole-system tests share: real processes that end with their test, and the way to find them.
//!
//! The tests themselves lie beside `src/`, one folder a suite: `tidy/` holds the house to its drawing, `system/`
//! runs real binaries. Everything here blocks: a test is a person at a terminal, who starts programs, waits, and
//! pulls plugs. Every wait has a deadline, and what misses it says what was seen instead. `TIDEMILL_TEST_LOGS=1` with
//! `--nocapture` shows the last words of every process.
#![forbid(unsafe_code)]

pub mod answer;
pub mod deployment;
pub mod http;
pub mod metrics;
pub mod model;
pub mod process;

use anyhow::{Result, bail};
use std::time::{Duration, Instant};

/// Pause between two looks at something that is waited for.
const PAUSE: Duration = Duration::from_millis(5);

/// Looks until `look` finds something, or says what was there instead (its `Err`) when `patience` is over.
///
/// # Errors
/// What the last look said.
pub fn wait_until<T>(patience: Duration, mut look: impl FnMut() -> Result<T>) -> Result<T> {
    let deadline = Instant::now() + patience;
    loop {
        match look() {
            Ok(found) => return Ok(found),
            Err(missing) if Instant::now() >= deadline => {
                bail!("after {patience:?}: {missing:#}")
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

/// `usual`, or `long` when `TIDEMILL_SOAK` asks for the long form of a sampled check.
pub fn sampled(usual: usize, long: usize) -> usize {
    let is_long = std::env::var("TIDEMILL_SOAK").is_ok_and(|wish| wish == "1");
    if is_long { long } else { usual }
}
