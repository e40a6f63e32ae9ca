// SPDX-License-Identifier: Apache-2.0
//! Every path against the portable one, bit for bit, and products in parts against whole ones. How close
//! products are to exact ones is tested elsewhere.

use ggml_spanker::{Inputs, Path, Quant, WEIGHT_TYPES, multiply, multiply_on, quantize};
use proptest::prelude::*;

/// Reproducible bytes.
struct Seeded(u64);

impl Seeded {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).take(len).collect()
    }
}

/// `rows` rows of any bytes: scales are any f16, negative, zero or not a number among them.
fn weights(quant: Quant, rows: usize, k: usize, seed: &mut Seeded) -> Vec<u8> {
    seed.bytes(rows * quant.row_bytes(k as u64) as usize)
}

/// Inputs with any bytes for activations, -128 among them, and scales that are numbers.
fn inputs(quant: Quant, rows: usize, k: usize, seed: &mut Seeded) -> Vec<u8> {
    let input = quant.input();
    let size = input.block_bytes() as usize;
    let mut bytes = seed.bytes(rows * input.row_bytes(k as u64) as usize);
    for block in bytes.chunks_exact_mut(size) {
        match size {
            4 => block[3] = block[3] & 0x80 | 0x3E,
            34 => block[1] = block[1] & 0x80 | 0x2C,
            _ => block[3] = block[3] & 0x80 | 0x3C,
        }
    }
    bytes
}

fn load(quant: Quant, bytes: &[u8], rows: usize, k: usize) -> Inputs {
    let mut inputs = Inputs::new();
    inputs.load(quant.input(), bytes, rows, k).expect("whole rows");
    inputs
}

/// Bits, with one pattern for all that is not a number.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() }).collect()
}

fn shape() -> impl Strategy<Value = (Quant, usize, usize, usize, u64)> {
    (0..WEIGHT_TYPES.len(), 1..40usize, 1..20usize, 1..6usize, any::<u64>()).prop_map(
        |(quant, n, m, blocks, seed)| {
            let quant = WEIGHT_TYPES[quant];
            // Plain rows may have any length.
            let k = if quant.block() == 1 { 13 * blocks } else { quant.block() as usize * blocks };
            (quant, n, m, k, seed)
        },
    )
}

proptest! {
    #[test]
    fn product_on_every_path_has_the_bits_of_the_portable_one((quant, n, m, k, seed) in shape()) {
        let mut seed = Seeded(seed);
        let weights = weights(quant, n, k, &mut seed);
        let inputs = load(quant, &inputs(quant, m, k, &mut seed), m, k);
        let mut expected = vec![0.0; m * n];
        multiply_on(Path::Portable, quant, &weights, n, &inputs, &mut expected).expect("fits");
        for path in Path::available() {
            let mut out = vec![f32::INFINITY; m * n];
            multiply_on(path, quant, &weights, n, &inputs, &mut out).expect("fits");
            prop_assert_eq!(bits(&out), bits(&expected), "{} by {}", quant, path);
        }
    }

    #[test]
    fn product_of_rows_one_by_one_has_the_bits_of_the_whole((quant, n, m, k, seed) in shape()) {
        let mut seed = Seeded(seed);
        let weights = weights(quant, n, k, &mut seed);
        let bytes = inputs(quant, m, k, &mut seed);
        let all = load(quant, &bytes, m, k);
        let mut whole = vec![0.0; m * n];
        multiply(quant, &weights, n, &all, &mut whole).expect("fits");
        for (i, row) in bytes.chunks_exact(bytes.len() / m).enumerate() {
            let one = load(quant, row, 1, k);
            let mut out = vec![0.0; n];
            multiply(quant, &weights, n, &one, &mut out).expect("fits");
            prop_assert_eq!(bits(&out), bits(&whole[i * n..(i + 1) * n]), "row {} of inputs", i);
        }
        for (j, row) in weights.chunks_exact(weights.len() / n).enumerate() {
            let mut out = vec![0.0; m];
            multiply(quant, row, 1, &all, &mut out).expect("fits");
            let column: Vec<f32> = whole.iter().skip(j).step_by(n).copied().collect();
            prop_assert_eq!(bits(&out), bits(&column), "row {} of weights", j);
        }
    }
}

#[test]
fn product_with_more_inputs_than_a_tile_has_the_bits_of_the_portable_one() {
    let (n, m, k) = (19, 300, 512);
    for quant in WEIGHT_TYPES {
        let mut seed = Seeded(7);
        let weights = weights(quant, n, k, &mut seed);
        let inputs = load(quant, &inputs(quant, m, k, &mut seed), m, k);
        let mut expected = vec![0.0; m * n];
        multiply_on(Path::Portable, quant, &weights, n, &inputs, &mut expected).expect("fits");
        for path in Path::available() {
            let mut out = vec![0.0; m * n];
            multiply_on(path, quant, &weights, n, &inputs, &mut out).expect("fits");
            assert_eq!(bits(&out), bits(&expected), "{quant} by {path}");
        }
    }
}

#[test]
fn product_of_extremes_has_the_bits_of_the_portable_one() {
    // Every byte of weights 0x00, 0x7F, 0x80 or 0xFF against activations of -128 and 127: sums of 16 bits
    // would overflow.
    let (n, k) = (17, 256);
    for (quant, m) in WEIGHT_TYPES.into_iter().flat_map(|quant| [(quant, 1), (quant, 2)]) {
        for fill in [0x00, 0x7F, 0x80, 0xFF] {
            let size = quant.block_bytes() as usize;
            let mut weights = vec![fill; n * quant.row_bytes(k as u64) as usize];
            if quant.block() > 1 {
                // Scales at either end of a block are 1.
                for block in weights.chunks_exact_mut(size) {
                    block[..4].copy_from_slice(&[0x00, 0x3C, 0x00, 0x3C]);
                    block[size - 2..].copy_from_slice(&[0x00, 0x3C]);
                }
            }
            let mut bytes = inputs(quant, m, k, &mut Seeded(3));
            for (index, byte) in bytes.iter_mut().enumerate() {
                let input = quant.input().block_bytes() as usize;
                if input > 4 && index % input >= 4 {
                    *byte = if index < k { 0x80 } else { 0x7F };
                }
            }
            let inputs = load(quant, &bytes, m, k);
            let mut expected = vec![0.0; m * n];
            multiply_on(Path::Portable, quant, &weights, n, &inputs, &mut expected).expect("fits");
            for path in Path::available() {
                let mut out = vec![0.0; m * n];
                multiply_on(path, quant, &weights, n, &inputs, &mut out).expect("fits");
                assert_eq!(bits(&out), bits(&expected), "{m} rows, {quant} of {fill:#x} by {path}");
            }
        }
    }
}

#[test]
fn product_by_a_path_that_is_not_there_is_refused() {
    let missing: Vec<Path> = Path::ALL.into_iter().filter(|path| !path.is_available()).collect();
    assert!(!missing.is_empty(), "no processor has all paths");
    let mut row = [0; 34];
    quantize(Quant::Q8_0, &[1.0; 32], &mut row).expect("one block");
    let inputs = load(Quant::Q8_0, &row, 1, 32);
    for path in missing {
        let error = multiply_on(path, Quant::Q8_0, &row, 1, &inputs, &mut [0.0]).unwrap_err();
        assert_eq!(error.to_string(), format!("this processor has no {path} instructions"));
    }
}
