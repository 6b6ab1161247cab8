//! Tiles that a sliding window cuts: keys before the query's window are not there.
//!
//! A query at position p with a window of w sees positions p - w + 1 to p (Child et al. 2019; Jiang et al. 2023). Tiles stay at
//! their fixed absolute positions: a tile wholly before the window is skipped, the one in which the window begins is taken
//! here, all others as without a window. Within the cut tile the definition is that of `tile` over the keys that are left;
//! a key's lane is still its place in the tile. A query has at most one such tile, so this form is one source for all
//! instruction sets, compiled for AVX2 where there is one.

use super::tile::{N_RUNS, Query, RUN_KEYS, TILE_KEYS, Tile, TilePart};
use crate::cpu::exp::exp;
use crate::cpu::isa::{Isa, dispatch};
use crate::cpu::kv_element::widen;
use crate::cpu::lanes::{N_LANES, add_lanes};

/// Largest head.
const HEAD_DIM_MAX: usize = 256;

/// Of the keys of a tile, those that a query sees: `first..n_keys`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Seen {
    pub(super) first: usize,
    pub(super) n_keys: usize,
}

impl Seen {
    /// Of tile `tile_idx`, for a query at `position`; `None` when it sees no key of it.
    pub(super) fn new(position: usize, window: Option<usize>, tile_idx: usize) -> Option<Self> {
        let tile_start = tile_idx * TILE_KEYS;
        let n_keys = (position + 1).saturating_sub(tile_start).min(TILE_KEYS);
        let first = first_position(position, window).saturating_sub(tile_start);
        (first < n_keys).then_some(Self { first, n_keys })
    }
}

/// The first position that a query sees.
pub(super) fn first_position(position: usize, window: Option<usize>) -> usize {
    window.map_or(0, |window| (position + 1).saturating_sub(window))
}

/// Attends from a query to the keys of a tile from `first` on.
pub(super) fn attend_from(
    isa: Isa,
    tile: &Tile<'_>,
    scale: f32,
    (query, first): (&mut Query<'_>, usize),
) {
    assert!(first < query.n_keys && query.n_keys <= TILE_KEYS);
    assert!(tile.head_dim <= HEAD_DIM_MAX && query.values.len() == tile.head_dim);
    dispatch!(
        isa,
        attend(Isa::Scalar, tile, scale, (query, first)),
        avx2::attend(isa, tile, scale, (query, first))
    );
}

#[inline(always)]
fn attend(isa: Isa, tile: &Tile<'_>, scale: f32, (query, first): (&mut Query<'_>, usize)) {
    let n = tile.head_dim;
    let mut scores = [f32::NEG_INFINITY; TILE_KEYS];
    let mut row = [0.0_f32; HEAD_DIM_MAX];
    let row = &mut row[..n];
    let seen = &mut scores[..query.n_keys];
    for (key, score) in seen.iter_mut().enumerate().skip(first) {
        read(isa, tile, &tile.k, (key, &mut *row));
        let mut lanes = [0.0_f32; N_LANES];
        let (queries, keys) = (query.values.as_chunks().0, row.as_chunks::<N_LANES>().0);
        for (queries, keys) in queries.iter().zip(keys) {
            let queries: &[f32; N_LANES] = queries;
            for i in 0..N_LANES {
                lanes[i] = queries[i].mul_add(keys[i], lanes[i]);
            }
        }
        *score = add_lanes(&lanes) * scale;
    }
    let larger = |a: f32, b: &f32| if a > *b { a } else { *b };
    let max = seen[first..].iter().fold(f32::NEG_INFINITY, larger);
    let mut lanes = [0.0; N_LANES];
    query.sums.fill(0.0);
    for (key, score) in seen.iter().enumerate().skip(first) {
        let weight = exp(score - max);
        lanes[key % N_LANES] += weight;
        read(isa, tile, &tile.v, (key, &mut *row));
        for (sum, v) in query.sums.iter_mut().zip(&*row) {
            *sum = weight.mul_add(*v, *sum);
        }
    }
    query.part = TilePart {
        max,
        sum: add_lanes(&lanes),
    };
}

#[inline(always)]
fn read(isa: Isa, tile: &Tile<'_>, runs: &[&[u8]; N_RUNS], (key, row): (usize, &mut [f32])) {
    let token_bytes = tile.head_dim * tile.dtype.bytes();
    let at = key % RUN_KEYS * token_bytes;
    let bytes = &runs[key / RUN_KEYS][at..at + token_bytes];
    widen(isa, tile.dtype, bytes, row);
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{Isa, Query, Tile};

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn attend(isa: Isa, tile: &Tile<'_>, scale: f32, query: (&mut Query<'_>, usize)) {
        super::attend(isa, tile, scale, query);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_query_sees_of_each_tile() {
        let seen = |position, window, tile| {
            Seen::new(position, window, tile).map(|seen| (seen.first, seen.n_keys))
        };
        assert_eq!(seen(127, None, 0), Some((0, 128)));
        assert_eq!(seen(127, None, 1), None);
        assert_eq!(seen(128, None, 1), Some((0, 1)));
        assert_eq!(seen(300, Some(100), 0), None, "before the window");
        assert_eq!(
            seen(300, Some(100), 1),
            Some((73, 128)),
            "201 is 73 in tile 1"
        );
        assert_eq!(seen(300, Some(100), 2), Some((0, 45)));
        assert_eq!(
            seen(50, Some(100), 0),
            Some((0, 51)),
            "the window is longer"
        );
        assert_eq!(seen(50, Some(1), 0), Some((50, 51)), "itself alone");
        assert_eq!(
            seen(255, Some(128), 0),
            None,
            "the window is tile 1 exactly"
        );
        assert_eq!(seen(255, Some(128), 1), Some((0, 128)));
    }
}
