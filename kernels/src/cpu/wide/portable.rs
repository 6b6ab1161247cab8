//! Sixteen lanes in an array: what each operation means, for tests.

use super::{Element, Stored, Wide};
use crate::cpu::lanes::add_lanes;
use half::{bf16, f16};

/// Operations that every machine has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Portable;

type F = [f32; 16];
type I = [i32; 16];

fn with(a: F, b: F, operation: impl Fn(f32, f32) -> f32) -> F {
    std::array::from_fn(|i| operation(a[i], b[i]))
}

fn with_int(a: I, b: I, operation: impl Fn(i32, i32) -> i32) -> I {
    std::array::from_fn(|i| operation(a[i], b[i]))
}

/// Eight arrays of bytes from each place.
///
/// # Safety
/// They can be read.
unsafe fn eights<const N: usize>(at: [*const u8; 2]) -> [[u8; N]; 16] {
    // SAFETY: the caller's promise.
    std::array::from_fn(|i| unsafe { at[i / 8].cast::<[u8; N]>().add(i % 8).read() })
}

impl Wide for Portable {
    type F = F;
    type I = I;

    fn splat(self, value: f32) -> F {
        [value; 16]
    }

    unsafe fn load(self, at: *const f32) -> F {
        // SAFETY: the caller's promise.
        unsafe { at.cast::<F>().read_unaligned() }
    }

    unsafe fn store(self, from: F, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<F>().write_unaligned(from) }
    }

    unsafe fn elements<T: Stored>(self, at: [*const u8; 2]) -> F {
        // SAFETY: the caller's promise.
        unsafe {
            match T::ELEMENT {
                Element::F32 => eights::<4>(at).map(f32::from_le_bytes),
                Element::F16 => eights::<2>(at).map(|b| f16::from_le_bytes(b).to_f32()),
                Element::Bf16 => eights::<2>(at).map(|b| bf16::from_le_bytes(b).to_f32()),
            }
        }
    }

    unsafe fn unsigned(self, at: [*const u8; 2]) -> F {
        // SAFETY: the caller's promise.
        unsafe { eights::<1>(at).map(|[byte]| f32::from(byte)) }
    }

    unsafe fn signed(self, at: [*const u8; 2]) -> F {
        // SAFETY: the caller's promise.
        unsafe { eights::<1>(at).map(|[byte]| f32::from(byte.cast_signed())) }
    }

    unsafe fn store_f16(self, from: F, to: *mut u8) {
        let halves = from.map(|value| f16::from_f32(value).to_le_bytes());
        // SAFETY: the caller's promise.
        unsafe { to.cast::<[[u8; 2]; 16]>().write_unaligned(halves) }
    }

    fn add(self, a: F, b: F) -> F {
        with(a, b, |a, b| a + b)
    }

    fn sub(self, a: F, b: F) -> F {
        with(a, b, |a, b| a - b)
    }

    fn mul(self, a: F, b: F) -> F {
        with(a, b, |a, b| a * b)
    }

    fn div(self, a: F, b: F) -> F {
        with(a, b, |a, b| a / b)
    }

    fn fma(self, a: F, b: F, c: F) -> F {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }

    fn fnma(self, a: F, b: F, c: F) -> F {
        std::array::from_fn(|i| (-a[i]).mul_add(b[i], c[i]))
    }

    fn fms(self, a: F, b: F, c: F) -> F {
        std::array::from_fn(|i| a[i].mul_add(b[i], -c[i]))
    }

    fn neg(self, a: F) -> F {
        a.map(|a| -a)
    }

    fn max(self, a: F, b: F) -> F {
        with(a, b, |a, b| if a > b { a } else { b })
    }

    fn min(self, a: F, b: F) -> F {
        with(a, b, |a, b| if a < b { a } else { b })
    }

    fn round(self, a: F) -> F {
        a.map(f32::round_ties_even)
    }

    fn power_of_two(self, n: F) -> F {
        n.map(|n| f32::from_bits(((n as i32 + 127) as u32) << 23))
    }

    fn zero_below(self, a: F, x: F, bound: f32) -> F {
        with(a, x, |a, x| if x < bound { 0.0 } else { a })
    }

    fn array(self, a: F) -> [f32; 16] {
        a
    }

    fn fold_four(self, a: [F; 4]) -> F {
        let mut sums = [0.0; 16];
        for (sum, lanes) in sums.iter_mut().zip(a) {
            *sum = add_lanes(&lanes);
        }
        sums
    }

    fn fold_fours(self, a: [F; 4]) -> F {
        std::array::from_fn(|i| a[i / 4][i % 4])
    }

    fn splat_int(self, value: i32) -> I {
        [value; 16]
    }

    unsafe fn bytes(self, at: [*const u8; 2]) -> I {
        // SAFETY: the caller's promise.
        unsafe { eights::<4>(at).map(i32::from_le_bytes) }
    }

    unsafe fn four(self, at: *const i8) -> I {
        // SAFETY: the caller's promise.
        [i32::from_le_bytes(unsafe { at.cast::<[u8; 4]>().read() }); 16]
    }

    fn and(self, a: I, b: I) -> I {
        with_int(a, b, |a, b| a & b)
    }

    fn or(self, a: I, b: I) -> I {
        with_int(a, b, |a, b| a | b)
    }

    fn xor(self, a: I, b: I) -> I {
        with_int(a, b, |a, b| a ^ b)
    }

    fn up<const N: u32>(self, a: I) -> I {
        a.map(|a| a << N)
    }

    fn down<const N: u32>(self, a: I) -> I {
        a.map(|a| (a.cast_unsigned() >> N).cast_signed())
    }

    fn dot(self, sums: I, a: I, b: I) -> I {
        std::array::from_fn(|i| {
            let products = a[i].to_le_bytes().into_iter().zip(b[i].to_le_bytes());
            sums[i]
                + products
                    .map(|(a, b)| i32::from(a) * i32::from(b.cast_signed()))
                    .sum::<i32>()
        })
    }

    fn max_int(self, a: I, b: I) -> I {
        with_int(a, b, i32::max)
    }

    fn sums_int(self, a: I, b: I) -> [i32; 2] {
        [a.iter().sum(), b.iter().sum()]
    }

    fn largest_int(self, a: I) -> i32 {
        a.into_iter().max().unwrap_or(0)
    }

    fn to_float(self, a: I) -> F {
        a.map(|a| a as f32)
    }

    fn to_int(self, a: F) -> I {
        a.map(|a| a.round_ties_even() as i32)
    }

    fn bits(self, a: F) -> I {
        a.map(|a| a.to_bits().cast_signed())
    }

    unsafe fn store_low_bytes(self, from: I, to: *mut i8) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<[i8; 16]>().write(from.map(|lane| lane as i8)) }
    }
}
