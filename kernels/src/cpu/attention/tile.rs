//! Some queries and one tile of keys: scores, weights, weighted sums of values. The definition is in the parent module.
//!
//! Queries are taken eight at a time over short runs of keys, so that K and V come into the first-level cache once for all
//! of them. Each query's own order of operations is the same as when it is alone.

mod wide;

use crate::cpu::exp::exp;
use crate::cpu::isa::{Isa, dispatch};
use crate::cpu::kv_element::widen;
use crate::cpu::lanes::{N_LANES, add_lanes};
use tidemill_core::KvDtype;

/// Keys of a tile.
pub(super) const TILE_KEYS: usize = 128;
/// Keys of a run, which lie together in memory: blocks hold multiples of 8 positions.
pub(super) const RUN_KEYS: usize = 8;
/// Runs of a tile.
pub(super) const N_RUNS: usize = TILE_KEYS / RUN_KEYS;
/// Largest head.
const HEAD_DIM_MAX: usize = 256;

/// K and V of up to 128 positions of one head.
#[derive(Clone, Copy)]
pub(super) struct Tile<'a> {
    /// `[8, head_dim]` elements each; as many as the queries' keys need.
    pub(super) k: [&'a [u8]; N_RUNS],
    /// The same for V.
    pub(super) v: [&'a [u8]; N_RUNS],
    pub(super) head_dim: usize,
    pub(super) dtype: KvDtype,
}

/// What a tile gives besides its weighted sums.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TilePart {
    /// Largest score.
    pub(super) max: f32,
    /// Sum of weights.
    pub(super) sum: f32,
}

/// One query, and what it gets from a tile.
pub(super) struct Query<'a> {
    /// `[head_dim]`
    pub(super) values: &'a [f32],
    /// Keys of the tile that it sees: 1 to 128.
    pub(super) n_keys: usize,
    /// Weighted sums of V, `[head_dim]`.
    pub(super) sums: &'a mut [f32],
    pub(super) part: TilePart,
}

/// Attends from every query to the keys that it sees.
pub(super) fn attend(isa: Isa, tile: &Tile<'_>, scale: f32, queries: &mut [Query<'_>]) {
    // The vector forms read by pointer: these lengths are all that they rely on.
    let n = tile.head_dim;
    assert!(n.is_multiple_of(N_LANES) && n <= HEAD_DIM_MAX);
    let mut n_keys_most = 0;
    for query in queries.iter() {
        assert!(query.values.len() == n && query.sums.len() == n && query.n_keys <= TILE_KEYS);
        n_keys_most = n_keys_most.max(query.n_keys);
    }
    let run_bytes = RUN_KEYS * n * tile.dtype.bytes();
    for run in 0..n_keys_most.div_ceil(RUN_KEYS) {
        assert!(tile.k[run].len() == run_bytes && tile.v[run].len() == run_bytes);
    }
    dispatch!(
        isa,
        queries
            .iter_mut()
            .for_each(|query| scalar(tile, scale, query)),
        avx2::attend(tile, scale, queries),
        wide::Attend {
            tile,
            scale,
            queries
        }
    );
}

fn scalar(tile: &Tile<'_>, scale: f32, query: &mut Query<'_>) {
    let n = tile.head_dim;
    let token_bytes = n * tile.dtype.bytes();
    let mut row = [0.0; HEAD_DIM_MAX];
    let read = |runs: &[&[u8]; N_RUNS], key: usize, row: &mut [f32]| {
        let at = key % RUN_KEYS * token_bytes;
        let bytes = &runs[key / RUN_KEYS][at..at + token_bytes];
        widen(Isa::Scalar, tile.dtype, bytes, row);
    };
    let mut scores = [0.0; TILE_KEYS];
    let scores = &mut scores[..query.n_keys];
    for (key, score) in scores.iter_mut().enumerate() {
        read(&tile.k, key, &mut row[..n]);
        let mut lanes = [0.0_f32; N_LANES];
        for (i, (q, k)) in query.values.iter().zip(&row[..n]).enumerate() {
            lanes[i % N_LANES] = q.mul_add(*k, lanes[i % N_LANES]);
        }
        *score = add_lanes(&lanes) * scale;
    }
    let larger = |a: f32, b: &f32| if a > *b { a } else { *b };
    let max = scores.iter().fold(f32::NEG_INFINITY, larger);
    let mut lanes = [0.0; N_LANES];
    query.sums.fill(0.0);
    for (key, score) in scores.iter().enumerate() {
        let weight = exp(score - max);
        lanes[key % N_LANES] += weight;
        read(&tile.v, key, &mut row[..n]);
        for (sum, v) in query.sums.iter_mut().zip(&row[..n]) {
            *sum = weight.mul_add(*v, *sum);
        }
    }
    query.part = TilePart {
        max,
        sum: add_lanes(&lanes),
    };
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{KvDtype, N_RUNS, Query, RUN_KEYS, TILE_KEYS, Tile, TilePart};
    use crate::cpu::exp::avx2::exp8;
    use crate::cpu::lanes::avx2::{add_lanes, add_lanes_of_eight, load8, store8, stored};
    use std::arch::x86_64::*;

    const F16: u8 = 0;
    const BF16: u8 = 1;
    const F32: u8 = 2;
    /// Queries that share a run of keys.
    const QUERIES: usize = 8;
    /// Runs of V that stay in the first-level cache while all queries take them.
    const V_RUNS: usize = 4;

    type Scores = [f32; TILE_KEYS];

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn attend(tile: &Tile<'_>, scale: f32, queries: &mut [Query<'_>]) {
        for queries in queries.chunks_mut(QUERIES) {
            match tile.dtype {
                KvDtype::F16 => of_type::<F16>(tile, scale, queries),
                KvDtype::Bf16 => of_type::<BF16>(tile, scale, queries),
                KvDtype::F32 => of_type::<F32>(tile, scale, queries),
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn of_type<const T: u8>(tile: &Tile<'_>, scale: f32, queries: &mut [Query<'_>]) {
        let mut all_scores = [[f32::NEG_INFINITY; TILE_KEYS]; QUERIES];
        for run in 0..N_RUNS {
            for (query, scores) in queries.iter().zip(&mut all_scores) {
                if run * RUN_KEYS < query.n_keys {
                    let bytes = tile.k[run].as_ptr();
                    let scores = &mut scores[run * RUN_KEYS..(run + 1) * RUN_KEYS];
                    match tile.head_dim {
                        64 => score_run::<T, 4>(bytes, query.values, scale, scores),
                        128 => score_run::<T, 8>(bytes, query.values, scale, scores),
                        _ => score_run::<T, 0>(bytes, query.values, scale, scores),
                    }
                }
            }
        }
        for (query, scores) in queries.iter_mut().zip(&mut all_scores) {
            // Scores past the last key count as minus infinity: weight 0.
            scores[query.n_keys..].fill(f32::NEG_INFINITY);
            query.part = weigh(scores, query.n_keys);
            query.sums.fill(0.0);
        }
        for run in (0..N_RUNS).step_by(V_RUNS) {
            for (query, scores) in queries.iter_mut().zip(&all_scores) {
                let keys = run * RUN_KEYS..query.n_keys.min((run + V_RUNS) * RUN_KEYS);
                add_values::<T>(tile, scores, keys, query.sums);
            }
        }
    }

    /// Eight elements from number `at` on.
    ///
    /// # Safety
    /// They exist.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn element8<const T: u8>(bytes: *const u8, at: usize) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe {
            match T {
                F16 => _mm256_cvtph_ps(_mm_loadu_si128(bytes.add(at * 2).cast())),
                BF16 => {
                    let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(bytes.add(at * 2).cast()));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
                }
                _ => _mm256_loadu_ps(bytes.add(at * 4).cast()),
            }
        }
    }

    /// Scores of one run. `STEPS` 16s make a head; 0: as many as there are.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn score_run<const T: u8, const STEPS: usize>(
        bytes: *const u8,
        query: &[f32],
        scale: f32,
        scores: &mut [f32],
    ) {
        let n_steps = if STEPS == 0 { query.len() / 16 } else { STEPS };
        let n = n_steps * 16;
        let mut folded = [_mm256_setzero_ps(); RUN_KEYS];
        for (key, folded) in folded.iter_mut().enumerate() {
            let mut low = _mm256_setzero_ps();
            let mut high = _mm256_setzero_ps();
            for step in 0..n_steps {
                // SAFETY: `attend` checked that the query has `n` elements and the run 8 keys of `n`.
                unsafe {
                    let q = query.as_ptr().add(step * 16);
                    let at = key * n + step * 16;
                    low = _mm256_fmadd_ps(_mm256_loadu_ps(q), element8::<T>(bytes, at), low);
                    let k = element8::<T>(bytes, at + 8);
                    high = _mm256_fmadd_ps(_mm256_loadu_ps(q.add(8)), k, high);
                }
            }
            *folded = _mm256_add_ps(low, high);
        }
        let dots = add_lanes_of_eight(folded);
        store8(_mm256_mul_ps(dots, _mm256_set1_ps(scale)), scores);
    }

    /// Turns scores into weights.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn weigh(scores: &mut Scores, n_keys: usize) -> TilePart {
        let n = n_keys.div_ceil(16) * 16;
        let mut max = _mm256_set1_ps(f32::NEG_INFINITY);
        for scores in scores[..n].as_chunks::<8>().0 {
            max = _mm256_max_ps(max, load8(scores));
        }
        let larger = |a: f32, b: f32| if a > b { a } else { b };
        let lanes = stored(max, max);
        let max = lanes[..8].iter().copied().fold(f32::NEG_INFINITY, larger);
        let all = _mm256_set1_ps(max);
        let mut low = _mm256_setzero_ps();
        let mut high = _mm256_setzero_ps();
        for scores in scores[..n].as_chunks_mut::<16>().0 {
            let a = exp8(_mm256_sub_ps(load8(&scores[..8]), all));
            let b = exp8(_mm256_sub_ps(load8(&scores[8..]), all));
            low = _mm256_add_ps(low, a);
            high = _mm256_add_ps(high, b);
            store8(a, &mut scores[..8]);
            store8(b, &mut scores[8..]);
        }
        TilePart {
            max,
            sum: add_lanes(low, high),
        }
    }

    /// Adds weighted V of some keys, in order, to all sums.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn add_values<const T: u8>(
        tile: &Tile<'_>,
        weights: &Scores,
        keys: std::ops::Range<usize>,
        sums: &mut [f32],
    ) {
        let mut first = 0;
        while first < sums.len() {
            let keys = keys.clone();
            match sums.len() - first {
                64.. => first += add_columns::<T, 8>(tile, weights, keys, (first, sums)),
                32.. => first += add_columns::<T, 4>(tile, weights, keys, (first, sums)),
                _ => first += add_columns::<T, 2>(tile, weights, keys, (first, sums)),
            }
        }
    }

    /// The `8 * W` sums from `first` on; returns how many those are.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn add_columns<const T: u8, const W: usize>(
        tile: &Tile<'_>,
        weights: &Scores,
        keys: std::ops::Range<usize>,
        (first, sums): (usize, &mut [f32]),
    ) -> usize {
        let n = tile.head_dim;
        assert!(first + 8 * W <= n, "the elements exist");
        let sums = &mut sums[first..first + 8 * W];
        let mut found = [_mm256_setzero_ps(); W];
        for (found, sums) in found.iter_mut().zip(sums.as_chunks::<8>().0) {
            *found = load8(sums);
        }
        for key in keys {
            let bytes = tile.v[key / RUN_KEYS].as_ptr();
            let weight = _mm256_set1_ps(weights[key]);
            for (w, found) in found.iter_mut().enumerate() {
                let at = key % RUN_KEYS * n + first + 8 * w;
                // SAFETY: `attend` checked that the run has 8 keys of `n` elements; `first + 8 W <= n` is checked here.
                let values = unsafe { element8::<T>(bytes, at) };
                *found = _mm256_fmadd_ps(weight, values, *found);
            }
        }
        for (found, sums) in found.iter().zip(sums.as_chunks_mut::<8>().0) {
            store8(*found, sums);
        }
        8 * W
    }
}
