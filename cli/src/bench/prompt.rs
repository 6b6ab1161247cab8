//! Prompts of a wanted length in tokens, without the server's tokeniser: common words, whose tokens per word
//! are measured once at the server itself.

use crate::openai::{Client, Piece};
use anyhow::{Context, Result};
use futures::StreamExt;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde::Serialize;

/// Short words that most vocabularies hold whole.
const WORDS: [&str; 32] = [
    "the", "river", "runs", "past", "old", "mill", "and", "turns", "its", "wheel", "while",
    "water", "falls", "slowly", "from", "stone", "to", "field", "where", "people", "work", "long",
    "days", "under", "open", "sky", "with", "bread", "made", "of", "good", "grain",
];
/// Words of the measuring prompt; a short context holds them too, whatever the vocabulary.
const MEASURE_WORDS: usize = 64;

/// Makes prompts.
pub(super) struct PromptMaker {
    words_per_token: f64,
}

/// Part of a prompt; equal ones have equal words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Segment {
    pub(super) seed: u64,
    pub(super) n_tokens: u32,
}

#[derive(Serialize)]
struct MeasureBody<'a> {
    model: &'a str,
    prompt: &'a str,
    max_tokens: u32,
    stream: bool,
    stream_options: StreamOptions,
}

/// Asks for the usage chunk.
#[derive(Serialize)]
pub(super) struct StreamOptions {
    pub(super) include_usage: bool,
}

impl PromptMaker {
    /// Sends one prompt and reads from its usage how many tokens a word takes.
    ///
    /// # Errors
    /// When the server does not answer or reports no usage.
    pub(super) async fn calibrate(client: &Client, model: &str, seed: u64) -> Result<Self> {
        let text = words(&mut SmallRng::seed_from_u64(seed ^ 0xCA11), MEASURE_WORDS);
        let body = MeasureBody {
            model,
            prompt: &text,
            max_tokens: 1,
            stream: true,
            stream_options: StreamOptions {
                include_usage: true,
            },
        };
        let mut pieces = Box::pin(client.stream("completions", &body).await?);
        let mut n_tokens = None;
        while let Some(piece) = pieces.next().await {
            if let Piece::Usage(usage) = piece? {
                n_tokens = Some(usage.prompt_tokens);
            }
        }
        let n_tokens = n_tokens
            .filter(|&n| n > 0)
            .context("the server reports no usage with stream_options.include_usage")?;
        Ok(Self {
            words_per_token: MEASURE_WORDS as f64 / n_tokens as f64,
        })
    }

    /// The words of all segments.
    pub(super) fn make(&self, segments: &[Segment]) -> String {
        let texts = segments.iter().map(|segment| {
            let n_words = (f64::from(segment.n_tokens) * self.words_per_token).round() as usize;
            words(&mut SmallRng::seed_from_u64(segment.seed), n_words.max(1))
        });
        texts.collect::<Vec<_>>().join(" ")
    }
}

fn words(rng: &mut SmallRng, n: usize) -> String {
    let words: Vec<&str> = (0..n)
        .map(|_| WORDS[rng.random_range(0..WORDS.len())])
        .collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_segments_have_equal_words_of_the_asked_length() {
        let maker = PromptMaker {
            words_per_token: 1.0,
        };
        let segment = |seed, n_tokens| Segment { seed, n_tokens };
        let a = maker.make(&[segment(1, 20), segment(2, 30)]);
        let b = maker.make(&[segment(1, 20), segment(3, 30)]);
        let first = |text: &str| text.split(' ').take(20).collect::<Vec<_>>().join(" ");
        assert_eq!(first(&a), first(&b));
        assert_ne!(a, b);
        assert_eq!(a.split(' ').count(), 50);
    }
}
