//! A simulated machine for one node: its core, its memory, its executor. A crash takes all three; what comes back at
//! the same address is a new life with empty memory.

use crate::rng::Rng;
use std::sync::Arc;
use tidemill_core::{BlockIdx, Failure, FailureCode, Incarnation, KvLayout, Timestamp};
use tidemill_engine::executor::simulated::SimulatedExecutor;
use tidemill_engine::executor::{Executor, LayerProgress, ProgressSink, StepOutput, StepPlan};
use tidemill_kernels::memory::KvArena;

/// Tokens of the simulated model.
pub(crate) const VOCAB_SIZE: u32 = 512;

/// One node's machine.
pub(crate) struct Host<N> {
    /// Which life, from 0.
    pub(crate) life: u32,
    /// `None` while it is down.
    pub(crate) core: Option<N>,
    /// This life's name.
    pub(crate) incarnation: Incarnation,
    /// This life's blocks.
    pub(crate) arena: Arc<KvArena>,
    executor: SimulatedExecutor,
    /// When it will be woken, if nothing happens before.
    pub(crate) wake_at: Option<Timestamp>,
    /// The next step takes far too long.
    stalls_next: bool,
    /// The next step fails.
    fails_next: bool,
    /// When the router last heard of its load.
    pub(crate) reported_at: Timestamp,
    /// A step is in flight.
    pub(crate) is_computing: bool,
    /// Digest jobs in flight.
    pub(crate) n_digesting: u32,
}

/// A step that has begun.
pub(crate) struct BegunStep {
    /// What it takes, in microseconds.
    pub(crate) duration_us: u64,
    /// What it reports on its way, in order.
    pub(crate) progress: Vec<LayerProgress>,
    /// Its work: done already, or still to be done when it ends.
    pub(crate) work: StepWork,
}

/// Bytes are written at the beginning or at the end of a step, as chance has it: both must be safe.
pub(crate) enum StepWork {
    /// Written at the beginning.
    Done(Result<StepOutput, Failure>),
    /// To be written at the end.
    Late(StepPlan),
}

struct Collect(Vec<LayerProgress>);

impl ProgressSink for Collect {
    fn layers_done(&mut self, progress: LayerProgress) {
        self.0.push(progress);
    }
}

impl<N> Host<N> {
    /// A machine in its first life.
    pub(crate) fn new(layout: &KvLayout, n_blocks: u32, incarnation: Incarnation, core: N) -> Self {
        let arena = KvArena::new(layout, n_blocks).expect("a few kilobytes");
        Self {
            life: 0,
            core: Some(core),
            incarnation,
            executor: SimulatedExecutor::new(Arc::clone(&arena), VOCAB_SIZE),
            arena,
            wake_at: None,
            stalls_next: false,
            fails_next: false,
            reported_at: Timestamp(0),
            is_computing: false,
            n_digesting: 0,
        }
    }

    /// Takes everything away.
    pub(crate) fn crash(&mut self) {
        self.core = None;
        self.life += 1;
        self.wake_at = None;
        self.stalls_next = false;
        self.fails_next = false;
        self.is_computing = false;
        self.n_digesting = 0;
    }

    /// Begins the next life.
    pub(crate) fn restart(&mut self, incarnation: Incarnation, core: N) {
        let (layout, n_blocks) = (self.arena.layout().clone(), self.arena.n_blocks());
        self.arena = KvArena::new(&layout, n_blocks).expect("a few kilobytes");
        self.executor = SimulatedExecutor::new(Arc::clone(&self.arena), VOCAB_SIZE);
        self.incarnation = incarnation;
        self.core = Some(core);
        // Memory of a new life holds anything: nothing may rely on zeroes that it did not write.
        for block in 0..n_blocks {
            let noise = vec![0xa5; self.arena.block_bytes() / layout.n_groups() as usize];
            for group in 0..layout.n_groups() {
                let at = tidemill_kernels::memory::SliceAt {
                    block: BlockIdx(block),
                    group: tidemill_core::LayerGroupIdx(group),
                };
                self.arena.copy_in(at, &noise).expect("equal groups");
            }
        }
    }

    /// The next step stalls, or fails.
    pub(crate) fn spoil_next(&mut self, stalls: bool) {
        if stalls {
            self.stalls_next = true;
        } else {
            self.fails_next = true;
        }
    }

    /// Begins a step.
    pub(crate) fn begin_step(&mut self, plan: StepPlan, rng: &mut Rng) -> BegunStep {
        self.is_computing = true;
        let n_tokens: usize = plan.items.iter().map(|item| item.tokens.len()).sum();
        let mut duration_us = 100 + 30 * n_tokens as u64 + rng.below(400);
        if std::mem::take(&mut self.stalls_next) {
            duration_us = rng.between(15_000_000, 90_000_000);
        }
        if std::mem::take(&mut self.fails_next) {
            let failure = Failure::new(FailureCode::Internal, "the step was made to fail");
            return BegunStep {
                duration_us,
                progress: Vec::new(),
                work: StepWork::Done(Err(failure)),
            };
        }
        if rng.chance(300) {
            return BegunStep {
                duration_us,
                progress: Vec::new(),
                work: StepWork::Late(plan),
            };
        }
        let mut progress = Collect(Vec::new());
        let result = self.executor.step(&plan, &mut progress);
        BegunStep {
            duration_us,
            progress: progress.0,
            work: StepWork::Done(result),
        }
    }

    /// What a step that has ended gave.
    pub(crate) fn end_step(&mut self, work: StepWork) -> Result<StepOutput, Failure> {
        self.is_computing = false;
        match work {
            StepWork::Done(result) => result,
            StepWork::Late(plan) => self.executor.step(&plan, &mut Collect(Vec::new())),
        }
    }
}
