//! Output as a whole: any tokens, any stop strings, cut anywhere.

use super::output::{OutputText, Piece, ScoredToken};
use super::prompt::{Message, Prompt, PromptError, Role, TEXT_BYTES_MAX, spell};
use proptest::prelude::*;
use std::sync::{Arc, OnceLock};
use tidemill_core::{SampledToken, TokenId};
use tidemill_model_files::testing::{N_TOKENS, TinySpec, write_gguf};
use tidemill_model_files::text::{ModelText, open_text};

fn model() -> &'static ModelText {
    static MODEL: OnceLock<ModelText> = OnceLock::new();
    MODEL.get_or_init(|| {
        let name = format!("tidemill-text-{}.gguf", std::process::id());
        let path = std::env::temp_dir().join(name);
        write_gguf(&path, &TinySpec::default()).expect("the temporary folder takes files");
        let model = open_text(&path).expect("a tiny model opens");
        std::fs::remove_file(&path).expect("it was just written");
        model
    })
}

fn byte_token(byte: u8) -> TokenId {
    3 + TokenId::from(byte)
}

fn sampled(token: TokenId, output_idx: usize) -> SampledToken {
    SampledToken {
        token,
        output_idx: output_idx as u32,
        logprob: Some(-1.0),
        top: Vec::new(),
        logits_digest: None,
    }
}

/// Text, scored tokens and whether a stop string was met.
fn run(tokens: &[TokenId], stops: &[String]) -> (String, Vec<ScoredToken>, bool) {
    let mut output = OutputText::new(Arc::clone(&model().vocabulary), stops, true, 0);
    let mut all = Piece::default();
    for (i, &token) in tokens.iter().enumerate() {
        let mut piece = output.push(&sampled(token, i));
        all.text.push_str(&piece.text);
        all.tokens.append(&mut piece.tokens);
        if piece.stopped {
            return (all.text, all.tokens, true);
        }
    }
    let piece = output.finish();
    all.text.push_str(&piece.text);
    all.tokens.extend(piece.tokens);
    (all.text, all.tokens, piece.stopped)
}

#[test]
fn b016_bytes_that_never_become_characters_drain() {
    let mut output = OutputText::new(Arc::clone(&model().vocabulary), &[], false, 0);
    let mut n_given = 0;
    for i in 0..1000 {
        n_given += output
            .push(&sampled(byte_token(0x80), i))
            .text
            .chars()
            .count();
        assert!(i + 1 - n_given < 4);
    }
}

#[test]
fn tokens_wait_for_their_text_and_those_of_a_stop_string_never_come() {
    let tokens: Vec<TokenId> = "ab\u{e9}STOP".bytes().map(byte_token).collect();
    let (text, scored, stopped) = run(&tokens, &["STOP".to_owned()]);
    assert_eq!((text.as_str(), stopped), ("ab\u{e9}", true));
    let offsets: Vec<usize> = scored.iter().map(|token| token.offset_chars).collect();
    assert_eq!(offsets, [0, 1, 2, 2]);
}

#[test]
fn a_stop_string_may_be_completed_by_the_very_end() {
    // The unfinished character becomes U+FFFD only at the end.
    let tokens = [byte_token(b'a'), byte_token(0xf0)];
    let (text, scored, stopped) = run(&tokens, &["\u{fffd}".to_owned()]);
    assert_eq!((text.as_str(), scored.len(), stopped), ("a", 1, true));
}

#[test]
fn prompts_without_tokens_or_with_too_many_bytes_are_refused() {
    let empty = Prompt::Text(String::new()).encode(model());
    assert_eq!(empty, Err(PromptError::Empty));
    assert_eq!(
        Prompt::Tokens(vec![]).encode(model()),
        Err(PromptError::Empty)
    );
    let n_bytes = TEXT_BYTES_MAX + 1;
    let long = Prompt::Text("x".repeat(n_bytes)).encode(model());
    assert_eq!(long, Err(PromptError::TooLong { n_bytes }));
}

#[test]
fn a_chat_is_the_templates_text_with_the_contents_in_it() {
    let message = Message {
        role: Role::User,
        content: "hi".to_owned(),
    };
    let tokens = Prompt::Chat(vec![message])
        .encode(model())
        .expect("rendered");
    let (text, offsets) = spell(&model().vocabulary, &tokens, false);
    assert_eq!(
        text,
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    );
    assert_eq!(offsets.len(), tokens.len());
    assert_eq!(offsets[1], "<|im_start|>".len());
}

proptest! {
    #[test]
    fn b015_the_pieces_are_the_whole(
        tokens in proptest::collection::vec(0..N_TOKENS as TokenId, 0..40),
        stops in proptest::collection::vec("[a-c \u{e9}]{1,3}", 0..3),
    ) {
        let (text, scored, stopped) = run(&tokens, &stops);
        let whole = model().vocabulary.decode(&tokens);
        prop_assert!(whole.starts_with(&text));
        prop_assert_eq!(stopped, stops.iter().any(|stop| whole.contains(stop.as_str())));
        if !stopped {
            prop_assert_eq!(&text, &whole);
            prop_assert_eq!(scored.len(), tokens.len());
        }
        prop_assert!(!stops.iter().any(|stop| text.contains(stop.as_str())));
        for pair in scored.windows(2) {
            prop_assert!(pair[0].offset_chars <= pair[1].offset_chars);
        }
    }

    #[test]
    fn a_prompt_is_spelled_as_it_was_written(text in "\\PC{1,60}") {
        let tokens = model().vocabulary.encode_prompt(&text);
        prop_assert_eq!(spell(&model().vocabulary, &tokens, false).0, text);
    }
}
