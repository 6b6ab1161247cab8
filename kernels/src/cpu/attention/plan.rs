//! How the attention of one forward pass is cut into parts; the same for every layer.
//!
//! A chunk is cut by rows and KV heads. A single row with a long context is cut by tiles, else one thread would read
//! all of its keys alone. Either way each (row, head, tile) is computed once and merged in the same order. With a
//! sliding window, tiles that no row of a part sees are left out.

use super::tile::TILE_KEYS;
use super::window::first_position;
use crate::cpu::kv_store::Span;
use std::ops::Range;

/// Rows of one part: enough queries to share a widened tile.
const PART_ROWS: usize = 16;
/// Spans up to this many rows are cut by tiles, row by row, when they are long.
const SPLIT_ROWS_MAX: usize = 4;
/// Tiles of one part of a split row.
const PART_TILES: usize = 4;

/// Heads of a model.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct HeadShape {
    /// Query heads; a multiple of `n_kv_heads`.
    pub n_heads: usize,
    /// KV heads.
    pub n_kv_heads: usize,
    /// Elements of a head: a multiple of 16, at most 256.
    pub head_dim: usize,
    /// What scores are multiplied with, usually 1 / sqrt(head_dim).
    pub scale: f32,
}

impl HeadShape {
    /// Query heads of each KV head.
    pub(crate) fn n_group(&self) -> usize {
        self.n_heads / self.n_kv_heads
    }

    /// Elements of a row's queries.
    pub fn q_columns(&self) -> usize {
        self.n_heads * self.head_dim
    }
}

/// One part of the work.
#[derive(Clone, Debug)]
pub(super) enum Item {
    /// Rows (counted within the span) and the query heads of a KV head, over all tiles.
    Rows {
        span: usize,
        rows: Range<usize>,
        kv_head: usize,
    },
    /// Some tiles of a split row.
    Tiles {
        split: usize,
        kv_head: usize,
        tiles: Range<usize>,
    },
}

/// A single row that is cut by tiles.
#[derive(Clone, Debug)]
pub(super) struct Split {
    pub(super) span: usize,
    /// Within the span.
    pub(super) row: usize,
    /// Those that the row sees.
    pub(super) tiles: Range<usize>,
    /// Where its partial sums start.
    offset: usize,
}

impl Split {
    /// Where one tile's part of one head is kept: sums, maximum, sum of weights.
    pub(super) fn partial(&self, shape: &HeadShape, tile: usize, head: usize) -> Range<usize> {
        let size = shape.head_dim + 2;
        let start = self.offset + ((tile - self.tiles.start) * shape.n_heads + head) * size;
        start..start + size
    }
}

/// The parts of one forward pass, and the memory for their partial sums.
#[derive(Debug)]
pub struct AttentionPlan {
    pub(super) shape: HeadShape,
    /// Positions that a row sees, its own among them; `None`: all up to its own.
    pub(super) window: Option<usize>,
    spans: Vec<Span>,
    items: Vec<Item>,
    splits: Vec<Split>,
    partials: Vec<f32>,
}

impl AttentionPlan {
    /// Cuts up the attention of some spans to all positions up to each row's own.
    ///
    /// # Panics
    /// When the shape does not hold.
    pub fn new(shape: HeadShape, spans: Vec<Span>) -> Self {
        Self::windowed(shape, None, spans)
    }

    /// Likewise, with each row seeing the last `window` positions only, its own among them.
    ///
    /// # Panics
    /// When the shape does not hold, or the window is 0.
    pub fn windowed(shape: HeadShape, window: Option<usize>, spans: Vec<Span>) -> Self {
        assert!(window != Some(0), "a row sees at least itself");
        assert!(
            shape.n_kv_heads > 0 && shape.n_heads.is_multiple_of(shape.n_kv_heads),
            "query heads share KV heads evenly"
        );
        assert!(
            shape.head_dim.is_multiple_of(16) && (16..=256).contains(&shape.head_dim),
            "a head has 16 to 256 elements, in whole 16s"
        );
        let mut plan = Self {
            shape,
            window,
            spans,
            items: Vec::new(),
            splits: Vec::new(),
            partials: Vec::new(),
        };
        let mut offset = 0;
        for span in 0..plan.spans.len() {
            plan.cut(span, &mut offset);
        }
        plan.partials.resize(offset, 0.0);
        plan
    }

    fn cut(&mut self, span_idx: usize, offset: &mut usize) {
        let span = &self.spans[span_idx];
        let n_kv_heads = self.shape.n_kv_heads;
        let first_tile =
            |row: usize| first_position(span.start_position + row, self.window) / TILE_KEYS;
        let n_tiles = |row: usize| (span.start_position + row + 1).div_ceil(TILE_KEYS);
        let is_long = span.n_positions() - first_tile(0) * TILE_KEYS > PART_TILES * TILE_KEYS;
        if span.n_rows > SPLIT_ROWS_MAX || !is_long {
            // The last rows have the most keys: start with them.
            for first in (0..span.n_rows).step_by(PART_ROWS).rev() {
                let rows = first..(first + PART_ROWS).min(span.n_rows);
                self.items.extend((0..n_kv_heads).map(|kv_head| Item::Rows {
                    span: span_idx,
                    rows: rows.clone(),
                    kv_head,
                }));
            }
            return;
        }
        for row in 0..span.n_rows {
            let tiles = first_tile(row)..n_tiles(row);
            let split = self.splits.len();
            self.splits.push(Split {
                span: span_idx,
                row,
                tiles: tiles.clone(),
                offset: *offset,
            });
            *offset += tiles.len() * self.shape.n_heads * (self.shape.head_dim + 2);
            for first in tiles.clone().step_by(PART_TILES) {
                let tiles = first..(first + PART_TILES).min(tiles.end);
                self.items
                    .extend((0..n_kv_heads).map(|kv_head| Item::Tiles {
                        split,
                        kv_head,
                        tiles: tiles.clone(),
                    }));
            }
        }
    }

    /// The spans, in the order given.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Rows of the batch that the spans reach.
    pub(super) fn n_rows(&self) -> usize {
        let end = |span: &Span| span.first_row + span.n_rows;
        self.spans.iter().map(end).max().unwrap_or(0)
    }

    pub(super) fn parts(&mut self) -> (&[Span], &[Item], &[Split], &mut Vec<f32>) {
        (&self.spans, &self.items, &self.splits, &mut self.partials)
    }
}
