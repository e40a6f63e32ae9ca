// SPDX-License-Identifier: Apache-2.0
//! Times attention on one thread: tiles of 16 rows as prompts have them, and single rows as a model writes tokens, after
//! several numbers of positions. The lower quartile of short calls counts, so that other programs disturb little. It
//! judges nothing.
//!
//! ```text
//! cargo run --release -p ggml-spanker --example bench_attend
//! ```

use std::time::Instant;

use ggml_spanker::Quant;
use ggml_spanker::ops::{AttendScratch, KvView, Queries, attend, keep};
use spanker_model::{KV_BLOCK, KvShape};

/// Positions before the rows.
const BEFORE: [usize; 3] = [112, 1024, 4064];
/// Numbers of a head, and heads that share keys and values.
const HEADS: [[usize; 2]; 4] = [[64, 3], [64, 8], [128, 4], [128, 1]];
/// Calls of each kind.
const CALLS: usize = 40;

fn main() {
    println!("keys head heads rows positions us GMAC/s GB/s(keys and values)");
    for quant in [Quant::F16, Quant::Q8_0] {
        for [size, heads] in HEADS {
            for before in BEFORE {
                for rows in [1, 16] {
                    measure(quant, [size, heads], before, rows);
                }
            }
        }
    }
}

fn measure(quant: Quant, [size, heads]: [usize; 2], before: usize, rows: usize) {
    // Several sequences take turns, so that keys and values come from memory.
    let copies = if rows == 1 { 24 } else { 1 };
    let shape = KvShape { heads: 1, head_size: size as u64, quant };
    let blocks = (before + rows).div_ceil(KV_BLOCK as usize);
    let bytes = shape.block_bytes() as usize;
    let mut cache = vec![0; bytes * blocks * copies];
    let table: Vec<u32> = (0..(blocks * copies) as u32).collect();
    let numbers = |at: usize, count: usize| -> Vec<f32> {
        (0..count).map(|i| ((i * 37 + at * 61) % 101) as f32 / 50.0 - 1.0).collect()
    };
    for copy in 0..copies {
        for position in 0..before + rows {
            let block = copy * blocks + position / KV_BLOCK as usize;
            let block = &mut cache[block * bytes..][..bytes];
            keep(shape, position, &numbers(position, size), &numbers(position + 7, size), block);
        }
    }
    let rows_of = numbers(3, rows * heads * size);
    let mut out = vec![0.0; rows_of.len()];
    let mut scratch = AttendScratch::default();
    let mut times = Vec::with_capacity(CALLS);
    for call in 0..CALLS {
        let table = &table[call % copies * blocks..][..blocks];
        let view = KvView { cache: &cache, table, shape, head: 0 };
        let begun = Instant::now();
        attend(Queries::plain(&rows_of, heads, before, 0.125), view, &mut scratch, &mut out);
        times.push(begun.elapsed().as_secs_f64());
    }
    times.sort_unstable_by(f64::total_cmp);
    let time = times[CALLS / 4];
    let macs = rows * heads * size * 2 * before;
    let read = before as f64 * bytes as f64 / KV_BLOCK as f64;
    println!(
        "{quant} {size} {heads} {rows} {before} {:.1} {:.1} {:.1}",
        time * 1e6,
        macs as f64 / time / 1e9,
        read / time / 1e9
    );
}
