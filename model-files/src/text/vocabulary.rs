//! Text to tokens and tokens to bytes.
//!
//! Control tokens (turn markers, end of text) steer the model, so it matters who may write them: a template may,
//! the content of a message may not. Text therefore comes in [`Segment`]s that say which of the two it is. Words
//! still form across the borders of segments, so that harmless text gets the tokens that it would get in one piece.
//! Merging is the `tokenizers` crate's; words are cut by our own scanners (see `split`), which are linear. Vocabularies
//! that spell spaces (see `spaces`) have no words.

use std::borrow::Cow;

use aho_corasick::{AhoCorasick, MatchKind};
use tidemill_core::TokenId;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::NFC;
use tokenizers::{Model, NormalizedString, Normalizer};

use super::byte_letters::ByteLetters;
use super::spaces::{self, LeadingSpace};
use super::split::{SplitRule, Splitter};
use crate::error::{Refusal, quoted};

/// Ids are below this.
const N_TOKENS_MAX: usize = 1 << 22;

/// Whether text may become control tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpecialTokens {
    /// The spelling of a control token is that token.
    Recognise,
    /// The spelling of a control token is ordinary text.
    AsText,
}

/// A part of a prompt, with the right of its author to write control tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// The text.
    pub text: String,
    /// What becomes of control tokens that are spelled in it.
    pub special: SpecialTokens,
}

/// What an entry of the vocabulary is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenKind {
    /// Made by merging; spelled in byte letters, or with letters for spaces.
    Normal,
    /// One byte of a character that the vocabulary lacks, where spaces are spelled.
    Byte,
    /// Steers the model; has no text in an answer.
    Control,
    /// Recognised as a whole in any text; has text.
    UserDefined,
    /// Fills the numbering.
    Unused,
}

#[derive(Debug, Clone)]
pub(super) struct TokenParts {
    pub(super) text: String,
    pub(super) kind: TokenKind,
}

/// How text becomes the letters that are merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spelling {
    /// Words, cut by a rule, in a letter for each byte.
    ByteLetters(SplitRule),
    /// Stretches of characters, with a letter for the space.
    Spaces(LeadingSpace),
}

impl Spelling {
    fn name(self) -> &'static str {
        match self {
            Self::ByteLetters(rule) => rule.name(),
            Self::Spaces(leading) => leading.name(),
        }
    }
}

/// What a tokenizer consists of, from whichever file. Token ids are indices.
#[derive(Debug)]
pub(super) struct VocabularyParts {
    pub(super) tokens: Vec<TokenParts>,
    pub(super) merges: Vec<(String, String)>,
    pub(super) spelling: Spelling,
    /// A word that is a token as it stands is not built by merging.
    pub(super) whole_words_first: bool,
    pub(super) compose: bool,
    pub(super) bos_id: Option<TokenId>,
    pub(super) add_bos: bool,
    pub(super) eos_ids: Vec<TokenId>,
}

/// The vocabulary of one model, ready for use from any thread.
pub struct Vocabulary {
    tokens: Vec<Token>,
    letters: ByteLetters,
    spelling: Spelling,
    /// Of the rule of a spelling in byte letters.
    splitter: Option<Splitter>,
    bpe: BPE,
    /// Control and user-defined tokens.
    added: Added,
    user_defined: Added,
    compose: bool,
    bos_id: Option<TokenId>,
    add_bos: bool,
    eos_ids: Vec<TokenId>,
    longest_token_bytes: usize,
    fingerprint: [u8; 32],
}

struct Token {
    bytes: Box<[u8]>,
    kind: TokenKind,
}

/// Tokens that are found by their spelling; the longest wins.
struct Added {
    ids: Vec<TokenId>,
    finder: AhoCorasick,
}

impl Added {
    fn new<'a>(tokens: impl Iterator<Item = (TokenId, &'a str)>) -> Result<Self, Refusal> {
        let (ids, texts): (Vec<_>, Vec<_>) = tokens.unzip();
        let finder = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(texts)
            .map_err(|error| Refusal::new("control tokens", error.to_string()))?;
        Ok(Self { ids, finder })
    }

    fn find<'a>(
        &'a self,
        text: &'a str,
    ) -> impl Iterator<Item = (std::ops::Range<usize>, TokenId)> + 'a {
        // Every pattern is whole characters, so every match is too.
        self.finder
            .find_iter(text)
            .map(|found| (found.range(), self.ids[found.pattern()]))
    }
}

impl Vocabulary {
    pub(super) fn new(parts: VocabularyParts) -> Result<Self, Refusal> {
        check_ids(&parts)?;
        let has_spaces = matches!(parts.spelling, Spelling::Spaces(_));
        if has_spaces {
            spaces::check_bytes(&parts.tokens)?;
        }
        let fingerprint = fingerprint(&parts);
        let letters = ByteLetters::new();
        let tokens: Vec<Token> = parts
            .tokens
            .iter()
            .map(|token| read_token(&letters, parts.spelling, token))
            .collect();
        let longest = tokens.iter().map(|token| token.bytes.len()).max();
        let of_kinds = |kinds: &'static [TokenKind]| {
            let numbered = parts.tokens.iter().enumerate();
            numbered
                .filter(move |(_, token)| kinds.contains(&token.kind) && !token.text.is_empty())
                .map(|(id, token)| (id as TokenId, token.text.as_str()))
        };
        let added = Added::new(of_kinds(&[TokenKind::Control, TokenKind::UserDefined]))?;
        let user_defined = Added::new(of_kinds(&[TokenKind::UserDefined]))?;
        let mut mergeable = Vocab::default();
        // Control tokens stay outside: no merge and no whole word can then make one.
        for (id, text) in of_kinds(&[TokenKind::Normal, TokenKind::Byte, TokenKind::UserDefined]) {
            mergeable.entry(text.to_owned()).or_insert(id);
        }
        let bpe = BPE::builder()
            .vocab_and_merges(mergeable, parts.merges)
            .ignore_merges(parts.whole_words_first)
            .byte_fallback(has_spaces)
            .build()
            .map_err(|error| Refusal::new("merges", quoted(&error.to_string())))?;
        Ok(Self {
            tokens,
            letters,
            spelling: parts.spelling,
            splitter: match parts.spelling {
                Spelling::ByteLetters(rule) => Some(Splitter::new(rule)),
                Spelling::Spaces(_) => None,
            },
            bpe,
            added,
            user_defined,
            compose: parts.compose,
            bos_id: parts.bos_id,
            add_bos: parts.add_bos,
            eos_ids: parts.eos_ids,
            longest_token_bytes: longest.unwrap_or(0),
            fingerprint,
        })
    }

    /// The tokens of one text, without a beginning-of-text token. Any text has tokens; bytes that the vocabulary
    /// has no token for are left out, as the reference implementations do. Time is n log n in the length, which
    /// the caller bounds.
    pub fn encode(&self, text: &str, special: SpecialTokens) -> Vec<TokenId> {
        let mut encoding = Encoding::new(self);
        encoding.push(text, special);
        encoding.finish()
    }

    /// The tokens of several segments that follow each other, as a template renders them.
    pub fn encode_segments(&self, segments: &[Segment]) -> Vec<TokenId> {
        let mut encoding = Encoding::new(self);
        for segment in segments {
            encoding.push(&segment.text, segment.special);
        }
        encoding.finish()
    }

    /// The tokens of a raw prompt: control tokens are recognised, and it starts with the beginning-of-text token
    /// when the model wants one and the text does not spell it.
    pub fn encode_prompt(&self, text: &str) -> Vec<TokenId> {
        let mut tokens = self.encode(text, SpecialTokens::Recognise);
        if let Some(bos_id) = self.bos_id.filter(|_| self.add_bos)
            && tokens.first() != Some(&bos_id)
        {
            tokens.insert(0, bos_id);
        }
        tokens
    }

    /// The text of all tokens together. Control tokens have none; bytes that are no UTF-8 give U+FFFD.
    pub fn decode(&self, tokens: &[TokenId]) -> String {
        let with_text = tokens.iter().filter(|token| !self.is_special(**token));
        let bytes: Vec<u8> = with_text
            .flat_map(|token| self.token_bytes(*token))
            .copied()
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The exact bytes of a token, of a control token too (its spelling). Empty for ids that stand for nothing.
    pub fn token_bytes(&self, id: TokenId) -> &[u8] {
        self.token(id).map_or(&[], |token| &token.bytes)
    }

    /// [`Self::token_bytes`] for the eye; a part of a character shows as U+FFFD.
    pub fn token_text(&self, id: TokenId) -> Cow<'_, str> {
        String::from_utf8_lossy(self.token_bytes(id))
    }

    /// One more than the largest id that has a meaning. A model may have more rows, as padding.
    pub fn vocab_size(&self) -> usize {
        self.tokens.len()
    }

    /// Bytes of the token that spells most: a text of n bytes has about n by this many tokens, or more.
    pub fn longest_token_bytes(&self) -> usize {
        self.longest_token_bytes
    }

    /// Tokens that end an answer, ascending.
    pub fn eos_ids(&self) -> &[TokenId] {
        &self.eos_ids
    }

    /// The beginning-of-text token, whether or not prompts start with it.
    pub fn bos_id(&self) -> Option<TokenId> {
        self.bos_id
    }

    /// True when a raw prompt starts with the beginning-of-text token.
    pub fn adds_bos(&self) -> bool {
        self.add_bos
    }

    /// True for tokens that have no text in an answer: control tokens, and ids that stand for nothing.
    pub fn is_special(&self, id: TokenId) -> bool {
        let kind = self.token(id).map(|token| token.kind);
        !matches!(
            kind,
            Some(TokenKind::Normal | TokenKind::Byte | TokenKind::UserDefined)
        )
    }

    /// The spellings of all control tokens.
    pub(super) fn control_texts(&self) -> impl Iterator<Item = &str> {
        let control = self
            .tokens
            .iter()
            .filter(|token| token.kind == TokenKind::Control);
        control.filter_map(|token| std::str::from_utf8(&token.bytes).ok())
    }

    /// Identity of everything that turns text into tokens and tokens into text.
    pub(super) fn fingerprint(&self) -> [u8; 32] {
        self.fingerprint
    }

    fn token(&self, id: TokenId) -> Option<&Token> {
        self.tokens.get(usize::try_from(id).ok()?)
    }

    /// Text without added tokens; `is_first` says that none stands before it either.
    fn encode_plain(&self, text: &str, is_first: bool, tokens: &mut Vec<TokenId>) {
        let composed;
        let text = if self.compose && !text.is_ascii() {
            composed = compose(text);
            composed.as_str()
        } else {
            text
        };
        if let Spelling::Spaces(leading) = self.spelling {
            self.merge(&leading.spell(text, is_first), tokens);
        }
        let Some(splitter) = &self.splitter else {
            return;
        };
        let mut spelled = String::new();
        for word in splitter.words(text) {
            spelled.clear();
            self.letters.spell(word.as_bytes(), &mut spelled);
            self.merge(&spelled, tokens);
        }
    }

    fn merge(&self, spelled: &str, tokens: &mut Vec<TokenId>) {
        let merged = self.bpe.tokenize(spelled);
        let merged =
            merged.expect("BPE fails only on an unknown token that is not in the vocabulary");
        tokens.extend(merged.into_iter().map(|token| token.id));
    }
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vocabulary")
            .field("n_tokens", &self.tokens.len())
            .field("spelling", &self.spelling)
            .field("bos_id", &self.bos_id)
            .field("eos_ids", &self.eos_ids)
            .finish_non_exhaustive()
    }
}

/// A prompt that is being turned into tokens.
struct Encoding<'a> {
    vocabulary: &'a Vocabulary,
    tokens: Vec<TokenId>,
    /// Text since the last added token; its words are not cut yet, for the next segment may continue them.
    plain: String,
}

impl<'a> Encoding<'a> {
    fn new(vocabulary: &'a Vocabulary) -> Self {
        Self {
            vocabulary,
            tokens: Vec::new(),
            plain: String::new(),
        }
    }

    fn push(&mut self, text: &str, special: SpecialTokens) {
        let added = match special {
            SpecialTokens::Recognise => &self.vocabulary.added,
            SpecialTokens::AsText => &self.vocabulary.user_defined,
        };
        let mut n_done = 0;
        for (place, id) in added.find(text) {
            self.plain.push_str(&text[n_done..place.start]);
            self.flush();
            self.tokens.push(id);
            n_done = place.end;
        }
        self.plain.push_str(&text[n_done..]);
    }

    fn flush(&mut self) {
        let is_first = self.tokens.is_empty();
        self.vocabulary
            .encode_plain(&self.plain, is_first, &mut self.tokens);
        self.plain.clear();
    }

    fn finish(mut self) -> Vec<TokenId> {
        self.flush();
        self.tokens
    }
}

fn compose(text: &str) -> String {
    let mut normalised = NormalizedString::from(text);
    NFC.normalize(&mut normalised)
        .expect("canonical composition is defined for every text");
    normalised.get().to_owned()
}

fn read_token(letters: &ByteLetters, spelling: Spelling, token: &TokenParts) -> Token {
    let spelled = match (token.kind, spelling) {
        (TokenKind::Normal, Spelling::ByteLetters(_)) => letters.read(&token.text),
        (TokenKind::Normal | TokenKind::UserDefined, Spelling::Spaces(_)) => {
            Some(spaces::read(&token.text))
        }
        (TokenKind::Byte, _) => spaces::byte_of(&token.text).map(|byte| vec![byte]),
        (TokenKind::Unused, _) => Some(Vec::new()),
        (TokenKind::Control, _) | (TokenKind::UserDefined, Spelling::ByteLetters(_)) => None,
    };
    let bytes = spelled.unwrap_or_else(|| token.text.clone().into_bytes());
    Token {
        bytes: bytes.into_boxed_slice(),
        kind: token.kind,
    }
}

fn check_ids(parts: &VocabularyParts) -> Result<(), Refusal> {
    let n_tokens = parts.tokens.len();
    if n_tokens == 0 || n_tokens > N_TOKENS_MAX {
        return Err(Refusal::new(
            "tokens",
            format!("{n_tokens}, expected 1 to {N_TOKENS_MAX}"),
        ));
    }
    let check = |field: &str, id: TokenId| {
        if (id as usize) < n_tokens {
            return Ok(());
        }
        Err(Refusal::new(
            field,
            format!("{id}, but there are {n_tokens} tokens"),
        ))
    };
    parts
        .bos_id
        .map_or(Ok(()), |id| check("bos_token_id", id))?;
    if parts.add_bos && parts.bos_id.is_none() {
        return Err(Refusal::new(
            "add_bos_token",
            "true, but there is no bos_token_id",
        ));
    }
    parts
        .eos_ids
        .iter()
        .try_for_each(|id| check("eos_token_id", *id))
}

fn fingerprint(parts: &VocabularyParts) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    let mut feed = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    feed(b"tidemill text 1");
    feed(parts.spelling.name().as_bytes());
    feed(&[parts.whole_words_first, parts.compose, parts.add_bos].map(u8::from));
    for id in parts.bos_id.iter().chain(&parts.eos_ids) {
        feed(&id.to_le_bytes());
    }
    feed(&(parts.tokens.len() as u64).to_le_bytes());
    for token in &parts.tokens {
        feed(&[token.kind as u8]);
        feed(token.text.as_bytes());
    }
    for (left, right) in &parts.merges {
        feed(left.as_bytes());
        feed(right.as_bytes());
    }
    hasher.finalize().into()
}

#[cfg(test)]
pub(super) mod tests;
