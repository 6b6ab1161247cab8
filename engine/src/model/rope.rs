//! The ropes of a model: that of its layers that see everything, with the scaling that the files state, and that of its
//! windowed layers, which Gemma 3 gives a base of their own and no scaling.

use super::llama::vector;
use super::{ByReach, ModelError};
use tidemill_kernels::cpu::{Llama3Scaling, Rope, RopeScaling, YarnScaling};
use tidemill_model_files::{Family, ModelFiles, RopeScaling as Stated, TensorName};

pub(super) fn load(files: &ModelFiles) -> Result<ByReach<Rope>, ModelError> {
    let config = &files.config;
    let head_dim = config.head_dim as usize;
    let scaling = scaling(files)?;
    let rope = |theta, scaling: &_| Rope::scaled(head_dim, f64::from(theta), scaling);
    Ok(ByReach {
        everything: rope(config.rope.theta, &scaling),
        window: config.window.map(|_| match config.family {
            Family::Gemma3 => rope(config.rope.local_theta, &RopeScaling::None),
            _ => rope(config.rope.theta, &scaling),
        }),
    })
}

fn scaling(files: &ModelFiles) -> Result<RopeScaling, ModelError> {
    Ok(match files.config.rope.scaling {
        Stated::None => RopeScaling::None,
        Stated::Linear { factor } => RopeScaling::Linear(f64::from(factor)),
        Stated::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_context_length,
        } => RopeScaling::Llama3(Llama3Scaling {
            factor: f64::from(factor),
            low_freq_factor: f64::from(low_freq_factor),
            high_freq_factor: f64::from(high_freq_factor),
            original_positions: f64::from(original_context_length),
        }),
        Stated::Yarn(yarn) => RopeScaling::Yarn(YarnScaling {
            factor: f64::from(yarn.factor),
            beta_fast: f64::from(yarn.beta_fast),
            beta_slow: f64::from(yarn.beta_slow),
            original_positions: f64::from(yarn.original_context_length),
            truncate: yarn.truncate,
            magnitude: f64::from(yarn.magnitude),
            mscale: f64::from(yarn.mscale),
            mscale_all_dim: f64::from(yarn.mscale_all_dim),
        }),
        Stated::Divisors => {
            let tensor = TensorName::RopeDivisors;
            let divisors = vector(files, tensor)?;
            let is_number = |value: f32| value.is_finite() && value > 0.0;
            if let Some(pair) = divisors.iter().position(|value| !is_number(*value)) {
                let value = divisors[pair];
                return Err(ModelError::RopeDivisor {
                    tensor,
                    pair,
                    value,
                });
            }
            RopeScaling::Divisors(divisors.into_iter().map(f64::from).collect())
        }
    })
}
