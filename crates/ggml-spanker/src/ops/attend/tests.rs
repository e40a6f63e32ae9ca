// SPDX-License-Identifier: Apache-2.0
//! Attention over blocks against a definition in plain loops, and however rows and blocks are shared out.

use proptest::prelude::*;
use spanker_model::{KV_BLOCK, KvShape, Quant};

use super::*;
use crate::path::Path;

/// A cache with a sequence in it, whose blocks lie in any order among others.
struct Cache {
    bytes: Vec<u8>,
    table: Vec<u32>,
    shape: KvShape,
    /// What was put in, position by position.
    kept: Vec<[Vec<f32>; 2]>,
}

/// Numbers from a seed, of about the size that a model has.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 40) as f32 / (1u64 << 24) as f32 - 0.5) * 4.0
    }

    fn take(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.next()).collect()
    }
}

fn cache(seed: u64, shape: KvShape, positions: usize) -> Cache {
    let mut numbers = Numbers(seed);
    let blocks = KvShape::blocks_for(positions as u64) as usize;
    // Twice as many as there need to be, from the last one on; what is in the others is not a number.
    let bytes = vec![0xFF; 2 * blocks * shape.block_bytes() as usize];
    let table: Vec<u32> = (0..blocks).map(|at| (2 * (blocks - at) - 1) as u32).collect();
    let mut cache = Cache { bytes, table, shape, kept: Vec::new() };
    let width = (shape.heads * shape.head_size) as usize;
    for position in 0..positions {
        let [keys, values] = [numbers.take(width), numbers.take(width)];
        let block = cache.table[position / BLOCK] as usize * shape.block_bytes() as usize;
        let bytes = &mut cache.bytes[block..block + shape.block_bytes() as usize];
        keep(shape, position, &keys, &values, bytes);
        cache.kept.push([keys, values]);
    }
    cache
}

impl Cache {
    fn view(&self, head: usize) -> KvView<'_> {
        KvView { cache: &self.bytes, table: &self.table, shape: self.shape, head }
    }

    /// What is stored of a head of a key or value.
    fn stored(&self, which: usize, position: usize, head: usize) -> Vec<f32> {
        let size = self.shape.head_size as usize;
        let numbers = &self.kept[position][which][head * size..(head + 1) * size];
        if self.shape.quant == Quant::F16 {
            return numbers.iter().map(|value| f16::from_f32(*value).to_f32()).collect();
        }
        let quant = self.shape.quant;
        let mut bytes = vec![0; quant.row_bytes(size as u64) as usize];
        match quant {
            Quant::Q8_0 => crate::quantize(quant, numbers, &mut bytes).expect("whole blocks"),
            _ => crate::encode(quant, numbers, &mut bytes).expect("whole blocks"),
        }
        let mut out = vec![0.0; size];
        crate::decode(quant, &bytes, &mut out).expect("whole blocks");
        out
    }
}

/// The definition, head by head and block by block, without vectors.
fn defined(cache: &Cache, kv_head: usize, queries: &Queries<'_>, pair: usize) -> Vec<f32> {
    let size = cache.shape.head_size as usize;
    let query = &queries.rows[pair * size..][..size];
    let position = queries.first + pair / queries.heads;
    let first = if queries.window == 0 { 0 } else { (position + 1).saturating_sub(queries.window) };
    let mut state = (f32::NEG_INFINITY, 0.0f32, vec![0.0f32; size]);
    for block in first / BLOCK..=position / BLOCK {
        let end = position.min(block * BLOCK + BLOCK - 1);
        let seen: Vec<usize> = (first.max(block * BLOCK)..=end).collect();
        let score = |&at: &usize| {
            let key = cache.stored(0, at, kv_head);
            let score = query.iter().zip(key).fold(0.0f32, |sum, (q, k)| sum + q * k);
            let score = score * queries.scale;
            if queries.cap == 0.0 { score } else { capped(score, queries.cap) }
        };
        let scores: Vec<f32> = seen.iter().map(score).collect();
        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f32> = scores.iter().map(|score| exp(score - largest)).collect();
        let mut lanes = [0.0f32; 16];
        seen.iter().zip(&weights).for_each(|(at, weight)| lanes[at % 16] += weight);
        for half in [8, 4, 2, 1] {
            (0..half).for_each(|lane| lanes[lane] += lanes[lane + half]);
        }
        let mut row = vec![0.0f32; size];
        for (at, weight) in seen.iter().zip(&weights) {
            let value = cache.stored(1, *at, kv_head);
            row.iter_mut().zip(value).for_each(|(sum, value)| *sum += weight * value);
        }
        let all = largest.max(state.0);
        let (old, new) = (exp(state.0 - all), exp(largest - all));
        let sums = state.2.iter().zip(&row).map(|(sum, row)| sum * old + row * new).collect();
        state = (all, state.1 * old + lanes[0] * new, sums);
    }
    let Some(sink) = queries.sinks.get(pair % queries.heads) else {
        return state.2.iter().map(|sum| sum / state.1).collect();
    };
    let all = state.0.max(*sink);
    let (old, new) = (exp(state.0 - all), exp(sink - all));
    state.2.iter().map(|sum| sum * old / (state.1 * old + new)).collect()
}

/// What scores become: with a window, a cap and sinks, or without.
fn scored<'a>(queries: Queries<'a>, (window, cap): (usize, bool), sinks: &'a [f32]) -> Queries<'a> {
    Queries { window, cap: if cap { 2.0 } else { 0.0 }, sinks, ..queries }
}

fn windows() -> impl Strategy<Value = (usize, bool)> {
    (prop_oneof![Just(0usize), 1..200usize], any::<bool>())
}

fn shapes() -> impl Strategy<Value = KvShape> {
    let size = prop_oneof![Just(20u64), Just(32), Just(64), Just(80), Just(96), Just(128)];
    (1..4u64, size, 0..3usize).prop_map(|(heads, head_size, kind)| {
        let quant = if head_size % 32 == 0 { KvShape::QUANTS[kind] } else { Quant::F16 };
        KvShape { heads, head_size, quant }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn attention_is_what_plain_loops_define_on_every_path(
        seed in any::<u64>(),
        shape in shapes(),
        rows in 1..7usize,
        group in 1..4usize,
        first in 0..150usize,
        window in windows(),
        with_sinks in any::<bool>(),
    ) {
        let cache = cache(seed, shape, first + rows);
        let size = shape.head_size as usize;
        let given = Numbers(!seed).take(rows * group * size);
        let kv_head = shape.heads as usize - 1;
        let sinks = Numbers(seed ^ 5).take(if with_sinks { group } else { 0 });
        let queries = scored(Queries::plain(&given, group, first, 0.125), window, &sinks);
        let expected: Vec<f32> =
            (0..rows * group).flat_map(|pair| defined(&cache, kv_head, &queries, pair)).collect();
        for path in Path::available().into_iter().chain([Path::Portable]) {
            let mut out = vec![7.0; given.len()];
            attend_on(path, queries, cache.view(kv_head), &mut AttendScratch::default(), &mut out);
            prop_assert_eq!(&out, &expected, "by {}", path);
        }
    }

    #[test]
    fn rows_and_blocks_can_be_shared_out_in_any_way(
        seed in any::<u64>(),
        shape in shapes(),
        rows in 1..6usize,
        first in 0..300usize,
        cut in 0..6usize,
        window in windows(),
        with_sinks in any::<bool>(),
    ) {
        let cache = cache(seed, shape, first + rows);
        let size = shape.head_size as usize;
        let (heads, kv) = (2, cache.view(0));
        let given = Numbers(!seed).take(rows * heads * size);
        let sinks = Numbers(seed ^ 5).take(if with_sinks { heads } else { 0 });
        let queries = scored(Queries::plain(&given, heads, first, 0.3), window, &sinks);
        let mut whole = vec![7.0; given.len()];
        let scratch = &mut AttendScratch::with_capacity(rows, heads, size);
        attend(queries, kv, scratch, &mut whole);
        // Each row by itself.
        let mut alone = vec![7.0; given.len()];
        let width = heads * size;
        for (row, out) in alone.chunks_mut(width).enumerate() {
            let rows = &given[row * width..(row + 1) * width];
            attend(Queries { rows, first: first + row, ..queries }, kv, scratch, out);
        }
        prop_assert_eq!(&alone, &whole);
        // The last row in two runs of blocks.
        let last = rows - 1;
        let queries = Queries { rows: &given[last * width..], first: first + last, ..queries };
        let blocks = (first + rows).div_ceil(BLOCK);
        let begin = queries.first_block();
        let (cut, each) = (cut.clamp(begin, blocks), heads * partial_len(size));
        let mut partials = vec![7.0; (blocks - begin) * each];
        let (one, two) = partials.split_at_mut((cut - begin) * each);
        attend_blocks(queries, kv, cut..blocks, scratch, two);
        attend_blocks(queries, kv, begin..cut, scratch, one);
        for head in 0..heads {
            let mut out = vec![7.0; size];
            fold(&partials[head * partial_len(size)..], each, queries.sink(head), &mut out);
            prop_assert_eq!(&out[..], &whole[last * width + head * size..][..size]);
        }
    }
}

#[test]
fn sixteen_bits_eight_and_four_are_near_each_other() {
    let shape = KvShape { heads: 1, head_size: 64, quant: Quant::F16 };
    let given = Numbers(3).take(64);
    let queries = Queries::plain(&given, 1, 199, 0.125);
    let [one, eight, four] = KvShape::QUANTS.map(|quant| {
        let cache = cache(11, KvShape { quant, ..shape }, 200);
        let mut out = vec![0.0; 64];
        attend(queries, cache.view(0), &mut AttendScratch::default(), &mut out);
        out
    });
    let size = one.iter().map(|a| a.abs()).fold(0.0, f32::max);
    for (other, most) in [(eight, 0.05), (four, 0.8)] {
        let apart = one.iter().zip(&other).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(apart > 0.0 && apart < most * size, "{apart} of {size}");
    }
}

#[test]
fn attention_over_blocks_that_are_not_there_panics() {
    let shape = KvShape { heads: 1, head_size: 16, quant: Quant::F16 };
    let bytes = vec![0; 2 * shape.block_bytes() as usize];
    let seen = |first: usize, table: &[u32], head: usize| {
        let (rows, mut out) = ([1.0; 16], [0.0; 16]);
        let kv = KvView { cache: &bytes, table, shape, head };
        let queries = Queries::plain(&rows, 1, first, 1.0);
        attend(queries, kv, &mut AttendScratch::default(), &mut out);
    };
    seen(KV_BLOCK as usize, &[1, 0], 0);
    for (first, table, head) in
        [(128, &[1, 0][..], 0), (64, &[1], 0), (64, &[0, 2], 0), (0, &[0], 1)]
    {
        let panicked = std::panic::catch_unwind(|| seen(first, table, head)).is_err();
        assert!(panicked, "position {first} in {table:?}, head {head}");
    }
}
