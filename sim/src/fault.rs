//! What goes wrong, and how it ends.

use crate::coverage::FaultKind;
use crate::network::Process;
use crate::occurrence::Occurrence;
use crate::world::World;
use crate::{decode_host, prefill_host};
use tidemill_core::{RequestId, Timestamp};

/// A time during which something goes wrong; it lasts until something did.
#[derive(Default)]
pub(crate) struct Window {
    until: Option<Timestamp>,
    /// Faults that have had no effect yet.
    n_fresh: u64,
}

impl Window {
    /// Opens it, or keeps it open for longer.
    fn open(&mut self, until: Timestamp) {
        self.n_fresh += 1;
        self.until = self.until.max(Some(until));
    }

    fn is_open(&self, now: Timestamp) -> bool {
        self.n_fresh > 0 || self.until.is_some_and(|until| now < until)
    }

    /// Something goes wrong; returns how many faults this was the first effect of.
    fn strike(&mut self, now: Timestamp) -> u64 {
        self.until = self.until.max(Some(now));
        std::mem::take(&mut self.n_fresh)
    }

    fn close(&mut self, now: Timestamp) {
        self.until = self.until.min(Some(now));
        self.n_fresh = 0;
    }

    /// When it closes, closed last, or met something last.
    pub(crate) fn until(&self) -> Option<Timestamp> {
        self.until
    }
}

/// One fault. Whom it meets is drawn when it strikes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) kind: FaultKind,
    /// How often it has found nobody to meet.
    pub(crate) n_misses: u32,
}

/// How often a fault that finds nobody comes again, and after what time.
const MISSES_MAX: u32 = 8;
const MISS_US: u64 = 400_000;

impl World {
    pub(crate) fn inflict(&mut self, fault: Fault) {
        if self.is_settling || self.strike(fault.kind) || fault.n_misses == MISSES_MAX {
            return;
        }
        let n_misses = fault.n_misses + 1;
        let later = self.rng.between(1_000, MISS_US);
        self.after(later, Occurrence::Fault(Fault { n_misses, ..fault }));
    }

    /// False when there is nobody whom this fault could meet.
    fn strike(&mut self, kind: FaultKind) -> bool {
        match kind {
            FaultKind::CrashPrefill => {
                let prefill = self.draw_prefill();
                return self.crash(prefill, kind);
            }
            FaultKind::CrashDecode => {
                let decode = self.draw_decode();
                return self.crash(decode, kind);
            }
            FaultKind::CrashRouter => return self.crash(Process::Router, kind),
            FaultKind::ClientLeaves => return self.a_client_leaves(),
            FaultKind::StallStep | FaultKind::FailStep => return self.spoil_step(kind),
            FaultKind::StandStill => return self.stand_still(),
            FaultKind::CutLink => self.cut_link(),
            FaultKind::SlowLink => {
                let link = self.draw_link();
                let lasts = self.rng.between(10_000, 5_000_000);
                self.slow_link(link, lasts);
                self.network.note_slowed(link);
                self.note_link(FaultKind::SlowLink, link);
            }
            FaultKind::DropMessage => {
                let lasts = self.rng.between(1_000, 300_000);
                self.drops.open(self.now.plus_us(lasts));
            }
            FaultKind::DuplicateMessage => {
                let lasts = self.rng.between(1_000, 300_000);
                self.doubles.open(self.now.plus_us(lasts));
            }
            FaultKind::CorruptSlice => self.corrupt_slices(),
        }
        true
    }

    /// Whether an open window of this kind meets something now, and that it has.
    pub(crate) fn strikes(
        &mut self,
        kind: FaultKind,
        per_mille: u64,
        about: Option<RequestId>,
    ) -> bool {
        let window = match kind {
            FaultKind::DropMessage => &mut self.drops,
            FaultKind::DuplicateMessage => &mut self.doubles,
            FaultKind::CorruptSlice => &mut self.corrupts,
            _ => return false,
        };
        if !window.is_open(self.now) || !self.rng.chance(per_mille) {
            return false;
        }
        let n_fresh = window.strike(self.now);
        self.outcome.coverage.add_faults(n_fresh);
        if let Some(request_id) = about {
            self.note_attempt(kind, request_id);
        }
        true
    }

    /// Slices move before the router has heard of it only while its own links are slow: sometimes they are.
    fn corrupt_slices(&mut self) {
        let mut lasts = self.rng.between(1_000, 60_000);
        if self.rng.chance(200) {
            lasts = self.rng.between(1_000_000, 3_000_000);
            let prefills = (0..self.prefills.len()).map(Process::Prefill);
            let nodes: Vec<Process> = prefills
                .chain((0..self.decodes.len()).map(Process::Decode))
                .collect();
            for node in nodes {
                self.slow_link((Process::Router, node), lasts);
            }
        }
        self.corrupts.open(self.now.plus_us(lasts));
    }

    fn slow_link(&mut self, (a, b): (Process, Process), lasts_us: u64) {
        self.network.slow(a, b);
        self.after(lasts_us, Occurrence::Heal(a, b));
    }

    /// A node's loop does nothing for a while. Its connections live, its executor ends the step in flight.
    fn stand_still(&mut self) -> bool {
        let process = self.draw_node();
        if !self.is_running(process) {
            return false;
        }
        // A prefill node that stands still is waited for until the deadline: not always for so long.
        let longest = match process {
            Process::Decode(_) => self
                .rng
                .pick(&[2_000_000, 10_000_000, 30_000_000, 70_000_000]),
            _ => self.rng.pick(&[300_000, 2_000_000, 10_000_000, 40_000_000]),
        };
        let until = self.now.plus_us(self.rng.between(longest / 2, longest));
        let (stands_until, n_fresh) = match process {
            Process::Prefill(i) => {
                let host = &mut self.prefills[i];
                (&mut host.stands_until, &mut host.n_fresh_stands)
            }
            Process::Decode(i) => {
                let host = &mut self.decodes[i];
                (&mut host.stands_until, &mut host.n_fresh_stands)
            }
            Process::Router => return false,
        };
        *stands_until = until.max(*stands_until);
        *n_fresh += 1;
        self.note_process(FaultKind::StandStill, process);
        true
    }

    /// Until when a node stands still; long ago when it does not.
    pub(crate) fn stands_until(&self, process: Process) -> Timestamp {
        match process {
            Process::Prefill(i) => self.prefills[i].stands_until,
            Process::Decode(i) => self.decodes[i].stands_until,
            Process::Router => Timestamp(0),
        }
    }

    /// Gives an occurrence back unless it is for a node that stands still: then it waits, in its order.
    pub(crate) fn hold_back(&mut self, occurrence: Occurrence) -> Option<Occurrence> {
        let Some(process) = self.loop_of(&occurrence) else {
            return Some(occurrence);
        };
        let until = self.stands_until(process);
        if until <= self.now {
            return Some(occurrence);
        }
        let n_fresh = match process {
            Process::Prefill(i) => std::mem::take(&mut self.prefills[i].n_fresh_stands),
            Process::Decode(i) => std::mem::take(&mut self.decodes[i].n_fresh_stands),
            Process::Router => 0,
        };
        self.outcome.coverage.add_faults(n_fresh);
        self.schedule.push(until, occurrence);
        None
    }

    /// The process whose loop this is for.
    fn loop_of(&self, occurrence: &Occurrence) -> Option<Process> {
        let server = |call| self.network.call(call).map(|open| open.server.process);
        let client = |call| self.network.call(call).map(|open| open.client.process);
        match occurrence {
            Occurrence::ToServer(call, _) | Occurrence::CopyOut(call, _) => server(*call),
            Occurrence::ToClient(call, _) | Occurrence::CopyIn(call, ..) => client(*call),
            Occurrence::ServerLoses(_, end)
            | Occurrence::ClientLoses(_, end)
            | Occurrence::Wake(end)
            | Occurrence::Layers(end, _)
            | Occurrence::StepEnds(end, ..)
            | Occurrence::Digest(end, ..) => Some(end.process),
            Occurrence::HeardAgain(process, ..) | Occurrence::Notice(process, _) => Some(*process),
            Occurrence::Arrive(_)
            | Occurrence::ClientLeaves(_)
            | Occurrence::WakeRequest(..)
            | Occurrence::CancelAgain(_)
            | Occurrence::MustBeGone(_)
            | Occurrence::CheckSilence(..)
            | Occurrence::LoadReport(_)
            | Occurrence::Describe(_)
            | Occurrence::Fault(_)
            | Occurrence::Restart(_)
            | Occurrence::Heal(..) => None,
        }
    }

    fn draw_node(&mut self) -> Process {
        if self.rng.chance(500) {
            self.draw_prefill()
        } else {
            self.draw_decode()
        }
    }

    fn draw_prefill(&mut self) -> Process {
        let n = self.prefills.len() as u64;
        Process::Prefill(usize::try_from(self.rng.below(n)).expect("few"))
    }

    fn draw_decode(&mut self) -> Process {
        let n = self.decodes.len() as u64;
        Process::Decode(usize::try_from(self.rng.below(n)).expect("few"))
    }

    fn draw_link(&mut self) -> (Process, Process) {
        let (prefill, decode) = (self.draw_prefill(), self.draw_decode());
        self.rng.pick(&[
            (Process::Router, prefill),
            (Process::Router, decode),
            (prefill, decode),
        ])
    }

    fn crash(&mut self, process: Process, kind: FaultKind) -> bool {
        if !self.is_running(process) {
            return false;
        }
        self.outcome.coverage.add_faults(1);
        self.note_process_or_all(kind, process);
        // Reads that this process lends or takes end with its calls.
        let calls = self.network.calls_of(process);
        match process {
            Process::Router => {
                for request_idx in self.router.crash() {
                    self.requests[request_idx].lose();
                    self.outcome.n_lost += 1;
                    self.leave_legs(request_idx, true, |_| true);
                }
            }
            Process::Prefill(i) => self.prefills[i].crash(),
            Process::Decode(i) => self.decodes[i].crash(),
        }
        for call in calls {
            self.break_call(call);
        }
        if process != Process::Router {
            self.end_watch(process);
        }
        let down = self.draw_outage_us();
        self.after(down, Occurrence::Restart(process));
        true
    }

    /// Most outages are short, some outlast every patience.
    fn draw_outage_us(&mut self) -> u64 {
        let longest = self.rng.pick(&[
            3_000, 10_000, 10_000, 10_000, 100_000, 100_000, 1_000_000, 12_000_000,
        ]);
        self.rng.between(100, longest)
    }

    fn note_process_or_all(&mut self, kind: FaultKind, process: Process) {
        if process == Process::Router {
            for request in self.requests.iter().filter(|request| !request.is_over()) {
                if let Some(phase) = request.phase {
                    self.outcome.coverage.note(kind, phase);
                }
            }
        } else {
            self.note_process(kind, process);
        }
    }

    pub(crate) fn restart(&mut self, process: Process) {
        if self.is_running(process) {
            return;
        }
        let scheduler = self.scheduler_config();
        let facts = prefill_host::facts(&self.layout);
        match process {
            Process::Router => {
                self.router.is_up = true;
                self.begin_membership();
            }
            Process::Prefill(i) => {
                let n_blocks = self.prefills[i].arena.n_blocks();
                let (incarnation, core) =
                    prefill_host::new_core(i, &facts, n_blocks, scheduler, &mut self.rng);
                self.prefills[i].restart(incarnation, core);
            }
            Process::Decode(i) => {
                let n_blocks = self.decodes[i].arena.n_blocks();
                let (incarnation, core) =
                    decode_host::new_core(i, &facts, n_blocks, scheduler, &mut self.rng);
                self.decodes[i].restart(incarnation, core);
            }
        }
    }

    fn cut_link(&mut self) {
        let (a, b) = self.draw_link();
        self.note_link(FaultKind::CutLink, (a, b));
        for call in self.network.cut(a, b) {
            self.break_call(call);
        }
        if a == Process::Router {
            self.end_watch(b);
        }
        let lasts = self.draw_outage_us();
        self.after(lasts, Occurrence::Heal(a, b));
    }

    fn a_client_leaves(&mut self) -> bool {
        let open: Vec<usize> = self.router.open.keys().copied().collect();
        if open.is_empty() {
            return false;
        }
        let request_idx = self.rng.pick(&open);
        self.outcome.coverage.add_faults(1);
        self.client_leaves(request_idx);
        true
    }

    fn spoil_step(&mut self, kind: FaultKind) -> bool {
        let process = self.draw_node();
        if !self.is_running(process) {
            return false;
        }
        match process {
            Process::Prefill(i) => self.prefills[i].spoil_next(kind),
            Process::Decode(i) => self.decodes[i].spoil_next(kind),
            Process::Router => {}
        }
        true
    }

    /// Everything that is broken becomes whole.
    pub(crate) fn end_faults(&mut self) {
        self.is_settling = true;
        self.drops.close(self.now);
        self.doubles.close(self.now);
        self.corrupts.close(self.now);
        let mut processes = vec![Process::Router];
        processes.extend((0..self.prefills.len()).map(Process::Prefill));
        processes.extend((0..self.decodes.len()).map(Process::Decode));
        for &a in &processes {
            self.restart(a);
            for &b in &processes {
                self.network.heal(a, b, self.now);
            }
        }
    }
}
