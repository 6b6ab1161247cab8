//! Tells the crate which commit it is built from: `TIDEMILL_REVISION` when it is set (a build without a checkout, as in
//! an image), else what the checkout's HEAD names, else "unknown". The files are read directly, since git itself may be
//! missing, or refuse a folder of another owner.

use std::fs;
use std::path::{Path, PathBuf};

const VARIABLE: &str = "TIDEMILL_REVISION";

#[allow(clippy::print_stdout, reason = "this is how a build script answers")]
fn main() {
    println!("cargo::rerun-if-env-changed={VARIABLE}");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let folders = git_folders(&root.join(".git"));
    for file in folders
        .iter()
        .flat_map(|(own, shared)| watched(own, shared))
    {
        println!("cargo::rerun-if-changed={}", file.display());
    }
    // Without a checkout nothing but the variable can change; cargo would look at the whole crate otherwise.
    println!("cargo::rerun-if-changed=build.rs");
    let given = std::env::var(VARIABLE).ok().filter(|text| !text.is_empty());
    let found = || {
        let (own, shared) = folders.as_ref()?;
        head(own, shared)
    };
    let revision = given.or_else(found).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo::rustc-env={VARIABLE}={revision}");
}

/// Where HEAD lies, and where branches lie: two folders for a linked worktree, else the same.
fn git_folders(git: &Path) -> Option<(PathBuf, PathBuf)> {
    if git.is_dir() {
        return Some((git.to_owned(), git.to_owned()));
    }
    let text = fs::read_to_string(git).ok()?;
    let own = git.parent()?.join(text.strip_prefix("gitdir: ")?.trim());
    let shared = match fs::read_to_string(own.join("commondir")) {
        Ok(shared) => own.join(shared.trim()),
        Err(_) => own.clone(),
    };
    Some((own, shared))
}

/// What a commit or a checkout changes. Only what exists: cargo takes a missing file for one that always changes.
fn watched(own: &Path, shared: &Path) -> impl Iterator<Item = PathBuf> {
    let all = [
        own.join("HEAD"),
        shared.join("refs/heads"),
        shared.join("packed-refs"),
    ];
    all.into_iter().filter(|path| path.exists())
}

/// The commit of HEAD: itself, or that of its branch, in a file of its own or among the packed ones.
fn head(own: &Path, shared: &Path) -> Option<String> {
    let head = fs::read_to_string(own.join("HEAD")).ok()?;
    let Some(branch) = head.trim().strip_prefix("ref: ") else {
        return commit(head.trim());
    };
    if let Ok(text) = fs::read_to_string(shared.join(branch)) {
        return commit(text.trim());
    }
    let packed = fs::read_to_string(shared.join("packed-refs")).ok()?;
    let mut entries = packed.lines().filter_map(|line| line.split_once(' '));
    let (text, _) = entries.find(|(_, name)| *name == branch)?;
    commit(text)
}

/// A commit's name, which is all that may get into a binary.
fn commit(text: &str) -> Option<String> {
    let is_name = text.len() >= 40 && text.bytes().all(|b| b.is_ascii_hexdigit());
    is_name.then(|| text.to_owned())
}
