// SPDX-License-Identifier: Apache-2.0
//! The `justfile`, the table of commands in CONTRIBUTING.md and the scripts that are there agree.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use tidy::{listed_commands, recipes};

/// Scripts that others call.
const INTERNAL: [&str; 4] = ["setup", "setup-llama-cpp", "setup-xllamacpp", "with-mpi"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(name: &str) -> String {
    std::fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn contributing_lists_the_recipes_of_the_justfile() {
    let recipes = recipes(&read("justfile"));
    assert!(recipes.len() > 10, "recipes were not found: {recipes:?}");
    assert_eq!(listed_commands(&read("CONTRIBUTING.md")), recipes);
}

#[test]
fn every_script_has_a_recipe_and_every_recipe_its_script() {
    let named = recipes(&read("justfile"));
    let called: BTreeSet<String> = named
        .values()
        .filter_map(|command| command.strip_prefix("scripts/"))
        .map(|script| script.split(' ').next().unwrap_or("").to_owned())
        .collect();
    let there: BTreeSet<String> = std::fs::read_dir(root().join("scripts"))
        .expect("scripts")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .filter(|name| !name.contains('.') && !name.starts_with('_'))
        .filter(|name| !INTERNAL.contains(&name.as_str()))
        .collect();
    assert_eq!(called, there);
}

#[test]
fn recipes_and_rows_are_read_with_their_commands() {
    let justfile = "set positional-arguments\n\n[private]\ndefault:\n    @just --list\n\n\
        # Fuzz: for so long\nfuzz *args:\n    scripts/fuzz \"$@\"\n\n# Fetch\nfetch model=\"a\":\n    cargo run \"$1\"\n";
    let expected = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
        pairs.iter().map(|(name, command)| ((*name).into(), (*command).into())).collect()
    };
    let found = recipes(justfile);
    assert_eq!(found, expected(&[("fetch", "cargo run"), ("fuzz", "scripts/fuzz")]));
    let table =
        "| command | what | runs |\n|---|---|---|\n| `just fuzz` | `[a\\|b]` | `scripts/fuzz` |\n";
    assert_eq!(listed_commands(table), expected(&[("fuzz", "scripts/fuzz")]));
    // A recipe without its row, and a row with another command, are differences.
    assert_ne!(listed_commands(table), found);
    assert_ne!(
        listed_commands(&table.replace("scripts/fuzz", "scripts/fuss")),
        listed_commands(table)
    );
}
