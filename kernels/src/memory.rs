//! The memory that holds a node's KV blocks.
//!
//! One zeroed mapping for all blocks of a pool, shared by the compute thread (which writes its own sequences'
//! blocks), the digest thread and transfers. Which block may be written, and by whom, is decided by the engine's
//! block pool alone; this file only makes sure that no access leaves its block. Everything safe here copies; the
//! two `unsafe` functions lend the bytes themselves to kernels and transports.

use std::cell::UnsafeCell;
use std::ops::Range;
use std::sync::Arc;
use tidemill_core::{BlockIdx, Digest, KvLayout, LayerGroupIdx};
use xxhash_rust::xxh3::xxh3_64;

/// Bytes of a block: one layer group of it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SliceAt {
    /// The block in this pool.
    pub block: BlockIdx,
    /// The layer group.
    pub group: LayerGroupIdx,
}

/// Why memory was refused.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The operating system gave none.
    #[error("{n_blocks} KV blocks of {block_bytes} bytes cannot be mapped; lower --kv-bytes")]
    Map {
        /// Blocks asked for.
        n_blocks: u32,
        /// Bytes of each.
        block_bytes: usize,
        /// The system's reason.
        source: std::io::Error,
    },
    /// More bytes than an address can hold, or none.
    #[error(
        "n_blocks is {n_blocks} with {block_bytes} bytes each; 1 block up to what fits in memory is allowed"
    )]
    Size {
        /// Blocks asked for.
        n_blocks: u32,
        /// Bytes of each.
        block_bytes: usize,
    },
    /// A block that this pool does not have.
    #[error("block {block} does not exist; the pool has {n_blocks}")]
    NoSuchBlock {
        /// The index.
        block: u32,
        /// Blocks of the pool.
        n_blocks: u32,
    },
    /// A layer group that the layout does not have.
    #[error("layer group {group} does not exist; the layout has {n_groups}")]
    NoSuchGroup {
        /// The index.
        group: u32,
        /// Groups of the layout.
        n_groups: u32,
    },
    /// A buffer of another size than the slice.
    #[error("a buffer of {given} bytes for a slice of {slice} bytes")]
    Length {
        /// The buffer.
        given: usize,
        /// The slice.
        slice: usize,
    },
}

/// All KV blocks of one node.
pub struct KvArena {
    layout: KvLayout,
    n_blocks: u32,
    block_bytes: usize,
    // The mapping is only ever reached through `base`; it is held to keep it mapped.
    _mapping: UnsafeCell<memmap2::MmapMut>,
    base: *mut u8,
}

// SAFETY: `base` points into a mapping that lives as long as the arena and never moves. Concurrent access is
// governed by the rule of `slice` and `slice_mut`: the block pool gives a block's bytes to one writer at a time,
// and to readers only once they are final; every other function of this type goes through those two.
unsafe impl Send for KvArena {}
// SAFETY: as above; shared references give out no writable bytes without the caller's promise.
unsafe impl Sync for KvArena {}

impl std::fmt::Debug for KvArena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "KvArena({} x {} bytes)", self.n_blocks, self.block_bytes)
    }
}

impl KvArena {
    /// Maps `n_blocks` zeroed blocks. Pages are taken from the system when they are first written.
    ///
    /// # Errors
    /// When the size is zero, overflows, or the system has no address space left.
    pub fn new(layout: &KvLayout, n_blocks: u32) -> Result<Arc<Self>, MemoryError> {
        let block_bytes = layout.block_bytes();
        let n_bytes = (n_blocks as usize)
            .checked_mul(block_bytes)
            .filter(|&n| n > 0 && isize::try_from(n).is_ok())
            .ok_or(MemoryError::Size {
                n_blocks,
                block_bytes,
            })?;
        let mut mapping =
            memmap2::MmapMut::map_anon(n_bytes).map_err(|source| MemoryError::Map {
                n_blocks,
                block_bytes,
                source,
            })?;
        let base = mapping.as_mut_ptr();
        Ok(Arc::new(Self {
            layout: layout.clone(),
            n_blocks,
            block_bytes,
            _mapping: UnsafeCell::new(mapping),
            base,
        }))
    }

    /// The shape of each block.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Blocks of the pool.
    pub fn n_blocks(&self) -> u32 {
        self.n_blocks
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Checks that a block exists.
    ///
    /// # Errors
    /// Names the index and the bound.
    pub fn check(&self, block: BlockIdx) -> Result<(), MemoryError> {
        if block.0 < self.n_blocks {
            return Ok(());
        }
        Err(MemoryError::NoSuchBlock {
            block: block.0,
            n_blocks: self.n_blocks,
        })
    }

    /// Copies a slice into `target`, which has exactly its size.
    ///
    /// # Errors
    /// When the slice does not exist or `target` has another size.
    pub fn copy_out(&self, at: SliceAt, target: &mut [u8]) -> Result<(), MemoryError> {
        let range = self.slice_range(at, target.len())?;
        // SAFETY: a slice is copied out only while a lease or read owns it, when it is final.
        target.copy_from_slice(unsafe { self.slice(at.block, range) });
        Ok(())
    }

    /// Copies `source`, which has exactly its size, into a slice.
    ///
    /// # Errors
    /// When the slice does not exist or `source` has another size.
    pub fn copy_in(&self, at: SliceAt, source: &[u8]) -> Result<(), MemoryError> {
        let range = self.slice_range(at, source.len())?;
        // SAFETY: the import that called owns the block, and nobody reads it before it is whole.
        unsafe { self.slice_mut(at.block, range) }.copy_from_slice(source);
        Ok(())
    }

    /// Zeroes a block: unused tail positions are zero wherever a block is read.
    ///
    /// # Errors
    /// When the block does not exist.
    pub fn zero(&self, block: BlockIdx) -> Result<(), MemoryError> {
        self.check(block)?;
        // SAFETY: the caller has just been given the block by its pool; nobody else reads or writes it.
        unsafe { self.slice_mut(block, 0..self.block_bytes) }.fill(0);
        Ok(())
    }

    /// xxh3 of a slice's bytes.
    ///
    /// # Errors
    /// When the slice does not exist.
    pub fn digest(&self, at: SliceAt) -> Result<Digest, MemoryError> {
        let range = self.group_range(at)?;
        // SAFETY: digests are taken of final slices, by an owner of the block.
        Ok(Digest(xxh3_64(unsafe { self.slice(at.block, range) })))
    }

    /// Bytes of one slice of this group.
    ///
    /// # Errors
    /// When the layout has no such group.
    pub fn slice_bytes(&self, group: LayerGroupIdx) -> Result<usize, MemoryError> {
        self.check_group(group)?;
        Ok(self.layout.group_byte_range(group).len())
    }

    /// Lends bytes of a block for reading.
    ///
    /// # Panics
    /// When block or range do not exist: callers check first.
    ///
    /// # Safety
    /// While the result lives, nobody writes these bytes. The block pool guarantees it for a block that the
    /// caller owns: shared blocks are never written, and an unshared block has one owner.
    pub unsafe fn slice(&self, block: BlockIdx, range: Range<usize>) -> &[u8] {
        let offset = self.offset(block, &range);
        // SAFETY: `offset` proved that the range lies within the mapping; the caller promises that nobody writes.
        unsafe { std::slice::from_raw_parts(self.base.add(offset), range.len()) }
    }

    /// Lends bytes of a block for writing.
    ///
    /// # Panics
    /// When block or range do not exist: callers check first.
    ///
    /// # Safety
    /// While the result lives, nobody else reads or writes these bytes. The block pool guarantees it for a block
    /// whose only owner is the caller, and the caller lends each byte once.
    #[expect(
        clippy::mut_from_ref,
        reason = "an arena is shared; the block pool decides who writes"
    )]
    pub unsafe fn slice_mut(&self, block: BlockIdx, range: Range<usize>) -> &mut [u8] {
        let offset = self.offset(block, &range);
        // SAFETY: `offset` proved that the range lies within the mapping; the caller promises to be alone.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(offset), range.len()) }
    }

    fn offset(&self, block: BlockIdx, range: &Range<usize>) -> usize {
        assert!(
            block.0 < self.n_blocks && range.start <= range.end && range.end <= self.block_bytes,
            "bytes {range:?} of block {} are outside a pool of {} blocks of {} bytes",
            block.0,
            self.n_blocks,
            self.block_bytes
        );
        block.0 as usize * self.block_bytes + range.start
    }

    fn check_group(&self, group: LayerGroupIdx) -> Result<(), MemoryError> {
        let n_groups = self.layout.n_groups();
        if group.0 < n_groups {
            return Ok(());
        }
        Err(MemoryError::NoSuchGroup {
            group: group.0,
            n_groups,
        })
    }

    fn group_range(&self, at: SliceAt) -> Result<Range<usize>, MemoryError> {
        self.check(at.block)?;
        self.check_group(at.group)?;
        Ok(self.layout.group_byte_range(at.group))
    }

    fn slice_range(&self, at: SliceAt, given: usize) -> Result<Range<usize>, MemoryError> {
        let range = self.group_range(at)?;
        if range.len() == given {
            return Ok(range);
        }
        Err(MemoryError::Length {
            given,
            slice: range.len(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_core::KvDtype;

    fn arena() -> Arc<KvArena> {
        let layout = KvLayout::new([3; 32], 4, 2, 8, KvDtype::F16).expect("valid");
        KvArena::new(&layout, 3).expect("small")
    }

    fn at(block: u32, group: u32) -> SliceAt {
        SliceAt {
            block: BlockIdx(block),
            group: LayerGroupIdx(group),
        }
    }

    #[test]
    fn bytes_go_in_and_come_out_and_touch_no_neighbour() {
        let arena = arena();
        let n = arena.slice_bytes(LayerGroupIdx(0)).expect("group");
        let bytes: Vec<u8> = (0..n).map(|i| (i % 251) as u8).collect();
        arena.copy_in(at(1, 0), &bytes).expect("fits");
        let mut back = vec![0; n];
        arena.copy_out(at(1, 0), &mut back).expect("fits");
        assert_eq!(back, bytes);
        for neighbour in [0, 2] {
            arena.copy_out(at(neighbour, 0), &mut back).expect("fits");
            assert!(back.iter().all(|&b| b == 0));
        }
        assert_eq!(
            arena.digest(at(1, 0)).expect("exists"),
            Digest(xxh3_64(&bytes))
        );
        arena.zero(BlockIdx(1)).expect("exists");
        assert_eq!(
            arena.digest(at(1, 0)).expect("exists"),
            arena.digest(at(0, 0)).expect("exists")
        );
    }

    #[test]
    fn what_does_not_exist_is_named() {
        let arena = arena();
        let n = arena.slice_bytes(LayerGroupIdx(0)).expect("group");
        let error = arena.copy_in(at(3, 0), &vec![0; n]).expect_err("3 blocks");
        assert!(error.to_string().contains("block 3"), "{error}");
        let error = arena.digest(at(0, 9)).expect_err("no group 9");
        assert!(error.to_string().contains("layer group 9"), "{error}");
        let error = arena.copy_out(at(0, 0), &mut [0; 3]).expect_err("3 bytes");
        assert!(error.to_string().contains("3 bytes"), "{error}");
        assert!(KvArena::new(arena.layout(), 0).is_err());
    }
}
