//! A fixed team of threads that runs the parts of one operation.
//!
//! The caller names how many parts there are; where a part begins and ends is the operation's business and never
//! depends on the number of threads, so neither do results. Who runs a part is decided by who is free: on a shared
//! machine one thread is often late. Idle members spin for 50 us (the gap between two operations of one forward pass
//! is far shorter), then park, so that small machines keep their cores for the network.

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const SPIN_MAX: Duration = Duration::from_micros(50);
/// Most parts of one operation; they are counted in 20 bits of the ticket.
pub const N_PARTS_MAX: usize = (1 << 20) - 1;
/// Most threads of a team.
pub const N_THREADS_MAX: usize = 256;

type Job = *const (dyn Fn(usize) + Sync);

/// Threads that work together; the calling thread is one of them.
pub struct Team {
    shared: Arc<Shared>,
    members: Vec<JoinHandle<()>>,
}

struct Shared {
    /// Which operation this is, how many parts it has, which is next: see [`Ticket`].
    ticket: AtomicU64,
    /// Parts of the current operation that have ended.
    n_done: AtomicUsize,
    /// The current operation. Valid for whoever has claimed one of its parts.
    job: UnsafeCell<Option<Job>>,
    panicked: AtomicBool,
    stop: AtomicBool,
    asleep: Vec<AtomicBool>,
}

// SAFETY: `job` is written by the one thread that holds `&mut Team`, when every part of the former operation has
// ended, and read only by threads that hold an unfinished part of the current one; the ticket orders the two.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer in `job` refers to a `Sync` closure.
unsafe impl Send for Shared {}

/// Operation number (24 bits), number of parts (20), next part (20), in one word: a claim succeeds only
/// while its operation is the current one.
#[derive(Clone, Copy)]
struct Ticket(u64);

impl Ticket {
    fn new(operation: u64, n_parts: usize) -> Self {
        Self((operation << 40) | ((n_parts as u64) << 20))
    }

    fn operation(self) -> u64 {
        self.0 >> 40
    }

    fn n_parts(self) -> usize {
        (self.0 >> 20) as usize & N_PARTS_MAX
    }

    fn next(self) -> usize {
        self.0 as usize & N_PARTS_MAX
    }

    fn is_open(self) -> bool {
        self.next() < self.n_parts()
    }
}

impl Team {
    /// A team of `n_threads` (1 to [`N_THREADS_MAX`]; other numbers are moved to the nearest), the caller among them.
    ///
    /// # Errors
    /// What the operating system said when a thread could not be started.
    pub fn new(n_threads: usize) -> std::io::Result<Self> {
        let n_members = n_threads.clamp(1, N_THREADS_MAX) - 1;
        let shared = Arc::new(Shared {
            ticket: AtomicU64::new(0),
            n_done: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            asleep: (0..n_members).map(|_| AtomicBool::new(false)).collect(),
        });
        let mut team = Self {
            shared: Arc::clone(&shared),
            members: Vec::with_capacity(n_members),
        };
        for member_idx in 0..n_members {
            let shared = Arc::clone(&shared);
            let member = std::thread::Builder::new()
                .name(format!("compute-{}", member_idx + 1))
                .spawn(move || work(&shared, member_idx))?;
            team.members.push(member);
        }
        Ok(team)
    }

    /// Threads, the caller among them.
    pub fn n_threads(&self) -> usize {
        self.members.len() + 1
    }

    /// Runs `job(part)` once for each part and returns when all have ended.
    ///
    /// # Panics
    /// When a part panics, or there are more than [`N_PARTS_MAX`] parts.
    pub fn run(&mut self, n_parts: usize, job: &(dyn Fn(usize) + Sync)) {
        assert!(
            n_parts <= N_PARTS_MAX,
            "an operation has at most 2^20 - 1 parts"
        );
        if self.members.is_empty() || n_parts <= 1 {
            (0..n_parts).for_each(job);
            return;
        }
        let shared = &*self.shared;
        let former = Ticket(shared.ticket.load(Ordering::Relaxed));
        shared.n_done.store(0, Ordering::Relaxed);
        // SAFETY: only the lifetime is widened. The pointer is used by holders of a part of this operation only, and
        // this function does not return before all parts have ended.
        let erased: Job =
            unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), Job>(job) };
        // SAFETY: the former operation has ended (the former `run` returned) and the next is not announced, so
        // nobody holds a part and nobody reads the cell.
        unsafe { *shared.job.get() = Some(erased) };
        let operation = (former.operation() + 1) & 0xff_ffff;
        shared
            .ticket
            .store(Ticket::new(operation, n_parts).0, Ordering::SeqCst);
        for (asleep, member) in shared.asleep.iter().zip(&self.members) {
            if asleep.load(Ordering::SeqCst) {
                member.thread().unpark();
            }
        }
        let own = catch_unwind(AssertUnwindSafe(|| while shared.run_one() {}));
        let mut n_spins = 0_u32;
        while shared.n_done.load(Ordering::Acquire) < n_parts {
            n_spins = n_spins.wrapping_add(1);
            if n_spins.is_multiple_of(4096) {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
        let panicked = shared.panicked.swap(false, Ordering::Relaxed);
        if let Err(panic) = own {
            resume_unwind(panic);
        }
        assert!(!panicked, "no part of a compute operation panics");
    }

    /// Runs `job` over `0..len`, cut at multiples of `grain` (at least 1).
    pub fn run_ranges(
        &mut self,
        len: usize,
        grain: usize,
        job: &(dyn Fn(std::ops::Range<usize>) + Sync),
    ) {
        let grain = grain.max(1).max(len.div_ceil(N_PARTS_MAX));
        self.run(len.div_ceil(grain), &|part| {
            job(part * grain..((part + 1) * grain).min(len));
        });
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for member in self.members.drain(..) {
            member.thread().unpark();
            // A member ends only by returning; a panic inside a part was caught there.
            let _ = member.join();
        }
    }
}

/// Counts a part as ended, also when it unwinds.
struct PartEnd<'a>(&'a Shared);

impl Drop for PartEnd<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.panicked.store(true, Ordering::Relaxed);
        }
        self.0.n_done.fetch_add(1, Ordering::Release);
    }
}

impl Shared {
    /// Claims and runs one part; false when none is left.
    fn run_one(&self) -> bool {
        let mut seen = self.ticket.load(Ordering::Acquire);
        while Ticket(seen).is_open() {
            match self.ticket.compare_exchange_weak(
                seen,
                seen + 1,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => {
                    let _end = PartEnd(self);
                    // SAFETY: this thread holds a part of the current operation, which keeps `run` from returning
                    // and so both the cell unwritten and the closure alive.
                    let job = unsafe { (*self.job.get()).map(|job| &*job) };
                    job.expect("an open ticket has a job")(Ticket(seen).next());
                    return true;
                }
                Err(now) => seen = now,
            }
        }
        false
    }
}

fn work(shared: &Shared, member_idx: usize) {
    let asleep = &shared.asleep[member_idx];
    while !shared.stop.load(Ordering::SeqCst) {
        match catch_unwind(AssertUnwindSafe(|| shared.run_one())) {
            Ok(true) => continue,
            Ok(false) => {}
            // Noted for the caller by `PartEnd`.
            Err(_) => continue,
        }
        if spin_until_work(shared) {
            continue;
        }
        asleep.store(true, Ordering::SeqCst);
        // Look again after saying so: whoever opens a ticket or stops the team from now on wakes this thread.
        if !has_work(shared) {
            std::thread::park();
        }
        asleep.store(false, Ordering::SeqCst);
    }
}

fn has_work(shared: &Shared) -> bool {
    shared.stop.load(Ordering::SeqCst) || Ticket(shared.ticket.load(Ordering::SeqCst)).is_open()
}

fn spin_until_work(shared: &Shared) -> bool {
    let start = Instant::now();
    loop {
        for _ in 0..64 {
            if has_work(shared) {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > SPIN_MAX {
            return false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_runs_once_for_any_number_of_threads() {
        for n_threads in [1, 2, 3, 5] {
            let mut team = Team::new(n_threads).expect("threads start");
            assert_eq!(team.n_threads(), n_threads);
            for n_parts in [0, 1, 2, 7, 100, 1000] {
                let counts: Vec<AtomicUsize> = (0..n_parts).map(|_| AtomicUsize::new(0)).collect();
                team.run(n_parts, &|part| {
                    counts[part].fetch_add(1, Ordering::Relaxed);
                });
                assert!(
                    counts
                        .iter()
                        .all(|count| count.load(Ordering::Relaxed) == 1)
                );
            }
        }
    }

    #[test]
    fn many_small_operations_and_pauses_lose_nothing() {
        let mut team = Team::new(3).expect("threads start");
        let total = AtomicUsize::new(0);
        for round in 0..2000 {
            team.run(4, &|part| {
                total.fetch_add(part, Ordering::Relaxed);
            });
            if round % 500 == 0 {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        assert_eq!(total.load(Ordering::Relaxed), 2000 * 6);
    }

    #[test]
    fn ranges_are_cut_at_fixed_places() {
        let mut team = Team::new(2).expect("threads start");
        let seen = std::sync::Mutex::new(Vec::new());
        team.run_ranges(10, 4, &|range| {
            seen.lock().expect("not poisoned").push(range)
        });
        let mut seen = seen.into_inner().expect("not poisoned");
        seen.sort_by_key(|range| range.start);
        assert_eq!(seen, [0..4, 4..8, 8..10]);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_lives_on() {
        let mut team = Team::new(2).expect("threads start");
        for _ in 0..20 {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                team.run(8, &|part| assert!(part != 5, "part five"));
            }));
            assert!(outcome.is_err());
        }
        let count = AtomicUsize::new(0);
        team.run(8, &|_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.load(Ordering::Relaxed), 8);
    }
}
