//! Sixteen lanes in one AVX-512 register.

use super::{Element, Stored, Wide, WideKernel};
use crate::cpu::isa::Avx512;
use std::arch::x86_64::*;

/// Runs a kernel with the instructions that the proof stands for.
///
/// # Safety
/// The CPU has them, which is what having a proof means.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(crate) fn run<K: WideKernel>(proof: Avx512, kernel: K) -> K::Output {
    kernel.run(proof)
}

/// Two halves in one register.
#[inline(always)]
fn joined(low: __m256i, high: __m256i) -> __m512i {
    // SAFETY: called from this file's operations only, which have the proof.
    unsafe { _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high) }
}

/// Eight 16-bit numbers from each place.
///
/// # Safety
/// They can be read, and the CPU has AVX-512.
#[inline(always)]
unsafe fn halves(at: [*const u8; 2]) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let low = _mm256_castsi128_si256(_mm_loadu_si128(at[0].cast()));
        _mm256_inserti128_si256::<1>(low, _mm_loadu_si128(at[1].cast()))
    }
}

/// Eight bytes from each place.
///
/// # Safety
/// They can be read, and the CPU has AVX-512.
#[inline(always)]
unsafe fn eights(at: [*const u8; 2]) -> __m128i {
    // SAFETY: the caller's promise.
    unsafe { _mm_unpacklo_epi64(_mm_loadl_epi64(at[0].cast()), _mm_loadl_epi64(at[1].cast())) }
}

/// Lanes (0, 8), (1, 9), ... of `a` added, then those of `b`.
#[inline(always)]
fn fold_halves(a: __m512, b: __m512) -> __m512 {
    // SAFETY: as in `joined`.
    unsafe {
        let low = _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b);
        let high = _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b);
        _mm512_add_ps(low, high)
    }
}

/// Neighbours added, within each four lanes: two sums of `a`, then two of `b`.
#[inline(always)]
fn fold_neighbours(a: __m512, b: __m512) -> __m512 {
    // SAFETY: as in `joined`.
    unsafe {
        let even = _mm512_shuffle_ps::<0b10_00_10_00>(a, b);
        let odd = _mm512_shuffle_ps::<0b11_01_11_01>(a, b);
        _mm512_add_ps(even, odd)
    }
}

// Every operation below is one or two instructions that `self`, the proof, allows.
impl Wide for Avx512 {
    type F = __m512;
    type I = __m512i;

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        // SAFETY: `self` is the proof.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn load(self, at: *const f32) -> __m512 {
        // SAFETY: `self` is the proof; the caller promises the memory.
        unsafe { _mm512_loadu_ps(at) }
    }

    #[inline(always)]
    unsafe fn store(self, from: __m512, to: *mut f32) {
        // SAFETY: as in `load`.
        unsafe { _mm512_storeu_ps(to, from) }
    }

    #[inline(always)]
    unsafe fn elements<T: Stored>(self, at: [*const u8; 2]) -> __m512 {
        // SAFETY: as in `load`.
        unsafe {
            match T::ELEMENT {
                Element::F32 => _mm512_castsi512_ps(self.bytes(at)),
                Element::F16 => _mm512_cvtph_ps(halves(at)),
                Element::Bf16 => {
                    let wide = _mm512_cvtepu16_epi32(halves(at));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn unsigned(self, at: [*const u8; 2]) -> __m512 {
        // SAFETY: as in `load`.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(eights(at))) }
    }

    #[inline(always)]
    unsafe fn signed(self, at: [*const u8; 2]) -> __m512 {
        // SAFETY: as in `load`.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(eights(at))) }
    }

    #[inline(always)]
    unsafe fn store_f16(self, from: __m512, to: *mut u8) {
        // SAFETY: as in `load`.
        unsafe {
            let halves = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(from);
            _mm256_storeu_si256(to.cast(), halves);
        }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` is the proof.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` is the proof.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` is the proof.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` is the proof.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: `self` is the proof.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn fnma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: `self` is the proof.
        unsafe { _mm512_fnmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn fms(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: `self` is the proof.
        unsafe { _mm512_fmsub_ps(a, b, c) }
    }

    #[inline(always)]
    fn neg(self, a: __m512) -> __m512 {
        // SAFETY: `self` is the proof.
        unsafe { _mm512_xor_ps(a, _mm512_set1_ps(-0.0)) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` is the proof.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` is the proof.
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        // SAFETY: `self` is the proof.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }

    #[inline(always)]
    fn power_of_two(self, n: __m512) -> __m512 {
        // SAFETY: `self` is the proof.
        unsafe {
            let exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent))
        }
    }

    #[inline(always)]
    fn zero_below(self, a: __m512, x: __m512, bound: f32) -> __m512 {
        // SAFETY: `self` is the proof.
        unsafe {
            let keeps = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(bound));
            _mm512_maskz_mov_ps(keeps, a)
        }
    }

    #[inline(always)]
    fn array(self, a: __m512) -> [f32; 16] {
        let mut lanes = [0.0; 16];
        // SAFETY: the array holds 16 floats.
        unsafe { self.store(a, lanes.as_mut_ptr()) };
        lanes
    }

    #[inline(always)]
    fn fold_four(self, a: [__m512; 4]) -> __m512 {
        fold_neighbours(fold_halves(a[0], a[1]), fold_halves(a[2], a[3]))
    }

    #[inline(always)]
    fn fold_fours(self, a: [__m512; 4]) -> __m512 {
        let low = fold_neighbours(a[0], a[1]);
        let high = fold_neighbours(a[2], a[3]);
        // Per sum of 16 there are two parts now, in neighbouring fours: those of sums 0, 2, 4, 6 are in the first two fours of
        // `low`, those of 1, 3, 5, 7 in the last two; `high` has 8 to 15.
        // SAFETY: `self` is the proof.
        unsafe {
            let first = _mm512_shuffle_f32x4::<0b10_00_10_00>(low, high);
            let second = _mm512_shuffle_f32x4::<0b11_01_11_01>(low, high);
            let sums = _mm512_add_ps(first, second);
            let order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
            _mm512_permutexvar_ps(order, sums)
        }
    }

    #[inline(always)]
    fn splat_int(self, value: i32) -> __m512i {
        // SAFETY: `self` is the proof.
        unsafe { _mm512_set1_epi32(value) }
    }

    #[inline(always)]
    unsafe fn bytes(self, at: [*const u8; 2]) -> __m512i {
        // SAFETY: as in `load`.
        unsafe {
            joined(
                _mm256_loadu_si256(at[0].cast()),
                _mm256_loadu_si256(at[1].cast()),
            )
        }
    }

    #[inline(always)]
    unsafe fn four(self, at: *const i8) -> __m512i {
        // SAFETY: as in `load`.
        unsafe { _mm512_set1_epi32(at.cast::<i32>().read_unaligned()) }
    }

    #[inline(always)]
    fn and(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` is the proof.
        unsafe { _mm512_and_si512(a, b) }
    }

    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` is the proof.
        unsafe { _mm512_or_si512(a, b) }
    }

    #[inline(always)]
    fn xor(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` is the proof.
        unsafe { _mm512_xor_si512(a, b) }
    }

    #[inline(always)]
    fn up<const N: u32>(self, a: __m512i) -> __m512i {
        // SAFETY: `self` is the proof.
        unsafe { _mm512_slli_epi32::<N>(a) }
    }

    #[inline(always)]
    fn down<const N: u32>(self, a: __m512i) -> __m512i {
        // SAFETY: `self` is the proof.
        unsafe { _mm512_srli_epi32::<N>(a) }
    }

    #[inline(always)]
    fn dot(self, sums: __m512i, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` is the proof.
        unsafe { _mm512_dpbusd_epi32(sums, a, b) }
    }

    #[inline(always)]
    fn max_int(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` is the proof.
        unsafe { _mm512_max_epi32(a, b) }
    }

    #[inline(always)]
    fn sums_int(self, a: __m512i, b: __m512i) -> [i32; 2] {
        // SAFETY: `self` is the proof.
        unsafe {
            let halves = [a, b].map(|v| {
                let high = _mm512_extracti64x4_epi64::<1>(v);
                _mm256_add_epi32(_mm512_castsi512_si256(v), high)
            });
            let fours = _mm256_hadd_epi32(halves[0], halves[1]);
            let high = _mm256_extracti128_si256::<1>(fours);
            let twos = _mm_add_epi32(_mm256_castsi256_si128(fours), high);
            let sums = _mm_cvtsi128_si64(_mm_hadd_epi32(twos, twos));
            [sums as i32, (sums >> 32) as i32]
        }
    }

    #[inline(always)]
    fn largest_int(self, a: __m512i) -> i32 {
        // SAFETY: `self` is the proof.
        unsafe { _mm512_reduce_max_epi32(a) }
    }

    #[inline(always)]
    fn to_float(self, a: __m512i) -> __m512 {
        // SAFETY: `self` is the proof.
        unsafe { _mm512_cvtepi32_ps(a) }
    }

    #[inline(always)]
    fn to_int(self, a: __m512) -> __m512i {
        // SAFETY: `self` is the proof.
        unsafe { _mm512_cvtps_epi32(a) }
    }

    #[inline(always)]
    fn bits(self, a: __m512) -> __m512i {
        // SAFETY: `self` is the proof.
        unsafe { _mm512_castps_si512(a) }
    }

    #[inline(always)]
    unsafe fn store_low_bytes(self, from: __m512i, to: *mut i8) {
        // SAFETY: as in `load`.
        unsafe { _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(from)) }
    }
}
