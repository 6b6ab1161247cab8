use super::*;
use crate::testing::GgufWriter;

/// A file without tensors, key by key.
struct Header(GgufWriter);

impl Header {
    fn new() -> Self {
        Self(GgufWriter::new())
    }

    fn string(mut self, key: &str, value: &str) -> Self {
        self.0.string(key, value);
        self
    }

    fn number(mut self, key: &str, value: u32) -> Self {
        self.0.u32(key, value);
        self
    }

    fn flag(mut self, key: &str, value: bool) -> Self {
        self.0.boolean(key, value);
        self
    }

    fn strings(mut self, key: &str, values: &[&str]) -> Self {
        self.0.strings(key, values.iter().copied());
        self
    }

    fn integers(mut self, key: &str, values: &[i32]) -> Self {
        self.0.i32s(key, values);
        self
    }

    fn read(self) -> Result<TextParts, Refusal> {
        text_parts(&gguf::parse(&self.0.finish())?)
    }
}

fn without_rule() -> Header {
    Header::new()
        .string("general.architecture", "llama")
        .number("llama.context_length", 64)
        .string("tokenizer.ggml.model", "gpt2")
        .strings(TOKENS, &["a", "b", "ab", "<|im_end|>", "<pad>"])
        .integers(TOKEN_TYPES, &[1, 1, 1, 3, 5])
        .number("tokenizer.ggml.eos_token_id", 4)
        .number("tokenizer.ggml.bos_token_id", 3)
}

fn without_merges() -> Header {
    without_rule().string("tokenizer.ggml.pre", "llama-bpe")
}

fn complete() -> Header {
    without_merges().strings(MERGES, &["a b"])
}

#[test]
fn a_rule_brings_what_it_implies() {
    let parts = complete().read().expect("supported").vocabulary;
    assert!(parts.add_bos && parts.whole_words_first && !parts.compose);
    assert_eq!(
        parts.eos_ids,
        [3, 4],
        "an end of turn is found by its name when the file names none"
    );
    let explicit = complete().flag("tokenizer.ggml.add_bos_token", false);
    let parts = explicit
        .number("tokenizer.ggml.eot_token_id", 4)
        .read()
        .expect("supported")
        .vocabulary;
    assert!(!parts.add_bos);
    assert_eq!(parts.eos_ids, [4]);
}

#[test]
fn what_is_not_known_is_refused_by_name() {
    for (header, field) in [
        (without_rule(), "tokenizer.ggml.pre"),
        (
            without_rule().string("tokenizer.ggml.pre", "tekken"),
            "tokenizer.ggml.pre",
        ),
        (without_merges(), MERGES),
        (without_merges().strings(MERGES, &["ab"]), MERGES),
        (
            complete().flag("tokenizer.ggml.add_eos_token", true),
            "tokenizer.ggml.add_eos_token",
        ),
        (
            Header::new().string("tokenizer.ggml.model", "bert"),
            "tokenizer.ggml.model",
        ),
        (Header::new(), "tokenizer.ggml.model"),
    ] {
        assert_eq!(
            header.read().err().map(|refusal| refusal.field).as_deref(),
            Some(field)
        );
    }
}

#[test]
fn token_types_match_the_tokens() {
    for (types, problem) in [
        (&[1, 7][..], "7 for token 1"),
        (&[1, 6][..], "6 (a byte) for token 1"),
        (&[1][..], "1 entries"),
    ] {
        let header = Header::new()
            .string("tokenizer.ggml.model", "gpt2")
            .string("tokenizer.ggml.pre", "gpt-2")
            .strings(TOKENS, &["a", "b"])
            .integers(TOKEN_TYPES, types);
        let refusal = header.read().err().expect("refused");
        assert_eq!(refusal.field, TOKEN_TYPES);
        assert!(refusal.problem.contains(problem), "{refusal}");
    }
}
