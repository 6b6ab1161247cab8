//! The first promise: same request, same tokens.
//!
//! Whatever a deployment looks like, and whatever else it does at the time, one request gets the same tokens, drawn
//! from logits that are equal to the last bit. What they have to be is computed apart (`bare`), by an executor
//! with no node, scheduler or block pool around it. `tiny` holds the full product of all axes against that, on
//! random models; `real` does each axis by itself with the default model; the rest is what bends a request on its
//! way: resume, preemption, prompt log-probabilities. `control` makes sure that a wrong answer would be seen.
//!
//! `TIDEMILL_SOAK=1` runs the long form: more prompts, more seeds.
#![forbid(unsafe_code)]

mod ask;
mod axes;
mod bare;
mod client;
mod control;
mod deployment;
mod findings;
mod models;
mod preemption;
mod prompt_logprobs;
mod real;
mod resume;
mod tiny;
