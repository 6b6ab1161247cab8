//! A deployment without requests costs next to nothing: no loop spins, neither before work nor after it, nor while a
//! node of it is gone.

use anyhow::{Result, ensure};
use std::time::Duration;
use tidemill_tests::answer::{COMPLETIONS, ask};
use tidemill_tests::deployment::{Deployment, Member, Shape, greedy, serve};
use tidemill_tests::model::ModelFile;
use tidemill_tests::process::Process;

const PATIENCE: Duration = Duration::from_secs(20);
const WATCHED: Duration = Duration::from_secs(2);
/// 5% of a core. A loop that spins takes all of one.
const BUSY_MAX: Duration = Duration::from_millis(100);

/// Processor time of each process while all of them should rest.
fn check_rest(processes: &[(&str, &Process)], when: &str) -> Result<()> {
    let times = || -> Result<Vec<Duration>> {
        processes
            .iter()
            .map(|(_, process)| process.cpu_time())
            .collect()
    };
    let before = times()?;
    std::thread::sleep(WATCHED);
    for ((name, _), (after, before)) in processes.iter().zip(times()?.into_iter().zip(before)) {
        let busy = after - before;
        ensure!(
            busy <= BUSY_MAX,
            "{name} took {busy:?} in {WATCHED:?} {when}"
        );
    }
    Ok(())
}

fn processes<'a>(members: impl Iterator<Item = &'a Member>) -> Vec<(&'a str, &'a Process)> {
    members
        .map(|member| (member.ready.role.as_str(), &member.process))
        .collect()
}

#[test]
fn nothing_spins_when_nothing_is_asked() -> Result<()> {
    let model = ModelFile::tiny()?;
    let mut deployment = Deployment::start(&model, &Shape::default())?;
    check_rest(&processes(deployment.members()), "before any request")?;
    for i in 0..20 {
        ask(
            deployment.address(),
            COMPLETIONS,
            &greedy(&format!("{i} tides"), 20),
        )?;
    }
    deployment.wait_idle(PATIENCE)?;
    check_rest(&processes(deployment.members()), "after work")?;
    deployment.decode[0].process.kill()?;
    let living = [&deployment.prefill[0], &deployment.router];
    check_rest(&processes(living.into_iter()), "while decode is gone")
}

#[test]
fn one_process_rests_too() -> Result<()> {
    let model = ModelFile::tiny()?;
    let (process, ready) = serve(&model, &[])?;
    ask(ready.listen, COMPLETIONS, &greedy("The tide", 20))?;
    check_rest(&[("serve", &process)], "after work")
}
