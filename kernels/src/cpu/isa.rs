//! Which instructions the kernels use.
//!
//! The choice is a value that travels as an argument, so that one process (a test) can run every variant and compare
//! them. All variants give the same bits, so the choice changes speed and nothing else. A vector variant carries a
//! proof that can be had only by looking at the CPU; safe callers can therefore never run what the CPU lacks.

/// An instruction set that this CPU has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Isa {
    /// Plain Rust: the reference.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2(Avx2),
    /// AVX-512 with VNNI.
    Avx512(Avx512),
    /// The source of the AVX-512 kernels over plain arrays.
    #[cfg(test)]
    Portable,
}

/// Proof that the CPU has AVX2, FMA and F16C. Made by [`Isa::detect`] and [`Isa::available`] only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Avx2(());

/// Proof that the CPU has AVX-512 F, BW, DQ, VL and VNNI besides AVX2, FMA and F16C. Made like [`Avx2`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Avx512(());

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

impl Avx512 {
    #[cfg(target_arch = "x86_64")]
    fn detect() -> Option<Self> {
        let has = Avx2::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni");
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
        let avx2 = || Avx2::detect().map_or(Self::Scalar, Self::Avx2);
        Avx512::detect().map_or_else(avx2, Self::Avx512)
    }

    /// All that this CPU has, the reference first.
    pub fn available() -> Vec<Self> {
        let mut all = vec![Self::Scalar];
        #[cfg(test)]
        all.push(Self::Portable);
        all.extend(Avx2::detect().map(Self::Avx2));
        all.extend(Avx512::detect().map(Self::Avx512));
        all
    }

    /// The name used in logs and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2(_) => "avx2",
            Self::Avx512(_) => "avx512",
            #[cfg(test)]
            Self::Portable => "portable",
        }
    }

    /// Whether kernels for sixteen lanes run: they like more rows at a time.
    pub(crate) fn is_wide(self) -> bool {
        !matches!(self, Self::Scalar | Self::Avx2(_))
    }
}

/// Runs the scalar expression, the AVX2 expression, or a [`WideKernel`](crate::cpu::wide::WideKernel). Without a wide
/// kernel, AVX-512 machines run the AVX2 expression. Vector forms run in an `unsafe` block: the proof inside the
/// [`Isa`] is what makes calling a function with those target features sound.
macro_rules! dispatch {
    ($isa:expr, $scalar:expr, $avx2:expr) => {
        match $isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the value holds a proof, made only after looking, that the CPU has AVX2, FMA and F16C.
            $crate::cpu::isa::Isa::Avx2(_) | $crate::cpu::isa::Isa::Avx512(_) => unsafe { $avx2 },
            _ => $scalar,
        }
    };
    ($isa:expr, $scalar:expr, $avx2:expr, $wide:expr) => {
        match $isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the value holds a proof, made only after looking, that the CPU has AVX2, FMA and F16C.
            $crate::cpu::isa::Isa::Avx2(_) => unsafe { $avx2 },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the value holds a proof that the CPU has all that `run` is compiled for.
            $crate::cpu::isa::Isa::Avx512(proof) => unsafe {
                $crate::cpu::wide::run(proof, $wide)
            },
            #[cfg(test)]
            $crate::cpu::isa::Isa::Portable => {
                $crate::cpu::wide::WideKernel::run($wide, $crate::cpu::wide::portable::Portable)
            }
            _ => $scalar,
        }
    };
}
pub(crate) use dispatch;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_is_always_there_and_detect_is_the_fastest() {
        let all = Isa::available();
        let names: Vec<_> = all.iter().map(|isa| isa.name()).collect();
        eprintln!("variants compared on this machine: {}", names.join(", "));
        assert_eq!(all.first(), Some(&Isa::Scalar));
        let fastest = all.last().copied().filter(|isa| *isa != Isa::Portable);
        assert_eq!(fastest.unwrap_or(Isa::Scalar), Isa::detect());
    }
}
