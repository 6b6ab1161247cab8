//! The one way in which this crate adds up floats.
//!
//! Element `i` belongs to virtual lane `i % 16`; within a lane elements are taken in index order; lanes are added in
//! a fixed tree: `a[i] = lane[i] + lane[i + 8]`, then neighbours, then neighbours again, then the two halves. Two AVX2
//! registers, one AVX-512 register or a loop all compute exactly this.

/// Virtual lanes of a reduction.
pub(crate) const N_LANES: usize = 16;

/// Adds the lanes.
pub(crate) fn add_lanes(lanes: &[f32; N_LANES]) -> f32 {
    let a: [f32; 8] = std::array::from_fn(|i| lanes[i] + lanes[i + 8]);
    ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]))
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2 {
    use super::N_LANES;
    use std::arch::x86_64::*;

    /// Adds the lanes, held as lanes 0 to 7 and 8 to 15.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(crate) fn add_lanes(low: __m256, high: __m256) -> f32 {
        super::add_lanes(&stored(low, high))
    }

    /// The lanes as an array.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(crate) fn stored(low: __m256, high: __m256) -> [f32; N_LANES] {
        let mut lanes = [0.0; N_LANES];
        store8(low, &mut lanes[..8]);
        store8(high, &mut lanes[8..]);
        lanes
    }

    /// Adds up eight sets of 16 lanes at once; the tree is that of [`super::add_lanes`].
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(crate) fn add_lanes_of_eight(a: [__m256; 8]) -> __m256 {
        let first = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
        let second = _mm256_hadd_ps(_mm256_hadd_ps(a[4], a[5]), _mm256_hadd_ps(a[6], a[7]));
        _mm256_add_ps(
            _mm256_permute2f128_ps::<0x20>(first, second),
            _mm256_permute2f128_ps::<0x31>(first, second),
        )
    }

    /// The first eight floats.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(crate) fn load8(from: &[f32]) -> __m256 {
        assert!(from.len() >= 8, "eight floats to load");
        // SAFETY: just checked.
        unsafe { _mm256_loadu_ps(from.as_ptr()) }
    }

    /// Writes the first eight floats.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(crate) fn store8(from: __m256, to: &mut [f32]) {
        assert!(to.len() >= 8, "room for eight floats");
        // SAFETY: just checked.
        unsafe { _mm256_storeu_ps(to.as_mut_ptr(), from) }
    }
}
