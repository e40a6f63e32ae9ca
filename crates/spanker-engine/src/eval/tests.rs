// SPDX-License-Identifier: Apache-2.0
//! Items, scores and ledgers: what is scored, whatever cards there are, and runs that go on.

use std::fs;

use super::*;
use crate::testing;
use crate::{Host, Wish};

fn items(text: &str) -> Result<Vec<EvalItem>> {
    read_items(Path::new("x.jsonl"), text)
}

#[test]
fn items_come_in_several_forms_and_lines_that_are_none_are_named() {
    let text = "{\"context\": \"a\", \"continuation\": \" b\"}\n\n\
        {\"request\": {\"context\": \"c\", \"continuation\": \" d\"}, \"doc\": 1}\n\
        {\"prompt\": \"e\", \"completion\": \"f\"}\n{\"text\": \"whole\"}\n";
    let found = items(text).expect("items");
    let texts: Vec<(usize, &str, &str)> =
        found.iter().map(|item| (item.line, &item.context[..], &item.continuation[..])).collect();
    assert_eq!(texts, [(1, "a", " b"), (3, "c", " d"), (4, "e", "f"), (5, "", "whole")]);
    for (text, expected) in [
        ("", "it has no items"),
        ("{\"text\": \"a\"}\n[1]", "line 2: expected 'context' and 'continuation'"),
        ("{\"text\": 1}", "line 1: expected"),
        ("{\"context\": \"a\", \"continuation\": \"\"}", "line 1: 1 bytes: expected 1 to"),
        ("{\"text\": \"a\"}\nnone", "line 2: it is not JSON"),
    ] {
        let error = items(text).expect_err(text).to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn cost_is_the_logarithm_of_the_probability() {
    let (bits, first) = cost(&[0.0, 0.0, 0.0, 0.0], 0);
    assert!((bits - 2.0).abs() < 1e-12 && first);
    assert!(!cost(&[0.0, 0.0], 1).1, "the lowest token is the first choice among equals");
    let (bits, first) = cost(&[1000.0, 1000.0 - std::f32::consts::LN_2 * 8.0], 1);
    assert!((bits - 8.0).abs() < 0.02 && !first, "{bits}");
    assert_eq!(cost(&[0.0], 1).0, f64::INFINITY);
    assert!(cost(&[f32::NAN, 0.0], 1).0.is_nan());
}

/// Scores by a model on so many cards with so much room.
fn scores(model: &Model, cards: usize, context: usize, items: &[EvalItem]) -> Vec<Result<Score>> {
    let host = Host::threads(2, cards).expect("a host");
    let request = crate::request(context, 32, 16, 4);
    let wish = Wish { split: (cards > 1).then_some(crate::Split::Gather), shares: None };
    let plan = host.plan(model, &request, &wish).expect("a plan");
    let mut engine = Engine::load(&host, model, plan).expect("an engine");
    items.iter().map(|item| score(&mut engine, item)).collect()
}

#[test]
fn scores_are_the_same_on_any_number_of_cards_and_contexts_are_cut_at_their_beginning() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = testing::model(folder.path());
    let long = "abcdefgh".repeat(20);
    let text = format!(
        "{{\"context\": \"Hello\", \"continuation\": \" you\"}}\n{{\"context\": \"{long}\", \"continuation\": \"xy\"}}\n\
         {{\"text\": \"all of it\"}}\n"
    );
    let items = items(&text).expect("items");
    let one: Vec<Score> = scores(&model, 1, 64, &items).into_iter().map(Result::unwrap).collect();
    let three: Vec<Score> = scores(&model, 3, 64, &items).into_iter().map(Result::unwrap).collect();
    assert_eq!(one, three);
    assert_eq!((one[0].bytes, one[0].cut, one[2].cut), (4, 0, 0));
    // A beginning, a space and the text: all but 64 that are read are left out.
    assert!(one[1].cut > 90 && one[1].tokens == 2, "{:?}", one[1]);
    assert!(one.iter().all(|score| score.bits > 0.0 && score.bits.is_finite()));
    let room = scores(&model, 1, 1024, &items[1..2]).remove(0).expect("a score");
    assert_eq!(room.cut, 0);
    assert_ne!(room.bits, one[1].bits);
    let error = scores(&model, 1, 2, &items[..1]).remove(0).expect_err("no room").to_string();
    assert!(error.contains("line 1: ") && error.contains("room for 2"), "{error}");
}

#[test]
fn ledger_goes_on_after_a_line_that_is_cut_and_refuses_other_evaluations() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("out.jsonl");
    let of = EvalOf { model: "m".into(), items: "i".into(), context: 8, kv: "f16".into() };
    let score = |line| Score { line, bits: 1.0 / 3.0, bytes: 3, tokens: 1, correct: true, cut: 0 };
    let (mut ledger, found) = Ledger::open(&path, &of).expect("a ledger");
    assert!(found.is_empty());
    ledger.keep(&score(1)).expect("a line");
    ledger.keep(&score(2)).expect("a line");
    drop(ledger);
    let whole = fs::read(&path).expect("a file");
    for length in 0..=whole.len() {
        fs::write(&path, &whole[..length]).expect("a file");
        let (mut ledger, found) = Ledger::open(&path, &of).expect("a ledger");
        assert!(found.len() <= 2 && found.iter().zip(1..).all(|(one, line)| *one == score(line)));
        for line in found.len() + 1..=2 {
            ledger.keep(&score(line)).expect("a line");
        }
        assert_eq!(fs::read(&path).expect("a file"), whole, "{length}");
    }
    let other = EvalOf { kv: "q8_0".into(), ..of.clone() };
    let error = Ledger::open(&path, &other).expect_err("another").to_string();
    assert!(error.contains("kv is f16, not q8_0"), "{error}");
    for text in ["a file of somebody's", "a file of somebody's\n", "{\"of\": 1}\n", "{}\nx"] {
        fs::write(&path, text).expect("a file");
        let error = Ledger::open(&path, &of).expect_err(text).to_string();
        assert!(error.contains("it is no evaluation"), "{error}");
        assert_eq!(fs::read_to_string(&path).expect("a file"), text, "it stays as it is");
    }
}
