//! Any bytes as a safetensors file: ranges must lie within the file and fit their shapes.
//!
//! The JSON header is the larger part of the risk: its length, its nesting, and numbers near the ends of 64 bits.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidemill_model_files::safetensors;

fuzz_target!(|file: &[u8]| {
    let Ok(tensors) = safetensors::parse(file) else {
        return;
    };
    for tensor in tensors {
        let n_elements: u64 = tensor.shape.iter().product();
        let n_bytes = n_elements * tensor.dtype.block_bytes() as u64;
        assert_eq!(file[tensor.range].len() as u64, n_bytes);
    }
});
