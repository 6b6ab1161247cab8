//! Text on its way in and out: the only place where a request's words and its tokens meet.
//!
//! `prompt` turns a conversation or a raw prompt into tokens, `output` turns sampled tokens back into text, `stop`
//! looks for stop strings. All of it is synchronous and bounded; nodes never see any of it.

pub mod output;
pub mod prompt;
pub mod stop;
#[cfg(test)]
mod tests;
