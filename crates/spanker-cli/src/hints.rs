// SPDX-License-Identifier: Apache-2.0
//! Hints name flags that exist: every `hint:` of this crate's and the engine's sources against the flags that the command
//! has.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use clap::CommandFactory;

use crate::Cli;

/// All long flags of a command and those below it, with their other names.
fn flags(command: &clap::Command, found: &mut BTreeSet<String>) {
    for argument in command.get_arguments() {
        found.extend(argument.get_long().map(str::to_owned));
        let others = argument.get_all_aliases().unwrap_or_default();
        found.extend(others.into_iter().map(str::to_owned));
    }
    command.get_subcommands().for_each(|below| flags(below, found));
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
fn wrong(source: &str) -> Vec<String> {
    let all = Cli::command();
    let mut anywhere = BTreeSet::new();
    flags(&all, &mut anywhere);
    let mut found = Vec::new();
    for hint in hints(source) {
        for (command, flag) in named(&hint) {
            let below = command.as_deref().and_then(|name| all.find_subcommand(name));
            let exists = match (command.as_deref(), below) {
                (Some("cargo"), _) => true,
                (_, Some(below)) => {
                    let mut own = BTreeSet::new();
                    flags(below, &mut own);
                    own.contains(&flag)
                }
                _ => anywhere.contains(&flag),
            };
            if !exists {
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
        } else if entry.file_name().is_some_and(|name| name != "hints.rs") {
            found.push(fs::read_to_string(&entry).unwrap());
        }
    }
}

#[test]
fn hints_name_flags_that_exist() {
    let mut all = Vec::new();
    for folder in ["src", "../spanker-engine/src"] {
        sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder), &mut all);
    }
    let count: usize = all.iter().map(|source| hints(source).len()).sum();
    assert!(count > 20, "{count} hints were found");
    let bad: Vec<String> = all.iter().flat_map(|source| wrong(source)).collect();
    assert!(bad.is_empty(), "{bad:#?}");
}

#[test]
fn hints_with_flags_that_do_not_exist_are_found() {
    let bad = wrong(
        "bail!(\"x\\nhint: give more with --ctx-sise, or --seed 1, or spanker plan --seed 1\")",
    );
    assert_eq!(bad.len(), 2, "{bad:?}");
    assert!(wrong("\"hint: --ctx-size 5, or 'cargo build --features x'\"").is_empty());
}
