// SPDX-License-Identifier: Apache-2.0
//! What products with few rows of inputs cost over one row, as a server's steps have them: for every type of weights and
//! number of rows, the time over that of one row, and multiplications per second. Weights are read from memory. Calls take
//! turns between numbers of rows and are short, and the lower quartile of each counts, so that other programs on the
//! machine disturb little. It judges nothing.
//!
//! ```text
//! cargo run --release -p ggml-spanker --example bench_rows [--path PATH] [TYPE..]
//! ```

use std::time::Instant;

use ggml_spanker::{Inputs, Path, Quant, Result, WEIGHT_TYPES, multiply_on, quantize};

/// Bytes of weights, more than caches hold.
const LARGE: usize = 96 << 20;
/// Values of a row.
const WIDTH: usize = 2048;
/// Rows of weights of one call.
const CALL: usize = 256;
/// Rows of inputs.
const ROWS: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
/// Calls of each number of rows.
const CALLS: usize = 60;

fn main() -> Result<()> {
    let mut named: Vec<String> = std::env::args().skip(1).map(|arg| arg.to_lowercase()).collect();
    let mut paths = vec![Path::best()];
    if named.first().is_some_and(|arg| arg == "--path") {
        let known = Path::available();
        paths = known.into_iter().filter(|path| Some(&path.to_string()) == named.get(1)).collect();
        named.drain(..named.len().min(2));
    }
    println!("time over that of one row / GMAC/s, for so many rows of inputs");
    print!("{:<8} {:<8} {:>6}", "type", "path", "GB/s");
    ROWS.iter().for_each(|rows| print!(" {rows:>11}"));
    println!();
    let memory = random(LARGE);
    for path in paths {
        for quant in WEIGHT_TYPES {
            if named.is_empty() || named.contains(&quant.to_string().to_lowercase()) {
                measure(path, quant, &memory)?;
            }
        }
    }
    Ok(())
}

fn measure(path: Path, quant: Quant, memory: &[u8]) -> Result<()> {
    let row = quant.row_bytes(WIDTH as u64) as usize;
    let inputs = ROWS.iter().map(|&rows| inputs(quant, rows)).collect::<Result<Vec<_>>>()?;
    let mut out = vec![0.0; CALL * ROWS[ROWS.len() - 1]];
    let mut times = vec![Vec::with_capacity(CALLS); ROWS.len()];
    let mut weights = memory.chunks_exact(CALL * row).cycle();
    for _ in 0..CALLS {
        for (inputs, times) in inputs.iter().zip(&mut times) {
            let Some(weights) = weights.next() else { return Ok(()) };
            let out = &mut out[..CALL * inputs.rows()];
            let begun = Instant::now();
            multiply_on(path, quant, weights, CALL, inputs, out)?;
            times.push(begun.elapsed().as_secs_f64());
        }
    }
    let times: Vec<f64> = times.iter_mut().map(|times| quartile(times)).collect();
    let speed = (CALL * row) as f64 / times[0] / 1e9;
    print!("{:<8} {:<8} {speed:>6.2}", quant.to_string(), path.to_string());
    for (rows, time) in ROWS.iter().zip(&times) {
        let rate = (rows * CALL * WIDTH) as f64 / time / 1e9;
        print!(" {:>5.2}/{rate:>5.1}", time / times[0]);
    }
    println!();
    Ok(())
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

/// The lower quartile.
fn quartile(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 4]
}
