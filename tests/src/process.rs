//! One real process: started with its output captured, watched, and ended with its owner.
//!
//! A process that outlives its test holds ports and a core, so it is killed when its [`Process`] is dropped, by its
//! own id. A binary that is not there is a failure: nothing here is skipped.

use crate::wait_until;
use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Longest wait for the ready line: loading a model in a debug build beside other tests.
pub const READY_PATIENCE: Duration = Duration::from_secs(60);
/// Most bytes of output that are kept of one stream.
const OUTPUT_BYTES_MAX: usize = 64 << 20;
/// Ticks of `/proc/<pid>/stat` in a second, on every Linux that we build for.
const TICKS_PER_SECOND: u64 = 100;

/// When this variable is set, every process's last words are shown at its end.
const SHOW_LOGS: &str = "TIDEMILL_TEST_LOGS";

/// Where a binary of this workspace lies: beside the test's own.
///
/// # Errors
/// When it has not been built.
pub fn binary(name: &str) -> Result<PathBuf> {
    let test = std::env::current_exe().context("the test's own path")?;
    let folder = test.ancestors().nth(2).context("a test lies in deps/")?;
    let path = folder.join(name);
    ensure!(
        path.is_file(),
        "{} is not built; run `make test`, which builds it first",
        path.display()
    );
    Ok(path)
}

/// What a process says when it is ready.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ready {
    /// router, prefill, decode or serve.
    pub role: String,
    /// Its public or control port.
    pub listen: SocketAddr,
    /// Its admin port.
    pub admin: SocketAddr,
}

impl Ready {
    /// Reads `ready role=decode listen=127.0.0.1:7002 admin=127.0.0.1:9002`.
    ///
    /// # Errors
    /// When the line has another form.
    pub fn parse(line: &str) -> Result<Self> {
        let rest = line
            .strip_prefix("ready ")
            .with_context(|| format!("{line:?} is no ready line"))?;
        let value = |key: &str| {
            rest.split(' ')
                .find_map(|pair| pair.strip_prefix(key)?.strip_prefix('='))
                .with_context(|| format!("{line:?} has no {key}"))
        };
        let address = |key: &str| -> Result<SocketAddr> {
            let text = value(key)?;
            text.parse().with_context(|| format!("{key}={text}"))
        };
        Ok(Self {
            role: value("role")?.to_owned(),
            listen: address("listen")?,
            admin: address("admin")?,
        })
    }
}

/// Lines of one output stream so far.
type Lines = Arc<Mutex<Vec<String>>>;

/// A running process.
pub struct Process {
    name: String,
    child: Child,
    stdout: Lines,
    stderr: Lines,
    readers: Vec<JoinHandle<()>>,
}

impl Process {
    /// Starts `name` of this workspace. `TIDEMILL_*` variables of the surroundings do not reach it, except the place of
    /// the cache.
    ///
    /// # Errors
    /// When the binary is missing or does not start.
    pub fn spawn<S: AsRef<OsStr>>(name: &str, arguments: &[S]) -> Result<Self> {
        let mut process = Self::start(name, arguments, Stdio::null())?;
        process.listen_to_errors();
        Ok(process)
    }

    /// The same with something to read: all of `input`, then the end.
    ///
    /// # Errors
    /// As for [`Process::spawn`], and when it closes its input before it has read all of it.
    pub fn spawn_with_input<S: AsRef<OsStr>>(
        name: &str,
        arguments: &[S],
        input: &str,
    ) -> Result<Self> {
        let mut process = Self::start(name, arguments, Stdio::piped())?;
        process.listen_to_errors();
        let stdin = process.child.stdin.take();
        let mut stdin = stdin.expect("standard input is piped");
        stdin
            .write_all(input.as_bytes())
            .with_context(|| format!("{name} reads its input"))?;
        Ok(process)
    }

    fn listen_to_errors(&mut self) {
        let err = self.child.stderr.take();
        let err = err.expect("standard error is piped");
        self.readers.push(collect(err, &self.stderr));
    }

    /// The same, but whoever was to read its log is gone.
    ///
    /// # Errors
    /// As for [`Process::spawn`].
    pub fn spawn_unheard<S: AsRef<OsStr>>(name: &str, arguments: &[S]) -> Result<Self> {
        let mut process = Self::start(name, arguments, Stdio::null())?;
        drop(process.child.stderr.take());
        Ok(process)
    }

    fn start<S: AsRef<OsStr>>(name: &str, arguments: &[S], input: Stdio) -> Result<Self> {
        let mut command = Command::new(binary(name)?);
        command.args(arguments);
        for (key, _) in std::env::vars_os() {
            let text = key.to_string_lossy();
            if text.starts_with("TIDEMILL_") && text != "TIDEMILL_CACHE" {
                command.env_remove(&key);
            }
        }
        command.stdin(input);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command
            .spawn()
            .with_context(|| format!("{name} does not start"))?;
        let out = child.stdout.take().expect("standard output is piped");
        let stdout = Lines::default();
        let readers = vec![collect(out, &stdout)];
        Ok(Self {
            name: name.to_owned(),
            child,
            stdout,
            stderr: Lines::default(),
            readers,
        })
    }

    /// Starts `name` and waits for its ready line.
    ///
    /// # Errors
    /// When it ends before, or says nothing for a minute.
    pub fn spawn_ready<S: AsRef<OsStr>>(name: &str, arguments: &[S]) -> Result<(Self, Ready)> {
        let mut process = Self::spawn(name, arguments)?;
        let ready = process.ready()?;
        Ok((process, ready))
    }

    /// Waits for the ready line.
    ///
    /// # Errors
    /// When the process ends before, or says nothing for a minute.
    pub fn ready(&mut self) -> Result<Ready> {
        let mut ended = None;
        let line = wait_until(READY_PATIENCE, || {
            let said = lock(&self.stdout)
                .iter()
                .find(|line| line.starts_with("ready "))
                .cloned();
            if said.is_none() {
                ended = self.child.try_wait()?;
            }
            match (said, ended) {
                (Some(line), _) => Ok(Ok(line)),
                (None, Some(status)) => Ok(Err(status)),
                (None, None) => Err(anyhow!("{} has not said that it is ready", self.name)),
            }
        });
        match line {
            Ok(Ok(line)) => Ready::parse(&line),
            Ok(Err(status)) => bail!("{} ended with {status}: {}", self.name, self.stderr()),
            Err(error) => Err(error.context(self.stderr())),
        }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// When the process is gone already.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let id = i32::try_from(self.child.id()).context("a process id")?;
        let pid = Pid::from_raw(id).context("a process id is above zero")?;
        kill_process(pid, signal).with_context(|| format!("{signal:?} to {}", self.name))
    }

    /// kill -9, as a crash.
    ///
    /// # Errors
    /// When the operating system refuses.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// True until it has ended.
    ///
    /// # Errors
    /// When the operating system does not tell.
    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Waits for its end by itself.
    ///
    /// # Errors
    /// When it still runs after `patience`.
    pub fn wait_exit(&mut self, patience: Duration) -> Result<ExitStatus> {
        let status = wait_until(patience, || {
            let ended = self.child.try_wait()?;
            ended.with_context(|| format!("{} still runs", self.name))
        })?;
        // Everything that it said is read before anybody looks at it.
        for reader in self.readers.drain(..) {
            reader
                .join()
                .map_err(|_| anyhow!("the reader of {} panicked", self.name))?;
        }
        Ok(status)
    }

    /// What it has written to standard output so far.
    pub fn stdout(&self) -> String {
        lock(&self.stdout).join("\n")
    }

    /// What it has written to standard error so far.
    pub fn stderr(&self) -> String {
        lock(&self.stderr).join("\n")
    }

    /// Processor time that it has used, all threads together.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn cpu_time(&self) -> Result<Duration> {
        let path = format!("/proc/{}/stat", self.pid());
        let text = std::fs::read_to_string(&path).with_context(|| path.clone())?;
        // The name in parentheses may hold spaces; utime and stime are the 12th and 13th fields after it.
        let (_, rest) = text.rsplit_once(')').context("no name in stat")?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let ticks = |idx: usize| -> Result<u64> {
            let field = fields.get(idx).context("stat is too short")?;
            Ok(field.parse::<u64>()?)
        };
        let n_ticks = ticks(11)? + ticks(12)?;
        Ok(Duration::from_millis(n_ticks * 1000 / TICKS_PER_SECOND))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already; there is nobody left to tell.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() || std::env::var_os(SHOW_LOGS).is_some() {
            let tail = tail(&self.stderr());
            eprintln!("--- {} {} said:\n{tail}", self.name, self.child.id());
        }
    }
}

/// The last lines of a log, for a failed test.
fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}

fn lock(lines: &Lines) -> std::sync::MutexGuard<'_, Vec<String>> {
    lines.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads a stream to its end, so that the process never blocks on a full pipe.
fn collect(stream: impl Read + Send + 'static, lines: &Lines) -> JoinHandle<()> {
    let lines = Arc::clone(lines);
    std::thread::spawn(move || {
        let mut n_bytes = 0;
        let mut reader = BufReader::new(stream);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
            n_bytes += line.len();
            if n_bytes <= OUTPUT_BYTES_MAX {
                let text = String::from_utf8_lossy(&line);
                lock(&lines).push(text.trim_end_matches('\n').to_owned());
            }
            line.clear();
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ready_line_is_read_and_others_are_not() {
        let line = "ready role=decode listen=127.0.0.1:7002 admin=127.0.0.1:9002";
        let ready = Ready::parse(line).expect("the fixed form");
        assert_eq!((ready.role.as_str(), ready.listen.port()), ("decode", 7002));
        assert_eq!(ready.admin.port(), 9002);
        for bad in [
            "ready",
            "ready role=decode",
            "ready role=decode listen=x admin=127.0.0.1:1",
            "not ready role=decode listen=127.0.0.1:1 admin=127.0.0.1:1",
        ] {
            assert!(Ready::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_missing_binary_says_what_to_run() {
        let error = binary("no-such-binary").expect_err("not there");
        assert!(error.to_string().contains("make test"), "{error}");
    }
}
