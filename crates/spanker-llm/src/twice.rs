// SPDX-License-Identifier: Apache-2.0
//! Every step twice: on cards, ranks or GPUs, and on threads of this host with the same layout, which gives the same bits.
//! Nothing is given out before both agree.

use crate::LlmError;
use crate::audit::AuditLog;
use crate::runner::{Outcome, Runner, Step};
use spanker_plan::Want;

/// Tokens that the host runs before cards hear of it.
const PIECE: usize = 16;
/// How often a step is run again, with other operators checked, to find the card that was wrong.
const SEARCHES: u64 = 200;

/// Cards that can say what they did operator by operator.
pub trait Searched: Runner {
    /// Runs a step once more; which operators are checked depends on `salt`.
    ///
    /// # Errors
    /// What steps fail with: [`LlmError::Device`] names a card that was wrong.
    fn attempt(&mut self, step: &Step<'_>, salt: u64) -> Result<(), LlmError>;

    /// Names the card that was wrong in a step by what each makes of known numbers, where that can be tried.
    fn examine(&self, step: &Step<'_>) -> LlmError;
}

/// What is checked.
enum Checked<'a> {
    /// Cards of which the wrong one can be named.
    Searched(Box<dyn Searched + 'a>),
    /// Others, of which nobody can be named.
    Others(Box<dyn Runner + 'a>, AuditLog),
}

/// Cards, and what checks all that they give.
pub struct Twice<'a> {
    checked: Checked<'a>,
    host: Box<dyn Runner + 'a>,
}

impl std::fmt::Debug for Twice<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let named = matches!(self.checked, Checked::Searched(_));
        f.debug_struct("Twice").field("named", &named).finish_non_exhaustive()
    }
}

impl<'a> Twice<'a> {
    /// Cards that have begun nothing, and a runner of the same layout that has begun nothing either.
    #[must_use]
    pub fn new(cards: Box<dyn Searched + 'a>, host: Box<dyn Runner + 'a>) -> Self {
        Twice { checked: Checked::Searched(cards), host }
    }

    /// The same for a runner that cannot say which of its cards was wrong. `log` counts steps.
    #[must_use]
    pub fn unnamed(
        runner: Box<dyn Runner + 'a>,
        host: Box<dyn Runner + 'a>,
        log: &AuditLog,
    ) -> Self {
        Twice { checked: Checked::Others(runner, log.clone()), host }
    }

    /// The same step on this host, in pieces, so that cards elsewhere hear of it meanwhile. Bits do not depend on pieces.
    fn on_host(&mut self, step: &Step<'_>) -> Result<Outcome, LlmError> {
        let mut last = Outcome::default();
        let mut past = step.past;
        for tokens in step.tokens.chunks(PIECE) {
            self.heartbeat()?;
            let complete = past + tokens.len() == step.past + step.tokens.len();
            let want = if complete { step.want } else { Want::Nothing };
            last = self.host.step(&Step { tokens, past, want })?;
            past += tokens.len();
        }
        Ok(last)
    }

    /// Which card it was: by its operators, or else by what each makes of known numbers.
    fn culprit(&mut self, step: &Step<'_>) -> LlmError {
        let Checked::Searched(cards) = &mut self.checked else {
            return LlmError::Unsure { past: step.past };
        };
        let wrong = (1..=SEARCHES).find_map(|salt| cards.attempt(step, salt).err());
        wrong.unwrap_or_else(|| cards.examine(step))
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
        let outcome = match &mut self.checked {
            Checked::Searched(cards) => cards.step(step)?,
            Checked::Others(runner, log) => {
                log.count(1);
                runner.step(step)?
            }
        };
        let right = self.on_host(step)?;
        match same(&outcome, &right) {
            true => Ok(outcome),
            false => Err(self.culprit(step)),
        }
    }

    fn batch(&self) -> usize {
        let batch = match &self.checked {
            Checked::Searched(cards) => cards.batch(),
            Checked::Others(runner, _) => runner.batch(),
        };
        batch.min(self.host.batch())
    }

    fn heartbeat(&mut self) -> Result<(), LlmError> {
        match &mut self.checked {
            Checked::Searched(cards) => cards.heartbeat(),
            Checked::Others(runner, _) => runner.heartbeat(),
        }
    }
}
