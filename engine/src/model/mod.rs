//! The model that a CPU node computes: packed weights and one forward pass.
//!
//! Weights are packed once, at load, into the order in which the kernels read them, and shared by every node of the
//! process. What the kernels cannot compute exactly is refused here, by the field's name. Nothing in this folder
//! knows sequences or sampling: it turns rows of tokens into rows of numbers.

mod forward;
mod llama;

pub(crate) use forward::{Batch, Workspace};

use crate::intake::ModelFacts;
use llama::Weights;
use tidemill_core::{KvDtype, KvLayout, LayoutError, bounds};
use tidemill_kernels::cpu::{HeadShape, Isa, PackError, Rope};
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

/// One model, ready to compute. Shared by all nodes of a process.
pub struct Model {
    pub(crate) weights: Weights,
    pub(crate) shape: HeadShape,
    pub(crate) rope: Rope,
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
        let weights = match config.family {
            Family::Llama => Weights::load(files)?,
        };
        Ok(Self {
            weights,
            shape: HeadShape {
                n_heads: config.n_heads as usize,
                n_kv_heads: config.n_kv_heads as usize,
                head_dim: head_dim as usize,
                scale: 1.0 / (head_dim as f32).sqrt(),
            },
            rope: Rope::new(head_dim as usize, f64::from(config.rope.theta)),
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
