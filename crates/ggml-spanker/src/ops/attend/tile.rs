// SPDX-License-Identifier: Apache-2.0
//! Products of rows of factors with a table of rows of numbers: scores of keys, and weights times values. A few rows of
//! factors at a time share what is read of the table, and their sums stay in registers. Every sum adds its products
//! in the order of the table's rows, so that nothing depends on how many rows there are.

use std::ops::Range;

use super::WIDE;
use crate::simd::Lanes;

/// Rows of factors that share what is read of the table.
pub(super) const ROWS: usize = 4;

/// A row of a table, as it lies in memory.
pub(super) trait Row: Copy {
    /// 16 of its numbers, from number `16 * at`.
    fn wide<L: Lanes>(self, l: L, at: usize) -> L::Wide;
}

/// Rows of numbers that have the same number of columns.
pub(super) trait Table: Copy {
    type Row: Row;
    /// Some of its rows.
    fn rows(self, range: Range<usize>) -> impl Iterator<Item = Self::Row>;
}

/// What is multiplied with rows of factors.
#[derive(Clone, Copy)]
pub(super) struct Columns<'a, T> {
    pub(super) table: T,
    /// How many times 16 columns.
    pub(super) wides: usize,
    /// What is asked for meanwhile, some of it for each row of the table.
    pub(super) next: &'a [[u8; NEXT]],
}

/// Bytes that are asked for with each row of a table.
pub(super) const NEXT: usize = 128;

/// Rows of f32, `stride` numbers apart.
#[derive(Clone, Copy)]
pub(super) struct Floats<'a> {
    pub(super) numbers: &'a [f32],
    pub(super) stride: usize,
}

/// Rows of f16, `stride` bytes apart, from byte `from` of each.
#[derive(Clone, Copy)]
pub(super) struct Halves<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) stride: usize,
    pub(super) from: usize,
}

#[derive(Clone, Copy)]
pub(super) struct FloatRow<'a>(&'a [f32]);

#[derive(Clone, Copy)]
pub(super) struct HalfRow<'a>(&'a [u8]);

impl Row for FloatRow<'_> {
    #[inline(always)]
    fn wide<L: Lanes>(self, l: L, at: usize) -> L::Wide {
        l.wide(&self.0.as_chunks().0[at])
    }
}

impl Row for HalfRow<'_> {
    #[inline(always)]
    fn wide<L: Lanes>(self, l: L, at: usize) -> L::Wide {
        l.wide_f16(&self.0.as_chunks().0[at])
    }
}

impl<'a> Table for Floats<'a> {
    type Row = FloatRow<'a>;

    #[inline(always)]
    fn rows(self, range: Range<usize>) -> impl Iterator<Item = FloatRow<'a>> {
        let numbers = &self.numbers[range.start * self.stride..range.end * self.stride];
        numbers.chunks_exact(self.stride).map(FloatRow)
    }
}

impl<'a> Table for Halves<'a> {
    type Row = HalfRow<'a>;

    #[inline(always)]
    fn rows(self, range: Range<usize>) -> impl Iterator<Item = HalfRow<'a>> {
        let bytes = &self.bytes[range.start * self.stride..range.end * self.stride];
        bytes.chunks_exact(self.stride).map(move |row| HalfRow(&row[self.from..]))
    }
}

/// Rows of numbers, so many apart.
pub(super) struct Strided<T> {
    pub(super) numbers: T,
    pub(super) stride: usize,
}

/// Adds to row `i` of the sums, for every `k` in `range(i)`, factor `k` of row `i` times row `k` of the table.
#[inline(always)]
pub(super) fn multiply<L: Lanes, T: Table>(
    l: L,
    given: Columns<'_, T>,
    factors: &Strided<&[f32]>,
    (rows, range): (usize, impl Fn(usize) -> Range<usize>),
    sums: &mut Strided<&mut [f32]>,
) {
    let (mut given, mut row) = (given, 0);
    while row < rows {
        // Rows that begin together go as far together as the first of them to end.
        let Range { start, end: mut together } = range(row);
        let mut count = 1;
        while count < ROWS && row + count < rows && range(row + count).start == start {
            together = together.min(range(row + count).end);
            count += 1;
        }
        let common = start..together;
        match count {
            4 => columns::<L, T, 4>(l, given, factors, (row, common), sums),
            3 => columns::<L, T, 3>(l, given, factors, (row, common), sums),
            2 => columns::<L, T, 2>(l, given, factors, (row, common), sums),
            _ => columns::<L, T, 1>(l, given, factors, (row, common), sums),
        }
        given.next = &[];
        for row in row..row + count {
            let rest = together..range(row).end;
            if !rest.is_empty() {
                columns::<L, T, 1>(l, given, factors, (row, rest), sums);
            }
        }
        row += count;
    }
}

/// `P` rows, as many columns at once as there are registers for.
#[inline(always)]
fn columns<L: Lanes, T: Table, const P: usize>(
    l: L,
    given: Columns<'_, T>,
    factors: &Strided<&[f32]>,
    (row, range): (usize, Range<usize>),
    sums: &mut Strided<&mut [f32]>,
) {
    let mut rows = [&factors.numbers[..0]; P];
    for (at, own) in rows.iter_mut().enumerate() {
        *own = &factors.numbers[(row + at) * factors.stride..][range.clone()];
    }
    let stride = sums.stride;
    let sums = &mut sums.numbers[row * stride..];
    if L::ABREAST >= 4 && given.wides == 4 {
        return tile::<L, T, P, 4>(l, (given, 0), rows, range, (sums, stride));
    }
    for at in 0..given.wides {
        tile::<L, T, P, 1>(l, (given, at), rows, range.clone(), (sums, stride));
    }
}

/// `P` rows with `W` times 16 columns, from number `16 * from`.
#[inline(always)]
fn tile<L: Lanes, T: Table, const P: usize, const W: usize>(
    l: L,
    (given, from): (Columns<'_, T>, usize),
    factors: [&[f32]; P],
    range: Range<usize>,
    (sums, stride): (&mut [f32], usize),
) {
    let count = range.len();
    let mut rows = factors;
    for (own, factors) in rows.iter_mut().zip(&factors) {
        *own = &factors[..count];
    }
    let mut totals = [[l.wide(&[0.0; WIDE]); W]; P];
    for (row, totals) in totals.iter_mut().enumerate() {
        let sums = sums[row * stride..].as_chunks::<WIDE>().0;
        for (total, sums) in totals.iter_mut().zip(&sums[from..from + W]) {
            *total = l.wide(sums);
        }
    }
    let next = if from == 0 { given.next } else { &[] };
    for (at, numbers) in (0..count).zip(given.table.rows(range)) {
        if let Some(next) = next.get(at) {
            l.fetch(next);
        }
        let mut wide = [l.wide(&[0.0; WIDE]); W];
        for (column, wide) in wide.iter_mut().enumerate() {
            *wide = numbers.wide(l, from + column);
        }
        for (totals, factors) in totals.iter_mut().zip(&rows) {
            let factor = l.wide(&[factors[at]; WIDE]);
            for (total, wide) in totals.iter_mut().zip(&wide) {
                *total = l.wide_add(*total, factor, *wide);
            }
        }
    }
    for (row, totals) in totals.iter().enumerate() {
        let sums = sums[row * stride..].as_chunks_mut::<WIDE>().0;
        for (sums, total) in sums[from..from + W].iter_mut().zip(totals) {
            *sums = l.wide_values(*total);
        }
    }
}
