//! A file in memory: the one place where this crate is `unsafe`.
//!
//! Weights are mapped, not read, so that opening costs nothing and all roles of a process share the pages. The
//! price is that the file must keep its size while it is mapped; see the SAFETY comment.

use std::fs::File;
use std::path::Path;

use crate::error::{LoadError, Refusal};

/// A read-only mapping of one whole file.
pub(crate) struct Mapping(memmap2::Mmap);

impl Mapping {
    /// Maps `file`. Refuses what is not a regular file, or is empty.
    pub(crate) fn open(file: &Path) -> Result<Self, LoadError> {
        let handle = File::open(file).map_err(|source| LoadError::io(file, source))?;
        let facts = handle
            .metadata()
            .map_err(|source| LoadError::io(file, source))?;
        if !facts.is_file() || facts.len() == 0 {
            return Err(Refusal::new("file", "not a regular file with content").in_file(file));
        }
        // SAFETY: the mapping is read-only and private to this type, which hands out shared slices only. What the
        // compiler cannot know is that nobody truncates or rewrites the file while it is mapped: the operator
        // guarantees that (a model file is replaced by renaming a new one over it, as our own downloads do). A breach
        // raises SIGBUS or changes weights; no length derived from the content is used unchecked after opening.
        let mapping = unsafe { memmap2::Mmap::map(&handle) };
        mapping
            .map(Self)
            .map_err(|source| LoadError::io(file, source))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}
