use serde_json::{Value, json};

use super::*;
use crate::text::split::{LLAMA3_PATTERN, QWEN2_PATTERN};
use crate::text::tests::Directory;
use crate::text::{ModelText, open_text};

/// A tokenizer of three letters and two control tokens, in the form of Llama 3.
fn tokenizer() -> Value {
    json!({
        "added_tokens": [
            {"id": 5, "content": "<|begin|>", "special": true},
            {"id": 7, "content": "<|end|>", "special": true},
            {"id": 8, "content": "<think>", "special": false, "normalized": true},
        ],
        "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        ]},
        "post_processor": {"type": "Sequence", "processors": [
            {"type": "ByteLevel", "add_prefix_space": true},
            {"type": "TemplateProcessing",
             "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
             "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [5], "tokens": ["<|begin|>"]}}},
        ]},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}, "merges": [["a", "b"]],
                  "ignore_merges": true},
    })
}

fn open(name: &str, tokenizer: &Value, others: &[(&str, &str)]) -> Result<ModelText, LoadError> {
    let directory = Directory::new(name);
    directory.write("tokenizer.json", &tokenizer.to_string());
    directory.write(
        "config.json",
        r#"{"max_position_embeddings": 64, "vocab_size": 16, "eos_token_id": [7, 5, 7]}"#,
    );
    for (file, content) in others {
        directory.write(file, content);
    }
    open_text(&directory.0)
}

fn refusal(name: &str, tokenizer: &Value) -> (String, String) {
    match open(name, tokenizer, &[]).expect_err(name) {
        LoadError::Refused { field, problem, .. } => (field, problem),
        other => panic!("{other}"),
    }
}

#[test]
fn a_pipeline_of_llama_3_is_understood() {
    let model = open("llama3", &tokenizer(), &[]).expect("supported");
    let vocabulary = &model.vocabulary;
    assert_eq!(vocabulary.encode_prompt("abc"), [5, 4]);
    assert_eq!(vocabulary.encode_prompt("abca<think>"), [5, 3, 2, 0, 8]);
    assert_eq!(vocabulary.eos_ids(), [5, 7]);
    assert_eq!(vocabulary.vocab_size(), 9);
    assert_eq!(vocabulary.token_bytes(6), b"", "a hole in the numbering");
    assert_eq!(model.vocab_size, 16);
    assert_eq!(model.context_length, 64);
    assert!(model.chat_template.is_none());
}

#[test]
fn other_spellings_of_the_same_thing() {
    let mut spaced = tokenizer();
    spaced["model"]["merges"] = json!(["a b"]);
    spaced["post_processor"] = Value::Null;
    spaced["normalizer"] = json!({"type": "NFC"});
    spaced["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!(QWEN2_PATTERN);
    spaced["added_tokens"][2]["normalized"] = json!(false);
    let model = open("spaced", &spaced, &[]).expect("supported");
    assert_eq!(model.vocabulary.encode_prompt("ab"), [3]);
    let mut gpt2 = tokenizer();
    gpt2["pre_tokenizer"] = json!({"type": "ByteLevel", "add_prefix_space": false});
    assert!(open("gpt2", &gpt2, &[]).is_ok());
}

#[test]
fn what_is_not_known_is_refused_by_name() {
    let cases: &[(&str, &str, Value)] = &[
        ("/model/type", "model.type", json!("Unigram")),
        ("/model/byte_fallback", "normalizer", json!(true)),
        ("/model/dropout", "dropout", json!(0.1)),
        (
            "/model/end_of_word_suffix",
            "end_of_word_suffix",
            json!("</w>"),
        ),
        ("/model/merges", "merges", json!(["ab"])),
        ("/model/merges", "merges", json!([["a", "x"]])),
        ("/model/vocab", "vocab", json!({"a": 0, "b": 0})),
        ("/model/vocab", "vocab", json!({"a": 4_000_000_000_u32})),
        ("/model/vocab", "vocab", json!({"a": -1})),
        ("/normalizer", "normalizer", json!({"type": "Lowercase"})),
        (
            "/pre_tokenizer",
            "pre_tokenizer",
            json!({"type": "Metaspace"}),
        ),
        ("/pre_tokenizer", "pre_tokenizer", Value::Null),
        (
            "/pre_tokenizer/pretokenizers/0/pattern/Regex",
            "pre_tokenizer",
            json!("\\w+"),
        ),
        (
            "/pre_tokenizer/pretokenizers/1/add_prefix_space",
            "pre_tokenizer",
            json!(true),
        ),
        (
            "/post_processor",
            "post_processor",
            json!({"type": "RobertaProcessing"}),
        ),
        (
            "/post_processor/processors/1/single",
            "post_processor",
            json!([{"Sequence": {}}, {"SpecialToken": {}}]),
        ),
        ("/added_tokens/0/lstrip", "added_tokens", json!(true)),
        ("/added_tokens/0/content", "added_tokens", json!("")),
        ("/added_tokens/0/id", "vocab", json!(1 << 22)),
        ("/added_tokens/1/id", "vocab_size", json!(16)),
    ];
    for (place, field, value) in cases {
        let mut changed = tokenizer();
        let (parent, key) = place.rsplit_once('/').expect("a path");
        let parent = changed.pointer_mut(parent).expect("the parent exists");
        match key.parse::<usize>() {
            Ok(idx) if parent.is_array() => parent[idx] = value.clone(),
            _ => parent[key] = value.clone(),
        }
        let (found, problem) = refusal("refused", &changed);
        assert_eq!(found, *field, "{place} = {value}: {problem}");
        assert!(!problem.is_empty());
    }
}

#[test]
fn the_template_is_found_in_all_its_places() {
    let source = "{{ bos_token }}{{ messages[0].content }}";
    let list =
        json!([{"name": "tool_use", "template": "x"}, {"name": "default", "template": source}]);
    let labels =
        |template: Value| json!({"bos_token": "<|begin|>", "chat_template": template}).to_string();
    let (only, choice, other) = (labels(json!(source)), labels(list), labels(json!("other")));
    for (name, files) in [
        ("only", vec![("tokenizer_config.json", only.as_str())]),
        ("choice", vec![("tokenizer_config.json", choice.as_str())]),
        (
            "file",
            vec![
                ("tokenizer_config.json", other.as_str()),
                ("chat_template.jinja", source),
            ],
        ),
    ] {
        let model = open(name, &tokenizer(), &files).expect(name);
        let hello = crate::text::ChatMessage {
            role: "user".to_owned(),
            content: "abc<|end|>".to_owned(),
        };
        let segments = model
            .chat_template
            .expect("found")
            .render(&[hello], true)
            .expect("renders");
        let tokens = model.vocabulary.encode_segments(&segments);
        assert_eq!(tokens[..2], [5, 4], "{name}");
        assert!(!tokens.contains(&7), "{name}");
    }
}

#[test]
fn a_bad_template_or_file_is_found_at_opening() {
    for (file, content, field) in [
        ("chat_template.jinja", "{% for %}", "chat_template"),
        (
            "chat_template.jinja",
            "{{ messages | nothing }}",
            "chat_template",
        ),
        (
            "tokenizer_config.json",
            r#"{"chat_template": [{"name": "rag", "template": ""}]}"#,
            "chat_template",
        ),
        (
            "generation_config.json",
            r#"{"temperature": 9}"#,
            "temperature",
        ),
        (
            "generation_config.json",
            r#"{"eos_token_id": 99}"#,
            "eos_token_id",
        ),
        (
            "config.json",
            r#"{"vocab_size": 16}"#,
            "max_position_embeddings",
        ),
        (
            "config.json",
            r#"{"vocab_size": 4, "max_position_embeddings": 64}"#,
            "vocab_size",
        ),
        ("tokenizer.json", "[]", "file"),
    ] {
        let error = open("bad", &tokenizer(), &[(file, content)]).expect_err(content);
        let LoadError::Refused { field: found, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!(found, field, "{error}");
    }
}
