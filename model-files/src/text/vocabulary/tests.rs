use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;

/// `<|end|>` in the vocabulary of the tests.
pub(in crate::text) const CONTROL: TokenId = 256;
/// `<tool>`, user-defined.
pub(in crate::text) const USER_DEFINED: TokenId = 257;
const TH: TokenId = 258;
const THE: TokenId = 259;
const SPACE_THE: TokenId = 260;
const NEWLINES: TokenId = 261;

/// Token ids 0 to 255 are the bytes; then the constants above.
pub(in crate::text) fn byte_parts() -> VocabularyParts {
    let letters = ByteLetters::new();
    let spell = |bytes: &[u8]| {
        let mut spelled = String::new();
        letters.spell(bytes, &mut spelled);
        spelled
    };
    let normal = |bytes: &[u8]| TokenParts {
        text: spell(bytes),
        kind: TokenKind::Normal,
    };
    let mut tokens: Vec<TokenParts> = (0..=255).map(|byte| normal(&[byte])).collect();
    for (text, kind) in [
        ("<|end|>", TokenKind::Control),
        ("<tool>", TokenKind::UserDefined),
    ] {
        tokens.push(TokenParts {
            text: text.to_owned(),
            kind,
        });
    }
    tokens.extend([&b"th"[..], b"the", b" the", b"\n\n"].map(normal));
    let merges = [("t", "h"), ("th", "e"), (" ", "the"), ("\n", "\n")];
    VocabularyParts {
        tokens,
        merges: merges
            .map(|(left, right)| (spell(left.as_bytes()), spell(right.as_bytes())))
            .into(),
        spelling: Spelling::ByteLetters(SplitRule::Gpt2),
        whole_words_first: false,
        compose: false,
        bos_id: Some(CONTROL),
        add_bos: false,
        eos_ids: vec![CONTROL],
    }
}

pub(in crate::text) fn byte_vocabulary() -> Vocabulary {
    Vocabulary::new(byte_parts()).expect("the parts are consistent")
}

fn segment(text: &str, special: SpecialTokens) -> Segment {
    Segment {
        text: text.to_owned(),
        special,
    }
}

#[test]
fn control_tokens_are_recognised_only_where_they_may_be() {
    let vocabulary = byte_vocabulary();
    let text = "the<|end|> the";
    assert_eq!(
        vocabulary.encode(text, SpecialTokens::Recognise),
        [THE, CONTROL, SPACE_THE]
    );
    let as_text = vocabulary.encode(text, SpecialTokens::AsText);
    assert!(!as_text.contains(&CONTROL));
    assert_eq!(vocabulary.decode(&as_text), text);
}

#[test]
fn user_defined_tokens_are_text_that_is_always_recognised() {
    let vocabulary = byte_vocabulary();
    for special in [SpecialTokens::Recognise, SpecialTokens::AsText] {
        assert_eq!(vocabulary.encode("the<tool>", special), [THE, USER_DEFINED]);
    }
    assert!(!vocabulary.is_special(USER_DEFINED));
    assert_eq!(vocabulary.decode(&[USER_DEFINED, CONTROL]), "<tool>");
}

#[test]
fn words_form_across_segments_and_control_tokens_do_not() {
    let vocabulary = byte_vocabulary();
    let words = [
        segment("the\n", SpecialTokens::Recognise),
        segment("\n t", SpecialTokens::AsText),
        segment("he", SpecialTokens::Recognise),
    ];
    assert_eq!(
        vocabulary.encode_segments(&words),
        [THE, NEWLINES, SPACE_THE]
    );
    let forged = [
        segment("<|en", SpecialTokens::Recognise),
        segment("d|>", SpecialTokens::AsText),
        segment("<|", SpecialTokens::AsText),
        segment("end|>", SpecialTokens::Recognise),
    ];
    assert!(!vocabulary.encode_segments(&forged).contains(&CONTROL));
}

#[test]
fn a_raw_prompt_gets_its_beginning_once() {
    let with_bos = VocabularyParts {
        add_bos: true,
        ..byte_parts()
    };
    let vocabulary = Vocabulary::new(with_bos).expect("consistent");
    assert_eq!(vocabulary.encode_prompt("the"), [CONTROL, THE]);
    assert_eq!(vocabulary.encode_prompt("<|end|>the"), [CONTROL, THE]);
    assert_eq!(vocabulary.encode_prompt(""), [CONTROL]);
    assert!(byte_vocabulary().encode_prompt("").is_empty());
}

#[test]
fn a_control_token_is_not_made_by_merging_or_as_a_whole_word() {
    let mut parts = byte_parts();
    parts.whole_words_first = true;
    parts.tokens[TH as usize].kind = TokenKind::Control;
    parts.merges.clear();
    let vocabulary = Vocabulary::new(parts).expect("consistent");
    let expected = [TokenId::from(b't'), TokenId::from(b'h')];
    assert_eq!(vocabulary.encode("th", SpecialTokens::AsText), expected);

    let mut merging = byte_parts();
    merging.tokens[TH as usize].kind = TokenKind::Control;
    let refusal = Vocabulary::new(merging).expect_err("a merge makes a control token");
    assert_eq!(refusal.field, "merges");
}

#[test]
fn composed_and_decomposed_text_have_the_same_tokens_where_the_model_says_so() {
    let composing = VocabularyParts {
        compose: true,
        ..byte_parts()
    };
    let vocabulary = Vocabulary::new(composing).expect("consistent");
    let tokens = vocabulary.encode("e\u{301}", SpecialTokens::AsText);
    assert_eq!(vocabulary.decode(&tokens), "é");
    assert_eq!(
        byte_vocabulary()
            .encode("e\u{301}", SpecialTokens::AsText)
            .len(),
        3
    );
}

#[test]
fn a_missing_byte_is_left_out() {
    let mut parts = byte_parts();
    parts.tokens[4].kind = TokenKind::Unused;
    let vocabulary = Vocabulary::new(parts).expect("consistent");
    assert_eq!(vocabulary.encode("the\u{4}", SpecialTokens::AsText), [THE]);
}

#[test]
fn ids_beyond_the_vocabulary_are_refused_or_empty() {
    let vocabulary = byte_vocabulary();
    assert_eq!(vocabulary.token_bytes(1_000_000), b"");
    assert!(vocabulary.is_special(1_000_000));
    let wrong = VocabularyParts {
        eos_ids: vec![700],
        ..byte_parts()
    };
    let refusal = Vocabulary::new(wrong).expect_err("700 is no token");
    assert_eq!(
        refusal.to_string(),
        "eos_token_id: 700, but there are 262 tokens"
    );
}

#[test]
fn the_fingerprint_tells_vocabularies_apart() {
    let mut other = byte_parts();
    other.tokens.swap(65, 66);
    let other = Vocabulary::new(other).expect("consistent");
    assert_eq!(
        byte_vocabulary().fingerprint(),
        byte_vocabulary().fingerprint()
    );
    assert_ne!(byte_vocabulary().fingerprint(), other.fingerprint());
}

#[test]
fn a_megabyte_of_one_character_takes_no_quadratic_time() {
    let vocabulary = byte_vocabulary();
    let start = Instant::now();
    for unit in ["a", " ", "th", "\n", "<", "<|end|", "7", "🙂"] {
        let text = unit.repeat((1 << 20) / unit.len());
        let tokens = vocabulary.encode(&text, SpecialTokens::Recognise);
        assert_eq!(vocabulary.decode(&tokens).len(), text.len());
    }
    assert!(
        start.elapsed() < Duration::from_secs(60),
        "{:?}",
        start.elapsed()
    );
}

proptest! {
    #[test]
    fn any_text_comes_back_and_content_makes_no_control_token(
        text in proptest::collection::vec(
            prop_oneof![
                any::<char>().prop_map(String::from),
                Just("<|end|>".to_owned()), Just("<|".to_owned()), Just("end|>".to_owned()),
                Just(" the".to_owned()), Just("<tool>".to_owned()),
            ],
            0..24,
        )
    ) {
        let text = text.concat();
        let vocabulary = byte_vocabulary();
        let tokens = vocabulary.encode(&text, SpecialTokens::AsText);
        prop_assert!(!tokens.contains(&CONTROL));
        prop_assert_eq!(vocabulary.decode(&tokens), text);
    }
}
