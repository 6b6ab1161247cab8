//! How the default model comes into the cache: the script that `make model` and `tidemill pull` run, against a server
//! on loopback that cuts connections, forgets ranges and gives other bytes.

use anyhow::{Result, ensure};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use tidemill_tests::model::ModelFile;
use tidemill_tests::process::Process;

/// Runs one case of `fetch_cases.py`.
fn case(name: &str) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let ran = Command::new("python3")
        .arg(root.join("system/fetch_cases.py"))
        .arg(root.join("../cli/src/pull/fetch_default_model.py"))
        .arg(name)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .stdin(Stdio::null())
        .output()?;
    let said = String::from_utf8_lossy(&ran.stderr);
    ensure!(ran.status.success(), "{name}: {said}");
    ensure!(
        String::from_utf8_lossy(&ran.stdout).contains(&format!("{name} holds")),
        "{name} did not run"
    );
    Ok(())
}

#[test]
fn a_whole_download_leaves_the_model_and_nothing_else() -> Result<()> {
    case("whole")
}

#[test]
fn a_part_is_gone_on_with() -> Result<()> {
    case("resumed")
}

#[test]
fn a_cut_connection_is_gone_on_with() -> Result<()> {
    case("cut")
}

#[test]
fn a_server_without_ranges_is_read_from_the_beginning() -> Result<()> {
    case("no_ranges")
}

#[test]
fn another_wheel_is_refused_and_removed() -> Result<()> {
    case("other_wheel")
}

#[test]
fn another_model_in_the_wheel_is_refused() -> Result<()> {
    case("other_model")
}

#[test]
fn a_part_that_is_too_long_is_removed() -> Result<()> {
    case("too_long")
}

#[test]
fn a_server_that_never_ends_an_answer_well_is_given_up() -> Result<()> {
    case("always_cut")
}

#[test]
fn a_model_that_is_there_is_not_fetched_again() -> Result<()> {
    let model = ModelFile::real()?;
    let mut pull = Process::spawn("tidemill", &["pull", "smollm2-135m"])?;
    let status = pull.wait_exit(Duration::from_secs(60))?;
    ensure!(status.success(), "{status}: {}", pull.stderr());
    assert_eq!(pull.stdout(), model.argument()?);
    let mut unknown = Process::spawn("tidemill", &["pull", "no-such-model"])?;
    assert_eq!(unknown.wait_exit(Duration::from_secs(60))?.code(), Some(1));
    ensure!(unknown.stderr().contains("no-such-model"));
    Ok(())
}
