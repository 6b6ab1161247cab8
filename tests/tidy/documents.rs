//! The documents that every reader may count on, and links in them that lead somewhere.

use crate::source::{assert_none, root};
use std::path::Path;

const NEEDED: &[&str] = &[
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "LICENSE",
    "docs/glossary.md",
    "docs/api.md",
    "docs/performance.md",
    "docs/operations.md",
];

fn markdown_files() -> Vec<std::path::PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![root(), root().join("docs"), root().join("docs/adr")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)
            .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        {
            let path = entry.expect("readable").path();
            if path.extension().is_some_and(|ending| ending == "md") {
                files.push(path);
            }
        }
    }
    files
}

/// The targets of `[text](target)` that are files of ours.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](")
        .skip(1)
        .filter_map(|rest| rest.split([')', '#', ' ']).next())
        .filter(|target| !target.is_empty() && !target.contains("://"))
}

#[test]
fn documents_are_there_and_their_links_lead_somewhere() {
    let mut findings: Vec<String> = NEEDED
        .iter()
        .filter(|name| !root().join(name).is_file())
        .map(|name| format!("{name} is missing"))
        .collect();
    for path in markdown_files() {
        let text = std::fs::read_to_string(&path).expect("our documents are UTF-8");
        let folder = path.parent().unwrap_or(Path::new("."));
        for target in links(&text) {
            if !folder.join(target).exists() {
                findings.push(format!("{}: {target} leads nowhere", path.display()));
            }
        }
    }
    assert_none(&findings, "documents:");
}

#[test]
fn every_crate_has_its_invariant_in_the_architecture() {
    let text =
        std::fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md is there");
    let crates = [
        "core",
        "proto",
        "kernels",
        "model-files",
        "engine",
        "kv-transfer",
        "prefill-node",
        "decode-node",
        "router",
        "service",
        "cli",
        "sim",
        "tests",
    ];
    let findings: Vec<String> = crates
        .iter()
        .filter(|name| {
            !text
                .lines()
                .any(|line| line.contains(&format!("`{name}/`")) && line.contains("**Invariant**"))
        })
        .map(ToString::to_string)
        .collect();
    assert_none(
        &findings,
        "crates without an **Invariant** line in ARCHITECTURE.md:",
    );
}
