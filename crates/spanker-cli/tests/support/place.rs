// SPDX-License-Identifier: Apache-2.0
//! A place for a twin of a test's own, and what tests do in it.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// A place for one twin of its own.
pub struct Place {
    pub outer: tempfile::TempDir,
    pub dir: PathBuf,
}

impl Place {
    pub fn new() -> Place {
        let outer = tempfile::tempdir().expect("a directory");
        let dir = outer.path().join("cards");
        Place { outer, dir }
    }

    /// `spanker twin` and the words of a line.
    pub fn command(&self, line: &str) -> Command {
        self.spanker(&format!("twin {line}"))
    }

    /// `spanker` and the words of a line, with this place for its cards.
    pub fn spanker(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_spanker"));
        command.args(line.split_whitespace()).env("SPANKER_DEV_DIR", &self.dir);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    pub fn spawn(&self, line: &str) -> Child {
        self.command(line).spawn().expect("the command starts")
    }

    pub fn output(&self, line: &str) -> Output {
        self.command(line).output().expect("the command starts")
    }

    /// What a command prints that succeeds.
    pub fn ok(&self, line: &str) -> String {
        let output = self.output(line);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{line}: {errors}");
        String::from_utf8(output.stdout).expect("text")
    }

    /// What a command says that fails with this code.
    pub fn error(&self, code: i32, line: &str) -> String {
        let output = self.output(line);
        let errors = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(code), "{line}: {errors}");
        assert!(output.stdout.is_empty(), "{line} printed before it failed");
        errors
    }

    pub fn status(&self) -> Value {
        serde_json::from_str(&self.ok("status --json")).expect("JSON")
    }

    pub fn card_state(&self, card: usize) -> String {
        self.status()["cards"][card]["state"].as_str().expect("a state").to_owned()
    }

    /// The processes of the twin: its directory is among their arguments. The dead have none.
    pub fn processes(&self) -> Vec<i32> {
        let dir = self.dir.to_str().expect("text");
        let entries = fs::read_dir("/proc").expect("/proc").flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        let ours = |pid: &i32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let mut words = line.split(|byte| *byte == 0);
            words.any(|word| word == b"twin") && words.any(|word| word == dir.as_bytes())
        };
        pids.filter(ours).collect()
    }

    pub fn assert_nothing_is_left(&self) {
        let end = Instant::now() + Duration::from_secs(5);
        loop {
            let processes = self.processes();
            let names: Vec<_> = fs::read_dir(&self.dir).into_iter().flatten().flatten().collect();
            if processes.is_empty() && !self.dir.exists() {
                return;
            }
            assert!(Instant::now() < end, "left: {processes:?} {names:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Only for a test that has failed: the others have seen to it.
        self.processes().into_iter().for_each(|pid| signal(pid, Signal::KILL));
    }
}

pub fn signal(pid: i32, signal: Signal) {
    let _ = kill_process(Pid::from_raw(pid).expect("a process"), signal);
}

pub fn pid(value: &Value) -> i32 {
    value.as_i64().expect("a process").try_into().expect("a process")
}

pub fn within<T>(time: Duration, mut found: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + time;
    loop {
        match found() {
            Some(value) => return value,
            None => assert!(Instant::now() < end, "it did not happen in time"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub const SOON: Duration = Duration::from_secs(10);
