// SPDX-License-Identifier: Apache-2.0
//! A buffer that is changed without being written: pieces of received letters laid over what was there.
//!
//! A schedule mostly hands on what it received. With pieces, that costs no copy; and the caller's
//! buffer stays as it was until the whole call has succeeded.

use std::ops::Range;

use spanker_reduce::Element;

use crate::{Letter, Pool};

/// The pieces over one buffer, in order and apart. Kept between calls for its memory.
#[derive(Debug, Default)]
pub(crate) struct Rope {
    pieces: Vec<Piece>,
    spare: Vec<Piece>,
}

/// Elements `range` of the buffer are elements `offset..` of the letter.
#[derive(Debug, Clone)]
struct Piece {
    range: Range<usize>,
    letter: Letter,
    offset: usize,
}

impl Piece {
    fn slice<T: Element>(&self, range: Range<usize>) -> &[T] {
        let from = self.offset + range.start - self.range.start;
        &bytemuck::cast_slice(self.letter.bytes())[from..from + range.len()]
    }
}

impl Rope {
    pub(crate) fn clear(&mut self) {
        self.pieces.clear();
    }

    /// Lays `letter`, from element `offset` on, over elements `range`.
    pub(crate) fn lay(&mut self, range: Range<usize>, letter: Letter, offset: usize) {
        if range.is_empty() {
            return;
        }
        let place = self.pieces.partition_point(|piece| piece.range.end <= range.start);
        let over = self.pieces[place..].iter().take_while(|piece| piece.range.start < range.end);
        let covered = place..place + over.count();
        self.spare.clear();
        for piece in &self.pieces[covered.clone()] {
            // What sticks out on either side stays.
            if piece.range.start < range.start {
                let kept = piece.range.start..range.start;
                self.spare.push(Piece { range: kept, ..piece.clone() });
            }
            if piece.range.end > range.end {
                let offset = piece.offset + range.end - piece.range.start;
                let kept = range.end..piece.range.end;
                self.spare.push(Piece { range: kept, offset, ..piece.clone() });
            }
        }
        self.spare.push(Piece { range, letter, offset });
        self.spare.sort_by_key(|piece| piece.range.start);
        self.pieces.splice(covered, self.spare.drain(..));
    }

    /// Elements `range`, if they lie in one piece or altogether in `base`.
    pub(crate) fn slice<'a, T: Element>(
        &'a self,
        base: &'a [T],
        range: Range<usize>,
    ) -> Option<&'a [T]> {
        let mut over = self.over(&range);
        match (over.next(), over.next()) {
            (None, _) => Some(&base[range]),
            (Some(piece), None)
                if piece.range.start <= range.start && range.end <= piece.range.end =>
            {
                Some(piece.slice(range))
            }
            _ => None,
        }
    }

    /// Writes elements `range` to `out`.
    pub(crate) fn read<T: Element>(&self, base: &[T], range: Range<usize>, out: &mut [T]) {
        let mut at = range.start;
        for piece in self.over(&range) {
            let shared = piece.range.start.max(range.start)..piece.range.end.min(range.end);
            let gap = at..shared.start;
            if !gap.is_empty() {
                out[gap.start - range.start..gap.end - range.start].copy_from_slice(&base[gap]);
            }
            out[shared.start - range.start..shared.end - range.start]
                .copy_from_slice(piece.slice(shared.clone()));
            at = shared.end;
        }
        if at < range.end {
            out[at - range.start..].copy_from_slice(&base[at..range.end]);
        }
    }

    /// A letter with elements `range`: the one that was received, where it has exactly these.
    pub(crate) fn letter<T: Element>(
        &self,
        base: &[T],
        range: Range<usize>,
        pool: &mut Pool,
    ) -> Letter {
        let bytes = range.len() * size_of::<T>();
        if let Some(piece) = self.over(&range).next() {
            let begins = piece.range.start == range.start && piece.offset == 0;
            if begins && range.end <= piece.range.end {
                return piece.letter.truncated(bytes);
            }
        }
        pool.write(bytes, |out| self.read(base, range, bytemuck::cast_slice_mut(out)))
    }

    /// What differs from the buffer underneath, within `range`.
    pub(crate) fn changes<T: Element>(
        &self,
        range: &Range<usize>,
    ) -> impl Iterator<Item = (Range<usize>, &[T])> {
        let range = range.clone();
        self.over(&range).map(move |piece| {
            let shared = piece.range.start.max(range.start)..piece.range.end.min(range.end);
            (shared.clone(), piece.slice(shared))
        })
    }

    /// The pieces that share an element with `range`.
    fn over(&self, range: &Range<usize>) -> std::slice::Iter<'_, Piece> {
        if range.is_empty() {
            return [].iter();
        }
        let first = self.pieces.partition_point(|piece| piece.range.end <= range.start);
        let rest = &self.pieces[first..];
        rest[..rest.partition_point(|piece| piece.range.start < range.end)].iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
                rope.lay(range, letter, offset);
            }
            for (a, b) in reads {
                let range = a.min(b)..a.max(b);
                let mut out = vec![0; range.len()];
                rope.read(&base, range.clone(), &mut out);
                prop_assert_eq!(&out, &plain[range.clone()]);
                let letter = rope.letter(&base, range.clone(), &mut pool);
                let found: &[u32] = bytemuck::cast_slice(letter.bytes());
                prop_assert_eq!(found, &plain[range.clone()]);
                if let Some(slice) = rope.slice(&base, range.clone()) {
                    prop_assert_eq!(slice, &plain[range]);
                }
            }
        }
    }
}
