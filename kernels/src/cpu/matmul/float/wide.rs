//! Sixteen lanes: both panels of a pair in one register.

use super::super::RowBlock;
use crate::cpu::wide::{Stored, Wide, WideKernel, sixteen};
use std::marker::PhantomData;

/// R rows times P pairs.
pub(super) struct Pairs<'a, const R: usize, const P: usize, T> {
    pairs: [&'a [u8]; P],
    rows: &'a [f32],
    stored: PhantomData<T>,
}

impl<'a, const R: usize, const P: usize, T> Pairs<'a, R, P, T> {
    /// Lengths are those that `multiply` checks.
    pub(super) fn new(pairs: [&'a [u8]; P], rows: &'a [f32]) -> Self {
        Self {
            pairs,
            rows,
            stored: PhantomData,
        }
    }
}

impl<const R: usize, const P: usize, T: Stored> WideKernel for Pairs<'_, R, P, T> {
    type Output = RowBlock<R, P>;

    #[inline(always)]
    fn run<W: Wide>(self, w: W) -> RowBlock<R, P> {
        let n_inputs = self.rows.len() / R;
        let unit_bytes = 16 * T::ELEMENT.bytes();
        let mut sums = [[w.splat(0.0); P]; R];
        for i in 0..n_inputs {
            let mut weights = [w.splat(0.0); P];
            // SAFETY: `multiply` checked that every pair has sixteen weights for each input, and that there are R rows.
            unsafe {
                for (weights, pair) in weights.iter_mut().zip(&self.pairs) {
                    *weights = sixteen::<W, T>(w, pair.as_ptr().add(i * unit_bytes));
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let x = w.splat(*self.rows.get_unchecked(r * n_inputs + i));
                    for (sum, weights) in sums.iter_mut().zip(weights) {
                        *sum = w.fma(weights, x, *sum);
                    }
                }
            }
        }
        let mut products = [[[0.0; 16]; P]; R];
        for (sums, products) in sums.iter().zip(&mut products) {
            for (sum, products) in sums.iter().zip(products) {
                *products = w.array(*sum);
            }
        }
        products
    }
}
