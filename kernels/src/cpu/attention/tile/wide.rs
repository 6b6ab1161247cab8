//! Sixteen lanes: 16 elements of a head, or the scores of 16 keys.
//!
//! Scores of 16 keys are made together, since adding up the lanes of 16 sums at once costs less than one by one. Values are
//! read once for up to four queries.

use super::super::tile::{HEAD_DIM_MAX, N_RUNS, Query, RUN_KEYS, TILE_KEYS, Tile, TilePart};
use crate::cpu::exp::exp_wide;
use crate::cpu::lanes::add_lanes;
use crate::cpu::wide::{Bf16, Element, F16, F32, Stored, Wide, WideKernel, sixteen};
use std::ops::Range;
use tidemill_core::KvDtype;

/// Queries whose scores are held at a time.
const QUERIES: usize = 8;
/// Queries that share a read of V.
const SHARING: usize = 4;
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
    let mut wide_keys = [0.0; KEYS * HEAD_DIM_MAX];
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
        let shares = T::ELEMENT != Element::F32 && queries.len() - sees > 1;
        if shares {
            let wide_runs = wide_keys[..KEYS * n].chunks_exact_mut(RUN_KEYS * n);
            for (wide_run, run) in wide_runs.zip([low, high]) {
                widen_run::<W, T>(w, run, wide_run);
            }
        }
        for (query, scores) in queries.iter().zip(&mut all_scores) {
            if query.n_keys > first {
                let scores = &mut scores[first..first + KEYS];
                if shares {
                    let (low, high) = wide_keys[..KEYS * n].split_at(RUN_KEYS * n);
                    let runs = [low.as_ptr().cast(), high.as_ptr().cast()];
                    score::<W, F32>(w, runs, query.values, (scale, scores));
                } else {
                    score::<W, T>(w, [low, high], query.values, (scale, scores));
                }
            }
        }
    }
    for (query, scores) in queries.iter_mut().zip(&mut all_scores) {
        // Scores past the last key count as minus infinity: weight 0.
        scores[query.n_keys..].fill(f32::NEG_INFINITY);
        query.part = weigh(w, scores, query.n_keys);
    }
    for (queries, scores) in queries.chunks_mut(SHARING).zip(all_scores.chunks(SHARING)) {
        add_values::<W, T>(w, tile, scores, queries);
    }
}

/// The keys of a run as f32.
#[inline(always)]
fn widen_run<W: Wide, T: Stored>(w: W, run: *const u8, target: &mut [f32]) {
    for (i, target) in target.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        // SAFETY: `attend` checked that the run has 8 keys of `head_dim` elements, which is what the target has room for.
        unsafe {
            let values = sixteen::<W, T>(w, run.add(i * 16 * T::ELEMENT.bytes()));
            w.store(values, target.as_mut_ptr());
        }
    }
}

#[inline(always)]
fn score<W: Wide, T: Stored>(w: W, runs: [*const u8; 2], query: &[f32], out: (f32, &mut [f32])) {
    // The count of steps known, the loop over a key's elements is unrolled.
    match query.len() {
        64 => score_steps::<W, T, 4>(w, runs, query, out),
        128 => score_steps::<W, T, 8>(w, runs, query, out),
        _ => score_steps::<W, T, 0>(w, runs, query, out),
    }
}

/// Scores of two runs. `STEPS` 16s make a head; 0: as many as there are.
#[inline(always)]
fn score_steps<W: Wide, T: Stored, const STEPS: usize>(
    w: W,
    runs: [*const u8; 2],
    query: &[f32],
    (scale, scores): (f32, &mut [f32]),
) {
    let n_steps = if STEPS == 0 { query.len() / 16 } else { STEPS };
    let key_bytes = n_steps * 16 * T::ELEMENT.bytes();
    let mut sums = [w.splat(0.0); KEYS];
    for (key, sum) in sums.iter_mut().enumerate() {
        for step in 0..n_steps {
            // SAFETY: `attend` checked that the query has `n_steps` 16s and each run 8 keys of as many.
            unsafe {
                let at = runs[key / RUN_KEYS].add(key % RUN_KEYS * key_bytes);
                let k = sixteen::<W, T>(w, at.add(step * 16 * T::ELEMENT.bytes()));
                *sum = w.fma(w.load(query.as_ptr().add(step * 16)), k, *sum);
            }
        }
    }
    let dots = w.add_lanes_of_sixteen(sums);
    assert_eq!(scores.len(), KEYS, "a score for each key");
    // SAFETY: just checked.
    unsafe { w.store(w.mul(dots, w.splat(scale)), scores.as_mut_ptr()) };
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

/// Weighted V of all keys of up to `SHARING` queries.
#[inline(always)]
fn add_values<W: Wide, T: Stored>(
    w: W,
    tile: &Tile<'_>,
    weights: &[Scores],
    queries: &mut [Query<'_>],
) {
    match queries {
        [a, b, c, d] => add_shared::<W, T, 4>(w, tile, weights, [a, b, c, d]),
        [a, b, c] => add_shared::<W, T, 3>(w, tile, weights, [a, b, c]),
        [a, b] => add_shared::<W, T, 2>(w, tile, weights, [a, b]),
        rest => {
            for (query, weights) in rest.iter_mut().zip(weights) {
                add_shared::<W, T, 1>(w, tile, std::slice::from_ref(weights), [query]);
            }
        }
    }
}

/// Keys that all N queries see together, then the rest of each by itself: the order of a query's keys is theirs.
#[inline(always)]
fn add_shared<W: Wide, T: Stored, const N: usize>(
    w: W,
    tile: &Tile<'_>,
    weights: &[Scores],
    mut queries: [&mut Query<'_>; N],
) {
    let mut shared = TILE_KEYS;
    for query in &queries {
        shared = shared.min(query.n_keys);
    }
    let weights = &weights[..N];
    let mut column = 0;
    while column < tile.head_dim {
        let left = tile.head_dim - column;
        column += if left >= 64 {
            add_columns::<W, T, N, 4>(w, (tile, weights), shared, (column, &mut queries))
        } else {
            add_columns::<W, T, N, 1>(w, (tile, weights), shared, (column, &mut queries))
        };
    }
}

/// The `16 * C` sums from `column` on of all queries; returns how many those are.
#[inline(always)]
fn add_columns<W: Wide, T: Stored, const N: usize, const C: usize>(
    w: W,
    (tile, weights): (&Tile<'_>, &[Scores]),
    shared: usize,
    (column, queries): (usize, &mut [&mut Query<'_>; N]),
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
