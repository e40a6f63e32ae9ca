// SPDX-License-Identifier: Apache-2.0
//! Every step twice: on cards, and on threads of this host with the same layout, which gives the same bits.
//! Nothing is given out before both agree.

use crate::LlmError;
use crate::cards::OnCards;
use crate::runner::{Outcome, Runner, Step};

/// How often a step is run again, with other operators checked, to find the card that was wrong.
const SEARCHES: u64 = 200;

/// Cards, and what checks all that they give.
pub struct Twice<'a> {
    cards: OnCards<'a>,
    host: Box<dyn Runner + 'a>,
}

impl std::fmt::Debug for Twice<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Twice").field("cards", &self.cards).finish_non_exhaustive()
    }
}

impl<'a> Twice<'a> {
    /// Cards that have begun nothing, and a runner of the same layout that has begun nothing either.
    #[must_use]
    pub fn new(cards: OnCards<'a>, host: Box<dyn Runner + 'a>) -> Self {
        Twice { cards, host }
    }

    /// Which card it was: by its operators, or else by what each makes of known numbers.
    fn culprit(&mut self, step: &Step<'_>) -> LlmError {
        if let Err(error) = self.cards.search(step, SEARCHES) {
            return error;
        }
        let what = "its results are not those of this host".to_owned();
        match self.cards.examined()[..] {
            [member] => self.cards.blame(member, step.past, what),
            _ => LlmError::Unsure { past: step.past },
        }
    }
}

/// Whether two results are the same, bit by bit.
fn same(one: &Outcome, other: &Outcome) -> bool {
    let bits = |logits: &Option<Vec<f32>>| -> Option<Vec<u32>> {
        logits.as_ref().map(|logits| logits.iter().map(|logit| logit.to_bits()).collect())
    };
    let best = |outcome: &Outcome| -> Vec<(u32, u32)> {
        outcome.best.iter().map(|(token, logit)| (*token, logit.to_bits())).collect()
    };
    best(one) == best(other) && bits(&one.logits) == bits(&other.logits)
}

impl Runner for Twice<'_> {
    fn step(&mut self, step: &Step<'_>) -> Result<Outcome, LlmError> {
        let outcome = self.cards.step(step)?;
        let right = self.host.step(step)?;
        match same(&outcome, &right) {
            true => Ok(outcome),
            false => Err(self.culprit(step)),
        }
    }

    fn batch(&self) -> usize {
        self.cards.batch().min(self.host.batch())
    }
}
