// SPDX-License-Identifier: Apache-2.0
//! What the programs of a group take, added up while they are written: nothing of them is kept but the
//! exchanges.

use crate::program::{Cost, Load, Loads, Op, Reach, Sink, Terms};

/// One rank's part.
pub(crate) struct RankTally<'c> {
    cost: &'c Cost,
    loads: Loads,
    /// Since the last exchange.
    sum: Terms,
    /// Exchanges so far.
    phase: usize,
}

impl<'c> RankTally<'c> {
    pub(crate) fn new(cost: &'c Cost) -> RankTally<'c> {
        RankTally { cost, loads: Loads::default(), sum: Terms::default(), phase: 0 }
    }
}

/// The work of all ranks between exchanges, and the exchanges.
pub(crate) struct Tally<'c> {
    pub(crate) ranks: Vec<RankTally<'c>>,
    /// Phase by phase, what the slowest rank takes.
    pub(crate) phases: Vec<Terms>,
    /// The exchanges, as the first rank has them.
    pub(crate) exchanges: Vec<Op>,
    /// How far back the step's rows look.
    pub(crate) reach: Reach,
}

impl Tally<'_> {
    fn close_phase(&mut self, member: usize) {
        let rank = &mut self.ranks[member];
        let (sum, phase) = (std::mem::take(&mut rank.sum), rank.phase);
        rank.phase += 1;
        match self.phases.get_mut(phase) {
            Some(slowest) => *slowest = slowest.later(sum),
            None => self.phases.push(sum),
        }
    }

    /// Nothing more is written.
    pub(crate) fn close(&mut self) {
        (0..self.ranks.len()).for_each(|member| self.close_phase(member));
    }

    /// The work of all phases.
    pub(crate) fn work(&self) -> Terms {
        self.phases.iter().fold(Terms::default(), |sum, &phase| sum.plus(phase))
    }
}

impl Sink for Tally<'_> {
    // Every call has an entry of a known kind: inlined, it is never built.
    #[inline(always)]
    fn push(&mut self, member: usize, op: Op) {
        match &op {
            Op::Work(work) => {
                let rank = &mut self.ranks[member];
                if let Some(load) = rank.loads.next(work, &self.reach) {
                    rank.sum = rank.sum.plus(rank.cost.operator(&load));
                }
            }
            // The tables of a step are a copy that nothing is put together with.
            Op::Data { length, .. } => {
                let rank = &mut self.ranks[member];
                rank.sum = rank.sum.plus(rank.cost.operator(&Load::data(*length)));
            }
            Op::Mark { .. } | Op::Tap(_) => {}
            _ => {
                self.ranks[member].loads.interrupt();
                self.close_phase(member);
                if member == 0 {
                    self.exchanges.push(op);
                }
            }
        }
    }
}
