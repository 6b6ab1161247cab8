//! What a program says before it serves: which build it is, and why it does not start.

use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::time::Duration;
use tidemill_tests::model::Scratch;
use tidemill_tests::process::Process;

const PATIENCE: Duration = Duration::from_secs(30);
const PROGRAMS: [&str; 4] = ["tidemill", "router", "prefill-node", "decode-node"];

#[test]
fn every_program_names_the_commit_that_it_was_built_from() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for program in PROGRAMS {
        let mut process = Process::spawn(program, &["--version"])?;
        let status = process.wait_exit(PATIENCE)?;
        let said = process.stdout();
        ensure!(status.success(), "{program}: {status}");
        let start = format!("{program} {} (revision ", env!("CARGO_PKG_VERSION"));
        let revision = said
            .strip_prefix(&start)
            .and_then(|rest| rest.strip_suffix(')'))
            .with_context(|| said.clone())?;
        let is_commit = revision.len() >= 7 && revision.bytes().all(|b| b.is_ascii_hexdigit());
        ensure!(is_commit || !root.join(".git").exists(), "{said}");
    }
    Ok(())
}

/// Arguments with which a program opens this model and nothing else is wrong.
fn with_model<'a>(program: &str, model: &'a str) -> Vec<&'a str> {
    let own: &[&str] = match program {
        "tidemill" => &["serve"],
        "router" => &["--nodes", "decode=127.0.0.1:1"],
        _ => &["--listen", "127.0.0.1:0"],
    };
    [own, &["--model", model]].concat()
}

#[test]
fn why_a_model_does_not_open_is_said_once() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.path();
    std::fs::write(folder.join("file"), b"x")?;
    let empty = folder.join("empty");
    std::fs::create_dir(&empty)?;
    let cases = [
        (folder.join("missing.gguf"), "no such file"),
        (folder.join("file/below.gguf"), "not a directory"),
        (empty, "no such file"),
    ];
    for program in PROGRAMS {
        for (model, reason) in &cases {
            let model = model.to_str().context("a path of ASCII")?;
            let mut process = Process::spawn(program, &with_model(program, model))?;
            let status = process.wait_exit(PATIENCE)?;
            assert_eq!(status.code(), Some(64), "{program} {model}");
            let said = process.stderr().to_lowercase();
            let last = said.lines().last().context("it says why")?;
            ensure!(last.contains(&model.to_lowercase()), "{last}");
            assert!(last.matches(reason).count() <= 1, "twice: {last}");
            assert!(last.matches("os error").count() <= 1, "twice: {last}");
            let says_why = last.contains(reason) || last.contains("no such file");
            ensure!(says_why, "{last}");
        }
    }
    Ok(())
}
