// SPDX-License-Identifier: Apache-2.0
//! `spanker compare`: a predicted trace beside a measured one, and where the difference comes from.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::Context;
use serde_json::{Map, Value, json};
use spanker_plan::{
    CardGap, Causes, CompareError, Comparison, Gap, Origin, Trace, compare, read_perfetto,
};
use spanker_topology::Seconds;

use crate::{Usage, output};
use spanker_engine::files;

/// The largest file of a trace, in bytes.
const MOST_TRACE: u64 = 512 << 20;
/// What to do about traces of different things.
const OTHER: &str = "predict what ran: 'spanker run --compare' does; or give 'spanker plan' the fabric, the cards and --prompt with \
                     the prompt's tokens, and 'spanker simulate' --prompt";
/// Columns of cards that a table has beside the one of the whole.
const CARDS_PER_TABLE: usize = 6;

/// Compare a predicted trace with a measured one and say where the difference comes from
///
/// Steps and operators of the two are matched by number. A gap is measured minus predicted: positive means
/// slower than predicted. The causes add up to it: memory, compute, link latency, link bandwidth,
/// waiting for a card, the host, time that is not in the program, and what is left unexplained. The column
/// of the whole follows the critical path of the run; the others are the same time as each card saw it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker run -m smollm2-135m -p 'Hello' --cards 2 --compare --trace both.json    a table, and a file with both traces
  spanker compare both.json both.json --tokens 8..15 --json                       the same from the file, for some tokens
  spanker compare predicted.json measured.json                                    from two files

A prediction by itself has the prompt's length, not its tokens: 'spanker plan --prompt N --out plan.json' and
'spanker simulate plan.json --prompt --trace predicted.json' are for a run with N tokens of prompt.

docs/compare.md says how causes are found and what --json prints.")]
pub(crate) struct Args {
    /// A trace from 'spanker simulate --trace'
    predicted: PathBuf,
    /// A trace from 'spanker run --trace', or from another simulation
    measured: PathBuf,
    /// Tokens to compare: a number or a range as in 8..15, both ends included [default: all]
    #[arg(long, value_name = "FROM..TO")]
    tokens: Option<Tokens>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Tokens of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Tokens(RangeInclusive<u32>);

impl FromStr for Tokens {
    type Err = String;

    fn from_str(text: &str) -> Result<Tokens, String> {
        let bad = || format!("'{text}': expected a token, or a range as in 8..15");
        let number = |text: &str| text.trim().parse::<u32>().map_err(|_| bad());
        let (from, to) = match text.split_once("..") {
            None => (number(text)?, number(text)?),
            Some((from, to)) => (number(from)?, number(to)?),
        };
        if from > to {
            return Err(format!("range '{text}' runs backwards"));
        }
        Ok(Tokens(from..=to))
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let predicted = read(&args.predicted, &[Origin::Predicted])?;
    // A simulation under other conditions may stand for the run.
    let measured = read(&args.measured, &[Origin::Measured, Origin::Predicted])?;
    let mut comparison = compare(&predicted, &measured).map_err(|error| match error {
        // Programs of a prompt and of a token differ, and so do those of threads and of cards.
        CompareError::Cards { .. } | CompareError::Tokens { .. } | CompareError::Beyond { .. } => {
            anyhow::anyhow!("{error}\nhint: {OTHER}")
        }
        error => error.into(),
    })?;
    if let Some(Tokens(range)) = &args.tokens {
        comparison = comparison.of_tokens(range);
        if comparison.steps.is_empty() {
            let why = comparison.left_out.first().map_or("the traces have none", |left| &left.why);
            let (from, to) = (range.start(), range.end());
            return Err(Usage(format!("--tokens {from}..{to}: no step to compare: {why}")).into());
        }
    }
    if args.json {
        return output::line(&to_json(&comparison).to_string());
    }
    lines(&comparison, &[]).iter().try_for_each(|line| output::line(line))
}

/// Reads the trace of a file that is of the first of these origins.
fn read(path: &Path, origins: &[Origin]) -> anyhow::Result<Trace> {
    let text = files::read(path, MOST_TRACE)?;
    let shown = || path.display().to_string();
    let mut traces = read_perfetto(&text).with_context(shown)?;
    let wanted = |origin: &Origin| traces.iter().position(|(found, _)| found == origin);
    if let Some(index) = origins.iter().find_map(wanted) {
        return Ok(traces.swap_remove(index).1);
    }
    // The traces are the other way round.
    Trace::from_perfetto(&text, origins[0]).with_context(shown)
}

/// The comparison for machines: the schema of `--json`.
pub(crate) fn to_json(comparison: &Comparison) -> Value {
    let cards = |cards: &[CardGap]| -> Vec<Value> {
        cards.iter().map(|one| gap_to_json(&one.gap, &[("card", json!(one.card))])).collect()
    };
    let steps = comparison.steps.iter().map(|step| {
        let named = [
            ("piece", json!(step.piece)),
            ("token", json!(step.token)),
            ("cards", cards(&step.cards).into()),
        ];
        gap_to_json(&step.whole, &named)
    });
    let pieces = comparison.pieces.iter().enumerate().map(|(number, piece)| {
        let named = [
            ("piece", json!(number)),
            ("recovery_ms", json!(piece.recovery * 1e3)),
            ("cards", cards(&piece.cards).into()),
        ];
        gap_to_json(&piece.whole, &named)
    });
    let left_out = comparison
        .left_out
        .iter()
        .map(|left| json!({ "piece": left.piece, "token": left.token, "why": left.why }));
    json!({
        "version": 1,
        "whole": gap_to_json(&comparison.whole, &[]),
        "cards": cards(&comparison.cards),
        "pieces": pieces.collect::<Vec<_>>(),
        "steps": steps.collect::<Vec<_>>(),
        "left_out": left_out.collect::<Vec<_>>(),
    })
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

/// The comparison for people. `names` are what the pieces of a run are called, where there are several.
pub(crate) fn lines(comparison: &Comparison, names: &[String]) -> Vec<String> {
    let mut lines = Vec::new();
    if comparison.pieces.len() > 1 {
        for (piece, name) in comparison.pieces.iter().zip(names) {
            lines.push(name.clone());
            match piece.cards.is_empty() {
                true => lines.extend(["no step was completed".to_owned(), String::new()]),
                false => lines.extend(tables("piece", &piece.whole, &piece.cards)),
            }
        }
        lines.push("the whole run".to_owned());
    }
    lines.extend(tables("whole", &comparison.whole, &comparison.cards));
    let steps = match comparison.steps.len() {
        1 => "1 step".to_owned(),
        count => format!("{count} steps"),
    };
    let whole = &comparison.whole;
    lines.push(format!(
        "{steps}: predicted {}, measured {} ({})",
        Seconds(whole.predicted),
        Seconds(whole.measured),
        percent(whole)
    ));
    let largest = |step: &&spanker_plan::StepGap| step.whole.seconds().abs();
    let worst = comparison.steps.iter().max_by(|a, b| largest(a).total_cmp(&largest(b)));
    if let Some(step) = worst.filter(|_| comparison.steps.len() > 1) {
        let (gap, part) = (signed(step.whole.seconds()), percent(&step.whole));
        lines.push(format!("largest gap: token {}, {gap} ({part})", step.token));
    }
    lines.extend(left_out(comparison));
    lines
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_read_as_a_number_or_a_range_with_both_ends() {
        assert_eq!("7".parse(), Ok(Tokens(7..=7)));
        assert_eq!("8..15".parse(), Ok(Tokens(8..=15)));
        for bad in ["", "..", "8..", "15..8", "-1", "8...9", "a..b", "99999999999"] {
            assert!(bad.parse::<Tokens>().is_err(), "{bad}");
        }
    }
}
