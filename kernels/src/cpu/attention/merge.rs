//! Merging the parts of tiles, in order: the running maximum, the sum of weights, and the weighted sums.

use super::tile::TilePart;
use crate::cpu::exp::{exp, exp_wide};
use crate::cpu::isa::{Isa, dispatch};
use crate::cpu::wide::{Wide, WideKernel};

/// What has been merged so far for one query; its weighted sums lie beside it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Running {
    so_far: Option<TilePart>,
}

impl Running {
    /// Adds a tile's part, with its weighted sums `found`, to `sums`.
    pub(super) fn add(&mut self, isa: Isa, part: &TilePart, found: &[f32], sums: &mut [f32]) {
        let Some(so_far) = self.so_far else {
            sums.copy_from_slice(found);
            self.so_far = Some(*part);
            return;
        };
        self.so_far = Some(dispatch!(
            isa,
            scalar([so_far, *part], found, sums),
            avx2::merge([so_far, *part], found, sums),
            Merge {
                parts: [so_far, *part],
                found,
                sums
            }
        ));
    }

    /// Writes the weighted mean.
    pub(super) fn finish(&self, sums: &[f32], target: &mut [f32]) {
        let so_far = self.so_far.expect("a position attends at least to itself");
        let inverse = 1.0 / so_far.sum;
        for (target, sum) in target.iter_mut().zip(sums) {
            *target = sum * inverse;
        }
    }
}

fn scalar(parts: [TilePart; 2], found: &[f32], sums: &mut [f32]) -> TilePart {
    let max = largest(parts);
    let [keep, take] = parts.map(|part| exp(part.max - max));
    for (sum, found) in sums.iter_mut().zip(found) {
        *sum = sum.mul_add(keep, found * take);
    }
    merged(parts, max, [keep, take])
}

#[inline(always)]
fn largest([so_far, part]: [TilePart; 2]) -> f32 {
    if so_far.max < part.max {
        part.max
    } else {
        so_far.max
    }
}

#[inline(always)]
fn merged([so_far, part]: [TilePart; 2], max: f32, [keep, take]: [f32; 2]) -> TilePart {
    TilePart {
        max,
        sum: so_far.sum.mul_add(keep, part.sum * take),
    }
}

/// Heads have whole sixteens of elements.
struct Merge<'a> {
    parts: [TilePart; 2],
    found: &'a [f32],
    sums: &'a mut [f32],
}

impl WideKernel for Merge<'_> {
    type Output = TilePart;

    #[inline(always)]
    fn run<W: Wide>(self, w: W) -> TilePart {
        let max = largest(self.parts);
        let keep = exp_wide(w, w.splat(self.parts[0].max - max));
        let take = exp_wide(w, w.splat(self.parts[1].max - max));
        let (sums, _) = self.sums.as_chunks_mut::<16>();
        for (sum, found) in sums.iter_mut().zip(self.found.as_chunks::<16>().0) {
            // SAFETY: both arrays hold 16 floats.
            unsafe {
                let taken = w.mul(w.load(found.as_ptr()), take);
                let kept = w.fma(w.load(sum.as_ptr()), keep, taken);
                w.store(kept, sum.as_mut_ptr());
            }
        }
        merged(self.parts, max, [w.array(keep)[0], w.array(take)[0]])
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{TilePart, largest, merged};
    use crate::cpu::exp::avx2::exp8;
    use crate::cpu::lanes::avx2::{load8, store8};
    use std::arch::x86_64::*;

    /// Heads have whole eights of elements.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn merge(parts: [TilePart; 2], found: &[f32], sums: &mut [f32]) -> TilePart {
        let max = largest(parts);
        let keep = exp8(_mm256_set1_ps(parts[0].max - max));
        let take = exp8(_mm256_set1_ps(parts[1].max - max));
        let (sums, _) = sums.as_chunks_mut::<8>();
        for (sum, found) in sums.iter_mut().zip(found.as_chunks::<8>().0) {
            let taken = _mm256_mul_ps(load8(found), take);
            store8(_mm256_fmadd_ps(load8(sum), keep, taken), sum);
        }
        merged(parts, max, [_mm256_cvtss_f32(keep), _mm256_cvtss_f32(take)])
    }
}
