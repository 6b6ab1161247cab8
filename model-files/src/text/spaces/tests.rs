//! A small vocabulary of each kind, in both containers, against the tokenizers library and against the definition.

use proptest::prelude::*;
use serde_json::{Value, json};
use tidemill_core::TokenId;

use super::*;
use crate::testing::GgufWriter;
use crate::text::open_text;
use crate::text::tests::Directory;
use crate::text::vocabulary::{SpecialTokens, Vocabulary};

const CONTROL: [&str; 4] = ["<unk>", "<s>", "</s>", "<start_of_turn>"];
const USER_DEFINED: [&str; 2] = ["\n\n\n", "<b>"];
/// Every beginning of these is a token; the earlier, the higher its score.
const WORDS: [&str; 14] = [
    "▁▁▁▁",
    "▁the",
    "ing",
    "▁tide",
    "▁mill",
    "er",
    "▁a",
    "tion",
    "▁in",
    "日本語",
    "\n\n",
    "ll",
    "in",
    "é▁",
];

/// Normal tokens, best first.
fn pieces() -> Vec<String> {
    let mut pieces: Vec<String> = Vec::new();
    let ends = |word: &'static str| word.char_indices().skip(1).map(|(at, c)| at + c.len_utf8());
    for word in WORDS {
        for end in ends(word) {
            pieces.push(word[..end].to_owned());
        }
    }
    for word in WORDS {
        pieces.extend(word.chars().map(String::from));
    }
    pieces.extend(["x", "<", ">", "0", "A"].map(String::from));
    let mut seen = std::collections::HashSet::new();
    pieces.retain(|piece| seen.insert(piece.clone()));
    pieces
}

/// Texts and types of all tokens, as GGUF numbers the types.
fn tokens() -> Vec<(String, i32)> {
    let control = CONTROL.iter().enumerate();
    let control = control.map(|(id, text)| ((*text).to_owned(), if id == 0 { 2 } else { 3 }));
    let bytes = (0..=u8::MAX).map(|byte| (byte_token(byte), 6));
    let user_defined = USER_DEFINED.iter().map(|text| ((*text).to_owned(), 4));
    let normal = pieces().into_iter().map(|piece| (piece, 1));
    control
        .chain(bytes)
        .chain(user_defined)
        .chain(normal)
        .collect()
}

fn scores() -> Vec<f32> {
    let n_others = tokens().len() - pieces().len();
    let others = std::iter::repeat_n(0.0, n_others);
    others
        .chain((0..pieces().len()).map(|rank| -(rank as f32)))
        .collect()
}

/// The vocabulary of a GGUF file.
fn from_gguf(has_space: bool) -> Vocabulary {
    let mut writer = GgufWriter::new();
    writer.string("general.architecture", "llama");
    writer.u32("llama.context_length", 64);
    writer.string("tokenizer.ggml.model", "llama");
    writer.string("tokenizer.ggml.pre", "default");
    let tokens = tokens();
    writer.strings(
        "tokenizer.ggml.tokens",
        tokens.iter().map(|(text, _)| text.as_str()),
    );
    let types: Vec<i32> = tokens.iter().map(|(_, kind)| *kind).collect();
    writer.i32s("tokenizer.ggml.token_type", &types);
    writer.f32s("tokenizer.ggml.scores", &scores());
    writer.boolean("tokenizer.ggml.add_space_prefix", has_space);
    let directory = Directory::new(&format!("spaces-{has_space}"));
    let file = directory.0.join("tiny.gguf");
    std::fs::write(&file, writer.finish()).expect("the directory takes files");
    let text = open_text(&file).expect("the tokenizer is supported");
    std::sync::Arc::into_inner(text.vocabulary).expect("it has one owner")
}

/// `tokenizer.json` with its list of merges, worked out here once more.
fn tokenizer_json(normalizer: Value, pre_tokenizer: Value) -> Value {
    let tokens = tokens();
    let mut merges = Vec::new();
    let pieces = pieces();
    for piece in &pieces {
        let ends = piece.char_indices().skip(1);
        for (left, right) in ends.map(|(at, _)| piece.split_at(at)) {
            let is_piece = |part: &str| pieces.iter().any(|piece| piece == part);
            if is_piece(left) && is_piece(right) {
                merges.push([left.to_owned(), right.to_owned()]);
            }
        }
    }
    let vocab: serde_json::Map<String, Value> = tokens
        .iter()
        .enumerate()
        .map(|(id, (text, _))| (text.clone(), json!(id)))
        .collect();
    let numbered = tokens.iter().enumerate();
    let added = numbered.filter(|(_, (_, kind))| [2, 3, 4].contains(kind));
    let added: Vec<Value> = added
        .map(|(id, (text, kind))| {
            json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": *kind != 4})
        })
        .collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": null,
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
                  "vocab": vocab, "merges": merges},
    })
}

const CONFIG: &str = r#"{"max_position_embeddings": 64, "vocab_size": 1024, "eos_token_id": 2}"#;

/// Ours and the library's reading of one file.
fn from_json(json: &Value, name: &str) -> (Vocabulary, tokenizers::Tokenizer) {
    let directory = Directory::new(name);
    directory.write("tokenizer.json", &json.to_string());
    directory.write("config.json", CONFIG);
    let text = open_text(&directory.0).expect("the tokenizer is supported");
    let vocabulary = std::sync::Arc::into_inner(text.vocabulary).expect("it has one owner");
    let library = json.to_string().parse().expect("the library reads it");
    (vocabulary, library)
}

fn prepend() -> Value {
    json!({"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]})
}

fn replace() -> Value {
    json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
}

fn metaspace(scheme: &str) -> Value {
    json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false})
}

/// Every supported form: its name, our reading, the library's.
fn forms() -> Vec<(String, Vocabulary, tokenizers::Tokenizer)> {
    let split = json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
                       "invert": false});
    let forms = [
        ("llama", prepend(), Value::Null),
        ("gemma", replace(), split),
        ("replace", replace(), Value::Null),
        ("first", Value::Null, metaspace("first")),
        ("always", Value::Null, metaspace("always")),
        ("never", Value::Null, metaspace("never")),
    ];
    let read = |(name, normalizer, pre_tokenizer): (&str, Value, Value)| {
        let json = tokenizer_json(normalizer, pre_tokenizer);
        let (ours, library) = from_json(&json, &format!("spaces-{name}"));
        (name.to_owned(), ours, library)
    };
    forms.into_iter().map(read).collect()
}

/// SentencePiece's definition: of all neighbours that make a token, those of the highest score are joined, the first of
/// equals; what is no token becomes bytes. `text` has no added tokens in it.
fn by_definition(text: &str, has_space: bool) -> Vec<TokenId> {
    let tokens = tokens();
    let find = |text: &str| {
        tokens
            .iter()
            .position(|(token, kind)| token == text && *kind == 1)
    };
    let scores = scores();
    let spaced = if has_space && !text.is_empty() {
        format!(" {text}")
    } else {
        text.to_owned()
    };
    let mut parts: Vec<String> = spaced.replace(' ', "▁").chars().map(String::from).collect();
    loop {
        let mut best: Option<(f32, usize)> = None;
        for at in 1..parts.len() {
            let joined = find(&format!("{}{}", parts[at - 1], parts[at]));
            if let Some(score) = joined.map(|id| scores[id])
                && best.is_none_or(|(highest, _)| score > highest)
            {
                best = Some((score, at));
            }
        }
        let Some((_, at)) = best else { break };
        let right = parts.remove(at);
        parts[at - 1].push_str(&right);
    }
    let ids = parts.iter().flat_map(|part| match find(part) {
        Some(id) => vec![id as TokenId],
        None => part
            .bytes()
            .map(|byte| CONTROL.len() as TokenId + TokenId::from(byte))
            .collect(),
    });
    ids.collect()
}

const TEXTS: [&str; 14] = [
    "",
    " ",
    "the tide",
    " the  tide    mill     x",
    "milling tiller internation in",
    "日本語 日本 本 京 🙂",
    "é e\u{301} É  é é",
    "\n\n\n\n\n the\n\n tide\n",
    "<s>the</s> tide<start_of_turn> a<start_of_turn>a",
    "<b>the<b> tide <b>",
    "<0x41> <0xZZ> <unk> \u{0}\t\r",
    "▁the ▁▁ x",
    "\u{feff}a\u{200b}a\u{a0}a\u{3000}",
    "inininger",
];

#[test]
fn each_form_has_the_tokens_that_the_library_gives() {
    for (name, ours, library) in forms() {
        for text in TEXTS {
            let encoding = library.encode(text, false).expect("any text encodes");
            let found = ours.encode(text, SpecialTokens::Recognise);
            assert_eq!(found, encoding.get_ids(), "{name} {text:?}");
        }
        assert_eq!(ours.encode_prompt("the").first(), Some(&1), "{name}");
    }
}

#[test]
fn a_gguf_file_has_the_tokens_of_the_directory() {
    for (has_space, form) in [(true, prepend()), (false, replace())] {
        let gguf = from_gguf(has_space);
        let json = tokenizer_json(form, Value::Null);
        let (directory, _) = from_json(&json, &format!("spaces-same-{has_space}"));
        for text in TEXTS {
            for special in [SpecialTokens::Recognise, SpecialTokens::AsText] {
                assert_eq!(
                    gguf.encode(text, special),
                    directory.encode(text, special),
                    "{text:?}"
                );
            }
        }
        assert_eq!(gguf.bos_id(), Some(1));
        assert_eq!(gguf.eos_ids(), [2]);
        assert!(gguf.adds_bos());
    }
}

#[test]
fn tokens_come_back_as_the_text() {
    let vocabulary = from_gguf(false);
    for text in TEXTS {
        let tokens = vocabulary.encode(text, SpecialTokens::AsText);
        assert_eq!(
            vocabulary.decode(&tokens),
            text.replace('▁', " "),
            "{text:?}"
        );
    }
    let with_space = from_gguf(true);
    let tokens = with_space.encode("the", SpecialTokens::AsText);
    assert_eq!(with_space.decode(&tokens), " the");
    let byte = CONTROL.len() as TokenId + 0x41;
    assert_eq!(vocabulary.token_bytes(byte), b"A");
    assert!(!vocabulary.is_special(byte));
    assert!(vocabulary.is_special(0) && vocabulary.is_special(3));
}

#[test]
fn long_text_is_not_quadratic() {
    let vocabulary = from_gguf(true);
    let start = std::time::Instant::now();
    for unit in ["a", " ", "the ", "日", "in"] {
        let text = unit.repeat((1 << 18) / unit.len());
        assert!(!vocabulary.encode(&text, SpecialTokens::AsText).is_empty());
    }
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
}

#[test]
fn what_is_not_these_vocabularies_is_refused() {
    let refusal = |normalizer, pre_tokenizer| {
        let directory = Directory::new("spaces-refused");
        directory.write(
            "tokenizer.json",
            &tokenizer_json(normalizer, pre_tokenizer).to_string(),
        );
        directory.write("config.json", CONFIG);
        open_text(&directory.0).expect_err("refused").to_string()
    };
    let cut =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true});
    let other =
        json!({"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": false});
    for pre_tokenizer in [cut, other, Value::Null, metaspace("sometimes")] {
        assert!(refusal(Value::Null, pre_tokenizer).contains("normalizer: "));
    }
    for normalizer in [
        json!({"type": "NFC"}),
        json!({"type": "Prepend", "prepend": "▁"}),
    ] {
        assert!(refusal(normalizer, Value::Null).contains("normalizer: "));
    }
    let bytes: Vec<TokenParts> = (0..=u8::MAX)
        .filter(|byte| *byte != 0x80)
        .map(|byte| TokenParts {
            text: byte_token(byte),
            kind: TokenKind::Byte,
        })
        .collect();
    let told = check_bytes(&bytes).expect_err("one is missing").to_string();
    assert_eq!(told, "byte fallback: the token <0x80> is missing");
    let long = TokenParts {
        text: "x".repeat(TOKEN_BYTES_MAX + 1),
        kind: TokenKind::Normal,
    };
    let told = merges(&[long], &[0.0]).expect_err("too long").to_string();
    assert!(told.contains("1025 bytes, expected at most 1024"), "{told}");
}

#[test]
fn bytes_have_one_spelling() {
    assert_eq!(byte_of("<0x0A>"), Some(10));
    for other in [
        "<0x0a>", "<0xA>", "<0x00A>", "<0x+1>", "0x0A", "<0x0G>", "<0x0A> ",
    ] {
        assert_eq!(byte_of(other), None, "{other}");
    }
}

fn any_text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        Just(" "),
        Just("  "),
        Just("t"),
        Just("h"),
        Just("e"),
        Just("the"),
        Just("in"),
        Just("ing"),
        Just("i"),
        Just("l"),
        Just("ll"),
        Just("日"),
        Just("本"),
        Just("語"),
        Just("\n"),
        Just("é"),
        Just("🙂"),
        Just("▁"),
        Just("ti"),
        Just("on"),
        Just("d"),
        Just("m"),
        Just("r"),
        Just("a"),
        Just("x"),
    ];
    proptest::collection::vec(part, 0..24).prop_map(|parts| parts.concat())
}

proptest! {
    #[test]
    fn any_text_has_the_tokens_of_the_definition(text in any_text()) {
        // Three line ends are a token of their own, which the definition below does not look for.
        let text = text.replace("\n\n\n", "\n");
        prop_assume!(!text.contains("\n\n\n"));
        for has_space in [true, false] {
            thread_local! {
                static BOTH: [Vocabulary; 2] = [from_gguf(false), from_gguf(true)];
            }
            let found = BOTH.with(|both| {
                both[usize::from(has_space)].encode(&text, SpecialTokens::AsText)
            });
            prop_assert_eq!(found, by_definition(&text, has_space));
        }
    }

    #[test]
    fn any_text_has_the_tokens_of_the_library(text in any_text()) {
        thread_local! {
            static FORMS: Vec<(String, Vocabulary, tokenizers::Tokenizer)> = forms();
        }
        FORMS.with(|forms| {
            for (name, ours, library) in forms {
                let encoding = library.encode(text.as_str(), false).expect("any text encodes");
                let found = ours.encode(&text, SpecialTokens::Recognise);
                prop_assert_eq!(found, encoding.get_ids(), "{}", name);
            }
            Ok(())
        })?;
    }
}
