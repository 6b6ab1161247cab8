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

/// Most experts of a layer.
pub const N_EXPERTS_MAX: u32 = 512;
/// Most experts of all layers together.
const N_ALL_EXPERTS_MAX: u64 = 1 << 16;

/// The architecture of a model. All are pre-norm decoders with RMS norm, rotary positions, grouped-query attention and a
/// gated feed-forward block; what follows is what each adds to Llama.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// Llama 2 and 3, SmolLM2 and relatives: SiLU, no biases. As GGUF also Mistral and Mixtral.
    Llama,
    /// A sliding window over all layers, in its first version.
    Mistral,
    /// Mistral with a mixture of experts in place of the feed-forward block.
    Mixtral,
    /// Qwen 2 and 2.5: biases of q, k and v.
    Qwen2,
    /// A norm over each head of q and k.
    Qwen3,
    /// Qwen 3 with a mixture of experts in place of the feed-forward block.
    Qwen3Moe,
    /// Gemma 3, its text half: a scaled embedding, norms behind the blocks too, head norms, GELU, and windowed layers
    /// with a rope of their own between global ones.
    Gemma3,
}

impl Family {
    /// q, k and v have biases.
    pub fn has_qkv_bias(self) -> bool {
        self == Self::Qwen2
    }

    /// Heads of q and k are normalised.
    pub fn has_head_norms(self) -> bool {
        matches!(self, Self::Qwen3 | Self::Qwen3Moe | Self::Gemma3)
    }

    /// What attention and feed-forward add to the residual stream is normalised before.
    pub fn has_post_norms(self) -> bool {
        self == Self::Gemma3
    }
}

/// Which elements of a head rotate together. The files of one model differ in this: a GGUF converter permutes
/// the rows of the q and k weights of the family llama.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// Elements `2 i` and `2 i + 1` (GGUF, family llama).
    Interleaved,
    /// Elements `i` and `i + head_dim / 2` (Hugging Face, and GGUF of the other families).
    HalfSplit,
}

/// Rotary position embedding over all of `head_dim`.
/// Paper: Su et al., "RoFormer", <https://arxiv.org/abs/2104.09864>.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Base of the frequencies: pair `i` turns by `position * theta^(-2 i / head_dim)`.
    pub theta: f32,
    /// Base on windowed layers, which have no scaling; the same as `theta` but for Gemma 3.
    pub local_theta: f32,
    /// Which elements form pair `i`.
    pub style: RopeStyle,
    /// How frequencies are changed for long contexts.
    pub scaling: RopeScaling,
}

/// How the frequencies of rope are changed. The rules are computed in `kernels`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All are divided by this.
    Linear {
        /// At least 1.
        factor: f32,
    },
    /// The rule of Llama 3.1.
    Llama3 {
        /// What slow pairs are divided by; at least 1.
        factor: f32,
        /// Turns within the original context below which a pair is slow.
        low_freq_factor: f32,
        /// Turns from which on it is fast; above the other.
        high_freq_factor: f32,
        /// Positions of the first training.
        original_context_length: u32,
    },
    /// YaRN: Peng et al., <https://arxiv.org/abs/2309.00071>.
    Yarn(Yarn),
    /// Each pair is divided by its own number, in the tensor [`crate::TensorName::RopeDivisors`].
    Divisors,
}

/// The numbers of YaRN.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// What slow pairs are divided by; at least 1.
    pub factor: f32,
    /// Turns within the original context from which on a pair is fast.
    pub beta_fast: f32,
    /// Turns up to which it is slow.
    pub beta_slow: f32,
    /// Positions of the first training.
    pub original_context_length: u32,
    /// The ramp between begins and ends at whole pairs.
    pub truncate: bool,
    /// Sines and cosines are multiplied with `magnitude * m(mscale) / m(mscale_all_dim)`, where
    /// `m(x) = 0.1 x ln(factor) + 1`.
    pub magnitude: f32,
    /// See `magnitude`.
    pub mscale: f32,
    /// See `magnitude`.
    pub mscale_all_dim: f32,
}

impl Yarn {
    /// The paper's numbers.
    pub(crate) fn new(factor: f32, original_context_length: u32) -> Self {
        Self {
            factor,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_context_length,
            truncate: true,
            magnitude: 1.0,
            mscale: 1.0,
            mscale_all_dim: 0.0,
        }
    }
}

impl RopeScaling {
    /// Positions that a model with this scaling takes, where its file states `stated`. Files of YaRN models may state
    /// the original length.
    pub(crate) fn context_length(&self, stated: u32) -> u32 {
        match self {
            Self::Yarn(yarn) => {
                let scaled = f64::from(yarn.original_context_length) * f64::from(yarn.factor);
                stated.max(scaled as u32)
            }
            _ => stated,
        }
    }
}

/// Layers whose rows see the last positions only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Positions that a row sees, its own among them.
    pub n_positions: u32,
    /// Each layer with this number (counted from 1) or a multiple of it sees everything; `None`: no layer does.
    pub global_every: Option<u32>,
}

/// A mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Experts {
    /// Experts of each layer.
    pub n_experts: u32,
    /// Experts that a row goes to.
    pub n_used: u32,
    /// Width of one expert's feed-forward block.
    pub intermediate_size: u32,
    /// The weights of a row's experts are divided by their sum.
    pub normalise: bool,
}

/// How a file stores the weights of its norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormWeights {
    /// As they are multiplied with.
    AsStored,
    /// Less 1 (Hugging Face, Gemma).
    LessOne,
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
    /// How the weights of all norms are stored.
    pub norm_weights: NormWeights,
    /// Rotary positions.
    pub rope: Rope,
    /// Scores are divided by the root of this; the head dimension but for some of Gemma 3.
    pub query_scalar: f32,
    /// Sliding window, if any layer has one.
    pub window: Option<Window>,
    /// Mixture of experts, if there is one.
    pub experts: Option<Experts>,
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
    pub(crate) rope_local_theta: &'static str,
    pub(crate) rope_scaling: &'static str,
    pub(crate) query_scalar: &'static str,
    pub(crate) window: &'static str,
    pub(crate) n_experts: &'static str,
    pub(crate) n_experts_used: &'static str,
    pub(crate) expert_intermediate_size: &'static str,
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
        float_within(names.rope_theta, self.rope.theta, 1.0..=1e12)?;
        float_within(names.rope_local_theta, self.rope.local_theta, 1.0..=1e12)?;
        float_within(names.query_scalar, self.query_scalar, 1.0..=1e6)?;
        self.rope.scaling.check(names)?;
        if let Some(window) = self.window {
            within(names.window, window.n_positions, CONTEXT_LENGTH_MAX)?;
        }
        self.experts
            .map_or(Ok(()), |experts| self.check_experts(&experts, names))
    }

    fn check_experts(&self, experts: &Experts, names: &FieldNames) -> Result<(), Refusal> {
        within(names.n_experts, experts.n_experts, N_EXPERTS_MAX)?;
        within(names.n_experts_used, experts.n_used, experts.n_experts)?;
        let width = experts.intermediate_size;
        within(names.expert_intermediate_size, width, WIDTH_MAX)?;
        let n_all = u64::from(experts.n_experts) * u64::from(self.n_layers);
        if n_all > N_ALL_EXPERTS_MAX {
            let problem = format!(
                "{} in each of {} layers, expected at most {N_ALL_EXPERTS_MAX} together",
                experts.n_experts, self.n_layers
            );
            return Err(Refusal::new(names.n_experts, problem));
        }
        Ok(())
    }

    /// True when the rows of a layer (counted from 0) see the window only.
    pub fn is_windowed(&self, layer_idx: u32) -> bool {
        self.window.is_some_and(|window| {
            let is_global = |every| (layer_idx + 1).is_multiple_of(every);
            !window.global_every.is_some_and(is_global)
        })
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

impl RopeScaling {
    fn check(&self, names: &FieldNames) -> Result<(), Refusal> {
        let field = |name: &str| format!("{}.{name}", names.rope_scaling);
        let factor = |factor| float_within(&field("factor"), factor, 1.0..=1e6);
        match *self {
            Self::None | Self::Divisors => Ok(()),
            Self::Linear { factor: f } => factor(f),
            Self::Llama3 {
                factor: f,
                low_freq_factor: low,
                high_freq_factor: high,
                original_context_length: original,
            } => {
                factor(f)?;
                float_within(&field("low_freq_factor"), low, 1e-3..=1e6)?;
                let above = low + f32::EPSILON * low;
                float_within(&field("high_freq_factor"), high, above..=1e6)?;
                within(&field("original length"), original, CONTEXT_LENGTH_MAX)
            }
            Self::Yarn(yarn) => {
                factor(yarn.factor)?;
                float_within(&field("beta_slow"), yarn.beta_slow, 1e-3..=1e6)?;
                float_within(&field("beta_fast"), yarn.beta_fast, yarn.beta_slow..=1e6)?;
                float_within(&field("attention factor"), yarn.magnitude, 1e-3..=1e3)?;
                float_within(&field("mscale"), yarn.mscale, 0.0..=1e3)?;
                float_within(&field("mscale_all_dim"), yarn.mscale_all_dim, 0.0..=1e3)?;
                let original = yarn.original_context_length;
                within(&field("original length"), original, CONTEXT_LENGTH_MAX)
            }
        }
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
