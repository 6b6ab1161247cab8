//! A simulated machine for one node: its core, its memory, its executor. A crash takes all three; what comes back at
//! the same address is a new life with empty memory.

use crate::coverage::FaultKind;
use crate::rng::Rng;
use std::sync::Arc;
use tidemill_core::{BlockIdx, Failure, FailureCode, Incarnation, KvLayout, Timestamp};
use tidemill_engine::executor::simulated::SimulatedExecutor;
use tidemill_engine::executor::{Executor, LayerProgress, ProgressSink, StepOutput, StepPlan};
use tidemill_kernels::memory::KvArena;

/// Tokens of the simulated model: few, since every step weighs all of them.
pub(crate) const VOCAB_SIZE: u32 = 128;

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
    /// What spoils the next step.
    spoilers: Vec<FaultKind>,
    /// Its loop stands still until then; its connections live.
    pub(crate) stands_until: Timestamp,
    /// Standstills that have held nothing back yet.
    pub(crate) n_fresh_stands: u64,
    /// Requests that this life was given.
    pub(crate) given: Vec<usize>,
    /// When the router last heard of its load.
    pub(crate) reported_at: Timestamp,
    /// A step is in flight.
    pub(crate) is_computing: bool,
    /// Digest jobs in flight.
    pub(crate) n_digesting: u32,
}

/// A step that has begun.
pub(crate) struct BegunStep {
    /// Faults that it met.
    pub(crate) spoiled_by: Vec<FaultKind>,
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
            spoilers: Vec::new(),
            stands_until: Timestamp(0),
            n_fresh_stands: 0,
            given: Vec::new(),
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
        self.spoilers.clear();
        self.stands_until = Timestamp(0);
        self.n_fresh_stands = 0;
        self.given.clear();
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
    pub(crate) fn spoil_next(&mut self, kind: FaultKind) {
        self.spoilers.push(kind);
    }

    /// Begins a step.
    pub(crate) fn begin_step(&mut self, plan: StepPlan, rng: &mut Rng) -> BegunStep {
        self.is_computing = true;
        let n_tokens: usize = plan.items.iter().map(|item| item.tokens.len()).sum();
        let mut duration_us = 100 + 30 * n_tokens as u64 + rng.below(400);
        let spoiled_by = std::mem::take(&mut self.spoilers);
        if spoiled_by.contains(&FaultKind::StallStep) {
            duration_us = rng.between(15_000_000, 90_000_000);
        }
        let mut progress = Collect(Vec::new());
        let work = if spoiled_by.contains(&FaultKind::FailStep) {
            let failure = Failure::new(FailureCode::Internal, "the step was made to fail");
            StepWork::Done(Err(failure))
        } else if rng.chance(300) {
            StepWork::Late(plan)
        } else {
            StepWork::Done(self.executor.step(&plan, &mut progress))
        };
        BegunStep {
            spoiled_by,
            duration_us,
            progress: progress.0,
            work,
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
