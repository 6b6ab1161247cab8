use proptest::prelude::*;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{
    OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, SplitDelimiterBehavior,
};

use super::*;

/// The words by the published expression, through the tokenizers crate and its regular expression engine.
fn by_expression(pattern: &str, text: &str) -> Vec<String> {
    let pattern = SplitPattern::Regex(pattern.to_owned());
    let split =
        Split::new(pattern, SplitDelimiterBehavior::Isolated, false).expect("the pattern compiles");
    let mut pieces = PreTokenizedString::from(text);
    split.pre_tokenize(&mut pieces).expect("the text is short");
    let words = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
    words
        .into_iter()
        .map(|(word, ..)| word.to_owned())
        .filter(|word| !word.is_empty())
        .collect()
}

/// Each digit alone, what lies between by the expression of GPT-2.
fn smollm_by_expression(text: &str) -> Vec<String> {
    let passages = by_expression(r"\p{N}", text);
    passages
        .iter()
        .flat_map(|passage| by_expression(GPT2_PATTERN, passage))
        .collect()
}

/// The four expressions of llama.cpp, one after another, each within the pieces of the former.
fn default_by_expressions(text: &str) -> Vec<String> {
    let gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";
    let mut pieces = vec![text.to_owned()];
    for pattern in [r"[\p{P}\$\+<=>\^~\|]+", gpt2, r"\p{N}+", "[0-9][0-9][0-9]"] {
        let cut = pieces
            .iter()
            .flat_map(|piece| by_expression(pattern, piece));
        pieces = cut.collect();
    }
    pieces
}

fn by_scanner(rule: SplitRule, text: &str) -> Vec<String> {
    Splitter::new(rule).words(text).map(str::to_owned).collect()
}

fn check(text: &str) {
    assert_eq!(
        by_scanner(SplitRule::Gpt2, text),
        by_expression(GPT2_PATTERN, text)
    );
    assert_eq!(
        by_scanner(SplitRule::Llama3, text),
        by_expression(LLAMA3_PATTERN, text)
    );
    assert_eq!(
        by_scanner(SplitRule::Qwen2, text),
        by_expression(QWEN2_PATTERN, text)
    );
    assert_eq!(
        by_scanner(SplitRule::SmolLm, text),
        smollm_by_expression(text)
    );
    assert_eq!(
        by_scanner(SplitRule::Default, text),
        default_by_expressions(text)
    );
}

#[test]
fn the_scanners_agree_with_the_expressions_on_chosen_texts() {
    for text in [
        "",
        " ",
        "'",
        "''s",
        "it's 'S we'LL they'Ve 'ſ 'rE 'l 're",
        "a  b   \n\n  c\t\td \r\n ",
        "  \n x",
        "...!?\r\n\nnext  ...\n",
        " 1234567 12a3½Ⅷ²",
        "x=1234+٣٤567890½123 $5.00 (a|b)^2~ «q» 12 345",
        "naïve œuvre e\u{301}te\u{301} 東京の天気 हिन्दी 🙂🚀 \u{a0}x\u{3000}y",
        "\u{0}\u{1}a\u{85}b\u{2028}c\u{200b}d",
    ] {
        check(text);
    }
}

proptest! {
    #[test]
    fn the_scanners_agree_with_the_expressions(
        text in proptest::collection::vec(
            prop_oneof![
                Just(" "), Just("  "), Just("\n"), Just("\r"), Just("\t"), Just("'"), Just("s"), Just("LL"),
                Just("re"), Just("a"), Just("é"), Just("京"), Just("7"), Just("123"), Just("+"), Just("½"), Just("."), Just("<|"), Just("🙂"),
                Just("\u{301}"), Just("\u{a0}"), Just("ſ"), Just("\u{85}"),
            ],
            0..24,
        )
    ) {
        check(&text.concat());
    }

    #[test]
    fn the_scanners_agree_on_any_characters(text in proptest::collection::vec(any::<char>(), 0..16)) {
        check(&text.into_iter().collect::<String>());
    }
}

#[test]
fn long_runs_take_linear_time() {
    let start = std::time::Instant::now();
    for unit in ["a", " ", "\n", "7", ".", "\u{301}", "' ", " \n", "a1"] {
        let text = unit.repeat((1 << 20) / unit.len());
        for rule in ALL {
            let n_bytes: usize = Splitter::new(rule).words(&text).map(str::len).sum();
            assert_eq!(n_bytes, text.len());
        }
    }
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
}

#[test]
fn an_unknown_rule_is_refused_by_name() {
    let refusal = SplitRule::from_gguf("deepseek-v3").expect_err("unknown");
    assert_eq!(
        refusal.to_string(),
        "tokenizer.ggml.pre: \"deepseek-v3\", supported: gpt-2, smollm, llama-bpe, qwen2, default"
    );
    assert_eq!(SplitRule::from_pattern(r"\w+"), None);
    assert_eq!(SplitRule::from_gguf("llama3"), Ok(SplitRule::Llama3));
}
