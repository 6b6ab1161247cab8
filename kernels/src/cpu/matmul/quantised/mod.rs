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
    PANEL_OUTPUTS, SixesK,
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
    panels: [&[u8]; 2],
    rows: &Rows<'_>,
) -> RowBlock<R, 1> {
    // The vector forms read by pointer: these lengths are all that they rely on.
    let n_units = rows.n_groups / layout.unit_groups();
    assert_eq!(rows.n_groups, n_units * layout.unit_groups(), "whole units");
    for panel in panels {
        assert_eq!(panel.len(), n_units * layout.unit_bytes(), "as many groups");
    }
    let n = R * rows.n_groups;
    assert_eq!(rows.quants.len(), n * GROUP_INPUTS, "R rows of quants");
    assert!(rows.scales.len() == n && rows.sums.len() == n && rows.half_sums.len() == 2 * n);
    match layout {
        Nibbles::LAYOUT => of_layout::<R, Nibbles>(isa, panels, rows),
        NibblesMin::LAYOUT => of_layout::<R, NibblesMin>(isa, panels, rows),
        Fives::LAYOUT => of_layout::<R, Fives>(isa, panels, rows),
        FivesMin::LAYOUT => of_layout::<R, FivesMin>(isa, panels, rows),
        NibblesK::LAYOUT => of_layout::<R, NibblesK>(isa, panels, rows),
        FivesK::LAYOUT => of_layout::<R, FivesK>(isa, panels, rows),
        SixesK::LAYOUT => of_layout::<R, SixesK>(isa, panels, rows),
        _ => of_layout::<R, Bytes>(isa, panels, rows),
    }
}

fn of_layout<const R: usize, L: Grouped>(
    isa: Isa,
    panels: [&[u8]; 2],
    rows: &Rows<'_>,
) -> RowBlock<R, 1> {
    dispatch!(
        isa,
        side_by_side(panels.map(|panel| scalar::<R>(L::LAYOUT, panel, rows))),
        side_by_side(panels.map(|panel| avx2::panel::<R, L>(panel, rows))),
        wide::Pair::<R, L>::new(panels, rows)
    )
}

/// The products of two panels as those of one pair.
fn side_by_side<const R: usize>(panels: [[[f32; PANEL_OUTPUTS]; R]; 2]) -> RowBlock<R, 1> {
    let mut block = [[[0.0; 2 * PANEL_OUTPUTS]; 1]; R];
    for (r, [pair]) in block.iter_mut().enumerate() {
        for (half, panel) in pair.chunks_exact_mut(PANEL_OUTPUTS).zip(&panels) {
            half.copy_from_slice(&panel[r]);
        }
    }
    block
}

fn scalar<const R: usize>(
    layout: Layout,
    panel: &[u8],
    rows: &Rows<'_>,
) -> [[f32; PANEL_OUTPUTS]; R] {
    let mut products = [[0.0; PANEL_OUTPUTS]; R];
    for g in 0..rows.n_groups {
        let (unit, within) = (g / layout.unit_groups(), g % layout.unit_groups());
        let unit = &panel[unit * layout.unit_bytes()..(unit + 1) * layout.unit_bytes()];
        for lane in 0..PANEL_OUTPUTS {
            let group = layout.group(unit, within, lane);
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
                let (scale_x, sum) = (rows.scales[at], &mut products[lane]);
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
