//! Weights, packed: what all families share, which is Llama's.
//!
//! What a family adds stands in a file of its own beside this one, and here as an optional part of a layer. Files whose
//! rope pairs are interleaved (GGUF of Llama) get the rows of q and k reordered here, so that there is one rope. A tied
//! head is the embedding itself.

use super::gemma3::PostNorms;
use super::qwen2;
use super::qwen3::HeadNorms;
use super::qwen3_moe::Mixture;
use super::{ModelError, Reach};
use tidemill_kernels::cpu::{PackedMatrix, RawMatrix, WeightFormat};
use tidemill_model_files::{
    LayerTensor, ModelFiles, NormWeights, RopeStyle, TensorName, TensorView, WeightType,
};

/// One layer.
pub(crate) struct Layer {
    /// What its rows see.
    pub(crate) reach: Reach,
    /// `[hidden]`
    pub(crate) attn_norm: Vec<f32>,
    /// q, k and v: `[heads * head_dim, hidden]` each.
    pub(crate) qkv: [PackedMatrix; 3],
    /// `[q | k | v]`, in families that have it.
    pub(crate) qkv_bias: Option<Vec<f32>>,
    pub(crate) head_norms: Option<HeadNorms>,
    /// `[hidden, n_heads * head_dim]`
    pub(crate) o: PackedMatrix,
    /// `[hidden]`
    pub(crate) ffn_norm: Vec<f32>,
    pub(crate) feed_forward: FeedForward,
    pub(crate) post_norms: Option<PostNorms>,
}

/// The second half of a layer.
pub(crate) enum FeedForward {
    Dense(Gated),
    Experts(Mixture),
}

/// `down(activation(gate x) * up x)`
pub(crate) struct Gated {
    /// gate and up: `[intermediate, hidden]` each.
    pub(crate) gate_up: [PackedMatrix; 2],
    /// `[hidden, intermediate]`
    pub(crate) down: PackedMatrix,
}

/// All weights.
pub(crate) struct Weights {
    /// `[vocab, hidden]`
    pub(crate) embedding: PackedMatrix,
    pub(crate) layers: Vec<Layer>,
    /// `[hidden]`
    pub(crate) output_norm: Vec<f32>,
    /// `[vocab, hidden]`; `None` when it is the embedding.
    head: Option<PackedMatrix>,
}

/// Where a row of q or k comes from.
#[derive(Clone, Copy)]
enum RowOrder {
    AsStored,
    /// Pairs (2 i, 2 i + 1) of each head go to (i, i + half).
    PairsToHalves {
        head_dim: usize,
    },
}

impl RowOrder {
    fn source(self, row: usize) -> usize {
        match self {
            Self::AsStored => row,
            Self::PairsToHalves { head_dim } => {
                let (head, at) = (row / head_dim, row % head_dim);
                let half = head_dim / 2;
                head * head_dim + at % half * 2 + at / half
            }
        }
    }
}

impl Weights {
    pub(crate) fn load(files: &ModelFiles) -> Result<Self, ModelError> {
        let config = &files.config;
        let head = match config.tied_head {
            true => None,
            false => Some(pack(files, TensorName::OutputHead)?),
        };
        let layers = (0..config.n_layers).map(|layer_idx| Layer::load(files, layer_idx));
        Ok(Self {
            embedding: pack(files, TensorName::TokenEmbedding)?,
            layers: layers.collect::<Result<_, _>>()?,
            output_norm: norm(files, TensorName::OutputNorm)?,
            head,
        })
    }

    /// The matrix that makes logits.
    pub(crate) fn head(&self) -> &PackedMatrix {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    /// Bytes that one row reads.
    pub(crate) fn n_bytes(&self) -> usize {
        let of_layer = |layer: &Layer| {
            let attention: usize = layer.qkv.iter().map(PackedMatrix::n_bytes).sum();
            attention + layer.o.n_bytes() + layer.feed_forward.n_bytes()
        };
        self.head().n_bytes() + self.layers.iter().map(of_layer).sum::<usize>()
    }
}

impl Layer {
    fn load(files: &ModelFiles, layer_idx: u32) -> Result<Self, ModelError> {
        let config = &files.config;
        let family = config.family;
        let rope_order = match config.rope.style {
            RopeStyle::HalfSplit => RowOrder::AsStored,
            RopeStyle::Interleaved => RowOrder::PairsToHalves {
                head_dim: config.head_dim as usize,
            },
        };
        let name = |tensor| TensorName::Layer(layer_idx, tensor);
        let has = |has: bool| has.then_some(());
        Ok(Self {
            reach: match config.is_windowed(layer_idx) {
                true => Reach::Window,
                false => Reach::Everything,
            },
            attn_norm: norm(files, name(LayerTensor::AttnNorm))?,
            qkv: [
                pack_rows(files, name(LayerTensor::Q), rope_order)?,
                pack_rows(files, name(LayerTensor::K), rope_order)?,
                pack(files, name(LayerTensor::V))?,
            ],
            qkv_bias: has(family.has_qkv_bias())
                .map(|()| qwen2::qkv_bias(files, layer_idx))
                .transpose()?,
            head_norms: has(family.has_head_norms())
                .map(|()| HeadNorms::load(files, layer_idx))
                .transpose()?,
            o: pack(files, name(LayerTensor::O))?,
            ffn_norm: norm(files, name(LayerTensor::FfnNorm))?,
            feed_forward: match config.experts {
                None => FeedForward::Dense(Gated::load(files, |part| {
                    name([LayerTensor::Gate, LayerTensor::Up, LayerTensor::Down][part])
                })?),
                Some(experts) => FeedForward::Experts(Mixture::load(files, layer_idx, &experts)?),
            },
            post_norms: has(family.has_post_norms())
                .map(|()| PostNorms::load(files, layer_idx))
                .transpose()?,
        })
    }
}

impl Gated {
    /// `name` gives the names of gate, up and down, 0 to 2.
    pub(super) fn load(
        files: &ModelFiles,
        name: impl Fn(usize) -> TensorName,
    ) -> Result<Self, ModelError> {
        Ok(Self {
            gate_up: [pack(files, name(0))?, pack(files, name(1))?],
            down: pack(files, name(2))?,
        })
    }

    pub(super) fn n_bytes(&self) -> usize {
        let matrices = self.gate_up.iter().chain([&self.down]);
        matrices.map(PackedMatrix::n_bytes).sum()
    }

    fn reads_int8(&self) -> bool {
        self.gate_up.iter().any(PackedMatrix::is_quantised)
    }
}

impl FeedForward {
    fn each(&self) -> &[Gated] {
        match self {
            Self::Dense(gated) => std::slice::from_ref(gated),
            Self::Experts(mixture) => &mixture.experts,
        }
    }

    /// Its input needs an int8 form.
    pub(super) fn reads_int8(&self) -> bool {
        let router_does = match self {
            Self::Dense(_) => false,
            Self::Experts(mixture) => mixture.router.is_quantised(),
        };
        router_does || self.each().iter().any(Gated::reads_int8)
    }

    /// What lies between the gate and down needs an int8 form.
    pub(super) fn narrows_inside(&self) -> bool {
        self.each().iter().any(|gated| gated.down.is_quantised())
    }

    fn n_bytes(&self) -> usize {
        match self {
            Self::Dense(gated) => gated.n_bytes(),
            Self::Experts(mixture) => mixture.n_bytes(),
        }
    }
}

fn format(dtype: WeightType) -> WeightFormat {
    match dtype {
        WeightType::F32 => WeightFormat::F32,
        WeightType::F16 => WeightFormat::F16,
        WeightType::BF16 => WeightFormat::Bf16,
        WeightType::Q8_0 => WeightFormat::Q8_0,
        WeightType::Q4_0 => WeightFormat::Q4_0,
        WeightType::Q4_1 => WeightFormat::Q4_1,
        WeightType::Q5_0 => WeightFormat::Q5_0,
        WeightType::Q5_1 => WeightFormat::Q5_1,
        WeightType::Q4K => WeightFormat::Q4K,
        WeightType::Q5K => WeightFormat::Q5K,
        WeightType::Q6K => WeightFormat::Q6K,
    }
}

pub(super) fn pack(files: &ModelFiles, name: TensorName) -> Result<PackedMatrix, ModelError> {
    pack_rows(files, name, RowOrder::AsStored)
}

fn pack_rows(
    files: &ModelFiles,
    name: TensorName,
    order: RowOrder,
) -> Result<PackedMatrix, ModelError> {
    let view: TensorView<'_> = files.tensors.get(name)?;
    let [n_outputs, n_inputs] = view.shape;
    let raw = RawMatrix {
        format: format(view.dtype),
        n_outputs,
        n_inputs,
        bytes: view.bytes,
    };
    PackedMatrix::pack(&raw, |row| order.source(row)).map_err(|source| ModelError::Pack {
        tensor: name,
        source,
    })
}

/// The weight of a norm as it is multiplied with.
pub(super) fn norm(files: &ModelFiles, name: TensorName) -> Result<Vec<f32>, ModelError> {
    let mut values = vector(files, name)?;
    if files.config.norm_weights == NormWeights::LessOne {
        values.iter_mut().for_each(|value| *value += 1.0);
    }
    Ok(values)
}

pub(super) fn vector(files: &ModelFiles, name: TensorName) -> Result<Vec<f32>, ModelError> {
    let view = files.tensors.get(name)?;
    let [rows, n_values] = view.shape;
    if rows != 1 || view.dtype.block_elements() != 1 {
        return Err(ModelError::Vector {
            tensor: name,
            n_values,
        });
    }
    let mut values = vec![0.0; n_values];
    view.row_to_f32(0, &mut values);
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_rows_are_those_of_the_file() {
        let values: Vec<f32> = (0..512)
            .map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0)
            .collect();
        for dtype in WeightType::ALL {
            let bytes = tidemill_model_files::testing::quantise(dtype, &values);
            let view = TensorView {
                name: TensorName::OutputHead,
                dtype,
                shape: [2, 256],
                bytes: &bytes,
            };
            let raw = RawMatrix {
                format: format(dtype),
                n_outputs: 2,
                n_inputs: 256,
                bytes: &bytes,
            };
            let packed = PackedMatrix::pack(&raw, |row| row).expect("a valid shape");
            let (mut ours, mut theirs) = ([0.0; 256], [0.0; 256]);
            for row in 0..2 {
                packed.row_to_f32(row, &mut ours);
                view.row_to_f32(row, &mut theirs);
                assert_eq!(ours, theirs, "{dtype:?}");
            }
        }
    }

    #[test]
    fn pairs_go_to_halves_within_each_head() {
        let order = RowOrder::PairsToHalves { head_dim: 6 };
        let sources: Vec<_> = (0..12).map(|row| order.source(row)).collect();
        assert_eq!(sources, [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
        assert_eq!(RowOrder::AsStored.source(5), 5);
    }
}
