//! Cuts text into the words within which BPE merges, by the rule that the vocabulary was trained with.
//!
//! The rules are published as regular expressions with look-ahead. Engines for those back-track: on a long run of
//! spaces they take quadratic time or give up in the middle, which yields other tokens without an error. Each
//! rule is therefore written out as a scanner that looks at every character a bounded number of times, and a test
//! compares it with its expression. An expression that is not known here is refused at loading.

use regex_syntax::hir::{Class, HirKind};

use crate::error::{Refusal, quoted};

/// A way to cut text into words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SplitRule {
    /// GPT-2.
    Gpt2,
    /// GPT-2 after each digit has been set apart.
    SmolLm,
    /// Llama 3: letters take one leading mark along, digits in threes.
    Llama3,
    /// Like Llama 3, each digit alone.
    Qwen2,
    /// What llama.cpp does for a model that names no other rule: punctuation apart, then GPT-2, digits apart and in threes.
    Default,
}

const ALL: [SplitRule; 5] = [
    SplitRule::Gpt2,
    SplitRule::SmolLm,
    SplitRule::Llama3,
    SplitRule::Qwen2,
    SplitRule::Default,
];

/// Other names of the same rules in GGUF files.
const OTHER_NAMES: [(&str, SplitRule); 3] = [
    ("llama3", SplitRule::Llama3),
    ("llama-v3", SplitRule::Llama3),
    ("deepseek-r1-qwen", SplitRule::Qwen2),
];

pub(super) const GPT2_PATTERN: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
pub(super) const LLAMA3_PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
pub(super) const QWEN2_PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

impl SplitRule {
    /// The rule that a GGUF file names in `tokenizer.ggml.pre`.
    pub(super) fn from_gguf(pre: &str) -> Result<Self, Refusal> {
        let named = ALL.map(|rule| (rule.name(), rule)).into_iter();
        named
            .chain(OTHER_NAMES)
            .find(|(name, _)| *name == pre)
            .map(|(_, rule)| rule)
            .ok_or_else(|| {
                Refusal::new(
                    "tokenizer.ggml.pre",
                    format!(
                        "{}, supported: {}",
                        quoted(pre),
                        ALL.map(Self::name).join(", ")
                    ),
                )
            })
    }

    /// The rule whose published expression this is.
    pub(super) fn from_pattern(pattern: &str) -> Option<Self> {
        match pattern {
            GPT2_PATTERN => Some(Self::Gpt2),
            LLAMA3_PATTERN => Some(Self::Llama3),
            QWEN2_PATTERN => Some(Self::Qwen2),
            _ => None,
        }
    }

    /// Its name in GGUF files.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Gpt2 => "gpt-2",
            Self::SmolLm => "smollm",
            Self::Llama3 => "llama-bpe",
            Self::Qwen2 => "qwen2",
            Self::Default => "default",
        }
    }
}

/// The scanner of one rule.
#[derive(Debug)]
pub(super) struct Splitter {
    rule: SplitRule,
    letters: Category,
    numbers: Category,
    punctuation: Category,
}

/// The characters of a general category, as sorted inclusive ranges.
#[derive(Debug)]
struct Category(Vec<(char, char)>);

impl Category {
    /// `class` is a Unicode class in the notation of regular expressions.
    fn new(class: &str) -> Self {
        let hir = regex_syntax::parse(class).expect("the class is well-formed");
        let HirKind::Class(Class::Unicode(class)) = hir.kind() else {
            unreachable!("a general category is a class of Unicode characters")
        };
        Self(
            class
                .iter()
                .map(|range| (range.start(), range.end()))
                .collect(),
        )
    }

    fn contains(&self, c: char) -> bool {
        let n_before = self.0.partition_point(|(start, _)| *start <= c);
        n_before > 0 && c <= self.0[n_before - 1].1
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Letter,
    Number,
    Space,
    Mark,
}

impl Splitter {
    pub(super) fn new(rule: SplitRule) -> Self {
        Self {
            rule,
            letters: Category::new(r"\p{L}"),
            numbers: Category::new(r"\p{N}"),
            punctuation: Category::new(r"\p{P}"),
        }
    }

    /// The words of `text`, in order; together they are `text`.
    pub(super) fn words<'s, 't>(&'s self, text: &'t str) -> Words<'s, 't> {
        Words {
            splitter: self,
            passage: "",
            rest: text,
        }
    }

    fn kind(&self, c: char) -> Kind {
        if c.is_ascii_alphabetic() {
            Kind::Letter
        } else if c.is_ascii_digit() {
            Kind::Number
        } else if c == ' ' {
            Kind::Space
        } else if self.letters.contains(c) {
            Kind::Letter
        } else if self.numbers.contains(c) {
            Kind::Number
        } else if c.is_whitespace() {
            Kind::Space
        } else {
            Kind::Mark
        }
    }

    /// Bytes of the first passage of `text`. A passage is cut as if it were the whole text.
    fn first_passage(&self, text: &str) -> usize {
        match self.rule {
            SplitRule::SmolLm => {
                let is_number = |c| self.kind(c) == Kind::Number;
                match text.chars().next() {
                    Some(digit) if is_number(digit) => digit.len_utf8(),
                    _ => text.find(is_number).unwrap_or(text.len()),
                }
            }
            SplitRule::Default => {
                let stands_apart = |c| self.stands_apart(c);
                let begins_apart = text.starts_with(stands_apart);
                text.find(|c| stands_apart(c) != begins_apart)
                    .unwrap_or(text.len())
            }
            _ => text.len(),
        }
    }

    /// Punctuation of the default rule.
    fn stands_apart(&self, c: char) -> bool {
        "$+<=>^~|".contains(c) || (self.kind(c) == Kind::Mark && self.punctuation.contains(c))
    }

    /// Bytes of the first word of `text`, which is not empty.
    fn first_word(&self, text: &str) -> usize {
        match self.rule {
            SplitRule::Gpt2 | SplitRule::SmolLm => self.first_gpt2(text),
            SplitRule::Llama3 => self.first_llama3(text, 3),
            SplitRule::Qwen2 => self.first_llama3(text, 1),
            SplitRule::Default => self.first_default(text),
        }
    }

    /// A word of GPT-2, cut again: numbers go without their space, and three ASCII digits stand alone.
    fn first_default(&self, text: &str) -> usize {
        if text.starts_with(|c| self.stands_apart(c)) {
            return text.len();
        }
        if text.starts_with(|c| self.kind(c) == Kind::Number) {
            return self.first_of_numbers(text);
        }
        let n_word = self.first_gpt2(text);
        let word = &text[..n_word];
        word.find(|c| self.kind(c) == Kind::Number)
            .unwrap_or(n_word)
    }

    fn first_gpt2(&self, text: &str) -> usize {
        if let Some(n_bytes) = contraction(text, false) {
            return n_bytes;
        }
        let n_space = usize::from(text.starts_with(' '));
        let after = &text[n_space..];
        match after.chars().next().map(|c| self.kind(c)) {
            None | Some(Kind::Space) => self.first_spaces(text),
            Some(kind) => n_space + self.run(after, kind),
        }
    }

    fn first_llama3(&self, text: &str, n_digits_max: usize) -> usize {
        if let Some(n_bytes) = contraction(text, true) {
            return n_bytes;
        }
        let mut chars = text.chars();
        let first = chars.next().expect("the text is not empty");
        let second = chars.next().map(|c| self.kind(c));
        let n_first = first.len_utf8();
        match self.kind(first) {
            Kind::Letter => self.run(text, Kind::Letter),
            Kind::Number => text
                .chars()
                .take(n_digits_max)
                .take_while(|c| self.kind(*c) == Kind::Number)
                .map(char::len_utf8)
                .sum(),
            _ if second == Some(Kind::Letter) && !is_line_end(first) => {
                n_first + self.run(&text[n_first..], Kind::Letter)
            }
            Kind::Mark => self.marks_and_line_ends(text),
            Kind::Space if first == ' ' && second == Some(Kind::Mark) => {
                1 + self.marks_and_line_ends(&text[1..])
            }
            Kind::Space => {
                let run = &text[..self.run(text, Kind::Space)];
                match run.rfind(is_line_end) {
                    Some(last) => last + 1,
                    None => self.first_spaces(text),
                }
            }
        }
    }

    /// The first piece of a run of numbers, in which each three ASCII digits in a row, from the left, stand alone. Looks no
    /// further than that piece and three digits.
    fn first_of_numbers(&self, text: &str) -> usize {
        let mut n_digits = 0;
        let numbers = text.char_indices();
        let mut n_bytes = 0;
        for (at, c) in numbers.take_while(|(_, c)| self.kind(*c) == Kind::Number) {
            n_digits = if c.is_ascii_digit() { n_digits + 1 } else { 0 };
            n_bytes = at + c.len_utf8();
            if n_digits == 3 {
                let n_before = n_bytes - 3;
                return if n_before == 0 { 3 } else { n_before };
            }
        }
        n_bytes
    }

    fn marks_and_line_ends(&self, text: &str) -> usize {
        let n_marks = self.run(text, Kind::Mark);
        let line_ends = &text[n_marks..];
        n_marks
            + line_ends
                .find(|c| !is_line_end(c))
                .unwrap_or(line_ends.len())
    }

    /// A run of white space, less its last character when a word follows that may take it along.
    fn first_spaces(&self, text: &str) -> usize {
        let n_run = self.run(text, Kind::Space);
        let n_last = text[..n_run].chars().next_back().map_or(0, char::len_utf8);
        if n_run == text.len() || n_run == n_last {
            n_run
        } else {
            n_run - n_last
        }
    }

    /// Bytes of the characters of this kind at the start of `text`.
    fn run(&self, text: &str, kind: Kind) -> usize {
        text.find(|c| self.kind(c) != kind).unwrap_or(text.len())
    }
}

/// Iterator over words.
pub(super) struct Words<'s, 't> {
    splitter: &'s Splitter,
    passage: &'t str,
    rest: &'t str,
}

impl<'t> Iterator for Words<'_, 't> {
    type Item = &'t str;

    fn next(&mut self) -> Option<&'t str> {
        if self.passage.is_empty() {
            (self.passage, self.rest) = self.rest.split_at(self.splitter.first_passage(self.rest));
        }
        if self.passage.is_empty() {
            return None;
        }
        let (word, passage) = self
            .passage
            .split_at(self.splitter.first_word(self.passage));
        self.passage = passage;
        Some(word)
    }
}

fn is_line_end(c: char) -> bool {
    c == '\r' || c == '\n'
}

/// Bytes of an English contraction at the start of `text`: 's 't 're 've 'm 'll 'd.
fn contraction(text: &str, any_case: bool) -> Option<usize> {
    let after = text.strip_prefix('\'')?;
    let mut letters = after.chars().map(|c| if any_case { folded(c) } else { c });
    let first = letters.next()?;
    let n_first = after.chars().next().map_or(0, char::len_utf8);
    match (first, letters.next()) {
        ('s' | 't' | 'm' | 'd', _) => Some(1 + n_first),
        ('r' | 'v', Some('e')) | ('l', Some('l')) => Some(3),
        _ => None,
    }
}

/// Simple case folding as regular expressions do it: the long s is an s.
fn folded(c: char) -> char {
    if c == 'ſ' {
        's'
    } else {
        c.to_ascii_lowercase()
    }
}

#[cfg(test)]
mod tests;
