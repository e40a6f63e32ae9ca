// SPDX-License-Identifier: Apache-2.0
//! A step as one card saw it: every second between the end of the step before and the end of this one,
//! predicted and measured, by cause.

use std::collections::HashMap;
use std::ops::Range;

use super::align::{Block, Pair, Step, blocks};
use super::{CardGap, Causes, CompareError, Gap};
use crate::trace::{Activity, HALF_NANOSECOND, Mark, Parts};

/// A card's step, in the order of time.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) card: u32,
    /// Operators that both traces have, with what comes before each.
    pub(super) spans: Vec<Span>,
    /// What comes after the last of them.
    pub(super) tail: Causes,
}

/// Operators that both traces have.
#[derive(Debug)]
pub(super) struct Span {
    /// The gap of what comes between the span before and this one.
    pub(super) before: Causes,
    /// The gap of the operators, less the waiting in them.
    pub(super) rest: Causes,
    /// For which card it was to wait, and how long.
    pub(super) to_wait: Option<(u32, f64)>,
    /// For which card it did wait, and how long.
    pub(super) waited: Option<Wait>,
    /// When it began and ended, measured.
    pub(super) measured: (f64, f64),
    /// When it was to begin.
    pub(super) predicted_start: f64,
    /// When it was to end.
    pub(super) predicted_end: f64,
}

/// Waiting for a card.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wait {
    pub(super) card: u32,
    pub(super) seconds: f64,
    /// Where on that card's line the waiting ended, where that is between two spans.
    pub(super) until: Option<Point>,
}

/// A moment on a card's line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Point {
    /// The beginning of a span of a line.
    Start(usize, usize),
    /// Its end.
    End(usize, usize),
}

impl Span {
    /// The whole gap of the operators.
    pub(super) fn inside(&self) -> Causes {
        let mut causes = self.rest.clone();
        if let Some(wait) = self.waited {
            causes.wait(wait.card, wait.seconds);
        }
        if let Some((card, seconds)) = self.to_wait {
            causes.wait(card, -seconds);
        }
        causes
    }
}

impl Line {
    /// The gap of the whole line.
    pub(super) fn gap(&self, pair: &Pair<'_>) -> CardGap {
        let mut causes = self.tail.clone();
        for span in &self.spans {
            causes.add(&span.before, 1.0);
            causes.add(&span.inside(), 1.0);
        }
        let predicted = pair.predicted.end - pair.begin.0;
        let measured = pair.measured.end - pair.begin.1;
        CardGap { card: self.card, gap: Gap { predicted, measured, causes } }
    }
}

/// Which of the two traces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Predicted,
    Measured,
}

/// A card's marks, aligned.
struct Aligned<'a> {
    card: u32,
    predicted: &'a [Mark],
    measured: &'a [Mark],
    blocks: Vec<Block>,
    /// For each block what it exchanges, if that is all that it does.
    links: Vec<Option<Link>>,
}

/// What joins marks of several cards: the activity, the layer, and the how many-th of these it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Link {
    activity: Activity,
    layer: u32,
    ordinal: u32,
}

impl Aligned<'_> {
    fn marks(&self, side: Side) -> &[Mark] {
        match side {
            Side::Predicted => self.predicted,
            Side::Measured => self.measured,
        }
    }

    fn range(&self, side: Side, block: usize) -> Range<usize> {
        match side {
            Side::Predicted => self.blocks[block].predicted.clone(),
            Side::Measured => self.blocks[block].measured.clone(),
        }
    }

    /// When a block begins and ends.
    fn times(&self, side: Side, block: usize) -> (f64, f64) {
        let (marks, range) = (self.marks(side), self.range(side, block));
        (marks[range.start].start, marks[range.end - 1].end)
    }

    /// The block that ends with a mark.
    fn ends_with(&self, side: Side, mark: usize) -> Option<usize> {
        let end = |block: &Block| match side {
            Side::Predicted => block.predicted.end,
            Side::Measured => block.measured.end,
        };
        self.blocks.binary_search_by(|block| end(block).cmp(&(mark + 1))).ok()
    }
}

/// The lines of all cards of a step.
pub(super) fn lines(token: u32, pair: &Pair<'_>) -> Result<Vec<Line>, CompareError> {
    let mut cards = Vec::new();
    for ((&card, predicted), measured) in
        pair.predicted.cards.iter().zip(pair.measured.cards.values())
    {
        within_program(token, card, predicted, measured)?;
        let blocks = blocks(predicted, measured);
        let links = links(predicted, &blocks);
        cards.push(Aligned { card, predicted, measured, blocks, links });
    }
    let mut groups: HashMap<Link, Vec<(usize, usize)>> = HashMap::new();
    for (line, card) in cards.iter().enumerate() {
        for (block, link) in card.links.iter().enumerate() {
            if let Some(link) = link {
                groups.entry(*link).or_default().push((line, block));
            }
        }
    }
    Ok((0..cards.len()).map(|line| build(pair, &cards, &groups, line)).collect())
}

fn within_program(
    token: u32,
    card: u32,
    predicted: &[Mark],
    measured: &[Mark],
) -> Result<(), CompareError> {
    let end = |marks: &[Mark]| {
        let ends = marks.iter().filter(|mark| mark.ops > 0);
        ends.map(|mark| mark.op.saturating_add(mark.ops)).max().unwrap_or(0)
    };
    let (ops, reached) = (end(predicted), end(measured));
    if reached > ops {
        return Err(CompareError::Beyond { token, card, op: reached - 1, ops });
    }
    Ok(())
}

/// What each block of a card exchanges. Exchanges are counted for each layer, because cards of a group need not
/// have the same operator numbers.
fn links(predicted: &[Mark], blocks: &[Block]) -> Vec<Option<Link>> {
    let mut counts: HashMap<(Activity, u32), (u32, u32)> = HashMap::new();
    let mut ordinals = vec![0; predicted.len()];
    for (index, mark) in predicted.iter().enumerate().filter(|(_, mark)| mark.ops > 0) {
        let key = (mark.label.activity, mark.label.layer);
        let (op, ordinal) = counts.entry(key).or_insert((mark.op, 0));
        // One operator may have several marks.
        if *op != mark.op {
            (*op, *ordinal) = (mark.op, *ordinal + 1);
        }
        ordinals[index] = *ordinal;
    }
    let link = |block: &Block| {
        let marks = &predicted[block.predicted.clone()];
        let label = marks[0].label;
        let joins = matches!(label.activity, Activity::Exchange | Activity::Handoff);
        let alone = marks.iter().all(|mark| mark.ops == 0 || mark.label.activity == label.activity);
        let ordinal = ordinals[block.predicted.start];
        let link = Link { activity: label.activity, layer: label.layer, ordinal };
        (joins && alone).then_some(link)
    };
    blocks.iter().map(link).collect()
}

/// Seconds of a stretch of time: what operators of a block took, and causes of all else.
#[derive(Debug, Clone, Default)]
struct Tally {
    work: f64,
    causes: Causes,
}

/// Divides a card's step among the stretches before each block (even), the blocks (odd) and the tail (last).
fn tally(card: &Aligned<'_>, side: Side, step: &Step, begin: f64) -> Vec<Tally> {
    let count = card.blocks.len();
    let mut tallies = vec![Tally::default(); 2 * count + 1];
    let (mut block, mut cursor) = (0, begin);
    for (index, mark) in card.marks(side).iter().enumerate() {
        while block < count && index >= card.range(side, block).end {
            block += 1;
        }
        let first = if block < count { card.range(side, block).start } else { usize::MAX };
        let gap = &mut tallies[2 * block + usize::from(index > first)].causes;
        match index {
            // Until its first mark a card waits for the host.
            0 => gap.host += mark.start - cursor,
            _ => gap.not_in_program += mark.start - cursor,
        }
        let seconds = mark.end - mark.start;
        let tally = &mut tallies[2 * block + usize::from(index >= first)];
        match mark.label.activity {
            _ if index >= first && mark.ops > 0 => tally.work += seconds,
            Activity::Host => tally.causes.host += seconds,
            _ if mark.ops == 0 => tally.causes.not_in_program += seconds,
            _ => tally.causes.unexplained += seconds,
        }
        cursor = mark.end;
    }
    let tail = &mut tallies[2 * count].causes;
    if step.ender == card.card {
        // Nothing but what marks overlap by less than the grid.
        tail.not_in_program += step.end - cursor;
    } else {
        tail.wait(step.ender, step.end - cursor);
    }
    tallies
}

fn build(
    pair: &Pair<'_>,
    cards: &[Aligned<'_>],
    groups: &HashMap<Link, Vec<(usize, usize)>>,
    line: usize,
) -> Line {
    let card = &cards[line];
    let predicted = tally(card, Side::Predicted, pair.predicted, pair.begin.0);
    let measured = tally(card, Side::Measured, pair.measured, pair.begin.1);
    let differ = |index: usize| {
        let mut causes = measured[index].causes.clone();
        causes.add(&predicted[index].causes, -1.0);
        causes
    };
    let mut spans = Vec::with_capacity(card.blocks.len());
    for block in 0..card.blocks.len() {
        let inside = 2 * block + 1;
        let (p, m) = (predicted[inside].work, measured[inside].work);
        let to_wait = waiting(cards, groups, (line, block), Side::Predicted, p);
        let waited = waiting(cards, groups, (line, block), Side::Measured, m);
        let mut rest = differ(inside);
        let seconds = |wait: Option<Wait>| wait.map_or(0.0, |wait| wait.seconds);
        let gap = (m - seconds(waited)) - (p - seconds(to_wait));
        share(gap, card, block, &mut rest);
        let times = card.times(Side::Predicted, block);
        spans.push(Span {
            before: differ(inside - 1),
            rest,
            to_wait: to_wait.map(|wait| (wait.card, wait.seconds)),
            waited,
            measured: card.times(Side::Measured, block),
            predicted_start: times.0,
            predicted_end: times.1,
        });
    }
    Line { card: card.card, spans, tail: differ(2 * card.blocks.len()) }
}

/// Divides a block's gap by its predicted parts.
fn share(gap: f64, card: &Aligned<'_>, block: usize, causes: &mut Causes) {
    let marks = &card.predicted[card.blocks[block].predicted.clone()];
    let mut sum = Parts::default();
    for parts in marks.iter().filter(|mark| mark.ops > 0).filter_map(|mark| mark.parts) {
        sum.memory += parts.memory.max(0.0);
        sum.compute += parts.compute.max(0.0);
        sum.fixed += parts.fixed.max(0.0);
        sum.latency += parts.latency.max(0.0);
        sum.bandwidth += parts.bandwidth.max(0.0);
    }
    if card.links[block].is_some() {
        // Whatever else an exchange does, it is the links that take longer or shorter.
        (sum.memory, sum.compute, sum.fixed) = (0.0, 0.0, 0.0);
        if sum.latency + sum.bandwidth <= 0.0 {
            sum.latency = 1.0;
        }
    }
    let total = sum.total();
    if total > 0.0 && total.is_finite() {
        let each = gap / total;
        causes.memory += each * sum.memory;
        causes.compute += each * sum.compute;
        causes.host += each * sum.fixed;
        causes.latency += each * sum.latency;
        causes.bandwidth += each * sum.bandwidth;
    } else if marks.iter().all(|mark| mark.label.activity == Activity::Host) {
        causes.host += gap;
    } else {
        causes.unexplained += gap;
    }
}

/// For which card a block waited how long, of the `work` that it took in all.
fn waiting(
    cards: &[Aligned<'_>],
    groups: &HashMap<Link, Vec<(usize, usize)>>,
    own: (usize, usize),
    side: Side,
    work: f64,
) -> Option<Wait> {
    let link = cards[own.0].links[own.1]?;
    let (start, end) = cards[own.0].times(side, own.1);
    let (line, at, point) = match link.activity {
        Activity::Handoff => sender(cards, own.0, link.layer, side, end)?,
        _ => last_to_come(cards, groups.get(&link)?, own.0, side, end)?,
    };
    let seconds = at - start;
    if seconds <= 0.0 {
        return None;
    }
    // What is not all inside the block's own marks cannot be followed to the other card.
    let until = point.filter(|_| seconds <= work);
    Some(Wait { card: cards[line].card, seconds: seconds.min(work), until })
}

/// The other card of an exchange that came last, of those that came before it was over: nobody waits for a card
/// that comes later.
fn last_to_come(
    cards: &[Aligned<'_>],
    group: &[(usize, usize)],
    own: usize,
    side: Side,
    end: f64,
) -> Option<(usize, f64, Option<Point>)> {
    let others = group.iter().filter(|(line, _)| *line != own);
    let starts = others.map(|&(line, block)| (line, block, cards[line].times(side, block).0));
    let there = starts.filter(|(_, _, start)| *start <= end);
    let last = there.max_by(|a, b| a.2.total_cmp(&b.2).then(b.0.cmp(&a.0)))?;
    Some((last.0, last.2, Some(Point::Start(last.0, last.1))))
}

/// The card that a hand-off comes from: the one that was last to finish work of an earlier layer before the
/// hand-off was there.
fn sender(
    cards: &[Aligned<'_>],
    own: usize,
    layer: u32,
    side: Side,
    end: f64,
) -> Option<(usize, f64, Option<Point>)> {
    let mut last: Option<(usize, f64, usize)> = None;
    for (line, card) in cards.iter().enumerate().filter(|(line, _)| *line != own) {
        let marks = card.marks(side);
        let done = marks.partition_point(|mark| mark.end <= end + HALF_NANOSECOND);
        let sends = |mark: &Mark| {
            let work = !matches!(mark.label.activity, Activity::Handoff | Activity::Host);
            mark.ops > 0 && work && mark.label.layer < layer
        };
        let Some(index) = marks[..done].iter().rposition(sends) else { continue };
        if last.is_none_or(|(_, at, _)| marks[index].end > at) {
            last = Some((line, marks[index].end, index));
        }
    }
    let (line, at, index) = last?;
    let point = cards[line].ends_with(side, index).map(|block| Point::End(line, block));
    Some((line, at.min(end), point.filter(|_| at <= end)))
}
