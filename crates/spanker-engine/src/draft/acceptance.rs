// SPDX-License-Identifier: Apache-2.0
//! How likely guesses are to be right, by what became of those before: learned while text is made, forgotten with time.

/// What a sequence's guesses came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DraftCounts {
    /// Steps that checked guesses.
    pub steps: u64,
    /// Tokens that were guessed.
    pub guessed: u64,
    /// Of these, those that were right and became text: as many tokens took no step of their own.
    pub accepted: u64,
}

impl DraftCounts {
    /// Guesses that were not used.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.guessed - self.accepted
    }

    /// Both together.
    #[must_use]
    pub fn plus(self, other: DraftCounts) -> DraftCounts {
        DraftCounts {
            steps: self.steps + other.steps,
            guessed: self.guessed + other.guessed,
            accepted: self.accepted + other.accepted,
        }
    }
}

/// Endings that are as long as these are counted together: from so many tokens on.
const CLASSES: [usize; 7] = [2, 3, 5, 9, 17, 32, OF_MODEL];
/// What stands for the length of an ending where a model guesses.
pub(crate) const OF_MODEL: usize = 1 << 20;
/// What is assumed of each until it is seen, and as how many guesses that counts.
const ASSUMED: [f64; 7] = [0.2, 0.35, 0.55, 0.7, 0.8, 0.9, 0.6];
const WEIGHT: f64 = 2.0;
/// What of a count is left after another guess of its class, and after another token.
const AFTER_GUESS: f64 = 0.95;
const AFTER_TOKEN: f64 = 0.998;

/// What became of guesses, by how long the common ending was.
#[derive(Debug, Clone, Default)]
pub(crate) struct Acceptance {
    /// Guesses that were right, and all of which that is known.
    seen: [(f64, f64); CLASSES.len()],
}

fn class(matched: usize) -> usize {
    CLASSES.iter().rposition(|from| matched >= *from).unwrap_or(0)
}

impl Acceptance {
    /// How likely a guess is to be right if those before it were.
    pub(crate) fn of(&self, matched: usize) -> f64 {
        let class = class(matched);
        let (right, all) = self.seen[class];
        (right + ASSUMED[class] * WEIGHT) / (all + WEIGHT)
    }

    /// How likely each of so many guesses is to be reached and right. Each that is right makes the common ending longer.
    pub(crate) fn chances(&self, matched: usize, count: usize) -> Vec<f64> {
        let mut chance = 1.0;
        let each = (0..count).map(|at| {
            chance *= self.of(matched + at);
            chance
        });
        each.collect()
    }

    /// A token more.
    pub(crate) fn age(&mut self) {
        for (right, all) in &mut self.seen {
            (*right, *all) = (*right * AFTER_TOKEN, *all * AFTER_TOKEN);
        }
    }

    /// The first `right` of `guessed` tokens were right. Of those behind the first wrong one nothing is known.
    pub(crate) fn note(&mut self, matched: usize, guessed: usize, right: usize) {
        for at in 0..guessed.min(right + 1) {
            let (known, all) = &mut self.seen[class(matched + at)];
            *known = *known * AFTER_GUESS + f64::from(u8::from(at < right));
            *all = *all * AFTER_GUESS + 1.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acceptance_follows_what_is_seen_and_goes_back_to_what_is_assumed() {
        let mut acceptance = Acceptance::default();
        let before = acceptance.of(4);
        (0..40).for_each(|_| acceptance.note(4, 1, 0));
        assert!(acceptance.of(4) < 0.08 && acceptance.of(12) == ASSUMED[3]);
        (0..40).for_each(|_| acceptance.note(4, 1, 1));
        assert!(acceptance.of(4) > 0.75, "{}", acceptance.of(4));
        (0..5000).for_each(|_| acceptance.age());
        assert!((acceptance.of(4) - before).abs() < 0.01);
    }

    #[test]
    fn guesses_behind_a_wrong_one_count_for_nothing() {
        let mut acceptance = Acceptance::default();
        // Lengths 2, 3, 4, 5: two right, the third wrong, the fourth unknown.
        acceptance.note(2, 4, 2);
        assert_eq!(acceptance.seen[..3], [(1.0, 1.0), (0.95, 1.95), (0.0, 0.0)]);
        let chances = acceptance.chances(2, 4);
        assert!(chances.windows(2).all(|pair| pair[1] < pair[0]), "{chances:?}");
    }
}
