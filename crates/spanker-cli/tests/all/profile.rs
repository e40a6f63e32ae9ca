// SPDX-License-Identifier: Apache-2.0
//! Profiles of this machine as a user meets them: measured by `probe`, kept for `run`, saved, shown and planned with.
//! How fast anything is, is not tested.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

/// A folder with a model and a cache of its own.
struct Place(TempDir);

impl Place {
    fn new() -> Place {
        let place = Place(tempfile::tempdir().expect("a folder"));
        place.text(
            "synth llama --layers 2 --hidden 128 --heads 4 --kv-heads 2 --ffn 256 --vocab 300 \
             --context 256 --quant q4_0 --out x.gguf",
        );
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run_with(&self, cache: &Path, line: &str) -> Output {
        Command::new(env!("CARGO_BIN_EXE_spanker"))
            .args(line.split_whitespace())
            .current_dir(self.0.path())
            .env("SPANKER_CACHE", cache)
            .output()
            .expect("the command starts")
    }

    fn run(&self, line: &str) -> Output {
        self.run_with(&self.path("cache"), line)
    }

    fn text(&self, line: &str) -> String {
        let output = self.run(line);
        assert!(output.status.success(), "{line}: {}", errors(&output));
        String::from_utf8(output.stdout).expect("text")
    }

    fn json(&self, line: &str) -> Value {
        serde_json::from_str(&self.text(&format!("{line} --json"))).expect("JSON")
    }

    /// The profiles that are kept.
    fn kept(&self) -> Vec<PathBuf> {
        let Ok(entries) = self.path("cache/profiles").read_dir() else { return Vec::new() };
        entries.map(|entry| entry.expect("an entry").path()).collect()
    }
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn probe_of_threads_shows_saves_and_keeps_a_profile_that_other_commands_take() {
    let place = Place::new();
    let text = place.text("probe --fabric inproc -m x.gguf --threads 2 --cards 2 --save here.toml");
    for part in ["product", "q4_0", "attention", "besides its operators", "(shared-memory)"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(place.kept().len(), 1);
    let file = fs::read_to_string(place.path("here.toml")).expect("a profile");
    let shown = place.text("profiles ./here.toml --toml");
    assert_eq!(shown.trim_end(), file.trim_end());
    let summary = place.text("profiles ./here.toml");
    assert!(summary.contains("by operator") && summary.contains("shared-memory"), "{summary}");
    let json = place.json("probe --fabric inproc -m x.gguf --threads 1");
    let operators = json["compute"]["operators"].as_array().expect("operators");
    assert!(operators.iter().all(|one| one["rate"].as_f64() > Some(0.0)), "{json}");
    let plan = place.json("plan x.gguf --profile ./here.toml --cards 2 --context 64");
    assert!(plan.to_string().contains("this-machine"), "{plan}");
}

#[test]
fn run_keeps_what_it_measured_and_replaces_a_broken_file_with_a_note() {
    let place = Place::new();
    let line = "run -m x.gguf -p hello -n 4 --temp 0 --threads 1 --json";
    assert!(place.run(line).status.success());
    let kept = place.kept();
    assert_eq!(kept.len(), 1);
    let first = fs::read_to_string(&kept[0]).expect("a profile");
    let again = place.run(line);
    assert!(again.status.success() && errors(&again).is_empty(), "{}", errors(&again));
    assert_eq!(fs::read_to_string(&kept[0]).expect("a profile"), first);
    for broken in ["nonsense", &first[..first.len() / 2], &first.replacen('#', "# old", 1)] {
        fs::write(&kept[0], broken).expect("a file");
        let output = place.run(line);
        assert!(output.status.success(), "{}", errors(&output));
        assert!(errors(&output).contains("measuring again"), "{}", errors(&output));
        let text = fs::read_to_string(&kept[0]).expect("a profile");
        assert_eq!(text.lines().next(), first.lines().next());
    }
    // Another number of threads is another machine.
    place.text("run -m x.gguf -p hello -n 4 --temp 0 --threads 2 --json");
    assert_eq!(place.kept().len(), 2);
}

#[test]
fn cache_that_cannot_be_written_is_no_error() {
    let place = Place::new();
    fs::write(place.path("file"), "").expect("a file");
    let line = "run -m x.gguf -p hello -n 2 --temp 0 --threads 1 --json";
    let output = place.run_with(&place.path("file"), line);
    assert!(output.status.success() && errors(&output).is_empty(), "{}", errors(&output));
}

#[test]
fn flags_of_other_fabrics_are_usage_errors_that_name_them() {
    let place = Place::new();
    for (line, named) in [
        ("probe --save here.toml", "--save is for"),
        ("probe -m x.gguf", "--model and --threads are for"),
        ("probe --fabric cuda --threads 2", "--model and --threads are for"),
        ("probe --fabric inproc --gpus 2", "for --fabric cuda"),
        ("probe --fabric inproc -m x.gguf --cards 0,1", "--cards takes a number"),
        ("profiles --toml", "<NAME>"),
    ] {
        let output = place.run(line);
        assert_eq!(output.status.code(), Some(2), "{line}: {}", errors(&output));
        assert!(errors(&output).contains(named), "{line}: {}", errors(&output));
    }
}
