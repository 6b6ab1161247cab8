//! Tokens to text, one at a time, without ever cutting a character in two.
//!
//! A token may end in the middle of a character. Its bytes wait until the character is whole, or until it is
//! certain that they are none: at most three bytes are ever kept. Whatever the tokens are, the pieces together
//! are exactly what decoding all tokens at once gives.

use std::sync::Arc;

use tidemill_core::TokenId;

use super::vocabulary::Vocabulary;

/// The text of one stream of tokens. Control tokens have no text.
#[derive(Debug)]
pub struct Detokeniser {
    vocabulary: Arc<Vocabulary>,
    unfinished: Vec<u8>,
}

impl Detokeniser {
    /// A stream that has not begun.
    pub fn new(vocabulary: Arc<Vocabulary>) -> Self {
        Self {
            vocabulary,
            unfinished: Vec::new(),
        }
    }

    /// The text that `token` completes; often empty, never the part of a character. Bytes that cannot become a
    /// character give U+FFFD at once.
    pub fn push(&mut self, token: TokenId) -> String {
        if self.vocabulary.is_special(token) {
            return String::new();
        }
        self.unfinished
            .extend_from_slice(self.vocabulary.token_bytes(token));
        let mut text = String::new();
        let n_taken = take_whole(&self.unfinished, &mut text);
        self.unfinished.drain(..n_taken);
        text
    }

    /// Ends the stream: what is left of an unfinished character gives one U+FFFD.
    pub fn finish(&mut self) -> String {
        let bytes = std::mem::take(&mut self.unfinished);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// Appends all that is certain at the front of `bytes` to `text` and returns how many bytes that is.
fn take_whole(bytes: &[u8], text: &mut String) -> usize {
    let mut n_taken = 0;
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        n_taken += chunk.valid().len();
        let invalid = chunk.invalid();
        let is_last = n_taken + invalid.len() == bytes.len();
        if is_last && may_become_a_character(invalid) {
            return n_taken;
        }
        if !invalid.is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
            n_taken += invalid.len();
        }
    }
    n_taken
}

/// True for the proper beginning of a character's bytes.
fn may_become_a_character(bytes: &[u8]) -> bool {
    matches!(std::str::from_utf8(bytes), Err(error) if error.error_len().is_none())
}

#[cfg(test)]
mod tests;
