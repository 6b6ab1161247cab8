use super::*;

/// The fields of a GGUF file, one after the other.
#[derive(Default)]
struct Header {
    n_keys: u64,
    bytes: Vec<u8>,
}

impl Header {
    fn text(&mut self, text: &str) {
        self.bytes.extend((text.len() as u64).to_le_bytes());
        self.bytes.extend(text.as_bytes());
    }

    fn key(&mut self, key: &str, value_type: u32) {
        self.n_keys += 1;
        self.text(key);
        self.bytes.extend(value_type.to_le_bytes());
    }

    fn string(mut self, key: &str, value: &str) -> Self {
        self.key(key, 8);
        self.text(value);
        self
    }

    fn number(mut self, key: &str, value: u32) -> Self {
        self.key(key, 4);
        self.bytes.extend(value.to_le_bytes());
        self
    }

    fn flag(mut self, key: &str, value: bool) -> Self {
        self.key(key, 7);
        self.bytes.push(u8::from(value));
        self
    }

    fn strings(mut self, key: &str, values: &[&str]) -> Self {
        self.key(key, 9);
        self.bytes.extend(8_u32.to_le_bytes());
        self.bytes.extend((values.len() as u64).to_le_bytes());
        values.iter().for_each(|value| self.text(value));
        self
    }

    fn integers(mut self, key: &str, values: &[i32]) -> Self {
        self.key(key, 9);
        self.bytes.extend(5_u32.to_le_bytes());
        self.bytes.extend((values.len() as u64).to_le_bytes());
        self.bytes
            .extend(values.iter().flat_map(|value| value.to_le_bytes()));
        self
    }

    fn read(self) -> Result<TextParts, Refusal> {
        let mut file = b"GGUF".to_vec();
        file.extend(3_u32.to_le_bytes());
        file.extend(0_u64.to_le_bytes());
        file.extend(self.n_keys.to_le_bytes());
        file.extend(self.bytes);
        text_parts(&gguf::parse(&file)?)
    }
}

fn without_rule() -> Header {
    Header::default()
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
            Header::default().string("tokenizer.ggml.model", "llama"),
            "tokenizer.ggml.model",
        ),
        (Header::default(), "tokenizer.ggml.model"),
    ] {
        assert_eq!(
            header.read().err().map(|refusal| refusal.field).as_deref(),
            Some(field)
        );
    }
}

#[test]
fn token_types_match_the_tokens() {
    for (types, problem) in [(&[1, 6][..], "6 for token 1"), (&[1][..], "1 entries")] {
        let header = Header::default()
            .string("tokenizer.ggml.model", "gpt2")
            .string("tokenizer.ggml.pre", "gpt-2")
            .strings(TOKENS, &["a", "b"])
            .integers(TOKEN_TYPES, types);
        let refusal = header.read().err().expect("refused");
        assert_eq!(refusal.field, TOKEN_TYPES);
        assert!(refusal.problem.contains(problem), "{refusal}");
    }
}
