// SPDX-License-Identifier: Apache-2.0
//! Traces: what each card did when, whoever says so.
//!
//! The simulator makes traces from plans; a run on cards makes the same kind of trace, so that the two
//! can be compared step by step.

pub(crate) mod perfetto;

use std::cmp::Ordering;
use std::fmt::Write;

use serde::{Deserialize, Serialize};

/// Half of the grid of times in files. Times that were computed on two ways may differ by less.
pub(crate) const HALF_NANOSECOND: f64 = 0.5e-9;

/// By card, then in the order of time.
pub(crate) fn in_order(a: &Mark, b: &Mark) -> Ordering {
    let times = || a.start.total_cmp(&b.start).then(a.end.total_cmp(&b.end));
    a.card.cmp(&b.card).then_with(times).then(a.op.cmp(&b.op))
}

/// What a card was doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Activity {
    /// Waiting for the host or handing it the result.
    Host,
    /// Looking up embeddings.
    Embed,
    /// Queries, keys, values and attention.
    Attention,
    /// The product after attention.
    Output,
    /// The first half of the feed-forward network.
    Up,
    /// The second half of the feed-forward network.
    Down,
    /// The head.
    Head,
    /// A collective.
    Exchange,
    /// A hand-off from the stage before.
    Handoff,
    /// Nothing, until a loss is noticed.
    Stall,
    /// Fetching weights again after a loss.
    Reload,
}

impl Activity {
    /// Every activity.
    pub const ALL: [Activity; 11] = [
        Activity::Host,
        Activity::Embed,
        Activity::Attention,
        Activity::Output,
        Activity::Up,
        Activity::Down,
        Activity::Head,
        Activity::Exchange,
        Activity::Handoff,
        Activity::Stall,
        Activity::Reload,
    ];

    /// The name that traces show.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Activity::Host => "host",
            Activity::Embed => "embed",
            Activity::Attention => "attention",
            Activity::Output => "output",
            Activity::Up => "up",
            Activity::Down => "down",
            Activity::Head => "head",
            Activity::Exchange => "exchange",
            Activity::Handoff => "hand-off",
            Activity::Stall => "stall",
            Activity::Reload => "reload",
        }
    }

    /// The letter that a text chart shows.
    const fn letter(self) -> char {
        match self {
            Activity::Exchange => '~',
            Activity::Handoff => '>',
            Activity::Stall => '!',
            Activity::Reload => 'r',
            Activity::Host => 'h',
            _ => '#',
        }
    }
}

/// What a span of time was spent on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Label {
    /// What.
    pub activity: Activity,
    /// In which layer; the number of layers for what comes after the last.
    pub layer: u32,
    /// For which token of the run.
    pub token: u32,
}

/// What a predicted span of time consists of, in seconds. The parts add up to it.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Parts {
    /// Local memory.
    pub memory: f64,
    /// Arithmetic, as far as it takes longer than the memory traffic that it overlaps.
    pub compute: f64,
    /// Fixed costs of operators and steps, and the way to the host.
    pub fixed: f64,
    /// Latencies of links.
    pub latency: f64,
    /// Bytes on links.
    pub bandwidth: f64,
    /// Waiting for cards that are not yet there.
    pub waiting: f64,
}

impl Parts {
    /// The whole time.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.memory + self.compute + self.fixed + self.latency + self.bandwidth + self.waiting
    }
}

/// One card, one activity, from when to when, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Mark {
    /// The card.
    pub card: u32,
    /// The activity.
    pub label: Label,
    /// The number, in the card's program of the step, of the first operator that it covers.
    pub op: u32,
    /// How many operators it covers, one after the other; 0 for what is not in the program.
    pub ops: u32,
    /// When it began.
    pub start: f64,
    /// When it was over.
    pub end: f64,
    /// What the time consists of, where somebody predicted it.
    pub parts: Option<Parts>,
}

impl Mark {
    /// A span of time that belongs to no operator of a program.
    #[must_use]
    pub fn outside(card: u32, label: Label, start: f64, end: f64) -> Mark {
        Mark { card, label, op: 0, ops: 0, start, end, parts: None }
    }
}

/// Something that happened to the run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Incident {
    /// When, in seconds.
    pub at: f64,
    /// What, in words.
    pub what: String,
}

/// What each card did when.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Trace {
    /// Cards of the cluster.
    pub cards: usize,
    /// When each token was complete, in seconds.
    pub tokens: Vec<f64>,
    /// Everything that every card did; empty if nobody asked for it.
    pub marks: Vec<Mark>,
    /// What happened besides the plan.
    pub incidents: Vec<Incident>,
    /// Steps, messages and pieces of work that were simulated.
    pub events: u64,
}

impl Trace {
    /// When everything was over, in seconds.
    #[must_use]
    pub fn end(&self) -> f64 {
        let marks = self.marks.iter().map(|mark| mark.end);
        marks.chain(self.tokens.iter().copied()).fold(0.0, f64::max)
    }

    /// The first two marks of a card that overlap by half a nanosecond or more. Cards do one thing at a time,
    /// so a trace that has such marks is wrong.
    #[must_use]
    pub fn overlap(&self) -> Option<(Mark, Mark)> {
        let mut marks: Vec<&Mark> = self.marks.iter().collect();
        marks.sort_by(|a, b| in_order(a, b));
        let clash = |pair: &&[&Mark]| {
            pair[0].card == pair[1].card && pair[0].end - pair[1].start >= HALF_NANOSECOND
        };
        marks.windows(2).find(clash).map(|pair| (*pair[0], *pair[1]))
    }

    /// A chart for the terminal: a line for each card, `width` columns for the whole run. A column shows
    /// what took most of its time.
    #[must_use]
    pub fn to_chart(&self, width: usize) -> String {
        let (end, width) = (self.end().max(1e-12), width.max(10));
        let column = end / width as f64;
        let mut out = String::new();
        for card in 0..self.cards {
            let mut spent = vec![Vec::<(char, f64)>::new(); width];
            for mark in self.marks.iter().filter(|mark| mark.card as usize == card) {
                let first = ((mark.start / column) as usize).min(width - 1);
                let last = ((mark.end / column) as usize).min(width - 1);
                for (index, shares) in spent.iter_mut().enumerate().take(last + 1).skip(first) {
                    let (begin, end) = (index as f64 * column, (index + 1) as f64 * column);
                    let time = mark.end.min(end) - mark.start.max(begin);
                    let letter = mark.label.activity.letter();
                    match shares.iter_mut().find(|(known, _)| *known == letter) {
                        Some((_, sum)) => *sum += time,
                        None => shares.push((letter, time)),
                    }
                }
            }
            let shown = spent.iter().map(|shares| {
                let idle = column - shares.iter().map(|(_, time)| time).sum::<f64>();
                let most = shares.iter().max_by(|a, b| a.1.total_cmp(&b.1));
                most.filter(|(_, time)| *time >= idle).map_or('.', |(letter, _)| *letter)
            });
            let _ = writeln!(out, "card {card:>3} |{}|", shown.collect::<String>());
        }
        let _ = writeln!(
            out,
            "# work  ~ exchange  > hand-off  h host  ! stalled  r reload  . idle; {} a column",
            spanker_topology::Seconds(column)
        );
        out
    }
}
