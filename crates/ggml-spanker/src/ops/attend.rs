// SPDX-License-Identifier: Apache-2.0
//! Attention over a KV cache in blocks, and how keys and values get there. Blocks are [`KvShape`]'s.
//!
//! One head of one row of queries, over the positions up to its own: in every block, each position's score is the sum
//! of the products of query and key, number by number from the first, times the scale. Of the block's scores the
//! largest is subtracted; [`exp`] of each is a weight; weights are added in 16 lanes, lane `i` those of positions
//! `i`, `i + 16` and so on, and then the lanes in halves; values times weights are added position by position. So a
//! block is a largest score, a sum and a row. Blocks are put together from the first: with the larger of both largest
//! scores, sums and rows times [`exp`] of their own less that one. What comes out is the row by the sum.
//!
//! With a cap, a score is `cap * tanh(score / cap)`. With a window, a row sees its last positions only; blocks of which it
//! sees nothing do not count. A sink is one more score at the end, which has a weight and no value.
//!
//! Blocks do not depend on each other, so that they can be computed in any order and by different threads.

mod q4_0;
mod tile;

use std::ops::Range;

use half::f16;
use spanker_model::{KV_BLOCK, KvShape, Quant};

use super::body::{most, to_half};
use super::{capped, exp};
use crate::input::round_block;
use crate::path::Path;
use crate::simd::{Lanes, Work, run_on};
use tile::{Columns, Floats, Halves, NEXT, ROWS, Strided, multiply};

/// Positions of a block.
const BLOCK: usize = KV_BLOCK as usize;
/// Numbers in a vector of lanes.
const WIDE: usize = 16;
/// Numbers of a head that are worked on at a time.
const SLAB: usize = 64;

/// Where a row of numbers begins behind the largest score and the sum.
const HEAD: usize = WIDE;

/// The keys and values of one head of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct KvView<'a> {
    /// The blocks of a layer.
    pub cache: &'a [u8],
    /// Which of them the sequence has, in order.
    pub table: &'a [u32],
    /// How they lie there.
    pub shape: KvShape,
    /// The head of keys and values.
    pub head: usize,
}

impl<'a> KvView<'a> {
    /// The head's keys and values in the block that has position `64 * index`.
    fn block(&self, index: usize) -> [&'a [u8]; 2] {
        let (block, head) = (self.shape.block_bytes() as usize, self.shape.head_bytes() as usize);
        let start = self.table[index] as usize * block + self.head * head;
        let (keys, values) = self.cache[start..start + head].split_at(head / 2);
        [keys, values]
    }
}

/// Rows of queries that follow each other in a sequence, of the heads that share one head of keys and values.
#[derive(Debug, Clone, Copy)]
pub struct Queries<'a> {
    /// Row by row, and in a row head by head.
    pub rows: &'a [f32],
    /// Heads of a row.
    pub heads: usize,
    /// The position of the first row, which sees the positions up to its own.
    pub first: usize,
    /// What products of queries and keys are multiplied with.
    pub scale: f32,
    /// What scores come near to and never pass; 0 is none.
    pub cap: f32,
    /// Positions that a row sees, its own included; 0 is all up to it.
    pub window: usize,
    /// A score of each head that no position has; empty where there is none.
    pub sinks: &'a [f32],
}

impl<'a> Queries<'a> {
    /// Rows that see all positions up to their own, with scores that are only multiplied.
    #[must_use]
    pub const fn plain(rows: &'a [f32], heads: usize, first: usize, scale: f32) -> Queries<'a> {
        Queries { rows, heads, first, scale, cap: 0.0, window: 0, sinks: &[] }
    }

    /// The first block of which any row sees something.
    #[must_use]
    pub const fn first_block(&self) -> usize {
        self.first_seen(self.first) / BLOCK
    }

    /// The first position that the row at a position sees.
    const fn first_seen(&self, position: usize) -> usize {
        match self.window {
            0 => 0,
            window => (position + 1).saturating_sub(window),
        }
    }

    /// Places in a block that a pair of a row and a head sees.
    fn seen(&self, pair: usize, block: usize) -> Range<usize> {
        let position = self.first + pair / self.heads;
        let first = block * BLOCK;
        let end = (position + 1).saturating_sub(first).min(BLOCK);
        self.first_seen(position).saturating_sub(first).min(end)..end
    }

    /// The sink of a head.
    fn sink(&self, head: usize) -> Option<f32> {
        self.sinks.get(head).copied()
    }
}

/// Memory that [`attend`] uses again from call to call.
#[derive(Debug, Clone, Default)]
pub struct AttendScratch {
    floats: Vec<f32>,
}

/// The parts of an [`AttendScratch`].
struct Parts<'a> {
    /// Keys or values as numbers.
    wide: &'a mut [f32],
    /// Scores and then weights of a block.
    scores: &'a mut [f32],
    /// What a block comes to.
    part: &'a mut [f32],
    /// Largest scores and sums of all blocks so far.
    heads: &'a mut [[f32; 2]],
}

/// Numbers that a block of one head of one row comes to.
#[must_use]
pub fn partial_len(head_size: usize) -> usize {
    HEAD + head_size.next_multiple_of(WIDE)
}

impl AttendScratch {
    /// Memory for so many rows and heads at a time: [`attend`] with no more of them allocates nothing.
    #[must_use]
    pub fn with_capacity(rows: usize, heads: usize, head_size: usize) -> AttendScratch {
        AttendScratch { floats: Vec::with_capacity(Self::needed(rows * heads, head_size)) }
    }

    /// Numbers that so many pairs of a row and a head take.
    #[must_use]
    pub const fn needed(pairs: usize, head_size: usize) -> usize {
        let part = HEAD + head_size.next_multiple_of(WIDE);
        // One line more, so that it can begin with one.
        WIDE + SLAB * BLOCK + pairs * (BLOCK + part + 2)
    }

    /// Bytes of memory that it has, used or not.
    #[must_use]
    pub fn allocated_bytes(&self) -> usize {
        self.floats.capacity() * 4
    }

    fn parts(&mut self, pairs: usize, head_size: usize) -> Parts<'_> {
        self.floats.resize(Self::needed(pairs, head_size), 0.0);
        // Vectors that cross two cache lines are read and written at half the speed.
        let skipped = self.floats.as_ptr().align_offset(4 * WIDE).min(WIDE);
        let (wide, rest) = self.floats[skipped..].split_at_mut(SLAB * BLOCK);
        let (scores, rest) = rest.split_at_mut(pairs * BLOCK);
        let (part, rest) = rest.split_at_mut(pairs * partial_len(head_size));
        let heads = rest[..2 * pairs].as_chunks_mut().0;
        Parts { wide, scores, part, heads }
    }
}

/// Checks that every block of the rows is there.
fn check(queries: &Queries<'_>, kv: &KvView<'_>) -> usize {
    let (size, shape) = (kv.shape.head_size as usize, kv.shape);
    assert!(shape.check().is_ok() && (kv.head as u64) < shape.heads, "{shape:?}");
    let width = size * queries.heads;
    assert!(width > 0 && queries.rows.len().is_multiple_of(width), "whole rows of queries");
    let rows = queries.rows.len() / width;
    assert!([0, queries.heads].contains(&queries.sinks.len()), "a sink for each head");
    let blocks = (queries.first + rows).div_ceil(BLOCK);
    let there = kv.cache.len() as u64 / shape.block_bytes();
    assert!(blocks <= kv.table.len(), "{blocks} blocks, and the table has {}", kv.table.len());
    assert!(kv.table[..blocks].iter().all(|&block| u64::from(block) < there));
    rows
}

/// Attention of rows of queries. `out` is as long as the queries are.
///
/// # Panics
/// If lengths do not belong together, or a block is not there.
pub fn attend(queries: Queries<'_>, kv: KvView<'_>, scratch: &mut AttendScratch, out: &mut [f32]) {
    check(&queries, &kv);
    assert_eq!(queries.rows.len(), out.len());
    attend_on(Path::best(), queries, kv, scratch, out);
}

pub(super) fn attend_on(
    path: Path,
    queries: Queries<'_>,
    kv: KvView<'_>,
    scratch: &mut AttendScratch,
    out: &mut [f32],
) {
    run_on(path, Attend { queries, kv, scratch, out });
}

/// What some blocks of the rows come to, block by block: [`partial_len`] numbers for each pair of a row and a head.
/// [`fold`] puts them together.
///
/// # Panics
/// If lengths do not belong together, or a block is not there.
pub fn attend_blocks(
    queries: Queries<'_>,
    kv: KvView<'_>,
    blocks: Range<usize>,
    scratch: &mut AttendScratch,
    partials: &mut [f32],
) {
    let pairs = check(&queries, &kv) * queries.heads;
    assert_eq!(partials.len(), blocks.len() * pairs * partial_len(kv.shape.head_size as usize));
    run_on(Path::best(), AttendBlocks { queries, kv, blocks, scratch, partials });
}

/// Puts all blocks of one head of one row together, and its sink. `partials` has blocks that the row sees one after the
/// other, `stride` numbers apart.
///
/// # Panics
/// If there are none.
pub fn fold(partials: &[f32], stride: usize, sink: Option<f32>, out: &mut [f32]) {
    assert!(!partials.is_empty() && stride >= partial_len(out.len()));
    run_on(Path::best(), Fold { partials, stride, sink, out });
}

struct Attend<'a> {
    queries: Queries<'a>,
    kv: KvView<'a>,
    scratch: &'a mut AttendScratch,
    out: &'a mut [f32],
}

impl Work for Attend<'_> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Attend { queries, kv, scratch, out } = self;
        let size = kv.shape.head_size as usize;
        let (pairs, length) = (queries.rows.len() / size, partial_len(size));
        let rows = pairs / queries.heads;
        let Parts { wide, scores, part, heads } = scratch.parts(pairs, size);
        heads.fill([f32::NEG_INFINITY, 0.0]);
        out.fill(0.0);
        for block in queries.first_block()..(queries.first + rows).div_ceil(BLOCK) {
            one_block(l, &queries, &kv, block, (&mut *wide, &mut *scores), part);
            let parts = part.chunks_exact(length);
            let all = heads.iter_mut().zip(out.chunks_exact_mut(size)).zip(parts);
            for (pair, ((head, out), part)) in all.enumerate() {
                if !queries.seen(pair, block).is_empty() {
                    put_together(head, out, part);
                }
            }
        }
        for (pair, (head, out)) in heads.iter().zip(out.chunks_exact_mut(size)).enumerate() {
            divide(*head, queries.sink(pair % queries.heads), out);
        }
    }
}

struct AttendBlocks<'a> {
    queries: Queries<'a>,
    kv: KvView<'a>,
    blocks: Range<usize>,
    scratch: &'a mut AttendScratch,
    partials: &'a mut [f32],
}

impl Work for AttendBlocks<'_> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let AttendBlocks { queries, kv, blocks, scratch, partials } = self;
        let size = kv.shape.head_size as usize;
        let pairs = queries.rows.len() / size;
        let Parts { wide, scores, .. } = scratch.parts(pairs, size);
        for (block, part) in blocks.zip(partials.chunks_exact_mut(pairs * partial_len(size))) {
            one_block(l, &queries, &kv, block, (&mut *wide, &mut *scores), part);
        }
    }
}

struct Fold<'a> {
    partials: &'a [f32],
    stride: usize,
    sink: Option<f32>,
    out: &'a mut [f32],
}

impl Work for Fold<'_> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes>(self, _: L) {
        let Fold { partials, stride, sink, out } = self;
        let mut head = [f32::NEG_INFINITY, 0.0];
        out.fill(0.0);
        for part in partials.chunks(stride) {
            put_together(&mut head, out, part);
        }
        divide(head, sink, out);
    }
}

/// What one block comes to, for every row that sees a part of it.
#[inline(always)]
fn one_block<L: Lanes>(
    l: L,
    queries: &Queries<'_>,
    kv: &KvView<'_>,
    block: usize,
    (wide, scores): (&mut [f32], &mut [f32]),
    parts: &mut [f32],
) {
    let (size, heads) = (kv.shape.head_size as usize, queries.heads);
    let length = partial_len(size);
    // Rows before a block do not see it, and those far behind it do not, either: those that do follow each other.
    let sees = |pair: &usize| !queries.seen(*pair, block).is_empty();
    let all = queries.rows.len() / size;
    let (Some(first), Some(last)) = ((0..all).find(sees), (0..all).rfind(sees)) else { return };
    let count = last + 1 - first;
    // Mostly all of them see all of it.
    let whole = [first, last].iter().all(|&pair| queries.seen(pair, block).len() == BLOCK);
    let seen = |at: usize| if whole { 0..BLOCK } else { queries.seen(first + at, block) };
    let [keys, values] = kv.block(block);
    // Where the next block is no processor foresees: its keys are asked for with the values of this one.
    let more = (block + 1) * BLOCK < queries.first + all / heads;
    let next_keys = if more { kv.block(block + 1)[0] } else { &[] };
    // For a few rows it does not pay to write keys and values down as f32.
    let direct = count <= ROWS && kv.shape.quant == Quant::F16 && size.is_multiple_of(WIDE);
    let scores = &mut scores[first * BLOCK..(last + 1) * BLOCK];
    let parts = &mut parts[first * length..(last + 1) * length];
    scores.fill(0.0);
    for start in (0..size).step_by(SLAB) {
        let numbers = start..size.min(start + SLAB);
        let factors = &queries.rows[first * size + start..];
        let factors = Strided { numbers: factors, stride: size };
        let sums = &mut Strided { numbers: &mut *scores, stride: BLOCK };
        let (wides, rows) = (BLOCK / WIDE, (count, |_| 0..numbers.len()));
        let next = ahead(values, &numbers, size);
        if direct {
            let bytes = &keys[2 * BLOCK * numbers.start..2 * BLOCK * numbers.end];
            let table = Halves { bytes, stride: 2 * BLOCK, from: 0 };
            multiply(l, Columns { table, wides, next }, &factors, rows, sums);
        } else {
            widen_keys(l, kv, keys, numbers.clone(), wide);
            let table = Floats { numbers: wide, stride: BLOCK };
            multiply(l, Columns { table, wides, next }, &factors, rows, sums);
        }
    }
    let each = scores.chunks_exact_mut(BLOCK).zip(parts.chunks_exact_mut(length));
    for (at, (scores, part)) in each.enumerate() {
        [part[0], part[1]] = weigh(l, scores, queries, seen(at));
        part[HEAD..].fill(0.0);
    }
    for start in (0..size).step_by(SLAB) {
        let numbers = start..size.min(start + SLAB);
        let factors = Strided { numbers: &*scores, stride: BLOCK };
        let sums = &mut Strided { numbers: &mut parts[HEAD + start..], stride: length };
        let wides = numbers.len().div_ceil(WIDE);
        let (rows, next) = ((count, seen), ahead(next_keys, &numbers, size));
        if direct {
            let table = Halves { bytes: values, stride: 2 * size, from: 2 * start };
            multiply(l, Columns { table, wides, next }, &factors, rows, sums);
        } else {
            widen_values(l, kv, values, numbers, wide);
            let table = Floats { numbers: wide, stride: SLAB };
            multiply(l, Columns { table, wides, next }, &factors, rows, sums);
        }
    }
}

/// What is to be asked for of a block while some numbers of another are multiplied: the same share.
#[inline(always)]
fn ahead<'a>(bytes: &'a [u8], numbers: &Range<usize>, size: usize) -> &'a [[u8; NEXT]] {
    let at = |number: usize| bytes.len() / size * number;
    bytes[at(numbers.start)..at(numbers.end)].as_chunks().0
}

/// Sums become weights. Gives the largest score and the sum of the weights of the positions that are seen.
#[inline(always)]
fn weigh<L: Lanes>(
    l: L,
    scores: &mut [f32],
    queries: &Queries<'_>,
    seen: Range<usize>,
) -> [f32; 2] {
    scores.iter_mut().for_each(|score| *score *= queries.scale);
    if queries.cap != 0.0 {
        scores.iter_mut().for_each(|score| *score = capped(*score, queries.cap));
    }
    // What is not seen may be anything.
    scores[..seen.start].fill(f32::NEG_INFINITY);
    scores[seen.end..].fill(f32::NEG_INFINITY);
    let largest = most(scores);
    for score in scores.iter_mut() {
        *score = exp(*score - largest);
    }
    scores[..seen.start].fill(0.0);
    scores[seen.end..].fill(0.0);
    let mut lanes = [0.0f32; WIDE];
    for scores in scores.as_chunks::<WIDE>().0 {
        for lane in 0..WIDE {
            lanes[lane] += scores[lane];
        }
    }
    [largest, l.wide_sum(l.wide(&lanes))]
}

/// Adds a block to those before it, whose largest score and sum are in `head`.
#[inline(always)]
fn put_together(head: &mut [f32; 2], row: &mut [f32], part: &[f32]) {
    let largest = if part[0] > head[0] { part[0] } else { head[0] };
    // One of both is the largest, and `exp` of 0 is 1.
    let small = exp(if part[0] > head[0] { head[0] - largest } else { part[0] - largest });
    let (old, new) = if part[0] > head[0] { (small, 1.0) } else { (1.0, small) };
    *head = [largest, head[1] * old + part[1] * new];
    for (sum, part) in row.iter_mut().zip(&part[HEAD..]) {
        *sum = *sum * old + *part * new;
    }
}

#[inline(always)]
fn divide(head: [f32; 2], sink: Option<f32>, row: &mut [f32]) {
    let Some(sink) = sink else {
        return row.iter_mut().for_each(|sum| *sum /= head[1]);
    };
    let largest = if sink > head[0] { sink } else { head[0] };
    let (old, new) = (exp(head[0] - largest), exp(sink - largest));
    let all = head[1] * old + new;
    row.iter_mut().for_each(|sum| *sum = *sum * old / all);
}

/// Some numbers of the keys of a block as f32: for each number one of every position.
#[inline(always)]
fn widen_keys<L: Lanes>(
    l: L,
    kv: &KvView<'_>,
    keys: &[u8],
    numbers: Range<usize>,
    out: &mut [f32],
) {
    if kv.shape.quant == Quant::F16 {
        let bytes = &keys[numbers.start * BLOCK * 2..numbers.end * BLOCK * 2];
        let out = out.as_chunks_mut::<WIDE>().0;
        for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<32>().0) {
            *out = l.wide_values(l.wide_f16(bytes));
        }
        return;
    }
    if kv.shape.quant == Quant::Q4_0 {
        return q4_0::widen_keys(l, kv, keys, numbers, out);
    }
    let (whole, scales) = keys.split_at(kv.shape.scales_at() as usize);
    let scales = scales.as_chunks::<{ 2 * BLOCK }>().0[numbers.start / 32..].iter();
    let rows = whole.as_chunks::<BLOCK>().0[numbers].chunks(32);
    let out = out.as_chunks_mut::<BLOCK>().0.chunks_mut(32);
    for ((scales, rows), out) in scales.zip(rows).zip(out) {
        let mut factors = [0.0; BLOCK];
        widen_scales(l, scales, &mut factors);
        for (whole, out) in rows.iter().zip(out) {
            scale_whole(l, whole, factors.as_chunks().0, out);
        }
    }
}

/// Whole numbers times their scales.
#[inline(always)]
fn scale_whole<L: Lanes>(l: L, whole: &[u8], factors: &[[f32; WIDE]], out: &mut [f32]) {
    let whole = whole.as_chunks::<WIDE>().0.iter().zip(factors);
    for (out, (whole, factors)) in out.as_chunks_mut::<WIDE>().0.iter_mut().zip(whole) {
        *out = l.wide_values(l.wide_add(l.wide(&[0.0; WIDE]), l.wide(factors), l.wide_i8(whole)));
    }
}

/// The scales of blocks of Q8_0 as f32.
#[inline(always)]
fn widen_scales<L: Lanes>(l: L, scales: &[u8], out: &mut [f32]) {
    let lanes = out.as_chunks_mut::<WIDE>().0.iter_mut();
    for (out, scales) in lanes.zip(scales.as_chunks::<32>().0) {
        *out = l.wide_values(l.wide_f16(scales));
    }
}

/// Some numbers of the values of a block as f32, position by position, [`SLAB`] apart.
#[inline(always)]
fn widen_values<L: Lanes>(
    l: L,
    kv: &KvView<'_>,
    values: &[u8],
    numbers: Range<usize>,
    out: &mut [f32],
) {
    let size = kv.shape.head_size as usize;
    let rows = out.as_chunks_mut::<SLAB>().0.iter_mut();
    if kv.shape.quant == Quant::F16 {
        for (out, bytes) in rows.zip(values.chunks_exact(2 * size)) {
            let bytes = &bytes[2 * numbers.start..2 * numbers.end];
            let (wide, rest) = bytes.as_chunks::<32>();
            let (wide_out, rest_out) = out.as_chunks_mut::<WIDE>();
            for (out, bytes) in wide_out.iter_mut().zip(wide) {
                *out = l.wide_values(l.wide_f16(bytes));
            }
            let rest_out = wide_out.get_mut(wide.len()).map_or(rest_out, |out| &mut out[..]);
            for (out, half) in rest_out.iter_mut().zip(rest.as_chunks().0) {
                *out = f16::from_le_bytes(*half).to_f32_const();
            }
        }
        return;
    }
    if kv.shape.quant == Quant::Q4_0 {
        return q4_0::widen_values(l, kv, values, numbers, out);
    }
    let (whole, scales) = values.split_at(kv.shape.scales_at() as usize);
    let (each, count) = (2 * kv.shape.scales() as usize, numbers.len() / 32);
    let first = 2 * (numbers.start / 32);
    let many = out.chunks_mut(WIDE * SLAB).zip(whole.chunks(WIDE * size));
    for ((out, whole), scales) in many.zip(scales.chunks(WIDE * each)) {
        // The scales of some positions end to end, so that they fill vectors.
        let (mut bytes, mut factors) = ([0; 2 * WIDE * SLAB / 32], [0.0; WIDE * SLAB / 32]);
        for (bytes, scales) in bytes.chunks_exact_mut(2 * count).zip(scales.chunks_exact(each)) {
            bytes.copy_from_slice(&scales[first..first + 2 * count]);
        }
        widen_scales(l, &bytes, &mut factors);
        let rows = out.as_chunks_mut::<SLAB>().0.iter_mut().zip(whole.chunks_exact(size));
        for ((out, whole), factors) in rows.zip(factors.chunks_exact(count)) {
            let runs = whole[numbers.clone()].as_chunks::<32>().0.iter();
            for ((out, whole), factor) in
                out.as_chunks_mut::<32>().0.iter_mut().zip(runs).zip(factors)
            {
                scale_whole(l, whole, &[[*factor; WIDE]; 2], out);
            }
        }
    }
}

/// Puts the keys and values of a position of one sequence into its block: all heads of both, end to end.
///
/// # Panics
/// If lengths do not belong together, or the block is not there.
pub fn keep(shape: KvShape, position: usize, keys: &[f32], values: &[f32], block: &mut [u8]) {
    let (size, heads) = (shape.head_size as usize, shape.heads as usize);
    assert!(shape.check().is_ok() && keys.len() == size * heads && values.len() == keys.len());
    assert_eq!(block.len() as u64, shape.block_bytes());
    run_on(Path::best(), Keep { shape, at: position % BLOCK, keys, values, block });
}

struct Keep<'a> {
    shape: KvShape,
    at: usize,
    keys: &'a [f32],
    values: &'a [f32],
    block: &'a mut [u8],
}

impl Work for Keep<'_> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Keep { shape, at, keys, values, block } = self;
        let (size, half) = (shape.head_size as usize, shape.half_bytes() as usize);
        let heads = keys.chunks_exact(size).zip(values.chunks_exact(size));
        for ((keys, values), block) in heads.zip(block.chunks_exact_mut(2 * half)) {
            let (kept_keys, kept_values) = block.split_at_mut(half);
            if shape.quant == Quant::F16 {
                let mut bytes = [0; 2 * SLAB];
                for (number, key) in keys.chunks(SLAB).enumerate() {
                    let bytes = &mut bytes[..2 * key.len()];
                    to_half(l, key, bytes);
                    let rows = kept_keys.chunks_exact_mut(2 * BLOCK).skip(number * SLAB);
                    for (row, half) in rows.zip(bytes.chunks_exact(2)) {
                        row[2 * at..2 * at + 2].copy_from_slice(half);
                    }
                }
                to_half(l, values, &mut kept_values[2 * at * size..2 * (at + 1) * size]);
            } else if shape.quant == Quant::Q4_0 {
                q4_0::keep_key(shape, at, keys, kept_keys);
                q4_0::keep_value(shape, at, values, kept_values);
            } else {
                keep_key_blocks(shape, at, keys, kept_keys);
                keep_value_blocks(shape, at, values, kept_values);
            }
        }
    }
}

/// The blocks of Q8_0 of 32 numbers each: scale and whole numbers.
#[inline(always)]
fn blocks_of(values: &[f32]) -> impl Iterator<Item = ([u8; 2], [u8; 32])> {
    values.as_chunks::<32>().0.iter().map(|values| {
        let mut whole = [0; 32];
        let scale = round_block(values, &mut whole);
        (f16::from_f32_const(scale).to_le_bytes(), whole)
    })
}

#[inline(always)]
fn keep_key_blocks(shape: KvShape, at: usize, keys: &[f32], kept: &mut [u8]) {
    let (whole_rows, scales) = kept.split_at_mut(shape.scales_at() as usize);
    for (index, (scale, whole)) in blocks_of(keys).enumerate() {
        let row = &mut scales[index * 2 * BLOCK..];
        row[2 * at..2 * at + 2].copy_from_slice(&scale);
        let rows = &mut whole_rows[32 * index * BLOCK..][..32 * BLOCK];
        for (row, whole) in rows.as_chunks_mut::<BLOCK>().0.iter_mut().zip(whole) {
            row[at] = whole;
        }
    }
}

#[inline(always)]
fn keep_value_blocks(shape: KvShape, at: usize, values: &[f32], kept: &mut [u8]) {
    let (size, each) = (shape.head_size as usize, 2 * shape.scales() as usize);
    let (whole_rows, scales) = kept.split_at_mut(shape.scales_at() as usize);
    let (row, scales) = (&mut whole_rows[at * size..], &mut scales[at * each..]);
    for (index, (scale, whole)) in blocks_of(values).enumerate() {
        row[32 * index..32 * (index + 1)].copy_from_slice(&whole);
        scales[2 * index..2 * index + 2].copy_from_slice(&scale);
    }
}

#[cfg(test)]
mod tests;
