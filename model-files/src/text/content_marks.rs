//! Keeps what a client wrote apart from what a template wrote, through the rendering.
//!
//! Content must not become control tokens, yet a template may trim, split and compare it, so it cannot be hidden
//! behind a placeholder. Instead, in content, each character that a control token begins or ends with gets a
//! stand-in: a private-use character that occurs nowhere in the request or the template. Whatever the template then
//! does, a control token in the result is the template's own. Tags that the template itself mentions, such as
//! `</think>`, keep their characters in content, so that looking for them works; they are no control tokens.

use std::collections::HashSet;
use std::ops::RangeInclusive;

use super::vocabulary::{Segment, SpecialTokens};

/// Stand-ins are taken from the two private-use planes.
const PRIVATE_USE: [RangeInclusive<char>; 2] =
    ['\u{f0000}'..='\u{ffffd}', '\u{100000}'..='\u{10fffd}'];

/// What has to be marked, for one template and vocabulary.
#[derive(Debug)]
pub(super) struct MarkRules {
    first: HashSet<char>,
    /// First and last characters of control tokens, sorted.
    edges: Vec<char>,
    tags: Vec<String>,
    in_template: HashSet<char>,
}

impl MarkRules {
    pub(super) fn new(control_texts: &[String], template: &str) -> Self {
        let edge = |text: &str, edge: fn(&str) -> Option<char>| {
            // White space stays itself, or trimming would no longer work.
            edge(text.trim()).or_else(|| edge(text))
        };
        let firsts = control_texts
            .iter()
            .filter_map(|text| edge(text, |text| text.chars().next()));
        let lasts = control_texts
            .iter()
            .filter_map(|text| edge(text, |text| text.chars().next_back()));
        let first: HashSet<char> = firsts.collect();
        let last: HashSet<char> = lasts.collect();
        let mut edges: Vec<char> = first.union(&last).copied().collect();
        edges.sort_unstable();
        let mut tags = find_tags(template, &first, &last);
        tags.retain(|tag| {
            !control_texts
                .iter()
                .any(|text| text.contains(tag) || tag.contains(text))
        });
        Self {
            first,
            edges,
            tags,
            in_template: template.chars().filter(is_private).collect(),
        }
    }

    /// Chooses the stand-ins for one rendering; `None` when `texts` leave no private-use character free.
    pub(super) fn choose<'a>(&self, texts: impl Iterator<Item = &'a str>) -> Option<Marks<'_>> {
        let mut taken = self.in_template.clone();
        taken.extend(texts.flat_map(str::chars).filter(is_private));
        let mut free = PRIVATE_USE
            .into_iter()
            .flatten()
            .filter(|c| !taken.contains(c));
        let stand_ins = self.edges.iter().map(|edge| Some((*edge, free.next()?)));
        Some(Marks {
            rules: self,
            stand_ins: stand_ins.collect::<Option<_>>()?,
        })
    }
}

/// The stand-ins of one rendering.
pub(super) struct Marks<'a> {
    rules: &'a MarkRules,
    /// Character and stand-in, sorted by both.
    stand_ins: Vec<(char, char)>,
}

impl Marks<'_> {
    /// `content` with stand-ins.
    pub(super) fn mark(&self, content: &str) -> String {
        let mut marked = String::with_capacity(content.len());
        let mut rest = content;
        while let Some(c) = rest.chars().next() {
            let n_taken = match self.stand_in(c) {
                None => {
                    marked.push(c);
                    c.len_utf8()
                }
                Some(stand_in) => match self
                    .rules
                    .tags
                    .iter()
                    .find(|tag| rest.starts_with(tag.as_str()))
                {
                    Some(tag) => {
                        marked.push_str(tag);
                        tag.len()
                    }
                    None => {
                        marked.push(stand_in);
                        c.len_utf8()
                    }
                },
            };
            rest = &rest[n_taken..];
        }
        marked
    }

    /// Cuts what was rendered into segments and puts the marked characters back. A stretch in which no control
    /// token can begin counts as text as well, so that content makes few segments.
    pub(super) fn segments(&self, rendered: &str) -> Vec<Segment> {
        let mut segments = Vec::new();
        let mut rest = rendered;
        while let Some(c) = rest.chars().next() {
            if let Some(original) = self.original(c) {
                append(
                    &mut segments,
                    original.encode_utf8(&mut [0; 4]),
                    SpecialTokens::AsText,
                );
                rest = &rest[c.len_utf8()..];
                continue;
            }
            let n_bytes = rest
                .find(|c| self.original(c).is_some())
                .unwrap_or(rest.len());
            let (stretch, after) = rest.split_at(n_bytes);
            let special = if stretch.contains(|c| self.rules.first.contains(&c)) {
                SpecialTokens::Recognise
            } else {
                SpecialTokens::AsText
            };
            append(&mut segments, stretch, special);
            rest = after;
        }
        segments
    }

    fn stand_in(&self, c: char) -> Option<char> {
        let found = self
            .stand_ins
            .binary_search_by_key(&c, |(edge, _)| *edge)
            .ok()?;
        Some(self.stand_ins[found].1)
    }

    fn original(&self, c: char) -> Option<char> {
        if !is_private(&c) {
            return None;
        }
        let found = self
            .stand_ins
            .binary_search_by_key(&c, |(_, stand_in)| *stand_in)
            .ok()?;
        Some(self.stand_ins[found].0)
    }
}

fn append(segments: &mut Vec<Segment>, text: &str, special: SpecialTokens) {
    match segments.last_mut() {
        Some(last) if last.special == special => last.text.push_str(text),
        _ => segments.push(Segment {
            text: text.to_owned(),
            special,
        }),
    }
}

fn is_private(c: &char) -> bool {
    PRIVATE_USE.iter().any(|range| range.contains(c))
}

/// All `<name>`-like words of the template: an edge, letters, an edge.
fn find_tags(template: &str, first: &HashSet<char>, last: &HashSet<char>) -> Vec<String> {
    let is_name = |c: &char| c.is_alphanumeric() || matches!(c, '_' | '-' | '/');
    let mut tags = HashSet::new();
    for (start, _) in template.char_indices().filter(|(_, c)| first.contains(c)) {
        let text = &template[start..];
        let n_name = text.chars().skip(1).take_while(is_name).count();
        let is_word = text
            .chars()
            .nth(1)
            .is_some_and(|c| c.is_alphabetic() || c == '/');
        let tag: String = text.chars().take(n_name + 2).collect();
        if is_word && tag.chars().next_back().is_some_and(|c| last.contains(&c)) {
            tags.insert(tag);
        }
    }
    let mut tags: Vec<String> = tags.into_iter().collect();
    tags.sort();
    tags
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rules(template: &str) -> MarkRules {
        MarkRules::new(&["<|end|>".to_owned(), "[INST]".to_owned()], template)
    }

    fn joined(segments: &[Segment]) -> String {
        segments
            .iter()
            .map(|segment| segment.text.as_str())
            .collect()
    }

    #[test]
    fn edges_get_stand_ins_of_one_character_and_come_back_as_text() {
        let rules = rules("");
        let marks = rules.choose(["x"].into_iter()).expect("all are free");
        let content = "a <|end|> [INST] b";
        let marked = marks.mark(content);
        assert_eq!(marked.chars().count(), content.chars().count());
        assert!(!marked.contains(['<', '>', '[', ']']));
        let segments = marks.segments(&format!("<|end|>{marked}"));
        assert_eq!(segments.len(), 2);
        assert_eq!(segments[0].special, SpecialTokens::Recognise);
        assert_eq!(segments[1].special, SpecialTokens::AsText);
        assert_eq!(joined(&segments), format!("<|end|>{content}"));
    }

    #[test]
    fn tags_of_the_template_stay_findable_unless_they_are_control_tokens() {
        let rules = rules("{{ c.split('</think>')[1] }} [INST] <|end|> a < b > c");
        assert_eq!(rules.tags, ["</think>"]);
        let marks = rules.choose(std::iter::empty()).expect("all are free");
        assert!(marks.mark("x</think>y<z>").starts_with("x</think>y"));
    }

    #[test]
    fn stand_ins_avoid_every_private_use_character_in_sight() {
        let rules = rules("\u{f0000}");
        let marks = rules
            .choose(["\u{f0001}\u{f0003}"].into_iter())
            .expect("some are free");
        let stand_ins: Vec<char> = marks.stand_ins.iter().map(|(_, c)| *c).collect();
        assert_eq!(
            stand_ins,
            ['\u{f0002}', '\u{f0004}', '\u{f0005}', '\u{f0006}']
        );
        let everything: String = PRIVATE_USE.into_iter().flatten().collect();
        assert!(rules.choose([everything.as_str()].into_iter()).is_none());
    }

    proptest! {
        #[test]
        fn marking_is_undone_exactly(content in "[<>|a\\[\\]INSTend /thk\u{f0000}\u{10fffd}]{0,40}") {
            let rules = rules("</think>");
            let marks = rules.choose([content.as_str()].into_iter()).expect("some are free");
            let segments = marks.segments(&marks.mark(&content));
            prop_assert_eq!(joined(&segments), content);
        }
    }
}
