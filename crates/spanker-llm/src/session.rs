// SPDX-License-Identifier: Apache-2.0
//! One sequence on a runner: what was fed stays known, so that it can be fed again to another runner when
//! this one is lost.

use spanker_plan::Want;

use crate::LlmError;
use crate::runner::{Outcome, Runner, Timing};

/// A sequence and the cards that work on it.
pub struct Session<'r> {
    runner: Option<Box<dyn Runner + 'r>>,
    tokens: Vec<u32>,
    /// Tokens whose keys and values are on the cards.
    done: usize,
    progress: Option<Progress<'r>>,
}

/// Called with how many of how many tokens are run; says whether it goes on.
type Progress<'r> = Box<dyn Fn(usize, usize) -> bool + 'r>;

impl std::fmt::Debug for Session<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("tokens", &self.tokens.len()).finish_non_exhaustive()
    }
}

impl<'r> Session<'r> {
    /// An empty sequence.
    #[must_use]
    pub fn new(runner: Box<dyn Runner + 'r>) -> Self {
        Session { runner: Some(runner), tokens: Vec::new(), done: 0, progress: None }
    }

    /// Calls `progress` with how many of how many tokens are run, before each piece of those that take several. It says
    /// whether to go on: [`LlmError::Stopped`] if not, and what was run stays.
    #[must_use]
    pub fn with_progress(mut self, progress: impl Fn(usize, usize) -> bool + 'r) -> Self {
        self.progress = Some(Box::new(progress));
        self
    }

    /// All tokens so far, those included that a runner failed at.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Adds tokens and runs them, in pieces of the size that the runner takes. What comes back is the last
    /// piece's, the times are all pieces'.
    ///
    /// # Errors
    /// What [`Runner::step`] fails with. The tokens are part of the sequence all the same:
    /// [`Session::go_on`] runs them on another runner.
    pub fn feed(&mut self, tokens: &[u32], want: Want) -> Result<Outcome, LlmError> {
        self.tokens.extend_from_slice(tokens);
        self.run(want)
    }

    /// Lets the runner's cards know that there is more to come: see [`Runner::heartbeat`].
    ///
    /// # Errors
    /// What [`Runner::heartbeat`] fails with.
    pub fn heartbeat(&mut self) -> Result<(), LlmError> {
        self.runner.as_mut().map_or(Ok(()), |runner| runner.heartbeat())
    }

    /// Forgets all but the first `length` tokens.
    pub fn cut(&mut self, length: usize) {
        self.tokens.truncate(length);
        self.done = self.done.min(length);
    }

    /// Whether there is a runner.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.runner.is_some()
    }

    /// Gives the runner up, so that its memory is free for another.
    pub fn release(&mut self) {
        self.runner = None;
        self.done = 0;
    }

    /// Goes on with another runner, on which everything is computed again. Keys and values do not depend on
    /// how many tokens are run together, so the tokens that follow are the same.
    ///
    /// # Errors
    /// What [`Runner::step`] fails with.
    pub fn go_on(&mut self, runner: Box<dyn Runner + 'r>, want: Want) -> Result<Outcome, LlmError> {
        self.runner = Some(runner);
        self.done = 0;
        self.run(want)
    }

    fn run(&mut self, want: Want) -> Result<Outcome, LlmError> {
        let Some(runner) = &mut self.runner else {
            return Err(LlmError::unsupported("the sequence has no cards to run on"));
        };
        let mut total = Timing::default();
        let mut last = Outcome::default();
        let (begun, all) = (self.done, self.tokens.len() - self.done);
        let progress = self.progress.as_ref().filter(|_| all > runner.batch());
        while self.done < self.tokens.len() {
            let done = self.done - begun;
            if progress.is_some_and(|progress| !progress(done, all)) {
                return Err(LlmError::Stopped { done, total: all });
            }
            let end = self.tokens.len().min(self.done + runner.batch());
            let complete = end == self.tokens.len();
            let want = if complete { want } else { Want::Nothing };
            last = runner.step_alone(&self.tokens[self.done..end], self.done, want)?;
            self.done = end;
            total = total.plus(last.timing);
        }
        if let Some(progress) = progress {
            let _ = progress(all, all);
        }
        Ok(Outcome { timing: total, ..last })
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::runner::Step;

    /// Takes three tokens in a step, and computes nothing.
    struct Idle;

    impl Runner for Idle {
        fn begin(&mut self, _: &Step<'_>) -> Result<(), LlmError> {
            Ok(())
        }

        fn end(&mut self) -> Result<Outcome, LlmError> {
            Ok(Outcome::default())
        }

        fn batch(&self) -> usize {
            3
        }
    }

    #[test]
    fn prompts_in_several_pieces_say_how_far_they_are_and_others_do_not() {
        let seen = RefCell::new(Vec::new());
        let mut session = Session::new(Box::new(Idle)).with_progress(|done, all| {
            seen.borrow_mut().push((done, all));
            seen.borrow().len() < 7
        });
        session.feed(&[0; 3], Want::Nothing).expect("a step");
        session.feed(&[0], Want::Nothing).expect("a step");
        assert!(seen.borrow().is_empty());
        session.feed(&[0; 7], Want::Nothing).expect("steps");
        assert_eq!(seen.borrow()[..], [(0, 7), (3, 7), (6, 7), (7, 7)]);
        // The third of the next pieces is not run; what was run stays, and the rest is run with what follows.
        let stopped = session.feed(&[0; 9], Want::Nothing).expect_err("it is stopped");
        assert!(matches!(stopped, LlmError::Stopped { done: 6, total: 9 }), "{stopped}");
        assert_eq!(session.tokens().len(), 20);
        session.feed(&[0], Want::Nothing).expect_err("four tokens are two pieces");
        session.cut(18);
        session.feed(&[0], Want::Nothing).expect("a step");
    }
}
