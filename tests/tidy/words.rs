//! One word per thing. Identifiers are split into words and held against the glossary.

use crate::source::{assert_none, root, rust_files};
use std::collections::BTreeSet;
use syn::visit::Visit;

/// A word that the glossary replaces, and what to say.
const REPLACED: &[(&str, &str)] = &[
    ("page", "block"),
    ("pages", "blocks"),
    ("paged", "in blocks"),
    ("num", "n_<things>"),
    ("util", "the name of the idea"),
    ("utils", "the name of the idea"),
    ("helper", "the name of the idea"),
    ("helpers", "the name of the idea"),
    ("manager", "the name of the idea"),
    ("misc", "the name of the idea"),
    ("replica", "node"),
    ("hash_id", "block hash"),
    ("swap", "preemption"),
    ("microbatch", "step"),
];

/// Words of the standard library, of a library that we call, or of a file format.
const FOREIGN: &[&str] = &[
    "HugePage",
    "http_body_util",
    "hyper_util",
    "num",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_permits",
    "swap",
    "swap_bytes",
    "swap_remove",
    "tokio_util",
];

/// What docs/glossary.md has to explain.
const GLOSSARY: &[&str] = &[
    "request",
    "sequence",
    "prompt token",
    "output token",
    "prefix",
    "prefill",
    "decode",
    "role",
    "node",
    "endpoint",
    "engine",
    "step",
    "batch",
    "chunk",
    "block",
    "block pool",
    "block table",
    "block hash",
    "slice",
    "layer group",
    "watermark",
    "digest",
    "incarnation",
    "capability",
    "epoch",
    "KV layout",
    "prefix cache",
    "KV handle",
    "lease",
    "reservation",
    "export",
    "import",
    "transfer",
    "transport",
    "placement",
    "admission",
    "preemption",
    "eviction",
    "drain",
    "load report",
    "TTFT",
    "ITL",
    "TPOT",
    "SLO",
    "goodput",
];

#[derive(Default)]
struct Names(BTreeSet<String>);

impl<'ast> Visit<'ast> for Names {
    fn visit_ident(&mut self, ident: &'ast proc_macro2::Ident) {
        self.0.insert(ident.to_string());
    }
}

fn words_of(identifier: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    for c in identifier.chars() {
        if c == '_' || c.is_uppercase() && !words.last().is_some_and(String::is_empty) {
            words.push(String::new());
        }
        if c != '_' {
            words
                .last_mut()
                .expect("never empty")
                .extend(c.to_lowercase());
        }
    }
    words
}

#[test]
fn identifiers_use_the_words_of_the_glossary() {
    let mut findings = Vec::new();
    for (path, text) in rust_files() {
        if path.starts_with("tests/tidy") {
            continue;
        }
        let file = syn::parse_file(&text).expect("sizes.rs reports what does not parse");
        let mut names = Names::default();
        names.visit_file(&file);
        for name in names
            .0
            .iter()
            .filter(|name| !FOREIGN.contains(&name.as_str()))
        {
            for word in words_of(name) {
                if let Some((_, better)) = REPLACED.iter().find(|(replaced, _)| *replaced == word) {
                    findings.push(format!("{}: {name}: say {better}", path.display()));
                }
            }
        }
    }
    assert_none(&findings, "words that the glossary replaces:");
}

#[test]
fn the_glossary_explains_every_word() {
    let text = std::fs::read_to_string(root().join("docs/glossary.md"))
        .expect("docs/glossary.md is there");
    let findings: Vec<String> = GLOSSARY
        .iter()
        .filter(|word| !text.contains(&format!("**{word}**")))
        .map(ToString::to_string)
        .collect();
    assert_none(&findings, "words that docs/glossary.md does not explain:");
}

#[test]
fn words_are_split_at_case_and_underscore() {
    assert_eq!(words_of("n_blocks"), ["n", "blocks"]);
    assert_eq!(words_of("BlockPool"), ["block", "pool"]);
    assert_eq!(
        words_of("PAGE"),
        ["p", "a", "g", "e"],
        "constants are found by their other uses"
    );
}
