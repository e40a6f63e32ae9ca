// SPDX-License-Identifier: Apache-2.0
//! Times products of every type of weights on one thread. With one row of inputs, over weights that no cache
//! holds: how fast they are read, and how much that is of a plain read of the same memory. With many rows:
//! multiplications per second. It prints medians of interleaved repeats; it judges nothing.
//!
//! ```text
//! cargo run --release -p ggml-spanker --example bench_products [TYPE..]
//! ```

use std::hint::black_box;
use std::time::Instant;

use ggml_spanker::{Inputs, Path, Quant, Result, WEIGHT_TYPES, multiply_on, quantize};

const REPEATS: usize = 9;
/// Bytes of weights that one row of inputs is multiplied with.
const LARGE: usize = 200 << 20;
/// Values of a row.
const WIDTH: usize = 2048;
/// Rows of weights of one call.
const CALL: usize = 256;
/// Rows of inputs in the second measurement.
const BATCH: usize = 128;

fn main() -> Result<()> {
    let named: Vec<String> = std::env::args().skip(1).map(|name| name.to_lowercase()).collect();
    println!("type   path       1 row [GB/s]   of limit   {BATCH} rows [GMAC/s]");
    let memory = random(LARGE);
    for quant in WEIGHT_TYPES {
        if named.is_empty() || named.contains(&quant.to_string().to_lowercase()) {
            measure(quant, &memory)?;
        }
    }
    Ok(())
}

fn measure(quant: Quant, memory: &[u8]) -> Result<()> {
    let row = quant.row_bytes(WIDTH as u64) as usize;
    let n = memory.len() / row / CALL * CALL;
    let large = &memory[..n * row];
    let (one, many) = (inputs(quant, 1)?, inputs(quant, BATCH)?);
    let mut out = vec![0.0; CALL * BATCH];
    let paths = Path::available();
    let mut reads = Vec::new();
    let mut singles = vec![Vec::new(); paths.len()];
    let mut batches = vec![Vec::new(); paths.len()];
    for repeat in 0..REPEATS {
        let one_place = seconds(|| Ok(_ = black_box(sum::<1>(large))))?;
        let four_places = seconds(|| Ok(_ = black_box(sum::<4>(large))))?;
        reads.push(one_place.min(four_places));
        for (index, &path) in paths.iter().enumerate() {
            // The portable path is slow; less of it is enough.
            let share = if path == Path::Portable { 16 } else { 1 };
            if share > 1 && repeat > 2 {
                continue;
            }
            let calls = (n / CALL / share).max(1);
            let single = seconds(|| {
                for weights in large.chunks_exact(CALL * row).take(calls) {
                    multiply_on(path, quant, weights, CALL, &one, &mut out[..CALL])?;
                }
                Ok(())
            })?;
            singles[index].push((calls * CALL * row) as f64 / single / 1e9);
            let rows = CALL / share;
            let weights = &large[..rows * row];
            let batch = seconds(|| {
                multiply_on(path, quant, weights, rows, &many, &mut out[..rows * BATCH])
            })?;
            batches[index].push((rows * BATCH * WIDTH) as f64 / batch / 1e9);
        }
    }
    let limit = large.len() as f64 / median(&mut reads) / 1e9;
    println!("{quant:<6} {:<10} {limit:12.2}", "(read)");
    for (index, path) in paths.iter().enumerate() {
        let (single, batch) = (median(&mut singles[index]), median(&mut batches[index]));
        let path = path.to_string();
        println!("{quant:<6} {path:<10} {single:12.2} {:10.2} {batch:12.1}", single / limit);
    }
    Ok(())
}

fn seconds(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64())
}

/// Reads the memory once, in `STREAMS` places at a time.
fn sum<const STREAMS: usize>(memory: &[u8]) -> u64 {
    let mut lanes = [[0u64; 8]; STREAMS];
    for chunk in memory.chunks_exact(STREAMS * 4096) {
        for line in 0..64 {
            for (stream, lanes) in lanes.iter_mut().enumerate() {
                let words = chunk[stream * 4096 + 64 * line..][..64].as_chunks().0;
                for (lane, word) in lanes.iter_mut().zip(words) {
                    *lane = lane.wrapping_add(u64::from_le_bytes(*word));
                }
            }
        }
    }
    lanes.as_flattened().iter().fold(0, |sum, lane| sum.wrapping_add(*lane))
}

fn inputs(quant: Quant, rows: usize) -> Result<Inputs> {
    let input = quant.input();
    let values: Vec<f32> =
        (0..rows * WIDTH).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
    let mut bytes = vec![0; rows * input.row_bytes(WIDTH as u64) as usize];
    quantize(input, &values, &mut bytes)?;
    let mut inputs = Inputs::new();
    inputs.load(input, &bytes, rows, WIDTH)?;
    Ok(inputs)
}

/// Bytes whose f16 and f32 are neither huge nor tiny, so that no operation is slowed by them.
fn random(len: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mixed = state ^ state >> 29;
        bytes.extend(((mixed & 0xBFBF_BFBF_BFBF_BFBF) | 0x2020_2020_2020_2020).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}
