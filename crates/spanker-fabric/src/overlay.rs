// SPDX-License-Identifier: Apache-2.0
//! An overlay of received parts: messages that stand in for elements of a buffer, which itself is not written.
//!
//! A schedule mostly forwards what it received. From an overlay that costs no copy, and the caller's buffer stays as it
//! was until the whole call has succeeded.

use std::ops::Range;

use spanker_reduce::Element;

use crate::Message;

/// The parts over one buffer, in order and without overlap. Reused between calls, which saves allocations.
#[derive(Debug, Default)]
pub(crate) struct Overlay {
    parts: Vec<Part>,
    spare: Vec<Part>,
}

/// Elements `range` of the buffer are those of the message.
#[derive(Debug, Clone)]
struct Part {
    range: Range<usize>,
    message: Message,
}

impl Part {
    /// A message of the elements `range`, which are within the part.
    fn message<T: Element>(&self, range: &Range<usize>) -> Message {
        let size = size_of::<T>();
        let start = self.range.start;
        self.message.part((range.start - start) * size..(range.end - start) * size)
    }

    fn slice<T: Element>(&self, range: &Range<usize>) -> &[T] {
        let start = self.range.start;
        &bytemuck::cast_slice(self.message.bytes())[range.start - start..range.end - start]
    }

    fn contains(&self, range: &Range<usize>) -> bool {
        self.range.start <= range.start && range.end <= self.range.end
    }
}

impl Overlay {
    pub(crate) fn clear(&mut self) {
        self.parts.clear();
    }

    /// Lays `message`, which has as many elements, over elements `range`.
    pub(crate) fn lay<T: Element>(&mut self, range: Range<usize>, message: Message) {
        if range.is_empty() {
            return;
        }
        let first = self.parts.partition_point(|part| part.range.end <= range.start);
        let covered = first..first + self.over(&range).len();
        self.spare.clear();
        for part in &self.parts[covered.clone()] {
            // What the new part does not cover stays.
            for kept in [part.range.start..range.start, range.end..part.range.end] {
                if !kept.is_empty() {
                    self.spare.push(Part { message: part.message::<T>(&kept), range: kept });
                }
            }
        }
        self.spare.push(Part { range, message });
        self.spare.sort_by_key(|part| part.range.start);
        self.parts.splice(covered, self.spare.drain(..));
    }

    /// Elements `range`, if they are in one part or all in `base`.
    pub(crate) fn slice<'a, T: Element>(
        &'a self,
        base: &'a [T],
        range: Range<usize>,
    ) -> Option<&'a [T]> {
        match self.over(&range) {
            _ if range.is_empty() => Some(&[]),
            [] => Some(&base[range]),
            [part] if part.contains(&range) => Some(part.slice(&range)),
            _ => None,
        }
    }

    /// A message with elements `range` that shares the memory of the part that has them, if one
    /// has them all.
    pub(crate) fn message<T: Element>(&self, range: &Range<usize>) -> Option<Message> {
        match self.over(range) {
            [part] if part.contains(range) => Some(part.message::<T>(range)),
            _ => None,
        }
    }

    /// Whether no part covers elements `range`.
    pub(crate) fn is_bare(&self, range: &Range<usize>) -> bool {
        self.over(range).is_empty()
    }

    /// Writes elements `range` to `out`.
    pub(crate) fn read<T: Element>(&self, base: &[T], range: Range<usize>, out: &mut [T]) {
        let mut at = range.start;
        for (shared, values) in self.changes(&range) {
            let gap = at..shared.start;
            if !gap.is_empty() {
                out[gap.start - range.start..gap.end - range.start].copy_from_slice(&base[gap]);
            }
            out[shared.start - range.start..shared.end - range.start].copy_from_slice(values);
            at = shared.end;
        }
        if at < range.end {
            out[at - range.start..].copy_from_slice(&base[at..range.end]);
        }
    }

    /// What differs from the buffer underneath, within `range`.
    pub(crate) fn changes<T: Element>(
        &self,
        range: &Range<usize>,
    ) -> impl Iterator<Item = (Range<usize>, &[T])> {
        let range = range.clone();
        self.over(&range).iter().map(move |part| {
            let shared = part.range.start.max(range.start)..part.range.end.min(range.end);
            (shared.clone(), part.slice(&shared))
        })
    }

    /// The parts that share an element with `range`.
    fn over(&self, range: &Range<usize>) -> &[Part] {
        if range.is_empty() {
            return &[];
        }
        let first = self.parts.partition_point(|part| part.range.end <= range.start);
        let rest = &self.parts[first..];
        &rest[..rest.partition_point(|part| part.range.start < range.end)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pool;
    use proptest::prelude::*;

    proptest! {
        /// Random writes, compared with writing them to a plain buffer.
        #[test]
        fn an_overlay_reads_like_the_buffer_it_stands_for(
            writes in prop::collection::vec((0usize..40, 0usize..40, 0usize..5, any::<u16>()), 0..30),
            reads in prop::collection::vec((0usize..40, 0usize..40), 1..20),
        ) {
            let base: Vec<u32> = (0..40).collect();
            let (mut plain, mut overlay, mut pool) = (base.clone(), Overlay::default(), Pool::default());
            for (a, b, offset, value) in writes {
                let range = a.min(b)..a.max(b);
                let values: Vec<u32> = (0..range.len() + offset)
                    .map(|i| 1000 * u32::from(value) + i as u32)
                    .collect();
                let message = pool.write(4 * values.len(), |out| {
                    out.copy_from_slice(bytemuck::cast_slice(&values));
                });
                plain[range.clone()].copy_from_slice(&values[offset..]);
                overlay.lay::<u32>(range, message.part(4 * offset..4 * values.len()));
            }
            for (a, b) in reads {
                let range = a.min(b)..a.max(b);
                let mut out = vec![0; range.len()];
                overlay.read(&base, range.clone(), &mut out);
                prop_assert_eq!(&out, &plain[range.clone()]);
                prop_assert_eq!(overlay.is_bare(&range), overlay.changes::<u32>(&range).count() == 0);
                if let Some(message) = overlay.message::<u32>(&range) {
                    let found: &[u32] = bytemuck::cast_slice(message.bytes());
                    prop_assert_eq!(found, &plain[range.clone()]);
                }
                if let Some(slice) = overlay.slice(&base, range.clone()) {
                    prop_assert_eq!(slice, &plain[range]);
                }
            }
        }
    }
}
