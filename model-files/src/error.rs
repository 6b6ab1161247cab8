//! Why a model does not load.
//!
//! A refusal names the file, the field in it, and what is wrong with the value: enough to repair the file or
//! to choose another one. Parsers work on bytes and know no file name, so they give a [`Refusal`]; opening
//! adds the file and gives a [`LoadError`].

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// One field of a file that cannot be accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The key, tensor name or header field.
    pub field: String,
    /// The value found, the bound or the values that would be accepted.
    pub problem: String,
}

impl Refusal {
    pub(crate) fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self {
            field: field.into(),
            problem: problem.into(),
        }
    }

    pub(crate) fn in_file(self, file: &Path) -> LoadError {
        LoadError::Refused {
            file: file.to_path_buf(),
            field: self.field,
            problem: self.problem,
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.problem)
    }
}

impl std::error::Error for Refusal {}

/// A model that cannot be loaded. Its text, with its chain of sources, is meant for the operator as it is.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The operating system refused to open, size or map the file.
    #[error("{} cannot be read", file.display())]
    Io {
        /// The file or directory.
        file: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// The file was read, and something in it is unknown, inconsistent or out of bounds.
    #[error("{}: {field}: {problem}", file.display())]
    Refused {
        /// The file.
        file: PathBuf,
        /// The key, tensor name or header field.
        field: String,
        /// What is wrong with its value, and what would be accepted.
        problem: String,
    },
}

impl LoadError {
    pub(crate) fn io(file: &Path, source: io::Error) -> Self {
        Self::Io {
            file: file.to_path_buf(),
            source,
        }
    }
}

/// `value` in quotes, cut so that a hostile file cannot flood the message.
pub(crate) fn quoted(value: &str) -> String {
    const CHARS_MAX: usize = 80;
    let mut cut: String = value.chars().take(CHARS_MAX).collect();
    if cut.len() < value.len() {
        cut.push('…');
    }
    format!("{cut:?}")
}
