//! Causal attention of new positions over K and V in blocks, heads grouped (Ainslie et al. 2023).
//!
//! Keys are taken in tiles of 128 at fixed absolute positions. Within a tile: `score = (q . k) * scale` with 16 lanes over the
//! head's elements; `m` = largest score; `p = e^(score - m)`; `l` = sum of p, 16 lanes over keys; `o[d] = fma(p, v[d], o[d])` in key order.
//! Tiles are merged in order (the running-maximum rule of Milakov and Gimelshein 2018). As a tile's part does not depend
//! on any other tile, long contexts can be split over threads without changing a bit. Sliding windows are in `window`.

mod merge;
mod plan;
mod tile;
mod window;

pub use plan::{AttentionPlan, HeadShape};

use crate::cpu::activations::Activations;
use crate::cpu::isa::Isa;
use crate::cpu::kv_element::widen;
use crate::cpu::kv_store::{LayerCache, Part, Span, head_bytes};
use crate::cpu::shards::Shards;
use crate::cpu::team::Team;
use merge::Running;
use plan::{Item, Split};
use std::cell::RefCell;
use tidemill_core::KvDtype;
use tile::{N_RUNS, Query, RUN_KEYS, TILE_KEYS, Tile, TilePart};
use window::{Seen, attend_from, first_position};

/// From this many queries on a tile is widened to f32 once, before use.
const QUERIES_WIDEN_MIN: usize = 8;

/// What the parts of one attention share.
struct Shared<'a> {
    isa: Isa,
    cache: LayerCache<'a>,
    shape: HeadShape,
    window: Option<usize>,
    /// `[rows, stride]`, each row starting with its query heads.
    rows: &'a [f32],
    stride: usize,
}

/// Attends from every row of the plan's spans to all positions up to its own (or as many as the plan's window says), whose
/// K and V are in the blocks. A row of `rows` starts with its query heads. The output's rows are `[n_heads * head_dim]`.
///
/// # Panics
/// When shapes do not fit, or a block does not exist.
pub fn attend(
    (isa, team): (Isa, &mut Team),
    plan: &mut AttentionPlan,
    cache: LayerCache<'_>,
    (rows, stride): (&[f32], usize),
    output: &mut Activations,
) {
    let shape = plan.shape;
    let layout = cache.arena.layout();
    assert_eq!(
        shape.n_kv_heads, layout.n_kv_heads as usize,
        "the arena is this model's"
    );
    assert_eq!(
        shape.head_dim, layout.head_dim as usize,
        "the arena is this model's"
    );
    assert!(
        layout.block_tokens.is_multiple_of(RUN_KEYS as u32),
        "blocks of whole runs"
    );
    assert!(plan.n_rows() * stride <= rows.len() && shape.q_columns() <= stride);
    output.resize(plan.n_rows(), shape.q_columns());
    let shared = Shared {
        isa,
        cache,
        shape,
        window: plan.window,
        rows,
        stride,
    };
    let (spans, items, splits, partials) = plan.parts();
    {
        let target = Shards::new(output.values_mut());
        let partials = Shards::new(&mut *partials);
        team.run(items.len(), &|part| match &items[part] {
            Item::Rows {
                span,
                rows,
                kv_head,
            } => shared.attend_rows(&spans[*span], rows.clone(), *kv_head, &target),
            Item::Tiles {
                split,
                kv_head,
                tiles,
            } => {
                let split = &splits[*split];
                shared.attend_tiles(
                    &spans[split.span],
                    split,
                    (*kv_head, tiles.clone()),
                    &partials,
                );
            }
        });
    }
    {
        let target = Shards::new(output.values_mut());
        let partials = &*partials;
        team.run(splits.len(), &|part| {
            shared.merge_split(&spans[splits[part].span], &splits[part], partials, &target);
        });
    }
    output.quantise(isa);
}

/// Working memory of one thread.
#[derive(Default)]
struct Scratch {
    k: Vec<f32>,
    v: Vec<f32>,
    running: Vec<Running>,
    sums: Vec<f32>,
    tile_sums: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Shared<'_> {
    fn query(&self, row: usize, head: usize) -> &[f32] {
        let start = row * self.stride + head * self.shape.head_dim;
        &self.rows[start..start + self.shape.head_dim]
    }

    /// The K and V bytes of one tile of a span's sequence, in runs.
    fn tile<'s>(&'s self, span: &'s Span, tile: usize, kv_head: usize, n_keys: usize) -> Tile<'s> {
        let layout = self.cache.arena.layout();
        let block_tokens = layout.block_tokens as usize;
        let mut runs = [[&[][..]; N_RUNS]; 2];
        for run in 0..n_keys.div_ceil(RUN_KEYS) {
            let position = tile * TILE_KEYS + run * RUN_KEYS;
            let block = span.block_table[position / block_tokens];
            let token = position % block_tokens;
            for (part, runs) in [Part::K, Part::V].into_iter().zip(&mut runs) {
                let tokens = token..token + RUN_KEYS;
                let range = head_bytes(layout, (self.cache.layer, part), kv_head, tokens);
                // SAFETY: the caller owns all blocks of its block tables; their K and V of this layer were written
                // before attention started, and nothing writes them while it runs.
                runs[run] = unsafe { self.cache.arena.slice(block, range) };
            }
        }
        let [k, v] = runs;
        Tile {
            k,
            v,
            head_dim: self.shape.head_dim,
            dtype: layout.dtype,
        }
    }

    /// Some rows of one span and the query heads of one KV head, over all their tiles.
    fn attend_rows(
        &self,
        span: &Span,
        rows: std::ops::Range<usize>,
        kv_head: usize,
        target: &Shards<'_, f32>,
    ) {
        let (n_group, head_dim) = (self.shape.n_group(), self.shape.head_dim);
        SCRATCH.with_borrow_mut(|scratch| {
            let n_queries = rows.len() * n_group;
            scratch.running.clear();
            scratch.running.resize(n_queries, Running::default());
            scratch
                .sums
                .resize((n_queries * head_dim).max(scratch.sums.len()), 0.0);
            scratch
                .tile_sums
                .resize((n_queries * head_dim).max(scratch.tile_sums.len()), 0.0);
            let first = first_position(span.start_position + rows.start, self.window);
            let n_tiles = (span.start_position + rows.end).div_ceil(TILE_KEYS);
            for tile_idx in first / TILE_KEYS..n_tiles {
                self.attend_rows_to_tile((span, tile_idx), rows.clone(), kv_head, scratch);
            }
            for (i, running) in scratch.running.iter().enumerate() {
                let (row, head) = (rows.start + i / n_group, kv_head * n_group + i % n_group);
                let start = (span.first_row + row) * self.shape.q_columns() + head * head_dim;
                // SAFETY: this item alone holds these rows' heads of this KV head.
                let target = unsafe { target.range(start..start + head_dim) };
                running.finish(&scratch.sums[i * head_dim..(i + 1) * head_dim], target);
            }
        });
    }

    fn attend_rows_to_tile(
        &self,
        (span, tile_idx): (&Span, usize),
        rows: std::ops::Range<usize>,
        kv_head: usize,
        scratch: &mut Scratch,
    ) {
        let (n_group, head_dim) = (self.shape.n_group(), self.shape.head_dim);
        let seen = |row: usize| Seen::new(span.start_position + row, self.window, tile_idx);
        let last = seen(rows.end - 1).or_else(|| rows.clone().rev().find_map(&seen));
        let Some(n_keys_most) = last.map(|seen| seen.n_keys) else {
            return;
        };
        let stored = self.tile(span, tile_idx, kv_head, n_keys_most);
        let widens = scratch.running.len() >= QUERIES_WIDEN_MIN && stored.dtype != KvDtype::F32;
        let tile = if widens {
            let wide = (&mut scratch.k, &mut scratch.v);
            widen_tile(self.isa, &stored, n_keys_most, wide)
        } else {
            stored
        };
        // The rows that see the tile follow one another; those that see it in part are the last of them.
        let n_blind = rows.clone().take_while(|&row| seen(row).is_none()).count();
        let n_whole = rows.clone().skip(n_blind);
        let n_whole = n_whole.take_while(|&row| seen(row).is_some_and(|seen| seen.first == 0));
        let n_whole = n_whole.count() * n_group;
        let found = scratch.tile_sums.chunks_exact_mut(head_dim).enumerate();
        let found = found.take(rows.len() * n_group).skip(n_blind * n_group);
        let (mut queries, firsts): (Vec<Query<'_>>, Vec<usize>) = found
            .map_while(|(i, sums)| {
                let row = rows.start + i / n_group;
                let seen = seen(row)?;
                let query = Query {
                    values: self.query(span.first_row + row, kv_head * n_group + i % n_group),
                    n_keys: seen.n_keys,
                    sums,
                    part: TilePart::default(),
                };
                Some((query, seen.first))
            })
            .unzip();
        let scale = self.shape.scale;
        tile::attend(self.isa, &tile, scale, &mut queries[..n_whole]);
        for (query, first) in queries.iter_mut().zip(firsts).skip(n_whole) {
            attend_from(self.isa, &tile, scale, (query, first));
        }
        let sums = scratch.sums.chunks_exact_mut(head_dim);
        let running = scratch.running.iter_mut().zip(sums).skip(n_blind * n_group);
        for (query, (running, sums)) in queries.iter().zip(running) {
            running.add(self.isa, &query.part, query.sums, sums);
        }
    }

    /// Some tiles of a single row, each tile's part kept for merging.
    fn attend_tiles(
        &self,
        span: &Span,
        split: &Split,
        (kv_head, tiles): (usize, std::ops::Range<usize>),
        partials: &Shards<'_, f32>,
    ) {
        let (n_group, head_dim) = (self.shape.n_group(), self.shape.head_dim);
        for tile_idx in tiles {
            let seen = Seen::new(span.start_position + split.row, self.window, tile_idx);
            let Seen { first, n_keys } =
                seen.expect("the plan leaves out tiles that the row does not see");
            let tile = self.tile(span, tile_idx, kv_head, n_keys);
            let mut queries = Vec::with_capacity(n_group);
            let mut kept = Vec::with_capacity(n_group);
            for head in kv_head * n_group..(kv_head + 1) * n_group {
                // SAFETY: this item alone holds these tiles of this head.
                let place = unsafe { partials.range(split.partial(&self.shape, tile_idx, head)) };
                let (sums, rest) = place.split_at_mut(head_dim);
                kept.push(rest);
                queries.push(Query {
                    values: self.query(span.first_row + split.row, head),
                    n_keys,
                    sums,
                    part: TilePart::default(),
                });
            }
            match first {
                0 => tile::attend(self.isa, &tile, self.shape.scale, &mut queries),
                _ => queries.iter_mut().for_each(|query| {
                    attend_from(self.isa, &tile, self.shape.scale, (query, first));
                }),
            }
            for (query, kept) in queries.iter().zip(kept) {
                kept.copy_from_slice(&[query.part.max, query.part.sum]);
            }
        }
    }

    /// Merges the tiles of a split row.
    fn merge_split(&self, span: &Span, split: &Split, partials: &[f32], target: &Shards<'_, f32>) {
        let head_dim = self.shape.head_dim;
        let mut sums = vec![0.0; head_dim];
        for head in 0..self.shape.n_heads {
            let mut running = Running::default();
            for tile_idx in split.tiles.clone() {
                let place = &partials[split.partial(&self.shape, tile_idx, head)];
                let (found, rest) = place.split_at(head_dim);
                let part = TilePart {
                    max: rest[0],
                    sum: rest[1],
                };
                running.add(self.isa, &part, found, &mut sums);
            }
            let start = (span.first_row + split.row) * self.shape.q_columns() + head * head_dim;
            // SAFETY: each split row is merged by one part.
            let target = unsafe { target.range(start..start + head_dim) };
            running.finish(&sums, target);
        }
    }
}

/// The same tile with f32 elements: exact, so the product is the same.
fn widen_tile<'s>(
    isa: Isa,
    tile: &Tile<'_>,
    n_keys: usize,
    (k, v): (&'s mut Vec<f32>, &'s mut Vec<f32>),
) -> Tile<'s> {
    let run = RUN_KEYS * tile.head_dim;
    let n_runs = n_keys.div_ceil(RUN_KEYS);
    for (source, target) in [(&tile.k, &mut *k), (&tile.v, &mut *v)] {
        target.resize((n_runs * run).max(target.len()), 0.0);
        for (source, target) in source[..n_runs].iter().zip(target.chunks_exact_mut(run)) {
            widen(isa, tile.dtype, source, target);
        }
    }
    let mut runs = [[&[][..]; N_RUNS]; 2];
    for (wide, runs) in [&*k, &*v].into_iter().zip(&mut runs) {
        for (place, wide) in runs.iter_mut().zip(wide.chunks_exact(run).take(n_runs)) {
            *place = bytemuck::cast_slice(wide);
        }
    }
    let [k, v] = runs;
    Tile {
        k,
        v,
        head_dim: tile.head_dim,
        dtype: KvDtype::F32,
    }
}

#[cfg(test)]
mod tests;
