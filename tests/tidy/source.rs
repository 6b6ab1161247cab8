//! The tree's own Rust files, read once for each check.

use std::path::{Path, PathBuf};

/// The repository's root.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("tests/ lies in the root")
        .to_owned()
}

/// Every Rust file of the house, relative to the root, with its text.
pub(crate) fn rust_files() -> Vec<(PathBuf, String)> {
    let mut files = Vec::new();
    let mut folders = vec![root()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder of ours is readable") {
            let path = entry.expect("readable").path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with('.') || name == "target" {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else if name.ends_with(".rs") {
                let text = std::fs::read_to_string(&path).expect("our source is UTF-8");
                let relative = path.strip_prefix(root()).expect("below the root");
                files.push((relative.to_owned(), text));
            }
        }
    }
    files.sort();
    assert!(
        files.len() > 50,
        "the walk found {} files only",
        files.len()
    );
    files
}

/// True for files that hold tests only.
pub(crate) fn is_test_file(path: &Path) -> bool {
    let is_test_name = path.file_stem().is_some_and(|stem| {
        let stem = stem.to_string_lossy();
        stem == "tests" || stem.ends_with("_tests") || stem == "conformance"
    });
    let in_test_folder = path
        .components()
        .any(|part| ["tests", "benches"].contains(&&*part.as_os_str().to_string_lossy()));
    is_test_name || in_test_folder
}

/// Asserts that a list of findings is empty, printing each on its own line.
pub(crate) fn assert_none(findings: &[String], advice: &str) {
    assert!(findings.is_empty(), "{advice}\n  {}", findings.join("\n  "));
}
