//! Sixteen lanes: 16 elements of a head, or the scores of 16 keys.
//!
//! Scores of 16 keys are made together, since adding up the lanes of 16 sums at once costs less than one by one. Keys are read
//! once for up to eight queries, values for up to six.

use super::super::tile::{N_RUNS, Query, RUN_KEYS, TILE_KEYS, Tile, TilePart};
use crate::cpu::exp::exp_wide;
use crate::cpu::lanes::add_lanes;
use crate::cpu::wide::{Bf16, F16, F32, Stored, Wide, WideKernel, sixteen};
use std::ops::Range;
use tidemill_core::KvDtype;

/// Queries whose scores are held at a time.
const QUERIES: usize = 8;
/// Keys whose scores are made together: two runs.
const KEYS: usize = 2 * RUN_KEYS;

type Scores = [f32; TILE_KEYS];

/// All queries on one tile. Lengths are those that `attend` checks.
pub(super) struct Attend<'a, 'q> {
    pub(super) tile: &'a Tile<'a>,
    pub(super) scale: f32,
    pub(super) queries: &'a mut [Query<'q>],
}

impl WideKernel for Attend<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<W: Wide>(self, w: W) {
        for queries in self.queries.chunks_mut(QUERIES) {
            match self.tile.dtype {
                KvDtype::F16 => of_type::<W, F16>(w, self.tile, self.scale, queries),
                KvDtype::Bf16 => of_type::<W, Bf16>(w, self.tile, self.scale, queries),
                KvDtype::F32 => of_type::<W, F32>(w, self.tile, self.scale, queries),
            }
        }
    }
}

#[inline(always)]
fn of_type<W: Wide, T: Stored>(w: W, tile: &Tile<'_>, scale: f32, queries: &mut [Query<'_>]) {
    let mut all_scores = [[f32::NEG_INFINITY; TILE_KEYS]; QUERIES];
    let n = tile.head_dim;
    for first in (0..TILE_KEYS).step_by(KEYS) {
        let Some(sees) = queries.iter().position(|query| query.n_keys > first) else {
            break;
        };
        let run = first / RUN_KEYS;
        let low = tile.k[run].as_ptr();
        // A run that no query sees need not be there; scores of its keys are overwritten below.
        let high = if tile.k[run + 1].is_empty() {
            low
        } else {
            tile.k[run + 1].as_ptr()
        };
        let (queries, scores) = (&queries[sees..], &mut all_scores[sees..]);
        // The count of steps known, the loop over a key's elements is unrolled.
        match n {
            64 => score::<W, T, 4>(w, ([low, high], n), scale, (queries, scores, first)),
            128 => score::<W, T, 8>(w, ([low, high], n), scale, (queries, scores, first)),
            _ => score::<W, T, 0>(w, ([low, high], n), scale, (queries, scores, first)),
        }
    }
    for (query, scores) in queries.iter_mut().zip(&mut all_scores) {
        // Scores past the last key count as minus infinity: weight 0.
        scores[query.n_keys..].fill(f32::NEG_INFINITY);
        query.part = weigh(w, scores, query.n_keys);
    }
    add_values::<W, T>(w, tile, &all_scores, queries);
}

/// Scores of two runs for all queries. `STEPS` 16s make a head; 0: as many as there are.
#[inline(always)]
fn score<W: Wide, T: Stored, const STEPS: usize>(
    w: W,
    (runs, n): ([*const u8; 2], usize),
    scale: f32,
    (queries, scores, first): (&[Query<'_>], &mut [Scores], usize),
) {
    let mut folded = [[w.splat(0.0); KEYS / 4]; QUERIES];
    for four in 0..KEYS / 4 {
        let key_bytes = n * T::ELEMENT.bytes();
        // SAFETY: `attend` checked that each run has 8 keys of `n` elements.
        let at = unsafe { runs[four / 2].add(four % 2 * 4 * key_bytes) };
        for (query, folded) in queries.iter().zip(&mut folded) {
            // SAFETY: as above, and that a query has `n` elements.
            folded[four] = unsafe { four_keys::<W, T, STEPS>(w, (at, n), query.values.as_ptr()) };
        }
    }
    for (scores, folded) in scores.iter_mut().zip(folded).take(queries.len()) {
        let dots = w.mul(w.fold_fours(folded), w.splat(scale));
        let scores = &mut scores[first..first + KEYS];
        // SAFETY: a score for each of the 16 lanes.
        unsafe { w.store(dots, scores.as_mut_ptr()) };
    }
}

/// The sums of four keys times a query, partly folded.
///
/// # Safety
/// Four keys of `n` elements lie at `at`, and as many elements at `query`.
#[inline(always)]
unsafe fn four_keys<W: Wide, T: Stored, const STEPS: usize>(
    w: W,
    (at, n): (*const u8, usize),
    query: *const f32,
) -> W::F {
    let n_steps = if STEPS == 0 { n / 16 } else { STEPS };
    let mut sums = [w.splat(0.0); 4];
    for step in 0..n_steps {
        // SAFETY: the caller's promise.
        unsafe {
            let q = w.load(query.add(step * 16));
            for (key, sum) in sums.iter_mut().enumerate() {
                let element = key * n_steps * 16 + step * 16;
                let k = sixteen::<W, T>(w, at.add(element * T::ELEMENT.bytes()));
                *sum = w.fma(q, k, *sum);
            }
        }
    }
    w.fold_four(sums)
}

/// Turns scores into weights.
#[inline(always)]
fn weigh<W: Wide>(w: W, scores: &mut Scores, n_keys: usize) -> TilePart {
    let scores = &mut scores[..n_keys.div_ceil(16) * 16];
    let mut max = w.splat(f32::NEG_INFINITY);
    for scores in scores.as_chunks::<16>().0 {
        // SAFETY: the array holds 16 floats.
        max = w.max(max, unsafe { w.load(scores.as_ptr()) });
    }
    let mut largest = f32::NEG_INFINITY;
    for score in w.array(max) {
        largest = if largest > score { largest } else { score };
    }
    let mut sum = w.splat(0.0);
    for scores in scores.as_chunks_mut::<16>().0 {
        // SAFETY: as above.
        unsafe {
            let score = w.load(scores.as_ptr());
            let weight = exp_wide(w, w.sub(score, w.splat(largest)));
            sum = w.add(sum, weight);
            w.store(weight, scores.as_mut_ptr());
        }
    }
    TilePart {
        max: largest,
        sum: add_lanes(&w.array(sum)),
    }
}

/// Weighted V of all keys.
#[inline(always)]
fn add_values<W: Wide, T: Stored>(
    w: W,
    tile: &Tile<'_>,
    mut weights: &[Scores],
    mut queries: &mut [Query<'_>],
) {
    while !queries.is_empty() {
        let n = match queries.len() {
            6.. => add_shared::<W, T, 6>(w, tile, weights, queries),
            4.. => add_shared::<W, T, 4>(w, tile, weights, queries),
            3 => add_shared::<W, T, 3>(w, tile, weights, queries),
            2 => add_shared::<W, T, 2>(w, tile, weights, queries),
            _ => add_shared::<W, T, 1>(w, tile, weights, queries),
        };
        weights = &weights[n..];
        queries = &mut queries[n..];
    }
}

/// The first N queries; returns N. Keys that all see come together, then the rest of each by itself: the order of a
/// query's keys is theirs.
#[inline(always)]
fn add_shared<W: Wide, T: Stored, const N: usize>(
    w: W,
    tile: &Tile<'_>,
    weights: &[Scores],
    queries: &mut [Query<'_>],
) -> usize {
    let (weights, queries) = (&weights[..N], &mut queries[..N]);
    let mut shared = TILE_KEYS;
    for query in queries.iter() {
        shared = shared.min(query.n_keys);
    }
    let mut column = 0;
    while column < tile.head_dim {
        let left = tile.head_dim - column;
        column += if left >= 64 {
            add_columns::<W, T, N, 4>(w, (tile, weights), shared, (column, queries))
        } else {
            add_columns::<W, T, N, 1>(w, (tile, weights), shared, (column, queries))
        };
    }
    N
}

/// The `16 * C` sums from `column` on of all queries; returns how many those are.
#[inline(always)]
fn add_columns<W: Wide, T: Stored, const N: usize, const C: usize>(
    w: W,
    (tile, weights): (&Tile<'_>, &[Scores]),
    shared: usize,
    (column, queries): (usize, &mut [Query<'_>]),
) -> usize {
    assert!(column + 16 * C <= tile.head_dim, "the elements exist");
    let mut sums = [[w.splat(0.0); C]; N];
    add_keys::<W, T, N, C>(w, (tile, column), weights, (0..shared, &mut sums));
    for (q, query) in queries.iter_mut().enumerate() {
        let own = &mut sums[q..q + 1];
        let own: &mut [[W::F; C]; 1] = own.try_into().expect("one query's sums");
        let keys = shared..query.n_keys;
        add_keys::<W, T, 1, C>(w, (tile, column), &weights[q..], (keys, own));
        let target = &mut query.sums[column..column + 16 * C];
        for (sum, target) in own[0].iter().zip(target.as_chunks_mut::<16>().0) {
            // SAFETY: the array holds 16 floats.
            unsafe { w.store(*sum, target.as_mut_ptr()) };
        }
    }
    16 * C
}

/// Adds some keys, in order, to the sums of N queries.
#[inline(always)]
fn add_keys<W: Wide, T: Stored, const N: usize, const C: usize>(
    w: W,
    (tile, column): (&Tile<'_>, usize),
    weights: &[Scores],
    (keys, sums): (Range<usize>, &mut [[W::F; C]; N]),
) {
    let weights = &weights[..N];
    let mut found = *sums;
    for key in keys {
        let run: &[u8] = tile.v[key / RUN_KEYS % N_RUNS];
        let mut values = [w.splat(0.0); C];
        for (c, values) in values.iter_mut().enumerate() {
            let at = key % RUN_KEYS * tile.head_dim + column + 16 * c;
            // SAFETY: `attend` checked that the run of a key that a query sees has 8 keys of `head_dim` elements;
            // `add_columns` that the columns exist.
            *values = unsafe { sixteen::<W, T>(w, run.as_ptr().add(at * T::ELEMENT.bytes())) };
        }
        for (found, weights) in found.iter_mut().zip(weights) {
            let weight = w.splat(weights[key]);
            for (sum, values) in found.iter_mut().zip(values) {
                *sum = w.fma(weight, values, *sum);
            }
        }
    }
    *sums = found;
}
