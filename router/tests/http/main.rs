//! The public port over real sockets, with a real (tiny) vocabulary and a scripted dispatcher behind it.

mod connections;
mod errors;
mod lists;
mod prompts;
mod sampling;
mod streams;
mod support;
