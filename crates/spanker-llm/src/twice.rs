// SPDX-License-Identifier: Apache-2.0
//! Every step twice: on cards, ranks or GPUs, and on threads of this host with the same layout, which gives the same bits.
//! Nothing is given out before both agree.

use crate::LlmError;
use crate::runner::{Asked, Outcome, Output, Part, Runner, Step};
use spanker_plan::{Want, WindowCache};

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
    fn examine(&self, past: usize) -> LlmError;
}

/// Cards, and what checks all that they give.
pub struct Twice<'a> {
    cards: Box<dyn Searched + 'a>,
    host: Box<dyn Runner + 'a>,
    /// What came of the step that is under way.
    ended: Option<Outcome>,
}

impl std::fmt::Debug for Twice<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Twice").finish_non_exhaustive()
    }
}

impl<'a> Twice<'a> {
    /// Cards that have begun nothing, and a runner of the same layout that has begun nothing either.
    #[must_use]
    pub fn new(cards: Box<dyn Searched + 'a>, host: Box<dyn Runner + 'a>) -> Self {
        Twice { cards, host, ended: None }
    }

    /// The same step on this host, a part of it at a time, so that cards elsewhere hear of it meanwhile. Bits do not
    /// depend on how rows are put together.
    fn on_host(&mut self, step: &Step<'_>) -> Result<Vec<Output>, LlmError> {
        let mut outputs = Vec::new();
        let (mut copies, mut windowed) = (step.copies, step.windowed_copies);
        for part in step.parts {
            let end = part.tokens.len();
            let first = end - part.asked() as usize;
            let mut start = 0;
            while start < end {
                self.heartbeat()?;
                // What is asked for is asked for in one piece.
                let stop = (start + PIECE).min(first.max(start));
                let stop = if stop == start { end } else { stop };
                let last = stop == end;
                let want = if last { part.want } else { Want::Nothing };
                let piece = Part {
                    tokens: &part.tokens[start..stop],
                    past: part.past + start as u64,
                    want,
                    ..*part
                };
                let (copies, windowed_copies) =
                    (std::mem::take(&mut copies), std::mem::take(&mut windowed));
                let parts = [piece];
                let step = Step { copies, windowed_copies, ..Step::of(&parts) };
                outputs.extend(self.host.step(&step)?.outputs);
                start = stop;
            }
        }
        Ok(outputs)
    }

    /// Which card it was: by its operators, or else by what each makes of known numbers.
    fn culprit(&mut self, step: &Step<'_>) -> LlmError {
        let past = Asked::of(step).past;
        let wrong = (1..=SEARCHES).find_map(|salt| self.cards.attempt(step, salt).err());
        wrong.unwrap_or_else(|| self.cards.examine(past))
    }
}

/// Whether two results are the same, bit by bit.
fn same(one: &Output, other: &Output) -> bool {
    let bits = |logits: &Option<Vec<f32>>| -> Option<Vec<u32>> {
        logits.as_ref().map(|logits| logits.iter().map(|logit| logit.to_bits()).collect())
    };
    let best = |output: &Output| -> Vec<(u32, u32)> {
        output.best.iter().map(|(token, logit)| (*token, logit.to_bits())).collect()
    };
    best(one) == best(other) && bits(&one.logits) == bits(&other.logits)
}

impl Runner for Twice<'_> {
    fn begin(&mut self, step: &Step<'_>) -> Result<(), LlmError> {
        let outcome = self.cards.step(step)?;
        let right = self.on_host(step)?;
        let agree = outcome.outputs.len() == right.len()
            && outcome.outputs.iter().zip(&right).all(|(one, other)| same(one, other));
        if !agree {
            return Err(self.culprit(step));
        }
        self.ended = Some(outcome);
        Ok(())
    }

    fn end(&mut self) -> Result<Outcome, LlmError> {
        Ok(self.ended.take().unwrap_or_default())
    }

    fn batch(&self) -> usize {
        self.cards.batch().min(self.host.batch())
    }

    fn windows(&self) -> Option<WindowCache> {
        self.cards.windows()
    }

    fn heartbeat(&mut self) -> Result<(), LlmError> {
        self.cards.heartbeat()
    }
}
