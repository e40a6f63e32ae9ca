// SPDX-License-Identifier: Apache-2.0
//! One sequence on a runner: what was fed stays known, so that it can be fed again to another runner when
//! this one is lost. Tokens that are only guessed are no part of it until somebody says that they are right.

use std::collections::VecDeque;

use spanker_model::KvShape;
use spanker_plan::Want;

use crate::LlmError;
use crate::runner::{Outcome, Part, Runner, Step, Timing};

/// A sequence and the cards that work on it.
pub struct Session<'r> {
    runner: Option<Box<dyn Runner + 'r>>,
    tokens: Vec<u32>,
    /// Tokens whose keys and values are on the cards.
    done: usize,
    /// Positions that were written since the first was, guesses included.
    written: usize,
    /// Guesses of what follows whose keys and values are on the cards behind these.
    guessed: VecDeque<u32>,
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
        let (tokens, guessed) = (Vec::new(), VecDeque::new());
        Session { runner: Some(runner), tokens, done: 0, written: 0, guessed, progress: None }
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

    /// Adds a token and runs it with guesses of what follows, in one step: there is an output after the token, and one
    /// after each guess. Rows do not depend on each other, so each is what a step of its own would give, if all guesses
    /// before it are right. [`Session::accept`] says so; any other use of the session forgets them.
    ///
    /// Without room for the guesses in a step of the runner there is one output, as there is from [`Session::go_on`] after
    /// an error.
    ///
    /// # Errors
    /// What [`Runner::step`] fails with. The token is part of the sequence all the same, and the guesses are not.
    pub fn check(&mut self, token: u32, guesses: &[u32], want: Want) -> Result<Outcome, LlmError> {
        self.guessed.clear();
        self.tokens.push(token);
        self.go_back();
        let behind = self.tokens.len() - self.done;
        let Some(runner) = self
            .runner
            .as_mut()
            .filter(|runner| !guesses.is_empty() && behind + guesses.len() <= runner.batch())
        else {
            return self.run(want);
        };
        let rows: Vec<u32> = self.tokens[self.done..].iter().chain(guesses).copied().collect();
        let blocks = KvShape::blocks_for((self.done + rows.len()) as u64) as u32;
        let blocks: Vec<u32> = (0..blocks).collect();
        let part = Part::new(&rows, self.done as u64, &blocks, want);
        let part = Part { outputs: 1 + guesses.len() as u64, ..part };
        self.written = self.written.max(self.done + rows.len());
        let outcome = runner.step(&Step::of(&[part]))?;
        self.done = self.tokens.len();
        self.guessed.extend(guesses);
        Ok(outcome)
    }

    /// A token follows. If it is the next guess of [`Session::check`], it is part of the sequence from now on, and what
    /// came after it there is right. If not, what is on the cards behind the sequence is written over.
    pub fn accept(&mut self, token: u32) -> bool {
        if self.guessed.pop_front() != Some(token) {
            self.guessed.clear();
            return false;
        }
        self.tokens.push(token);
        self.done += 1;
        true
    }

    /// The guess that [`Session::accept`] takes next, if there is one.
    #[must_use]
    pub fn guessed(&self) -> Option<u32> {
        self.guessed.front().copied()
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
        self.guessed.clear();
    }

    /// Whether there is a runner.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.runner.is_some()
    }

    /// Gives the runner up, so that its memory is free for another.
    pub fn release(&mut self) {
        self.runner = None;
        (self.done, self.written) = (0, 0);
        self.guessed.clear();
    }

    /// Goes on with another runner, on which everything is computed again. Keys and values do not depend on
    /// how many tokens are run together, so the tokens that follow are the same.
    ///
    /// # Errors
    /// What [`Runner::step`] fails with.
    pub fn go_on(&mut self, runner: Box<dyn Runner + 'r>, want: Want) -> Result<Outcome, LlmError> {
        self.runner = Some(runner);
        (self.done, self.written) = (0, 0);
        self.run(want)
    }

    /// Begins anew where layers with a window have written over what is seen from the tokens on that are left.
    fn go_back(&mut self) {
        let windows = self.runner.as_ref().and_then(|runner| runner.windows());
        if windows
            .is_some_and(|windows| !windows.can_go_back(self.written as u64, self.done as u64))
        {
            (self.done, self.written) = (0, 0);
        }
    }

    fn run(&mut self, want: Want) -> Result<Outcome, LlmError> {
        self.guessed.clear();
        self.go_back();
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
            self.written = self.written.max(end);
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

    /// Remembers which tokens it was given at which positions.
    #[derive(Default)]
    struct Written<'w>(Option<&'w RefCell<Vec<u32>>>);

    impl Runner for Written<'_> {
        fn begin(&mut self, step: &Step<'_>) -> Result<(), LlmError> {
            let mut cache = self.0.expect("somewhere to write").borrow_mut();
            for part in step.parts {
                assert!(part.past as usize <= cache.len(), "what comes before was never written");
                cache.truncate(part.past as usize);
                cache.extend(part.tokens);
            }
            Ok(())
        }

        fn end(&mut self) -> Result<Outcome, LlmError> {
            Ok(Outcome::default())
        }

        fn batch(&self) -> usize {
            4
        }
    }

    #[test]
    fn guesses_become_part_of_the_sequence_one_by_one_and_refused_ones_are_written_over() {
        let cache = RefCell::new(Vec::new());
        let mut session = Session::new(Box::new(Written(Some(&cache))));
        session.feed(&[1, 2], Want::Nothing).expect("a step");
        session.check(3, &[4, 5, 6], Want::Best(1)).expect("a step");
        assert_eq!(
            (session.tokens(), &cache.borrow()[..]),
            (&[1, 2, 3][..], &[1, 2, 3, 4, 5, 6][..])
        );
        assert!(session.accept(4) && !session.accept(9) && !session.accept(5));
        assert_eq!(session.tokens(), [1, 2, 3, 4]);
        session.check(9, &[7], Want::Best(1)).expect("a step");
        assert_eq!(cache.borrow()[..], [1, 2, 3, 4, 9, 7]);
        // Forgotten by whatever comes between, and by a step that has no room for them.
        session.feed(&[8], Want::Nothing).expect("a step");
        assert!(!session.accept(7));
        session.check(5, &[6; 4], Want::Best(1)).expect("a step of one row");
        assert!(!session.accept(6));
        session.check(1, &[2], Want::Best(1)).expect("a step");
        session.cut(3);
        assert!(!session.accept(2));
        session.feed(&[4], Want::Nothing).expect("a step");
        assert_eq!((session.tokens(), &cache.borrow()[..]), (&[1, 2, 3, 4][..], &[1, 2, 3, 4][..]));
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
