//! The model that a CPU node computes: packed weights and one forward pass.
//!
//! Weights are packed once, at load, into the order in which the kernels read them, and shared by every node of the
//! process. What the kernels cannot compute exactly is refused here, by the field's name. Nothing in this folder
//! knows sequences or sampling: it turns rows of tokens into rows of numbers.

mod forward;
mod gemma3;
mod llama;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod rope;
#[cfg(test)]
mod tests;

pub(crate) use forward::{Batch, Workspace};

use crate::intake::ModelFacts;
use llama::Weights;
use tidemill_core::{KvDtype, KvLayout, LayoutError, bounds};
use tidemill_kernels::cpu::{
    Activations, HeadShape, Isa, PackError, Rope, Team, gelu_mul, silu_mul,
};
use tidemill_model_files::{Family, LoadError, ModelFiles, TensorName};

/// Smallest unit of a head that the kernels take, and the largest head.
const HEAD_DIM_UNIT: u32 = 16;
const HEAD_DIM_MAX: u32 = 256;

/// Why a model cannot be computed.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A tensor is missing.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The kernels do not take a tensor.
    #[error("the kernels do not take {tensor}")]
    Pack {
        /// Which tensor.
        tensor: TensorName,
        /// What is wrong with it.
        source: PackError,
    },
    /// A norm is stored in a type of blocks.
    #[error("{tensor}: a vector of {n_values} values is expected as plain numbers")]
    Vector {
        /// Which tensor.
        tensor: TensorName,
        /// How many values it should have.
        n_values: usize,
    },
    /// A divisor of a frequency is none.
    #[error("{tensor}: value {value} for pair {pair}; numbers above 0 are expected")]
    RopeDivisor {
        /// Which tensor.
        tensor: TensorName,
        /// Which pair.
        pair: usize,
        /// What it was.
        value: f32,
    },
    /// The kernels have no such head.
    #[error("head_dim is {head_dim}; a multiple of 16 from 16 to 256 is supported")]
    HeadDim {
        /// What it was.
        head_dim: u32,
    },
    /// KV blocks of this shape are not possible.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

/// What the rows of a layer see.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reach {
    /// All positions up to their own.
    Everything,
    /// The last ones only.
    Window,
}

/// One thing for each reach that a model's layers have.
#[derive(Debug)]
pub(crate) struct ByReach<T> {
    everything: T,
    window: Option<T>,
}

impl<T> ByReach<T> {
    fn of(&self, reach: Reach) -> &T {
        match reach {
            Reach::Everything => &self.everything,
            Reach::Window => self
                .window
                .as_ref()
                .expect("only models with a window have windowed layers"),
        }
    }

    fn of_mut(&mut self, reach: Reach) -> &mut T {
        match reach {
            Reach::Everything => &mut self.everything,
            Reach::Window => self
                .window
                .as_mut()
                .expect("only models with a window have windowed layers"),
        }
    }
}

/// Rows of gate and up to rows of their product.
type Gate = fn(Isa, &mut Team, &[f32], usize, &mut Activations);

/// One model, ready to compute. Shared by all nodes of a process.
pub struct Model {
    pub(crate) weights: Weights,
    pub(crate) shape: HeadShape,
    pub(crate) rope: ByReach<Rope>,
    /// Positions that a row of a windowed layer sees.
    pub(crate) window: Option<usize>,
    pub(crate) gate: Gate,
    pub(crate) embedding_scale: Option<f32>,
    pub(crate) isa: Isa,
    pub(crate) rms_norm_eps: f32,
    layout: KvLayout,
    vocab_size: u32,
    context_length: u32,
    name: String,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Model({}, {})", self.name, self.isa.name())
    }
}

impl Model {
    /// Packs the weights of an opened model. Takes about a second for each GB and thread.
    ///
    /// # Errors
    /// When a tensor or a shape is not one that the kernels compute.
    pub fn load(files: &ModelFiles, isa: Isa) -> Result<Self, ModelError> {
        let config = &files.config;
        let head_dim = config.head_dim;
        if !head_dim.is_multiple_of(HEAD_DIM_UNIT)
            || !(HEAD_DIM_UNIT..=HEAD_DIM_MAX).contains(&head_dim)
        {
            return Err(ModelError::HeadDim { head_dim });
        }
        let layout = KvLayout::new(
            files.fingerprint,
            config.n_layers,
            config.n_kv_heads,
            head_dim,
            KvDtype::F16,
        )?;
        Ok(Self {
            weights: Weights::load(files)?,
            shape: HeadShape {
                n_heads: config.n_heads as usize,
                n_kv_heads: config.n_kv_heads as usize,
                head_dim: head_dim as usize,
                scale: 1.0 / config.query_scalar.sqrt(),
            },
            rope: rope::load(files)?,
            window: config.window.map(|window| window.n_positions as usize),
            gate: match config.family {
                Family::Gemma3 => gelu_mul,
                _ => silu_mul,
            },
            embedding_scale: gemma3::embedding_scale(config),
            isa,
            rms_norm_eps: config.rms_norm_eps,
            layout,
            vocab_size: config.vocab_size,
            context_length: config.context_length.min(bounds::SEQUENCE_TOKENS_MAX),
            name: config.name.clone(),
        })
    }

    /// What requests for this model are held against, with KV of type `kv_dtype`.
    pub fn facts(&self, kv_dtype: KvDtype) -> ModelFacts {
        let same = &self.layout;
        let layout = KvLayout::new(
            same.model_fingerprint,
            same.n_layers,
            same.n_kv_heads,
            same.head_dim,
            kv_dtype,
        );
        ModelFacts {
            vocab_size: self.vocab_size,
            context_length: self.context_length,
            layout: layout.expect("the shape was accepted at load, for any element type"),
        }
    }

    /// The model's label, for people.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The instruction set that computes it.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Bytes of packed weights, which is what decoding one token reads.
    pub fn n_weight_bytes(&self) -> usize {
        self.weights.n_bytes()
    }
}
