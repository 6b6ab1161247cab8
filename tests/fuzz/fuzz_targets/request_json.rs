//! Any bytes as the body of a chat or completion request: the first thing that a client's bytes meet.
//!
//! Either a request within its bounds or an error comes back; a refusal must itself be sendable.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidemill_router::http::{parse_chat, parse_completion};

fuzz_target!(|body: &[u8]| {
    if let Err(refusal) = parse_chat(body) {
        let _ = refusal.response();
    }
    if let Err(refusal) = parse_completion(body) {
        let _ = refusal.response();
    }
});
