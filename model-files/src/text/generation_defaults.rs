//! The sampling that a model's authors recommend, for requests that say nothing else.
//!
//! Only fields that are applied are decoded. A recommendation that cannot be followed (a repetition penalty, say)
//! is listed by name, so that whoever loads the model can say so instead of answering differently in silence.

use std::ops::RangeInclusive;

use tidemill_core::bounds::TEMPERATURE_MAX;

use crate::error::Refusal;
use crate::gguf::Gguf;
use crate::json::Fields;

/// Recommended sampling; `None` where the model says nothing.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationDefaults {
    /// 0 to 2.
    pub temperature: Option<f32>,
    /// Above 0 to 1.
    pub top_p: Option<f32>,
    /// 0 keeps all tokens.
    pub top_k: Option<u32>,
    /// Recommendations that are not followed, each as `field=value`.
    pub not_applied: Vec<String>,
}

/// Fields of `generation_config.json` that would change the output, with the value at which they do nothing.
const NOT_APPLIED: [(&str, f64); 6] = [
    ("repetition_penalty", 1.0),
    ("encoder_repetition_penalty", 1.0),
    ("min_p", 0.0),
    ("typical_p", 1.0),
    ("epsilon_cutoff", 0.0),
    ("no_repeat_ngram_size", 0.0),
];

impl GenerationDefaults {
    /// From `generation_config.json`. Its `do_sample` is ignored: a temperature says the same.
    pub(super) fn from_json(fields: &Fields<'_>) -> Result<Self, Refusal> {
        let mut not_applied = Vec::new();
        for (field, neutral) in NOT_APPLIED {
            let value: Option<f64> = fields.get(field)?;
            if let Some(value) = value.filter(|value| *value != neutral) {
                not_applied.push(format!("{field}={value}"));
            }
        }
        Self {
            temperature: fields.get("temperature")?,
            top_p: fields.get("top_p")?,
            top_k: fields.get("top_k")?,
            not_applied,
        }
        .check(["temperature", "top_p"])
    }

    /// From the `general.sampling` keys of a GGUF file.
    pub(super) fn from_gguf(gguf: &Gguf<'_>) -> Result<Self, Refusal> {
        let applied = ["temp", "top_p", "top_k"].map(|name| format!("general.sampling.{name}"));
        let mut not_applied: Vec<String> = gguf
            .keys()
            .filter(|key| {
                key.starts_with("general.sampling.") && !applied.iter().any(|name| name == key)
            })
            .map(str::to_owned)
            .collect();
        not_applied.sort();
        let [temperature, top_p, top_k] = &applied;
        Self {
            temperature: gguf.f32(temperature)?,
            top_p: gguf.f32(top_p)?,
            top_k: gguf.u32(top_k)?,
            not_applied,
        }
        .check([temperature, top_p])
    }

    fn check(self, [temperature, top_p]: [&str; 2]) -> Result<Self, Refusal> {
        check(temperature, self.temperature, 0.0..=TEMPERATURE_MAX)?;
        check(top_p, self.top_p, f32::MIN_POSITIVE..=1.0)?;
        Ok(self)
    }
}

fn check(field: &str, value: Option<f32>, bounds: RangeInclusive<f32>) -> Result<(), Refusal> {
    match value {
        Some(value) if !bounds.contains(&value) => Err(Refusal::new(
            field,
            format!(
                "{value}, expected {:?} to {:?}",
                bounds.start(),
                bounds.end()
            ),
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<GenerationDefaults, Refusal> {
        let fields = Fields::parse(json.as_bytes(), "generation_config.json").expect("an object");
        GenerationDefaults::from_json(&fields)
    }

    #[test]
    fn what_is_followed_and_what_is_not() {
        let defaults = parse(r#"{"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "min_p": 0.0}"#)
            .expect("all in bounds");
        assert_eq!(defaults.temperature, Some(0.6));
        assert_eq!(defaults.top_p, Some(0.9));
        assert_eq!(defaults.top_k, Some(20));
        assert_eq!(defaults.not_applied, ["repetition_penalty=1.1"]);
        assert_eq!(
            parse("{}").expect("nothing said"),
            GenerationDefaults::default()
        );
    }

    #[test]
    fn values_out_of_bounds_are_refused_by_name() {
        for (json, field) in [
            (r#"{"temperature": 2.5}"#, "temperature"),
            (r#"{"temperature": -1}"#, "temperature"),
            (r#"{"top_p": 0.0}"#, "top_p"),
            (r#"{"top_k": -1}"#, "top_k"),
            (r#"{"top_k": "many"}"#, "top_k"),
        ] {
            assert_eq!(parse(json).expect_err(json).field, field);
        }
    }
}
