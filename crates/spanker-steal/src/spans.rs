// SPDX-License-Identifier: Apache-2.0
//! Sets of items as disjoint ranges. Their size is that of their fragments, not of what they hold.

use std::collections::BTreeMap;
use std::ops::Range;

/// A set of items.
///
/// # Examples
///
/// ```
/// use spanker_steal::Spans;
///
/// let mut done = Spans::new();
/// done.insert(0..10);
/// done.insert(20..30);
/// done.insert(10..15);
/// assert_eq!(done.iter().collect::<Vec<_>>(), [0..15, 20..30]);
/// assert_eq!(done.gaps(0..40).collect::<Vec<_>>(), [15..20, 30..40]);
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Spans {
    /// From start to end; neighbours are merged.
    ranges: BTreeMap<usize, usize>,
    len: usize,
}

impl Spans {
    /// No items.
    #[must_use]
    pub fn new() -> Spans {
        Spans::default()
    }

    /// How many items there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The ranges, in order.
    pub fn iter(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.ranges.iter().map(|(&start, &end)| start..end)
    }

    /// The range that `item` is in, if it is in the set.
    #[must_use]
    pub fn around(&self, item: usize) -> Option<Range<usize>> {
        let (&start, &end) = self.ranges.range(..=item).next_back()?;
        (item < end).then_some(start..end)
    }

    /// Whether any of `items` is in the set.
    #[must_use]
    pub fn overlaps(&self, items: &Range<usize>) -> bool {
        let last = self.ranges.range(..items.end).next_back();
        !items.is_empty() && last.is_some_and(|(_, &end)| end > items.start)
    }

    /// Whether all of `items` are in the set.
    #[must_use]
    pub fn covers(&self, items: &Range<usize>) -> bool {
        items.is_empty() || self.around(items.start).is_some_and(|range| range.end >= items.end)
    }

    /// The parts of `items` that are in the set, in order.
    pub fn within(&self, items: Range<usize>) -> impl Iterator<Item = Range<usize>> + '_ {
        let first = self.around(items.start).map_or(items.start, |range| range.start);
        self.ranges
            .range(first..items.end.max(first))
            .map(move |(&start, &end)| start.max(items.start)..end.min(items.end))
            .filter(|range| !range.is_empty())
    }

    /// The parts of `items` that are not in the set, in order.
    pub fn gaps(&self, items: Range<usize>) -> impl Iterator<Item = Range<usize>> + '_ {
        let mut at = items.start;
        let end = items.end;
        let mut within = self.within(items).chain(std::iter::once(end..end));
        std::iter::from_fn(move || {
            for range in within.by_ref() {
                let gap = at..range.start;
                at = range.end;
                if !gap.is_empty() {
                    return Some(gap);
                }
            }
            None
        })
    }

    /// Adds `items`. Returns how many of them are new.
    pub fn insert(&mut self, items: Range<usize>) -> usize {
        if items.is_empty() {
            return 0;
        }
        let before = self.len;
        let (mut start, mut end) = (items.start, items.end);
        while let Some((&from, &to)) = self.ranges.range(..=end).next_back() {
            if to < start {
                break;
            }
            self.ranges.remove(&from);
            self.len -= to - from;
            start = start.min(from);
            end = end.max(to);
        }
        self.ranges.insert(start, end);
        self.len += end - start;
        self.len - before
    }

    /// Takes `items` out. Returns how many of them were in the set.
    pub fn remove(&mut self, items: Range<usize>) -> usize {
        let parts: Vec<_> = self.within(items).collect();
        for part in &parts {
            let Some(range) = self.around(part.start) else { continue };
            self.ranges.remove(&range.start);
            for rest in [range.start..part.start, part.end..range.end] {
                if !rest.is_empty() {
                    self.ranges.insert(rest.start, rest.end);
                }
            }
        }
        let removed = parts.iter().map(Range::len).sum();
        self.len -= removed;
        removed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn spans_under_any_changes_agree_with_a_bit_for_each_item(
            changes in prop::collection::vec((any::<bool>(), 0usize..60, 0usize..20), 0..40),
            asked in (0usize..60, 0usize..20),
        ) {
            let mut spans = Spans::new();
            let mut bits = [false; 80];
            for (add, start, length) in changes {
                let range = start..start + length;
                let changed = bits[range.clone()].iter().filter(|&&bit| bit != add).count();
                bits[range.clone()].fill(add);
                let said = if add { spans.insert(range) } else { spans.remove(range) };
                prop_assert_eq!(said, changed);
            }
            prop_assert_eq!(spans.len(), bits.iter().filter(|&&bit| bit).count());
            let asked = asked.0..asked.0 + asked.1;
            let mut seen = [false; 80];
            for range in spans.within(asked.clone()) {
                seen[range].fill(true);
            }
            let mut gaps = [false; 80];
            for range in spans.gaps(asked.clone()) {
                gaps[range].fill(true);
            }
            for item in 0..80 {
                let inside = asked.contains(&item);
                prop_assert_eq!(seen[item], inside && bits[item]);
                prop_assert_eq!(gaps[item], inside && !bits[item]);
                prop_assert_eq!(spans.around(item).is_some(), bits[item]);
            }
            prop_assert_eq!(spans.overlaps(&asked), bits[asked.clone()].iter().any(|&bit| bit));
            prop_assert_eq!(spans.covers(&asked), bits[asked].iter().all(|&bit| bit));
            let ranges: Vec<_> = spans.iter().collect();
            prop_assert!(ranges.windows(2).all(|two| two[0].end < two[1].start));
        }
    }
}
