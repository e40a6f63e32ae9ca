// SPDX-License-Identifier: Apache-2.0
//! `spanker compare` as a user runs it: the table, JSON, files that are no traces, exit codes.

use serde_json::Value;
use spanker_plan::{Activity, Label, Mark, Origin, Parts, Trace, perfetto_of_both};

use crate::scratch::{Scratch, number};

/// Two cards, each of which has half of a product, and then they exchange. Card 1's memory takes `slow` times as
/// long.
fn trace(tokens: u32, slow: f64, predicted: bool) -> Trace {
    let (mut marks, mut ends, mut clock) = (Vec::new(), Vec::new(), 0.0);
    for token in 0..tokens {
        let label = |activity| Label { activity, layer: 0, token };
        let last = clock + 1e-3 * slow.max(1.0);
        for (card, memory) in [(0, 1e-3), (1, 1e-3 * slow)] {
            let (ready, end) = (clock + memory, last + 0.1e-3);
            let work = Parts { memory, ..Parts::default() };
            let link = Parts { latency: 0.1e-3, waiting: last - ready, ..Parts::default() };
            for (op, activity, start, end, parts) in
                [(0, Activity::Up, clock, ready, work), (1, Activity::Exchange, ready, end, link)]
            {
                let parts = predicted.then_some(parts);
                marks.push(Mark { card, label: label(activity), op, ops: 1, start, end, parts });
            }
        }
        clock = last + 0.1e-3;
        ends.push(clock);
    }
    Trace { cards: 2, tokens: ends, marks, incidents: vec![], events: 0 }
}

fn scratch() -> Scratch {
    let (predicted, measured) = (trace(4, 1.0, true), trace(5, 1.2, false));
    Scratch::new(&[
        ("predicted.json", &predicted.to_perfetto(Origin::Predicted)),
        ("measured.json", &measured.to_perfetto(Origin::Measured)),
        ("both.json", &perfetto_of_both(&predicted, &measured)),
    ])
}

#[test]
fn compare_shows_a_slow_card_as_its_memory_and_as_waiting_on_the_other() {
    let text = scratch().text("compare predicted.json measured.json");
    let expected = "                           whole      card 0      card 1
predicted                 4.4 ms      4.4 ms      4.4 ms
measured                  5.2 ms      5.2 ms      5.2 ms
gap                      +800 us     +800 us     +800 us
                        +18.18 %    +18.18 %    +18.18 %
  memory                 +800 us           -     +800 us
  compute                      -           -           -
  link latency                 -           -           -
  link bandwidth               -           -           -
  waiting for card 1           -     +800 us           -
  host                         -           -           -
  not in the program           -           -           -
  unexplained                  -           -           -
attributed               100.0 %     100.0 %     100.0 %

4 steps: predicted 4.4 ms, measured 5.2 ms (+18.18 %)
largest gap: token 0, +200 us (+18.18 %)
left out: token 4: only the measured trace has it
";
    let largest = |text: &str| -> String {
        let lines = text.lines().filter(|line| !line.starts_with("largest gap"));
        lines.collect::<Vec<_>>().join("\n")
    };
    assert_eq!(largest(&text), largest(expected), "{text}");
    assert!(text.contains("largest gap: token ") && text.contains("+200 us (+18.18 %)"), "{text}");
}

#[test]
fn compare_json_has_causes_that_add_up_for_the_whole_every_card_and_every_step() {
    let scratch = scratch();
    let answer = scratch.json("compare predicted.json measured.json");
    let list = |value: &Value, field: &str| value[field].as_array().unwrap().clone();
    let mut gaps = vec![answer["whole"].clone()];
    gaps.extend(list(&answer, "cards"));
    for step in list(&answer, "steps") {
        gaps.extend(list(&step, "cards"));
        gaps.push(step);
    }
    assert_eq!(gaps.len(), 1 + 2 + 4 * 3);
    for gap in &gaps {
        let causes = gap["causes"].as_object().unwrap();
        let waiting = causes["waiting_for_card_ms"].as_object().unwrap();
        let all = causes.values().chain(waiting.values()).filter_map(Value::as_f64);
        let (sum, seconds) = (all.sum::<f64>(), number(gap, "gap_ms"));
        let difference = number(gap, "measured_ms") - number(gap, "predicted_ms");
        assert!((sum - seconds).abs() < 1e-9 && (difference - seconds).abs() < 1e-9, "{gap}");
        assert!((number(gap, "attributed_percent") - 100.0).abs() < 1e-6, "{gap}");
    }
    assert!((number(&answer["whole"], "gap_percent") - 100.0 * 0.2 / 1.1).abs() < 1e-6);
    let waited = &answer["cards"][0]["causes"]["waiting_for_card_ms"];
    assert!((number(waited, "1") - 0.8).abs() < 1e-6, "{answer}");
    assert_eq!(answer["version"], 1);
    assert_eq!(answer["left_out"][0]["token"], 4);
    // One file with both is the same.
    assert_eq!(scratch.json("compare both.json both.json"), answer);
}

#[test]
fn compare_of_some_tokens_counts_these_alone() {
    let scratch = scratch();
    let answer = scratch.json("compare predicted.json measured.json --tokens 1..2");
    assert_eq!(answer["steps"].as_array().unwrap().len(), 2);
    assert!((number(&answer["whole"], "predicted_ms") - 2.2).abs() < 1e-6, "{answer}");
    assert_eq!(answer["left_out"].as_array().unwrap().len(), 0);
    for (line, said) in [
        ("--tokens 2..1", "runs backwards"),
        ("--tokens few", "expected a token, or a range as in 8..15"),
        ("--tokens 70..80", "--tokens 70..80: no step to compare: the traces have none"),
        ("--tokens 4", "only the measured trace has it"),
    ] {
        let error = scratch.error(2, &format!("compare predicted.json measured.json {line}"));
        assert!(error.contains(said), "{error}");
    }
    assert!(scratch.error(2, "compare predicted.json").contains("<MEASURED>"));
}

#[test]
fn compare_refuses_what_is_no_trace_or_the_wrong_one_and_names_the_file() {
    let scratch = scratch();
    let none = Trace { marks: vec![], ..trace(1, 1.0, true) };
    scratch.put("none.json", none.to_perfetto(Origin::Predicted).as_bytes());
    let mut three = trace(4, 1.0, false);
    three.cards = 3;
    three.marks.iter_mut().for_each(|mark| mark.card += 1);
    scratch.put("others.json", three.to_perfetto(Origin::Measured).as_bytes());
    scratch.put("text.json", b"hello");
    scratch.put(
        "chrome.json",
        b"{\"traceEvents\":[{\"ph\":\"X\",\"name\":\"paint\",\"ts\":1,\"dur\":2}]}",
    );
    for (files, said) in [
        ("missing.json measured.json", "cannot open missing.json"),
        ("text.json measured.json", "text.json: not a trace: expected value at line 1"),
        ("predicted.json chrome.json", "chrome.json: not a trace of this version of spanker"),
        ("none.json measured.json", "the predicted trace has no marks"),
        (
            "measured.json predicted.json",
            "measured.json: no predicted trace in it, only a measured one",
        ),
        ("predicted.json others.json", "predicted for cards 0..1, measured on cards 1..2"),
    ] {
        let error = scratch.error(1, &format!("compare {files}"));
        assert!(error.contains(said), "'{said}' in '{error}'");
    }
}

#[test]
fn two_simulations_can_be_compared() {
    let scratch = scratch();
    scratch.put("slow.json", trace(4, 1.5, true).to_perfetto(Origin::Predicted).as_bytes());
    let answer = scratch.json("compare predicted.json slow.json");
    assert!((number(&answer["whole"]["causes"], "memory_ms") - 2.0).abs() < 1e-6, "{answer}");
}
