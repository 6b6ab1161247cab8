//! Weights under names that do not depend on the container.
//!
//! A [`Tensors`] holds the mapped file and one place per [`TensorName`]. At opening, exactly the tensors that
//! the config asks for must be there, each with the shape that the config implies: a missing or a surplus
//! tensor means that file and config do not belong together, and the load is refused.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use crate::config::{ModelConfig, RopeScaling};
use crate::error::{LoadError, Refusal, quoted};
use crate::mapping::Mapping;

/// How the numbers of a tensor are stored. Block types are GGUF's, 32 or 256 elements of one row each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightType {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// The upper half of an IEEE single.
    BF16,
    /// f16 scale, 32 signed bytes.
    Q8_0,
    /// f16 scale, 32 nibbles less 8.
    Q4_0,
    /// f16 scale, f16 minimum, 32 nibbles.
    Q4_1,
    /// f16 scale, 32 high bits, 32 nibbles; less 16.
    Q5_0,
    /// f16 scale, f16 minimum, 32 high bits, 32 nibbles.
    Q5_1,
    /// 256 nibbles; for each 32 a scale and a minimum of 6 bits, which two f16 scale.
    Q4K,
    /// Like `Q4K`, with a fifth bit.
    Q5K,
    /// 256 numbers of 6 bits less 32; for each 16 a scale of 8 bits, which an f16 scales.
    Q6K,
}

impl WeightType {
    /// Every type.
    pub const ALL: [Self; 11] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q8_0,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
    ];
    pub(crate) const SUPPORTED: &'static str =
        "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K";

    /// The type's number in a GGUF file.
    pub fn ggml_id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q5_0 => 6,
            Self::Q5_1 => 7,
            Self::Q8_0 => 8,
            Self::Q4K => 12,
            Self::Q5K => 13,
            Self::Q6K => 14,
            Self::BF16 => 30,
        }
    }

    pub(crate) fn from_ggml_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.ggml_id() == id)
    }

    /// Elements that are stored together: 1, or 32 or 256 for block types. A row is a whole number of blocks.
    pub fn block_elements(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
            _ => 32,
        }
    }

    /// Bytes of one block of [`Self::block_elements`] elements.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q8_0 => 34,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// Bytes of a tensor with these dimensions, fastest first; what is wrong when there is no such tensor.
    pub(crate) fn n_bytes(self, dims: &[u64]) -> Result<u64, String> {
        if dims.contains(&0) {
            return Err(format!("dimensions {dims:?}: none may be zero"));
        }
        let columns = dims.first().copied().unwrap_or(1);
        let block = self.block_elements() as u64;
        if !columns.is_multiple_of(block) {
            return Err(format!(
                "rows of {columns} elements are no multiple of the {block} of a {self:?} block"
            ));
        }
        dims.iter()
            .skip(1)
            .try_fold(columns / block, |n, dim| n.checked_mul(*dim))
            .and_then(|n_blocks| n_blocks.checked_mul(self.block_bytes() as u64))
            .ok_or_else(|| format!("dimensions {dims:?}: the size in bytes exceeds 64 bits"))
    }
}

/// What a tensor is for, independent of its spelling in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TensorName {
    /// `[vocab_size, hidden_size]`; one row per token.
    TokenEmbedding,
    /// `[1, hidden_size]`; the norm before the head.
    OutputNorm,
    /// `[vocab_size, hidden_size]`; absent when the head is tied to the embedding.
    OutputHead,
    /// `[1, head_dim / 2]`; what each pair's frequency is divided by, in files that say so.
    RopeDivisors,
    /// A tensor of the layer with this index.
    Layer(u32, LayerTensor),
    /// A tensor of an expert: indices of layer and expert.
    Expert(u32, u32, ExpertTensor),
}

/// The tensors of one layer. Shapes are `[outputs, inputs]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LayerTensor {
    /// `[1, hidden_size]`
    AttnNorm,
    /// `[n_heads * head_dim, hidden_size]`
    Q,
    /// `[n_kv_heads * head_dim, hidden_size]`
    K,
    /// `[n_kv_heads * head_dim, hidden_size]`
    V,
    /// `[hidden_size, n_heads * head_dim]`
    O,
    /// `[1, hidden_size]`
    FfnNorm,
    /// `[intermediate_size, hidden_size]`
    Gate,
    /// `[intermediate_size, hidden_size]`
    Up,
    /// `[hidden_size, intermediate_size]`
    Down,
    /// `[1, n_heads * head_dim]`
    QBias,
    /// `[1, n_kv_heads * head_dim]`
    KBias,
    /// `[1, n_kv_heads * head_dim]`
    VBias,
    /// `[1, head_dim]`
    QNorm,
    /// `[1, head_dim]`
    KNorm,
    /// `[1, hidden_size]`; of what attention adds.
    PostAttnNorm,
    /// `[1, hidden_size]`; of what feed-forward adds.
    PostFfnNorm,
    /// `[n_experts, hidden_size]`
    Router,
}

/// The tensors of one expert. Shapes are `[outputs, inputs]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ExpertTensor {
    /// `[expert intermediate_size, hidden_size]`
    Gate,
    /// `[expert intermediate_size, hidden_size]`
    Up,
    /// `[hidden_size, expert intermediate_size]`
    Down,
}

impl fmt::Display for TensorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Layer(layer_idx, tensor) => write!(f, "layer {layer_idx} {tensor:?}"),
            Self::Expert(layer_idx, expert_idx, tensor) => {
                write!(f, "layer {layer_idx} expert {expert_idx} {tensor:?}")
            }
            other => write!(f, "{other:?}"),
        }
    }
}

/// One tensor's bytes in the mapped file.
#[derive(Clone, Copy)]
pub struct TensorView<'a> {
    /// Which tensor.
    pub name: TensorName,
    /// How its numbers are stored.
    pub dtype: WeightType,
    /// `[rows, cols]` = `[outputs, inputs]`, row-major. A vector is one row.
    pub shape: [usize; 2],
    /// `rows * cols / block_elements * block_bytes` bytes. Aligned as the container aligns it: for GGUF at least
    /// 8 bytes, for safetensors not at all.
    pub bytes: &'a [u8],
}

impl fmt::Debug for TensorView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?} {:?}", self.name, self.dtype, self.shape)
    }
}

/// A tensor as a container describes it, under its own spelling.
pub(crate) struct Found {
    pub(crate) spelling: String,
    /// `None`: a spelling that this family does not have.
    pub(crate) name: Option<TensorName>,
    pub(crate) dtype: WeightType,
    /// Row-major order.
    pub(crate) shape: Vec<u64>,
    /// Which of the mapped files.
    pub(crate) file_idx: usize,
    pub(crate) range: Range<usize>,
}

struct Place {
    dtype: WeightType,
    shape: [usize; 2],
    file_idx: usize,
    range: Range<usize>,
}

/// The files that hold the weights of one model.
pub(crate) struct WeightFiles {
    /// Whom a refusal names: the one file, or the index of several.
    pub(crate) label: PathBuf,
    pub(crate) mappings: Vec<Mapping>,
}

/// All weights of one model. Cheap to clone: the mapped files are shared and stay mapped while a clone lives.
///
/// The bytes are the files' own. Truncating or rewriting a file while it is mapped makes reads fault or
/// change; replace a model file by renaming a new one over it.
#[derive(Clone)]
pub struct Tensors {
    files: Arc<WeightFiles>,
    places: Arc<HashMap<TensorName, Place>>,
}

impl fmt::Debug for Tensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Tensors({} in {})",
            self.places.len(),
            self.files.label.display()
        )
    }
}

impl Tensors {
    pub(crate) fn new(
        files: WeightFiles,
        config: &ModelConfig,
        found: Vec<Found>,
    ) -> Result<Self, LoadError> {
        let places = place_all(config, found).map_err(|refusal| refusal.in_file(&files.label))?;
        Ok(Self {
            files: Arc::new(files),
            places: Arc::new(places),
        })
    }

    /// The tensor of this name.
    ///
    /// # Errors
    /// [`LoadError::Refused`] when the model has no such tensor: a layer beyond `n_layers`, or the output head of a
    /// model with a tied head.
    pub fn get(&self, name: TensorName) -> Result<TensorView<'_>, LoadError> {
        let place = self.places.get(&name).ok_or_else(|| {
            Refusal::new(name.to_string(), "the model has no such tensor")
                .in_file(&self.files.label)
        })?;
        Ok(TensorView {
            name,
            dtype: place.dtype,
            shape: place.shape,
            bytes: &self.files.mappings[place.file_idx].bytes()[place.range.clone()],
        })
    }

    /// All tensors in canonical order: embedding, output norm, output head, then layer by layer, then the experts.
    pub fn iter(&self) -> impl Iterator<Item = TensorView<'_>> {
        let mut names: Vec<TensorName> = self.places.keys().copied().collect();
        names.sort_unstable();
        names.into_iter().filter_map(|name| self.get(name).ok())
    }
}

/// The tensors that a config asks for, in canonical order, with their shapes `[rows, cols]`.
pub(crate) fn expected_tensors(config: &ModelConfig) -> Vec<(TensorName, [usize; 2])> {
    let hidden = config.hidden_size as usize;
    let vocab = config.vocab_size as usize;
    let mut expected = vec![
        (TensorName::TokenEmbedding, [vocab, hidden]),
        (TensorName::OutputNorm, [1, hidden]),
    ];
    if !config.tied_head {
        expected.push((TensorName::OutputHead, [vocab, hidden]));
    }
    if config.rope.scaling == RopeScaling::Divisors {
        let n_pairs = config.head_dim as usize / 2;
        expected.push((TensorName::RopeDivisors, [1, n_pairs]));
    }
    let of_layer = layer_tensors(config);
    for layer_idx in 0..config.n_layers {
        let named = |(tensor, shape): &(_, _)| (TensorName::Layer(layer_idx, *tensor), *shape);
        expected.extend(of_layer.iter().map(named));
    }
    let Some(experts) = config.experts else {
        return expected;
    };
    let inner = experts.intermediate_size as usize;
    for layer_idx in 0..config.n_layers {
        for expert_idx in 0..experts.n_experts {
            let name = |tensor| TensorName::Expert(layer_idx, expert_idx, tensor);
            expected.extend([
                (name(ExpertTensor::Gate), [inner, hidden]),
                (name(ExpertTensor::Up), [inner, hidden]),
                (name(ExpertTensor::Down), [hidden, inner]),
            ]);
        }
    }
    expected
}

/// The tensors of every layer, experts apart.
fn layer_tensors(config: &ModelConfig) -> Vec<(LayerTensor, [usize; 2])> {
    use LayerTensor as T;
    let hidden = config.hidden_size as usize;
    let head_dim = config.head_dim as usize;
    let q_rows = config.n_heads as usize * head_dim;
    let kv_rows = config.n_kv_heads as usize * head_dim;
    let mut tensors = vec![
        (T::AttnNorm, [1, hidden]),
        (T::Q, [q_rows, hidden]),
        (T::K, [kv_rows, hidden]),
        (T::V, [kv_rows, hidden]),
        (T::O, [hidden, q_rows]),
        (T::FfnNorm, [1, hidden]),
    ];
    match config.experts {
        Some(experts) => tensors.push((T::Router, [experts.n_experts as usize, hidden])),
        None => {
            let inner = config.intermediate_size as usize;
            tensors.extend([
                (T::Gate, [inner, hidden]),
                (T::Up, [inner, hidden]),
                (T::Down, [hidden, inner]),
            ]);
        }
    }
    if config.family.has_qkv_bias() {
        let biases = [(T::QBias, q_rows), (T::KBias, kv_rows), (T::VBias, kv_rows)];
        tensors.extend(biases.map(|(bias, n)| (bias, [1, n])));
    }
    if config.family.has_head_norms() {
        tensors.extend([T::QNorm, T::KNorm].map(|norm| (norm, [1, head_dim])));
    }
    if config.family.has_post_norms() {
        tensors.extend([T::PostAttnNorm, T::PostFfnNorm].map(|norm| (norm, [1, hidden])));
    }
    tensors
}

fn place_all(
    config: &ModelConfig,
    found: Vec<Found>,
) -> Result<HashMap<TensorName, Place>, Refusal> {
    let expected: HashMap<TensorName, [usize; 2]> = expected_tensors(config).into_iter().collect();
    let mut places = HashMap::with_capacity(expected.len());
    for tensor in found {
        let spelling = tensor.spelling;
        let (name, shape) = tensor
            .name
            .and_then(|name| Some((name, *expected.get(&name)?)))
            .ok_or_else(|| {
                Refusal::new(
                    quoted(&spelling),
                    format!(
                        "a tensor that a {:?} model of {} layers does not have",
                        config.family, config.n_layers
                    ),
                )
            })?;
        if !is_shape(&tensor.shape, shape) {
            return Err(Refusal::new(
                quoted(&spelling),
                format!("shape {:?}, but the config implies {shape:?}", tensor.shape),
            ));
        }
        let place = Place {
            dtype: tensor.dtype,
            shape,
            file_idx: tensor.file_idx,
            range: tensor.range,
        };
        if places.insert(name, place).is_some() {
            return Err(Refusal::new(
                quoted(&spelling),
                format!("{name} is there twice"),
            ));
        }
    }
    match expected
        .keys()
        .filter(|name| !places.contains_key(name))
        .min()
    {
        Some(missing) => Err(Refusal::new(
            missing.to_string(),
            format!(
                "this tensor is missing ({} of {} are there); the file is incomplete, get it again",
                places.len(),
                expected.len()
            ),
        )),
        None => Ok(places),
    }
}

/// The index in a layer tensor's spelling: decimal, without sign or leading zeros, so that no two spellings mean
/// one tensor.
pub(crate) fn layer_idx(digits: &str) -> Option<u32> {
    let idx: u32 = digits.parse().ok()?;
    (idx.to_string() == digits).then_some(idx)
}

/// A vector may be written with one dimension.
fn is_shape(found: &[u64], expected: [usize; 2]) -> bool {
    let [rows, cols] = [expected[0] as u64, expected[1] as u64];
    *found == [rows, cols] || (rows == 1 && *found == [cols])
}
