//! Rope as `config.json` states it: `rope_theta` and `rope_scaling`, or their newer form `rope_parameters`.
//!
//! The type of a scaling stands under `rope_type` or, in older files, `type`. A type that is not known, a key that its type
//! does not have and a required key that is missing all refuse the model: output of a model whose rope is slightly
//! off is fluent and wrong.
//! Source: `modeling_rope_utils.py` of <https://github.com/huggingface/transformers>.

use crate::config::{RopeScaling, Yarn};
use crate::error::{Refusal, quoted};
use crate::json::Fields;

const THETA: &str = "rope_theta";
/// Where the newer form keeps the ropes of Gemma's two kinds of layers.
const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

/// What a file says; `None` where it says nothing.
pub(in crate::hf) struct StatedRope {
    pub(in crate::hf) theta: Option<f32>,
    pub(in crate::hf) local_theta: Option<f32>,
    pub(in crate::hf) scaling: RopeScaling,
}

/// Reads every key that concerns rope. YaRN needs the stated context length.
pub(in crate::hf) fn read(fields: &Fields<'_>, context_length: u32) -> Result<StatedRope, Refusal> {
    let mut rope = StatedRope {
        theta: fields.get(THETA)?,
        local_theta: fields.get("rope_local_base_freq")?,
        scaling: RopeScaling::None,
    };
    for object in ["rope_scaling", "rope_parameters"] {
        let Some(inner) = fields.get::<Fields<'_>>(object)? else {
            continue;
        };
        if inner.keys().any(|key| key == FULL || key == SLIDING) {
            rope.read_both(&inner, object, context_length)?;
            continue;
        }
        let scaling = read_scaling(object, &inner, context_length)?;
        if rope.scaling != RopeScaling::None && scaling != rope.scaling {
            return Err(Refusal::new(object, "contradicts rope_scaling"));
        }
        rope.scaling = scaling;
        agree(&mut rope.theta, inner.get(THETA)?, (object, THETA))?;
    }
    Ok(rope)
}

impl StatedRope {
    fn read_both(
        &mut self,
        inner: &Fields<'_>,
        object: &str,
        context_length: u32,
    ) -> Result<(), Refusal> {
        if let Some(other) = inner.keys().find(|key| ![FULL, SLIDING].contains(key)) {
            let problem = format!("{}; this key is not supported", quoted(inner.raw(other)));
            return Err(Refusal::new(format!("{object}.{}", quoted(other)), problem));
        }
        let name = format!("{object}.{FULL}");
        let full: Fields<'_> = inner.required(FULL)?;
        self.scaling = read_scaling(&name, &full, context_length)?;
        agree(&mut self.theta, full.get(THETA)?, (&name, THETA))?;
        let name = format!("{object}.{SLIDING}");
        let sliding: Fields<'_> = inner.required(SLIDING)?;
        if read_scaling(&name, &sliding, context_length)? != RopeScaling::None {
            return Err(Refusal::new(
                format!("{name}.rope_type"),
                "supported: \"default\"",
            ));
        }
        let local: Option<f32> = sliding.get(THETA)?;
        agree(&mut self.local_theta, local, (&name, THETA))
    }
}

/// A number that may be stated twice must be the same both times.
fn agree(
    outside: &mut Option<f32>,
    inside: Option<f32>,
    (object, key): (&str, &str),
) -> Result<(), Refusal> {
    if let (Some(outer), Some(inner)) = (*outside, inside)
        && outer != inner
    {
        let problem = format!("{inner:?} contradicts {key} outside");
        return Err(Refusal::new(format!("{object}.{key}"), problem));
    }
    *outside = outside.or(inside);
    Ok(())
}

fn read_scaling(
    object: &str,
    scaling: &Fields<'_>,
    context_length: u32,
) -> Result<RopeScaling, Refusal> {
    let (type_key, kind) = read_type(object, scaling)?;
    let number = |key: &str| -> Result<f32, Refusal> {
        let missing = || Refusal::new(format!("{object}.{key}"), "the key is missing");
        scaling.get(key)?.ok_or_else(missing)
    };
    let original: Option<u32> = scaling.get("original_max_position_embeddings")?;
    let (result, known): (RopeScaling, &[&str]) = match kind.as_str() {
        "default" => (RopeScaling::None, &[]),
        "linear" => {
            let factor = number("factor")?;
            (RopeScaling::Linear { factor }, &["factor"])
        }
        "llama3" => {
            let missing = || {
                let key = format!("{object}.original_max_position_embeddings");
                Refusal::new(key, "the key is missing")
            };
            let result = RopeScaling::Llama3 {
                factor: number("factor")?,
                low_freq_factor: number("low_freq_factor")?,
                high_freq_factor: number("high_freq_factor")?,
                original_context_length: original.ok_or_else(missing)?,
            };
            let known = &[
                "factor",
                "low_freq_factor",
                "high_freq_factor",
                "original_max_position_embeddings",
            ];
            (result, known)
        }
        "yarn" => {
            let original = original.unwrap_or(context_length);
            let yarn = read_yarn(scaling, Yarn::new(number("factor")?, original))?;
            (RopeScaling::Yarn(yarn), &YARN_KEYS)
        }
        _ => {
            let problem = format!(
                "{} is not supported, supported: \"default\", \"linear\", \"llama3\", \"yarn\", or no {object}",
                quoted(&kind)
            );
            return Err(Refusal::new(format!("{object}.{type_key}"), problem));
        }
    };
    let common = ["rope_type", "type", THETA];
    let unknown = |key: &&str| !known.contains(key) && !common.contains(key);
    match scaling.keys().find(unknown) {
        None => Ok(result),
        Some(key) => Err(Refusal::new(
            format!("{object}.{}", quoted(key)),
            format!("{}; this key is not supported", quoted(scaling.raw(key))),
        )),
    }
}

/// The type and the key that it stands under; two keys must say the same.
fn read_type(object: &str, scaling: &Fields<'_>) -> Result<(&'static str, String), Refusal> {
    let newer: Option<String> = scaling.get("rope_type")?;
    let older: Option<String> = scaling.get("type")?;
    match (newer, older) {
        (Some(newer), Some(older)) if newer != older => Err(Refusal::new(
            format!("{object}.type"),
            format!("{} contradicts rope_type", quoted(&older)),
        )),
        (Some(kind), _) => Ok(("rope_type", kind)),
        (None, Some(kind)) => Ok(("type", kind)),
        (None, None) => Err(Refusal::new(
            format!("{object}.rope_type"),
            "the key is missing",
        )),
    }
}

const YARN_KEYS: [&str; 8] = [
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
];

/// A stated attention factor replaces the rule; `mscale` counts only beside `mscale_all_dim`.
fn read_yarn(scaling: &Fields<'_>, paper: Yarn) -> Result<Yarn, Refusal> {
    let mut yarn = Yarn {
        beta_fast: scaling.get("beta_fast")?.unwrap_or(paper.beta_fast),
        beta_slow: scaling.get("beta_slow")?.unwrap_or(paper.beta_slow),
        truncate: scaling.get("truncate")?.unwrap_or(paper.truncate),
        ..paper
    };
    let mscales: [Option<f32>; 2] = [scaling.get("mscale")?, scaling.get("mscale_all_dim")?];
    let stated = mscales.map(|mscale| mscale.filter(|mscale| *mscale != 0.0));
    if let Some(magnitude) = scaling.get("attention_factor")? {
        (yarn.magnitude, yarn.mscale, yarn.mscale_all_dim) = (magnitude, 0.0, 0.0);
    } else if let [Some(mscale), Some(mscale_all_dim)] = stated {
        (yarn.mscale, yarn.mscale_all_dim) = (mscale, mscale_all_dim);
    }
    Ok(yarn)
}
