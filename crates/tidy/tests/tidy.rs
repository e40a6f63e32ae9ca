// SPDX-License-Identifier: Apache-2.0
//! What no compiler checks: licence lines, sizes of files, where unsafe code is, who depends on whom,
//! and that ARCHITECTURE.md tells the truth about it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use tidy::includes_of_other_crates;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace")
}

/// Every file of the project, with its path from the root and its text.
fn files() -> Vec<(String, String)> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry")) {
            let name = entry.file_name();
            if [".git", "target", "shared"].iter().any(|skipped| name == *skipped) {
                continue;
            }
            if entry.file_type().expect("a type").is_dir() {
                walk(&entry.path(), found);
            } else {
                found.push(entry.path());
            }
        }
    }
    let root = root();
    let mut found = Vec::new();
    walk(&root, &mut found);
    found.sort();
    let named = |path: PathBuf| {
        let name = path.strip_prefix(&root).expect("inside").to_string_lossy().into_owned();
        // What is not text is data, which has no rules here.
        fs::read_to_string(&path).ok().map(|text| (name, text))
    };
    found.into_iter().filter_map(named).collect()
}

fn sources() -> Vec<(String, String)> {
    let is_source = |name: &str| {
        let ending = name.rsplit_once('.').map_or("", |(_, ending)| ending);
        ["rs", "c", "cu", "h", "py"].contains(&ending)
            || ((name.starts_with("scripts/") || name.starts_with(".ci/")) && ending != "md")
    };
    files().into_iter().filter(|(name, _)| is_source(name)).collect()
}

fn rust() -> Vec<(String, String)> {
    sources().into_iter().filter(|(name, _)| name.ends_with(".rs")).collect()
}

fn assert_none(what: &str, found: &[String]) {
    assert!(found.is_empty(), "{what}:\n  {}", found.join("\n  "));
}

#[test]
fn every_source_names_its_licence_in_its_first_lines() {
    let missing: Vec<String> = sources()
        .into_iter()
        .filter(|(_, text)| {
            !text.lines().take(2).any(|line| line.contains("SPDX-License-Identifier: Apache-2.0"))
        })
        .map(|(name, _)| name)
        .collect();
    assert_none("no SPDX line", &missing);
}

#[test]
fn every_rust_file_opens_with_what_it_is() {
    let missing: Vec<String> = rust()
        .into_iter()
        .filter(|(_, text)| !text.lines().nth(1).is_some_and(|line| line.starts_with("//! ")))
        .map(|(name, _)| name)
        .collect();
    assert_none("no //! after the licence", &missing);
}

#[test]
fn no_file_has_outgrown_its_room() {
    let long: Vec<String> = rust()
        .into_iter()
        .filter(|(_, text)| text.lines().count() > 800)
        .map(|(name, text)| format!("{name}: {} lines", text.lines().count()))
        .collect();
    assert_none("more than 800 lines", &long);
}

#[test]
fn nothing_is_left_unfinished_or_says_where_it_was_written() {
    // Put together here, so that this file does not contain them.
    let banned = [
        ["to", "do!("].concat(),
        ["unimpl", "emented!("].concat(),
        ["FIX", "ME"].concat(),
        ["XX", "X"].concat(),
        ["/wo", "rk/"].concat(),
        ["/ro", "ot/"].concat(),
        ["/ho", "me/"].concat(),
    ];
    let found: Vec<String> = files()
        .into_iter()
        .filter(|(name, _)| name != "Cargo.lock" && name != "LICENSE")
        .flat_map(|(name, text)| {
            let hit =
                |word: &String| text.contains(word.as_str()).then(|| format!("{name}: {word}"));
            banned.iter().filter_map(hit).collect::<Vec<_>>()
        })
        .collect();
    assert_none("left over", &found);
}

#[test]
fn modules_are_named_files_and_exports_are_named_one_by_one() {
    let found: Vec<String> = rust()
        .into_iter()
        .filter(|(name, text)| {
            let globs = text.lines().any(|line| {
                let line = line.trim_start();
                line.starts_with("pub use ") && line.contains("::*")
            });
            name.ends_with("/mod.rs") || globs
        })
        .map(|(name, _)| name)
        .collect();
    assert_none("mod.rs or a glob export", &found);
}

#[test]
fn tests_are_not_ignored() {
    let ignore = ["#[", "ignore"].concat();
    let found: Vec<String> = rust()
        .into_iter()
        .filter(|(_, text)| text.contains(&ignore))
        .map(|(name, _)| name)
        .collect();
    assert_none("ignored tests", &found);
}

#[test]
fn no_file_includes_one_of_another_crate() {
    let found: Vec<String> =
        rust().iter().flat_map(|(name, text)| includes_of_other_crates(name, text)).collect();
    assert_none("a #[path] that leaves its crate", &found);
}

#[test]
fn include_of_another_crate_is_named_and_one_of_the_same_is_not() {
    let found = |name: &str, path: &str| {
        let text = format!("//! A test.\n\n#[path = \"{path}\"]\nmod support;\n");
        includes_of_other_crates(name, &text)
    };
    let other = "../../spanker-fabric/tests/support/cards.rs";
    let test = "crates/spanker-scheduler/tests/cards.rs";
    assert_eq!(found(test, other), [format!("{test}: {other}")]);
    let (target, crates) = ("fuzz/fuzz_targets/work.rs", "../../crates/spanker-twin/tests/x.rs");
    assert_eq!(found(target, crates), [format!("{target}: {crates}")]);
    assert_eq!(found(test, "../../../../x.rs"), [format!("{test}: ../../../../x.rs")]);
    assert!(found(test, "support/place.rs").is_empty());
    assert!(found("crates/spanker-llm/src/inproc/tests.rs", "../../tests/support/a.rs").is_empty());
}

/// The only files that may contain unsafe code, and what they need it for.
const UNSAFE: &[(&str, &str)] = &[
    ("crates/ggml-spanker/src/bus.rs", "the signal for pages that are gone"),
    ("crates/ggml-spanker/src/file.rs", "a mapped file"),
    ("crates/ggml-spanker/src/file/region.rs", "files that are mapped one after the other"),
    ("crates/ggml-spanker/src/simd/avx2.rs", "vector instructions"),
    ("crates/ggml-spanker/src/simd/avx512.rs", "vector instructions"),
    ("crates/ggml-spanker/src/simd/neon.rs", "vector instructions"),
    ("crates/ggml-spanker/tests/guarded.rs", "a mapped file that ends"),
    ("crates/spanker-fabric/src/block.rs", "memory in huge pages"),
    ("crates/spanker-cuda/src/card.rs", "calls of the driver"),
    ("crates/spanker-cuda/src/compile.rs", "calls of the compiler at run time"),
    ("crates/spanker-cuda/src/discover.rs", "calls of the driver"),
    ("crates/spanker-cuda/src/load.rs", "libraries that may be missing"),
    ("crates/spanker-cuda/src/model/device.rs", "launches of kernels"),
    ("crates/spanker-cuda/src/model/emulation.rs", "kernels that the host's compiler has made"),
    ("crates/spanker-cuda/src/nccl.rs", "calls of NCCL"),
    ("crates/spanker-cuda/src/nccl/library.rs", "functions of NCCL, found at run time"),
    ("crates/spanker-cuda/src/probe.rs", "launches of kernels"),
    ("crates/spanker-cuda/src/reduce.rs", "launches of kernels"),
    ("crates/spanker-fabric-mpi/src/native.rs", "MPI's collectives"),
    ("crates/spanker-fabric-mpi/src/plain.rs", "a loop in C"),
    ("crates/spanker-fabric-mpi/src/raw.rs", "MPI's messages"),
    ("crates/spanker-fabric-mpi/src/ulfm.rs", "functions of MPI that may be missing"),
    ("crates/spanker-fabric-mpi/src/window.rs", "MPI's one-sided operations"),
    ("crates/spanker-fabric-tcp/tests/strangers.rs", "an allocator that counts"),
    ("crates/spanker-reduce/src/kernel.rs", "vector instructions"),
    ("crates/spanker-llm/tests/host_memory.rs", "an allocator that counts"),
    ("crates/spanker-reduce/src/fused.rs", "pieces of buffers for several threads"),
    ("crates/spanker-reduce/src/team.rs", "work that is borrowed by threads"),
    ("crates/spanker-reduce/tests/team.rs", "an allocator that counts"),
    ("crates/spanker-runtime/src/transport.rs", "the ioctl"),
    ("crates/spanker-steal/tests/claim_allocates_nothing.rs", "an allocator that counts"),
    ("crates/spanker-twin/src/shared.rs", "memory that two processes map"),
];

#[test]
fn unsafe_code_is_only_where_it_is_known_to_be() {
    let word = ["uns", "afe"].concat();
    let uses = |text: &str| {
        text.lines().any(|line| {
            let code = line.split("//").next().unwrap_or("");
            [" {", " fn", " impl", " trait"]
                .iter()
                .any(|next| code.contains(&format!("{word}{next}")))
        })
    };
    let mut found: Vec<String> =
        rust().into_iter().filter(|(_, text)| uses(text)).map(|(name, _)| name).collect();
    // A folder and the file of its name are walked in another order than their names have.
    found.sort();
    let known: Vec<String> = {
        let mut known: Vec<String> = UNSAFE.iter().map(|(name, _)| (*name).to_owned()).collect();
        known.sort();
        known
    };
    assert_eq!(found, known);
}

/// A crate as its manifest and its sources show it.
#[derive(Debug, PartialEq, Eq)]
struct Crate {
    pure: bool,
    uses: Vec<String>,
}

/// The crates in `crates/`, by name.
fn crates() -> BTreeMap<String, Crate> {
    let folder = root().join("crates");
    let names: Vec<String> = fs::read_dir(&folder)
        .expect("crates")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    names
        .iter()
        .map(|name| {
            let manifest = fs::read_to_string(folder.join(name).join("Cargo.toml")).expect(name);
            let section = manifest.split("\n[").find(|part| part.starts_with("dependencies]"));
            let mut uses: Vec<String> = section
                .unwrap_or("")
                .lines()
                .filter_map(|line| line.split(['.', ' ', '=']).next())
                .filter(|dependency| names.iter().any(|name| name == dependency))
                .map(str::to_owned)
                .collect();
            uses.sort();
            (name.clone(), Crate { pure: folder.join(name).join("clippy.toml").exists(), uses })
        })
        .collect()
}

#[test]
fn architecture_names_exactly_the_crates_that_exist_and_what_they_use() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let rows = text.lines().filter(|line| line.starts_with("| `")).map(|line| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let in_ticks = |cell: &str| -> Vec<String> {
            cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
        };
        let mut uses = in_ticks(cells[3]);
        uses.sort();
        (in_ticks(cells[0]).remove(0), Crate { pure: cells[1] == "pure", uses })
    });
    assert_eq!(rows.collect::<BTreeMap<_, _>>(), crates());
}

#[test]
fn every_crate_takes_the_workspace_lints_and_pure_ones_forbid_effects() {
    for (name, krate) in crates() {
        let folder = root().join("crates").join(&name);
        let manifest = fs::read_to_string(folder.join("Cargo.toml")).expect("a manifest");
        assert!(manifest.contains("[lints]\nworkspace = true"), "{name} has lints of its own");
        if krate.pure {
            let library = fs::read_to_string(folder.join("src/lib.rs")).expect("a library");
            let forbidden = ["#![forbid(uns", "afe_code)]"].concat();
            assert!(library.contains(&forbidden), "{name} is pure and does not forbid it");
            let clippy = fs::read_to_string(folder.join("clippy.toml")).expect("clippy.toml");
            for banned in ["Instant::now", "thread::sleep", "env::var"] {
                assert!(clippy.contains(banned), "{name} is pure and may call {banned}");
            }
            let all = crates();
            for used in &krate.uses {
                assert!(all[used].pure, "{name} is pure and uses {used}, which is not");
            }
        }
    }
}

#[test]
fn documents_do_not_point_to_files_that_do_not_exist() {
    let mut broken = Vec::new();
    for (name, text) in files().into_iter().filter(|(name, _)| name.ends_with(".md")) {
        let folder = root().join(&name).parent().expect("a folder").to_path_buf();
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = target.split('#').next().unwrap_or("");
            let external = target.contains("://") || file.is_empty();
            if !external && !folder.join(file).exists() {
                broken.push(format!("{name}: {target}"));
            }
        }
    }
    assert_none("broken links", &broken);
}
