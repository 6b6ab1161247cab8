//! The product with a pair of panels of quantised weights. The definition is in the parent module.
//!
//! One kernel per form, made for each layout: it turns a group's numbers into eight vectors of bytes, one per step of four
//! inputs, multiplies them with every row's int8 activations, and adds the exact integers to the float sums.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod wide;

use super::RowBlock;
use crate::cpu::activations::Activations;
use crate::cpu::isa::{Isa, dispatch};
use crate::cpu::packed::{
    Bytes, Fives, FivesK, FivesMin, GROUP_INPUTS, Grouped, Layout, Nibbles, NibblesK, NibblesMin,
    PAIR_OUTPUTS, PANEL_OUTPUTS, SixesK,
};

/// The int8 form of some consecutive rows.
pub(super) struct Rows<'a> {
    n_groups: usize,
    /// `[rows, n_groups * 32]`
    quants: &'a [i8],
    /// `[rows, n_groups]`
    scales: &'a [f32],
    /// `[rows, n_groups]`
    sums: &'a [f32],
    /// `[rows, n_groups, 2]`
    half_sums: &'a [f32],
}

impl<'a> Rows<'a> {
    pub(super) fn new(input: &'a Activations, first: usize, n_rows: usize) -> Self {
        let n = input.n_columns();
        let n_groups = n / GROUP_INPUTS;
        let groups = first * n_groups..(first + n_rows) * n_groups;
        Self {
            n_groups,
            quants: &input.quants[first * n..(first + n_rows) * n],
            scales: &input.scales[groups.clone()],
            sums: &input.sums[groups.clone()],
            half_sums: &input.half_sums[2 * groups.start..2 * groups.end],
        }
    }
}

pub(super) fn multiply<const R: usize>(
    isa: Isa,
    layout: Layout,
    pair: &[u8],
    rows: &Rows<'_>,
) -> RowBlock<R, 1> {
    // The vector forms read by pointer: these lengths are all that they rely on.
    let n_units = rows.n_groups / layout.unit_groups();
    assert_eq!(rows.n_groups, n_units * layout.unit_groups(), "whole units");
    let wanted = 2 * n_units * layout.unit_bytes();
    assert_eq!(pair.len(), wanted, "two panels of as many groups");
    let n = R * rows.n_groups;
    assert_eq!(rows.quants.len(), n * GROUP_INPUTS, "R rows of quants");
    assert!(rows.scales.len() == n && rows.sums.len() == n && rows.half_sums.len() == 2 * n);
    match layout {
        Nibbles::LAYOUT => of_layout::<R, Nibbles>(isa, pair, rows),
        NibblesMin::LAYOUT => of_layout::<R, NibblesMin>(isa, pair, rows),
        Fives::LAYOUT => of_layout::<R, Fives>(isa, pair, rows),
        FivesMin::LAYOUT => of_layout::<R, FivesMin>(isa, pair, rows),
        NibblesK::LAYOUT => of_layout::<R, NibblesK>(isa, pair, rows),
        FivesK::LAYOUT => of_layout::<R, FivesK>(isa, pair, rows),
        SixesK::LAYOUT => of_layout::<R, SixesK>(isa, pair, rows),
        _ => of_layout::<R, Bytes>(isa, pair, rows),
    }
}

fn of_layout<const R: usize, L: Grouped>(isa: Isa, pair: &[u8], rows: &Rows<'_>) -> RowBlock<R, 1> {
    dispatch!(
        isa,
        scalar(L::LAYOUT, pair, rows),
        avx2::pair::<R, L>(pair, rows),
        wide::Pair::<R, L>::new(pair, rows)
    )
}

fn scalar<const R: usize>(layout: Layout, pair: &[u8], rows: &Rows<'_>) -> RowBlock<R, 1> {
    let mut products = [[[0.0; PAIR_OUTPUTS]; 1]; R];
    for g in 0..rows.n_groups {
        let (unit, within) = (g / layout.unit_groups(), g % layout.unit_groups());
        let units = &pair[2 * unit * layout.unit_bytes()..];
        for lane in 0..PAIR_OUTPUTS {
            let unit = &units[lane / PANEL_OUTPUTS * layout.unit_bytes()..];
            let group = layout.group(unit, within, lane % PANEL_OUTPUTS);
            for (r, products) in products.iter_mut().enumerate() {
                let at = r * rows.n_groups + g;
                let quants = &rows.quants[at * GROUP_INPUTS..(at + 1) * GROUP_INPUTS];
                let dot = |inputs: std::ops::Range<usize>| {
                    let weights = &group.quants[inputs.clone()];
                    let pairs = quants[inputs].iter().zip(weights);
                    pairs
                        .map(|(x, w)| i32::from(*x) * i32::from(*w))
                        .sum::<i32>() as f32
                };
                let (scale_x, sum) = (rows.scales[at], &mut products[0][lane]);
                if layout.has_halves() {
                    *sum = (group.scales[0] * scale_x).mul_add(dot(0..16), *sum);
                    *sum = (group.scales[1] * scale_x).mul_add(dot(16..32), *sum);
                } else {
                    *sum = (group.scales[0] * scale_x).mul_add(dot(0..32), *sum);
                }
                if layout.has_min() {
                    *sum = (group.min * scale_x).mul_add(rows.sums[at], *sum);
                }
            }
        }
    }
    products
}
