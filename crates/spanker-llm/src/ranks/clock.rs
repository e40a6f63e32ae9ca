// SPDX-License-Identifier: Apache-2.0
//! Times of other ranks by the leader's clock.
//!
//! The leader asks a rank for its time, several times in a row. The rank looked at its clock somewhere between the
//! question and the answer, so the shortest round trip says best what it was: half of it is the most that the middle
//! can be wrong by. It is asked before a recording and at its end; in between, clocks drift apart on a line.

/// Questions in a row.
pub(super) const QUESTIONS: usize = 16;

/// A rank's clock at a moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Reading {
    /// By the rank's clock, in seconds.
    pub(super) theirs: f64,
    /// By the leader's.
    pub(super) ours: f64,
}

/// A question and its answer: when it was asked and answered, by the leader's clock, and the rank's time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Answer {
    pub(super) asked: f64,
    pub(super) answered: f64,
    pub(super) theirs: f64,
}

/// The reading of the shortest round trip; nothing without answers.
pub(super) fn read(answers: &[Answer]) -> Option<Reading> {
    let took = |answer: &Answer| answer.answered - answer.asked;
    let best = answers.iter().min_by(|a, b| took(a).total_cmp(&took(b)))?;
    Some(Reading { theirs: best.theirs, ours: f64::midpoint(best.asked, best.answered) })
}

/// From a rank's clock to the leader's.
#[derive(Debug, Clone, Copy)]
pub(super) struct Conversion {
    from: Reading,
    /// Seconds of the leader for each of the rank.
    pace: f64,
}

/// Clocks are read so far apart, or their pace is taken to be the same: a reading is wrong by microseconds, and
/// clocks drift by less than a ten-thousandth.
const APART: f64 = 1.0;

impl Conversion {
    /// By a reading before and one after.
    pub(super) fn new(first: Reading, last: Reading) -> Conversion {
        let theirs = last.theirs - first.theirs;
        let pace = if theirs < APART { 1.0 } else { (last.ours - first.ours) / theirs };
        Conversion { from: first, pace }
    }

    /// A moment of the rank by the leader's clock.
    pub(super) fn ours(&self, theirs: f64) -> f64 {
        self.from.ours + (theirs - self.from.theirs) * self.pace
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A clock that is ahead and fast, asked over ways that take different times.
    fn theirs(ours: f64) -> f64 {
        1234.5 + ours * 1.00003
    }

    fn asked(at: f64, there: f64, back: f64) -> Answer {
        Answer { asked: at, answered: at + there + back, theirs: theirs(at + there) }
    }

    #[test]
    fn clock_that_is_ahead_and_drifts_is_converted_within_half_of_the_shortest_round_trip() {
        let first = [asked(0.0, 5e-3, 1e-6), asked(0.1, 2e-6, 1e-6), asked(0.2, 1e-6, 7e-4)];
        let last = [asked(60.0, 1e-6, 2e-3), asked(60.1, 1e-6, 2e-6)];
        let conversion = Conversion::new(read(&first).unwrap(), read(&last).unwrap());
        for ours in [0.0, 0.3, 20.0, 59.0, 60.2] {
            let found = conversion.ours(theirs(ours));
            assert!((found - ours).abs() < 1.5e-6, "{ours}: {found}");
        }
        // Without the second reading it would be off by what the clock drifts in a minute.
        let alone = read(&first).unwrap();
        let found = Conversion::new(alone, alone).ours(theirs(60.0));
        assert!((found - 60.0).abs() > 1e-3, "{found}");
    }

    #[test]
    fn readings_close_to_each_other_have_no_pace() {
        let (first, last) = (asked(0.0, 1e-6, 9e-6), asked(0.01, 9e-6, 1e-6));
        let conversion = Conversion::new(read(&[first]).unwrap(), read(&[last]).unwrap());
        assert!((conversion.ours(theirs(0.01)) - 0.01).abs() < 6e-6);
        assert_eq!(read(&[]), None);
    }
}
