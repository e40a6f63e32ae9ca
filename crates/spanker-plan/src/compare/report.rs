// SPDX-License-Identifier: Apache-2.0
//! A comparison as JSON and in words. What is compared, and how, is decided elsewhere.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};
use spanker_topology::Seconds;

use super::{CardGap, Causes, Comparison, Gap, StepGap};

/// Columns of cards that a table has beside the one of the whole.
const CARDS_PER_TABLE: usize = 6;

impl Comparison {
    /// The comparison for machines: the schema of `spanker compare --json`.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let cards = |cards: &[CardGap]| -> Vec<Value> {
            cards.iter().map(|one| gap_to_json(&one.gap, &[("card", json!(one.card))])).collect()
        };
        let steps = self.steps.iter().map(|step| {
            let named = [
                ("piece", json!(step.piece)),
                ("token", json!(step.token)),
                ("cards", cards(&step.cards).into()),
            ];
            gap_to_json(&step.whole, &named)
        });
        let pieces = self.pieces.iter().enumerate().map(|(number, piece)| {
            let named = [
                ("piece", json!(number)),
                ("recovery_ms", json!(piece.recovery * 1e3)),
                ("cards", cards(&piece.cards).into()),
            ];
            gap_to_json(&piece.whole, &named)
        });
        let left_out = self
            .left_out
            .iter()
            .map(|left| json!({ "piece": left.piece, "token": left.token, "why": left.why }));
        json!({
            "version": 1,
            "whole": gap_to_json(&self.whole, &[]),
            "cards": cards(&self.cards),
            "pieces": pieces.collect::<Vec<_>>(),
            "steps": steps.collect::<Vec<_>>(),
            "left_out": left_out.collect::<Vec<_>>(),
        })
    }

    /// The comparison for people. `names` are what the pieces of a run are called, where there are several.
    #[must_use]
    pub fn lines(&self, names: &[String]) -> Vec<String> {
        let mut lines = Vec::new();
        if self.pieces.len() > 1 {
            for (piece, name) in self.pieces.iter().zip(names) {
                lines.push(name.clone());
                match piece.cards.is_empty() {
                    true => lines.extend(["no step was completed".to_owned(), String::new()]),
                    false => lines.extend(tables("piece", &piece.whole, &piece.cards)),
                }
            }
            lines.push("the whole run".to_owned());
        }
        lines.extend(tables("whole", &self.whole, &self.cards));
        let steps = match self.steps.len() {
            1 => "1 step".to_owned(),
            count => format!("{count} steps"),
        };
        let whole = &self.whole;
        lines.push(format!(
            "{steps}: predicted {}, measured {} ({})",
            Seconds(whole.predicted),
            Seconds(whole.measured),
            percent(whole)
        ));
        let largest = |step: &&StepGap| step.whole.seconds().abs();
        let worst = self.steps.iter().max_by(|a, b| largest(a).total_cmp(&largest(b)));
        if let Some(step) = worst.filter(|_| self.steps.len() > 1) {
            let (gap, part) = (signed(step.whole.seconds()), percent(&step.whole));
            lines.push(format!("largest gap: token {}, {gap} ({part})", step.token));
        }
        lines.extend(left_out(self));
        lines
    }
}

fn gap_to_json(gap: &Gap, named: &[(&str, Value)]) -> Value {
    let ms = |seconds: f64| json!(seconds * 1e3);
    let causes = &gap.causes;
    let waiting = causes.waiting.iter().map(|(card, seconds)| (card.to_string(), ms(*seconds)));
    let mut object: Map<String, Value> =
        named.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    let causes = json!({
        "memory_ms": ms(causes.memory),
        "compute_ms": ms(causes.compute),
        "link_latency_ms": ms(causes.latency),
        "link_bandwidth_ms": ms(causes.bandwidth),
        "waiting_for_card_ms": waiting.collect::<Map<_, _>>(),
        "host_ms": ms(causes.host),
        "recovery_ms": ms(causes.recovery),
        "not_in_program_ms": ms(causes.not_in_program),
        "unexplained_ms": ms(causes.unexplained),
    });
    object.insert("predicted_ms".into(), ms(gap.predicted));
    object.insert("measured_ms".into(), ms(gap.measured));
    object.insert("gap_ms".into(), ms(gap.seconds()));
    object.insert("gap_percent".into(), json!(gap.percent()));
    object.insert("attributed_percent".into(), json!(100.0 * gap.causes.attributed()));
    object.insert("causes".into(), causes);
    object.into()
}

/// Tables of a whole and its cards, a few cards in each.
fn tables(name: &str, whole: &Gap, cards: &[CardGap]) -> Vec<String> {
    let mut lines = Vec::new();
    for cards in cards.chunks(CARDS_PER_TABLE) {
        let cards = cards.iter().map(|one| (format!("card {}", one.card), &one.gap));
        let columns = std::iter::once((name.to_owned(), whole)).chain(cards);
        lines.extend(table(&columns.collect::<Vec<_>>()));
        lines.push(String::new());
    }
    lines
}

/// What was not compared, where the reasons are the same in one line.
fn left_out(comparison: &Comparison) -> Vec<String> {
    let mut reasons: Vec<(&str, u32, usize)> = Vec::new();
    for left in &comparison.left_out {
        match reasons.iter_mut().find(|(why, _, _)| *why == left.why) {
            Some((_, _, count)) => *count += 1,
            None => reasons.push((&left.why, left.token, 1)),
        }
    }
    let line = |&(why, token, count): &(&str, u32, usize)| match count {
        1 => format!("left out: token {token}: {why}"),
        _ => format!("left out: token {token} and {} more: {why}", count - 1),
    };
    reasons.iter().map(line).collect()
}

fn signed(seconds: f64) -> String {
    let sign = if seconds > 0.0 { "+" } else { "" };
    format!("{sign}{}", Seconds(seconds))
}

fn percent(gap: &Gap) -> String {
    gap.percent().map_or("-".into(), |percent| format!("{percent:+.2} %"))
}

/// A table with a line for each cause and a column for each of these.
fn table(columns: &[(String, &Gap)]) -> Vec<String> {
    let mut rows: Vec<(String, Vec<String>)> = Vec::new();
    let mut row = |name: &str, cell: &dyn Fn(&Gap) -> String| {
        rows.push((name.to_owned(), columns.iter().map(|(_, gap)| cell(gap)).collect()));
    };
    row("predicted", &|gap| Seconds(gap.predicted).to_string());
    row("measured", &|gap| Seconds(gap.measured).to_string());
    row("gap", &|gap| signed(gap.seconds()));
    row("", &percent);
    // Less than a ten-thousandth of a percent of the time is arithmetic and no cause.
    let cause = |gap: &Gap, seconds: f64| {
        let scale = gap.predicted.max(gap.measured);
        if seconds.abs() > 1e-6 * scale { signed(seconds) } else { "-".into() }
    };
    let mut of = |name: &str, part: &dyn Fn(&Causes) -> f64| {
        row(name, &|gap| cause(gap, part(&gap.causes)));
    };
    of("  memory", &|causes| causes.memory);
    of("  compute", &|causes| causes.compute);
    of("  link latency", &|causes| causes.latency);
    of("  link bandwidth", &|causes| causes.bandwidth);
    let waited: BTreeSet<u32> =
        columns.iter().flat_map(|(_, gap)| gap.causes.waiting.keys().copied()).collect();
    for card in waited {
        of(&format!("  waiting for card {card}"), &|causes| {
            causes.waiting.get(&card).copied().unwrap_or(0.0)
        });
    }
    of("  host", &|causes| causes.host);
    if columns.iter().any(|(_, gap)| gap.causes.recovery != 0.0) {
        of("  recovery", &|causes| causes.recovery);
    }
    of("  not in the program", &|causes| causes.not_in_program);
    of("  unexplained", &|causes| causes.unexplained);
    row("attributed", &|gap| format!("{:.1} %", 100.0 * gap.causes.attributed()));
    let wide = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let mut lines = vec![line("", wide, columns.iter().map(|(name, _)| name))];
    lines.extend(rows.iter().map(|(name, cells)| line(name, wide, cells.iter())));
    lines
}

fn line<'a>(name: &str, wide: usize, cells: impl Iterator<Item = &'a String>) -> String {
    let cells: String = cells.map(|cell| format!(" {cell:>11}")).collect();
    format!("{name:<wide$}{cells}")
}
