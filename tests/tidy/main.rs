//! The house stays as drawn: crate edges, file and function sizes, words, error texts, documents.
//!
//! Each check reads the tree as it is and names every place that does not hold, with what to do about it.

mod documents;
mod edges;
mod errors;
mod sizes;
mod source;
mod traps;
mod words;
