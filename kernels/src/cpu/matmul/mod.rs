//! Rows times weight matrices.
//!
//! `output[row][o] = sum over i of weight[o][i] * row[i]`, for several matrices that read the same rows (q, k and v; gate
//! and up) side by side. Quantised weights: for each group of 32 inputs the exact integer dot product, then
//! `sum = fma(scale_w * scale_x, dot, sum)` and, for weights with a minimum, `sum = fma(min_w * scale_x, sum_x, sum)`, groups in
//! index order. K formats: the weight scale is `d * sc` and the minimum `-(dmin * m)`, each rounded to f32; with a scale for each half of
//! the group, the halves' dot products are added one after the other. Float weights: `sum = fma(w, x, sum)` in index order. Lanes are outputs, so no sum crosses
//! lanes, and the number of rows computed together changes nothing.

mod float;
mod quantised;

use crate::cpu::activations::Activations;
use crate::cpu::isa::Isa;
use crate::cpu::packed::{Layout, PAIR_OUTPUTS, PackedMatrix, Packing};
use crate::cpu::shards::Shards;
use crate::cpu::team::Team;
use crate::cpu::wide::Element;
use std::ops::Range;

/// Rows of one part: their int8 form stays in the second-level cache.
const PART_ROWS: usize = 128;
/// Weight bytes of one part when there are few rows: long enough to hide the claim, short enough to balance.
const PART_BYTES_MIN: usize = 24 * 1024;

/// Where products go: rows of `stride` elements.
pub enum Output<'a> {
    /// The products replace what is there.
    Replace(&'a mut [f32]),
    /// The products are added to what is there.
    Add(&'a mut [f32]),
}

/// Pairs of panels of float weights that are taken together when there are few rows: a single row keeps the
/// multiplication units busy with that many.
const STRIP_PAIRS: usize = 2;

/// Products of R rows with P pairs of panels.
pub(crate) type RowBlock<const R: usize, const P: usize> = [[[f32; PAIR_OUTPUTS]; P]; R];

/// Some neighbouring pairs of panels of one of the matrices, and the columns that their products fill.
struct Strip<'a> {
    matrix: &'a PackedMatrix,
    first_pair: usize,
    first_column: usize,
    n_columns: usize,
}

impl<'a> Strip<'a> {
    /// The pairs from number `first` of the strip on. What is past the strip's end is its last pair again.
    fn pairs<const P: usize>(&self, first: usize) -> [&'a [u8]; P] {
        let last = self.n_columns.div_ceil(PAIR_OUTPUTS) - 1;
        std::array::from_fn(|pair| self.matrix.pair(self.first_pair + (first + pair).min(last)))
    }
}

/// Multiplies every row of `input` with every matrix. The output is `[n_rows, sum of n_outputs]`, the matrices'
/// columns side by side.
///
/// # Panics
/// When shapes do not fit, or a quantised matrix meets activations without an int8 form.
pub fn matmul(
    isa: Isa,
    team: &mut Team,
    matrices: &[&PackedMatrix],
    input: &Activations,
    output: Output<'_>,
) {
    let strips = strips_of(matrices, input);
    let stride: usize = matrices.iter().map(|matrix| matrix.n_outputs()).sum();
    let (target, adds) = match output {
        Output::Replace(target) => (target, false),
        Output::Add(target) => (target, true),
    };
    let n_rows = input.n_rows();
    assert_eq!(
        target.len(),
        n_rows * stride,
        "the output fits the products"
    );
    let target = Shards::new(target);
    let part_strips = strips.first().map_or(1, |strip| part_strips(strip, n_rows));
    let n_column_parts = strips.len().div_ceil(part_strips);
    let n_row_parts = n_rows.div_ceil(PART_ROWS);
    team.run(n_row_parts * n_column_parts, &|part| {
        let first_row = part / n_column_parts * PART_ROWS;
        let rows = first_row..(first_row + PART_ROWS).min(n_rows);
        let first = part % n_column_parts * part_strips;
        for strip in &strips[first..(first + part_strips).min(strips.len())] {
            let place = Place {
                target: &target,
                stride,
                adds,
                strip,
            };
            match strip.matrix.packing {
                Packing::Floats(element) => place.floats(isa, element, input, rows.clone()),
                Packing::Groups(layout) => place.groups(isa, layout, input, rows.clone()),
            }
        }
    });
}

/// Strips of one part.
fn part_strips(strip: &Strip<'_>, n_rows: usize) -> usize {
    let strip_bytes = strip.matrix.pair(0).len() * strip.n_columns.div_ceil(PAIR_OUTPUTS);
    (PART_BYTES_MIN / strip_bytes / n_rows.clamp(1, 8)).max(1)
}

fn strips_of<'a>(matrices: &[&'a PackedMatrix], input: &Activations) -> Vec<Strip<'a>> {
    let mut strips = Vec::new();
    let mut column = 0;
    for &matrix in matrices {
        assert_eq!(
            matrix.n_inputs(),
            input.n_columns(),
            "a row has one element per input"
        );
        assert!(
            input.is_quantised() || !matrix.is_quantised(),
            "a quantised matrix reads the int8 form"
        );
        let strip_pairs = match matrix.is_quantised() {
            true => 1,
            false => STRIP_PAIRS,
        };
        for first_pair in (0..matrix.n_pairs()).step_by(strip_pairs) {
            let n_left = matrix.n_outputs() - first_pair * PAIR_OUTPUTS;
            let n_columns = (strip_pairs * PAIR_OUTPUTS).min(n_left);
            strips.push(Strip {
                matrix,
                first_pair,
                first_column: column,
                n_columns,
            });
            column += n_columns;
        }
    }
    strips
}

/// Where the products of one strip go.
struct Place<'a> {
    target: &'a Shards<'a, f32>,
    stride: usize,
    adds: bool,
    strip: &'a Strip<'a>,
}

impl Place<'_> {
    /// Stores the products of rows from `first_row` on with pairs from `first_pair` of the strip on.
    fn store<const R: usize, const P: usize>(
        &self,
        (first_row, first_pair): (usize, usize),
        products: &RowBlock<R, P>,
    ) {
        let first_column = first_pair * PAIR_OUTPUTS;
        let n_columns = (self.strip.n_columns - first_column).min(P * PAIR_OUTPUTS);
        for (r, products) in products.iter().enumerate() {
            let start = (first_row + r) * self.stride + self.strip.first_column + first_column;
            // SAFETY: every (row, column) belongs to one part: parts differ in rows or in strips, and strips in
            // columns.
            let target = unsafe { self.target.range(start..start + n_columns) };
            for (target, product) in target.iter_mut().zip(products.as_flattened()) {
                *target = if self.adds {
                    *target + product
                } else {
                    *product
                };
            }
        }
    }

    /// Some rows times quantised weights.
    fn groups(&self, isa: Isa, layout: Layout, input: &Activations, rows: Range<usize>) {
        let mut row = rows.start;
        while row < rows.end {
            let most = if isa.is_wide() { 8 } else { 4 };
            row += match (rows.end - row).min(most) {
                8 => self.grouped_rows::<8>(isa, layout, input, row),
                4..8 => self.grouped_rows::<4>(isa, layout, input, row),
                3 => self.grouped_rows::<3>(isa, layout, input, row),
                2 => self.grouped_rows::<2>(isa, layout, input, row),
                _ => self.grouped_rows::<1>(isa, layout, input, row),
            };
        }
    }

    fn grouped_rows<const R: usize>(
        &self,
        isa: Isa,
        layout: Layout,
        input: &Activations,
        row: usize,
    ) -> usize {
        let [pair] = self.strip.pairs::<1>(0);
        let rows = quantised::Rows::new(input, row, R);
        self.store(
            (row, 0),
            &quantised::multiply::<R>(isa, layout, pair, &rows),
        );
        R
    }

    /// Some rows times float weights.
    fn floats(&self, isa: Isa, element: Element, input: &Activations, rows: Range<usize>) {
        let mut row = rows.start;
        while row < rows.end {
            row += match (rows.end - row, isa.is_wide()) {
                (8.., true) => self.float_rows::<8, 2>(isa, element, input, row),
                (4.., true) => self.float_rows::<4, 2>(isa, element, input, row),
                (4.., false) => self.float_rows::<4, 1>(isa, element, input, row),
                (3, _) => self.float_rows::<3, 2>(isa, element, input, row),
                (2, _) => self.float_rows::<2, 2>(isa, element, input, row),
                _ => self.float_rows::<1, 2>(isa, element, input, row),
            };
        }
    }

    fn float_rows<const R: usize, const P: usize>(
        &self,
        isa: Isa,
        element: Element,
        input: &Activations,
        row: usize,
    ) -> usize {
        let n = input.n_columns();
        let rows = &input.values()[row * n..(row + R) * n];
        let n_pairs = self.strip.n_columns.div_ceil(PAIR_OUTPUTS);
        for first in (0..n_pairs).step_by(P) {
            let pairs = self.strip.pairs::<P>(first);
            let products = float::multiply::<R, P>(isa, element, pairs, rows);
            self.store((row, first), &products);
        }
        R
    }
}

#[cfg(test)]
mod tests;
