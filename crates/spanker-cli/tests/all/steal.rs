// SPDX-License-Identifier: Apache-2.0
//! `spanker steal` as a user runs it: bars in virtual time, faults on real threads, JSON, exit codes. No real time
//! is asserted.

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::place::{Place, SOON, within};
use crate::scratch::{Scratch, number};

/// What a command prints as JSON, whatever its exit code.
fn object(line: &str, code: i32) -> Value {
    read(line, code, &Scratch::new(&[]).run(&format!("steal {line} --json")))
}

fn read(line: &str, code: i32, output: &Output) -> Value {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{line}: {errors}");
    assert!(!errors.contains("panicked"), "{line}: {errors}");
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(text.lines().count(), 1, "{line}: {text}");
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{line}: {error}: {text}"))
}

fn list<'a>(value: &'a Value, field: &str) -> &'a Vec<Value> {
    value[field].as_array().unwrap_or_else(|| panic!("{field} in {value}"))
}

/// A job that is done: nothing is lost, done twice or wrong.
fn done(line: &str) -> Value {
    whole(line, object(line, 0))
}

fn whole(line: &str, run: Value) -> Value {
    for field in ["lost", "duplicated", "wrong_bytes"] {
        assert_eq!(run[field], json!(0), "{line}: {field} in {run}");
    }
    assert_eq!(run["done"], run["items"], "{line}: {run}");
    assert_eq!(run["error"], Value::Null, "{line}: {run}");
    let items: u64 = list(&run, "backends").iter().map(|b| b["items"].as_u64().unwrap()).sum();
    assert_eq!(json!(items), run["items"], "{line}: {run}");
    run
}

/// Efficiency, and how many times that of the origin's rule it is, in virtual time.
fn figures(line: &str) -> (f64, f64) {
    let run = done(&format!("{line} --simulate"));
    assert_eq!(run["simulated"], json!(true), "{line}");
    let efficiency = number(&run, "efficiency");
    assert!(efficiency <= 1.0, "{line}: {efficiency}");
    (efficiency, efficiency / number(&run, "origin_efficiency"))
}

/// The kinds of what went wrong with a backend.
fn kinds(run: &Value, backend: &str) -> Vec<String> {
    let of = |failure: &&Value| failure["backend"] == backend;
    let kind = |failure: &Value| failure["kind"].as_str().expect("a kind").to_owned();
    list(run, "failures").iter().filter(of).map(kind).collect()
}

#[test]
fn unequal_backends_in_virtual_time_are_used_to_the_full() {
    let (efficiency, better) = figures("--backends emul:1x,emul:2x,emul:4x,emul:8x");
    assert!(efficiency >= 0.98 && better >= 1.8, "{efficiency}, {better}x");
    let (_, better) = figures("--backends emul:1x,emul:20x*7");
    assert!(better >= 4.0, "{better}x");
    let (efficiency, better) = figures("--backends emul:1x*8");
    assert!(efficiency >= 0.99 && better >= 0.99, "{efficiency}, {better}x");
    let (efficiency, _) = figures("--backends emul:1x*64 --items 4M");
    assert!(efficiency >= 0.98, "{efficiency}");
    let (efficiency, _) = figures("--backends cpu:2,emul:4x,emul:1x --told");
    assert!(efficiency >= 0.98, "{efficiency}");
}

#[test]
fn backends_with_troubles_in_virtual_time_cost_little() {
    let backends = "--backends emul:1x,emul:2x,emul:4x,emul:8x";
    for trouble in [
        "--kill emul3@0.3s",
        "--slow emul3@0.3s",
        "--slow emul2@0.1s:10x",
        "--hot 0.9..1.0*10",
        "--hang emul2@0.2s+100ms",
        "--kill emul0@0.1s --kill emul1@0.2s --hang emul2@0.3s",
    ] {
        let (efficiency, _) = figures(&format!("{backends} {trouble}"));
        assert!(efficiency >= 0.97, "{trouble}: {efficiency}");
    }
    let run = done(&format!("{backends} --simulate --corrupt emul2@0.2s"));
    assert!(kinds(&run, "emul2").contains(&"wrong bytes".to_owned()), "{run}");
    assert!(number(&run, "redone") > 0.0 && number(&run, "audited") > 0.0, "{run}");
}

#[test]
fn the_same_seed_in_virtual_time_gives_the_same_run() {
    let line =
        "steal --backends cpu:1,emul:2x*3 --simulate --jitter 0.2 --audit 0.05 --kill emul1@0.2s";
    let scratch = Scratch::new(&[]);
    let run = |seed: u64, json: &str| scratch.text(&format!("{line} --seed {seed} {json}"));
    assert_eq!(run(7, "--json"), run(7, "--json"));
    assert_eq!(run(7, ""), run(7, ""));
    assert_ne!(run(7, "--json"), run(8, "--json"));
}

#[test]
fn backends_that_fail_on_real_threads_lose_nothing_and_are_named() {
    let line = "--backends cpu:1,emul:2x,emul:4x --items 100k --no-origin";
    let killed = done(&format!("{line} --kill emul1@10ms"));
    assert!(kinds(&killed, "emul1").contains(&"failed".to_owned()), "{killed}");
    assert_eq!(killed["backends"][2]["benched"], json!("killed"), "{killed}");
    assert_eq!(killed["origin_efficiency"], Value::Null);
    let hung = done(&format!("{line} --hang emul1@10ms"));
    assert!(kinds(&hung, "emul1").contains(&"expired".to_owned()), "{hung}");
    let slow = done(&format!("{line} --slow emul1*100000@10ms"));
    assert!(kinds(&slow, "emul1").contains(&"expired".to_owned()), "{slow}");
    let corrupt = done(&format!("{line} --corrupt emul1@10ms"));
    assert!(kinds(&corrupt, "emul1").contains(&"wrong bytes".to_owned()), "{corrupt}");
    assert!(number(&corrupt, "redone") > 0.0, "{corrupt}");
    let lanes = done("--backends cpu:3,emul:2x --items 100k --no-origin --hang cpu0@10ms");
    assert!(kinds(&lanes, "cpu0").iter().filter(|kind| *kind == "expired").count() >= 3, "{lanes}");
    let first = done(&format!("{line} --kill cpu0 --checksums"));
    assert_eq!(first["backends"][0]["items"], json!(0), "{first}");
}

#[test]
fn the_origins_rule_on_real_threads_loses_what_a_dead_backend_held() {
    let run = done("--backends emul:1x*3 --items 6000 --kill emul1@5ms");
    assert_eq!(run["origin_lost"], json!(500), "{run}");
    assert!(number(&run, "origin_efficiency") > 0.0, "{run}");
    let run = done("--backends emul:1x*3 --items 6000 --hang emul1@5ms --slow emul2");
    assert_eq!(run["origin_lost"], json!(500), "{run}");
}

#[test]
fn hashes_on_threads_and_emulated_backends_are_the_same_bytes() {
    let run = done("--backends cpu:2,emul:3x --job hash --items 200k --hot 0..0.1*2 --audit 0.1");
    assert_eq!((&run["job"], &run["simulated"]), (&json!("hash"), &json!(false)));
    assert!(number(&run, "audited") > 0.0 && number(&run, "launches") > 0.0, "{run}");
    let names: Vec<_> = list(&run, "backends").iter().map(|b| b["name"].clone()).collect();
    assert_eq!(names, ["cpu0", "emul0"]);
}

#[test]
fn products_on_threads_and_emulated_backends_are_the_same_bytes() {
    let line = "--backends cpu:1,emul:2x --job matmul --items 500 --k 512 --n 40";
    let run = done(&format!("{line} --audit 0.2"));
    assert_eq!((&run["job"], &run["items"]), (&json!("matmul"), &json!(500)), "{run}");
    assert!(number(&run, "efficiency") > 0.0 && number(&run, "audited") > 0.0, "{run}");
    assert_eq!((&run["answers"], &run["origin_wrong_bytes"]), (&Value::Null, &json!(0)), "{run}");
    let simulated = done(&format!("{line} --simulate"));
    assert_eq!(simulated["simulated"], json!(true));
    let rows = done("--backends emul:1x*2 --job matmul --k 256 --n 3 --no-origin");
    assert_eq!(rows["items"], json!(4096));
    let line = "--backends emul:1x --job matmul --items 50 --k 256 --n 3 --no-origin";
    let wrong = object(&format!("{line} --corrupt emul0 --audit 0"), 1);
    assert!(number(&wrong, "wrong_bytes") > 0.0, "{wrong}");
}

#[test]
fn products_on_cards_lose_nothing_when_a_card_is_killed_and_errors_name_the_card() {
    let place = Place::new();
    place.ok("up --cards 3");
    let line = "--backends cpu:1,card:0,card:2 --job matmul --k 1024 --n 256";
    let output = |line: &str| place.spanker(&format!("steal {line} --json")).output().expect("it");
    let short = format!("{line} --items 300 --audit 1");
    let run = whole(&short, read(&short, 0, &output(&short)));
    let card = |place: usize| run["backends"][place]["card"].clone();
    assert_eq!([card(0), card(1), card(2)], [Value::Null, json!(0), json!(2)], "{run}");
    let killed = format!("{line} --items 32k --no-origin --kill card0@5ms");
    let run = whole(&killed, read(&killed, 0, &output(&killed)));
    assert_eq!(run["backends"][1]["benched"], json!("killed"), "{run}");
    let lost = format!("{line} --items 300 --kill cpu0 --kill card0 --kill card1");
    let errors = String::from_utf8_lossy(&output(&lost).stderr).into_owned();
    assert!(errors.contains("card1: killed") && errors.contains("'spanker cards'"), "{errors}");
    // For real, once the job has begun: everybody is slow, so that there is time for it.
    let slow =
        format!("{line} --items 8k --no-origin --slow cpu0*40 --slow card0*40 --slow card1*40");
    let child = place.spanker(&format!("steal {slow} --json")).spawn().expect("it starts");
    within(2 * SOON, || has_thread(child.id(), "card1").then_some(()));
    place.ok("kill 2");
    let run = whole(&slow, read(&slow, 0, &child.wait_with_output().expect("an end")));
    let benched = run["backends"][2]["benched"].as_str().expect("a dead card");
    assert!(benched.contains("card 2"), "{run}");
    for (backends, words) in [
        ("card:3", ["card:3: there is no card 3", "hint: there are 0 to 2"]),
        ("cpu:1,card:2", ["card 2 at ", "hint: "]),
    ] {
        let line = format!("steal --backends {backends} --job matmul --items 64");
        let output = place.spanker(&line).output().expect("it starts");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert!(words.iter().all(|words| errors.contains(words)), "{errors}");
    }
    place.ok("down");
    place.assert_nothing_is_left();
    let output = place.spanker("steal --backends card:0 --job matmul").output().expect("it starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("no cards at") && errors.contains("hint: "), "{errors}");
}

/// Whether a process has a thread of such a name.
fn has_thread(pid: u32, name: &str) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("a process").flatten();
    let mut names = threads.map(|thread| std::fs::read_to_string(thread.path().join("comm")));
    names.any(|found| found.is_ok_and(|found| found.contains(name)))
}

/// A small model.
const MODEL: &str = "synth llama --layers 2 --hidden 160 --heads 5 --kv-heads 5 --ffn 352 --vocab 300 \
     --context 128 --quant q4_0 --out";

#[test]
fn prompts_on_two_copies_and_a_card_are_answered_in_order_with_the_same_tokens() {
    let place = Place::new();
    place.ok("up --cards 1");
    let folder = place.outer.path();
    let (model, file) = (folder.join("x.gguf"), folder.join("prompts.txt"));
    let run = |line: &str| place.spanker(line).output().expect("it starts");
    assert!(run(&format!("{MODEL} {}", model.display())).status.success());
    std::fs::write(&file, "hello\n\nwhat is this\r\n a third one\n").expect("a file");
    let line = format!("--job prompts -m {}", model.display());
    let mine = format!("{line} --prompts {} --tokens 5", file.display());
    let checked = format!("{mine} --backends cpu:1,cpu:1,card:0 --check");
    let all = whole(&checked, read(&checked, 0, &run(&format!("steal {checked} --json"))));
    let answers = list(&all, "answers");
    let prompts: Vec<_> = answers.iter().map(|answer| answer["prompt"].clone()).collect();
    assert_eq!(prompts, ["hello", "what is this", " a third one"]);
    assert!(answers.iter().all(|answer| number(answer, "tokens") <= 5.0), "{all}");
    assert_eq!(all["origin_efficiency"], Value::Null);
    let alone = format!("{mine} --backends card:0");
    let alone = read(&alone, 0, &run(&format!("steal {alone} --json")));
    assert_eq!((&alone["wrong_bytes"], &alone["answers"]), (&Value::Null, &all["answers"]));
    place.ok("down");
    place.assert_nothing_is_left();
    let output = run(&format!("steal {line} --backends cpu:2,cpu:1 --tokens 2"));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("duplicated 0; not compared\n"), "{text}");
    assert_eq!(text.lines().filter(|line| line.contains(" -> ")).count(), 12, "{text}");
    std::fs::write(&file, "x".repeat(500)).expect("a file");
    for (line, code, words) in [
        (format!("{mine} --backends cpu:1"), 1, "do not fit a context of 128"),
        ("--job prompts -m none.gguf --backends cpu:1".to_owned(), 1, "none.gguf"),
        (format!("{line} --prompts none.txt --backends cpu:1"), 1, "none.txt"),
        (format!("{line} --backends cpu:1,emul:2x"), 2, "emul:2x"),
        (format!("{line} --backends cpu:1 --tokens 0"), 2, "--tokens 0"),
        (format!("{line} --backends cpu:1 --items 3"), 2, "--items"),
        (format!("{line} --backends cpu:1 --simulate"), 2, "--simulate"),
    ] {
        let output = run(&format!("steal {line}"));
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{line}: {errors}");
        assert!(errors.contains(words), "{line}: {errors}");
    }
}

#[test]
fn wrong_bytes_that_nobody_looks_for_are_found_in_the_end() {
    let run = object("--backends emul:1x*2 --items 2000 --corrupt emul1 --audit 0 --no-origin", 1);
    assert!(number(&run, "wrong_bytes") > 0.0, "{run}");
    assert_eq!((&run["lost"], &run["failures"]), (&json!(0), &json!([])), "{run}");
}

#[test]
fn a_job_whose_backends_all_die_tells_what_was_done() {
    for mode in ["", "--simulate"] {
        let line = format!("--backends emul:1x,emul:2x --items 100k {mode}");
        let run = object(&format!("{line} --kill emul0@30ms --kill emul1@50ms"), 1);
        let (done, lost) = (number(&run, "done"), number(&run, "lost"));
        assert!(done > 0.0 && lost > 0.0 && done + lost == 1e5, "{run}");
        assert!(run["error"].is_string(), "{run}");
        for field in ["efficiency", "ideal_seconds"] {
            assert_eq!(run[field], Value::Null, "{field} in {run}");
        }
        assert_eq!((&run["wrong_bytes"], &run["duplicated"]), (&json!(0), &json!(0)), "{run}");
        let missing: f64 = list(&run, "missing")
            .iter()
            .map(|r| r[1].as_f64().unwrap() - r[0].as_f64().unwrap())
            .sum();
        assert_eq!(missing, lost, "{run}");
        assert!(!list(&run, "failures").is_empty(), "{run}");
    }
}

#[test]
fn a_job_whose_backends_all_hang_names_them() {
    for mode in ["", "--simulate"] {
        let line = format!("--backends emul:1x,emul:2x --items 100k --patience 0.3s {mode}");
        let run = object(&format!("{line} --hang emul0@30ms --hang emul1@50ms"), 1);
        for backend in ["emul0", "emul1"] {
            assert!(kinds(&run, backend).contains(&"expired".to_owned()), "{backend} in {run}");
        }
        assert!(run["error"].as_str().is_some_and(|e| e.contains("no backend")), "{run}");
    }
}

/// Waits until a process keeps interrupts for itself.
fn wait_for_mask(pid: u32) {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
        let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
        if mask & 1 << (Signal::INT.as_raw() - 1) != 0 {
            return;
        }
        assert!(Instant::now() < end, "interrupts still end it");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_interrupt_tells_what_was_done_and_ends_with_130() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_spanker"));
    command.args(["steal", "--backends", "emul:1x*2", "--items", "10M", "--json"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    wait_for_mask(child.id());
    kill_process(Pid::from_child(&child), Signal::INT).expect("a signal");
    let output = child.wait_with_output().expect("an end");
    assert_eq!(output.status.code(), Some(130));
    let run: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(number(&run, "done") < 1e7, "{run}");
    assert_eq!(number(&run, "done") + number(&run, "lost"), 1e7);
    assert_eq!(run["wrong_bytes"], json!(0));
    assert!(run["error"].as_str().is_some_and(|error| error.starts_with("cancelled")), "{run}");
}

#[test]
fn tables_show_backends_incidents_and_figures() {
    let scratch = Scratch::new(&[]);
    let line = "steal --backends emul:1x,emul:2x,emul:4x,emul:8x --simulate --hang emul3@0.3s";
    let text = scratch.text(line);
    for words in [
        "# sleep, 1000000 items over 4 backends in virtual time",
        "mean chunk",
        "emul3 expired",
        "no answer",
        "efficiency 0.9",
        "origin's rule 0.",
        "items lost): ",
        "done 1000000 of 1000000, lost 0, duplicated 0; every byte as expected",
    ] {
        assert!(text.contains(words), "'{words}' in {text}");
    }
    let help = scratch.text("steal --help");
    for words in ["Examples:", "--kill", "real bytes", "emul:20x*7"] {
        assert!(help.contains(words), "'{words}' in {help}");
    }
}

#[test]
fn requests_that_make_no_sense_are_refused_with_their_value() {
    let scratch = Scratch::new(&[]);
    assert!(scratch.error(2, "steal").contains("--backends"));
    for (flags, words) in [
        ("--backends ,", "expected backends"),
        ("--backends cpu:0", "'cpu:0'"),
        ("--backends cpu:x", "'cpu:x'"),
        ("--backends emul:0x", "'emul:0x'"),
        ("--backends emul:-1x", "'emul:-1x'"),
        ("--backends emul:NaN", "'emul:NaN'"),
        ("--backends emul:1e300x", "'emul:1e300x'"),
        ("--backends emul:1x*129", "at most 128"),
        ("--backends emul:1x*64,emul:1x*65", "at most 128"),
        ("--backends gpu:1", "GPUs do --job matmul"),
        ("--backends card:0", "card:0"),
        ("--items 0", "'0'"),
        ("--items=-1", "'-1'"),
        ("--items 1e3", "'1e3'"),
        ("--items 99999999999999999999999", "'99999999999999999999999'"),
        ("--items 999999999999999999", "999999999999999999 items"),
        ("--items 100000G", "MiB"),
        ("--job nothing", "nothing"),
        ("--job hash --item-time 1us", "--item-time"),
        ("--job matmul --item-time 1us", "--item-time"),
        ("--job matmul --hot 0..1*2", "--hot"),
        ("--job matmul --k 100", "--k 100"),
        ("--job matmul --k 0", "--k 0"),
        ("--job matmul --n 0", "--n 0"),
        ("--job matmul --n 99999999999", "MiB"),
        ("--job matmul --n 9999999999999999999", "--n 9999999999999999999"),
        ("--job matmul --items 9999G", "MiB"),
        ("--job matmul --check", "--check is for --job prompts"),
        ("--job matmul --simulate --backends cpu:1,card:0", "card:0"),
        ("--job matmul --backends card:0,card:0", "twice"),
        ("--job prompts --backends cpu:1", "-m MODEL"),
        ("--k 256", "--k is for --job matmul"),
        ("--item-time 0", "--item-time"),
        ("--item-time=-1us", "-1us"),
        ("--item-time NaN", "NaN"),
        ("--kill emul7@1s", "there are emul0, emul1"),
        ("--kill emul0@later", "later"),
        ("--hang emul0@1s+x", "'x'"),
        ("--slow emul0*0.1", "'0.1'"),
        ("--slow emul0*NaN@1s", "'NaN'"),
        ("--slow emul0*1e12", "'1e12'"),
        ("--corrupt @1s", "'@1s'"),
        ("--hot 0.5", "'0.5'"),
        ("--hot 0..2*2", "'0..2*2'"),
        ("--hot 0..1*NaN", "'NaN'"),
        ("--audit 2", "'2'"),
        ("--audit NaN", "'NaN'"),
        ("--lease 0", "--lease"),
        ("--cap 0", "--cap"),
        ("--patience 0", "--patience"),
        ("--launch 1000s", "--launch"),
        ("--seed x", "x"),
        ("--jitter 0.5", "--simulate"),
        ("--simulate --jitter 7", "'7'"),
    ] {
        let backends = if flags.contains("--backends") { "" } else { "--backends emul:1x*2" };
        let error = scratch.error(2, &format!("steal {backends} {flags}"));
        assert!(error.contains(words), "{flags}: {error}");
    }
}
