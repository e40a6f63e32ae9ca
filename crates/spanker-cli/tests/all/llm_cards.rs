// SPDX-License-Identifier: Apache-2.0
//! `spanker run` and `verify` on a twin's cards: the text of threads, a card that dies on the way, and one that
//! computes garbage.

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;

use rustix::process::Signal;
use serde_json::Value;

use crate::place::{Place, signal};

/// A twin of four cards, and a model beside it that no number of cards divides.
fn twin() -> (Place, PathBuf) {
    let place = Place::new();
    place.ok("up --cards 4");
    let model = place.outer.path().join("x.gguf");
    let line = "synth llama --layers 4 --hidden 160 --heads 5 --kv-heads 5 --ffn 352 --vocab 300 \
         --context 128 --quant q4_0 --out";
    let output = place.spanker(&format!("{line} {}", model.display())).output().expect("it starts");
    assert!(output.status.success());
    (place, model)
}

/// What a command prints that succeeds, and what it says besides.
fn ok(place: &Place, line: &str) -> (String, String) {
    let output = place.spanker(line).output().expect("the command starts");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{line}: {errors}");
    (String::from_utf8_lossy(&output.stdout).into_owned(), errors)
}

fn json(place: &Place, line: &str) -> Value {
    serde_json::from_str(&ok(place, &format!("{line} --json")).0).expect("JSON")
}

/// Runs a command and holds it once there are so many bytes of text, while something is done to the twin: cards change
/// before the next tokens. What it prints, what it says besides, and its exit code.
fn disturbed(place: &Place, line: &str, bytes: usize, what: &str) -> (String, String, Option<i32>) {
    let mut child = place.spanker(line).spawn().expect("the command starts");
    let mut out = child.stdout.take().expect("a pipe");
    let mut text = vec![0; bytes];
    out.read_exact(&mut text).expect("text");
    let pid = child.id().try_into().expect("a process");
    signal(pid, Signal::STOP);
    place.ok(what);
    signal(pid, Signal::CONT);
    out.read_to_end(&mut text).expect("text");
    let output = child.wait_with_output().expect("an end");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    (String::from_utf8_lossy(&text).into_owned(), errors, output.status.code())
}

fn down(place: &Place) {
    place.ok("down");
    place.assert_nothing_is_left();
}

#[test]
fn run_on_cards_has_the_text_of_threads_and_a_trace_of_every_card() {
    let (place, model) = twin();
    let run = format!("run -m {} -p hello -n 6 --temp 0", model.display());
    let threads = json(&place, &run);
    let trace = place.outer.path().join("t.json");
    let cards =
        json(&place, &format!("{run} --fabric cards --split gather --trace {}", trace.display()));
    assert_eq!((&cards["text"], &cards["tokens"]), (&threads["text"], &threads["tokens"]));
    assert_eq!((&cards["clock"], &cards["cards"]), (&"card".into(), &4.into()));
    assert_eq!(cards["strategy"], "tensor-gather");
    let trace: Value =
        serde_json::from_str(&std::fs::read_to_string(trace).expect("a trace")).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("events");
    for card in 0..4 {
        assert!(events.iter().any(|event| event["ph"] == "X" && event["tid"] == card), "{card}");
    }
    for flags in ["--split pipeline", "--cards 2 -ts 3,1", "--cards 3,2 --split gather"] {
        let split = json(&place, &format!("{run} --fabric cards {flags}"));
        assert_eq!(split["text"], threads["text"], "{flags}");
    }
    let verify = format!("verify -m {} -n 3 -p abc --fabric cards --cards 3", model.display());
    let (text, _) = ok(&place, &verify);
    assert!(text.contains("reduce") && text.ends_with("identical on 3 cards\n"), "{text}");
    down(&place);
}

#[test]
fn card_that_is_killed_in_mid_run_is_named_and_the_text_is_the_same() {
    let (place, model) = twin();
    let run = format!("run -m {} -p hello -n 60 --temp 0 --ignore-eos", model.display());
    let undisturbed = json(&place, &run);
    let line = format!("{run} --fabric cards --split gather --deadline 2s --no-display-prompt");
    let (text, errors, code) = disturbed(&place, &line, 1, "kill 2");
    assert_eq!(code, Some(0), "{errors}");
    assert!(errors.contains("card 2") && errors.contains("going on with cards 0,1,3"), "{errors}");
    let expected = undisturbed["text"].as_str().expect("text");
    assert_eq!(text, format!("{expected}\n"));
    // The report is of the cards that were left: three at most, as the planner likes.
    assert!(errors.contains("card time") && !errors.contains("on 4 cards"), "{errors}");
    // And so is the prediction beside it: steps before the loss are not compared with the layout after it.
    let line = errors.lines().find(|line| line.starts_with("predicted ")).expect("a prediction");
    let off = line.rsplit_once('(').and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
    assert!(off.is_some_and(|off: f64| off < 5.0), "{line}");
    // The dead card is not used again, and whoever asks for it is stderr.
    let output = place.spanker(&format!("{run} --fabric cards")).output().expect("it starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("card 2") && error.contains("--cards 0,1,3"), "{error}");
    let rest = json(&place, &format!("{run} --fabric cards --cards 0,1,3 --split gather"));
    assert_eq!(rest["text"], undisturbed["text"]);
    down(&place);
}

/// A percentage in the first column of a table's line.
fn percent(line: &str) -> f64 {
    let number = line.split_whitespace().next().expect("a column");
    number.parse().unwrap_or_else(|_| panic!("{line}"))
}

#[test]
fn comparison_after_a_loss_has_a_piece_for_each_layout_and_the_recovery_between_them() {
    let (place, model) = twin();
    let trace = place.outer.path().join("t.json");
    let line = format!(
        "run -m {} -p hello -n 60 --temp 0 --ignore-eos --fabric cards --split gather --deadline 2s \
         --no-display-prompt --compare --trace {}",
        model.display(),
        trace.display()
    );
    let (_, errors, code) = disturbed(&place, &line, 2, "kill 2");
    assert!(code == Some(0) && !errors.contains("no comparison"), "{errors}");
    let text = &errors;
    let at = |what: &str| text.find(what).unwrap_or_else(|| panic!("no {what}: {text}"));
    let (first, second, whole) = (
        at("piece 0: tensor-gather on cards 0,1,2,3, from token"),
        at("\npiece 1: "),
        at("\nthe whole run\n"),
    );
    assert!(!text.contains("piece 2: ") && first < second && second < whole, "{text}");
    // Before the loss, nothing but the layout that ran is compared, and the dead card with it.
    let (before, after, whole) = (&text[first..second], &text[second..whole], &text[whole..]);
    assert!(before.contains("card 2") && !before.contains("recovery"), "{before}");
    let gap = before.lines().find(|line| line.trim_start().starts_with(['+', '-']));
    assert!(gap.is_some_and(|line| percent(line).abs() < 2.0), "{before}");
    // After it, cards have the numbers that they had, and all that is not predicted is the recovery.
    let header =
        after.lines().find(|line| line.trim_start().starts_with("piece ")).expect("a table");
    assert!(!header.contains("card 2"), "{after}");
    let row = |table: &str, name: &str| {
        let mut lines = table.lines().map(str::trim_start);
        let line = lines.find_map(|line| Some(line.strip_prefix(name)?.trim_start().to_owned()));
        line.unwrap_or_else(|| panic!("no {name}: {table}"))
    };
    let first_of = |row: String| -> Vec<String> {
        row.split_whitespace().take(2).map(str::to_owned).collect()
    };
    assert_eq!(first_of(row(after, "recovery")), first_of(row(whole, "recovery")), "{text}");
    assert!(row(after, "recovery").starts_with('+'), "{after}");
    assert!(percent(&row(whole, "attributed")) >= 95.0, "{whole}");
    // One file has both, and no card does two things at once in it.
    let file = std::fs::read_to_string(&trace).expect("a trace");
    let both = spanker_plan::read_perfetto(&file).expect("two traces");
    assert_eq!(both.len(), 2);
    for (origin, trace) in &both {
        assert!(trace.overlap().is_none(), "{origin:?}");
        let end = |card: u32| {
            let own = trace.marks.iter().filter(|mark| mark.card == card);
            own.map(|mark| mark.end).fold(0.0, f64::max)
        };
        assert!(end(2) < end(0), "{origin:?}");
    }
    down(&place);
}

#[test]
fn second_card_that_is_killed_leaves_one_that_goes_on_with_the_same_text() {
    let (place, model) = twin();
    let run = format!("run -m {} -p hello -n 60 --temp 0 --ignore-eos", model.display());
    let undisturbed = json(&place, &run);
    let line = format!("{run} --fabric cards --split gather --deadline 2s --no-display-prompt");
    let mut child = place.spanker(&line).spawn().expect("the command starts");
    let pid = child.id().try_into().expect("a process");
    let mut out = child.stdout.take().expect("a pipe");
    let mut errors = BufReader::new(child.stderr.take().expect("a pipe"));
    let kill = |card: u32| {
        signal(pid, Signal::STOP);
        place.ok(&format!("kill {card}"));
        signal(pid, Signal::CONT);
    };
    let mut first = [0];
    out.read_exact(&mut first).expect("text");
    kill(2);
    // The second dies while the model is laid out again, or soon after.
    let mut stderr = String::new();
    while !stderr.contains("going on") {
        assert_ne!(errors.read_line(&mut stderr).expect("text"), 0, "{stderr}");
    }
    kill(0);
    let mut text = first.to_vec();
    out.read_to_end(&mut text).expect("text");
    errors.read_to_string(&mut stderr).expect("text");
    assert!(child.wait().expect("an end").success(), "{stderr}");
    // In a ring of four, cards 1 and 3 reach each other over the others alone.
    let alone =
        stderr.contains("going on with card 1\n") || stderr.contains("going on with card 3\n");
    assert!(stderr.contains("going on with cards 0,1,3\n") && alone, "{stderr}");
    let expected = undisturbed["text"].as_str().expect("text");
    assert_eq!(String::from_utf8_lossy(&text), format!("{expected}\n"));
    assert!(stderr.contains("\none-card on 1 card"), "{stderr}");
    down(&place);
}

#[test]
fn cards_that_are_not_there_are_named() {
    let (place, model) = twin();
    let run = format!("run -m {} -p hello -n 2 --fabric cards", model.display());
    for (flags, code, part) in [
        ("--cards 5", 2, "there are 4 cards"),
        ("--cards 0,7", 2, "no card 7"),
        ("--cards 2 -ts 1,1,1", 2, "3 shares for 2 cards"),
        ("--cards 3,1", 1, "card 3 cannot reach card 1"),
    ] {
        let output = place.spanker(&format!("{run} {flags}")).output().expect("it starts");
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{flags}: {error}");
        assert!(error.contains(part) && output.stdout.is_empty(), "{flags}: {error}");
    }
    down(&place);
    let output = place.spanker(&run).output().expect("it starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("no cards at") && error.contains("hint: "), "{error}");
}

#[test]
fn verify_on_a_garbling_card_fails_for_every_split_and_names_what_differs() {
    let (place, model) = twin();
    let verify = format!("verify -m {} -n 3 -p abc --fabric cards --cards 3", model.display());
    place.ok("garble 1");
    for (split, part) in [
        ("reduce", "is not the sum of its parts in card order: differs first at step 0"),
        ("gather", "differs first at step 0"),
        ("pipeline", "differs first at step 0"),
        ("mixed", "differs first at step 0"),
    ] {
        let output = place.spanker(&format!("{verify} --split {split}")).output().expect("a start");
        let text = String::from_utf8_lossy(&output.stdout);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{split}: {text}");
        assert!(text.contains("FAIL  3 cards") && text.contains(part), "{split}: {text}");
        assert!(error.contains("1 of 1 cases differ"), "{split}: {error}");
    }
    let output =
        place.spanker(&format!("{verify} --split reduce --json")).output().expect("it starts");
    assert_eq!(output.status.code(), Some(1));
    let line: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((&line["holds"], &line["reason"]), (&false.into(), &"sum".into()), "{line}");
    assert!(line["distance"]["greatest"].as_f64().is_some_and(|distance| distance > 0.0), "{line}");
    place.ok("restore");
    let line = json(&place, &format!("{verify} --split reduce"));
    assert_eq!((&line["holds"], &line["reason"]), (&true.into(), &Value::Null), "{line}");
    down(&place);
}

#[test]
fn run_on_a_garbling_card_names_it_and_has_the_text_of_one_card() {
    let (place, model) = twin();
    let run = format!("run -m {} -p hello -n 12 --temp 0 --ignore-eos", model.display());
    let right = json(&place, &run);
    let on_cards = format!("{run} --fabric cards --cards 3");
    let honest = json(&place, &format!("{on_cards} --split gather"));
    assert_eq!(honest["audit"]["found"], Value::Array(Vec::new()), "{honest}");
    assert!(honest["audit"]["checked"].as_u64().is_some_and(|checked| checked >= 36), "{honest}");
    place.ok("garble 2");
    for flags in [
        "--split gather",
        "--split pipeline",
        "--split reduce",
        "--audit 1 --split gather",
        "--split mixed",
    ] {
        let (text, stderr) = ok(&place, &format!("{on_cards} {flags} --json"));
        let line: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!((&line["text"], &line["tokens"]), (&right["text"], &right["tokens"]), "{flags}");
        assert_eq!(
            (&line["cards_lost"], line["audit"]["found"][0]["card"].as_u64()),
            (&1.into(), Some(2))
        );
        assert_eq!(line["audit"]["corrected_from"], Value::Null, "{flags}: {line}");
        assert!(
            stderr.contains("card 2 gives wrong answers")
                && stderr.contains("going on with cards 0,1"),
            "{stderr}"
        );
        // A pipe gets the same text: nothing wrong was written before the card was found.
        let (text, stderr) = ok(&place, &format!("{on_cards} {flags} --no-display-prompt"));
        assert_eq!(text, format!("{}\n", right["text"].as_str().expect("text")), "{flags}");
        assert!(stderr.contains("card 2 was wrong"), "{flags}: {stderr}");
    }
    // Who does not look does not find.
    let line = json(&place, &format!("{on_cards} --split gather --audit 0"));
    assert_eq!((&line["audit"], &line["cards_lost"]), (&Value::Null, &0.into()), "{line}");
    for (flags, part) in [("--audit 2", "not between 0 and 1"), ("--audit x", "not a number")] {
        let output = place.spanker(&format!("{on_cards} {flags}")).output().expect("it starts");
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).contains(part), "{flags}");
    }
    let output = place.spanker(&format!("{run} --audit 0.5")).output().expect("it starts");
    assert_eq!(output.status.code(), Some(2));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("threads of this process are not checked")
    );
    down(&place);
}

#[test]
fn card_that_begins_to_garble_in_mid_run_never_gives_wrong_text_and_success() {
    let (place, model) = twin();
    let run = format!("run -m {} -p hello -n 60 --temp 0 --ignore-eos", model.display());
    let right = json(&place, &run);
    let right = right["text"].as_str().expect("text");
    for flags in ["", "--audit 1"] {
        let line = format!(
            "{run} --fabric cards --cards 3 --split gather --deadline 5s --no-display-prompt {flags}"
        );
        let (text, stderr, code) = disturbed(&place, &line, 1, "garble 2");
        assert!(stderr.contains("card 2 gives wrong answers"), "{stderr}");
        match code {
            Some(0) => assert_eq!(text, format!("{right}\n"), "{flags}"),
            Some(1) => assert!(
                stderr.contains("in the output is wrong") && stderr.contains("--audit 1"),
                "{stderr}"
            ),
            other => panic!("{other:?}: {stderr}"),
        }
        place.ok("restore");
    }
    down(&place);
}
