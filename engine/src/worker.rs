//! The compute thread of a node.
//!
//! A node's loop decides, this thread computes: it owns the executor, takes one plan at a time and hands
//! progress and results to a callback. A panic inside the executor fails that step alone; the thread and the
//! node live on. Progress is a hint for overlap only: the end of a step implies all of it, so a callback
//! may drop progress rather than hold up the computation.

use crate::executor::{Executor, LayerProgress, ProgressSink, StepOutput, StepPlan};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use tidemill_core::{Failure, FailureCode};

/// What the compute thread tells its node.
#[derive(Debug)]
pub enum Report {
    /// A layer group of a sequence is final up to a position.
    Layers(LayerProgress),
    /// The step has ended.
    Step {
        /// The plan's step.
        step_id: u64,
        /// What it gave, or why nothing of it could be computed.
        result: Result<StepOutput, Failure>,
    },
}

/// A running compute thread. Dropping it lets the step in flight finish and ends the thread.
pub struct Worker {
    plans: Option<SyncSender<StepPlan>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts the thread. `report` runs on it: for progress it must not block.
    ///
    /// # Errors
    /// When the operating system gives no thread.
    pub fn start(
        name: &str,
        executor: Box<dyn Executor>,
        report: impl FnMut(Report) + Send + 'static,
    ) -> io::Result<Self> {
        let (plans, incoming) = sync_channel(1);
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || work(executor, &incoming, report))?;
        Ok(Self {
            plans: Some(plans),
            thread: Some(thread),
        })
    }

    /// Hands over the next step. The caller has at most one in flight, so this never waits.
    ///
    /// # Errors
    /// When the thread has ended or a step is still in flight.
    pub fn run(&self, plan: StepPlan) -> Result<(), Failure> {
        let plans = self.plans.as_ref().expect("held until drop");
        plans.try_send(plan).map_err(|error| {
            let why = match error {
                TrySendError::Full(_) => "a step is still in flight",
                TrySendError::Disconnected(_) => "the compute thread has ended; restart the node",
            };
            Failure::new(FailureCode::Internal, why)
        })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.plans = None;
        if let Some(thread) = self.thread.take() {
            // Its only way to fail is a panic in the caller's own callback.
            let _ = thread.join();
        }
    }
}

/// Hands progress on to the callback.
struct Forward<'a, F>(&'a mut F);

impl<F: FnMut(Report) + Send> ProgressSink for Forward<'_, F> {
    fn layers_done(&mut self, progress: LayerProgress) {
        (self.0)(Report::Layers(progress));
    }
}

fn work(
    mut executor: Box<dyn Executor>,
    incoming: &Receiver<StepPlan>,
    mut report: impl FnMut(Report) + Send,
) {
    while let Ok(plan) = incoming.recv() {
        let step_id = plan.step_id;
        let n_tokens: usize = plan.items.iter().map(|item| item.tokens.len()).sum();
        let n_sequences = plan.items.len();
        let _span = tracing::debug_span!("step", step_id, n_sequences, n_tokens).entered();
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            executor.step(&plan, &mut Forward(&mut report))
        }));
        let result = outcome.unwrap_or_else(|_| {
            Err(Failure::new(
                FailureCode::Internal,
                format!("the executor panicked in step {step_id}; its sequences are failed"),
            ))
        });
        report(Report::Step { step_id, result });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    /// Panics on odd steps.
    struct Moody;

    impl Executor for Moody {
        fn step(
            &mut self,
            plan: &StepPlan,
            _progress: &mut dyn ProgressSink,
        ) -> Result<StepOutput, Failure> {
            assert!(plan.step_id.is_multiple_of(2), "an odd step");
            Ok(StepOutput {
                step_id: plan.step_id,
                items: vec![],
            })
        }
    }

    #[test]
    fn a_panic_fails_one_step_and_not_the_thread() {
        let (sender, reports) = channel();
        let worker = Worker::start("compute", Box::new(Moody), move |report| {
            let _ = sender.send(report);
        })
        .expect("thread");
        for step_id in 1..=4 {
            let plan = StepPlan {
                step_id,
                items: vec![],
            };
            worker.run(plan).expect("idle");
            let report = reports
                .recv_timeout(Duration::from_secs(5))
                .expect("report");
            let Report::Step {
                step_id: id,
                result,
            } = report
            else {
                panic!("no progress is reported by this executor");
            };
            assert_eq!(id, step_id);
            assert_eq!(result.is_ok(), step_id.is_multiple_of(2));
        }
    }
}
