//! Writing K and V of new positions into their blocks.
//!
//! Values are rounded to the pool's type here, before any use: attention reads them back from the block, also for
//! positions of the same chunk, so that a chunk's results equal those of one token at a time.

use crate::cpu::isa::Isa;
use crate::cpu::kv_element::narrow;
use crate::cpu::team::Team;
use crate::memory::KvArena;
use std::ops::Range;
use tidemill_core::{BlockIdx, KvLayout};

/// Consecutive rows of a batch that are consecutive positions of one sequence.
#[derive(Clone, Debug)]
pub struct Span {
    /// The first row of the batch.
    pub first_row: usize,
    /// Rows; at least one.
    pub n_rows: usize,
    /// Position of the first row in its sequence.
    pub start_position: usize,
    /// Blocks of positions `0..start_position + n_rows`.
    pub block_table: Vec<BlockIdx>,
}

impl Span {
    /// Positions that exist when the span's rows are in.
    pub fn n_positions(&self) -> usize {
        self.start_position + self.n_rows
    }
}

/// One layer's K and V in an arena.
#[derive(Clone, Copy, Debug)]
pub struct LayerCache<'a> {
    /// All blocks.
    pub arena: &'a KvArena,
    /// Which layer.
    pub layer: u32,
}

/// K or V.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Part {
    K,
    V,
}

/// Bytes, within a block, of some tokens of one head: `[layer][k|v][kv_head][token][head_dim]`.
pub(crate) fn head_bytes(
    layout: &KvLayout,
    (layer, part): (u32, Part),
    head: usize,
    tokens: Range<usize>,
) -> Range<usize> {
    let token_bytes = layout.head_dim as usize * layout.dtype.bytes();
    let head_size = layout.block_tokens as usize * token_bytes;
    let of_part = match part {
        Part::K => 0,
        Part::V => layout.n_kv_heads as usize,
    };
    let start = layer as usize * layout.layer_bytes() + (of_part + head) * head_size;
    start + tokens.start * token_bytes..start + tokens.end * token_bytes
}

/// Writes K and V of all rows of all spans. A row of `rows` ends with its K heads and then its V heads, each
/// `[n_kv_heads, head_dim]`.
///
/// The caller owns the blocks that hold the spans' own positions, alone, and no two rows have the same place: the
/// engine's block pool sees to both.
///
/// # Panics
/// When the rows do not fit the spans, or a block does not exist.
pub fn store_kv(
    isa: Isa,
    team: &mut Team,
    cache: LayerCache<'_>,
    spans: &[Span],
    (rows, stride): (&[f32], usize),
) {
    let layout = cache.arena.layout();
    let kv_columns = (layout.n_kv_heads * layout.head_dim) as usize;
    assert!(stride >= 2 * kv_columns, "a row holds K and V");
    for span in spans {
        assert!(
            (span.first_row + span.n_rows) * stride <= rows.len(),
            "the span's rows exist"
        );
        let block_tokens = layout.block_tokens as usize;
        assert!(
            span.n_positions() <= span.block_table.len() * block_tokens,
            "blocks for all"
        );
        team.run_ranges(span.n_rows, 16, &|part| {
            for i in part {
                let row = &rows[(span.first_row + i) * stride..(span.first_row + i + 1) * stride];
                let position = span.start_position + i;
                let block = span.block_table[position / block_tokens];
                store_row(
                    isa,
                    cache,
                    (block, position % block_tokens),
                    &row[stride - 2 * kv_columns..],
                );
            }
        });
    }
}

fn store_row(isa: Isa, cache: LayerCache<'_>, (block, token): (BlockIdx, usize), kv: &[f32]) {
    let layout = cache.arena.layout();
    let head_dim = layout.head_dim as usize;
    let n_kv_heads = layout.n_kv_heads as usize;
    for (i, values) in kv.chunks_exact(head_dim).enumerate() {
        let part = if i < n_kv_heads { Part::K } else { Part::V };
        let place = (cache.layer, part);
        let bytes = head_bytes(layout, place, i % n_kv_heads, token..token + 1);
        // SAFETY: the caller of `store_kv` owns this position alone, and each position is written by one row.
        let target = unsafe { cache.arena.slice_mut(block, bytes) };
        narrow(isa, layout.dtype, values, target);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::kv_element::widen;
    use crate::cpu::test_data::floats;
    use tidemill_core::KvDtype;

    #[test]
    fn every_value_lands_at_its_place_and_nowhere_else() {
        let layout = KvLayout::new([1; 32], 2, 2, 16, KvDtype::F32).expect("valid");
        let arena = KvArena::new(&layout, 4).expect("small");
        let spans = [Span {
            first_row: 1,
            n_rows: 5,
            start_position: 14,
            block_table: vec![BlockIdx(2), BlockIdx(0)],
        }];
        let stride = 100;
        let rows = floats(1, stride * 6);
        let cache = LayerCache {
            arena: &arena,
            layer: 1,
        };
        let mut team = Team::new(2).expect("threads start");
        store_kv(Isa::detect(), &mut team, cache, &spans, (&rows, stride));
        let mut n_written = 0;
        for block in 0..4 {
            // SAFETY: nobody writes any more.
            let bytes = unsafe { arena.slice(BlockIdx(block), 0..layout.block_bytes()) };
            let mut values = vec![0.0; bytes.len() / 4];
            widen(Isa::Scalar, KvDtype::F32, bytes, &mut values);
            n_written += values.iter().filter(|v| **v != 0.0).count();
        }
        assert_eq!(n_written, 5 * 64);
        // Position 16 is token 0 of the second block, row 3; V of head 1 is the row's last 16 values.
        let range = head_bytes(&layout, (1, Part::V), 1, 0..1);
        // SAFETY: as above.
        let bytes = unsafe { arena.slice(BlockIdx(0), range) };
        let mut values = vec![0.0; 16];
        widen(Isa::Scalar, KvDtype::F32, bytes, &mut values);
        assert_eq!(values, rows[4 * stride - 16..4 * stride]);
    }
}
