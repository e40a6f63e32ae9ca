// SPDX-License-Identifier: Apache-2.0
//! Going on after a loss: notice it, plan anew, fetch what is missing, rebuild what is lost.

use spanker_topology::{Bytes, Seconds};

use super::engine::Ended;
use super::{Fault, Run};
use crate::choose::choose;
use crate::cost::Pricer;
use crate::plan::{Layout, Stage};
use crate::predict::predict;
use crate::program::WeightLayout;
use crate::trace::{Activity, Incident, Label, Mark};
use crate::{Request, Strategy};

impl Run<'_> {
    /// Deals with whatever has died by the time everyone is stuck. False if the rest cannot go on.
    pub(super) fn recover(&mut self, ended: &Ended, participants: &[usize], position: u64) -> bool {
        let stuck = participants.iter().map(|&card| ended.clocks[card]).fold(self.clock, f64::max);
        let new: Vec<Fault> = self.unnoticed(stuck);
        for fault in &new {
            let what = match *fault {
                Fault::Card { card, .. } => {
                    self.dead.push(card);
                    format!("card {card} dies")
                }
                Fault::Link { from, to, .. } => {
                    self.cut.push((from, to));
                    format!("link {from}-{to} dies")
                }
            };
            self.trace.incidents.push(Incident { at: fault.at(), what });
        }
        let last = new.iter().map(Fault::at).fold(stuck, f64::max);
        let noticed = last + self.conditions.deadline.0;
        let survivors: Vec<usize> =
            (0..self.cluster.cards()).filter(|card| !self.dead.contains(card)).collect();
        for &card in participants.iter().filter(|card| survivors.contains(card)) {
            self.mark(card, Activity::Stall, ended.clocks[card], noticed);
        }
        self.clock = noticed;
        if new.is_empty() || survivors.is_empty() {
            self.note("nobody is left to go on".into());
            return false;
        }
        self.cluster = self.plan.cluster.without(&self.dead, &self.cut);
        let request = &self.plan.request;
        let choice = choose(&self.plan.model, &self.cluster, &survivors, request);
        let Some(best) = choice.ok().and_then(|choice| choice.best().cloned()) else {
            let left = survivors.len();
            self.note(format!("the model does not fit on the {left} cards that are left"));
            return false;
        };
        let strategy: Strategy = best.strategy;
        let cards = best.layout.cards();
        self.note(format!("noticed; new plan: {strategy} on cards {cards:?}"));
        let until = self.reload(&best.layout);
        self.layout = best.layout;
        self.clock = until + self.rebuild(position).0;
        true
    }

    /// What has died up to a time and was not dealt with; the next fault to come if nothing has.
    fn unnoticed(&self, until: f64) -> Vec<Fault> {
        let open = |fault: &&Fault| match **fault {
            Fault::Card { card, .. } => !self.dead.contains(&card),
            Fault::Link { from, to, .. } => !self.cut.contains(&(from, to)),
        };
        let open: Vec<Fault> = self.conditions.faults.iter().filter(open).copied().collect();
        let past: Vec<Fault> = open.iter().filter(|fault| fault.at() <= until).copied().collect();
        if !past.is_empty() {
            return past;
        }
        open.into_iter().min_by(|a, b| a.at().total_cmp(&b.at())).into_iter().collect()
    }

    fn note(&mut self, what: String) {
        self.trace.incidents.push(Incident { at: self.clock, what });
    }

    fn mark(&mut self, card: usize, activity: Activity, start: f64, end: f64) {
        if self.conditions.record && end > start {
            let label = Label { activity, layer: 0, token: self.trace.tokens.len() as u32 };
            self.trace.marks.push(Mark::outside(card as u32, label, start, end));
        }
    }

    /// Every card fetches the weights that it lacks from the host; returns when the last has them.
    fn reload(&mut self, to: &Layout) -> f64 {
        let begun = self.clock;
        let mut latest = begun;
        for stages in &to.replicas {
            for (index, stage) in stages.iter().enumerate() {
                for (rank, &card) in stage.group.cards.iter().enumerate() {
                    let bytes = self.missing(stages, index, rank, card);
                    if bytes > 0 {
                        let end = begun + self.cluster.upload(card, Bytes(bytes)).0;
                        self.mark(card, Activity::Reload, begun, end);
                        latest = latest.max(end);
                    }
                }
            }
        }
        self.clock = latest;
        if latest > begun {
            self.note("every card has the weights that it lacked".into());
        }
        latest
    }

    /// Bytes of a rank's weights that its card does not have from the layout before.
    fn missing(&self, to: &[Stage], index: usize, rank: usize, card: usize) -> u64 {
        let model = &self.plan.model;
        let place = |stages: &[Stage], index: usize| (index == 0, index + 1 == stages.len());
        let wanted = WeightLayout::of(model, &to[index], rank, place(to, index));
        let held = self.layout.replicas.iter().find_map(|stages| {
            stages.iter().enumerate().find_map(|(index, stage)| {
                let rank = stage.group.cards.iter().position(|&c| c == card)?;
                Some(WeightLayout::of(model, stage, rank, place(stages, index)))
            })
        });
        held.map_or(wanted.bytes, |held| wanted.missing_in(&held))
    }

    /// The time to compute the keys and values anew that went with the dead.
    fn rebuild(&mut self, position: u64) -> Seconds {
        if position == 0 {
            return Seconds::ZERO;
        }
        let request = Request { prompt: position, ..self.plan.request.clone() };
        let pricer = Pricer::new(&self.plan.model, &self.cluster, &request);
        let time = predict(&pricer, &self.layout).ttft;
        self.note(format!("keys and values of {position} tokens are computed anew: {time}"));
        time
    }
}
