//! The product with some pairs of panels of float weights. The definition is in the parent module.
//!
//! Halves widen exactly, so f16, bf16 and f32 weights differ in the load only. A sum is a chain of dependent additions:
//! several rows or several panels at a time keep the multiplication units busy.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod wide;

use super::RowBlock;
use crate::cpu::isa::{Isa, dispatch};
use crate::cpu::packed::{PAIR_OUTPUTS, float_at};
use crate::cpu::wide::{Bf16, Element, F16, F32, Stored};

/// `rows` holds R rows, one after another.
pub(super) fn multiply<const R: usize, const P: usize>(
    isa: Isa,
    element: Element,
    pairs: [&[u8]; P],
    rows: &[f32],
) -> RowBlock<R, P> {
    match element {
        Element::F32 => of_element::<R, P, F32>(isa, pairs, rows),
        Element::F16 => of_element::<R, P, F16>(isa, pairs, rows),
        Element::Bf16 => of_element::<R, P, Bf16>(isa, pairs, rows),
    }
}

fn of_element<const R: usize, const P: usize, T: Stored>(
    isa: Isa,
    pairs: [&[u8]; P],
    rows: &[f32],
) -> RowBlock<R, P> {
    let n_inputs = rows.len() / R;
    // The vector forms read by pointer: these lengths are all that they rely on.
    assert_eq!(rows.len(), R * n_inputs, "R whole rows");
    for pair in pairs {
        let wanted = n_inputs * PAIR_OUTPUTS * T::ELEMENT.bytes();
        assert_eq!(pair.len(), wanted, "sixteen weights for each input");
    }
    dispatch!(
        isa,
        scalar(T::ELEMENT, pairs, rows),
        avx2::multiply::<R, P, T>(pairs, rows),
        wide::Pairs::<R, P, T>::new(pairs, rows)
    )
}

fn scalar<const R: usize, const P: usize>(
    element: Element,
    pairs: [&[u8]; P],
    rows: &[f32],
) -> RowBlock<R, P> {
    let n_inputs = rows.len() / R;
    let unit_bytes = PAIR_OUTPUTS * element.bytes();
    let mut products = [[[0.0_f32; PAIR_OUTPUTS]; P]; R];
    for (p, pair) in pairs.iter().enumerate() {
        for i in 0..n_inputs {
            let units = &pair[i * unit_bytes..(i + 1) * unit_bytes];
            for lane in 0..PAIR_OUTPUTS {
                let weight = float_at(element, units, lane);
                for (r, products) in products.iter_mut().enumerate() {
                    let sum = &mut products[p][lane];
                    *sum = weight.mul_add(rows[r * n_inputs + i], *sum);
                }
            }
        }
    }
    products
}
