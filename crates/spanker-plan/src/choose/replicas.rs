// SPDX-License-Identifier: Apache-2.0
//! Dividing cards between copies of a model: sets of cards as numbers, and the best partition of them.

/// Sets of cards, each a number from every class, numbered from the empty one to all cards.
pub(crate) struct Sets {
    counts: Vec<u16>,
    len: usize,
}

impl Sets {
    pub(crate) fn new(counts: &[u16]) -> Sets {
        let len = counts.iter().map(|&count| usize::from(count) + 1).product();
        Sets { counts: counts.to_vec(), len }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// How many cards of each class a set has.
    pub(crate) fn takes(&self, set: usize) -> Vec<u16> {
        let mut rest = set;
        let digit = |&count: &u16| {
            let base = usize::from(count) + 1;
            let digit = rest % base;
            rest /= base;
            digit as u16
        };
        self.counts.iter().map(digit).collect()
    }

    /// Whether one set is part of another.
    fn within(&self, part: usize, whole: usize) -> bool {
        let (part, whole) = (self.takes(part), self.takes(whole));
        part.iter().zip(&whole).all(|(part, whole)| part <= whole)
    }

    /// The `copies` sets whose rates add up to most, if there are so many that have a rate. Cards may be
    /// left over. Because numbers are sums of digits, a set less a part of it is their difference.
    pub(crate) fn partition(&self, copies: usize, rates: &[Option<f64>]) -> Option<Vec<usize>> {
        let usable: Vec<(usize, f64)> =
            rates.iter().enumerate().filter_map(|(set, rate)| Some((set, (*rate)?))).collect();
        // best[set]: the most that so many copies do on the set, and the last of them.
        let mut best: Vec<Vec<Option<(f64, usize)>>> = vec![vec![Some((0.0, 0)); self.len]];
        for copy in 1..=copies {
            let previous = &best[copy - 1];
            let row = (0..self.len).map(|set| {
                let options = usable.iter().filter(|(part, _)| self.within(*part, set));
                let totals = options.filter_map(|&(part, rate)| {
                    previous[set - part].map(|(rest, _)| (rest + rate, part))
                });
                totals.max_by(|a, b| a.0.total_cmp(&b.0))
            });
            let row = row.collect();
            best.push(row);
        }
        let mut set = self.len - 1;
        let mut parts = Vec::with_capacity(copies);
        for copy in (1..=copies).rev() {
            let (_, part) = best[copy][set]?;
            parts.push(part);
            set -= part;
        }
        Some(parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_numbered_by_their_digits() {
        let sets = Sets::new(&[1, 2]);
        assert_eq!(sets.len(), 6);
        let all: Vec<Vec<u16>> = (0..6).map(|set| sets.takes(set)).collect();
        assert_eq!(all, [[0, 0], [1, 0], [0, 1], [1, 1], [0, 2], [1, 2]]);
    }

    #[test]
    fn the_best_partition_may_leave_cards_over() {
        // Three equal cards: one alone does 1, two do 3, three do 3.5.
        let sets = Sets::new(&[3]);
        let rates = [None, Some(1.0), Some(3.0), Some(3.5)];
        assert_eq!(sets.partition(1, &rates), Some(vec![3]));
        let mut two = sets.partition(2, &rates).unwrap();
        two.sort_unstable();
        assert_eq!(two, [1, 2]);
        assert_eq!(sets.partition(4, &rates), None);
        assert_eq!(sets.partition(2, &[None, None, Some(3.0), Some(9.0)]), None);
    }
}
