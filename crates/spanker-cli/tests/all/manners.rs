// SPDX-License-Identifier: Apache-2.0
//! What every command has in common: names that mean one thing, files that are kept, exit codes that survive.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::scratch::{Scratch, number};

/// The length of the file that `spanker fetch smollm2-135m` gets: what has it counts as fetched.
const FETCHED_BYTES: u64 = 98_362_432;

fn spanker(scratch: &Scratch, line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_spanker"));
    command.args(line.split_whitespace()).current_dir(scratch.path());
    command.env("SPANKER_CACHE", scratch.path().join("cache")).env_remove("SPANKER_DEV_DIR");
    command.env("XDG_RUNTIME_DIR", "/nowhere");
    command
}

fn run(scratch: &Scratch, line: &str) -> Output {
    spanker(scratch, line).output().expect("the command starts")
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A scratch whose cache has a small model under the name of one that can be fetched.
fn with_fetched(quant: &str) -> Scratch {
    let scratch = Scratch::new(&[]);
    fs::create_dir_all(scratch.path().join("cache/models")).expect("a folder");
    let shape = "--hidden 64 --heads 2 --kv-heads 1 --ffn 96 --layers 2 --vocab 300 --context 64";
    let path = "cache/models/smollm2-135m.gguf";
    scratch.text(&format!("synth llama {shape} --quant {quant} --out {path}"));
    let file = File::options().write(true).open(scratch.path().join(path)).expect("a file");
    file.set_len(FETCHED_BYTES).expect("a sparse file");
    scratch
}

#[test]
fn plan_of_a_name_is_for_the_fetched_file_that_a_run_of_that_name_uses() {
    let scratch = with_fetched("q4_1");
    let output = run(&scratch, "plan smollm2-135m --cards 2 --context 64 --out plan.json");
    let said = errors(&output);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("note: ") && said.contains("smollm2-135m.gguf (q4_1)"), "{said}");
    let run_line = "run -m smollm2-135m -p hello -n 2 --temp 0 --plan plan.json";
    let output = run(&scratch, run_line);
    assert!(output.status.success(), "{}", errors(&output));
    // With a type of weights it is the built-in shape, and the run says what differs.
    let output = run(&scratch, "plan smollm2-135m --quant q4_0 --context 64 --out plan.json");
    assert!(output.status.success() && !errors(&output).contains("note: smollm2"));
    let output = run(&scratch, run_line);
    assert_eq!(output.status.code(), Some(1));
    let said = errors(&output);
    assert!(said.contains("plan: made for smollm2-135m with layers 30, the file has 2"), "{said}");
}

#[test]
fn plan_in_another_type_of_weights_names_the_tensor_and_both_types() {
    let scratch = with_fetched("q4_1");
    let line = "plan cache/models/smollm2-135m.gguf --quant q4_0 --context 64 --out plan.json";
    assert!(run(&scratch, line).status.success());
    let output = run(&scratch, "run -m smollm2-135m -p hello -n 2 --plan plan.json");
    let said = errors(&output);
    let wanted = "plan: made for weights of type q4_0 in blk.0.attn_q, the file has q4_1";
    assert!(said.contains(wanted), "{said}");
}

#[test]
fn plan_of_a_name_without_a_fetched_file_is_for_the_built_in_shape() {
    let scratch = Scratch::new(&[]);
    let output = run(&scratch, "plan smollm2-135m --json");
    assert!(output.status.success() && output.stderr.is_empty(), "{}", errors(&output));
    let file = scratch.path().join("cache/models/smollm2-135m.gguf");
    fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
    fs::write(&file, "GGUF").expect("a file");
    let output = run(&scratch, "plan smollm2-135m");
    assert_eq!(output.status.code(), Some(1));
    assert!(errors(&output).contains("4 bytes, expected 98362432"), "{}", errors(&output));
}

/// Runs a command whose output nobody reads.
fn unread(scratch: &Scratch, line: &str) -> Output {
    let mut command = spanker(scratch, line);
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command starts");
    drop(child.stdout.take());
    child.wait_with_output().expect("it ends")
}

#[test]
fn closed_pipe_loses_no_file() {
    let scratch =
        Scratch::new(&[("samples.csv", "ranks,bytes,microseconds\n2,8192,6.8\n4,8192,13.5\n")]);
    for (line, file) in [
        ("plan tinyllama-1.1b --cards 2 --explain --out plan.json", "plan.json"),
        ("simulate plan.json --trace trace.json", "trace.json"),
        ("fit link --samples samples.csv --out link.toml", "link.toml"),
        ("bench all-reduce --cards 2 --sizes 1K,2K,4K --budget 1 --csv ar.csv", "ar.csv"),
    ] {
        let output = unread(&scratch, line);
        assert!(output.status.success(), "{line}: {}", errors(&output));
        assert!(scratch.path().join(file).exists(), "{line}: no {file}");
    }
    assert_eq!(scratch.read("ar.csv").lines().count(), 4, "{}", scratch.read("ar.csv"));
}

#[test]
fn failure_stays_a_failure_when_nobody_reads() {
    let scratch = Scratch::new(&[]);
    assert!(run(&scratch, "plan llama-2-7b --cards 2 --out two.json").status.success());
    for (line, code) in [
        ("simulate two.json --fail card1@10ms", 1),
        ("simulate two.json --fail card1@10ms --json", 1),
        ("plan llama-2-70b --cards 8", 3),
        ("plan llama-2-70b --cards 8 --json", 3),
        ("simulate two.json --tokens 0", 2),
    ] {
        let output = unread(&scratch, line);
        assert_eq!(output.status.code(), Some(code), "{line}: {}", errors(&output));
    }
    // Nor when nobody reads what is wrong.
    let mut command = spanker(&scratch, "plan none.gguf");
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command starts");
    drop((child.stdout.take(), child.stderr.take()));
    assert_eq!(child.wait().expect("it ends").code(), Some(1));
}

#[test]
fn output_that_cannot_be_taken_for_want_of_room_is_a_failure() {
    let scratch = Scratch::new(&[]);
    let full = File::options().write(true).open("/dev/full").expect("/dev/full");
    let status = spanker(&scratch, "cards --mock 2").stdout(full).stderr(Stdio::null()).status();
    assert_eq!(status.expect("it ends").code(), Some(1));
}

#[test]
fn paths_of_results_are_refused_before_the_work_begins() {
    let scratch = Scratch::new(&[("taken/x", "")]);
    assert!(run(&scratch, "plan tinyllama-1.1b --cards 2 --out plan.json").status.success());
    for line in [
        "plan tinyllama-1.1b --out {}",
        "simulate plan.json --trace {}",
        // The samples and the model are not even looked at.
        "fit link --samples none.csv --out {}",
        "fit card --samples none.csv --out {}",
        "probe --fabric inproc -m none.gguf --save {}",
        "bench all-reduce --csv {}",
        "synth llama --layers 1 --out {}",
    ] {
        for path in ["none/here.json", "taken", "/proc/here.json"] {
            let line = line.replace("{}", path);
            let output = run(&scratch, &line);
            assert_eq!(output.status.code(), Some(2), "{line}: {}", errors(&output));
            assert!(errors(&output).contains(path), "{line}: {}", errors(&output));
            assert!(output.stdout.is_empty(), "{line} printed before it failed");
        }
    }
    assert_eq!(scratch.names(), ["plan.json", "taken"]);
}

#[test]
fn bench_table_is_fitted_and_predicts() {
    let scratch = Scratch::new(&[]);
    for cards in [2, 4] {
        let line = format!("bench all-reduce --algorithm ring --cards {cards} --sizes 4K,64K,1M");
        let output = run(&scratch, &format!("{line} --budget 20 --csv ar.csv"));
        assert!(output.status.success(), "{}", errors(&output));
    }
    let table = scratch.read("ar.csv");
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!((lines[0], lines.len()), ("ranks,bytes,microseconds", 7), "{table}");
    assert!(lines[1].starts_with("2,4096,") && lines[6].starts_with("4,1048576,"), "{table}");
    scratch.text("fit link --samples ar.csv --out link.toml");
    // How close that is depends on what else the machine does.
    let predicted = scratch.json("predict all-reduce --link link.toml --ranks 4 --bytes 1M");
    assert!(number(&predicted, "microseconds") > 0.0, "{predicted}");
    // What is no table is not added to, and other collectives have none.
    scratch.put("other.csv", b"a,b\n1,2\n");
    for line in ["bench all-reduce --csv other.csv", "bench all-gather --csv ar.csv"] {
        assert_eq!(run(&scratch, line).status.code(), Some(2), "{line}");
    }
    assert_eq!(
        (scratch.read("other.csv"), scratch.read("ar.csv")),
        ("a,b\n1,2\n".to_owned(), table)
    );
    assert!(Path::new(&scratch.path().join("link.toml")).exists());
}

#[test]
fn model_file_that_is_cut_short_under_a_run_is_an_error_that_names_it() {
    let scratch = Scratch::new(&[]);
    let shape = "--hidden 512 --heads 8 --kv-heads 8 --ffn 1536 --layers 4 --vocab 512";
    scratch.text(&format!("synth llama {shape} --context 4096 --quant q4_0 --out big.gguf"));
    let mut command = spanker(&scratch, "run -m big.gguf -p hello -n 4000 --ignore-eos");
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command starts");
    // When there is text beyond the prompt, the run is under way.
    let mut text = [0; 16];
    child.stdout.as_mut().expect("a pipe").read_exact(&mut text).expect("text");
    let file = File::options().write(true).open(scratch.path().join("big.gguf")).expect("the file");
    file.set_len(4096).expect("cut short");
    let output = child.wait_with_output().expect("it ends");
    let said = errors(&output);
    assert_eq!(output.status.code(), Some(1), "{:?}: {said}", output.status);
    assert!(said.contains("error: big.gguf: cut short or unreadable"), "{said}");
}

#[test]
fn version_has_the_commit_and_what_was_compiled_in() {
    let scratch = Scratch::new(&[]);
    let text = scratch.text("--version");
    assert!(text.starts_with("spanker 0.") && text.contains("cuda"), "{text}");
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let head = Command::new("git").args(["-C", root, "rev-parse", "--short=12", "HEAD"]).output();
    let commit = match head {
        Ok(head) if head.status.success() => String::from_utf8(head.stdout).expect("text"),
        _ => "unknown".to_owned(),
    };
    assert!(text.contains(&format!("(commit {}, ", commit.trim())), "{text} for {commit}");
}

#[test]
fn completions_and_manual_pages_have_every_command() {
    let scratch = Scratch::new(&[]);
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let text = scratch.text(&format!("completions {shell}"));
        assert!(text.contains("reduce-scatter") || text.contains("simulate"), "{shell}: {text}");
    }
    assert!(scratch.error(2, "completions tcsh").contains("tcsh"));
    assert!(scratch.text("man").contains(".TH spanker 1"));
    scratch.text("man --out pages");
    for name in ["spanker.1", "spanker-plan.1", "spanker-fit-link.1", "spanker-man.1"] {
        assert!(scratch.path().join("pages").join(name).exists(), "{name}");
    }
    scratch.put("taken", b"");
    assert!(scratch.error(2, "man --out taken").contains("taken"));
}

#[test]
fn quiet_says_nothing_but_results_and_colours_are_as_asked_for() {
    let scratch = with_fetched("q4_1");
    let line = "plan smollm2-135m --context 64 --cards 2";
    let loud = run(&scratch, line);
    assert!(errors(&loud).starts_with("note: smollm2-135m is the fetched"), "{}", errors(&loud));
    let quiet = run(&scratch, &format!("{line} --quiet"));
    assert_eq!((errors(&quiet).as_str(), &quiet.stdout), ("", &loud.stdout));
    let verbose = run(&scratch, &format!("--verbose {line}"));
    assert!(errors(&verbose).contains("note: took "), "{}", errors(&verbose));
    assert_eq!(run(&scratch, &format!("{line} --quiet --verbose")).status.code(), Some(2));
    let red = "\u{1b}[1;31merror:\u{1b}[0m";
    for (flags, colour) in [("--color always", true), ("--color never", false), ("", false)] {
        let output = run(&scratch, &format!("{flags} plan none.gguf"));
        assert_eq!(errors(&output).contains(red), colour, "{flags}: {}", errors(&output));
        let output = run(&scratch, &format!("plan --nonsense {flags}"));
        assert_eq!(errors(&output).contains('\u{1b}'), colour, "{flags}: {}", errors(&output));
    }
    assert_eq!(run(&scratch, "--color pink cards --mock 2").status.code(), Some(2));
}

#[test]
fn models_are_listed_with_their_files_and_what_fits() {
    let scratch = with_fetched("q4_1");
    let list = |line: &str| -> serde_json::Value {
        let output = run(&scratch, &format!("models {line} --json"));
        assert!(output.status.success(), "{}", errors(&output));
        serde_json::from_slice(&output.stdout).expect("JSON")
    };
    let find = |report: &serde_json::Value, name: &str| {
        let all = report["models"].as_array().expect("a list");
        all.iter().find(|model| model["name"] == name).cloned().expect(name)
    };
    let plain = list("");
    let fetched = find(&plain, "smollm2-135m");
    assert_eq!((&fetched["kind"], &fetched["quant"]), (&"file".into(), &"q4_1".into()));
    assert!(fetched["path"].as_str().is_some_and(|path| path.ends_with("smollm2-135m.gguf")));
    let shape = find(&plain, "llama-2-70b");
    assert_eq!((&shape["kind"], &shape["fits"]), (&"built-in".into(), &serde_json::Value::Null));
    // As the plan has it.
    let cards = list("--fit --profile rev-a --cards 4");
    assert_eq!(find(&cards, "llama-2-70b")["fits"], false);
    assert!(cards["source"].as_str().is_some_and(|source| source.contains("4 x rev-a")), "{cards}");
    let plan = scratch.json("plan tinyllama-1.1b --quant q4_0 --cards 4");
    assert_eq!(
        number(&find(&cards, "tinyllama-1.1b"), "predicted_tokens_per_second"),
        number(&plan["run"], "tokens_per_second")
    );
    let here = list("--fit");
    assert!(number(&find(&here, "smollm2-135m"), "predicted_tokens_per_second") > 1.0, "{here}");
    assert!(
        here["source"].as_str().is_some_and(|source| source.contains("measured now")),
        "{here}"
    );
    let text = String::from_utf8(run(&scratch, "models --fit").stdout).expect("text");
    assert!(text.starts_with("name ") && text.contains("tokens/s"), "{text}");
    assert_eq!(run(&scratch, "models --cards 4").status.code(), Some(2));
}
