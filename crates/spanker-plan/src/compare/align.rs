// SPDX-License-Identifier: Apache-2.0
//! Which marks of two traces are of the same step, card and operators.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::CompareError;
use crate::trace::perfetto::Origin;
use crate::trace::{Activity, HALF_NANOSECOND, Mark, Trace, in_order};

/// A step of one trace.
#[derive(Debug)]
pub(super) struct Step {
    /// For each card what it did, in the order of time.
    pub(super) cards: BTreeMap<u32, Vec<Mark>>,
    /// When the first operator could begin. What a trace has of the host before that is before the step: not every
    /// trace has it.
    pub(super) begin: f64,
    /// When the last card was done, and which that was.
    pub(super) end: f64,
    pub(super) ender: u32,
}

impl Step {
    fn of(mut cards: BTreeMap<u32, Vec<Mark>>) -> Step {
        // What the host does after the last operator is before the next step: not every trace has it.
        for marks in cards.values_mut() {
            let by_host = |mark: &&Mark| mark.ops == 0 && mark.label.activity == Activity::Host;
            let trailing = marks.iter().rev().take_while(by_host).count();
            if trailing < marks.len() {
                marks.truncate(marks.len() - trailing);
            }
        }
        let (mut end, mut ender) = (f64::NEG_INFINITY, 0);
        for (&card, marks) in &cards {
            for mark in marks {
                if mark.end > end {
                    (end, ender) = (mark.end, card);
                }
            }
        }
        let begin = begin(cards.values().map(|marks| &marks[..]));
        Step { cards, begin, end, ender }
    }
}

/// When a step's first operator could begin: when the host is done with what it does before, on the first card that
/// says so, or else when one begins.
pub(super) fn begin<'a>(cards: impl Iterator<Item = &'a [Mark]>) -> f64 {
    let (mut told, mut begun) = (f64::INFINITY, f64::INFINITY);
    for marks in cards {
        let leading = marks.iter().take_while(|mark| mark.ops == 0).count();
        match (leading, marks.get(leading)) {
            (0, Some(first)) => begun = begun.min(first.start),
            (_, Some(_)) => told = told.min(marks[leading - 1].end),
            (_, None) => begun = begun.min(marks.first().map_or(f64::INFINITY, |mark| mark.start)),
        }
    }
    if told.is_finite() { told } else { begun }
}

/// The steps of one trace, by token.
#[derive(Debug)]
pub(super) struct Steps(BTreeMap<u32, Step>);

impl Steps {
    pub(super) fn of(trace: &Trace, origin: Origin) -> Result<Steps, CompareError> {
        let which = origin.name();
        if trace.marks.is_empty() {
            return Err(CompareError::Empty { which });
        }
        let wrong = |mark: &Mark, what| {
            let Mark { card, op, .. } = *mark;
            CompareError::Mark { which, card, token: mark.label.token, op, what }
        };
        for mark in &trace.marks {
            if !mark.start.is_finite() || !mark.end.is_finite() {
                return Err(wrong(mark, "its times are not numbers"));
            }
            if mark.end < mark.start {
                return Err(wrong(mark, "it ends before it begins"));
            }
        }
        if let Some((_, late)) = trace.overlap() {
            return Err(wrong(&late, "it begins before the card's mark before it has ended"));
        }
        let mut marks: Vec<&Mark> = trace.marks.iter().collect();
        marks.sort_by(|a, b| in_order(a, b));
        let mut steps: BTreeMap<u32, BTreeMap<u32, Vec<Mark>>> = BTreeMap::new();
        for mark in marks {
            let cards = steps.entry(mark.label.token).or_default();
            cards.entry(mark.card).or_default().push(*mark);
        }
        Ok(Steps(steps.into_iter().map(|(token, cards)| (token, Step::of(cards))).collect()))
    }

    /// When the first step begins, and the last one ends.
    pub(super) fn extent(&self) -> Option<(f64, f64)> {
        let end = self.0.values().map(|step| step.end).fold(f64::NEG_INFINITY, f64::max);
        let begin = self.0.values().map(|step| step.begin).fold(f64::INFINITY, f64::min);
        (!self.0.is_empty()).then_some((begin, end))
    }

    fn cards(&self) -> BTreeSet<u32> {
        self.0.values().flat_map(|step| step.cards.keys().copied()).collect()
    }

    fn before(&self, token: u32) -> Option<(u32, &Step)> {
        self.0.range(..token).next_back().map(|(&token, step)| (token, step))
    }

    /// What keeps a step from being compared.
    fn flaw(&self, token: u32, step: &Step) -> Option<String> {
        for (card, marks) in &step.cards {
            let ops: Vec<u32> =
                marks.iter().filter(|mark| mark.ops > 0).map(|mark| mark.op).collect();
            if let Some(pair) = ops.windows(2).find(|pair| pair[1] < pair[0]) {
                return Some(format!("card {card} ran op {} after op {}", pair[1], pair[0]));
            }
        }
        if let Some((earlier, before)) = self.before(token) {
            if step.end < before.end {
                return Some(format!("it was over before token {earlier} was"));
            }
            if let Some(card) = mixed(before, step) {
                return Some(format!(
                    "card {card} began it before it was done with token {earlier}"
                ));
            }
        }
        let (later, after) = self.0.range(token..).nth(1)?;
        mixed(step, after).map(|card| format!("card {card} began token {later} before it was done"))
    }
}

/// A card that begins a step before it is done with the one before.
fn mixed(before: &Step, after: &Step) -> Option<u32> {
    let early = |(card, marks): (&u32, &Vec<Mark>)| {
        let last = before.cards.get(card).and_then(|marks| marks.last());
        let pair = last.zip(marks.first());
        pair.is_some_and(|(a, b)| a.end - b.start >= HALF_NANOSECOND).then_some(*card)
    };
    after.cards.iter().find_map(early)
}

/// A step as both traces have it.
#[derive(Debug)]
pub(super) struct Pair<'a> {
    pub(super) predicted: &'a Step,
    pub(super) measured: &'a Step,
    /// When the step before was over, or when the step began where the traces do not have the same step before
    /// it: predicted and measured.
    pub(super) begin: (f64, f64),
}

/// What the table of steps has for a token: a step to compare, or why not.
type Paired<'a> = (u32, Result<Pair<'a>, String>);

/// All steps of both traces, in the order of their tokens.
pub(super) fn pairs<'a>(
    predicted: &'a Steps,
    measured: &'a Steps,
) -> Result<Vec<Paired<'a>>, CompareError> {
    let (here, there) = (predicted.cards(), measured.cards());
    if here != there {
        return Err(CompareError::Cards { predicted: listed(&here), measured: listed(&there) });
    }
    let (here, there): (BTreeSet<u32>, BTreeSet<u32>) =
        (predicted.0.keys().copied().collect(), measured.0.keys().copied().collect());
    if here.is_disjoint(&there) {
        return Err(CompareError::Tokens { predicted: listed(&here), measured: listed(&there) });
    }
    let all = here.union(&there);
    Ok(all.map(|&token| (token, pair(token, predicted, measured))).collect())
}

fn pair<'a>(token: u32, predicted: &'a Steps, measured: &'a Steps) -> Result<Pair<'a>, String> {
    let only = |which: &str| format!("only the {which} trace has it");
    let (p, m) = match (predicted.0.get(&token), measured.0.get(&token)) {
        (Some(p), Some(m)) => (p, m),
        (Some(_), None) => return Err(only("predicted")),
        _ => return Err(only("measured")),
    };
    let (here, there): (BTreeSet<u32>, BTreeSet<u32>) =
        (p.cards.keys().copied().collect(), m.cards.keys().copied().collect());
    if here != there {
        let (here, there) = (listed(&here), listed(&there));
        return Err(format!("predicted for cards {here}, measured on cards {there}"));
    }
    for (which, steps, step) in [("predicted", predicted, p), ("measured", measured, m)] {
        if let Some(flaw) = steps.flaw(token, step) {
            return Err(format!("in the {which} trace {flaw}"));
        }
    }
    let begin = match (predicted.before(token), measured.before(token)) {
        (Some((a, before_p)), Some((b, before_m))) if a == b => (before_p.end, before_m.end),
        _ => (p.begin, m.begin),
    };
    Ok(Pair { predicted: p, measured: m, begin })
}

/// Numbers as people write them: `0, 2..5, 9`; the first few where there are many.
fn listed(numbers: &BTreeSet<u32>) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &number in numbers {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let shown = runs.iter().take(6).map(|&(first, last)| match last - first {
        0 => first.to_string(),
        _ => format!("{first}..{last}"),
    });
    let mut words: Vec<String> = shown.collect();
    if runs.len() > words.len() {
        words.push("..".into());
    }
    words.join(", ")
}

/// Marks of a card's step that cover the same operators: which of the predicted, which of the measured ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) predicted: Range<usize>,
    pub(super) measured: Range<usize>,
}

/// Aligns the marks of a card's step, both in the order of time and of operators. Marks that cover operators in
/// common, directly or through others, are in one block; what only one side has is in none.
pub(super) fn blocks(predicted: &[Mark], measured: &[Mark]) -> Vec<Block> {
    let numbered = |marks: &[Mark]| -> Vec<(usize, u32, u32)> {
        let ops = marks.iter().enumerate().filter(|(_, mark)| mark.ops > 0);
        ops.map(|(index, mark)| (index, mark.op, mark.op.saturating_add(mark.ops))).collect()
    };
    let (p, m) = (numbered(predicted), numbered(measured));
    let (mut i, mut j) = (0, 0);
    let mut blocks = Vec::new();
    while let (Some(&(_, p_first, p_end)), Some(&(_, m_first, m_end))) = (p.get(i), m.get(j)) {
        if p_end <= m_first {
            i += 1;
            continue;
        }
        if m_end <= p_first {
            j += 1;
            continue;
        }
        let (from, mut top) = ((i, j), p_end.max(m_end));
        (i, j) = (i + 1, j + 1);
        loop {
            let reached = (i, j);
            i = within(&p, i, &mut top);
            j = within(&m, j, &mut top);
            if (i, j) == reached {
                break;
            }
        }
        let predicted = p[from.0].0..p[i - 1].0 + 1;
        blocks.push(Block { predicted, measured: m[from.1].0..m[j - 1].0 + 1 });
    }
    blocks
}

/// The first mark from `at` on that has no operator below `top`, which grows by those that have.
fn within(marks: &[(usize, u32, u32)], mut at: usize, top: &mut u32) -> usize {
    while let Some(&(_, _, end)) = marks.get(at).filter(|(_, first, _)| first < top) {
        *top = end.max(*top);
        at += 1;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Label;

    fn marks(ranges: &[(u32, u32)]) -> Vec<Mark> {
        let label = Label { activity: Activity::Up, layer: 0, token: 0 };
        let mark = |(at, &(op, ops)): (usize, &(u32, u32))| {
            let start = at as f64;
            Mark { card: 0, label, op, ops, start, end: start + 1.0, parts: None }
        };
        ranges.iter().enumerate().map(mark).collect()
    }

    #[test]
    fn blocks_of_marks_that_cover_several_operators_take_all_of_them() {
        let predicted = marks(&[(0, 1), (1, 1), (2, 1), (0, 0), (3, 1), (4, 1), (6, 1), (6, 1)]);
        let measured = marks(&[(0, 3), (0, 0), (3, 1), (5, 1), (6, 1)]);
        let expected = [(0..3, 0..1), (4..5, 2..3), (6..8, 4..5)];
        let expected = expected.map(|(predicted, measured)| Block { predicted, measured });
        assert_eq!(blocks(&predicted, &measured), expected);
    }

    #[test]
    fn blocks_of_ranges_that_overlap_in_turns_are_one() {
        let (predicted, measured) = (marks(&[(0, 2), (2, 2), (4, 2)]), marks(&[(1, 2), (3, 2)]));
        assert_eq!(blocks(&predicted, &measured), [Block { predicted: 0..3, measured: 0..2 }]);
        assert!(blocks(&predicted, &[]).is_empty());
    }

    #[test]
    fn numbers_are_listed_in_runs() {
        let set = |numbers: &[u32]| numbers.iter().copied().collect::<BTreeSet<u32>>();
        assert_eq!(listed(&set(&[0, 2, 3, 4, 9])), "0, 2..4, 9");
        assert_eq!(listed(&set(&[1, 3, 5, 7, 9, 11, 13])), "1, 3, 5, 7, 9, 11, ..");
        assert_eq!(listed(&set(&[u32::MAX])), "4294967295");
    }
}
