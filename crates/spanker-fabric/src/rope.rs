// SPDX-License-Identifier: Apache-2.0
//! A buffer that is changed without being written: pieces of received letters laid over what was there.
//!
//! A schedule mostly hands on what it received. With pieces, that costs no copy; and the caller's
//! buffer stays as it was until the whole call has succeeded.

use std::ops::Range;

use spanker_reduce::Element;

use crate::Letter;

/// The pieces over one buffer, in order and apart. Kept between calls for its memory.
#[derive(Debug, Default)]
pub(crate) struct Rope {
    pieces: Vec<Piece>,
    spare: Vec<Piece>,
}

/// Elements `range` of the buffer are those of the letter.
#[derive(Debug, Clone)]
struct Piece {
    range: Range<usize>,
    letter: Letter,
}

impl Piece {
    /// The piece's elements `range`, which are within it.
    fn part<T: Element>(&self, range: &Range<usize>) -> Letter {
        let size = size_of::<T>();
        let start = self.range.start;
        self.letter.part((range.start - start) * size..(range.end - start) * size)
    }

    fn slice<T: Element>(&self, range: &Range<usize>) -> &[T] {
        let start = self.range.start;
        &bytemuck::cast_slice(self.letter.bytes())[range.start - start..range.end - start]
    }

    fn contains(&self, range: &Range<usize>) -> bool {
        self.range.start <= range.start && range.end <= self.range.end
    }
}

impl Rope {
    pub(crate) fn clear(&mut self) {
        self.pieces.clear();
    }

    /// Lays `letter`, which has as many elements, over elements `range`.
    pub(crate) fn lay<T: Element>(&mut self, range: Range<usize>, letter: Letter) {
        if range.is_empty() {
            return;
        }
        let first = self.pieces.partition_point(|piece| piece.range.end <= range.start);
        let covered = first..first + self.over(&range).len();
        self.spare.clear();
        for piece in &self.pieces[covered.clone()] {
            // What sticks out on either side stays.
            for kept in [piece.range.start..range.start, range.end..piece.range.end] {
                if !kept.is_empty() {
                    self.spare.push(Piece { letter: piece.part::<T>(&kept), range: kept });
                }
            }
        }
        self.spare.push(Piece { range, letter });
        self.spare.sort_by_key(|piece| piece.range.start);
        self.pieces.splice(covered, self.spare.drain(..));
    }

    /// Elements `range`, if they lie in one piece or altogether in `base`.
    pub(crate) fn slice<'a, T: Element>(
        &'a self,
        base: &'a [T],
        range: Range<usize>,
    ) -> Option<&'a [T]> {
        match self.over(&range) {
            _ if range.is_empty() => Some(&[]),
            [] => Some(&base[range]),
            [piece] if piece.contains(&range) => Some(piece.slice(&range)),
            _ => None,
        }
    }

    /// A letter with elements `range` that shares the memory of the piece that they lie in, if they lie
    /// in one.
    pub(crate) fn letter<T: Element>(&self, range: &Range<usize>) -> Option<Letter> {
        match self.over(range) {
            [piece] if piece.contains(range) => Some(piece.part::<T>(range)),
            _ => None,
        }
    }

    /// Whether nothing lies over elements `range`.
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
        self.over(&range).iter().map(move |piece| {
            let shared = piece.range.start.max(range.start)..piece.range.end.min(range.end);
            (shared.clone(), piece.slice(&shared))
        })
    }

    /// The pieces that share an element with `range`.
    fn over(&self, range: &Range<usize>) -> &[Piece] {
        if range.is_empty() {
            return &[];
        }
        let first = self.pieces.partition_point(|piece| piece.range.end <= range.start);
        let rest = &self.pieces[first..];
        &rest[..rest.partition_point(|piece| piece.range.start < range.end)]
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
        fn a_rope_reads_like_the_buffer_it_stands_for(
            writes in prop::collection::vec((0usize..40, 0usize..40, 0usize..5, any::<u16>()), 0..30),
            reads in prop::collection::vec((0usize..40, 0usize..40), 1..20),
        ) {
            let base: Vec<u32> = (0..40).collect();
            let (mut plain, mut rope, mut pool) = (base.clone(), Rope::default(), Pool::default());
            for (a, b, offset, value) in writes {
                let range = a.min(b)..a.max(b);
                let values: Vec<u32> = (0..range.len() + offset)
                    .map(|i| 1000 * u32::from(value) + i as u32)
                    .collect();
                let letter = pool.write(4 * values.len(), |out| {
                    out.copy_from_slice(bytemuck::cast_slice(&values));
                });
                plain[range.clone()].copy_from_slice(&values[offset..]);
                rope.lay::<u32>(range, letter.part(4 * offset..4 * values.len()));
            }
            for (a, b) in reads {
                let range = a.min(b)..a.max(b);
                let mut out = vec![0; range.len()];
                rope.read(&base, range.clone(), &mut out);
                prop_assert_eq!(&out, &plain[range.clone()]);
                prop_assert_eq!(rope.is_bare(&range), rope.changes::<u32>(&range).count() == 0);
                if let Some(letter) = rope.letter::<u32>(&range) {
                    let found: &[u32] = bytemuck::cast_slice(letter.bytes());
                    prop_assert_eq!(found, &plain[range.clone()]);
                }
                if let Some(slice) = rope.slice(&base, range.clone()) {
                    prop_assert_eq!(slice, &plain[range]);
                }
            }
        }
    }
}
