//! Vocabularies in the manner of SentencePiece (Kudo and Richardson 2018): spaces are letters, bytes are a way out.
//!
//! A space is spelled `▁`, text is merged as a whole and not word by word, and a character that the vocabulary lacks becomes
//! its bytes, each a token `<0x..>`. Models differ in whether a text gets a space in front. GGUF files keep a score for
//! each token in place of the list of merges; the list follows from them as transformers makes it.

use std::collections::HashMap;

use super::vocabulary::{TokenKind, TokenParts};
use crate::error::{Refusal, quoted};

/// The letter of the space.
pub(super) const SPACE_LETTER: char = '\u{2581}';
/// Tokens that are longer have no place in a published vocabulary; the cost of finding merges is quadratic in this.
const TOKEN_BYTES_MAX: usize = 1024;

/// Where a space is put that the text does not have. A stretch is what lies between control and user-defined tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LeadingSpace {
    /// Nowhere: Gemma.
    Never,
    /// Before each stretch, also one that begins with a space: Llama 2, Mistral.
    EachStretch,
    /// Before each stretch that does not begin with one.
    EachStretchWithout,
    /// Before the text, if it begins with neither a token nor a space.
    TextWithout,
}

impl LeadingSpace {
    /// Whether `stretch` gets a space; `is_first` says that no token stands before it.
    fn applies(self, stretch: &str, is_first: bool) -> bool {
        match self {
            Self::Never => false,
            Self::EachStretch => true,
            Self::EachStretchWithout => !stretch.starts_with([' ', SPACE_LETTER]),
            Self::TextWithout => is_first && !stretch.starts_with([' ', SPACE_LETTER]),
        }
    }

    /// A stretch in the letters of the vocabulary. An empty one stays empty.
    pub(super) fn spell(self, stretch: &str, is_first: bool) -> String {
        let mut spelled = String::with_capacity(stretch.len() + 3);
        if !stretch.is_empty() && self.applies(stretch, is_first) {
            spelled.push(SPACE_LETTER);
        }
        spelled.extend(stretch.chars().map(|c| match c {
            ' ' => SPACE_LETTER,
            other => other,
        }));
        spelled
    }

    /// Its name in the identity of a vocabulary.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Never => "spaces, never leading",
            Self::EachStretch => "spaces, leading each stretch",
            Self::EachStretchWithout => "spaces, leading each stretch without",
            Self::TextWithout => "spaces, leading a text without",
        }
    }
}

/// The text of a token in the bytes that it stands for.
pub(super) fn read(spelled: &str) -> Vec<u8> {
    spelled.replace(SPACE_LETTER, " ").into_bytes()
}

/// The byte of a token `<0x..>`.
pub(super) fn byte_of(spelled: &str) -> Option<u8> {
    let digits = spelled.strip_prefix("<0x")?.strip_suffix('>')?;
    let is_plain = digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_hexdigit());
    let byte = u8::from_str_radix(digits, 16).ok()?;
    (is_plain && spelled == byte_token(byte)).then_some(byte)
}

fn byte_token(byte: u8) -> String {
    format!("<0x{byte:02X}>")
}

/// Refuses a vocabulary that lacks a byte: some text would have no tokens.
pub(super) fn check_bytes(tokens: &[TokenParts]) -> Result<(), Refusal> {
    let mut is_there = [false; 256];
    for token in tokens.iter().filter(|token| token.kind == TokenKind::Byte) {
        if let Some(byte) = byte_of(&token.text) {
            is_there[usize::from(byte)] = true;
        }
    }
    match (0..=u8::MAX).find(|byte| !is_there[usize::from(*byte)]) {
        None => Ok(()),
        Some(byte) => {
            let problem = format!("the token {} is missing", byte_token(byte));
            Err(Refusal::new("byte fallback", problem))
        }
    }
}

/// Every way to make a token of two others, the tokens with the highest scores first; equal scores in order of ids.
pub(super) fn merges(
    tokens: &[TokenParts],
    scores: &[f32],
) -> Result<Vec<(String, String)>, Refusal> {
    let normal = || {
        let numbered = tokens.iter().enumerate();
        numbered.filter(|(_, token)| token.kind == TokenKind::Normal)
    };
    let mut ids: HashMap<&str, usize> = HashMap::with_capacity(tokens.len());
    for (id, token) in normal() {
        ids.entry(&token.text).or_insert(id);
    }
    let mut found: Vec<(f32, usize, usize)> = Vec::new();
    for (id, token) in normal() {
        let text = token.text.as_str();
        if text.len() > TOKEN_BYTES_MAX {
            let problem = format!(
                "token {id} {} has {} bytes, expected at most {TOKEN_BYTES_MAX}",
                quoted(text),
                text.len()
            );
            return Err(Refusal::new("tokens", problem));
        }
        let first = found.len();
        for (place, _) in text.char_indices().skip(1) {
            let (left, right) = text.split_at(place);
            if let (Some(left), Some(right)) = (ids.get(left), ids.get(right)) {
                found.push((scores[id], *left, *right));
            }
        }
        found[first..].sort_by_key(|(_, left, right)| (*left, *right));
    }
    found.sort_by(|a, b| b.0.total_cmp(&a.0));
    let text = |id: usize| tokens[id].text.clone();
    let pairs = found.into_iter();
    Ok(pairs
        .map(|(_, left, right)| (text(left), text(right)))
        .collect())
}

#[cfg(test)]
mod tests;
