// SPDX-License-Identifier: Apache-2.0
//! How many guesses of each sequence a step checks: what they are expected to give, against what their rows cost. Pure.

/// How much more a step with guesses must be expected to give for its time: what is expected is not certain.
const MARGIN: f64 = 1.03;
/// What a new measurement of a step counts for among those before.
const NEW: f64 = 0.2;
/// Measurements are believed up to so many times the prediction, and down to as little.
const FACTOR: f64 = 4.0;

/// How many guesses of each sequence a step checks. `chances` says for each sequence how likely each of its guesses is to
/// be reached and right, `most` how many there are room for, and `price` what a step takes that checks so many. Each sequence
/// gets a token without any.
pub(crate) fn lengths(
    chances: &[Vec<f64>],
    most: usize,
    price: impl Fn(usize) -> f64,
) -> Vec<usize> {
    let mut counts = vec![0; chances.len()];
    let plain = chances.len() as f64 / price(0).max(f64::MIN_POSITIVE);
    let (mut best, mut best_rate) = (counts.clone(), plain * MARGIN);
    let mut expected = chances.len() as f64;
    for rows in 1..=most {
        // A sequence's guesses become less likely one by one, so that the likeliest of all is somebody's next.
        let next = chances.iter().zip(&counts).enumerate();
        let next = next.filter_map(|(at, (own, &count))| Some((at, *own.get(count)?)));
        let Some((at, chance)) = next.reduce(|best, one| if one.1 > best.1 { one } else { best })
        else {
            break;
        };
        counts[at] += 1;
        expected += chance;
        let rate = expected / price(rows).max(f64::MIN_POSITIVE);
        if rate > best_rate {
            (best, best_rate) = (counts.clone(), rate);
        }
    }
    best
}

/// What steps take, measured beside their prediction, by the rows that they have.
#[derive(Debug, Clone, Default)]
pub(crate) struct StepTimes {
    /// For each number of rows from 1 on, how many times the prediction it takes.
    factors: Vec<Option<f64>>,
}

impl StepTimes {
    /// A step of so many rows took this long.
    pub(crate) fn note(&mut self, rows: usize, predicted: f64, took: f64) {
        if rows == 0 || predicted <= 0.0 || took <= 0.0 {
            return;
        }
        let factor = (took / predicted).clamp(1.0 / FACTOR, FACTOR);
        if self.factors.len() < rows {
            self.factors.resize(rows, None);
        }
        let known = &mut self.factors[rows - 1];
        *known = Some(known.map_or(factor, |known| known + NEW * (factor - known)));
    }

    /// How many times its prediction a step of so many rows takes, by the nearest number that was measured.
    pub(crate) fn factor(&self, rows: usize) -> f64 {
        let known = self.factors.iter().enumerate().filter_map(|(at, of)| Some((at + 1, (*of)?)));
        known.min_by_key(|(at, _)| at.abs_diff(rows)).map_or(1.0, |(_, factor)| factor)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rows_that_cost_nothing_are_all_used_and_rows_that_cost_a_step_are_not() {
        let sure = [vec![0.9, 0.8, 0.7]];
        assert_eq!(lengths(&sure, 8, |_| 1.0), [3]);
        assert_eq!(lengths(&sure, 2, |_| 1.0), [2]);
        assert_eq!(lengths(&sure, 8, |rows| 1.0 + rows as f64), [0]);
        // Half a step for each row: the third is not worth it.
        assert_eq!(lengths(&[vec![0.9, 0.8, 0.3]], 8, |rows| 1.0 + 0.5 * rows as f64), [2]);
        assert_eq!(lengths(&[vec![0.02; 3]], 8, |_| 1.0), [3], "nothing is lost");
        assert_eq!(lengths(&[vec![0.02]], 8, |_| 1.0), [0], "too little to be sure of");
        assert_eq!(lengths(&[], 8, |_| 1.0), [0usize; 0]);
    }

    #[test]
    fn many_sequences_share_rows_by_what_is_likely_and_none_is_guessed_where_rows_cost_what_they_give()
     {
        let two = [vec![0.3, 0.1], vec![0.9, 0.8]];
        assert_eq!(lengths(&two, 3, |rows| 1.0 + 0.01 * rows as f64), [1, 2]);
        // Sixteen sequences fill the cards: a row costs what a token does.
        let many = vec![vec![0.9, 0.8]; 16];
        assert_eq!(lengths(&many, 32, |rows| (16 + rows) as f64), [0; 16]);
    }

    #[test]
    fn steps_between_measured_ones_take_what_the_nearest_does() {
        let mut times = StepTimes::default();
        assert_eq!(times.factor(3), 1.0);
        times.note(1, 2.0, 3.0);
        times.note(8, 2.0, 1.0);
        assert_eq!([1, 3, 8, 20].map(|rows| times.factor(rows)), [1.5, 1.5, 0.5, 0.5]);
        times.note(1, 1.0, 1000.0);
        assert_eq!(times.factor(1), 1.5 + NEW * (FACTOR - 1.5));
        times.note(0, 1.0, 1.0);
    }

    proptest! {
        #[test]
        fn what_is_chosen_is_expected_to_be_faster_than_nothing_or_is_nothing(
            first in prop::collection::vec(prop::collection::vec(0.0..1.0f64, 0..6), 1..5),
            row in 0.0..1.0f64,
            most in 0..12usize,
        ) {
            let mut chances = first;
            for own in &mut chances {
                let mut all = 1.0;
                own.iter_mut().for_each(|one| { all *= *one; *one = all; });
            }
            let price = |rows: usize| 1.0 + row * rows as f64;
            let counts = lengths(&chances, most, price);
            let rows: usize = counts.iter().sum();
            let gain: f64 = chances.iter().zip(&counts).flat_map(|(own, &n)| &own[..n]).sum();
            let all = chances.len() as f64;
            prop_assert!(rows <= most);
            prop_assert!(rows == 0 || (all + gain) / price(rows) >= MARGIN * all / price(0));
        }
    }
}
