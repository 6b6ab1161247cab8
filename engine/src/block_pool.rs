//! Who owns which block of KV memory.
//!
//! A block may have several owners: sequences that share a prefix, a lease that lends it, a read in flight. It
//! is free for reuse only when the last one is gone, and stays findable in the prefix cache even then, until
//! its memory is wanted. A reservation is a count, not a set of blocks: it promises that many allocations and
//! names none. Everything is counted in one place, so that `audit` can prove that nothing leaks.

use crate::executor::SequenceId;
use crate::prefix_cache::PrefixCache;
use std::collections::BTreeSet;
use tidemill_core::{BlockHash, BlockIdx, ReadId, RequestId};

/// What keeps a block from being reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Owner {
    /// A sequence that computes with it. The only owner that may write, and only to blocks that it allocated
    /// and that are not full yet.
    Sequence(SequenceId),
    /// Lent to importers.
    Lease(RequestId),
    /// A copy or a digest in flight.
    Read(ReadId),
    /// Slices of this request are arriving in it.
    Import(RequestId),
}

/// What the prefix cache has of a prompt.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CachedRun {
    /// Blocks in the longest run from the first one on.
    pub n_blocks: u32,
    /// Those of them that nobody holds: sharing them lowers `n_free`.
    pub n_unowned: u32,
}

/// All blocks of a node.
pub struct BlockPool {
    /// By block.
    n_owners: Vec<u32>,
    /// Ordered by owner, so that one owner's blocks lie together.
    owned: BTreeSet<(Owner, BlockIdx)>,
    /// Blocks without owner and content; the last one freed is used first.
    free: Vec<BlockIdx>,
    cache: PrefixCache,
    n_reserved: u32,
    /// Counts departures: the clock of "least recently used".
    n_departures: u64,
}

impl BlockPool {
    /// A pool of free blocks.
    pub fn new(n_blocks: u32) -> Self {
        Self {
            n_owners: vec![0; n_blocks as usize],
            owned: BTreeSet::new(),
            free: (0..n_blocks).rev().map(BlockIdx).collect(),
            cache: PrefixCache::new(n_blocks as usize),
            n_reserved: 0,
            n_departures: 0,
        }
    }

    /// Blocks of the pool.
    pub fn n_blocks(&self) -> u32 {
        count(self.n_owners.len())
    }

    /// Blocks that can be allocated now: free and evictable ones, less those reserved.
    pub fn n_free(&self) -> u32 {
        self.n_unowned() - self.n_reserved
    }

    /// Blocks promised to reservations.
    pub fn n_reserved(&self) -> u32 {
        self.n_reserved
    }

    /// Blocks that the prefix cache can find, held or not.
    pub fn n_cached(&self) -> u32 {
        count(self.cache.n_cached())
    }

    fn n_unowned(&self) -> u32 {
        count(self.free.len() + self.cache.n_evictable())
    }

    /// Promises `n_blocks` allocations, all or nothing.
    #[must_use = "false means that nothing was reserved"]
    pub fn reserve(&mut self, n_blocks: u32) -> bool {
        let fits = n_blocks <= self.n_free();
        if fits {
            self.n_reserved += n_blocks;
        }
        fits
    }

    /// Gives unused promises back.
    pub fn unreserve(&mut self, n_blocks: u32) {
        self.n_reserved = self
            .n_reserved
            .checked_sub(n_blocks)
            .expect("nobody gives back more than is reserved");
    }

    /// Hands out a block; its content is undefined. `None` when all are owned or reserved.
    #[must_use = "the block belongs to its owner from now on"]
    pub fn allocate(&mut self, owner: Owner) -> Option<BlockIdx> {
        if self.n_free() == 0 {
            return None;
        }
        let block = self
            .free
            .pop()
            .or_else(|| self.cache.evict())
            .expect("n_free counts free and evictable blocks");
        self.own(block, owner);
        Some(block)
    }

    /// Hands out a block on a promise made by `reserve`.
    ///
    /// # Panics
    /// When nothing is reserved.
    pub fn allocate_reserved(&mut self, owner: Owner) -> BlockIdx {
        self.unreserve(1);
        self.allocate(owner)
            .expect("a reservation keeps its block allocatable")
    }

    /// Adds an owner to a block that has one. Sharing it twice with one owner is sharing it once.
    ///
    /// # Panics
    /// When nobody owns the block: its content may be gone already.
    pub fn share(&mut self, block: BlockIdx, owner: Owner) {
        assert!(
            self.n_owners_of(block) > 0,
            "only an owned block can be shared; {block:?} has no owner"
        );
        self.own(block, owner);
    }

    /// Takes an owner off a block.
    ///
    /// # Panics
    /// When `owner` does not own it.
    pub fn release(&mut self, block: BlockIdx, owner: Owner) {
        assert!(
            self.owned.remove(&(owner, block)),
            "only an owner can release; {owner:?} does not own {block:?}"
        );
        self.n_departures += 1;
        self.drop_owner(block);
    }

    /// Takes an owner off all its blocks, however many they are.
    pub fn release_all(&mut self, owner: Owner) {
        self.n_departures += 1;
        for block in self.blocks_of(owner) {
            self.owned.remove(&(owner, block));
            self.drop_owner(block);
        }
    }

    /// Hands all blocks of one owner to another.
    pub fn transfer(&mut self, from: Owner, to: Owner) {
        for block in self.blocks_of(from) {
            self.own(block, to);
            self.owned.remove(&(from, block));
            self.n_owners[block.0 as usize] -= 1;
        }
    }

    /// All blocks of an owner, by index (not in the order of positions).
    pub fn blocks_of(&self, owner: Owner) -> Vec<BlockIdx> {
        self.owned
            .range((owner, BlockIdx(0))..=(owner, BlockIdx(u32::MAX)))
            .map(|(_, block)| *block)
            .collect()
    }

    /// True when `owner` owns `block`.
    pub fn is_owner(&self, block: BlockIdx, owner: Owner) -> bool {
        self.owned.contains(&(owner, block))
    }

    /// Owners of a block.
    pub fn n_owners_of(&self, block: BlockIdx) -> u32 {
        self.n_owners[block.0 as usize]
    }

    /// What `look_up` would find. Changes nothing, not even the order of eviction.
    pub fn peek(&self, hashes: &[BlockHash]) -> CachedRun {
        let mut run = CachedRun::default();
        for hash in hashes {
            let Some(block) = self.cache.find(hash) else {
                break;
            };
            run.n_blocks += 1;
            run.n_unowned += u32::from(self.n_owners_of(block) == 0);
        }
        run
    }

    /// Shares the longest run of cached blocks with `owner` and returns them in order. Stops early where a block
    /// could be pinned only at the cost of a reservation.
    pub fn look_up(&mut self, hashes: &[BlockHash], owner: Owner) -> Vec<BlockIdx> {
        let mut blocks = Vec::new();
        for hash in hashes {
            let Some(block) = self.cache.find(hash) else {
                break;
            };
            if self.n_owners_of(block) == 0 && self.n_free() == 0 {
                break;
            }
            self.own(block, owner);
            blocks.push(block);
        }
        blocks
    }

    /// Names the content of a full block that will not be written again. Ignored when this content is cached
    /// already, in this block or in another one.
    ///
    /// # Panics
    /// When nobody owns the block.
    pub fn insert(&mut self, hash: BlockHash, block: BlockIdx) {
        assert!(
            self.n_owners_of(block) > 0,
            "only an owned block can be cached; {block:?} has no owner"
        );
        self.cache.insert(hash, block);
    }

    fn own(&mut self, block: BlockIdx, owner: Owner) {
        if self.owned.insert((owner, block)) {
            self.n_owners[block.0 as usize] += 1;
            self.cache.take_up(block);
        }
    }

    fn drop_owner(&mut self, block: BlockIdx) {
        let n_owners = &mut self.n_owners[block.0 as usize];
        *n_owners -= 1;
        if *n_owners == 0 && !self.cache.leave(block, self.n_departures) {
            self.free.push(block);
        }
    }

    /// Proves that every block is in exactly one state and that all counts agree.
    ///
    /// # Errors
    /// Names the first block or count that is wrong.
    pub fn audit(&self) -> Result<(), String> {
        self.cache.audit()?;
        let mut n_owners = vec![0_u32; self.n_owners.len()];
        for (owner, block) in &self.owned {
            let Some(n) = n_owners.get_mut(block.0 as usize) else {
                return Err(format!("{owner:?} owns {block:?}, which does not exist"));
            };
            *n += 1;
        }
        let mut n_times_free = vec![0_u32; self.n_owners.len()];
        for block in &self.free {
            n_times_free[block.0 as usize] += 1;
        }
        for (idx, &counted) in n_owners.iter().enumerate() {
            let block = BlockIdx(count(idx));
            if counted != self.n_owners[idx] {
                return Err(format!(
                    "block {idx} counts {} owners but has {counted}",
                    self.n_owners[idx]
                ));
            }
            let n_states = n_times_free[idx]
                + u32::from(counted > 0)
                + u32::from(self.cache.is_evictable(block));
            if n_states != 1 {
                return Err(format!(
                    "block {idx} is {} times free, has {counted} owners and is {}evictable",
                    n_times_free[idx],
                    if self.cache.is_evictable(block) {
                        ""
                    } else {
                        "not "
                    }
                ));
            }
        }
        if self.n_reserved > self.n_unowned() {
            return Err(format!(
                "{} blocks are reserved but only {} are without owner",
                self.n_reserved,
                self.n_unowned()
            ));
        }
        Ok(())
    }
}

fn count(n: usize) -> u32 {
    u32::try_from(n).expect("blocks are counted in u32")
}

#[cfg(test)]
mod tests;
