//! The tokenizer of a GGUF file: `tokenizer.ggml.*`, as converters write it for byte-level BPE.
//!
//! The file names its rule of splitting and leaves the rest of the rule to the reader; what the named rules imply
//! (Llama 3 looks whole words up before merging and starts with a beginning-of-text token) is written down here.

use std::path::Path;

use tidemill_core::TokenId;

use super::TextParts;
use super::generation_defaults::GenerationDefaults;
use super::split::SplitRule;
use super::vocabulary::{TokenKind, TokenParts, VocabularyParts};
use crate::error::{LoadError, Refusal, quoted};
use crate::gguf::{self, Gguf};
use crate::mapping::Mapping;

const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";

/// Ends of a turn that older files leave out of the metadata; looked for when the file names none.
const END_OF_TURN: [&str; 3] = ["<|eot_id|>", "<|im_end|>", "<|eom_id|>"];

pub(super) fn read(file: &Path) -> Result<TextParts, LoadError> {
    let mapping = Mapping::open(file)?;
    gguf::parse(mapping.bytes())
        .and_then(|gguf| text_parts(&gguf))
        .map_err(|refusal| refusal.in_file(file))
}

fn text_parts(gguf: &Gguf<'_>) -> Result<TextParts, Refusal> {
    let vocabulary = vocabulary_parts(gguf)?;
    let architecture = required(gguf.string("general.architecture")?, "general.architecture")?;
    let text = |id: Option<TokenId>| {
        let token = id.and_then(|id| vocabulary.tokens.get(id as usize));
        token.map(|token| token.text.clone()).unwrap_or_default()
    };
    Ok(TextParts {
        chat_template: gguf.string("tokenizer.chat_template")?.map(str::to_owned),
        bos_text: text(vocabulary.bos_id),
        eos_text: text(gguf.u32("tokenizer.ggml.eos_token_id")?),
        defaults: GenerationDefaults::from_gguf(gguf)?,
        context_length: gguf::model::context_length(gguf)?,
        vocab_size: gguf.u32(&format!("{architecture}.vocab_size"))?,
        vocabulary,
    })
}

fn vocabulary_parts(gguf: &Gguf<'_>) -> Result<VocabularyParts, Refusal> {
    let model = required(gguf.string("tokenizer.ggml.model")?, "tokenizer.ggml.model")?;
    if model != "gpt2" {
        let problem = format!("{}, supported: gpt2 (byte-level BPE)", quoted(model));
        return Err(Refusal::new("tokenizer.ggml.model", problem));
    }
    if gguf.boolean("tokenizer.ggml.add_eos_token")? == Some(true) {
        return Err(Refusal::new(
            "tokenizer.ggml.add_eos_token",
            "true, supported: false",
        ));
    }
    let rule = SplitRule::from_gguf(required(
        gguf.string("tokenizer.ggml.pre")?,
        "tokenizer.ggml.pre",
    )?)?;
    let tokens = read_tokens(gguf)?;
    let add_bos = gguf.boolean("tokenizer.ggml.add_bos_token")?;
    Ok(VocabularyParts {
        eos_ids: read_eos_ids(gguf, &tokens)?,
        tokens,
        merges: read_merges(gguf)?,
        rule,
        whole_words_first: rule == SplitRule::Llama3,
        compose: rule == SplitRule::Qwen2,
        bos_id: gguf.u32("tokenizer.ggml.bos_token_id")?,
        add_bos: add_bos.unwrap_or(rule == SplitRule::Llama3),
    })
}

fn read_tokens(gguf: &Gguf<'_>) -> Result<Vec<TokenParts>, Refusal> {
    let texts = required(gguf.strings(TOKENS)?, TOKENS)?;
    let types = gguf
        .integers(TOKEN_TYPES)?
        .unwrap_or_else(|| vec![1; texts.len()]);
    if types.len() != texts.len() {
        let problem = format!(
            "{} entries, but there are {} tokens",
            types.len(),
            texts.len()
        );
        return Err(Refusal::new(TOKEN_TYPES, problem));
    }
    texts
        .iter()
        .zip(types)
        .enumerate()
        .map(|(id, (text, token_type))| {
            let kind = token_kind(token_type).ok_or_else(|| {
                let problem = format!("{token_type} for token {id}, supported: 1 to 5");
                Refusal::new(TOKEN_TYPES, problem)
            })?;
            Ok(TokenParts {
                text: (*text).to_owned(),
                kind,
            })
        })
        .collect()
}

/// The token that stands for unknown text is a control token: no text may become it.
fn token_kind(token_type: i64) -> Option<TokenKind> {
    match token_type {
        1 => Some(TokenKind::Normal),
        2 | 3 => Some(TokenKind::Control),
        4 => Some(TokenKind::UserDefined),
        5 => Some(TokenKind::Unused),
        _ => None,
    }
}

fn read_merges(gguf: &Gguf<'_>) -> Result<Vec<(String, String)>, Refusal> {
    let merges = required(gguf.strings(MERGES)?, MERGES)?;
    merges
        .iter()
        .map(|merge| {
            merge
                .split_once(' ')
                .map(|(left, right)| (left.to_owned(), right.to_owned()))
                .ok_or_else(|| Refusal::new(MERGES, format!("{}, expected a pair", quoted(merge))))
        })
        .collect()
}

fn read_eos_ids(gguf: &Gguf<'_>, tokens: &[TokenParts]) -> Result<Vec<TokenId>, Refusal> {
    let mut ids = Vec::new();
    ids.extend(gguf.u32("tokenizer.ggml.eos_token_id")?);
    let n_eos = ids.len();
    for key in ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
        ids.extend(gguf.u32(key)?);
    }
    if ids.len() == n_eos {
        let ends_turn = |token: &TokenParts| {
            token.kind == TokenKind::Control && END_OF_TURN.contains(&token.text.as_str())
        };
        let numbered = (0..).zip(tokens);
        ids.extend(
            numbered
                .filter(|(_, token)| ends_turn(token))
                .map(|(id, _): (TokenId, _)| id),
        );
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

fn required<T>(value: Option<T>, key: &str) -> Result<T, Refusal> {
    value.ok_or_else(|| Refusal::new(key, "the key is missing"))
}

#[cfg(test)]
mod tests;
