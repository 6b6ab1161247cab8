//! Operations on the CPU, one file each.
//!
//! Every operation has one numeric definition, stated in its file, which holds for any batch size, thread count and
//! instruction set: scalar and AVX2 forms agree bit for bit, and a row's result does not depend on its
//! neighbours. Reductions over floats use 16 virtual lanes that are added in a fixed tree; sums over
//! quantised groups run in index order.

mod activations;
mod buffer;
mod isa;
mod matmul;
mod packed;
pub mod real;
mod shards;
mod team;
#[cfg(test)]
mod test_data;

pub use activations::Activations;
pub use isa::{Avx2, Isa};
pub use matmul::{Output, matmul};
pub use packed::{PackError, PackedMatrix, RawMatrix, WeightFormat};
pub use team::{N_PARTS_MAX, N_THREADS_MAX, Team};
