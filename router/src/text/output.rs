//! Sampled tokens back into text.
//!
//! One `OutputText` for each choice: bytes wait until a character is whole, text waits until it cannot become a stop
//! string, and a token's log-probability waits for its text, so that nothing of a stop string gets out beside the
//! text either. The pieces together are the same whether a client reads them one by one or all at once.

use super::stop::StopMatcher;
use std::collections::VecDeque;
use std::sync::Arc;
use tidemill_core::{SampledToken, TokenId, TokenLogprob};
use tidemill_model_files::text::{Detokeniser, Vocabulary};

/// A token with its log-probability and its place in the text.
#[derive(Clone, PartialEq, Debug)]
pub struct ScoredToken {
    /// The token.
    pub token: TokenId,
    /// Natural log of its probability; `None` for the first token of a prompt.
    pub logprob: Option<f32>,
    /// The most likely tokens at its place, best first.
    pub top: Vec<TokenLogprob>,
    /// Characters of the text before it.
    pub offset_chars: usize,
}

/// Output that is sure.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Piece {
    /// The text; never a part of a character.
    pub text: String,
    /// The tokens whose text has begun to get out, when log-probabilities were asked for.
    pub tokens: Vec<ScoredToken>,
    /// A stop string has ended the output.
    pub stopped: bool,
}

impl Piece {
    /// True when there is nothing to tell.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.tokens.is_empty()
    }
}

/// What the output of one choice has come to.
pub struct OutputText {
    detokeniser: Detokeniser,
    matcher: StopMatcher,
    /// Tokens whose text is not sure yet, with the bytes of text before them.
    waiting: VecDeque<(usize, ScoredToken)>,
    keeps_tokens: bool,
    n_bytes_read: usize,
    n_chars_read: usize,
    n_bytes_given: usize,
}

impl OutputText {
    /// Empty output. `keeps_tokens` when log-probabilities are asked for; `n_chars_before` is the length of the
    /// text that goes before the output (an echoed prompt).
    pub fn new(
        vocabulary: Arc<Vocabulary>,
        stops: &[String],
        keeps_tokens: bool,
        n_chars_before: usize,
    ) -> Self {
        Self {
            detokeniser: Detokeniser::new(vocabulary),
            matcher: StopMatcher::new(stops),
            waiting: VecDeque::new(),
            keeps_tokens,
            n_bytes_read: 0,
            n_chars_read: n_chars_before,
            n_bytes_given: 0,
        }
    }

    /// Takes the next token.
    pub fn push(&mut self, sampled: &SampledToken) -> Piece {
        if self.keeps_tokens {
            let token = ScoredToken {
                token: sampled.token,
                logprob: sampled.logprob,
                top: sampled.top.clone(),
                offset_chars: self.n_chars_read,
            };
            self.waiting.push_back((self.n_bytes_read, token));
        }
        let text = self.detokeniser.push(sampled.token);
        self.read(&text)
    }

    /// The end: text that was held back and did not become a stop string.
    pub fn finish(&mut self) -> Piece {
        let text = self.detokeniser.finish();
        let mut piece = self.read(&text);
        if !piece.stopped {
            piece.text.push_str(&self.matcher.finish());
            piece
                .tokens
                .extend(self.waiting.drain(..).map(|(_, token)| token));
        }
        piece
    }

    fn read(&mut self, text: &str) -> Piece {
        self.n_bytes_read += text.len();
        self.n_chars_read += text.chars().count();
        let matched = self.matcher.push(text);
        self.n_bytes_given += matched.text.len();
        let n_begun = self
            .waiting
            .partition_point(|(start, _)| *start < self.n_bytes_given);
        let tokens = self
            .waiting
            .drain(..n_begun)
            .map(|(_, token)| token)
            .collect();
        if matched.stopped {
            self.waiting.clear();
        }
        Piece {
            text: matched.text,
            tokens,
            stopped: matched.stopped,
        }
    }
}
