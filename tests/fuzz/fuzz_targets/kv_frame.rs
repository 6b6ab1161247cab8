//! Any bytes as one frame of the data plane between two nodes.
//!
//! What is accepted must encode to the very same bytes: a frame has one spelling, so nothing in it was skipped,
//! cut short or read twice.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidemill_kv_transfer::transport::frame;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(parsed) = frame::parse_frame(bytes) {
        assert_eq!(parsed.encode(), bytes);
    }
});
