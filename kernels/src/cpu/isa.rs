//! Which instructions the kernels use.
//!
//! The choice is a value that travels as an argument, so that one process (a test) can run every variant and compare
//! them. All variants give the same bits, so the choice changes speed and nothing else. The AVX2 variant carries a
//! proof that can be had only by looking at the CPU; safe callers can therefore never run what the CPU lacks.

/// An instruction set that this CPU has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Isa {
    /// Plain Rust: the reference.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2(Avx2),
}

/// Proof that the CPU has AVX2, FMA and F16C. Made by [`Isa::detect`] and [`Isa::available`] only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Avx2(());

impl Avx2 {
    #[cfg(target_arch = "x86_64")]
    fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has.then_some(Self(()))
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn detect() -> Option<Self> {
        None
    }
}

impl Isa {
    /// The fastest that this CPU has.
    pub fn detect() -> Self {
        Avx2::detect().map_or(Self::Scalar, Self::Avx2)
    }

    /// All that this CPU has, the reference first.
    pub fn available() -> Vec<Self> {
        let mut all = vec![Self::Scalar];
        all.extend(Avx2::detect().map(Self::Avx2));
        all
    }

    /// The name used in logs and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2(_) => "avx2",
        }
    }
}

/// Runs the scalar or the AVX2 expression. The second runs in an `unsafe` block: the proof inside [`Isa::Avx2`] is what
/// makes calling a function with those target features sound.
macro_rules! dispatch {
    ($isa:expr, $scalar:expr, $avx2:expr) => {
        match $isa {
            $crate::cpu::isa::Isa::Scalar => $scalar,
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the value holds a proof, made only after looking, that the CPU has AVX2, FMA and F16C.
            $crate::cpu::isa::Isa::Avx2(_) => unsafe { $avx2 },
            #[cfg(not(target_arch = "x86_64"))]
            $crate::cpu::isa::Isa::Avx2(_) => $scalar,
        }
    };
}
pub(crate) use dispatch;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_is_always_there_and_detect_is_the_last() {
        let all = Isa::available();
        assert_eq!(all.first(), Some(&Isa::Scalar));
        assert_eq!(all.last(), Some(&Isa::detect()));
    }
}
