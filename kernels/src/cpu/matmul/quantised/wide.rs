//! Sixteen lanes: both panels of a pair in one register.
//!
//! The instruction multiplies unsigned bytes (the weights) with signed ones (the activations), four products to a
//! lane, exactly. Levels are unsigned as stored; signed bytes go in as `w + 128`. What a level is too large by is
//! taken off afterwards, as `offset * sum of activations`: whole numbers below 2^24, so f32 holds them exactly.

use super::super::RowBlock;
use super::Rows;
use crate::cpu::packed::{Body, GROUP_INPUTS, Grouped, Head, PANEL_OUTPUTS};
use crate::cpu::wide::{F16, Wide, WideKernel};
use std::marker::PhantomData;

/// R rows times a pair of panels.
pub(super) struct Pair<'a, const R: usize, L> {
    pair: &'a [u8],
    rows: &'a Rows<'a>,
    layout: PhantomData<L>,
}

impl<'a, const R: usize, L> Pair<'a, R, L> {
    /// Lengths are those that `multiply` checks.
    pub(super) fn new(pair: &'a [u8], rows: &'a Rows<'a>) -> Self {
        Self {
            pair,
            rows,
            layout: PhantomData,
        }
    }
}

/// The weights of one group.
struct Group<W: Wide> {
    /// Of both halves; the same unless the layout has halves.
    scales: [W::F; 2],
    min: W::F,
    /// Unsigned bytes: four inputs of each output.
    steps: [W::I; 8],
}

/// Pointers moved on.
///
/// # Safety
/// The panels go on that far.
#[inline(always)]
unsafe fn on(at: [*const u8; 2], n_bytes: usize) -> [*const u8; 2] {
    // SAFETY: the caller's promise.
    unsafe { [at[0].add(n_bytes), at[1].add(n_bytes)] }
}

/// Group `within` of the units at `unit`.
///
/// # Safety
/// The units exist.
#[inline(always)]
unsafe fn group<W: Wide, L: Grouped>(w: W, unit: [*const u8; 2], within: usize) -> Group<W> {
    let layout = L::LAYOUT;
    // SAFETY: all reads stay within the units, whose parts `packed::layout` describes.
    unsafe {
        let at = on(unit, layout.unit_head() + within * layout.group_bytes());
        let scale = w.elements::<F16>(unit);
        let min_at = on(unit, 2 * PANEL_OUTPUTS);
        let (scales, min) = match layout.head {
            Head::Scale => ([scale; 2], scale),
            Head::ScaleMin => ([scale; 2], w.elements::<F16>(min_at)),
            Head::Super => {
                let small_min = w.unsigned(on(at, PANEL_OUTPUTS));
                let min = w.mul(w.elements::<F16>(min_at), small_min);
                ([w.mul(scale, w.unsigned(at)); 2], w.neg(min))
            }
            Head::SuperHalves => {
                let second = w.signed(on(at, PANEL_OUTPUTS));
                ([w.mul(scale, w.signed(at)), w.mul(scale, second)], scale)
            }
        };
        Group {
            scales,
            min,
            steps: steps::<W, L>(w, on(at, layout.group_head())),
        }
    }
}

/// # Safety
/// The bodies exist.
#[inline(always)]
unsafe fn steps<W: Wide, L: Grouped>(w: W, body: [*const u8; 2]) -> [W::I; 8] {
    let mut steps = [w.splat_int(0); 8];
    // SAFETY: a body has eight vectors of 32 bytes, or four and those of further bits.
    unsafe {
        if L::LAYOUT.body == Body::Bytes {
            for (j, step) in steps.iter_mut().enumerate() {
                let signed = w.bytes(on(body, 32 * j));
                *step = w.xor(signed, w.splat_int(0x8080_8080_u32.cast_signed()));
            }
            return steps;
        }
        let fifteen = w.splat_int(0x0f0f_0f0f);
        for j in 0..4 {
            let both = w.bytes(on(body, 32 * j));
            steps[j] = w.and(both, fifteen);
            steps[j + 4] = w.and(w.down::<4>(both), fifteen);
        }
        let (mask, further) = match L::LAYOUT.body {
            Body::Fives => {
                let bits = w.bytes(on(body, 128));
                let (a, b, c, d) = (
                    w.up::<4>(bits),
                    w.up::<3>(bits),
                    w.up::<2>(bits),
                    w.up::<1>(bits),
                );
                let (e, f, g) = (w.down::<1>(bits), w.down::<2>(bits), w.down::<3>(bits));
                (0x1010_1010, [a, b, c, d, bits, e, f, g])
            }
            Body::Sixes => {
                let (p, q) = (w.bytes(on(body, 128)), w.bytes(on(body, 160)));
                let (a, b, c) = (w.up::<4>(p), w.up::<2>(p), w.down::<2>(p));
                let (d, e, f) = (w.up::<4>(q), w.up::<2>(q), w.down::<2>(q));
                (0x3030_3030, [a, b, p, c, d, e, q, f])
            }
            Body::Nibbles | Body::Bytes => return steps,
        };
        let mask = w.splat_int(mask);
        for (step, bits) in steps.iter_mut().zip(further) {
            *step = w.or(*step, w.and(bits, mask));
        }
    }
    steps
}

impl<const R: usize, L: Grouped> Pair<'_, R, L> {
    /// What the levels are too large by.
    const OFFSET: f32 = match L::LAYOUT.body {
        Body::Bytes => 128.0,
        _ => L::LAYOUT.offset as f32,
    };

    /// The exact dot product of some steps with a row's activations.
    ///
    /// # Safety
    /// There are four activations for each step at `x`; `sum` points to their sum.
    #[inline(always)]
    unsafe fn dot<W: Wide>(w: W, steps: &[W::I], x: *const i8, sum: *const f32) -> W::F {
        let mut dot = w.splat_int(0);
        // SAFETY: the caller's promise.
        unsafe {
            for (s, step) in steps.iter().enumerate() {
                dot = w.dot(dot, *step, w.four(x.add(4 * s)));
            }
            if Self::OFFSET == 0.0 {
                return w.to_float(dot);
            }
            w.fnma(w.splat(*sum), w.splat(Self::OFFSET), w.to_float(dot))
        }
    }
}

impl<const R: usize, L: Grouped> WideKernel for Pair<'_, R, L> {
    type Output = RowBlock<R, 1>;

    #[inline(always)]
    fn run<W: Wide>(self, w: W) -> RowBlock<R, 1> {
        let (layout, rows) = (L::LAYOUT, self.rows);
        let mut sums = [w.splat(0.0); R];
        for g in 0..rows.n_groups {
            let (unit, within) = (g / layout.unit_groups(), g % layout.unit_groups());
            // SAFETY: `multiply` checked that both panels have `n_groups` groups and that there are R rows with the quants, scales
            // and sums of as many; all reads stay within group `g`.
            unsafe {
                let first = self.pair.as_ptr().add(2 * unit * layout.unit_bytes());
                let group = group::<W, L>(w, [first, first.add(layout.unit_bytes())], within);
                for (r, total) in sums.iter_mut().enumerate() {
                    let at = r * rows.n_groups + g;
                    let x = rows.quants.as_ptr().add(at * GROUP_INPUTS);
                    let sum_x = rows.sums.as_ptr().add(at);
                    let scale_x = w.splat(*rows.scales.get_unchecked(at));
                    if layout.has_halves() {
                        let half_sum = rows.half_sums.as_ptr().add(2 * at);
                        let first = Self::dot(w, &group.steps[..4], x, half_sum);
                        *total = w.fma(w.mul(group.scales[0], scale_x), first, *total);
                        let second = Self::dot(w, &group.steps[4..], x.add(16), half_sum.add(1));
                        *total = w.fma(w.mul(group.scales[1], scale_x), second, *total);
                    } else {
                        let dot = Self::dot(w, &group.steps, x, sum_x);
                        *total = w.fma(w.mul(group.scales[0], scale_x), dot, *total);
                    }
                    if layout.has_min() {
                        *total = w.fma(w.mul(group.min, scale_x), w.splat(*sum_x), *total);
                    }
                }
            }
        }
        let mut products = [[[0.0; 16]; 1]; R];
        for (sums, [products]) in sums.iter().zip(&mut products) {
            *products = w.array(*sums);
        }
        products
    }
}
