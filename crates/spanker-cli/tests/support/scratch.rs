// SPDX-License-Identifier: Apache-2.0
//! A folder in which tests run the command, and what they read of its answers.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

/// Where commands of tests keep what they have measured: not with the user's.
const CACHE: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/cache");

/// A folder to work in, which is the command's working directory.
pub struct Scratch(TempDir);

impl Scratch {
    pub fn new(files: &[(&str, &str)]) -> Scratch {
        let scratch = Scratch(tempfile::tempdir().expect("a folder"));
        files.iter().for_each(|(name, text)| scratch.put(name, text.as_bytes()));
        scratch
    }

    pub fn put(&self, name: &str, bytes: &[u8]) {
        let path = self.0.path().join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, bytes).expect("a file");
    }

    pub fn read(&self, name: &str) -> String {
        fs::read_to_string(self.0.path().join(name)).expect(name)
    }

    /// The command in this folder.
    pub fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_spanker"));
        command.current_dir(self.0.path()).env("SPANKER_CACHE", CACHE);
        command
    }

    pub fn run(&self, line: &str) -> Output {
        let mut command = self.command();
        command.args(line.split_whitespace()).output().expect("the command starts")
    }

    pub fn text(&self, line: &str) -> String {
        let output = self.run(line);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{line}: {errors}");
        String::from_utf8(output.stdout).expect("text")
    }

    pub fn json(&self, line: &str) -> Value {
        let text = self.text(&format!("{line} --json"));
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{line}: {error}: {text}"))
    }

    /// What a command says that fails with `code`, and prints nothing else.
    pub fn error(&self, code: i32, line: &str) -> String {
        let output = self.run(line);
        let text = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(code), "{line}: {text}");
        assert!(output.stdout.is_empty(), "{line} printed before it failed");
        assert!(!text.contains("panicked"), "{line}: {text}");
        text
    }

    pub fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.0.path()).expect("a folder");
        let name = |entry: fs::DirEntry| entry.file_name().into_string().expect("a name");
        let mut names: Vec<String> = entries.map(|entry| name(entry.expect("an entry"))).collect();
        names.sort();
        names
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

pub fn number(value: &Value, field: &str) -> f64 {
    value[field].as_f64().unwrap_or_else(|| panic!("{field} in {value}"))
}
