//! The digest thread: checksums of final slices, away from the loop (which must not wait) and from the compute
//! thread (which has better things to do).
//!
//! A job's blocks are owned by the job until its answer, so they stay as they are while they are read. Jobs are
//! at most the slices of the pool; those that the thread's queue has no room for wait here, in order.

use crate::node::Event;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use tidemill_core::ReadId;
use tidemill_core::kv_layout::SlicePlace;
use tidemill_kernels::memory::{KvArena, SliceAt};

/// Jobs in the thread's queue: enough that it never starves between two turns of the loop.
const QUEUE_MAX: usize = 256;

/// One job.
pub(crate) struct Job {
    /// Its name, which is also the second owner of the blocks.
    pub(crate) job: ReadId,
    /// Where the slices lie.
    pub(crate) places: Vec<SlicePlace>,
}

/// A running digest thread. It ends when this is dropped.
pub(crate) struct Digester {
    jobs: SyncSender<Job>,
    waiting: VecDeque<Job>,
}

impl Digester {
    /// Starts the thread; `report` runs on it with each job's `Digested`.
    pub(crate) fn start(
        name: &str,
        arena: Arc<KvArena>,
        report: impl FnMut(Event) + Send + 'static,
    ) -> io::Result<Self> {
        let (jobs, incoming) = sync_channel(QUEUE_MAX);
        std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || work(&arena, &incoming, report))?;
        Ok(Self {
            jobs,
            waiting: VecDeque::new(),
        })
    }

    /// Takes a job in. It starts with the next `flush`.
    pub(crate) fn push(&mut self, job: Job) {
        self.waiting.push_back(job);
    }

    /// Hands over what the thread has room for.
    ///
    /// # Errors
    /// When the thread has ended; no lease of this node can be completed any more.
    pub(crate) fn flush(&mut self) -> Result<(), String> {
        while let Some(job) = self.waiting.pop_front() {
            match self.jobs.try_send(job) {
                Ok(()) => {}
                Err(TrySendError::Full(job)) => {
                    self.waiting.push_front(job);
                    break;
                }
                Err(TrySendError::Disconnected(_)) => {
                    return Err("the digest thread has ended".to_owned());
                }
            }
        }
        Ok(())
    }
}

fn work(arena: &KvArena, incoming: &Receiver<Job>, mut report: impl FnMut(Event)) {
    while let Ok(job) = incoming.recv() {
        let digests = job
            .places
            .iter()
            .map(|place| {
                let at = SliceAt {
                    block: place.block,
                    group: place.slice.group,
                };
                let digest = arena
                    .digest(at)
                    .expect("the export table names blocks of this pool");
                (place.slice, digest)
            })
            .collect();
        report(Event::Digested {
            job: job.job,
            digests,
        });
    }
}
