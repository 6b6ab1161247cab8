//! Kernels for sixteen lanes, written once.
//!
//! A kernel of this kind is a value, a [`WideKernel`], whose source speaks of [`Wide`] operations only. AVX-512 runs it with
//! one register for sixteen lanes; tests also run the very same source over plain arrays (`portable`), so that it is
//! compared with the scalar reference on machines without AVX-512 too. Everything is `inline(always)`, since only
//! code that ends up inside a function with the target features becomes vector code: no closures here.

#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(test)]
pub(crate) mod portable;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::run;

/// How floats lie in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Element {
    F32,
    F16,
    Bf16,
}

impl Element {
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// An element type as a type, so that a kernel is made for each.
pub(crate) trait Stored {
    const ELEMENT: Element;
}

/// IEEE single.
pub(crate) struct F32;
/// IEEE half.
pub(crate) struct F16;
/// The upper half of an IEEE single.
pub(crate) struct Bf16;

impl Stored for F32 {
    const ELEMENT: Element = Element::F32;
}
impl Stored for F16 {
    const ELEMENT: Element = Element::F16;
}
impl Stored for Bf16 {
    const ELEMENT: Element = Element::Bf16;
}

/// An operation that can be done with sixteen lanes.
pub(crate) trait WideKernel {
    /// What it gives.
    type Output;
    /// Does it. Implementations are `inline(always)`.
    fn run<W: Wide>(self, w: W) -> Self::Output;
}

/// Sixteen lanes of f32 or i32. A value of this type is the proof that the operations exist. A pair of pointers is
/// read as lanes 0 to 7 and lanes 8 to 15: two panels side by side, or the halves of one run.
pub(crate) trait Wide: Copy {
    /// Sixteen f32.
    type F: Copy;
    /// Sixteen i32, or 64 bytes.
    type I: Copy;

    /// The number in every lane.
    fn splat(self, value: f32) -> Self::F;
    /// Sixteen floats.
    ///
    /// # Safety
    /// They can be read.
    unsafe fn load(self, at: *const f32) -> Self::F;
    /// Writes sixteen floats.
    ///
    /// # Safety
    /// They can be written.
    unsafe fn store(self, from: Self::F, to: *mut f32);
    /// Eight elements from each place, widened exactly.
    ///
    /// # Safety
    /// They can be read.
    unsafe fn elements<T: Stored>(self, at: [*const u8; 2]) -> Self::F;
    /// Eight unsigned bytes from each place, as numbers.
    ///
    /// # Safety
    /// They can be read.
    unsafe fn unsigned(self, at: [*const u8; 2]) -> Self::F;
    /// Eight signed bytes from each place, as numbers.
    ///
    /// # Safety
    /// They can be read.
    unsafe fn signed(self, at: [*const u8; 2]) -> Self::F;
    /// Writes sixteen f16, rounded to nearest even.
    ///
    /// # Safety
    /// 32 bytes can be written.
    unsafe fn store_f16(self, from: Self::F, to: *mut u8);

    /// `a + b`
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a - b`
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a / b`
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `c - a * b`, rounded once.
    fn fnma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a * b - c`, rounded once.
    fn fms(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The sign turned round.
    fn neg(self, a: Self::F) -> Self::F;
    /// The larger; `b` when one is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// The smaller; `b` when one is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// The nearest whole number, ties to even.
    fn round(self, a: Self::F) -> Self::F;
    /// 2 to the power of a whole number from -126 to 127.
    fn power_of_two(self, n: Self::F) -> Self::F;
    /// `a`, but 0 where `x < bound`.
    fn zero_below(self, a: Self::F, x: Self::F, bound: f32) -> Self::F;
    /// The lanes as an array.
    fn array(self, a: Self::F) -> [f32; 16];
    /// Adds up the lanes of four, in the tree of `lanes::add_lanes`, as far as that goes without the others.
    fn fold_four(self, a: [Self::F; 4]) -> Self::F;
    /// Lane `4 i + j` of the result: the sum of the lanes of number `j` of `fold_four` number `i`.
    fn fold_fours(self, a: [Self::F; 4]) -> Self::F;

    /// The number in every lane.
    fn splat_int(self, value: i32) -> Self::I;
    /// 32 bytes from each place.
    ///
    /// # Safety
    /// They can be read.
    unsafe fn bytes(self, at: [*const u8; 2]) -> Self::I;
    /// The same four bytes in every lane.
    ///
    /// # Safety
    /// They can be read.
    unsafe fn four(self, at: *const i8) -> Self::I;
    /// The bits of both.
    fn and(self, a: Self::I, b: Self::I) -> Self::I;
    /// The bits of either.
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    /// The bits of one.
    fn xor(self, a: Self::I, b: Self::I) -> Self::I;
    /// Bits of each lane moved up by `N`.
    fn up<const N: u32>(self, a: Self::I) -> Self::I;
    /// Bits of each lane moved down by `N`, zeros following.
    fn down<const N: u32>(self, a: Self::I) -> Self::I;
    /// `sums[i]` plus the four products of the unsigned bytes `a` and the signed bytes `b` of lane `i`.
    fn dot(self, sums: Self::I, a: Self::I, b: Self::I) -> Self::I;
    /// The larger of signed numbers.
    fn max_int(self, a: Self::I, b: Self::I) -> Self::I;
    /// The sums of all lanes of each.
    fn sums_int(self, a: Self::I, b: Self::I) -> [i32; 2];
    /// The largest signed lane.
    fn largest_int(self, a: Self::I) -> i32;
    /// As numbers.
    fn to_float(self, a: Self::I) -> Self::F;
    /// The nearest whole numbers, ties to even, of numbers below 2^31 in magnitude.
    fn to_int(self, a: Self::F) -> Self::I;
    /// The bits of the floats.
    fn bits(self, a: Self::F) -> Self::I;
    /// Writes the low byte of each lane.
    ///
    /// # Safety
    /// 16 bytes can be written.
    unsafe fn store_low_bytes(self, from: Self::I, to: *mut i8);
}

/// The sixteen elements from `at` on.
///
/// # Safety
/// They can be read.
#[inline(always)]
pub(crate) unsafe fn sixteen<W: Wide, T: Stored>(w: W, at: *const u8) -> W::F {
    // SAFETY: the caller's promise.
    unsafe { w.elements::<T>([at, at.add(8 * T::ELEMENT.bytes())]) }
}

#[cfg(test)]
mod tests;
