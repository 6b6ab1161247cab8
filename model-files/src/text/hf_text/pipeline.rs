//! The steps around the merging: normalizer, pre-tokenizer, post-processor.
//!
//! Each is matched as a whole against the forms that the supported models use; there is no "mostly right".

use serde_json::Value;
use tidemill_core::TokenId;

use crate::error::{Refusal, quoted};
use crate::json::Fields;
use crate::text::split::SplitRule;

/// What the steps come down to.
pub(super) struct Pipeline {
    pub(super) rule: SplitRule,
    /// Canonical composition (NFC) before splitting.
    pub(super) compose: bool,
    /// A token that is put before every text.
    pub(super) bos_id: Option<TokenId>,
}

impl Pipeline {
    pub(super) fn read(fields: &Fields<'_>) -> Result<Self, Refusal> {
        let step = |field: &str| {
            let value: Option<Value> = fields.get(field)?;
            Ok::<_, Refusal>(value.unwrap_or(Value::Null))
        };
        Ok(Self {
            compose: compose(&step("normalizer")?)?,
            rule: rule(&step("pre_tokenizer")?)?,
            bos_id: bos_id(&step("post_processor")?)?,
        })
    }
}

fn compose(normalizer: &Value) -> Result<bool, Refusal> {
    match steps(normalizer, "normalizers").as_slice() {
        [] => Ok(false),
        [step] if kind(step) == "NFC" => Ok(true),
        _ => Err(unknown("normalizer", normalizer, "none, NFC")),
    }
}

fn rule(pre_tokenizer: &Value) -> Result<SplitRule, Refusal> {
    let rule = match steps(pre_tokenizer, "pretokenizers").as_slice() {
        [letters] if is_byte_level(letters, true) => Some(SplitRule::Gpt2),
        [digits, letters] if is_each_digit(digits) && is_byte_level(letters, true) => {
            Some(SplitRule::SmolLm)
        }
        [split, letters] if is_byte_level(letters, false) => {
            pattern(split).and_then(SplitRule::from_pattern)
        }
        _ => None,
    };
    rule.ok_or_else(|| {
        let supported = "the byte-level pre-tokenizers of GPT-2, SmolLM, Llama 3 and Qwen 2";
        unknown("pre_tokenizer", pre_tokenizer, supported)
    })
}

fn is_byte_level(step: &Value, use_regex: bool) -> bool {
    kind(step) == "ByteLevel"
        && step["add_prefix_space"].as_bool() == Some(false)
        && step["use_regex"].as_bool().unwrap_or(true) == use_regex
}

fn is_each_digit(step: &Value) -> bool {
    kind(step) == "Digits" && step["individual_digits"].as_bool() == Some(true)
}

fn pattern(step: &Value) -> Option<&str> {
    let is_plain = kind(step) == "Split"
        && step["behavior"].as_str() == Some("Isolated")
        && step["invert"].as_bool() == Some(false);
    step["pattern"]["Regex"].as_str().filter(|_| is_plain)
}

fn bos_id(post_processor: &Value) -> Result<Option<TokenId>, Refusal> {
    let refusal = || {
        let supported = "none, ByteLevel, a TemplateProcessing that puts one token before a text";
        unknown("post_processor", post_processor, supported)
    };
    let mut bos_id = None;
    for step in steps(post_processor, "processors") {
        match kind(step) {
            "ByteLevel" => {}
            "TemplateProcessing" if bos_id.is_none() => {
                bos_id = leading_token(step).ok_or_else(refusal)?;
            }
            _ => return Err(refusal()),
        }
    }
    Ok(bos_id)
}

/// The one token before the text, if any; `None` when the template does anything else.
fn leading_token(step: &Value) -> Option<Option<TokenId>> {
    let pieces = step["single"].as_array()?;
    let (text, before) = pieces.split_last()?;
    text.get("Sequence")?;
    match before {
        [] => Some(None),
        [piece] => {
            let name = piece["SpecialToken"]["id"].as_str()?;
            let [id] = step["special_tokens"][name]["ids"].as_array()?.as_slice() else {
                return None;
            };
            Some(Some(TokenId::try_from(id.as_u64()?).ok()?))
        }
        _ => None,
    }
}

/// The steps of a sequence; a single step is a sequence of one, null of none.
fn steps<'a>(value: &'a Value, list: &str) -> Vec<&'a Value> {
    if value.is_null() {
        return Vec::new();
    }
    match value[list].as_array() {
        Some(steps) if kind(value) == "Sequence" => steps.iter().collect(),
        _ => vec![value],
    }
}

fn kind(step: &Value) -> &str {
    step["type"].as_str().unwrap_or_default()
}

fn unknown(field: &str, value: &Value, supported: &str) -> Refusal {
    Refusal::new(
        field,
        format!("{}, supported: {supported}", quoted(&value.to_string())),
    )
}
