// SPDX-License-Identifier: Apache-2.0
//! Which elements of a result the host computes a second time. Pure: it draws positions, and compares nothing.
//!
//! # How many
//!
//! A part of `L` elements, what one card owns or sends, is cut into strata of `s = floor(L / 691)` elements, the
//! last one perhaps shorter, and one element is drawn from each. Let a card garble any `w` elements of the
//! part. A stratum with `a` of them shows one with a chance of at least `a / s`, so the chance that no stratum
//! does is at most the product of all `1 - a / s`, and so at most `exp(-w / s)`. For `w >= L / 100`
//! that is at most `exp(-691 / 100) < 0.001`: a card that garbles one element in a hundred is found
//! with a chance of 0.999 or more, wherever the elements lie. Further:
//!
//! * `2 s - 1` garbled elements in a row contain a whole stratum: they are always found;
//! * `b < s` in a row within a stratum are found with a chance of `b / s`;
//! * the first and the last element of a part are always in the sample: that is where a message or an
//!   operation begins and ends;
//! * a part of up to 1381 elements is checked whole, for then `s` is 1.
//!
//! Calls draw anew, so a fault that stays and is missed with chance `q` is missed `k` times with `q^k`.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::ops::Range;

use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;

/// Strata of a large part: the least number `n` with `exp(-n / 100) <= 0.001`.
const STRATA: usize = 691;

/// How much of a collective's result on cards the host computes itself and compares, bit for bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResultCheck {
    /// A random sample that is drawn anew for each call: about 700 elements of each card's part of the result,
    /// on every card. A card that garbles one element in a hundred of its part is found with a chance of
    /// 0.999, and parts of up to 1381 elements are compared whole.
    Sample,
    /// The same with a generator that begins at a given seed, so that a run can be repeated.
    SeededSample(u64),
    /// Every element on every card: the host does all of the collective's arithmetic a second time.
    Whole,
}

/// Where the positions of samples come from.
#[derive(Debug)]
pub(crate) struct Sampler {
    /// None for the whole result.
    dice: Option<Pcg64Mcg>,
}

impl Sampler {
    pub(crate) fn new(check: ResultCheck) -> Self {
        let seed = match check {
            // A hasher's keys are the standard library's way to the system's random numbers.
            ResultCheck::Sample => Some(RandomState::new().build_hasher().finish()),
            ResultCheck::SeededSample(seed) => Some(seed),
            ResultCheck::Whole => None,
        };
        Sampler { dice: seed.map(Pcg64Mcg::seed_from_u64) }
    }

    /// Positions of a part to check, in order and each once.
    pub(crate) fn positions(&mut self, part: Range<usize>) -> Vec<usize> {
        let length = part.len() / STRATA;
        let Some(dice) = self.dice.as_mut().filter(|_| length > 1) else { return part.collect() };
        let strata = part.clone().step_by(length);
        let drawn = strata.map(|at| dice.random_range(at..part.end.min(at + length)));
        let mut positions = vec![part.start];
        positions.extend(drawn);
        positions.push(part.end - 1);
        positions.dedup();
        positions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of many samples miss all elements that `wrong` says are garbled.
    fn missed(length: usize, seeds: u64, wrong: impl Fn(usize) -> bool) -> u64 {
        let misses = |&seed: &u64| {
            let mut sampler = Sampler::new(ResultCheck::SeededSample(seed));
            !sampler.positions(1000..1000 + length).into_iter().any(|at| wrong(at - 1000))
        };
        (0..seeds).filter(misses).count() as u64
    }

    #[test]
    fn positions_are_in_order_once_each_within_the_part_and_have_both_ends() {
        let mut sampler = Sampler::new(ResultCheck::Sample);
        for length in [1, 2, 690, 1381, 1382, 1383, 2072, 2073, 5000, 100_000, 1 << 20] {
            let positions = sampler.positions(7..7 + length);
            assert_eq!((positions[0], *positions.last().unwrap()), (7, 6 + length));
            assert!(positions.windows(2).all(|pair| pair[0] < pair[1]));
            assert!(length > 1381 || positions.len() == length);
            assert!(length < 1382 || (691..1500).contains(&positions.len()), "{}", positions.len());
        }
        assert_eq!(sampler.positions(5..5), [0usize; 0]);
        assert_eq!(Sampler::new(ResultCheck::Whole).positions(3..5003).len(), 5000);
    }

    #[test]
    fn samples_differ_from_call_to_call_and_repeat_from_a_seed() {
        let mut one = Sampler::new(ResultCheck::SeededSample(5));
        let mut other = Sampler::new(ResultCheck::SeededSample(5));
        let first = one.positions(0..50_000);
        assert_eq!(first, other.positions(0..50_000));
        assert_ne!(first, one.positions(0..50_000));
        let free = |_| Sampler::new(ResultCheck::Sample).positions(0..50_000);
        assert_ne!(free(0), free(1));
    }

    #[test]
    fn one_garbled_element_in_a_hundred_is_missed_in_less_than_one_sample_of_a_thousand() {
        // 20,000 samples: 20 misses are expected of a sample that is just good enough, with a deviation of 4.5.
        for length in [1382, 2072, 3000, 10_000, 262_144] {
            let few = length / 100;
            let spread = missed(length, 20_000, |at| at % 100 == 57);
            let block = missed(length, 20_000, |at| (300..300 + few).contains(&at));
            assert!(spread <= 34 && block <= 34, "{length}: {spread} {block}");
        }
    }

    #[test]
    fn block_of_two_strata_is_always_found_and_a_short_one_in_proportion() {
        let length = 262_144;
        let stratum = length / STRATA;
        assert_eq!(stratum, 379);
        for start in [1, 100, 379, 700, 131_072, length - 2 * stratum] {
            assert_eq!(missed(length, 300, |at| (start..start + 2 * stratum - 1).contains(&at)), 0);
        }
        // 64 elements, a frame of 256 bytes, within one stratum: 64 / 379 is 17 per cent.
        let inside = missed(length, 10_000, |at| (400..464).contains(&at));
        assert!((8_100..8_520).contains(&inside), "{inside}");
    }

    #[test]
    fn fault_that_stays_is_found_by_a_later_call() {
        let mut sampler = Sampler::new(ResultCheck::SeededSample(9));
        let found =
            |_: &usize| sampler.positions(0..262_144).iter().any(|at| (400..464).contains(at));
        let first = (0..200).find(found);
        assert!(first.is_some_and(|call| call < 100), "{first:?}");
    }
}
