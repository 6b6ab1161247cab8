//! Weights of the Llama family, packed: Llama 2 and 3, SmolLM2 and relatives without biases.
//!
//! Files whose rope pairs are interleaved (GGUF) get the rows of q and k reordered here, so that there is one
//! rope. A tied head is the embedding itself.

use super::ModelError;
use tidemill_kernels::cpu::{PackedMatrix, RawMatrix, WeightFormat};
use tidemill_model_files::{
    LayerTensor, ModelFiles, RopeStyle, TensorName, TensorView, WeightType,
};

/// One layer.
pub(crate) struct Layer {
    /// `[hidden]`
    pub(crate) attn_norm: Vec<f32>,
    /// q, k and v: `[heads * head_dim, hidden]` each.
    pub(crate) qkv: [PackedMatrix; 3],
    /// `[hidden, n_heads * head_dim]`
    pub(crate) o: PackedMatrix,
    /// `[hidden]`
    pub(crate) ffn_norm: Vec<f32>,
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
        let rope_order = match config.rope.style {
            RopeStyle::HalfSplit => RowOrder::AsStored,
            RopeStyle::Interleaved => RowOrder::PairsToHalves {
                head_dim: config.head_dim as usize,
            },
        };
        let layer = |layer_idx| {
            let matrix = |tensor, order| pack(files, TensorName::Layer(layer_idx, tensor), order);
            let as_stored = |tensor| matrix(tensor, RowOrder::AsStored);
            let norm = |tensor| vector(files, TensorName::Layer(layer_idx, tensor));
            Ok::<_, ModelError>(Layer {
                attn_norm: norm(LayerTensor::AttnNorm)?,
                qkv: [
                    matrix(LayerTensor::Q, rope_order)?,
                    matrix(LayerTensor::K, rope_order)?,
                    as_stored(LayerTensor::V)?,
                ],
                o: as_stored(LayerTensor::O)?,
                ffn_norm: norm(LayerTensor::FfnNorm)?,
                gate_up: [as_stored(LayerTensor::Gate)?, as_stored(LayerTensor::Up)?],
                down: as_stored(LayerTensor::Down)?,
            })
        };
        let head = match config.tied_head {
            true => None,
            false => Some(pack(files, TensorName::OutputHead, RowOrder::AsStored)?),
        };
        Ok(Self {
            embedding: pack(files, TensorName::TokenEmbedding, RowOrder::AsStored)?,
            layers: (0..config.n_layers).map(layer).collect::<Result<_, _>>()?,
            output_norm: vector(files, TensorName::OutputNorm)?,
            head,
        })
    }

    /// The matrix that makes logits.
    pub(crate) fn head(&self) -> &PackedMatrix {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    pub(crate) fn n_bytes(&self) -> usize {
        let of_layer = |layer: &Layer| {
            let matrices = layer.qkv.iter().chain(&layer.gate_up);
            matrices
                .chain([&layer.o, &layer.down])
                .map(PackedMatrix::n_bytes)
                .sum::<usize>()
        };
        self.head().n_bytes() + self.layers.iter().map(of_layer).sum::<usize>()
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
    }
}

fn pack(files: &ModelFiles, name: TensorName, order: RowOrder) -> Result<PackedMatrix, ModelError> {
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

fn vector(files: &ModelFiles, name: TensorName) -> Result<Vec<f32>, ModelError> {
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
    fn pairs_go_to_halves_within_each_head() {
        let order = RowOrder::PairsToHalves { head_dim: 6 };
        let sources: Vec<_> = (0..12).map(|row| order.source(row)).collect();
        assert_eq!(sources, [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
        assert_eq!(RowOrder::AsStored.source(5), 5);
    }
}
