//! Hundreds of histories, each with its faults; planted bugs that must be noticed; and the proof that a seed replays.
//!
//! `TIDEMILL_SIM_SEED=17 cargo test -p tidemill-sim --test seeds one_seed -- --nocapture` replays one history, with
//! `TIDEMILL_SIM_TRACE=1` event by event. `TIDEMILL_SOAK=1` runs the long form, `TIDEMILL_SIM_SEEDS=n` any other number of histories.

#![allow(clippy::print_stdout, reason = "a test prints what it covered")]

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use tidemill_core::planted::{PlantedBug, plant};
use tidemill_sim::{Coverage, Outcome, SimConfig, run};

/// Histories of the short and of the long form.
const N_SEEDS: u64 = 300;
const N_SEEDS_SOAK: u64 = 20_000;
/// Requests that a router takes in, faults that have an effect: at least so many in each history.
const N_ADMITTED: u64 = 200;
const N_FAULTS: u64 = 20;
/// How often each fault meets each phase in the short form, at least.
const N_MEETINGS: u64 = 10;

const CONFIG: SimConfig = SimConfig {
    n_requests: 200,
    n_faults: 44,
    trace: false,
};

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Runs seeds on every core; returns the sum of coverage, or the violations.
fn run_many(seeds: std::ops::Range<u64>) -> (Coverage, Vec<Outcome>, Vec<String>) {
    let next = AtomicU64::new(seeds.start);
    let sum = Mutex::new((Coverage::default(), Vec::new(), Vec::new()));
    let n_threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..n_threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        return;
                    }
                    let result = run(seed, CONFIG);
                    let mut sum = sum.lock().expect("no thread panics with it");
                    match result {
                        Ok(outcome) => {
                            sum.0.add(&outcome.coverage);
                            sum.1.push(outcome);
                        }
                        Err(violation) => sum.2.push(format!(
                            "{violation}\n    replay: TIDEMILL_SIM_SEED={seed} cargo test -p tidemill-sim --test seeds one_seed -- --nocapture"
                        )),
                    }
                }
            });
        }
    });
    sum.into_inner().expect("no thread panics with it")
}

#[test]
fn every_history_keeps_the_promises() {
    let usual = variable("TIDEMILL_SOAK").map_or(N_SEEDS, |_| N_SEEDS_SOAK);
    let n_seeds = variable("TIDEMILL_SIM_SEEDS").unwrap_or(usual);
    let start = variable("TIDEMILL_SIM_FIRST").unwrap_or(0);
    let clock = std::time::Instant::now();
    let (coverage, outcomes, violations) = run_many(start..start + n_seeds);
    assert!(
        violations.is_empty(),
        "{} of {n_seeds} seeds:\n  {}",
        violations.len(),
        violations.join("\n  ")
    );
    let sum = |count: fn(&Outcome) -> u64| outcomes.iter().map(count).sum::<u64>();
    let ms_a_seed = clock.elapsed().as_millis() / u128::from(n_seeds);
    let summary = format!(
        "{coverage}\n{n_seeds} seeds from {start}: {} events, {} faults, {} requests admitted, {} finished, {} failed, {} cancelled, {} lost; {} turned away; {} tokens, {} prompt log-probabilities; {ms_a_seed} ms a seed",
        sum(|o| o.n_events),
        coverage.n_faults(),
        sum(|o| o.n_admitted),
        sum(|o| o.n_finished),
        sum(|o| o.failures.values().sum()),
        sum(|o| o.n_cancelled),
        sum(|o| o.n_lost),
        sum(|o| o.n_turned_away),
        sum(|o| o.n_tokens),
        sum(|o| o.n_prompt_logprobs),
    );
    println!("{summary}");
    // Cargo shows nothing of a test that passes: whoever runs the tests prints this file.
    let file = concat!(env!("CARGO_TARGET_TMPDIR"), "/sim-coverage.txt");
    std::fs::write(file, summary + "\n").expect("the build folder takes a file");
    for outcome in &outcomes {
        let ends = outcome.n_finished + outcome.n_cancelled + outcome.n_lost;
        let n_failed: u64 = outcome.failures.values().sum();
        assert_eq!(
            ends + n_failed,
            outcome.n_admitted,
            "every request has one end"
        );
        assert!(outcome.n_admitted >= N_ADMITTED, "too few requests");
        let n_faults = outcome.coverage.n_faults();
        assert!(n_faults >= N_FAULTS, "only {n_faults} faults had an effect");
    }
    let least = (N_MEETINGS * n_seeds / N_SEEDS).max(1);
    let scarce = coverage.scarce(least);
    assert!(
        scarce.is_empty(),
        "faults that met a phase fewer than {least} times: {scarce:?}"
    );
}

#[test]
fn a_seed_is_a_whole_history() {
    for seed in [1, 2, 3] {
        let first = run(seed, CONFIG).expect("keeps the promises");
        let second = run(seed, CONFIG).expect("keeps the promises");
        assert_eq!(first, second, "seed {seed}");
    }
}

#[test]
fn every_planted_bug_is_noticed() {
    let mut unnoticed = Vec::new();
    for bug in PlantedBug::ALL {
        plant(Some(bug));
        // A planted bug may also break an assertion of the shipped code: that is noticing it.
        let noticed =
            (0..N_SEEDS).find_map(
                |seed| match std::panic::catch_unwind(|| run(seed, CONFIG)) {
                    Ok(Ok(_)) => None,
                    Ok(Err(violation)) => Some(violation.to_string()),
                    Err(_) => Some(format!("seed {seed}: a broken invariant")),
                },
            );
        plant(None);
        match noticed {
            Some(how) => println!("{bug:?}: {how}"),
            None => unnoticed.push(bug),
        }
    }
    assert!(
        unnoticed.is_empty(),
        "not noticed in {N_SEEDS} seeds: {unnoticed:?}"
    );
}

#[test]
fn one_seed() {
    let config = SimConfig {
        trace: variable("TIDEMILL_SIM_TRACE").is_some(),
        ..CONFIG
    };
    let seed = variable("TIDEMILL_SIM_SEED").unwrap_or(0);
    match run(seed, config) {
        Ok(outcome) => println!("{outcome:?}"),
        Err(violation) => panic!("{violation}"),
    }
}
