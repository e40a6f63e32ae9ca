// SPDX-License-Identifier: Apache-2.0
//! Times the Q4_K product on the host beside a plain f32 product over matrices that were decoded
//! beforehand. It prints medians and ratios; it judges nothing, and it measures no card.
//!
//! ```text
//! cargo run --release -p ggml-spanker --example bench_q4_k
//! ```

use std::hint::black_box;
use std::time::Instant;

use ggml_spanker::{
    HostMatmul, MatmulInt4, OUTPUT_ELEM_BYTES, Q4_K_BLOCK_BYTES, QK_K, Result, dequantize_q4_k,
};

/// Interleaved repeats: both sides see the same moments of a shared machine.
const REPEATS: usize = 51;
const SHAPES: [(usize, usize, usize); 3] = [(1, 2048, 2048), (16, 2048, 2048), (64, 4096, 512)];
/// The lanes of the peer's dot product; enough for the compiler to vectorise it.
const LANES: usize = 16;

fn main() -> Result<()> {
    println!("     m     k     n   q4_k [us]    f32 [us]    q4_k/f32");
    for (m, k, n) in SHAPES {
        let times = measure(m, k, n)?;
        let quantised = median(times.iter().map(|(quantised, _)| *quantised).collect());
        let plain = median(times.iter().map(|(_, plain)| *plain).collect());
        // The median of the ratios, not the ratio of the medians: the two sides of a repeat shared
        // the machine's mood.
        let ratio = median(times.iter().map(|(quantised, plain)| quantised / plain).collect());
        println!("{m:6}{k:6}{n:6}{:12.0}{:12.0}{ratio:12.2}", quantised * 1e6, plain * 1e6);
    }
    Ok(())
}

/// The seconds of the Q4_K product and of the f32 product, repeat by repeat.
fn measure(m: usize, k: usize, n: usize) -> Result<Vec<(f64, f64)>> {
    let (a, b) = (blocks(m * k / QK_K, 1), blocks(n * k / QK_K, 2));
    let (mut a_f32, mut b_f32) = (vec![0.0; m * k], vec![0.0; n * k]);
    dequantize_q4_k(&a, &mut a_f32)?;
    dequantize_q4_k(&b, &mut b_f32)?;
    let mut out = vec![0; m * n * OUTPUT_ELEM_BYTES];
    let mut out_f32 = vec![0.0; m * n];

    let mut times = Vec::with_capacity(REPEATS);
    for _ in 0..REPEATS {
        let start = Instant::now();
        HostMatmul.matmul_q4_k(black_box(&a), black_box(&b), &mut out, m, k, n)?;
        let quantised = start.elapsed().as_secs_f64();
        black_box(&out);

        let start = Instant::now();
        plain_product(black_box(&a_f32), black_box(&b_f32), &mut out_f32, k, n);
        let plain = start.elapsed().as_secs_f64();
        black_box(&out_f32);
        times.push((quantised, plain));
    }
    Ok(times)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

/// One dot product per output, with no tiles: what a caller would write first.
fn plain_product(a: &[f32], b: &[f32], out: &mut [f32], k: usize, n: usize) {
    for (a, out) in a.chunks_exact(k).zip(out.chunks_exact_mut(n)) {
        for (b, out) in b.chunks_exact(k).zip(out) {
            let mut sums = [0.0; LANES];
            for (a, b) in a.as_chunks::<LANES>().0.iter().zip(b.as_chunks::<LANES>().0) {
                for lane in 0..LANES {
                    sums[lane] += a[lane] * b[lane];
                }
            }
            *out = sums.iter().sum();
        }
    }
}

/// Blocks of reproducible bytes with small positive scales.
fn blocks(count: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut bytes = Vec::with_capacity(count * Q4_K_BLOCK_BYTES);
    for _ in 0..count * Q4_K_BLOCK_BYTES {
        // A linear congruential step; its top bits are good enough to fill nibbles.
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.push((state >> 56) as u8);
    }
    for block in bytes.chunks_exact_mut(Q4_K_BLOCK_BYTES) {
        // The f16 value 2^-10 in both places keeps the sums far from overflow.
        block[..4].copy_from_slice(&[0x00, 0x14, 0x00, 0x14]);
    }
    bytes
}
