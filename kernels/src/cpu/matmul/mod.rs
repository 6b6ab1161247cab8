//! Rows times weight matrices.
//!
//! `output[row][o] = sum over i of weight[o][i] * row[i]`, for several matrices that read the same rows (q, k and v; gate
//! and up) side by side. Quantised weights: for each group of 32 inputs the exact integer dot product, then
//! `sum = fma(scale_w * scale_x, dot, sum)` and, for weights with a minimum, `sum = fma(min_w * scale_x, sum_x, sum)`, groups in
//! index order. Float weights: `sum = fma(w, x, sum)` in index order. Lanes are outputs, so no sum crosses
//! lanes, and the number of rows computed together changes nothing.

mod float;
mod quantised;

use crate::cpu::activations::Activations;
use crate::cpu::isa::Isa;
use crate::cpu::packed::{PANEL_OUTPUTS, PackedMatrix};
use crate::cpu::shards::Shards;
use crate::cpu::team::Team;

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

/// Products of some rows with one panel.
pub(crate) type RowBlock<const R: usize> = [[f32; PANEL_OUTPUTS]; R];

/// One panel of one of the matrices, and the columns that its products fill.
struct Panel<'a> {
    matrix: &'a PackedMatrix,
    panel: usize,
    first_column: usize,
    n_columns: usize,
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
    let panels = panels_of(matrices, input);
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
    let panel_bytes = panels.first().map_or(1, |p| p.matrix.panel(0).len());
    let part_panels = (PART_BYTES_MIN / panel_bytes / n_rows.clamp(1, 8)).max(1);
    let n_column_parts = panels.len().div_ceil(part_panels);
    let n_row_parts = n_rows.div_ceil(PART_ROWS);
    team.run(n_row_parts * n_column_parts, &|part| {
        let first_row = part / n_column_parts * PART_ROWS;
        let rows = first_row..(first_row + PART_ROWS).min(n_rows);
        let first = part % n_column_parts * part_panels;
        for panel in &panels[first..(first + part_panels).min(panels.len())] {
            let place = Place {
                target: &target,
                stride,
                adds,
                panel,
            };
            multiply_panel(isa, input, rows.clone(), &place);
        }
    });
}

fn panels_of<'a>(matrices: &[&'a PackedMatrix], input: &Activations) -> Vec<Panel<'a>> {
    let mut panels = Vec::new();
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
        for panel in 0..matrix.n_panels() {
            let n_columns = PANEL_OUTPUTS.min(matrix.n_outputs() - panel * PANEL_OUTPUTS);
            panels.push(Panel {
                matrix,
                panel,
                first_column: column,
                n_columns,
            });
            column += n_columns;
        }
    }
    panels
}

/// Where the products of one panel go.
struct Place<'a> {
    target: &'a Shards<'a, f32>,
    stride: usize,
    adds: bool,
    panel: &'a Panel<'a>,
}

impl Place<'_> {
    fn store<const R: usize>(&self, first_row: usize, products: &RowBlock<R>) {
        for (r, products) in products.iter().enumerate() {
            let start = (first_row + r) * self.stride + self.panel.first_column;
            // SAFETY: every (row, column) belongs to one part: parts differ in rows or in panels, and panels in
            // columns.
            let target = unsafe { self.target.range(start..start + self.panel.n_columns) };
            for (target, product) in target.iter_mut().zip(products) {
                *target = if self.adds {
                    *target + product
                } else {
                    *product
                };
            }
        }
    }
}

fn multiply_panel(isa: Isa, input: &Activations, rows: std::ops::Range<usize>, place: &Place<'_>) {
    let mut row = rows.start;
    if !place.panel.matrix.is_quantised() {
        // Chains of dependent additions: eight of them keep both multiplication units busy.
        while row + 8 <= rows.end {
            place.store(row, &multiply_rows::<8>(isa, input, row, place.panel));
            row += 8;
        }
    }
    while row + 4 <= rows.end {
        place.store(row, &multiply_rows::<4>(isa, input, row, place.panel));
        row += 4;
    }
    match rows.end - row {
        3 => place.store(row, &multiply_rows::<3>(isa, input, row, place.panel)),
        2 => place.store(row, &multiply_rows::<2>(isa, input, row, place.panel)),
        1 => place.store(row, &multiply_rows::<1>(isa, input, row, place.panel)),
        _ => {}
    }
}

fn multiply_rows<const R: usize>(
    isa: Isa,
    input: &Activations,
    first_row: usize,
    panel: &Panel<'_>,
) -> RowBlock<R> {
    let packing = panel.matrix.packing;
    let bytes = panel.matrix.panel(panel.panel);
    if packing.is_quantised() {
        quantised::multiply::<R>(
            isa,
            packing,
            bytes,
            &quantised::Rows::new(input, first_row, R),
        )
    } else {
        let n = input.n_columns();
        let rows = &input.values()[first_row * n..(first_row + R) * n];
        float::multiply::<R>(isa, packing, bytes, rows)
    }
}

#[cfg(test)]
mod tests;
