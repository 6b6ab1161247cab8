//! What a model is, apart from its weights: the numbers that shape every tensor and every step.
//!
//! Both containers end here, so nothing above this crate knows where a model came from. A config is bounded
//! before it is used: the bounds are far above any real model and exist so that a hostile file cannot make a
//! product wrap or an allocation explode. What we cannot compute exactly is refused, never approximated.

use crate::error::Refusal;

/// Most layers.
pub const N_LAYERS_MAX: u32 = 1024;
/// Most elements of a row: hidden size and intermediate size.
pub const WIDTH_MAX: u32 = 1 << 18;
/// Most attention heads.
pub const N_HEADS_MAX: u32 = 1024;
/// Largest head dimension.
pub const HEAD_DIM_MAX: u32 = 512;
/// Most tokens in a vocabulary.
pub const VOCAB_SIZE_MAX: u32 = 1 << 22;
/// Longest context that a model may claim.
pub const CONTEXT_LENGTH_MAX: u32 = 1 << 27;

/// The architecture of a model. Each family has one forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// Pre-norm decoder with RMS norm, rotary positions, grouped-query attention and a gated SiLU feed-forward
    /// block, no biases: Llama 2, SmolLM2 and relatives.
    Llama,
}

/// Which elements of a head rotate together. The files of one model differ in this: a GGUF converter permutes
/// the rows of the q and k weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// Elements `2 i` and `2 i + 1` (GGUF, family llama).
    Interleaved,
    /// Elements `i` and `i + head_dim / 2` (Hugging Face).
    HalfSplit,
}

/// Rotary position embedding over all of `head_dim`, without scaling.
/// Paper: Su et al., "RoFormer", <https://arxiv.org/abs/2104.09864>.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Base of the frequencies: pair `i` turns by `position * theta^(-2 i / head_dim)`.
    pub theta: f32,
    /// Which elements form pair `i`.
    pub style: RopeStyle,
}

/// The shape of a model. Every number is within its bound, see the `_MAX` constants.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The architecture.
    pub family: Family,
    /// Transformer layers.
    pub n_layers: u32,
    /// Width of the residual stream.
    pub hidden_size: u32,
    /// Width of the feed-forward block.
    pub intermediate_size: u32,
    /// Query heads.
    pub n_heads: u32,
    /// Key and value heads; divides `n_heads`.
    pub n_kv_heads: u32,
    /// Elements of one head; even.
    pub head_dim: u32,
    /// Rows of the embedding.
    pub vocab_size: u32,
    /// Positions the model was trained for, prompt and output together.
    pub context_length: u32,
    /// Added to the mean square in every RMS norm.
    pub rms_norm_eps: f32,
    /// Rotary positions.
    pub rope: Rope,
    /// True when the output head is the token embedding.
    pub tied_head: bool,
    /// A label for people; no part of the model's identity.
    pub name: String,
}

/// What each field is called in the file that is being read, so that a refusal names what the reader can edit.
pub(crate) struct FieldNames {
    pub(crate) n_layers: &'static str,
    pub(crate) hidden_size: &'static str,
    pub(crate) intermediate_size: &'static str,
    pub(crate) n_heads: &'static str,
    pub(crate) n_kv_heads: &'static str,
    pub(crate) head_dim: &'static str,
    pub(crate) vocab_size: &'static str,
    pub(crate) context_length: &'static str,
    pub(crate) rms_norm_eps: &'static str,
    pub(crate) rope_theta: &'static str,
}

impl ModelConfig {
    /// Refuses a number that is out of bounds or does not fit the others.
    pub(crate) fn check(&self, names: &FieldNames) -> Result<(), Refusal> {
        within(names.n_layers, self.n_layers, N_LAYERS_MAX)?;
        within(names.hidden_size, self.hidden_size, WIDTH_MAX)?;
        within(names.intermediate_size, self.intermediate_size, WIDTH_MAX)?;
        within(names.n_heads, self.n_heads, N_HEADS_MAX)?;
        within(names.n_kv_heads, self.n_kv_heads, N_HEADS_MAX)?;
        within(names.head_dim, self.head_dim, HEAD_DIM_MAX)?;
        within(names.vocab_size, self.vocab_size, VOCAB_SIZE_MAX)?;
        within(
            names.context_length,
            self.context_length,
            CONTEXT_LENGTH_MAX,
        )?;
        if !self.head_dim.is_multiple_of(2) {
            return Err(Refusal::new(
                names.head_dim,
                format!("{}, expected an even number", self.head_dim),
            ));
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            return Err(Refusal::new(
                names.n_kv_heads,
                format!(
                    "{} does not divide the {} query heads",
                    self.n_kv_heads, self.n_heads
                ),
            ));
        }
        float_within(names.rms_norm_eps, self.rms_norm_eps, 1e-12..=1e-1)?;
        float_within(names.rope_theta, self.rope.theta, 1.0..=1e12)
    }

    /// Head dimension of a file that does not state one: the hidden size shared out among the heads.
    pub(crate) fn implied_head_dim(
        hidden_size: u32,
        n_heads: u32,
        names: &FieldNames,
    ) -> Result<u32, Refusal> {
        if n_heads == 0 || !hidden_size.is_multiple_of(n_heads) {
            return Err(Refusal::new(
                names.n_heads,
                format!(
                    "{n_heads} does not divide the {hidden_size} of {}, and {} is absent",
                    names.hidden_size, names.head_dim
                ),
            ));
        }
        Ok(hidden_size / n_heads)
    }
}

fn within(field: &str, value: u32, max: u32) -> Result<(), Refusal> {
    if (1..=max).contains(&value) {
        return Ok(());
    }
    Err(Refusal::new(field, format!("{value}, expected 1 to {max}")))
}

/// NaN is within no range.
fn float_within(
    field: &str,
    value: f32,
    range: std::ops::RangeInclusive<f32>,
) -> Result<(), Refusal> {
    if range.contains(&value) {
        return Ok(());
    }
    Err(Refusal::new(
        field,
        format!("{value}, expected {:e} to {:e}", range.start(), range.end()),
    ))
}
