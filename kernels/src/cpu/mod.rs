//! Operations on the CPU, one file each.
//!
//! Every operation has one numeric definition, stated in its file, which holds for any batch size, thread count and
//! instruction set: scalar, AVX2 and AVX-512 forms agree bit for bit, and a row's result does not depend on its
//! neighbours. Reductions over floats use 16 virtual lanes that are added in a fixed tree; sums over
//! quantised groups run in index order.

mod activations;
mod add;
mod attention;
mod buffer;
mod exp;
mod experts;
mod gelu;
mod head_norm;
mod isa;
mod kv_element;
mod kv_store;
mod lanes;
mod matmul;
mod norm;
mod packed;
mod real;
mod rope;
mod rope_scaling;
mod shards;
mod silu;
mod team;
#[cfg(test)]
mod test_data;
mod wide;

pub use activations::Activations;
pub use add::{add_bias, add_rows, scale};
pub use attention::{AttentionPlan, HeadShape, attend};
pub use experts::{Share, add_shares, route};
pub use gelu::gelu_mul;
pub use head_norm::norm_heads;
pub use isa::{Avx2, Avx512, Isa};
pub use kv_store::{LayerCache, Span, store_kv};
pub use matmul::{Output, matmul};
pub use norm::rms_norm;
pub use packed::{PackError, PackedMatrix, RawMatrix, WeightFormat};
pub use rope::{Rope, RopeAngles};
pub use rope_scaling::{Llama3Scaling, RopeScaling, YarnScaling};
pub use silu::silu_mul;
pub use team::{N_PARTS_MAX, N_THREADS_MAX, Team};
