use super::*;
use crate::cpu::kv_store::store_kv;
use crate::cpu::test_data::{Stream, floats};
use crate::memory::KvArena;
use std::sync::Arc;
use tidemill_core::{BlockIdx, KvLayout};

const LAYER: u32 = 1;

struct Case {
    arena: Arc<KvArena>,
    shape: HeadShape,
    /// `[rows, q | k | v]` of every position of one sequence.
    rows: Vec<f32>,
    stride: usize,
    block_table: Vec<BlockIdx>,
}

fn case(
    seed: u64,
    n_positions: usize,
    (n_heads, n_kv_heads, head_dim): (u32, u32, u32),
    dtype: KvDtype,
) -> Case {
    let layout = KvLayout::new([1; 32], 2, n_kv_heads, head_dim, dtype).expect("valid");
    let n_blocks = n_positions.div_ceil(16);
    let arena = KvArena::new(&layout, n_blocks as u32 + 2).expect("small");
    let mut table: Vec<_> = (0..n_blocks as u32 + 2).map(BlockIdx).collect();
    let mut stream = Stream(seed);
    for i in (1..table.len()).rev() {
        table.swap(i, stream.below(i + 1));
    }
    table.truncate(n_blocks);
    let stride = ((n_heads + 2 * n_kv_heads) * head_dim) as usize;
    Case {
        arena,
        shape: HeadShape {
            n_heads: n_heads as usize,
            n_kv_heads: n_kv_heads as usize,
            head_dim: head_dim as usize,
            scale: 1.0 / (head_dim as f32).sqrt(),
        },
        rows: floats(seed, n_positions * stride)
            .iter()
            .map(|x| x * 3.0)
            .collect(),
        stride,
        block_table: table,
    }
}

/// Attends from positions `start..start + n`, whose rows alone are given; all KV up to there is stored first.
fn run(case: &Case, isa: Isa, threads: usize, start: usize, n: usize) -> Vec<f32> {
    run_windowed(case, (isa, threads), None, start..start + n)
}

fn run_windowed(
    case: &Case,
    (isa, threads): (Isa, usize),
    window: Option<usize>,
    positions: std::ops::Range<usize>,
) -> Vec<f32> {
    let (start, n) = (positions.start, positions.len());
    let mut team = Team::new(threads).expect("threads start");
    let cache = LayerCache {
        arena: &case.arena,
        layer: LAYER,
    };
    let span = |first_row, start_position, n_rows| Span {
        first_row,
        n_rows,
        start_position,
        block_table: case.block_table.clone(),
    };
    let all = span(0, 0, start + n);
    store_kv(isa, &mut team, cache, &[all], (&case.rows, case.stride));
    let mut plan = AttentionPlan::windowed(case.shape, window, vec![span(0, start, n)]);
    let rows = &case.rows[start * case.stride..(start + n) * case.stride];
    let mut output = Activations::new(false);
    attend(
        (isa, &mut team),
        &mut plan,
        cache,
        (rows, case.stride),
        &mut output,
    );
    output.values().to_vec()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn variants_and_threads_give_the_same_bits() {
    for (seed, dtype) in [(1, KvDtype::F16), (2, KvDtype::Bf16), (3, KvDtype::F32)] {
        for (n, heads) in [
            (1, (4, 2, 16)),
            (37, (3, 1, 64)),
            (150, (6, 2, 48)),
            (700, (2, 2, 128)),
        ] {
            let case = case(seed, n, heads, dtype);
            let first = n - n.min(20);
            let wanted = bits(&run(&case, Isa::Scalar, 1, first, n - first));
            for isa in Isa::available() {
                assert_eq!(bits(&run(&case, isa, 1, first, n - first)), wanted);
                assert_eq!(bits(&run(&case, isa, 3, first, n - first)), wanted);
            }
        }
    }
}

#[test]
fn one_position_alone_equals_itself_within_a_chunk() {
    let case = case(9, 1030, (6, 2, 64), KvDtype::F16);
    let n = case.shape.q_columns();
    let whole = run(&case, Isa::detect(), 2, 0, 1030);
    for position in [
        0, 1, 7, 15, 16, 127, 128, 129, 511, 512, 513, 700, 1023, 1024, 1029,
    ] {
        let alone = run(&case, Isa::detect(), 2, position, 1);
        assert_eq!(
            bits(&alone),
            bits(&whole[position * n..(position + 1) * n]),
            "{position}"
        );
    }
}

#[test]
fn results_are_close_to_exact_ones() {
    let case = case(4, 300, (4, 2, 32), KvDtype::F32);
    let found = run(&case, Isa::detect(), 1, 290, 10);
    let (head_dim, n_heads) = (32, 4);
    let at = |position: usize, column: usize| f64::from(case.rows[position * case.stride + column]);
    for row in 0..10 {
        let position = 290 + row;
        for head in 0..n_heads {
            let kv_head = head / 2;
            let score = |key: usize| -> f64 {
                let dot: f64 = (0..head_dim)
                    .map(|d| {
                        at(position, head * head_dim + d) * at(key, (4 + kv_head) * head_dim + d)
                    })
                    .sum();
                dot / (head_dim as f64).sqrt()
            };
            let weights: Vec<f64> = (0..=position).map(|key| score(key).exp()).collect();
            let total: f64 = weights.iter().sum();
            for d in 0..head_dim {
                let exact: f64 = weights
                    .iter()
                    .enumerate()
                    .map(|(key, w)| w * at(key, (6 + kv_head) * head_dim + d))
                    .sum::<f64>()
                    / total;
                let found = f64::from(found[(row * n_heads + head) * head_dim + d]);
                assert!((found - exact).abs() < 2e-5, "{found} {exact}");
            }
        }
    }
}

#[test]
fn spans_of_one_batch_do_not_disturb_each_other() {
    let case = case(5, 600, (2, 1, 16), KvDtype::F16);
    let wanted_chunk = run(&case, Isa::detect(), 1, 100, 40);
    let wanted_token = run(&case, Isa::detect(), 1, 599, 1);
    let span = |first_row, start_position, n_rows| Span {
        first_row,
        n_rows,
        start_position,
        block_table: case.block_table.clone(),
    };
    let mut plan = AttentionPlan::new(case.shape, vec![span(0, 599, 1), span(1, 100, 40)]);
    let row = |position: usize| &case.rows[position * case.stride..(position + 1) * case.stride];
    let mut rows = row(599).to_vec();
    (100..140).for_each(|position| rows.extend(row(position)));
    let cache = LayerCache {
        arena: &case.arena,
        layer: LAYER,
    };
    let mut team = Team::new(2).expect("threads start");
    let mut output = Activations::new(true);
    attend(
        (Isa::detect(), &mut team),
        &mut plan,
        cache,
        (&rows, case.stride),
        &mut output,
    );
    let n = case.shape.q_columns();
    assert_eq!(bits(&output.values()[..n]), bits(&wanted_token));
    assert_eq!(bits(&output.values()[n..]), bits(&wanted_chunk));
}

#[test]
fn a_window_gives_the_same_bits_in_chunks_alone_and_in_all_variants() {
    for (seed, dtype) in [(6, KvDtype::F16), (7, KvDtype::Bf16), (8, KvDtype::F32)] {
        let case = case(seed, 1030, (4, 2, 32), dtype);
        let n = case.shape.q_columns();
        for window in [1, 50, 128, 200, 512, 700] {
            let window = Some(window);
            let whole = run_windowed(&case, (Isa::Scalar, 1), window, 0..1030);
            for isa in Isa::available() {
                let chunk = run_windowed(&case, (isa, 3), window, 601..1030);
                assert_eq!(bits(&chunk), bits(&whole[601 * n..]), "{window:?}");
                for position in [0, 1, 49, 50, 127, 128, 200, 327, 511, 512, 640, 700, 1029] {
                    let alone = run_windowed(&case, (isa, 2), window, position..position + 1);
                    let wanted = &whole[position * n..(position + 1) * n];
                    assert_eq!(bits(&alone), bits(wanted), "{window:?} {position}");
                }
            }
        }
    }
}

#[test]
fn a_window_that_holds_everything_changes_nothing() {
    let case = case(11, 300, (2, 1, 64), KvDtype::F16);
    let plain = run(&case, Isa::detect(), 1, 0, 300);
    let windowed = run_windowed(&case, (Isa::detect(), 1), Some(300), 0..300);
    assert_eq!(bits(&plain), bits(&windowed));
}

#[test]
fn a_window_sees_its_own_positions_only() {
    let case = case(12, 400, (2, 1, 16), KvDtype::F32);
    let at = |position: usize, column: usize| f64::from(case.rows[position * case.stride + column]);
    for window in [1, 40, 150, 256] {
        let found = run_windowed(&case, (Isa::detect(), 1), Some(window), 390..400);
        for row in 0..10 {
            let position = 390 + row;
            let keys = position + 1 - window..=position;
            for head in 0..2 {
                let score = |key: usize| -> f64 {
                    let term = |d| at(position, head * 16 + d) * at(key, 32 + d);
                    ((0..16).map(term).sum::<f64>() / 4.0).exp()
                };
                let total: f64 = keys.clone().map(score).sum();
                for d in 0..16 {
                    let exact: f64 = keys.clone().map(|key| score(key) * at(key, 48 + d)).sum();
                    let found = f64::from(found[(row * 2 + head) * 16 + d]);
                    assert!((found - exact / total).abs() < 2e-5, "{window} {position}");
                }
            }
        }
    }
}
