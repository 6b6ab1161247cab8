//! The letters of byte-level BPE: one printable character for each of the 256 bytes.
//!
//! Vocabularies of the GPT-2 family write tokens in these letters, so that a token may hold any bytes and its
//! spelling is still text. Bytes that are printable in Latin-1 are written as themselves; the others, in order,
//! as the characters from U+0100 on.

/// Both directions of the table.
#[derive(Debug)]
pub(super) struct ByteLetters {
    letters: [char; 256],
}

/// One more than the largest letter: 68 bytes are not printable.
const LETTERS_END: u32 = 0x100 + 68;

impl ByteLetters {
    pub(super) fn new() -> Self {
        let mut next = 0x100_u32;
        let letters = std::array::from_fn(|byte| {
            let byte = byte as u8;
            if is_printable(byte) {
                return char::from(byte);
            }
            let letter = char::from_u32(next).expect("U+0100 to U+0143 are characters");
            next += 1;
            letter
        });
        debug_assert_eq!(next, LETTERS_END);
        Self { letters }
    }

    /// Appends the letters of `bytes` to `spelled`.
    pub(super) fn spell(&self, bytes: &[u8], spelled: &mut String) {
        spelled.extend(bytes.iter().map(|byte| self.letters[usize::from(*byte)]));
    }

    /// The bytes that `spelled` stands for; `None` when one of its characters is no letter.
    pub(super) fn read(&self, spelled: &str) -> Option<Vec<u8>> {
        spelled.chars().map(|letter| self.byte(letter)).collect()
    }

    fn byte(&self, letter: char) -> Option<u8> {
        let code = u32::from(letter);
        if let Ok(byte) = u8::try_from(code) {
            return is_printable(byte).then_some(byte);
        }
        if code >= LETTERS_END {
            return None;
        }
        // At most 256 steps, at loading only.
        let position = self.letters.iter().position(|other| *other == letter)?;
        u8::try_from(position).ok()
    }
}

fn is_printable(byte: u8) -> bool {
    matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_letter_and_comes_back() {
        let letters = ByteLetters::new();
        let bytes: Vec<u8> = (0..=255).collect();
        let mut spelled = String::new();
        letters.spell(&bytes, &mut spelled);
        assert_eq!(letters.read(&spelled), Some(bytes));
    }

    #[test]
    fn the_known_letters() {
        let letters = ByteLetters::new();
        let mut spelled = String::new();
        letters.spell(b" \n\ta\x7f\xad", &mut spelled);
        assert_eq!(spelled, "ĠĊĉaġŃ");
        assert_eq!(letters.read("a b"), None, "a space is no letter");
        assert_eq!(letters.read("東"), None);
    }
}
