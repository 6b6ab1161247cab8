//! Any bytes as a GGUF file: the header, and every value and tensor place that it yields.
//!
//! Ranges must lie within the file, because the loader indexes the mapping with them; look-ups must answer for any
//! key, whatever type its value has.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidemill_model_files::gguf;

fuzz_target!(|file: &[u8]| {
    let Ok(parsed) = gguf::parse(file) else {
        return;
    };
    for tensor in parsed.tensors() {
        let bytes = &file[tensor.range.clone()];
        assert!(!bytes.is_empty(), "{} has no bytes", tensor.name);
    }
    for key in parsed.keys() {
        let _ = parsed.string(key);
        let _ = parsed.u32(key);
        let _ = parsed.f32(key);
        let _ = parsed.boolean(key);
        let _ = parsed.strings(key);
        let _ = parsed.integers(key);
    }
});
