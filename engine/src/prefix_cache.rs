//! Which full blocks hold which content.
//!
//! A cached block is named by its block hash, which covers everything before it, so a hit on a block is a hit
//! on the whole prefix. The cache owns nothing: a block that an owner holds cannot be evicted, one that nobody
//! holds waits here, least recently used first, until it is shared again or its memory is wanted. Of blocks
//! that were left at the same time the deepest goes first, since a prefix without its head is of no use.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use tidemill_core::{BlockHash, BlockIdx};

/// What the cache knows about one block.
#[derive(Clone, Copy, Debug)]
struct Entry {
    hash: BlockHash,
    /// Rises with every insertion: within one prefix, the depth.
    insertion: u64,
    /// When the last owner left; `None` while somebody holds the block.
    left_at: Option<u64>,
}

/// A place in the order of eviction: longest unused first, then deepest first.
type EvictionKey = (u64, Reverse<u64>, BlockIdx);

/// The index of cached blocks of one pool.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    by_hash: BTreeMap<BlockHash, BlockIdx>,
    /// By block.
    entries: Vec<Option<Entry>>,
    evictable: BTreeSet<EvictionKey>,
    n_insertions: u64,
}

impl PrefixCache {
    pub(crate) fn new(n_blocks: usize) -> Self {
        Self {
            by_hash: BTreeMap::new(),
            entries: vec![None; n_blocks],
            evictable: BTreeSet::new(),
            n_insertions: 0,
        }
    }

    /// Cached blocks that nobody holds.
    pub(crate) fn n_evictable(&self) -> usize {
        self.evictable.len()
    }

    /// Cached blocks, held or not.
    pub(crate) fn n_cached(&self) -> usize {
        self.by_hash.len()
    }

    /// The block with this content.
    pub(crate) fn find(&self, hash: &BlockHash) -> Option<BlockIdx> {
        self.by_hash.get(hash).copied()
    }

    /// Names the content of a held block. The first block of a content stays: a second one is not cached.
    pub(crate) fn insert(&mut self, hash: BlockHash, block: BlockIdx) {
        let entry = &mut self.entries[block.0 as usize];
        if entry.is_some() || self.by_hash.contains_key(&hash) {
            return;
        }
        self.n_insertions += 1;
        *entry = Some(Entry {
            hash,
            insertion: self.n_insertions,
            left_at: None,
        });
        self.by_hash.insert(hash, block);
    }

    /// The last owner has left `block`. True when the cache keeps it.
    pub(crate) fn leave(&mut self, block: BlockIdx, now: u64) -> bool {
        let Some(entry) = &mut self.entries[block.0 as usize] else {
            return false;
        };
        entry.left_at = Some(now);
        self.evictable
            .insert((now, Reverse(entry.insertion), block));
        true
    }

    /// An owner takes `block` up. True when it was here, held by nobody.
    pub(crate) fn take_up(&mut self, block: BlockIdx) -> bool {
        let Some(entry) = &mut self.entries[block.0 as usize] else {
            return false;
        };
        let Some(left_at) = entry.left_at.take() else {
            return false;
        };
        self.evictable
            .remove(&(left_at, Reverse(entry.insertion), block));
        true
    }

    /// Forgets the content that was unused longest and gives its block away.
    pub(crate) fn evict(&mut self) -> Option<BlockIdx> {
        let (_, _, block) = self.evictable.pop_first()?;
        let entry = self.entries[block.0 as usize]
            .take()
            .expect("an evictable block has an entry");
        self.by_hash.remove(&entry.hash);
        Some(block)
    }

    /// True when the cache keeps `block` and nobody holds it.
    pub(crate) fn is_evictable(&self, block: BlockIdx) -> bool {
        self.entries[block.0 as usize].is_some_and(|entry| entry.left_at.is_some())
    }

    /// Proves that the three indexes agree.
    pub(crate) fn audit(&self) -> Result<(), String> {
        let mut n_entries = 0;
        let mut n_left = 0;
        for (idx, entry) in self.entries.iter().enumerate() {
            let Some(entry) = entry else { continue };
            let block = BlockIdx(u32::try_from(idx).expect("blocks are counted in u32"));
            n_entries += 1;
            if self.find(&entry.hash) != Some(block) {
                return Err(format!(
                    "block {idx} holds {:?}, which is indexed under {:?}",
                    entry.hash,
                    self.find(&entry.hash)
                ));
            }
            if let Some(left_at) = entry.left_at {
                n_left += 1;
                let key = (left_at, Reverse(entry.insertion), block);
                if !self.evictable.contains(&key) {
                    return Err(format!(
                        "block {idx} is held by nobody but missing in the order of eviction"
                    ));
                }
            }
        }
        if n_entries != self.by_hash.len() || n_left != self.evictable.len() {
            return Err(format!(
                "{n_entries} cached blocks for {} hashes, {n_left} of them unheld for {} evictable",
                self.by_hash.len(),
                self.evictable.len()
            ));
        }
        Ok(())
    }
}
