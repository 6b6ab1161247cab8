//! The tokenizer of a GGUF file: `tokenizer.ggml.*`, as converters write it.
//!
//! The model `gpt2` is byte-level BPE: the file names its rule of splitting and leaves the rest of the rule to the reader;
//! what the named rules imply (Llama 3 looks whole words up before merging and starts with a beginning-of-text token) is
//! written down here. The model `llama` is SentencePiece's (Llama 2, Mistral, Gemma): scores, and defaults of its own.

use std::path::Path;

use tidemill_core::TokenId;

use super::TextParts;
use super::generation_defaults::GenerationDefaults;
use super::spaces::{self, LeadingSpace};
use super::split::SplitRule;
use super::vocabulary::{Spelling, TokenKind, TokenParts, VocabularyParts};
use crate::error::{LoadError, Refusal, quoted};
use crate::gguf::{self, Gguf};
use crate::mapping::Mapping;

const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const SCORES: &str = "tokenizer.ggml.scores";
const PRE: &str = "tokenizer.ggml.pre";
const BOS_ID: &str = "tokenizer.ggml.bos_token_id";
const EOS_ID: &str = "tokenizer.ggml.eos_token_id";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
/// The ids of SentencePiece where a file names none.
const SPACES_BOS_ID: TokenId = 1;
const SPACES_EOS_ID: TokenId = 2;

/// Ends of a turn that older files leave out of the metadata; looked for when the file names none.
const END_OF_TURN: [&str; 4] = ["<|eot_id|>", "<|im_end|>", "<|eom_id|>", "<end_of_turn>"];
/// Marks of turns that some files call user-defined: content must not become one.
const TURN_MARKS: [&str; 2] = ["<start_of_turn>", "<end_of_turn>"];

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
        eos_text: text(gguf.u32(EOS_ID)?),
        defaults: GenerationDefaults::from_gguf(gguf)?,
        context_length: gguf::model::context_length(gguf)?,
        vocab_size: gguf.u32(&format!("{architecture}.vocab_size"))?,
        vocabulary,
    })
}

fn vocabulary_parts(gguf: &Gguf<'_>) -> Result<VocabularyParts, Refusal> {
    if gguf.boolean("tokenizer.ggml.add_eos_token")? == Some(true) {
        return Err(Refusal::new(
            "tokenizer.ggml.add_eos_token",
            "true, supported: false",
        ));
    }
    match required(gguf.string("tokenizer.ggml.model")?, "tokenizer.ggml.model")? {
        "gpt2" => byte_letter_parts(gguf),
        "llama" => space_parts(gguf),
        other => {
            let problem = format!(
                "{}, supported: gpt2 (byte-level BPE), llama (SentencePiece)",
                quoted(other)
            );
            Err(Refusal::new("tokenizer.ggml.model", problem))
        }
    }
}

fn byte_letter_parts(gguf: &Gguf<'_>) -> Result<VocabularyParts, Refusal> {
    let rule = SplitRule::from_gguf(required(gguf.string(PRE)?, PRE)?)?;
    let tokens = read_tokens(gguf)?;
    if let Some(id) = tokens.iter().position(|t| t.kind == TokenKind::Byte) {
        let problem = format!("6 (a byte) for token {id}, supported for gpt2: 1 to 5");
        return Err(Refusal::new(TOKEN_TYPES, problem));
    }
    Ok(VocabularyParts {
        eos_ids: read_eos_ids(gguf, &tokens)?,
        tokens,
        merges: read_merges(gguf)?,
        spelling: Spelling::ByteLetters(rule),
        whole_words_first: rule == SplitRule::Llama3,
        compose: rule == SplitRule::Qwen2,
        bos_id: gguf.u32(BOS_ID)?,
        add_bos: gguf.boolean(ADD_BOS)?.unwrap_or(rule == SplitRule::Llama3),
    })
}

fn space_parts(gguf: &Gguf<'_>) -> Result<VocabularyParts, Refusal> {
    if let Some(other) = gguf.string(PRE)?.filter(|pre| *pre != "default") {
        let problem = format!("{}, supported for the model llama: default", quoted(other));
        return Err(Refusal::new(PRE, problem));
    }
    let key = "tokenizer.ggml.remove_extra_whitespaces";
    if gguf.boolean(key)? == Some(true) {
        return Err(Refusal::new(key, "true, supported: false"));
    }
    let tokens = read_tokens(gguf)?;
    let wrong = |token: &TokenParts| {
        token.kind == TokenKind::Byte && spaces::byte_of(&token.text).is_none()
    };
    if let Some(id) = tokens.iter().position(wrong) {
        let problem = format!("token {id} {} is no byte", quoted(&tokens[id].text));
        return Err(Refusal::new(TOKEN_TYPES, problem));
    }
    let scores = required(gguf.floats(SCORES)?, SCORES)?;
    if scores.len() != tokens.len() {
        let (n_scores, n_tokens) = (scores.len(), tokens.len());
        let problem = format!("{n_scores} entries, but there are {n_tokens} tokens");
        return Err(Refusal::new(SCORES, problem));
    }
    let has_space = gguf.boolean("tokenizer.ggml.add_space_prefix")?;
    let leading = match has_space.unwrap_or(true) {
        true => LeadingSpace::EachStretch,
        false => LeadingSpace::Never,
    };
    let mut eos_ids = read_eos_ids(gguf, &tokens)?;
    if gguf.u32(EOS_ID)?.is_none() {
        eos_ids.push(SPACES_EOS_ID);
        eos_ids.sort_unstable();
        eos_ids.dedup();
    }
    Ok(VocabularyParts {
        merges: spaces::merges(&tokens, &scores)?,
        eos_ids,
        tokens,
        spelling: Spelling::Spaces(leading),
        whole_words_first: false,
        compose: false,
        bos_id: Some(gguf.u32(BOS_ID)?.unwrap_or(SPACES_BOS_ID)),
        add_bos: gguf.boolean(ADD_BOS)?.unwrap_or(true),
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
                let problem = format!("{token_type} for token {id}, supported: 1 to 6");
                Refusal::new(TOKEN_TYPES, problem)
            })?;
            let kind = match kind {
                TokenKind::UserDefined if TURN_MARKS.contains(text) => TokenKind::Control,
                other => other,
            };
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
        6 => Some(TokenKind::Byte),
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
    ids.extend(gguf.u32(EOS_ID)?);
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
