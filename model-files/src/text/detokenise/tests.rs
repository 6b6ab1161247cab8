use proptest::prelude::*;

use super::*;
use crate::text::vocabulary::tests::{CONTROL, byte_vocabulary};

fn pieces(vocabulary: &Arc<Vocabulary>, tokens: &[TokenId]) -> Vec<String> {
    let mut detokeniser = Detokeniser::new(Arc::clone(vocabulary));
    let mut pieces: Vec<String> = tokens
        .iter()
        .map(|token| detokeniser.push(*token))
        .collect();
    pieces.push(detokeniser.finish());
    pieces
}

/// In the vocabulary of the tests, a byte's token is the byte.
fn byte_tokens(bytes: &[u8]) -> Vec<TokenId> {
    bytes.iter().map(|byte| TokenId::from(*byte)).collect()
}

#[test]
fn a_character_over_several_tokens_leaves_whole() {
    let vocabulary = Arc::new(byte_vocabulary());
    assert_eq!(
        pieces(&vocabulary, &byte_tokens("é🙂".as_bytes())),
        ["", "é", "", "", "", "🙂", ""]
    );
}

#[test]
fn invalid_bytes_drain_at_once_and_a_truncated_tail_at_the_end() {
    let vocabulary = Arc::new(byte_vocabulary());
    let lone = pieces(&vocabulary, &byte_tokens(&[0x80, 0x80, 0x80]));
    assert_eq!(lone, ["\u{fffd}", "\u{fffd}", "\u{fffd}", ""]);
    let truncated = pieces(&vocabulary, &byte_tokens(b"\xf0\x9f\x99"));
    assert_eq!(truncated, ["", "", "", "\u{fffd}"]);
    let before_a_space = pieces(&vocabulary, &byte_tokens(b"\xf0\x9f a"));
    assert_eq!(before_a_space, ["", "", "\u{fffd} ", "a", ""]);
}

#[test]
fn control_tokens_and_unknown_ids_have_no_text_and_cut_no_character() {
    let vocabulary = Arc::new(byte_vocabulary());
    let tokens = [0xc3, CONTROL, 9_999_999, 0xa9];
    assert_eq!(pieces(&vocabulary, &tokens), ["", "", "", "é", ""]);
}

proptest! {
    #[test]
    fn the_pieces_are_what_decoding_all_at_once_gives(
        tokens in proptest::collection::vec(
            prop_oneof![0_u32..256, 0x80_u32..0xc0, 0xe0_u32..0xf5, 256_u32..300],
            0..48,
        )
    ) {
        let vocabulary = Arc::new(byte_vocabulary());
        prop_assert_eq!(pieces(&vocabulary, &tokens).concat(), vocabulary.decode(&tokens));
        let mut detokeniser = Detokeniser::new(vocabulary);
        for token in tokens {
            detokeniser.push(token);
            prop_assert!(detokeniser.unfinished.len() <= 3);
        }
    }
}
