//! What may differ between two runs of a request without changing its tokens.

use std::fmt;
use tidemill_core::KvDtype;
use tidemill_kernels::cpu::Isa;

/// Where the prompt is computed and how its KV travels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    /// One decode node does both.
    Colocated,
    /// A prefill node lends to a decode node of the same process.
    Local,
    /// The same over TCP, control and KV.
    Tcp,
}

pub(crate) const WAYS: [Way; 3] = [Way::Colocated, Way::Local, Way::Tcp];
/// Tokens that a step may feed: a chunk of a prompt is never longer.
pub(crate) const CHUNKS: [u32; 5] = [1, 7, 16, 64, 4096];
pub(crate) const N_THREADS: [usize; 2] = [1, 2];
pub(crate) const KV_DTYPES: [KvDtype; 3] = [KvDtype::F16, KvDtype::Bf16, KvDtype::F32];

/// What the nodes are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) way: Way,
    pub(crate) chunk: u32,
    pub(crate) isa: Isa,
    pub(crate) n_threads: usize,
    pub(crate) kv_dtype: KvDtype,
    /// Blocks of each node.
    pub(crate) n_blocks: u32,
}

/// What the prefix cache holds when the request comes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cache {
    /// Nothing of it.
    Cold,
    /// Two blocks: another prompt began the same.
    Prefix,
    /// All that can be: the same was served before.
    Warm,
}

/// In whose company the request is served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mates {
    Alone,
    Crowd,
}

/// One run.
pub(crate) struct Cell {
    /// The model, and which of its requests.
    pub(crate) name: String,
    pub(crate) setup: Setup,
    pub(crate) cache: Cache,
    pub(crate) mates: Mates,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            setup,
            cache,
            mates,
        } = self;
        write!(f, "{name} {setup} cache={cache:?} mates={mates:?}")
    }
}

impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "way={:?} chunk={} isa={} threads={} kv={} blocks={}",
            self.way,
            self.chunk,
            self.isa.name(),
            self.n_threads,
            self.kv_dtype.name(),
            self.n_blocks
        )
    }
}
