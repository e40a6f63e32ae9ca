// SPDX-License-Identifier: Apache-2.0
//! Traces for the page: whole numbers, cards with the same marks once, and no more detail than there are bytes for.
//!
//! Detail goes in this order: later tokens, operators within a phase of a layer, phases of a layer, layers. Both traces
//! are always cut in the same way, so that they can be laid beside each other.

use std::collections::HashSet;

use serde_json::{Value, json};
use spanker_plan::{Activity, Mark, Parts, Trace};

/// How much of a trace is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Detail {
    /// Every mark.
    Operators,
    /// What a card does of one kind in a layer, one after the other, as one.
    Phases,
    /// Exchanges and the rest of a layer.
    Layers,
    /// Exchanges and the rest of a token.
    Tokens,
}

impl Detail {
    fn name(self) -> &'static str {
        match self {
            Detail::Operators => "operators",
            Detail::Phases => "phases",
            Detail::Layers => "layers",
            Detail::Tokens => "tokens",
        }
    }

    /// Whether a mark goes on where another has ended.
    fn joins(self, a: &Mark, b: &Mark) -> bool {
        let talks =
            |mark: &Mark| matches!(mark.label.activity, Activity::Exchange | Activity::Handoff);
        let same_token = a.label.token == b.label.token;
        let same_layer = same_token && a.label.layer == b.label.layer;
        match self {
            Detail::Operators => false,
            Detail::Phases => same_layer && a.label.activity == b.label.activity,
            Detail::Layers => same_layer && talks(a) == talks(b),
            Detail::Tokens => same_token,
        }
    }
}

/// From the most detail to the least: what is shown of how many steps.
const STEPS: [(Detail, usize); 9] = [
    (Detail::Operators, usize::MAX),
    (Detail::Operators, 16),
    (Detail::Operators, 4),
    (Detail::Operators, 2),
    (Detail::Phases, 4),
    (Detail::Phases, 2),
    (Detail::Layers, 4),
    (Detail::Layers, 2),
    (Detail::Tokens, 16),
];

/// The traces of one run as JSON text of at most about `most` bytes, if that can be.
pub(crate) fn encode(traces: &[(&str, &Trace)], most: usize) -> Value {
    let mut encoded = Value::Null;
    for (detail, steps) in STEPS {
        encoded = encoded_at(traces, detail, steps);
        if encoded.to_string().len() <= most {
            break;
        }
    }
    encoded
}

fn encoded_at(traces: &[(&str, &Trace)], detail: Detail, steps: usize) -> Value {
    let shown = first_steps(traces, steps);
    let all = first_steps(traces, usize::MAX).len();
    let trace = |(name, trace): &(&str, &Trace)| {
        json!({
            "name": name,
            "lanes": lanes(trace, detail, &shown),
            "incidents": trace.incidents.iter().map(|incident| json!([incident.at, incident.what])).collect::<Vec<_>>(),
        })
    };
    json!({
        "detail": detail.name(),
        "steps": shown.len(),
        "all_steps": all,
        "activities": Activity::ALL.map(Activity::name),
        "traces": traces.iter().map(trace).collect::<Vec<_>>(),
    })
}

/// The first steps of all traces, by their numbers.
fn first_steps(traces: &[(&str, &Trace)], most: usize) -> HashSet<u32> {
    let tokens = |(_, trace): &(&str, &Trace)| {
        let tokens = trace.marks.iter().map(|mark| mark.label.token);
        tokens.collect::<HashSet<u32>>()
    };
    // A step that only one of them has cannot be compared.
    let common = traces.iter().map(tokens).reduce(|a, b| a.intersection(&b).copied().collect());
    let mut common: Vec<u32> = common.unwrap_or_default().into_iter().collect();
    common.sort_unstable();
    common.truncate(most);
    common.into_iter().collect()
}

/// What each card did, cards that did the same at the same time together.
fn lanes(trace: &Trace, detail: Detail, shown: &HashSet<u32>) -> Vec<Value> {
    let mut cards: Vec<Vec<Mark>> = vec![Vec::new(); trace.cards];
    let marks = trace.marks.iter().filter(|mark| shown.contains(&mark.label.token));
    for mark in marks {
        if let Some(card) = cards.get_mut(mark.card as usize) {
            card.push(*mark);
        }
    }
    let mut lanes: Vec<(Vec<i64>, Vec<usize>)> = Vec::new();
    for (card, mut marks) in cards.into_iter().enumerate() {
        if marks.is_empty() {
            continue;
        }
        marks.sort_by(|a, b| a.start.total_cmp(&b.start));
        let numbers = numbers(&joined(&marks, detail));
        match lanes.iter_mut().find(|(known, _)| *known == numbers) {
            Some((_, cards)) => cards.push(card),
            None => lanes.push((numbers, vec![card])),
        }
    }
    lanes.into_iter().map(|(marks, cards)| json!({ "cards": cards, "marks": marks })).collect()
}

fn joined(marks: &[Mark], detail: Detail) -> Vec<Mark> {
    let mut joined: Vec<Mark> = Vec::with_capacity(marks.len());
    for mark in marks {
        match joined.last_mut().filter(|last| detail.joins(last, mark)) {
            Some(last) => {
                last.end = last.end.max(mark.end);
                last.ops = (mark.op + mark.ops).saturating_sub(last.op).max(last.ops);
                last.parts = match (last.parts, mark.parts) {
                    (Some(a), Some(b)) => Some(sum(&a, &b)),
                    (a, b) => a.or(b),
                };
            }
            None => joined.push(*mark),
        }
    }
    joined
}

fn sum(a: &Parts, b: &Parts) -> Parts {
    Parts {
        memory: a.memory + b.memory,
        compute: a.compute + b.compute,
        fixed: a.fixed + b.fixed,
        latency: a.latency + b.latency,
        bandwidth: a.bandwidth + b.bandwidth,
        waiting: a.waiting + b.waiting,
    }
}

/// Thirteen numbers a mark: nanoseconds since the one before has ended, nanoseconds that it took, activity, layer, step, first
/// operator, operators, and of a prediction its six parts in nanoseconds.
fn numbers(marks: &[Mark]) -> Vec<i64> {
    let nanos = |seconds: f64| (seconds * 1e9).round() as i64;
    let mut numbers = Vec::with_capacity(marks.len() * 13);
    let mut before = 0;
    for mark in marks {
        let (start, end) = (nanos(mark.start), nanos(mark.end));
        let activity = Activity::ALL.iter().position(|&activity| activity == mark.label.activity);
        numbers.extend([start - before, end - start, activity.unwrap_or(0) as i64]);
        numbers.extend([mark.label.layer, mark.label.token, mark.op, mark.ops].map(i64::from));
        let parts = mark.parts.unwrap_or_default();
        let parts = [
            parts.memory,
            parts.compute,
            parts.fixed,
            parts.latency,
            parts.bandwidth,
            parts.waiting,
        ];
        numbers.extend(parts.map(nanos));
        before = end;
    }
    numbers
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use spanker_plan::Label;

    use super::*;

    const WIDTH: usize = 13;

    fn trace(cards: usize, steps: u32, layers: u32) -> Trace {
        let mut marks = Vec::new();
        for card in 0..cards as u32 {
            let mut at = 0.0;
            for token in 0..steps {
                for layer in 0..layers {
                    for (op, activity) in
                        [Activity::Attention, Activity::Attention, Activity::Exchange]
                            .into_iter()
                            .enumerate()
                    {
                        let label = Label { activity, layer, token };
                        let took = 1e-6 * f64::from(op as u32 + 1 + card % 2);
                        let parts = Some(Parts { memory: took, ..Parts::default() });
                        let op = layer * 3 + op as u32;
                        marks.push(Mark {
                            card,
                            label,
                            op,
                            ops: 1,
                            start: at,
                            end: at + took,
                            parts,
                        });
                        at += took;
                    }
                }
            }
        }
        Trace { cards, tokens: Vec::new(), marks, incidents: Vec::new(), events: 0 }
    }

    fn lanes_of(encoded: &Value) -> Vec<(Vec<usize>, Vec<i64>)> {
        let lanes = encoded["traces"][0]["lanes"].as_array().expect("lanes");
        let list = |value: &Value| -> Vec<i64> {
            value
                .as_array()
                .expect("a list")
                .iter()
                .map(|n| n.as_i64().expect("a number"))
                .collect()
        };
        lanes
            .iter()
            .map(|lane| {
                (
                    list(&lane["cards"]).into_iter().map(|c| c as usize).collect(),
                    list(&lane["marks"]),
                )
            })
            .collect()
    }

    #[test]
    fn traces_that_fit_have_every_mark_and_equal_cards_once() {
        let trace = trace(4, 2, 3);
        let encoded = encode(&[("predicted", &trace)], usize::MAX);
        assert_eq!(encoded["detail"], "operators");
        let lanes = lanes_of(&encoded);
        let cards: Vec<_> = lanes.iter().map(|(cards, _)| cards.clone()).collect();
        assert_eq!(cards, [vec![0, 2], vec![1, 3]]);
        assert_eq!(lanes[0].1.len(), WIDTH * 2 * 3 * 3);
    }

    #[test]
    fn traces_that_do_not_fit_lose_steps_and_detail_and_no_time() {
        let trace = trace(8, 40, 60);
        let whole = encode(&[("predicted", &trace)], usize::MAX).to_string().len();
        for most in [whole / 2, whole / 8, whole / 40, 8_000] {
            let encoded = encode(&[("predicted", &trace)], most);
            assert!(encoded.to_string().len() <= most, "{most}");
            let steps = encoded["steps"].as_u64().expect("a number") as usize;
            let (_, marks) = &lanes_of(&encoded)[0];
            let time: i64 = marks.chunks(WIDTH).map(|mark| mark[0] + mark[1]).sum();
            assert_eq!(time, steps as i64 * 60 * 6_000, "{most}");
        }
    }

    proptest! {
        #[test]
        fn two_traces_are_cut_at_the_same_steps(steps in 1u32..6, more in 1u32..4, most in 500usize..40_000) {
            let (short, long) = (trace(2, steps, 4), trace(2, steps + more, 4));
            let encoded = encode(&[("predicted", &short), ("measured", &long)], most);
            let tokens = |index: usize| -> HashSet<i64> {
                let lanes = encoded["traces"][index]["lanes"].as_array().expect("lanes").clone();
                let marks = lanes[0]["marks"].as_array().expect("marks").clone();
                marks.chunks(WIDTH).map(|mark| mark[4].as_i64().expect("a step")).collect()
            };
            prop_assert_eq!(tokens(0), tokens(1));
            prop_assert!(encoded["steps"].as_u64() <= Some(u64::from(steps)));
        }
    }
}
