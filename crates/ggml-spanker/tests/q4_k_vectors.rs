// SPDX-License-Identifier: Apache-2.0
//! Decoder and product against vectors from an independent decoder; `data/README.md` says how they
//! were made. Shapes and hostile arguments are tested elsewhere.

#[path = "support/product.rs"]
mod product;

use ggml_spanker::{HostMatmul, MockSail, QK_K, dequantize_q4_k};

const BLOCKS: &[u8] = include_bytes!("data/q4_k_blocks.bin");
const VALUES: &[u8] = include_bytes!("data/q4_k_values.bin");
const A: &[u8] = include_bytes!("data/q4_k_a.bin");
const B: &[u8] = include_bytes!("data/q4_k_b.bin");
const PRODUCT: &[u8] = include_bytes!("data/q4_k_product.bin");
const K: usize = 1024;

#[test]
fn decoder_on_independent_vectors_is_bit_identical() {
    let expected = VALUES.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    let expected: Vec<f32> = expected.collect();
    let mut values = vec![f32::NAN; expected.len()];
    dequantize_q4_k(BLOCKS, &mut values).expect("whole blocks");
    assert_eq!(values.len(), 16 * QK_K);
    for (i, (value, expected)) in values.iter().zip(&expected).enumerate() {
        let (block, at) = (i / QK_K, i % QK_K);
        assert_eq!(
            value.to_bits(),
            expected.to_bits(),
            "block {block} at {at}: {value:e} is not {expected:e}"
        );
    }
}

#[test]
fn product_on_independent_vectors_is_within_the_documented_bound_of_f64() {
    let outputs = product::multiply(&HostMatmul, A, B, K);
    let (a, b) = (product::decode_rows(A, K), product::decode_rows(B, K));
    let parts = product::decode_magnitudes(B, K);
    let expected = PRODUCT.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes));
    let expected: Vec<f64> = expected.collect();
    assert_eq!(outputs.len(), expected.len());
    for (at, (output, expected)) in outputs.iter().zip(expected).enumerate() {
        let (i, j) = (at / b.len(), at % b.len());
        let (_, bound) = product::exact_dot(&a[i], &b[j], &parts[j]);
        let error = (f64::from(*output) - expected).abs();
        assert!(error <= bound, "output {at}: {output} is {error:e} from {expected}");
    }
}

#[test]
fn mock_and_host_on_same_operands_give_same_bits() {
    let host = product::multiply(&HostMatmul, A, B, K);
    let mock = product::multiply(&MockSail::new(), A, B, K);
    assert_eq!(host.len(), 35);
    assert!(host.iter().zip(&mock).all(|(host, mock)| host.to_bits() == mock.to_bits()));
}
