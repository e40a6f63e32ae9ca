// SPDX-License-Identifier: Apache-2.0
//! The whole of a step: the gap along the measured critical path.
//!
//! Each card carries the causes of its gap since the step began. Where it waited for another card, it takes
//! over that card's causes up to then in place of its own: until that moment the other card was the
//! reason. What the other card itself was predicted to wait there did not happen, and counts as negative
//! waiting for the card that was predicted to come last. The card that ends the step has the whole.

use super::align::Pair;
use super::attribute::{Line, Point};
use super::{Causes, Gap};

pub(super) fn whole(pair: &Pair<'_>, lines: &[Line]) -> Gap {
    let mut order: Vec<(f64, f64, usize, usize)> = Vec::new();
    for (line, spans) in lines.iter().map(|line| &line.spans).enumerate() {
        let mut end = f64::NEG_INFINITY;
        for (index, span) in spans.iter().enumerate() {
            // Marks may overlap by less than the grid; a card's order counts nevertheless.
            end = span.measured.1.max(end);
            order.push((end, span.measured.0, line, index));
        }
    }
    let by_place = |a: &(f64, f64, usize, usize)| (a.2, a.3);
    order.sort_by(|a, b| {
        let times = a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1));
        times.then(by_place(a).cmp(&by_place(b)))
    });
    let mut known = Known { lines, ends: lines.iter().map(|_| Vec::new()).collect() };
    for (_, _, line, span) in order {
        let causes = known.after(line, span);
        known.ends[line].push(causes);
    }
    let ender = pair.measured.cards.keys().position(|&card| card == pair.measured.ender);
    let ender = ender.unwrap_or(0);
    let mut causes = known.ends[ender].last().cloned().unwrap_or_default();
    causes.add(&lines[ender].tail, 1.0);
    let predicted = pair.predicted.end - pair.begin.0;
    Gap { predicted, measured: pair.measured.end - pair.begin.1, causes }
}

/// What is known of the causes at the ends of spans, line by line.
struct Known<'a> {
    lines: &'a [Line],
    ends: Vec<Vec<Causes>>,
}

impl Known<'_> {
    /// The causes up to the beginning of a span, if they are known by now.
    fn start(&self, line: usize, span: usize) -> Option<Causes> {
        let mut causes = match span.checked_sub(1) {
            None => Causes::default(),
            Some(before) => self.ends[line].get(before)?.clone(),
        };
        causes.add(&self.lines[line].spans[span].before, 1.0);
        Some(causes)
    }

    /// The causes up to a moment, and when that was predicted to be.
    fn at(&self, point: Point) -> Option<(Causes, f64)> {
        match point {
            Point::Start(line, span) => {
                let predicted = self.lines[line].spans[span].predicted_start;
                Some((self.start(line, span)?, predicted))
            }
            Point::End(line, span) => {
                let predicted = self.lines[line].spans[span].predicted_end;
                Some((self.ends[line].get(span)?.clone(), predicted))
            }
        }
    }

    /// The causes up to the end of a span.
    fn after(&self, line: usize, index: usize) -> Causes {
        let span = &self.lines[line].spans[index];
        let came_from = span.waited.and_then(|wait| self.at(wait.until?));
        let Some((mut causes, then)) = came_from else {
            let mut causes = self.start(line, index).expect("a card's spans come in order");
            causes.add(&span.inside(), 1.0);
            return causes;
        };
        let (last, to_wait) = span.to_wait.unwrap_or((self.lines[line].card, 0.0));
        causes.wait(last, then - (span.predicted_start + to_wait));
        causes.add(&span.rest, 1.0);
        causes
    }
}
