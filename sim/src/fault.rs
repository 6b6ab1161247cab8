//! What goes wrong, and how it ends.

use crate::coverage::FaultKind;
use crate::network::Process;
use crate::occurrence::Occurrence;
use crate::world::World;
use crate::{decode_host, prefill_host};

/// One fault. Whom it meets is drawn when it strikes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) kind: FaultKind,
}

impl World {
    pub(crate) fn inflict(&mut self, fault: Fault) {
        self.outcome.coverage.note_fault();
        match fault.kind {
            FaultKind::CrashPrefill => {
                let prefill = self.draw_prefill();
                self.crash(prefill, fault.kind);
            }
            FaultKind::CrashDecode => {
                let decode = self.draw_decode();
                self.crash(decode, fault.kind);
            }
            FaultKind::CrashRouter => self.crash(Process::Router, fault.kind),
            FaultKind::CutLink => self.cut_link(),
            FaultKind::SlowLink => {
                let (a, b) = self.draw_link();
                self.network.slow(a, b);
                self.note_process(fault.kind, a);
                self.note_process(fault.kind, b);
                let lasts = self.rng.between(10_000, 5_000_000);
                self.after(lasts, Occurrence::Heal(a, b));
            }
            FaultKind::DropMessage => {
                let lasts = self.rng.between(1_000, 300_000);
                self.drops_until = self.now.plus_us(lasts);
            }
            FaultKind::DuplicateMessage => {
                let lasts = self.rng.between(1_000, 300_000);
                self.doubles_until = self.now.plus_us(lasts);
            }
            FaultKind::ClientLeaves => self.a_client_leaves(),
            FaultKind::CorruptSlice => {
                let lasts = self.rng.between(1_000, 60_000);
                self.corrupts_until = self.now.plus_us(lasts);
            }
            FaultKind::StallStep | FaultKind::FailStep => self.spoil_step(fault.kind),
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

    fn crash(&mut self, process: Process, kind: FaultKind) {
        if !self.is_running(process) {
            return;
        }
        self.note_process_or_all(kind, process);
        // Reads that this process lends or takes end with its calls.
        let calls = self.network.calls_of(process);
        match process {
            Process::Router => {
                for request_idx in self.router.crash() {
                    self.requests[request_idx].lose();
                    self.outcome.n_lost += 1;
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
        self.note_process(FaultKind::CutLink, b);
        for call in self.network.cut(a, b) {
            self.break_call(call);
        }
        if a == Process::Router {
            self.end_watch(b);
        }
        let lasts = self.draw_outage_us();
        self.after(lasts, Occurrence::Heal(a, b));
    }

    fn a_client_leaves(&mut self) {
        let open: Vec<usize> = self.router.open.keys().copied().collect();
        if !open.is_empty() {
            let request_idx = self.rng.pick(&open);
            self.client_leaves(request_idx);
        }
    }

    fn spoil_step(&mut self, kind: FaultKind) {
        let process = if self.rng.chance(500) {
            self.draw_prefill()
        } else {
            self.draw_decode()
        };
        let stalls = kind == FaultKind::StallStep;
        match process {
            Process::Prefill(i) => self.prefills[i].spoil_next(stalls),
            Process::Decode(i) => self.decodes[i].spoil_next(stalls),
            Process::Router => {}
        }
        self.note_process(kind, process);
    }

    /// Everything that is broken becomes whole.
    pub(crate) fn end_faults(&mut self) {
        self.drops_until = self.now;
        self.doubles_until = self.now;
        self.corrupts_until = self.now;
        let mut processes = vec![Process::Router];
        processes.extend((0..self.prefills.len()).map(Process::Prefill));
        processes.extend((0..self.decodes.len()).map(Process::Decode));
        for &a in &processes {
            self.restart(a);
            for &b in &processes {
                self.network.heal(a, b);
            }
        }
    }
}
