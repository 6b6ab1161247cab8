//! Where the numbers of a quantised panel lie.
//!
//! A unit is one group of 32 inputs, or a super-block of eight groups, for eight outputs:
//! `[8 f16 scales][8 f16 minima, if any]`, then for each group `[8 + 8 small scales, if any][body]`. In a body, number `i` of a
//! lane belongs to step `i / 4`, and the four bytes of a step lie together for each lane. Nibbles: vector `j` of 32 bytes has
//! step `j` in its low and step `j + 4` in its high nibbles. Further bits follow in vectors of their own, a field per step, so that
//! one mask and one shift bring them into place.

use super::block::Block;
use super::{GROUP_INPUTS, PANEL_OUTPUTS};
use half::f16;

/// Groups of a super-block.
pub(crate) const SUPER_GROUPS: usize = 8;
/// Bytes of eight f16.
const EIGHT_HALVES: usize = 16;
/// Bytes of the eight lanes of one step.
const STEP_BYTES: usize = 32;

/// The scales of a unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Head {
    /// One group: a scale.
    Scale,
    /// One group: a scale and a minimum.
    ScaleMin,
    /// Eight groups: a scale and a minimum, times an unsigned byte of each group.
    Super,
    /// Eight groups: a scale, times a signed byte of each half of a group.
    SuperHalves,
}

/// The numbers of a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Body {
    /// 4 bits.
    Nibbles,
    /// 4 bits, then a vector with bit `s` of each byte for step `s`.
    Fives,
    /// 4 bits, then a vector for each half with two bits for each of its four steps.
    Sixes,
    /// 8 bits, signed.
    Bytes,
}

/// How quantised panels lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Layout {
    pub(crate) head: Head,
    pub(crate) body: Body,
    /// What a number is less than its stored level.
    pub(crate) offset: u8,
}

/// A layout as a type, so that a kernel is made for each.
pub(crate) trait Grouped {
    const LAYOUT: Layout;
}

macro_rules! layouts {
    ($($(#[$doc:meta])* $name:ident = $head:ident, $body:ident, $offset:literal;)*) => {$(
        $(#[$doc])*
        pub(crate) struct $name;

        impl Grouped for $name {
            const LAYOUT: Layout = Layout {
                head: Head::$head,
                body: Body::$body,
                offset: $offset,
            };
        }
    )*};
}

layouts! {
    /// Q4_0.
    Nibbles = Scale, Nibbles, 8;
    /// Q4_1.
    NibblesMin = ScaleMin, Nibbles, 0;
    /// Q5_0.
    Fives = Scale, Fives, 16;
    /// Q5_1.
    FivesMin = ScaleMin, Fives, 0;
    /// Q8_0.
    Bytes = Scale, Bytes, 0;
    /// Q4_K.
    NibblesK = Super, Nibbles, 0;
    /// Q5_K.
    FivesK = Super, Fives, 0;
    /// Q6_K.
    SixesK = SuperHalves, Sixes, 32;
}

impl Layout {
    pub(crate) const fn unit_groups(self) -> usize {
        match self.head {
            Head::Scale | Head::ScaleMin => 1,
            Head::Super | Head::SuperHalves => SUPER_GROUPS,
        }
    }

    /// Bytes before a unit's first group.
    pub(crate) const fn unit_head(self) -> usize {
        match self.head {
            Head::Scale | Head::SuperHalves => EIGHT_HALVES,
            Head::ScaleMin | Head::Super => 2 * EIGHT_HALVES,
        }
    }

    /// Bytes before a group's body.
    pub(crate) const fn group_head(self) -> usize {
        match self.head {
            Head::Scale | Head::ScaleMin => 0,
            Head::Super | Head::SuperHalves => 2 * PANEL_OUTPUTS,
        }
    }

    /// Bytes of a group.
    pub(crate) const fn group_bytes(self) -> usize {
        let vectors = match self.body {
            Body::Nibbles => 4,
            Body::Fives => 5,
            Body::Sixes => 6,
            Body::Bytes => 8,
        };
        self.group_head() + vectors * STEP_BYTES
    }

    pub(crate) const fn unit_bytes(self) -> usize {
        self.unit_head() + self.unit_groups() * self.group_bytes()
    }

    /// Whether sums of activations are needed for a minimum.
    pub(crate) const fn has_min(self) -> bool {
        matches!(self.head, Head::ScaleMin | Head::Super)
    }

    /// Whether each half of a group has a scale of its own.
    pub(crate) const fn has_halves(self) -> bool {
        matches!(self.head, Head::SuperHalves)
    }

    /// Puts a block into its lane of a unit.
    pub(super) fn put(self, block: &Block, lane: usize, unit: &mut [u8]) {
        unit[lane * 2..lane * 2 + 2].copy_from_slice(&block.scale);
        if self.has_min() {
            let at = EIGHT_HALVES + lane * 2;
            unit[at..at + 2].copy_from_slice(&block.min);
        }
        let groups = unit[self.unit_head()..].chunks_exact_mut(self.group_bytes());
        for (group, (small, levels)) in groups.zip(block.small.iter().zip(&block.levels)) {
            let (head, body) = group.split_at_mut(self.group_head());
            if !head.is_empty() {
                head[lane] = small[0];
                head[PANEL_OUTPUTS + lane] = small[1];
            }
            put_levels(self.body, levels, lane, body);
        }
    }

    /// Group `group` of one output of a unit, unpacked.
    pub(crate) fn group(self, unit: &[u8], group: usize, lane: usize) -> Group {
        let half_at = |at: usize| f16::from_le_bytes([unit[at], unit[at + 1]]).to_f32();
        let scale = half_at(lane * 2);
        let at = self.unit_head() + group * self.group_bytes();
        let (head, body) = unit[at..at + self.group_bytes()].split_at(self.group_head());
        let small = |i: usize| head[i * PANEL_OUTPUTS + lane];
        let (scales, min) = match self.head {
            Head::Scale => ([scale; 2], 0.0),
            Head::ScaleMin => ([scale; 2], half_at(EIGHT_HALVES + lane * 2)),
            Head::Super => {
                let min = half_at(EIGHT_HALVES + lane * 2) * f32::from(small(1));
                ([scale * f32::from(small(0)); 2], -min)
            }
            Head::SuperHalves => (
                [0, 1].map(|half| scale * f32::from(small(half).cast_signed())),
                0.0,
            ),
        };
        Group {
            scales,
            min,
            quants: std::array::from_fn(|i| {
                let level = level_at(self.body, body, lane, i);
                match self.body {
                    Body::Bytes => i16::from(level.cast_signed()),
                    _ => i16::from(level) - i16::from(self.offset),
                }
            }),
        }
    }
}

/// The byte of number `i` of a lane, in bodies with a byte for each.
fn byte_of(lane: usize, i: usize) -> usize {
    i / 4 * STEP_BYTES + lane * 4 + i % 4
}

fn put_levels(body: Body, levels: &[u8; GROUP_INPUTS], lane: usize, to: &mut [u8]) {
    for (i, &level) in levels.iter().enumerate() {
        if body == Body::Bytes {
            to[byte_of(lane, i)] = level;
            continue;
        }
        to[byte_of(lane, i % 16)] |= (level & 15) << (i / 16 * 4);
        let further = 4 * STEP_BYTES + byte_of(lane, i % 4);
        match body {
            Body::Fives => to[further] |= level >> 4 << (i / 4),
            Body::Sixes => to[further + i / 16 * STEP_BYTES] |= level >> 4 << (i % 16 / 4 * 2),
            Body::Nibbles | Body::Bytes => {}
        }
    }
}

fn level_at(body: Body, from: &[u8], lane: usize, i: usize) -> u8 {
    if body == Body::Bytes {
        return from[byte_of(lane, i)];
    }
    let nibble = from[byte_of(lane, i % 16)] >> (i / 16 * 4) & 15;
    let further = 4 * STEP_BYTES + byte_of(lane, i % 4);
    match body {
        Body::Fives => nibble | (from[further] >> (i / 4) & 1) << 4,
        Body::Sixes => nibble | (from[further + i / 16 * STEP_BYTES] >> (i % 16 / 4 * 2) & 3) << 4,
        Body::Nibbles | Body::Bytes => nibble,
    }
}

/// One group of one output, unpacked.
pub(crate) struct Group {
    /// Of the first and the second 16 inputs.
    pub(crate) scales: [f32; 2],
    /// 0 when the layout has none.
    pub(crate) min: f32,
    /// -128 to 127.
    pub(crate) quants: [i16; GROUP_INPUTS],
}

impl Group {
    /// The numbers that it stands for.
    pub(crate) fn to_f32(&self, values: &mut [f32]) {
        for (i, (value, quant)) in values.iter_mut().zip(self.quants).enumerate() {
            *value = f32::from(quant) * self.scales[i / 16] + self.min;
        }
    }
}
