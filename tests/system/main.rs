//! The whole system as its operators meet it: real processes, real sockets, real signals.
//!
//! Each file is one promise. A binary that is missing fails its tests with the command that builds it.
#![forbid(unsafe_code)]

mod cancels;
mod clients;
mod ends;
mod faults;
mod fetch;
mod hostile;
mod idle;
mod privacy;
mod same_answer;
mod spans;
mod start;
