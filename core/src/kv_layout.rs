//! How KV cache lies in memory: a block holds a fixed count of positions for all layers, as one range
//! `[layer][k|v][kv_head][token][head_dim]`; consecutive layers form layer groups; one block x one layer
//! group is a *slice*, which is again one range. Two nodes exchange slices only when their layouts'
//! fingerprints are equal, so this type is the whole contract between their pools.

use crate::bounds::BLOCK_TOKENS;
use crate::ids::{BlockIdx, LayerGroupIdx};
use std::ops::Range;

/// Revision of the numeric definitions. Raised when any kernel's results change by a bit.
pub const NUMERICS_REVISION: u32 = 1;
/// Revision of the hand-off protocol (messages and frames).
pub const PROTOCOL_REVISION: u32 = 2;
/// Layer groups are the fewest layers that reach this many bytes in a block.
const SLICE_BYTES_MIN: usize = 64 * 1024;

/// Element type of stored K and V.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum KvDtype {
    /// IEEE half precision, the default.
    F16,
    /// bfloat16.
    Bf16,
    /// Single precision, for the float path.
    F32,
}

impl KvDtype {
    /// Size of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }

    /// The name used in flags, handshakes and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        }
    }
}

impl std::str::FromStr for KvDtype {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "f16" => Ok(Self::F16),
            "bf16" => Ok(Self::Bf16),
            "f32" => Ok(Self::F32),
            other => Err(format!("kv dtype {other:?} is none of f16, bf16, f32")),
        }
    }
}

/// Why a layout was refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("kv layout: {field} is {value}; allowed is {bound}")]
pub struct LayoutError {
    /// The offending field.
    pub field: &'static str,
    /// What it was.
    pub value: u64,
    /// What it may be.
    pub bound: &'static str,
}

/// The shape of one model's KV blocks on one node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KvLayout {
    /// Transformer layers.
    pub n_layers: u32,
    /// KV heads held here (all heads divided by the tensor-parallel degree).
    pub n_kv_heads: u32,
    /// Elements per head.
    pub head_dim: u32,
    /// Token positions in a block.
    pub block_tokens: u32,
    /// Element type.
    pub dtype: KvDtype,
    /// Layers in a layer group; the last group may hold fewer.
    pub group_layers: u32,
    /// Tensor-parallel degree of the node.
    pub tp_degree: u32,
    /// Identity of the weights.
    pub model_fingerprint: [u8; 32],
}

/// One block x one layer group: the unit of readiness, transfer and digest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Slice {
    /// The block's place in the request's block list (not in any pool).
    pub ordinal: u32,
    /// The layer group.
    pub group: LayerGroupIdx,
}

impl KvLayout {
    /// A layout with the default block (16 positions) and layer groups of 64 KiB or more.
    ///
    /// # Errors
    /// Names the first field that is zero or beyond its bound.
    pub fn new(
        model_fingerprint: [u8; 32],
        n_layers: u32,
        n_kv_heads: u32,
        head_dim: u32,
        dtype: KvDtype,
    ) -> Result<Self, LayoutError> {
        let mut layout = Self {
            n_layers,
            n_kv_heads,
            head_dim,
            block_tokens: BLOCK_TOKENS,
            dtype,
            group_layers: 1,
            tp_degree: 1,
            model_fingerprint,
        };
        layout.check()?;
        let wanted = SLICE_BYTES_MIN.div_ceil(layout.layer_bytes());
        layout.group_layers = u32::try_from(wanted).unwrap_or(n_layers).min(n_layers);
        Ok(layout)
    }

    /// Checks every field against its bound.
    ///
    /// # Errors
    /// Names the first field that does not hold.
    pub fn check(&self) -> Result<(), LayoutError> {
        let within = |field, value: u32, max: u32, bound| {
            if value == 0 || value > max {
                return Err(LayoutError {
                    field,
                    value: u64::from(value),
                    bound,
                });
            }
            Ok(())
        };
        within("n_layers", self.n_layers, 1024, "1 to 1024")?;
        within("n_kv_heads", self.n_kv_heads, 1024, "1 to 1024")?;
        within("head_dim", self.head_dim, 1024, "1 to 1024")?;
        within("block_tokens", self.block_tokens, 256, "1 to 256")?;
        within("tp_degree", self.tp_degree, 64, "1 to 64")?;
        within(
            "group_layers",
            self.group_layers,
            self.n_layers,
            "1 to n_layers",
        )
    }

    /// Bytes of one layer's K and V in a block.
    pub fn layer_bytes(&self) -> usize {
        2 * self.n_kv_heads as usize
            * self.block_tokens as usize
            * self.head_dim as usize
            * self.dtype.bytes()
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.n_layers as usize * self.layer_bytes()
    }

    /// Layer groups in a block.
    pub fn n_groups(&self) -> u32 {
        self.n_layers.div_ceil(self.group_layers)
    }

    /// The layers of a group.
    pub fn group_layer_range(&self, group: LayerGroupIdx) -> Range<u32> {
        let first = group.0 * self.group_layers;
        first..(first + self.group_layers).min(self.n_layers)
    }

    /// The bytes of a group within its block.
    pub fn group_byte_range(&self, group: LayerGroupIdx) -> Range<usize> {
        let layers = self.group_layer_range(group);
        layers.start as usize * self.layer_bytes()..layers.end as usize * self.layer_bytes()
    }

    /// Blocks that hold `n_tokens` positions.
    pub fn n_blocks_for(&self, n_tokens: u32) -> u32 {
        n_tokens.div_ceil(self.block_tokens)
    }

    /// Every slice of `n_tokens` positions, in the order in which prefill finishes them.
    pub fn slices_for(&self, n_tokens: u32) -> impl Iterator<Item = Slice> + use<> {
        let n_blocks = self.n_blocks_for(n_tokens);
        let n_groups = self.n_groups();
        (0..n_blocks).flat_map(move |ordinal| {
            (0..n_groups).map(move |group| Slice {
                ordinal,
                group: LayerGroupIdx(group),
            })
        })
    }

    /// Identity of this layout, the weights and both revisions. Only equal fingerprints exchange KV.
    pub fn fingerprint(&self) -> [u8; 16] {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"tidemill-kv-layout-1");
        hasher.update(&self.model_fingerprint);
        for field in [
            self.n_layers,
            self.n_kv_heads,
            self.head_dim,
            self.block_tokens,
            self.group_layers,
            self.tp_degree,
            NUMERICS_REVISION,
            PROTOCOL_REVISION,
        ] {
            hasher.update(&field.to_le_bytes());
        }
        hasher.update(self.dtype.name().as_bytes());
        let mut short = [0_u8; 16];
        short.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        short
    }
}

/// A slice at rest: which bytes of which block of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SlicePlace {
    /// The slice within the request.
    pub slice: Slice,
    /// The block that holds it here.
    pub block: BlockIdx,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn smollm() -> KvLayout {
        KvLayout::new([1; 32], 30, 3, 64, KvDtype::F16).expect("valid")
    }

    #[test]
    fn groups_tile_the_block() {
        let layout = smollm();
        assert_eq!(layout.layer_bytes(), 12_288);
        assert_eq!(layout.group_layers, 6);
        assert_eq!(layout.n_groups(), 5);
        let mut end = 0;
        for group in 0..layout.n_groups() {
            let range = layout.group_byte_range(LayerGroupIdx(group));
            assert_eq!(range.start, end);
            end = range.end;
        }
        assert_eq!(end, layout.block_bytes());
    }

    #[test]
    fn every_field_changes_the_fingerprint() {
        let base = smollm();
        let mut other = base.clone();
        other.dtype = KvDtype::Bf16;
        assert_ne!(base.fingerprint(), other.fingerprint());
        let mut other = base.clone();
        other.model_fingerprint[0] = 2;
        assert_ne!(base.fingerprint(), other.fingerprint());
        let mut other = base.clone();
        other.block_tokens = 32;
        assert_ne!(base.fingerprint(), other.fingerprint());
    }

    #[test]
    fn zero_is_refused_by_name() {
        let error = KvLayout::new([0; 32], 0, 1, 1, KvDtype::F16).expect_err("no layers");
        assert_eq!(error.field, "n_layers");
    }

    #[test]
    fn slices_cover_the_partial_last_block() {
        assert_eq!(smollm().slices_for(17).count(), 10);
        assert_eq!(smollm().slices_for(16).count(), 5);
    }
}
