//! The storage types of model files.

use super::layout::{
    Bytes, Fives, FivesK, FivesMin, Grouped, Nibbles, NibblesK, NibblesMin, SixesK,
};
use super::{GROUP_INPUTS, Packing, SUPER_GROUPS};
use crate::cpu::wide::Element;

/// How the numbers of a matrix lie in a model file. The block types are GGUF's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WeightFormat {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// The upper half of an IEEE single.
    Bf16,
    /// f16 scale, 32 nibbles less 8.
    Q4_0,
    /// f16 scale, f16 minimum, 32 nibbles.
    Q4_1,
    /// f16 scale, 32 high bits, 32 nibbles; less 16.
    Q5_0,
    /// f16 scale, f16 minimum, 32 high bits, 32 nibbles.
    Q5_1,
    /// f16 scale, 32 signed bytes.
    Q8_0,
    /// 256 nibbles; for each 32 a scale and a minimum of 6 bits, which two f16 scale.
    Q4K,
    /// Like `Q4K`, with a fifth bit.
    Q5K,
    /// 256 numbers of 6 bits less 32; for each 16 a scale of 8 bits, which an f16 scales.
    Q6K,
}

impl WeightFormat {
    /// Every format.
    pub const ALL: [Self; 11] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
    ];

    /// Elements stored together, and their bytes.
    pub fn block(self) -> (usize, usize) {
        let super_inputs = SUPER_GROUPS * GROUP_INPUTS;
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q4_0 => (GROUP_INPUTS, 18),
            Self::Q4_1 => (GROUP_INPUTS, 20),
            Self::Q5_0 => (GROUP_INPUTS, 22),
            Self::Q5_1 => (GROUP_INPUTS, 24),
            Self::Q8_0 => (GROUP_INPUTS, 34),
            Self::Q4K => (super_inputs, 144),
            Self::Q5K => (super_inputs, 176),
            Self::Q6K => (super_inputs, 210),
        }
    }

    pub(super) fn packing(self) -> Packing {
        match self {
            Self::F32 => Packing::Floats(Element::F32),
            Self::F16 => Packing::Floats(Element::F16),
            Self::Bf16 => Packing::Floats(Element::Bf16),
            Self::Q4_0 => Packing::Groups(Nibbles::LAYOUT),
            Self::Q4_1 => Packing::Groups(NibblesMin::LAYOUT),
            Self::Q5_0 => Packing::Groups(Fives::LAYOUT),
            Self::Q5_1 => Packing::Groups(FivesMin::LAYOUT),
            Self::Q8_0 => Packing::Groups(Bytes::LAYOUT),
            Self::Q4K => Packing::Groups(NibblesK::LAYOUT),
            Self::Q5K => Packing::Groups(FivesK::LAYOUT),
            Self::Q6K => Packing::Groups(SixesK::LAYOUT),
        }
    }
}
