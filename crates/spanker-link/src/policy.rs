// SPDX-License-Identifier: Apache-2.0
//! The window over which an end judges its own sending direction, and what it concludes.

use spanker_topology::Saturation;

/// Fewer attempts than this prove nothing: one broken frame of two must not cost lanes.
const ENOUGH: u64 = 64;

/// What an end has sent in the window and since its training.
#[derive(Debug)]
pub(crate) struct Policy {
    ticks: Option<u64>,
    end: Option<u64>,
    /// Frames that were acknowledged.
    good: u64,
    /// Frames that the peer asked for again.
    broken: u64,
    /// Trainings in a row that failed, or after which the errors went on.
    failures: u32,
    /// The link was trained because of errors and has not been judged since.
    on_trial: bool,
}

impl Policy {
    pub fn new(ticks: Option<u64>) -> Self {
        Policy { ticks, end: None, good: 0, broken: 0, failures: 0, on_trial: false }
    }

    /// When the window ends, if it has anything to judge.
    pub fn end(&self) -> Option<u64> {
        self.end
    }

    /// Counts what an answer of the peer says. The rate of errors is that of attempts, so frames
    /// that were sent behind a broken one and discarded do not thin it out.
    pub fn count(&mut self, good: usize, broken: bool, now: u64) {
        let Some(ticks) = self.ticks else { return };
        self.good += good as u64;
        self.broken += u64::from(broken);
        if self.good + self.broken > 0 {
            self.end.get_or_insert(now.saturating_add(ticks));
        }
    }

    /// Judges the window if it is over.
    pub fn judge(&mut self, now: u64, lanes: u8) -> Saturation {
        if self.end.is_none_or(|end| now < end) {
            return Saturation::Keep;
        }
        if self.good + self.broken < ENOUGH {
            // The counts stay. The next frame begins another window, so an idle link has no timer.
            self.end = None;
            return Saturation::Keep;
        }
        let rate = self.broken as f64 / (self.good + self.broken) as f64;
        self.clear();
        let lanes = u32::from(lanes);
        if self.on_trial && Saturation::decide(rate, 0, lanes) == Saturation::Retrain {
            self.failures += 1;
        }
        let verdict = Saturation::decide(rate, self.failures, lanes);
        self.conclude(verdict);
        verdict
    }

    /// A training did not come to an end in time.
    pub fn training_failed(&mut self, lanes: u8) -> Saturation {
        self.failures += 1;
        let verdict = Saturation::decide(0.0, self.failures, u32::from(lanes));
        if verdict != Saturation::Keep {
            self.conclude(verdict);
        }
        verdict
    }

    fn conclude(&mut self, verdict: Saturation) {
        self.on_trial = verdict == Saturation::Retrain;
        if verdict != Saturation::Retrain {
            self.failures = 0;
        }
    }

    /// What was counted belongs to a session that is over.
    pub fn clear(&mut self) {
        self.end = None;
        self.good = 0;
        self.broken = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(policy: &mut Policy, good: usize, broken: u32, lanes: u8, now: u64) -> Saturation {
        policy.count(good, false, now);
        (0..broken).for_each(|_| policy.count(0, true, now));
        policy.judge(now + 10, lanes)
    }

    #[test]
    fn errors_that_survive_three_trainings_halve_the_lanes() {
        let mut policy = Policy::new(Some(10));
        let verdicts: Vec<Saturation> =
            (0..5).map(|turn| window(&mut policy, 930, 70, 4, 100 * turn)).collect();
        use Saturation::{HalveLanes, Retrain};
        assert_eq!(verdicts, [Retrain, Retrain, Retrain, HalveLanes, Retrain]);
    }

    #[test]
    fn few_frames_are_not_judged_until_there_are_enough() {
        let mut policy = Policy::new(Some(10));
        assert_eq!(window(&mut policy, 10, 10, 4, 0), Saturation::Keep);
        assert_eq!(policy.end(), None);
        assert_eq!(window(&mut policy, 30, 30, 4, 20), Saturation::HalveLanes);
    }

    #[test]
    fn clean_window_forgives_earlier_failures() {
        let mut policy = Policy::new(Some(10));
        for turn in 0..6 {
            let broken = if turn % 2 == 0 { 70 } else { 0 };
            let expected = if turn % 2 == 0 { Saturation::Retrain } else { Saturation::Keep };
            assert_eq!(window(&mut policy, 930, broken, 4, 100 * turn), expected);
        }
    }

    #[test]
    fn policy_that_is_off_never_asks_for_anything() {
        let mut policy = Policy::new(None);
        assert_eq!(window(&mut policy, 0, 1000, 1, 0), Saturation::Keep);
        assert_eq!(policy.end(), None);
    }
}
