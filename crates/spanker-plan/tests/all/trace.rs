// SPDX-License-Identifier: Apache-2.0
//! Traces as files: what is written is read back, slices touch and never overlap, and what is no trace is
//! refused.

use proptest::prelude::*;
use serde_json::{Value, json};
use spanker_plan::{
    Activity, Incident, Label, Mark, Origin, Parts, Trace, perfetto_of_both, read_perfetto,
};

fn trace(marks: Vec<Mark>) -> Trace {
    let incidents = vec![Incident { at: 1.5e-3, what: "card 1 \"dies\"\n".into() }];
    Trace { cards: 3, tokens: vec![1e-3, 2e-3], marks, incidents, events: 17 }
}

fn mark(card: u32, op: u32, start: f64, end: f64) -> Mark {
    let label = Label { activity: Activity::Handoff, layer: 2, token: 7 };
    Mark { card, label, op, ops: 1, start, end, parts: None }
}

/// Start and duration of every slice of a card in nanoseconds, as written.
fn slices(text: &str, card: u64) -> Vec<(i64, i64)> {
    let value: Value = serde_json::from_str(text).unwrap();
    let events = value["traceEvents"].as_array().unwrap();
    let own = |event: &&Value| event["ph"] == "X" && event["tid"] == card;
    let ns = |value: &Value| (value.as_f64().unwrap() * 1e3).round() as i64;
    let mut slices: Vec<(i64, i64)> =
        events.iter().filter(own).map(|event| (ns(&event["ts"]), ns(&event["dur"]))).collect();
    slices.sort_unstable();
    slices
}

fn overlap(slices: &[(i64, i64)]) -> bool {
    slices.windows(2).any(|pair| pair[0].0 + pair[0].1 > pair[1].0)
}

#[test]
fn both_traces_are_in_one_file_as_two_processes() {
    let parts = Parts { memory: 1e-4, waiting: 2.5e-7, ..Parts::default() };
    let predicted = trace(vec![Mark { parts: Some(parts), ..mark(1, 3, 0.0, 1e-4) }]);
    let measured = trace(vec![mark(1, 3, 1e-5, 2e-4), mark(2, 4, 0.0, 1e-4)]);
    let text = perfetto_of_both(&predicted, &measured);
    let value: Value = serde_json::from_str(&text).unwrap();
    let events = value["traceEvents"].as_array().unwrap();
    for (pid, name, count) in [(1, "predicted", 1), (2, "measured", 2)] {
        let of = |event: &&Value| event["pid"] == pid;
        let names =
            |event: &Value| event["name"] == "process_name" && event["args"]["name"] == name;
        assert!(events.iter().filter(of).any(names), "{text}");
        assert_eq!(events.iter().filter(of).filter(|event| event["ph"] == "X").count(), count);
    }
    let slice = events.iter().find(|event| event["ph"] == "X").unwrap();
    assert_eq!(
        slice["args"],
        json!({ "layer": 2, "token": 7, "op": 3, "ops": 1,
        "parts_us": { "memory": 100.0, "waiting": 0.25 } })
    );
    let read = read_perfetto(&text).unwrap();
    assert_eq!(read, [(Origin::Predicted, predicted), (Origin::Measured, measured)]);
}

#[test]
fn a_file_without_the_wanted_trace_names_the_one_that_it_has() {
    let text = trace(vec![mark(0, 0, 0.0, 1e-3)]).to_perfetto(Origin::Measured);
    let error = Trace::from_perfetto(&text, Origin::Predicted).unwrap_err().to_string();
    assert_eq!(error, "no predicted trace in it, only a measured one");
    assert_eq!(Trace::from_perfetto(&text, Origin::Measured).unwrap().marks.len(), 1);
}

#[test]
fn durations_that_are_rounded_by_themselves_overlap_and_ends_do_not() {
    // Each lasts 0.6 ns more than 100 ns; rounded by itself, a duration is 0.4 ns too long.
    let times: Vec<f64> = (0..50).map(|index| f64::from(index) * 100.6e-9).collect();
    let marks: Vec<Mark> = times.windows(2).map(|pair| mark(0, 0, pair[0], pair[1])).collect();
    let text = trace(marks.clone()).to_perfetto(Origin::Measured);
    assert!(!overlap(&slices(&text, 0)));
    assert_eq!(Trace::from_perfetto(&text, Origin::Measured).unwrap().overlap(), None);
    // The same with the fault.
    let mut value: Value = serde_json::from_str(&text).unwrap();
    for event in value["traceEvents"].as_array_mut().unwrap() {
        if event["ph"] == "X" {
            event["dur"] = json!(0.101);
        }
    }
    let rounded = value.to_string();
    assert!(overlap(&slices(&rounded, 0)));
    let read = Trace::from_perfetto(&rounded, Origin::Measured).unwrap();
    let (before, after) = read.overlap().unwrap();
    assert!(before.end > after.start);
}

#[test]
fn neighbours_that_differ_by_less_than_the_grid_do_not_overlap_in_a_file() {
    let boundary = 100.5e-9;
    let marks = vec![mark(0, 0, 0.0, boundary), mark(0, 1, boundary - 1e-17, 200e-9)];
    let text = trace(marks.clone()).to_perfetto(Origin::Measured);
    assert!(!overlap(&slices(&text, 0)), "{text}");
    // A true overlap of one nanosecond stays to be seen.
    let marks = vec![mark(0, 0, 0.0, 101e-9), mark(0, 1, 100e-9, 200e-9)];
    assert!(overlap(&slices(&trace(marks).to_perfetto(Origin::Measured), 0)));
}

#[test]
fn what_is_no_trace_is_refused_with_the_place() {
    let good = trace(vec![mark(0, 0, 0.0, 1e-3)]).to_perfetto(Origin::Measured);
    let swapped = |from: &str, to: &str| {
        assert!(good.contains(from), "{from} in {good}");
        good.replace(from, to)
    };
    for (text, said) in [
        (String::new(), "not a trace: EOF"),
        ("[]".into(), "not a trace: invalid"),
        ("{}".into(), "traceEvents"),
        ("{\"traceEvents\":7}".into(), "not a trace: invalid type"),
        ("{\"traceEvents\":[]}".into(), "otherData has no spanker_trace"),
        ("[".repeat(100_000), "not a trace"),
        (swapped("\"spanker_trace\":1", "\"spanker_trace\":2"), "its version is 2, not 1"),
        (swapped("\"measured\":{", "\"else\":{"), "neither a predicted nor a measured"),
        (swapped("\"cards\":3", "\"cards\":18446744073709551615"), "more than 4096"),
        (swapped("\"cards\":3", "\"cards\":-3"), "not a trace"),
        (swapped("\"tokens_us\":[1000.000", "\"tokens_us\":[-1"), "tokens_us is -1"),
        (
            swapped(
                "\"pid\":2,\"tid\":0,\"name\":\"hand-off\"",
                "\"pid\":1,\"tid\":0,\"name\":\"hand-off\"",
            ),
            "process 1",
        ),
        (
            swapped("\"tid\":0,\"name\":\"hand-off\"", "\"tid\":3,\"name\":\"hand-off\""),
            "tid is 3, and there are 3 cards",
        ),
        (swapped("hand-off", "lunch"), "event 4 ('lunch'): no such activity"),
        (swapped("\"dur\":1000.000", "\"dur\":1e300"), "dur is"),
        (swapped("\"dur\":1000.000", "\"dur\":-1"), "dur is -1"),
        (swapped(",\"dur\":1000.000", ""), "it has no dur"),
        (swapped("\"ops\":1", "\"ops\":4000000000"), "at most 16777216"),
        (swapped("\"op\":0,", ""), "it has no args.op"),
        (swapped("\"ops\":1", "\"ops\":1,\"parts_us\":{\"memory\":1e200}"), "a part is"),
        (swapped("\"ops\":1", "\"ops\":-1"), "not a trace"),
    ] {
        let error = read_perfetto(&text).unwrap_err().to_string();
        assert!(error.contains(said), "'{said}' in '{error}'");
    }
}

fn any_trace() -> impl Strategy<Value = Trace> {
    let lengths = prop::collection::vec((0.0f64..1e-5, 0.0f64..1e-3, any::<bool>()), 0..40);
    let parts = prop::array::uniform6(prop_oneof![Just(0.0), 0.0f64..1e-2]);
    let origin = prop_oneof![Just(0.0), 0.0f64..1e5];
    let what = prop::collection::vec(any::<String>(), 0..3);
    let tokens = prop::collection::vec(0.0f64..1e3, 0..5);
    (prop::collection::vec(lengths, 1..4), parts, origin, what, tokens, any::<u64>()).prop_map(
        |(
            cards,
            [memory, compute, fixed, latency, bandwidth, waiting],
            origin,
            what,
            tokens,
            events,
        )| {
            let parts = Parts { memory, compute, fixed, latency, bandwidth, waiting };
            let mut marks = Vec::new();
            for (card, lengths) in cards.iter().enumerate() {
                let mut at = origin;
                for (op, &(gap, length, predicted)) in lengths.iter().enumerate() {
                    let start = if predicted { at } else { at + gap };
                    at = start + length;
                    let parts = predicted.then_some(parts);
                    marks.push(Mark { parts, ..mark(card as u32, op as u32, start, at) });
                }
            }
            let incidents = what.into_iter().map(|what| Incident { at: origin, what }).collect();
            Trace { cards: cards.len(), tokens, marks, incidents, events }
        },
    )
}

fn near(a: f64, b: f64, grid: f64) -> bool {
    (a - b).abs() <= 0.51 * grid + 1e-15 * a.abs()
}

proptest! {
    #[test]
    fn any_trace_is_read_back_as_it_was_written_to_the_nanosecond(trace in any_trace()) {
        let text = trace.to_perfetto(Origin::Predicted);
        let read = Trace::from_perfetto(&text, Origin::Predicted).unwrap();
        prop_assert_eq!(read.cards, trace.cards);
        prop_assert_eq!(read.events, trace.events);
        prop_assert_eq!(read.overlap(), None);
        prop_assert_eq!(read.marks.len(), trace.marks.len());
        for (a, b) in trace.marks.iter().zip(&read.marks) {
            // Neighbours that were computed on two ways are moved to touch.
            prop_assert!(near(a.start, b.start, 2e-9) && near(a.end, b.end, 2e-9), "{a:?} {b:?}");
            prop_assert_eq!((a.card, a.label, a.op, a.ops), (b.card, b.label, b.op, b.ops));
            prop_assert_eq!(a.parts.is_some(), b.parts.is_some());
            if let Some((a, b)) = a.parts.zip(b.parts) {
                for (a, b) in [(a.memory, b.memory), (a.compute, b.compute), (a.fixed, b.fixed),
                    (a.latency, b.latency), (a.bandwidth, b.bandwidth), (a.waiting, b.waiting)] {
                    prop_assert!(near(a, b, 1e-12), "{a} {b}");
                }
            }
        }
        for (a, b) in trace.incidents.iter().zip(&read.incidents) {
            prop_assert!(a.what == b.what && near(a.at, b.at, 1e-9));
        }
        prop_assert!(trace.tokens.iter().zip(&read.tokens).all(|(a, b)| near(*a, *b, 1e-9)));
        // Once on the grid, nothing changes any more.
        prop_assert_eq!(&read.to_perfetto(Origin::Predicted), &text);
        for card in 0..trace.cards as u64 {
            prop_assert!(!overlap(&slices(&text, card)));
        }
    }

    #[test]
    fn damaged_files_are_refused_or_read_and_never_panic(
        trace in any_trace(), at in any::<prop::sample::Index>(), byte in 32u8..127,
    ) {
        let mut text = trace.to_perfetto(Origin::Measured).into_bytes();
        let at = at.index(text.len());
        text[at] = byte;
        let _ = read_perfetto(&String::from_utf8_lossy(&text));
        let _ = read_perfetto(&String::from_utf8_lossy(&text[..at]));
    }
}
