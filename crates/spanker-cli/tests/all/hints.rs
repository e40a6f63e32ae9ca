// SPDX-License-Identifier: Apache-2.0
//! Hints name flags that exist: every `hint:` of the sources of the command and of the libraries that it stands on, against the
//! flags of the command's manual pages.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

/// The long flags of each command, those of the commands below it included; of all of them under an empty name.
fn flags() -> BTreeMap<String, BTreeSet<String>> {
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = Command::new(env!("CARGO_BIN_EXE_spanker"));
    let written = command.args(["man", "--out"]).arg(folder.path()).output().expect("it starts");
    assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for page in fs::read_dir(folder.path()).expect("pages").map(|page| page.expect("a page")) {
        let name = page.file_name().to_string_lossy().into_owned();
        let command = name.split(['-', '.']).nth(1).unwrap_or_default().to_owned();
        let text = fs::read_to_string(page.path()).expect("a page").replace("\\-", "-");
        for line in text.lines().filter(|line| line.starts_with("\\fB-")) {
            let flags = line.split("\\fB--").skip(1).filter_map(|rest| rest.split('\\').next());
            let flags: Vec<String> = flags.map(str::to_owned).collect();
            found.entry(String::new()).or_default().extend(flags.iter().cloned());
            found.entry(command.clone()).or_default().extend(flags);
        }
    }
    found
}

/// The long flags in a text, and the command that they are given to, where the text says so.
fn named(text: &str) -> Vec<(Option<String>, String)> {
    let mut command = None;
    let mut found = Vec::new();
    let words: Vec<&str> =
        text.split(|c: char| c.is_whitespace() || "'\"(),;".contains(c)).collect();
    for (at, word) in words.iter().enumerate() {
        if *word == "spanker" || *word == "cargo" {
            let next = words.get(at + 1).copied().unwrap_or_default();
            command = Some(if *word == "cargo" { "cargo".to_owned() } else { next.to_owned() });
        }
        if let Some(flag) = word.strip_prefix("--") {
            let flag = flag.split(['=', ':', '.']).next().unwrap_or_default();
            found.push((command.clone(), flag.to_owned()));
        }
    }
    found
}

/// What follows each `hint` in a source up to the end of its text.
fn hints(source: &str) -> Vec<String> {
    let mut found = Vec::new();
    for mark in
        ["hint: ", "HINT: &str = \"", "hint = Some(format!(\"", "hint: Some(\"", "hint = \""]
    {
        for (at, _) in source.match_indices(mark) {
            let rest = &source[at + mark.len()..];
            let end = rest.find('"').unwrap_or(rest.len());
            found.push(rest[..end].replace("\\\n", " ").replace("\\n", " "));
        }
    }
    found
}

/// What is wrong with the hints of a source.
fn wrong(flags: &BTreeMap<String, BTreeSet<String>>, source: &str) -> Vec<String> {
    let mut found = Vec::new();
    for hint in hints(source) {
        for (command, flag) in named(&hint) {
            let command = command.unwrap_or_default();
            let known = flags.get(&command).or_else(|| flags.get(""));
            if command != "cargo" && !known.is_some_and(|known| known.contains(&flag)) {
                found.push(format!("--{flag} in '{hint}'"));
            }
        }
    }
    found
}

fn sources(folder: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            sources(&entry, found);
        } else if entry.extension().is_some_and(|name| name == "rs") {
            found.push(fs::read_to_string(&entry).unwrap());
        }
    }
}

#[test]
fn hints_name_flags_that_exist() {
    let mut all = Vec::new();
    for folder in ["src", "../spanker-bench/src", "../spanker-engine/src"] {
        sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder), &mut all);
    }
    let count: usize = all.iter().map(|source| hints(source).len()).sum();
    assert!(count > 20, "{count} hints were found");
    let flags = flags();
    let bad: Vec<String> = all.iter().flat_map(|source| wrong(&flags, source)).collect();
    assert!(bad.is_empty(), "{bad:#?}");
}

#[test]
fn hints_with_flags_that_do_not_exist_are_found() {
    let flags = flags();
    let bad = wrong(
        &flags,
        "bail!(\"x\\nhint: give more with --ctx-sise, or --seed 1, or spanker plan --seed 1\")",
    );
    assert_eq!(bad.len(), 2, "{bad:?}");
    assert!(wrong(&flags, "\"hint: --ctx-size 5, or 'cargo build --features x'\"").is_empty());
}
