//! Stop strings over a stream of text.
//!
//! Text that may still become a stop string is held back, so that nothing of one is ever sent; what did not
//! become one is given out as soon as that is sure, and at the end. The text is read byte by byte with one
//! Knuth-Morris-Pratt automaton for each string, so the result does not depend on where tokens cut the text:
//! the string whose *end* comes first stops the output, the longest one when several end at once.

/// What a piece of text has led to.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Matched {
    /// Text that is now sure to be output.
    pub text: String,
    /// True when a stop string has ended the output; everything after is ignored.
    pub stopped: bool,
}

/// Looks for a request's stop strings in its output.
pub struct StopMatcher {
    automata: Vec<Automaton>,
    held: String,
    stopped: bool,
}

impl StopMatcher {
    /// A matcher of `stops`; empty strings among them are left out, since they would stop everything.
    pub fn new(stops: &[String]) -> Self {
        let stops = stops.iter().filter(|stop| !stop.is_empty());
        Self {
            automata: stops.map(|stop| Automaton::new(stop.as_bytes())).collect(),
            held: String::new(),
            stopped: false,
        }
    }

    /// Takes the next piece of text.
    pub fn push(&mut self, piece: &str) -> Matched {
        if self.stopped {
            return Matched::default();
        }
        let n_before = self.held.len();
        self.held.push_str(piece);
        for (i, &byte) in piece.as_bytes().iter().enumerate() {
            let matched = self.automata.iter_mut().filter_map(|a| a.step(byte)).max();
            if let Some(n_matched) = matched {
                self.stopped = true;
                let mut text = std::mem::take(&mut self.held);
                text.truncate(n_before + i + 1 - n_matched);
                return Matched {
                    text,
                    stopped: true,
                };
            }
        }
        let n_held = self.automata.iter().map(|a| a.state).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - n_held);
        Matched {
            text: std::mem::replace(&mut self.held, rest),
            stopped: false,
        }
    }

    /// The end of the output: what was held back and did not become a stop string.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

struct Automaton {
    stop: Vec<u8>,
    /// `border[i]`: length of the longest proper prefix of `stop[..=i]` that is also its suffix.
    border: Vec<usize>,
    /// Length of the longest prefix of `stop` that the text read so far ends with.
    state: usize,
}

impl Automaton {
    fn new(stop: &[u8]) -> Self {
        let mut border = vec![0; stop.len()];
        let mut length = 0;
        for i in 1..stop.len() {
            while length > 0 && stop[i] != stop[length] {
                length = border[length - 1];
            }
            length += usize::from(stop[i] == stop[length]);
            border[i] = length;
        }
        Self {
            stop: stop.to_vec(),
            border,
            state: 0,
        }
    }

    /// Reads one byte; the length of the stop string when it is now whole.
    fn step(&mut self, byte: u8) -> Option<usize> {
        while self.state > 0 && self.stop[self.state] != byte {
            self.state = self.border[self.state - 1];
        }
        self.state += usize::from(self.stop[self.state] == byte);
        (self.state == self.stop.len()).then_some(self.state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stops(stops: &[&str]) -> Vec<String> {
        stops.iter().map(|&stop| stop.to_owned()).collect()
    }

    fn run(list: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let mut matcher = StopMatcher::new(&stops(list));
        let mut out = Vec::new();
        for piece in pieces {
            let matched = matcher.push(piece);
            out.push(matched.text);
            if matched.stopped {
                return (out, true);
            }
        }
        out.push(matcher.finish());
        (out, false)
    }

    #[test]
    fn b011_nothing_of_a_stop_string_over_several_tokens_is_sent() {
        let (out, stopped) = run(&["DEFGHIJ"], &["AB", "CD", "EF", "GH", "IJ", "KL"]);
        assert!(stopped);
        assert_eq!(out, ["AB", "C", "", "", ""]);
    }

    #[test]
    fn b012_held_text_that_became_no_stop_string_is_given_out() {
        let (out, stopped) = run(&["\n\nUser"], &["hi\n", "\nUs"]);
        assert!(!stopped);
        assert_eq!(out.concat(), "hi\n\nUs");
        let (out, _) = run(&["abc"], &["ab", "d"]);
        assert_eq!(out, ["", "abd", ""]);
    }

    #[test]
    fn a_stop_string_that_repeats_itself_is_found() {
        let (out, stopped) = run(&["aab"], &["a", "a", "a", "b"]);
        assert!(stopped);
        assert_eq!(out.concat(), "a");
    }

    #[test]
    fn the_first_end_wins_and_the_longest_of_equals() {
        assert_eq!(run(&["abcd", "bc"], &["xabcd"]).0.concat(), "xa");
        assert_eq!(run(&["bc", "abc"], &["xabcd"]).0.concat(), "x");
    }

    #[test]
    fn characters_are_never_cut() {
        // Both begin with the same byte.
        let (out, stopped) = run(&["é!"], &["è", "é", "?"]);
        assert!(!stopped);
        assert_eq!(out.concat(), "èé?");
    }

    #[test]
    fn after_the_stop_nothing_comes() {
        let mut matcher = StopMatcher::new(&stops(&["x"]));
        assert!(matcher.push("ax b").stopped);
        assert_eq!(matcher.push("more"), Matched::default());
        assert_eq!(matcher.finish(), "");
    }

    /// The plain definition: the shortest prefix of the text that ends with a stop string.
    fn expected(list: &[String], text: &str) -> (String, bool) {
        for end in (0..=text.len()).filter(|&end| text.is_char_boundary(end)) {
            let ending = list
                .iter()
                .filter(|stop| text[..end].ends_with(stop.as_str()));
            if let Some(longest) = ending.map(String::len).max() {
                return (text[..end - longest].to_owned(), true);
            }
        }
        (text.to_owned(), false)
    }

    proptest! {
        #[test]
        fn the_cuts_between_pieces_change_nothing(
            list in proptest::collection::vec("[ab\u{e9}]{1,4}", 0..4),
            pieces in proptest::collection::vec("[abc\u{e9}\u{e8}]{0,5}", 0..12),
        ) {
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let list: Vec<&str> = list.iter().map(String::as_str).collect();
            let (out, stopped) = run(&list, &pieces);
            prop_assert_eq!((out.concat(), stopped), expected(&stops(&list), &pieces.concat()));
        }
    }
}
