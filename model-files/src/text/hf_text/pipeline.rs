//! The steps around the merging: normalizer, pre-tokenizer, post-processor.
//!
//! Each is matched as a whole against the forms that the supported models use; there is no "mostly right".

use serde_json::Value;
use tidemill_core::TokenId;

use crate::error::{Refusal, quoted};
use crate::json::Fields;
use crate::text::spaces::LeadingSpace;
use crate::text::split::SplitRule;
use crate::text::vocabulary::Spelling;

/// What the steps come down to.
pub(super) struct Pipeline {
    pub(super) spelling: Spelling,
    /// Canonical composition (NFC) before splitting.
    pub(super) compose: bool,
    /// A token that is put before every text.
    pub(super) bos_id: Option<TokenId>,
}

impl Pipeline {
    /// `byte_fallback` is what the model says: it tells SentencePiece's vocabularies from byte-level ones.
    pub(super) fn read(fields: &Fields<'_>, byte_fallback: bool) -> Result<Self, Refusal> {
        let step = |field: &str| {
            let value: Option<Value> = fields.get(field)?;
            Ok::<_, Refusal>(value.unwrap_or(Value::Null))
        };
        let (normalizer, pre_tokenizer) = (step("normalizer")?, step("pre_tokenizer")?);
        let bos_id = bos_id(&step("post_processor")?)?;
        let spaces = match byte_fallback {
            true => Some(leading_space(&normalizer, &pre_tokenizer)?),
            false => None,
        };
        Ok(match spaces {
            Some(leading) => Self {
                spelling: Spelling::Spaces(leading),
                compose: false,
                bos_id,
            },
            None => Self {
                spelling: Spelling::ByteLetters(rule(&pre_tokenizer)?),
                compose: compose(&normalizer)?,
                bos_id,
            },
        })
    }
}

impl Pipeline {
    /// Whether the normalizer would look for a token in another text than the one that spells it.
    pub(super) fn changes(&self, token: &str) -> bool {
        match self.spelling {
            Spelling::ByteLetters(_) => self.compose,
            Spelling::Spaces(LeadingSpace::EachStretch) => true,
            Spelling::Spaces(_) => token.contains(' '),
        }
    }
}

/// The steps of SentencePiece's vocabularies: spaces become letters in the normalizer (Llama 2, Gemma) or, in newer files, in
/// the pre-tokenizer.
fn leading_space(normalizer: &Value, pre_tokenizer: &Value) -> Result<LeadingSpace, Refusal> {
    let leading = match (
        steps(normalizer, "normalizers").as_slice(),
        steps(pre_tokenizer, "pretokenizers").as_slice(),
    ) {
        ([prepend, replace], []) if is_prepend(prepend) && is_replace(replace) => {
            Some(LeadingSpace::EachStretch)
        }
        ([replace], []) if is_replace(replace) => Some(LeadingSpace::Never),
        // It looks for spaces, of which none is left.
        ([replace], [split]) if is_replace(replace) && is_split_at_spaces(split) => {
            Some(LeadingSpace::Never)
        }
        ([], [letters]) => metaspace(letters),
        _ => None,
    };
    leading.ok_or_else(|| {
        let both = Value::Array(vec![normalizer.clone(), pre_tokenizer.clone()]);
        let supported = "beside byte_fallback, the steps of Llama 2, Mistral and Gemma";
        unknown("normalizer", &both, supported)
    })
}

fn is_prepend(step: &Value) -> bool {
    kind(step) == "Prepend" && step["prepend"].as_str() == Some("\u{2581}")
}

fn is_replace(step: &Value) -> bool {
    kind(step) == "Replace"
        && step["pattern"]["String"].as_str() == Some(" ")
        && step["content"].as_str() == Some("\u{2581}")
}

fn is_split_at_spaces(step: &Value) -> bool {
    kind(step) == "Split" && step["pattern"]["String"].as_str() == Some(" ")
}

/// Only where it does not cut words.
fn metaspace(step: &Value) -> Option<LeadingSpace> {
    let is_plain = kind(step) == "Metaspace"
        && step["replacement"].as_str() == Some("\u{2581}")
        && step["split"].as_bool() == Some(false);
    match step["prepend_scheme"].as_str().filter(|_| is_plain)? {
        "never" => Some(LeadingSpace::Never),
        "first" => Some(LeadingSpace::TextWithout),
        "always" => Some(LeadingSpace::EachStretchWithout),
        _ => None,
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
