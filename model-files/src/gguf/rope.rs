//! Scaling of rope as GGUF states it.
//!
//! A file of Llama 3 names no type and carries a tensor of divisors instead. A factor without a type is linear, and the
//! type `none` switches a factor off, as in the reference implementation. For YaRN the magnitude is the stated
//! factor times that of the paper.
//! Source: `docs/gguf.md` of <https://github.com/ggml-org/ggml> and the readers of the keys in llama.cpp.

use super::Gguf;
use crate::config::{RopeScaling, Yarn};
use crate::error::{Refusal, quoted};

/// `[head_dim / 2]` divisors of the frequencies.
pub(super) const DIVISORS: &str = "rope_freqs.weight";

const TYPE: &str = "rope.scaling.type";
const FACTOR: &str = "rope.scaling.factor";
/// The older spelling of a linear factor.
const SCALE_LINEAR: &str = "rope.scale_linear";
const ORIGINAL: &str = "rope.scaling.original_context_length";
const MAGNITUDES: [&str; 2] = ["rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"];
const BETA_FAST: &str = "rope.scaling.yarn_beta_fast";
const BETA_SLOW: &str = "rope.scaling.yarn_beta_slow";

/// All keys that concern scaling, less the architecture's name. Whether the model was tuned with it changes nothing.
pub(super) const KEYS: [&str; 9] = [
    TYPE,
    FACTOR,
    SCALE_LINEAR,
    ORIGINAL,
    MAGNITUDES[0],
    MAGNITUDES[1],
    BETA_FAST,
    BETA_SLOW,
    "rope.scaling.finetuned",
];

/// How the file changes the frequencies of rope.
pub(super) fn scaling(
    gguf: &Gguf<'_>,
    architecture: &str,
    context_length: u32,
) -> Result<RopeScaling, Refusal> {
    let key = |key: &str| format!("{architecture}.{key}");
    let number = |name: &str| gguf.f32(&key(name));
    let kind = gguf.string(&key(TYPE))?;
    let factor = match number(FACTOR)? {
        Some(factor) => Some(factor),
        None => number(SCALE_LINEAR)?,
    };
    // 0 and 1 say "none" in files of older converters.
    let factor = factor.filter(|factor| ![0.0, 1.0].contains(factor));
    let scaling = match (kind, factor) {
        (None | Some("none" | "linear"), None) | (Some("none"), _) => RopeScaling::None,
        (None | Some("linear"), Some(factor)) => RopeScaling::Linear { factor },
        (Some("yarn"), factor) => {
            let missing = || Refusal::new(key(FACTOR), "the key is missing, or 1");
            let original = gguf.u32(&key(ORIGINAL))?.unwrap_or(context_length);
            let paper = Yarn::new(factor.ok_or_else(missing)?, original);
            let mut magnitude = 1.0;
            for name in MAGNITUDES {
                magnitude *= number(name)?.unwrap_or(1.0);
            }
            RopeScaling::Yarn(Yarn {
                beta_fast: number(BETA_FAST)?.unwrap_or(paper.beta_fast),
                beta_slow: number(BETA_SLOW)?.unwrap_or(paper.beta_slow),
                magnitude,
                ..paper
            })
        }
        (Some(other), _) => {
            let problem = format!("{}, supported: none, linear, yarn", quoted(other));
            return Err(Refusal::new(key(TYPE), problem));
        }
    };
    if !super::model::has_tensor(gguf, DIVISORS) {
        return Ok(scaling);
    }
    if scaling != RopeScaling::None {
        let problem = format!("both this tensor and {} scale rope", key(TYPE));
        return Err(Refusal::new(DIVISORS, problem));
    }
    Ok(RopeScaling::Divisors)
}
