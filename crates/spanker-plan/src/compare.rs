// SPDX-License-Identifier: Apache-2.0
//! A prediction beside a measurement: where the time went that was not predicted.
//!
//! Two traces of the same steps are aligned by step (the token in the labels), card and operator number. A
//! gap is measured minus predicted: positive means slower than predicted, everywhere. It is divided into
//! causes that add up to it.
//!
//! * **A card's step** lasts from the end of the step before (on whichever card that ended last) to the end of
//!   the step, so it is equally long for all cards and includes waiting. An operator's gap goes to memory,
//!   compute and host in proportion to its predicted parts. In an exchange a card waits for the card that
//!   came last; the remainder goes to the links. After its last operator a card waits for the card that
//!   ends the step.
//! * **The whole** follows the measured critical path, backwards from the end of the step: where the path waited
//!   for a card, it goes on with what that card did until then. So a slow card shows there with the reason
//!   why it is slow, and as `waiting for card N` on the other cards.
//!
//! * **A run that lost a card** is several pieces, each on a layout of its own. A piece is compared with the
//!   prediction of its layout; the time from the end of one piece to the beginning of the next is a cause of
//!   its own, recovery, and no prediction has it.
//!
//! This deliberately knows nothing of plans and profiles: everything is in the two traces.

mod align;
mod attribute;
mod path;
mod report;

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use crate::trace::perfetto::Origin;
use crate::trace::{HALF_NANOSECOND, Trace};

/// Why traces cannot be compared.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CompareError {
    /// A trace has nothing in it.
    #[error("the {which} trace has no marks")]
    Empty {
        /// Which of the two.
        which: &'static str,
    },
    /// A mark that cannot be.
    #[error("the {which} trace is wrong: card {card}, token {token}, op {op}: {what}")]
    Mark {
        /// Which of the two.
        which: &'static str,
        /// Whose mark.
        card: u32,
        /// Of which step.
        token: u32,
        /// Of which operator.
        op: u32,
        /// What is wrong with it.
        what: &'static str,
    },
    /// Other cards did the work.
    #[error(
        "the traces do not belong together: predicted for cards {predicted}, measured on cards {measured}"
    )]
    Cards {
        /// Cards with marks in the prediction.
        predicted: String,
        /// Cards with marks in the measurement.
        measured: String,
    },
    /// They have no step in common.
    #[error(
        "the traces do not belong together: predicted for tokens {predicted}, measured for tokens {measured}"
    )]
    Tokens {
        /// Tokens of the prediction.
        predicted: String,
        /// Tokens of the measurement.
        measured: String,
    },
    /// A card did more than its program has.
    #[error(
        "the traces do not belong together: token {token}, card {card}: op {op} was measured, and the predicted program has {ops} operators"
    )]
    Beyond {
        /// The step.
        token: u32,
        /// The card.
        card: u32,
        /// The last operator that was measured.
        op: u32,
        /// How many operators were predicted.
        ops: u32,
    },
    /// Every common step had to be left out.
    #[error("no step can be compared; token {token}: {why}")]
    Nothing {
        /// The first of them.
        token: u32,
        /// Why it was left out.
        why: String,
    },
    /// A piece that begins while the one before it still ran.
    #[error("it begins {seconds} s before the piece before it has ended")]
    Order {
        /// How long before.
        seconds: f64,
    },
    /// A piece of a run cannot be compared.
    #[error("piece {piece}: {source}")]
    Piece {
        /// Which, from 0.
        piece: usize,
        /// Why.
        source: Box<CompareError>,
    },
}

/// Seconds by cause. They may be negative: what took less time than predicted.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Causes {
    /// Local memory.
    pub memory: f64,
    /// Arithmetic.
    pub compute: f64,
    /// Latencies of links.
    pub latency: f64,
    /// Bytes on links.
    pub bandwidth: f64,
    /// Waiting, by the card that was waited for.
    pub waiting: BTreeMap<u32, f64>,
    /// The host: fixed costs of operators, and what is between steps.
    pub host: f64,
    /// Going on after a loss: noticing it, planning anew, bringing weights onto the cards that are left.
    pub recovery: f64,
    /// Time inside a step in which a card did nothing that the program has.
    pub not_in_program: f64,
    /// What is left: operators that only one of the traces has, or that have no predicted parts.
    pub unexplained: f64,
}

impl Causes {
    /// All of it, with signs.
    #[must_use]
    pub fn total(&self) -> f64 {
        let own = self.memory + self.compute + self.latency + self.bandwidth;
        own + self.host + self.recovery + self.not_in_program + self.unexplained + self.waited()
    }

    /// Waiting for whichever card.
    #[must_use]
    pub fn waited(&self) -> f64 {
        self.waiting.values().sum()
    }

    /// The part that has a cause other than `unexplained`, of all causes without their signs.
    #[must_use]
    pub fn attributed(&self) -> f64 {
        let own = [self.memory, self.compute, self.latency, self.bandwidth, self.host];
        let all = own.iter().chain(self.waiting.values()).map(|seconds| seconds.abs());
        let rest = [self.recovery, self.not_in_program, self.unexplained];
        let all = all.sum::<f64>() + rest.iter().map(|seconds| seconds.abs()).sum::<f64>();
        if all > 0.0 { 1.0 - self.unexplained.abs() / all } else { 1.0 }
    }

    fn wait(&mut self, card: u32, seconds: f64) {
        if seconds != 0.0 {
            *self.waiting.entry(card).or_default() += seconds;
        }
    }

    /// Adds `factor` times `other`.
    fn add(&mut self, other: &Causes, factor: f64) {
        self.memory += factor * other.memory;
        self.compute += factor * other.compute;
        self.latency += factor * other.latency;
        self.bandwidth += factor * other.bandwidth;
        self.host += factor * other.host;
        self.recovery += factor * other.recovery;
        self.not_in_program += factor * other.not_in_program;
        self.unexplained += factor * other.unexplained;
        for (&card, &seconds) in &other.waiting {
            self.wait(card, factor * seconds);
        }
    }
}

/// What was predicted, what was measured, and why they differ, in seconds.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Gap {
    /// Predicted.
    pub predicted: f64,
    /// Measured.
    pub measured: f64,
    /// Why they differ. The causes add up to [`seconds`](Self::seconds).
    pub causes: Causes,
}

impl Gap {
    /// Measured minus predicted: positive if it was slower than predicted.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.measured - self.predicted
    }

    /// The gap in percent of the prediction; nothing if that is no time at all.
    #[must_use]
    pub fn percent(&self) -> Option<f64> {
        (self.predicted > 0.0).then(|| 100.0 * self.seconds() / self.predicted)
    }

    fn add(&mut self, other: &Gap) {
        self.predicted += other.predicted;
        self.measured += other.measured;
        self.causes.add(&other.causes, 1.0);
    }

    /// Adds time that no prediction has.
    fn recover(&mut self, seconds: f64) {
        self.measured += seconds;
        self.causes.recovery += seconds;
    }
}

/// A card's gap.
#[derive(Debug, Clone, PartialEq)]
pub struct CardGap {
    /// The card.
    pub card: u32,
    /// Its gap.
    pub gap: Gap,
}

/// The gap of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepGap {
    /// Which piece of the run it is in, from 0.
    pub piece: usize,
    /// The token in the step's labels.
    pub token: u32,
    /// The whole step, along the critical path.
    pub whole: Gap,
    /// The same time as each card saw it.
    pub cards: Vec<CardGap>,
}

/// A step that is not compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOut {
    /// Which piece of the run it is in, from 0.
    pub piece: usize,
    /// The token in the step's labels.
    pub token: u32,
    /// Why.
    pub why: String,
}

/// A piece of a run: steps on one layout.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PieceGap {
    /// Seconds from the end of the piece before to the beginning of this one. They are part of the piece.
    pub recovery: f64,
    /// The sum over the piece's steps, and its recovery.
    pub whole: Gap,
    /// The same for each card that took part in the piece.
    pub cards: Vec<CardGap>,
}

/// A prediction beside a measurement.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    /// The sum over all pieces.
    pub whole: Gap,
    /// The sum over all pieces for each card.
    pub cards: Vec<CardGap>,
    /// The pieces of the run: one where no card was lost.
    pub pieces: Vec<PieceGap>,
    /// Every step that was compared.
    pub steps: Vec<StepGap>,
    /// Steps that were not.
    pub left_out: Vec<LeftOut>,
}

impl Comparison {
    /// `recoveries` are the seconds before each piece.
    fn new(recoveries: &[f64], steps: Vec<StepGap>, left_out: Vec<LeftOut>) -> Comparison {
        let piece = |(number, &recovery): (usize, &f64)| {
            PieceGap::new(recovery, steps.iter().filter(|step| step.piece == number))
        };
        let pieces: Vec<PieceGap> = recoveries.iter().enumerate().map(piece).collect();
        let (whole, cards) = sum(pieces.iter().map(|piece| (&piece.whole, &piece.cards[..])));
        Comparison { whole, cards, pieces, steps, left_out }
    }

    /// The comparison of some tokens alone, without what is between pieces.
    #[must_use]
    pub fn of_tokens(&self, tokens: &RangeInclusive<u32>) -> Comparison {
        let steps = self.steps.iter().filter(|step| tokens.contains(&step.token)).cloned();
        let left_out = self.left_out.iter().filter(|left| tokens.contains(&left.token)).cloned();
        let recoveries = vec![0.0; self.pieces.len()];
        Comparison::new(&recoveries, steps.collect(), left_out.collect())
    }
}

impl PieceGap {
    fn new<'a>(recovery: f64, steps: impl Iterator<Item = &'a StepGap>) -> PieceGap {
        let (mut whole, mut cards) = sum(steps.map(|step| (&step.whole, &step.cards[..])));
        whole.recover(recovery);
        cards.iter_mut().for_each(|card| card.gap.recover(recovery));
        PieceGap { recovery, whole, cards }
    }
}

/// Adds gaps up, those of each card by themselves.
fn sum<'a>(parts: impl Iterator<Item = (&'a Gap, &'a [CardGap])>) -> (Gap, Vec<CardGap>) {
    let mut whole = Gap::default();
    let mut cards: BTreeMap<u32, Gap> = BTreeMap::new();
    for (gap, own) in parts {
        whole.add(gap);
        for CardGap { card, gap } in own {
            cards.entry(*card).or_default().add(gap);
        }
    }
    (whole, cards.into_iter().map(|(card, gap)| CardGap { card, gap }).collect())
}

/// Compares a prediction with the measurement of what was predicted.
///
/// ```
/// use spanker_plan::{Activity, Label, Mark, Parts, Trace, compare};
/// let label = Label { activity: Activity::Up, layer: 0, token: 0 };
/// let parts = Parts { memory: 1e-3, ..Parts::default() };
/// let mark = Mark { card: 0, label, op: 0, ops: 1, start: 0.0, end: 1e-3, parts: Some(parts) };
/// let trace = |mark| Trace { cards: 1, tokens: vec![], marks: vec![mark], incidents: vec![], events: 0 };
/// let slower = Mark { end: 1.2e-3, parts: None, ..mark };
/// let comparison = compare(&trace(mark), &trace(slower))?;
/// assert!((comparison.whole.causes.memory - 0.2e-3).abs() < 1e-12);
/// # Ok::<(), spanker_plan::CompareError>(())
/// ```
///
/// # Errors
/// [`CompareError`] for traces that do not belong together. Steps that only one of them has are left out.
pub fn compare(predicted: &Trace, measured: &Trace) -> Result<Comparison, CompareError> {
    let (steps, left_out) = piece(0, predicted, measured)?;
    Ok(Comparison::new(&[0.0], steps, left_out))
}

/// Compares a run that went on with another layout after a loss: for each piece the prediction of the layout
/// that ran, and its measurement. All measurements are on one clock, and cards have the same numbers in all of
/// them. A piece in which nothing was measured, because another card was lost before its first step was over,
/// has no steps.
///
/// # Errors
/// [`CompareError::Piece`] for a piece whose traces do not belong together, or that begins before the one before
/// it has ended; [`CompareError::Empty`] if nothing was measured in any of them.
pub fn compare_pieces(pieces: &[(Trace, Trace)]) -> Result<Comparison, CompareError> {
    let (mut steps, mut left_out, mut recoveries) = (Vec::new(), Vec::new(), Vec::new());
    let mut ended: Option<f64> = None;
    for (number, (predicted, measured)) in pieces.iter().enumerate() {
        let wrong = |source| CompareError::Piece { piece: number, source: Box::new(source) };
        recoveries.push(0.0);
        if measured.marks.is_empty() {
            continue;
        }
        let (more, left) = piece(number, predicted, measured).map_err(wrong)?;
        steps.extend(more);
        left_out.extend(left);
        let steps_of = align::Steps::of(measured, Origin::Measured).map_err(wrong)?;
        let Some((begin, end)) = steps_of.extent() else { continue };
        if let Some(before) = ended {
            if before - begin >= HALF_NANOSECOND {
                return Err(wrong(CompareError::Order { seconds: before - begin }));
            }
            recoveries[number] = (begin - before).max(0.0);
        }
        ended = Some(end);
    }
    match ended {
        None => Err(CompareError::Empty { which: Origin::Measured.name() }),
        Some(_) => Ok(Comparison::new(&recoveries, steps, left_out)),
    }
}

fn piece(
    number: usize,
    predicted: &Trace,
    measured: &Trace,
) -> Result<(Vec<StepGap>, Vec<LeftOut>), CompareError> {
    let predicted = align::Steps::of(predicted, Origin::Predicted)?;
    let measured = align::Steps::of(measured, Origin::Measured)?;
    let pairs = align::pairs(&predicted, &measured)?;
    let (mut steps, mut left_out) = (Vec::new(), Vec::new());
    for (token, pair) in pairs {
        match pair {
            Ok(pair) => {
                let lines = attribute::lines(token, &pair)?;
                let cards = lines.iter().map(|line| line.gap(&pair));
                let (cards, whole) = (cards.collect(), path::whole(&pair, &lines));
                steps.push(StepGap { piece: number, token, whole, cards });
            }
            Err(why) => left_out.push(LeftOut { piece: number, token, why }),
        }
    }
    match (steps.is_empty(), left_out.first()) {
        (true, Some(left)) => {
            Err(CompareError::Nothing { token: left.token, why: left.why.clone() })
        }
        _ => Ok((steps, left_out)),
    }
}
