//! Zeroed bytes at an address that vector loads like.
//!
//! Weights are read from end to end once per token. Starting them on a cache line keeps groups from straddling
//! lines, and asking for huge pages takes most address translation out of the way (15 -> 20 GB/s in the prototype).

/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// A zeroed buffer that starts on a cache line.
pub(crate) struct AlignedBytes {
    mapping: Option<memmap2::MmapMut>,
    small: Vec<Line>,
    n_bytes: usize,
}

#[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Line([u8; LINE_BYTES]);

/// From here on a mapping of its own is worth a system call.
const MAPPED_BYTES_MIN: usize = 1 << 20;

impl AlignedBytes {
    pub(crate) fn zeroed(n_bytes: usize) -> Self {
        let mapping = (n_bytes >= MAPPED_BYTES_MIN)
            .then(|| memmap2::MmapMut::map_anon(n_bytes).ok())
            .flatten();
        #[cfg(target_os = "linux")]
        if let Some(mapping) = &mapping {
            // Only advice: a kernel without huge pages refuses, and the bytes are as good.
            let _ = mapping.advise(memmap2::Advice::HugePage);
        }
        let n_lines = match mapping {
            Some(_) => 0,
            None => n_bytes.div_ceil(LINE_BYTES),
        };
        Self {
            mapping,
            small: vec![Line([0; LINE_BYTES]); n_lines],
            n_bytes,
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        match &self.mapping {
            Some(mapping) => mapping,
            None => &bytemuck::cast_slice(&self.small)[..self.n_bytes],
        }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.mapping {
            Some(mapping) => mapping,
            None => &mut bytemuck::cast_slice_mut(&mut self.small)[..self.n_bytes],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_large_buffers_are_zero_and_aligned() {
        for n_bytes in [1, 63, 64, 65, MAPPED_BYTES_MIN - 1, MAPPED_BYTES_MIN + 1] {
            let mut buffer = AlignedBytes::zeroed(n_bytes);
            assert_eq!(buffer.bytes().len(), n_bytes);
            assert_eq!(buffer.bytes().as_ptr().addr() % LINE_BYTES, 0);
            assert!(buffer.bytes().iter().all(|&b| b == 0));
            buffer.bytes_mut()[n_bytes - 1] = 7;
            assert_eq!(buffer.bytes()[n_bytes - 1], 7);
        }
    }
}
