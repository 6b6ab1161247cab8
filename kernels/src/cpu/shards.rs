//! One output buffer, written by several threads at places that do not overlap.
//!
//! Rust's `split_at_mut` cannot hand out the strided places (some columns of every row) that a matrix product fills
//! in parallel. This type can; the operation that uses it promises that its parts write disjoint places.

use std::marker::PhantomData;
use std::ops::Range;

/// A mutable slice that may be cut up by many threads at once.
pub(crate) struct Shards<'a, T> {
    start: *mut T,
    len: usize,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: a shard is an exclusive borrow of `T`s that no other thread touches at the same time (the contract of
// `range`), which is what sending `&mut [T]` to another thread needs `T: Send` for.
unsafe impl<T: Send> Sync for Shards<'_, T> {}

impl<'a, T> Shards<'a, T> {
    pub(crate) fn new(whole: &'a mut [T]) -> Self {
        Self {
            start: whole.as_mut_ptr(),
            len: whole.len(),
            owner: PhantomData,
        }
    }

    /// The elements of `range`.
    ///
    /// # Safety
    /// While the result lives, no other shard that overlaps `range` may exist.
    #[allow(clippy::mut_from_ref)] // The point of the type; exclusiveness is the caller's promise.
    #[inline]
    pub(crate) unsafe fn range(&self, range: Range<usize>) -> &mut [T] {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "a shard lies within its buffer"
        );
        // SAFETY: the range was just checked to lie within the borrowed slice, which lives for 'a; the caller
        // promises that nothing else refers to these elements.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}
