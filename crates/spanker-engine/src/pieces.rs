// SPDX-License-Identifier: Apache-2.0
//! A run beside its own prediction, operator by operator: the same plan, prompt and steps in virtual time. A run
//! that lost a card is several pieces, each beside the prediction of the layout that it ran on.

use std::ops::Range;
use std::time::Duration;

use spanker_llm::Recorder;
use spanker_plan::{
    Comparison, Conditions, Incident, Mark, Origin, Plan, Request, Trace, compare_pieces,
    perfetto_of_both, simulate,
};

use crate::error::Result;
use crate::host::Backend;
use crate::{directory, layout};

/// Steps of a run on one layout.
#[derive(Debug, Clone)]
pub struct Piece {
    /// What it ran by.
    pub plan: Plan,
    /// The tokens that it began with: the prompt, or after a loss all tokens so far.
    pub tokens: Vec<u32>,
    /// What cards did when, if that was asked for.
    pub recorder: Option<Recorder>,
    /// The number in the run of each card of the plan: its number in the first piece.
    pub cards: Vec<u32>,
    /// How long the cards had nothing to do before it, by the host's clock.
    pub recovery: Duration,
}

impl Piece {
    /// The piece that a run begins with.
    pub(crate) fn first(plan: Plan, prompt: Vec<u32>, recorder: Option<Recorder>) -> Piece {
        let cards = (0..plan.cluster.cards() as u32).collect();
        Piece { plan, tokens: prompt, recorder, cards, recovery: Duration::ZERO }
    }

    /// Collects what cards recorded, where they keep it themselves until the piece is over.
    pub(crate) fn collect(&mut self, backend: &dyn Backend) -> Result<()> {
        if self.recorder.is_some()
            && let Some(marks) = backend.marks()?
        {
            self.recorder = Some(Recorder::from(marks));
        }
        Ok(())
    }

    /// The plan, priced for what the piece began with and for steps from the `steps.start`th after the prompt to the
    /// `steps.end`th.
    pub(crate) fn priced(&self, prompt: usize, steps: &Range<usize>) -> Result<Plan> {
        let Plan { model, cluster, layout, request, .. } = &self.plan;
        let (context, batch) = (request.context as usize, request.batch as usize);
        // Half-way between both ends.
        let asked = layout::request(context, batch, prompt, steps.start + steps.end);
        let asked = Request { audit: request.audit, ..asked };
        Ok(Plan::new(model.clone(), cluster.clone(), asked, layout.clone())?)
    }

    /// What it is called in tables.
    fn name(&self, number: usize) -> String {
        let numbers: Vec<usize> =
            self.plan.layout.cards().iter().map(|&card| self.cards[card] as usize).collect();
        let (strategy, cards) = (self.plan.layout.strategy(), directory::list(&numbers));
        let tokens = self.tokens.len();
        let word = if numbers.len() == 1 { "card" } else { "cards" };
        format!("piece {number}: {strategy} on {word} {cards}, from token {tokens} on")
    }

    fn marks(&self) -> Vec<Mark> {
        self.recorder.as_ref().map(Recorder::marks).unwrap_or_default()
    }

    /// What cards did, with their numbers in the run.
    fn measured(&self) -> Trace {
        traced(self.renamed(self.marks()))
    }

    fn renamed(&self, mut marks: Vec<Mark>) -> Vec<Mark> {
        for mark in &mut marks {
            mark.card = self.cards.get(mark.card as usize).copied().unwrap_or(mark.card);
        }
        marks
    }

    /// The prediction of what was measured: the same tokens at the same positions on the same layout.
    fn predicted(&self, measured: &Trace) -> Result<Trace> {
        let begun = self.tokens.len();
        let last = measured.marks.iter().map(|mark| mark.label.token as usize).max();
        let steps = last.map_or(0, |last| (last + 1).saturating_sub(begun));
        let conditions = Conditions {
            prompt: true,
            // A simulation has a token at least; a piece may have the prompt alone.
            ..Conditions::calm(u32::try_from(steps).unwrap_or(u32::MAX).max(1))
        };
        let mut predicted = simulate(&self.priced(begun, &(0..steps))?, &conditions)?;
        if steps == 0 {
            predicted.marks.retain(|mark| (mark.label.token as usize) < begun);
            predicted.tokens.clear();
        }
        predicted.marks = self.renamed(predicted.marks);
        Ok(predicted)
    }
}

/// Which piece of a run stands for its speed, and which of the run's steps were made on it: the last one with steps
/// besides the one that was computed anew after the loss. `steps` are counted from the prompt on.
pub(crate) fn last_with_steps(
    pieces: &[Piece],
    prompt: usize,
    steps: usize,
) -> (usize, Range<usize>) {
    let mut end = steps;
    for (number, piece) in pieces.iter().enumerate().rev() {
        let start = piece.tokens.len().saturating_sub(prompt);
        if start < end || start == 0 {
            return (number, start.min(end)..end);
        }
        // The last token that a piece began with is the step that the piece before failed at.
        end = end.min(start - 1);
    }
    (0, 0..steps)
}

/// Which piece read the prompt in the end.
pub(crate) fn reader_of(pieces: &[Piece], prompt: usize) -> usize {
    pieces.iter().rposition(|piece| piece.tokens.len() == prompt).unwrap_or(0)
}

/// The traces of a run, predicted and measured, piece by piece.
#[derive(Debug)]
pub struct Compared {
    pieces: Vec<(Trace, Trace)>,
    names: Vec<String>,
}

impl Compared {
    /// Simulates what each piece ran.
    pub(crate) fn new(pieces: &[Piece]) -> Result<Compared> {
        let mut both = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let measured = piece.measured();
            both.push((piece.predicted(&measured)?, measured));
        }
        let names = pieces.iter().enumerate().map(|(number, piece)| piece.name(number));
        Ok(Compared { pieces: both, names: names.collect() })
    }

    /// Where the run's time differs from the predicted one.
    ///
    /// # Errors
    /// [`crate::EngineError::Compare`] for traces that cannot be laid side by side.
    pub fn comparison(&self) -> Result<Comparison> {
        Ok(compare_pieces(&self.pieces)?)
    }

    /// The predicted and the measured trace of each piece.
    #[must_use]
    pub fn traces(&self) -> &[(Trace, Trace)] {
        &self.pieces
    }

    /// What pieces are called.
    #[must_use]
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Both traces in one file: the prediction of each piece where the piece begins, or where the prediction before it
    /// ends if that is later.
    #[must_use]
    pub fn to_perfetto(&self) -> String {
        let none = || traced(Vec::new());
        let (mut predicted, mut measured) = (none(), none());
        for (number, (one, other)) in self.pieces.iter().enumerate() {
            let begin = match number {
                0 => 0.0,
                _ => other.marks.iter().map(|mark| mark.start).fold(f64::INFINITY, f64::min),
            };
            if begin.is_finite() {
                let begin = begin.max(predicted.end());
                append(&mut predicted, one, begin);
                append(&mut measured, other, 0.0);
            }
        }
        perfetto_of_both(&predicted, &measured)
    }
}

/// Adds what another trace has, so many seconds later.
fn append(trace: &mut Trace, other: &Trace, seconds: f64) {
    let later =
        |mark: &Mark| Mark { start: mark.start + seconds, end: mark.end + seconds, ..*mark };
    trace.cards = trace.cards.max(other.cards);
    trace.marks.extend(other.marks.iter().map(later));
    trace.tokens.extend(other.tokens.iter().map(|at| at + seconds));
    let incidents = other.incidents.iter().cloned();
    trace.incidents.extend(incidents.map(|one| Incident { at: one.at + seconds, ..one }));
    trace.events += other.events;
}

/// Marks as a trace, with the ends of all steps.
fn traced(marks: Vec<Mark>) -> Trace {
    let cards = marks.iter().map(|mark| mark.card as usize + 1).max().unwrap_or(0);
    let events = marks.len() as u64;
    let mut ends: std::collections::BTreeMap<u32, f64> = std::collections::BTreeMap::new();
    for mark in &marks {
        let end = ends.entry(mark.label.token).or_insert(0.0);
        *end = end.max(mark.end);
    }
    let tokens = ends.into_values().collect();
    Trace { cards, tokens, marks, incidents: Vec::new(), events }
}

/// The file of a measured trace alone.
pub(crate) fn alone(pieces: &[Piece]) -> String {
    let mut all = traced(Vec::new());
    pieces.iter().for_each(|piece| append(&mut all, &piece.measured(), 0.0));
    all.to_perfetto(Origin::Measured)
}

#[cfg(test)]
mod tests {
    use spanker_model::{Quant, builtin};
    use spanker_topology::{Cluster, Profile, Shape};

    use super::*;

    /// A piece that begins with so many tokens.
    fn piece(tokens: usize) -> Piece {
        let model = builtin("smollm2-135m", Quant::Q4_0).expect("a model");
        let profile = Profile::builtin("rev-a").expect("a profile");
        let cluster = Cluster::uniform(profile, 1, Shape::Ring).expect("a card");
        let request = layout::request(64, 8, 3, 8);
        let layout = layout::Split::Gather.layout(&model, &[1.0]).expect("a layout");
        let plan = Plan::new(model, cluster, request, layout);
        Piece::first(plan.expect("a plan"), vec![0; tokens], None)
    }

    #[test]
    fn steps_that_stand_for_a_run_are_on_one_layout_and_none_was_computed_anew() {
        let pieces = |begun: &[usize]| begun.iter().map(|&at| piece(at)).collect::<Vec<_>>();
        for (begun, steps, expected) in [
            (&[3][..], 8, (0, 0..8)),
            // The piece after the loss began with the token of step 4, the fifth.
            (&[3, 8], 8, (1, 5..8)),
            // Its only step is the one that was computed anew.
            (&[3, 8], 5, (0, 0..4)),
            (&[3, 8, 8], 5, (0, 0..4)),
            (&[3, 8, 10], 7, (1, 5..6)),
            // A card that was wrong: everything again from the prompt.
            (&[3, 3], 8, (1, 0..8)),
            (&[3, 8, 3], 8, (2, 0..8)),
            (&[3], 0, (0, 0..0)),
        ] {
            assert_eq!(last_with_steps(&pieces(begun), 3, steps), expected, "{begun:?}");
        }
        assert_eq!(reader_of(&pieces(&[3, 8, 10]), 3), 0);
        assert_eq!(reader_of(&pieces(&[3, 8, 3, 9]), 3), 2);
    }
}
