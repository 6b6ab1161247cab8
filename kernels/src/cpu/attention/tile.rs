//! One query and one tile of keys: scores, weights, weighted sum of values. The definition is in the parent module.

use crate::cpu::exp::exp;
use crate::cpu::isa::{Isa, dispatch};
use crate::cpu::kv_element::widen;
use crate::cpu::lanes::{N_LANES, add_lanes};
use tidemill_core::KvDtype;

/// Keys of a tile.
pub(super) const TILE_KEYS: usize = 128;
/// Keys that lie together in memory whatever the block: blocks hold multiples of 8 positions.
pub(super) const TILE_CHUNK_KEYS: usize = 8;
/// Chunks of a tile.
pub(super) const N_CHUNKS: usize = TILE_KEYS / TILE_CHUNK_KEYS;
/// Largest head.
const HEAD_DIM_MAX: usize = 256;

/// K and V of up to 128 positions of one head.
#[derive(Clone, Copy)]
pub(super) struct Tile<'a> {
    /// `[8, head_dim]` elements each; as many as hold `n_keys`.
    pub(super) k: [&'a [u8]; N_CHUNKS],
    /// The same for V.
    pub(super) v: [&'a [u8]; N_CHUNKS],
    /// 1 to 128.
    pub(super) n_keys: usize,
    pub(super) head_dim: usize,
    pub(super) dtype: KvDtype,
}

/// What a tile gives besides its weighted sums.
#[derive(Clone, Copy, Debug)]
pub(super) struct TilePart {
    /// Largest score.
    pub(super) max: f32,
    /// Sum of weights.
    pub(super) sum: f32,
}

impl Tile<'_> {
    /// The tile's first keys.
    pub(super) fn first(&self, n_keys: usize) -> Self {
        Self {
            n_keys: n_keys.min(self.n_keys),
            ..*self
        }
    }
}

/// Attends from `query` to the tile; weighted sums go to `sums` (`[head_dim]`).
pub(super) fn attend(
    isa: Isa,
    tile: &Tile<'_>,
    (query, scale): (&[f32], f32),
    sums: &mut [f32],
) -> TilePart {
    // The vector forms read by pointer: these lengths are all that they rely on.
    let n = tile.head_dim;
    assert!(
        n.is_multiple_of(N_LANES) && n <= HEAD_DIM_MAX && (1..=TILE_KEYS).contains(&tile.n_keys)
    );
    assert!(
        query.len() == n && sums.len() == n,
        "one element for each of the head"
    );
    let chunk_bytes = TILE_CHUNK_KEYS * n * tile.dtype.bytes();
    for chunk in 0..tile.n_keys.div_ceil(TILE_CHUNK_KEYS) {
        assert!(tile.k[chunk].len() == chunk_bytes && tile.v[chunk].len() == chunk_bytes);
    }
    dispatch!(
        isa,
        scalar(tile, query, scale, sums),
        avx2::attend(tile, query, scale, sums)
    )
}

fn scalar(tile: &Tile<'_>, query: &[f32], scale: f32, sums: &mut [f32]) -> TilePart {
    let n = tile.head_dim;
    let token_bytes = n * tile.dtype.bytes();
    let mut row = [0.0; HEAD_DIM_MAX];
    let read = |chunks: &[&[u8]; N_CHUNKS], key: usize, row: &mut [f32]| {
        let at = key % TILE_CHUNK_KEYS * token_bytes;
        let bytes = &chunks[key / TILE_CHUNK_KEYS][at..at + token_bytes];
        widen(Isa::Scalar, tile.dtype, bytes, row);
    };
    let mut scores = [0.0; TILE_KEYS];
    let scores = &mut scores[..tile.n_keys];
    for (key, score) in scores.iter_mut().enumerate() {
        read(&tile.k, key, &mut row[..n]);
        let mut lanes = [0.0_f32; N_LANES];
        for (i, (q, k)) in query.iter().zip(&row[..n]).enumerate() {
            lanes[i % N_LANES] = q.mul_add(*k, lanes[i % N_LANES]);
        }
        *score = add_lanes(&lanes) * scale;
    }
    let larger = |a: f32, b: &f32| if a > *b { a } else { *b };
    let max = scores.iter().fold(f32::NEG_INFINITY, larger);
    let mut lanes = [0.0; N_LANES];
    sums.fill(0.0);
    for (key, score) in scores.iter().enumerate() {
        let weight = exp(score - max);
        lanes[key % N_LANES] += weight;
        read(&tile.v, key, &mut row[..n]);
        for (sum, v) in sums.iter_mut().zip(&row[..n]) {
            *sum = weight.mul_add(*v, *sum);
        }
    }
    TilePart {
        max,
        sum: add_lanes(&lanes),
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{KvDtype, TILE_CHUNK_KEYS, TILE_KEYS, Tile, TilePart};
    use crate::cpu::exp::avx2::exp8;
    use crate::cpu::lanes::avx2::{add_lanes, add_lanes_of_eight, load8, store8, stored};
    use std::arch::x86_64::*;

    const F16: u8 = 0;
    const BF16: u8 = 1;
    const F32: u8 = 2;

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn attend(tile: &Tile<'_>, query: &[f32], scale: f32, sums: &mut [f32]) -> TilePart {
        match tile.dtype {
            KvDtype::F16 => of_type::<F16>(tile, query, scale, sums),
            KvDtype::Bf16 => of_type::<BF16>(tile, query, scale, sums),
            KvDtype::F32 => of_type::<F32>(tile, query, scale, sums),
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn of_type<const T: u8>(
        tile: &Tile<'_>,
        query: &[f32],
        scale: f32,
        sums: &mut [f32],
    ) -> TilePart {
        let mut scores = [f32::NEG_INFINITY; TILE_KEYS];
        match query.len() {
            64 => score::<T, 4>(tile, query, scale, &mut scores),
            128 => score::<T, 8>(tile, query, scale, &mut scores),
            _ => score::<T, 0>(tile, query, scale, &mut scores),
        }
        // Scores past the last key count as minus infinity: weight 0.
        scores[tile.n_keys..].fill(f32::NEG_INFINITY);
        let part = weigh(&mut scores, tile.n_keys);
        let mut first = 0;
        while first < query.len() {
            match query.len() - first {
                64.. => first += add_values::<T, 8>(tile, &scores, first, sums),
                32.. => first += add_values::<T, 4>(tile, &scores, first, sums),
                _ => first += add_values::<T, 2>(tile, &scores, first, sums),
            }
        }
        part
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

    /// Scores of all keys, and of the rest of the last chunk. `STEPS` 16s make a head; 0: as many as there are.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn score<const T: u8, const STEPS: usize>(
        tile: &Tile<'_>,
        query: &[f32],
        scale: f32,
        scores: &mut [f32; TILE_KEYS],
    ) {
        let n_steps = if STEPS == 0 { query.len() / 16 } else { STEPS };
        let n = n_steps * 16;
        let n_chunks = tile.n_keys.div_ceil(TILE_CHUNK_KEYS);
        for (chunk, scores) in tile.k[..n_chunks].iter().zip(scores.as_chunks_mut::<8>().0) {
            let bytes = chunk.as_ptr();
            let mut folded = [_mm256_setzero_ps(); TILE_CHUNK_KEYS];
            for (key, folded) in folded.iter_mut().enumerate() {
                let mut low = _mm256_setzero_ps();
                let mut high = _mm256_setzero_ps();
                for step in 0..n_steps {
                    // SAFETY: `attend` checked that the query has `n` elements and the chunk 8 keys of `n`.
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
    }

    /// Turns scores into weights.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn weigh(scores: &mut [f32; TILE_KEYS], n_keys: usize) -> TilePart {
        let n = n_keys.div_ceil(16) * 16;
        let mut max = _mm256_set1_ps(f32::NEG_INFINITY);
        for scores in scores[..n].as_chunks::<8>().0 {
            max = _mm256_max_ps(max, load8(scores));
        }
        let larger = |a: f32, b: f32| if a > b { a } else { b };
        let max = stored(max, max)[..8]
            .iter()
            .copied()
            .fold(f32::NEG_INFINITY, larger);
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

    /// Weighted sums of the `8 * W` elements from `first` on; returns how many those are.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn add_values<const T: u8, const W: usize>(
        tile: &Tile<'_>,
        weights: &[f32; TILE_KEYS],
        first: usize,
        sums: &mut [f32],
    ) -> usize {
        let n = tile.head_dim;
        assert!(first + 8 * W <= n, "the elements exist");
        let mut found = [_mm256_setzero_ps(); W];
        for (key, weight) in weights[..tile.n_keys].iter().enumerate() {
            let bytes = tile.v[key / TILE_CHUNK_KEYS].as_ptr();
            let weight = _mm256_set1_ps(*weight);
            for (w, found) in found.iter_mut().enumerate() {
                let at = key % TILE_CHUNK_KEYS * n + first + 8 * w;
                // SAFETY: `attend` checked that the chunk has 8 keys of `n` elements; `first + 8 W <= n` is checked here.
                let values = unsafe { element8::<T>(bytes, at) };
                *found = _mm256_fmadd_ps(weight, values, *found);
            }
        }
        for (found, sums) in found.iter().zip(sums[first..].as_chunks_mut::<8>().0) {
            store8(*found, sums);
        }
        8 * W
    }
}
