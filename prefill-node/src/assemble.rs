//! From a loaded model and the shape of a node to what `run::start` takes: block memory, executor, bounds. Used by
//! this role's own process and by whoever runs several nodes around one model.

use crate::kv_server::KvServer;
use crate::run::{Parts, Settings};
use std::sync::Arc;
use tidemill_engine::executor::cpu::{CpuExecutor, CpuExecutorError};
use tidemill_engine::model::Model;
use tidemill_engine::scheduler::{SchedulerConfig, SchedulerConfigError};
use tidemill_kernels::memory::{KvArena, MemoryError};
use tidemill_service::node_flags::{FlagError, NodeShape};
use tidemill_service::node_process::Surroundings;

/// Why a node cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum AssembleError {
    /// A flag does not fit the model.
    #[error(transparent)]
    Flag(#[from] FlagError),
    /// A bound of the scheduler does not hold.
    #[error(transparent)]
    Scheduler(#[from] SchedulerConfigError),
    /// There is no memory for the blocks.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The executor does not start.
    #[error(transparent)]
    Executor(#[from] CpuExecutorError),
}

/// Makes a prefill node that computes `model` on the CPU. The weights are shared, the block memory is its own.
///
/// # Errors
/// When the shape does not fit the model or the machine.
pub fn assemble(
    model: &Arc<Model>,
    shape: NodeShape,
    kv: KvServer,
    surroundings: Surroundings,
) -> Result<(Settings, Parts), AssembleError> {
    let facts = model.facts(shape.kv_dtype);
    let n_blocks = shape.n_blocks(facts.layout.block_bytes())?;
    let arena = KvArena::new(&facts.layout, n_blocks)?;
    let executor = CpuExecutor::new(Arc::clone(model), Arc::clone(&arena), shape.n_threads)?;
    let scheduler = SchedulerConfig {
        max_batch_tokens: shape.max_batch_tokens,
        max_sequences: shape.max_sequences,
        ..SchedulerConfig::for_model(&facts)
    };
    scheduler.check()?;
    let settings = Settings {
        node_id: shape.node_id,
        listen: shape.listen,
        kv,
        model_name: shape.model_name,
        text_fingerprint: shape.text_fingerprint,
        facts,
        scheduler,
    };
    let parts = Parts {
        executor: Box::new(executor),
        arena,
        surroundings,
    };
    Ok((settings, parts))
}
