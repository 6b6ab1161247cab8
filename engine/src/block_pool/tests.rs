//! Owners, promises and the cache, one rule each; and that the audit sees what is wrong.

use super::*;

const A: Owner = Owner::Sequence(SequenceId(1));
const B: Owner = Owner::Lease(RequestId(2));
const C: Owner = Owner::Read(ReadId(3));

fn hash(n: u8) -> BlockHash {
    BlockHash([n; 16])
}

/// Allocates and caches one block for each hash, then lets go of them together.
fn cache_prefix(pool: &mut BlockPool, hashes: &[BlockHash]) -> Vec<BlockIdx> {
    let owner = Owner::Import(RequestId(77));
    let blocks: Vec<_> = hashes
        .iter()
        .map(|&hash| {
            let block = pool.allocate(owner).expect("free");
            pool.insert(hash, block);
            block
        })
        .collect();
    pool.release_all(owner);
    blocks
}

#[test]
fn a_block_is_free_when_its_last_owner_has_left() {
    let mut pool = BlockPool::new(2);
    let block = pool.allocate(A).expect("free");
    pool.share(block, B);
    pool.share(block, C);
    pool.share(block, C);
    pool.release(block, A);
    pool.release_all(B);
    pool.release_all(B);
    assert_eq!(pool.n_owners_of(block), 1);
    assert_eq!(pool.n_free(), 1);
    pool.release_all(C);
    assert_eq!(pool.n_free(), 2);
    pool.audit().expect("sound");
}

#[test]
fn a_reservation_is_all_or_nothing_and_is_kept() {
    let mut pool = BlockPool::new(3);
    assert!(pool.reserve(2));
    assert!(!pool.reserve(2));
    assert_eq!(pool.n_free(), 1);
    assert!(pool.allocate(A).is_some());
    assert!(pool.allocate(A).is_none(), "the rest is promised");
    pool.allocate_reserved(B);
    pool.unreserve(1);
    assert!(pool.allocate(A).is_some());
    assert_eq!(pool.n_reserved(), 0);
    pool.audit().expect("sound");
}

#[test]
fn transfer_moves_all_blocks_also_shared_ones() {
    let mut pool = BlockPool::new(3);
    let first = pool.allocate(A).expect("free");
    let second = pool.allocate(A).expect("free");
    pool.share(second, B);
    pool.transfer(A, B);
    assert_eq!(pool.blocks_of(A), []);
    assert!(pool.is_owner(first, B) && pool.is_owner(second, B));
    assert_eq!(pool.n_owners_of(second), 1);
    pool.audit().expect("sound");
}

#[test]
fn the_longest_run_from_the_start_is_found() {
    let mut pool = BlockPool::new(8);
    let blocks = cache_prefix(&mut pool, &[hash(1), hash(2), hash(3)]);
    assert_eq!(pool.n_free(), 8, "cached blocks can be evicted at once");
    let asked = [hash(1), hash(2), hash(9), hash(3)];
    let run = pool.peek(&asked);
    assert_eq!((run.n_blocks, run.n_unowned), (2, 2));
    assert_eq!(pool.look_up(&asked, A), blocks[..2]);
    assert_eq!(pool.n_free(), 6);
    assert_eq!(pool.peek(&asked).n_unowned, 0);
    assert!(
        pool.look_up(&[hash(3)], B).len() == 1,
        "each hash stands for its whole prefix"
    );
    pool.audit().expect("sound");
}

#[test]
fn eviction_takes_the_longest_unused_prefix_from_its_end() {
    let mut pool = BlockPool::new(5);
    let old = cache_prefix(&mut pool, &[hash(1), hash(2)]);
    let new = cache_prefix(&mut pool, &[hash(3), hash(4)]);
    // Used again: now the first one is the younger.
    pool.look_up(&[hash(1), hash(2)], A);
    pool.release_all(A);
    let taken: Vec<_> = (0..5).map(|_| pool.allocate(B).expect("free")).collect();
    assert_eq!(taken[1..], [new[1], new[0], old[1], old[0]]);
    assert_eq!(pool.n_cached(), 0);
    pool.audit().expect("sound");
}

#[test]
fn a_held_block_is_never_evicted_and_a_look_up_breaks_no_promise() {
    let mut pool = BlockPool::new(2);
    cache_prefix(&mut pool, &[hash(1), hash(2)]);
    assert_eq!(pool.look_up(&[hash(1)], A).len(), 1);
    assert!(pool.reserve(1));
    assert_eq!(pool.look_up(&[hash(1), hash(2)], B).len(), 1);
    pool.allocate_reserved(B);
    assert!(pool.allocate(B).is_none());
    assert_eq!(pool.peek(&[hash(1)]).n_blocks, 1);
    pool.audit().expect("sound");
}

#[test]
fn equal_content_is_cached_once() {
    let mut pool = BlockPool::new(2);
    let first = pool.allocate(A).expect("free");
    let second = pool.allocate(A).expect("free");
    pool.insert(hash(1), first);
    pool.insert(hash(1), second);
    pool.insert(hash(2), first);
    assert_eq!(pool.n_cached(), 1);
    pool.release_all(A);
    assert_eq!(pool.look_up(&[hash(1)], B), [first]);
    pool.audit().expect("sound");
}

#[test]
#[should_panic(expected = "only an owned block can be shared")]
fn a_free_block_cannot_be_shared() {
    BlockPool::new(1).share(BlockIdx(0), A);
}

#[test]
#[should_panic(expected = "only an owner can release")]
fn a_double_release_is_a_broken_invariant() {
    let mut pool = BlockPool::new(1);
    let block = pool.allocate(A).expect("free");
    pool.release(block, A);
    pool.release(block, A);
}

#[test]
fn the_audit_names_what_is_wrong() {
    let sound = || {
        let mut pool = BlockPool::new(3);
        cache_prefix(&mut pool, &[hash(1)]);
        let _ = pool.allocate(A);
        pool
    };
    sound().audit().expect("sound");
    let mut pool = sound();
    pool.n_owners[1] += 1;
    assert!(pool.audit().expect_err("owners").contains("counts"));
    let mut pool = sound();
    let lost = pool.free.pop().expect("one is free");
    assert!(
        pool.audit()
            .expect_err("lost")
            .contains(&format!("block {}", lost.0))
    );
    let mut pool = sound();
    pool.free.push(pool.free[0]);
    assert!(pool.audit().expect_err("twice").contains("2 times free"));
    let mut pool = sound();
    pool.n_reserved = 9;
    assert!(pool.audit().expect_err("reserved").contains("reserved"));
    let mut pool = sound();
    pool.cache.take_up(BlockIdx(0));
    assert!(pool.audit().is_err());
    let mut pool = sound();
    pool.owned.insert((A, BlockIdx(9)));
    assert!(
        pool.audit()
            .expect_err("outside")
            .contains("does not exist")
    );
}
