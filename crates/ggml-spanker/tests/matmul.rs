// SPDX-License-Identifier: Apache-2.0
//! Properties of the product on the host: exactness over shapes, bits that do not depend on the
//! rest of the matrix, and arguments that are refused. Speed is not tested.

#[path = "support/product.rs"]
mod product;

use ggml_spanker::{
    Error, HostMatmul, Inputs, MatmulInt4, MockSail, OUTPUT_ELEM_BYTES, Path, Q4_K_BLOCK_BYTES,
    QK_K, Quant, dequantize_q4_k, multiply_on, quantize,
};
use proptest::collection::vec;
use proptest::prelude::{Just, ProptestConfig, Strategy, any, prop_assert, prop_assert_eq};
use proptest::{prop_oneof, proptest};

/// Any f16 that is neither infinite nor NaN, as its two bytes.
fn finite_f16() -> impl Strategy<Value = [u8; 2]> {
    any::<[u8; 2]>().prop_map(|[low, high]| {
        let infinite = high & 0x7C == 0x7C;
        [low, if infinite { high & !0x40 } else { high }]
    })
}

/// A block that decodes to finite values.
fn finite_block() -> impl Strategy<Value = Vec<u8>> {
    let parts = (finite_f16(), finite_f16(), vec(any::<u8>(), Q4_K_BLOCK_BYTES - 4));
    parts.prop_map(|(d, dmin, rest)| [&d[..], &dmin[..], &rest[..]].concat())
}

fn finite_blocks(count: usize) -> impl Strategy<Value = Vec<u8>> {
    vec(finite_block(), count).prop_map(|blocks| blocks.concat())
}

/// `k` and the blocks of two matrices with fewer than five rows each.
fn operands() -> impl Strategy<Value = (usize, Vec<u8>, Vec<u8>)> {
    let shapes = (0..5usize, prop_oneof![Just(256usize), Just(512), Just(1024)], 0..5usize);
    shapes.prop_flat_map(|(m, k, n)| {
        (Just(k), finite_blocks(m * k / QK_K), finite_blocks(n * k / QK_K))
    })
}

/// A dimension that is small, near a block, or absurd.
fn hostile_dim() -> impl Strategy<Value = usize> {
    prop_oneof![
        0..4usize,
        Just(255),
        Just(256),
        Just(257),
        Just(512),
        Just(1 << 32),
        Just(usize::MAX / 2 + 1),
        Just(usize::MAX - 255),
        Just(usize::MAX),
        any::<usize>(),
    ]
}

/// A length that is arbitrary or a whole number of blocks.
fn hostile_bytes() -> impl Strategy<Value = Vec<u8>> {
    let len = prop_oneof![0..600usize, (0..5usize).prop_map(|count| count * Q4_K_BLOCK_BYTES)];
    len.prop_flat_map(|len| vec(any::<u8>(), len))
}

/// Blocks of reproducible bytes with `d` and `dmin` near one.
fn seeded_blocks(count: usize, seed: u32) -> Vec<u8> {
    let mut state = seed;
    let mut bytes = vec![0; count * Q4_K_BLOCK_BYTES];
    for byte in &mut bytes {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *byte = (state >> 24) as u8;
    }
    for block in bytes.chunks_exact_mut(Q4_K_BLOCK_BYTES) {
        block[1] = 0x3C;
        block[3] = 0x3C;
    }
    bytes
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// The documented product: rows of `a` as Q8_K, by the path that defines the bits.
fn documented(a: &[u8], b: &[u8], k: usize) -> Vec<f32> {
    let row = k / QK_K * Q4_K_BLOCK_BYTES;
    let (m, n) = (a.len() / row, b.len() / row);
    let values = product::decode_rows(a, k).concat();
    let mut blocks = vec![0; m * k / QK_K * 292];
    quantize(Quant::Q8K, &values, &mut blocks).expect("whole blocks");
    let mut inputs = Inputs::new();
    inputs.load(Quant::Q8K, &blocks, m, k).expect("whole rows");
    let mut out = vec![0.0; m * n];
    multiply_on(Path::Portable, Quant::Q4K, b, n, &inputs, &mut out).expect("fits");
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn product_of_finite_blocks_is_within_the_documented_bound_of_f64((k, a, b) in operands()) {
        let outputs = product::multiply(&HostMatmul, &a, &b, k);
        let parts = product::decode_magnitudes(&b, k);
        let (a, b) = (product::decode_rows(&a, k), product::decode_rows(&b, k));
        prop_assert_eq!(outputs.len(), a.len() * b.len());
        for (at, output) in outputs.iter().enumerate() {
            let (i, j) = (at / b.len(), at % b.len());
            let (expected, bound) = product::exact_dot(&a[i], &b[j], &parts[j]);
            let error = (f64::from(*output) - expected).abs();
            prop_assert!(error <= bound, "output {}: {} is not {}", at, output, expected);
        }
    }

    #[test]
    fn product_of_finite_blocks_has_the_documented_bits((k, a, b) in operands()) {
        let outputs = product::multiply(&HostMatmul, &a, &b, k);
        prop_assert_eq!(bits(&outputs), bits(&documented(&a, &b, k)));
    }

    #[test]
    fn product_of_row_groups_is_bit_identical_to_the_whole(
        (k, a, b) in operands(),
        cut_a in 0..5usize,
        cut_b in 0..5usize,
    ) {
        let row = k / QK_K * Q4_K_BLOCK_BYTES;
        let (n, cut_a, cut_b) = (b.len() / row, (cut_a * row).min(a.len()), (cut_b * row).min(b.len()));
        let whole = product::multiply(&HostMatmul, &a, &b, k);
        for (rows, first_row) in [(&a[..cut_a], 0), (&a[cut_a..], cut_a / row)] {
            for (columns, first_column) in [(&b[..cut_b], 0), (&b[cut_b..], cut_b / row)] {
                let part = product::multiply(&HostMatmul, rows, columns, k);
                let width = columns.len() / row;
                for (at, output) in part.iter().enumerate() {
                    let of_whole = (first_row + at / width) * n + first_column + at % width;
                    prop_assert_eq!(output.to_bits(), whole[of_whole].to_bits());
                }
            }
        }
    }

    #[test]
    fn product_of_arbitrary_bits_never_panics(
        a in vec(any::<u8>(), 2 * Q4_K_BLOCK_BYTES),
        b in vec(any::<u8>(), 6 * Q4_K_BLOCK_BYTES),
    ) {
        prop_assert_eq!(product::multiply(&HostMatmul, &a, &b, QK_K).len(), 12);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2048))]

    #[test]
    fn product_with_hostile_arguments_is_refused_without_a_trace(
        a in hostile_bytes(),
        b in hostile_bytes(),
        out_len in 0..64usize,
        m in hostile_dim(),
        k in hostile_dim(),
        n in hostile_dim(),
    ) {
        let sail = MockSail::new();
        let mut out = vec![0xA5; out_len];
        match sail.matmul_q4_k(&a, &b, &mut out, m, k, n) {
            Ok(()) => prop_assert_eq!(sail.transactions().is_empty(), m == 0 || n == 0),
            Err(_) => {
                prop_assert!(out.iter().all(|byte| *byte == 0xA5));
                prop_assert!(sail.transactions().is_empty());
            }
        }
    }

    #[test]
    fn decoder_with_hostile_lengths_decodes_whole_blocks_only(
        blocks in hostile_bytes(),
        out_len in 0..1400usize,
    ) {
        let mut out = vec![0.25; out_len];
        let need = blocks.len() / Q4_K_BLOCK_BYTES * QK_K;
        let (len, block) = (blocks.len(), Q4_K_BLOCK_BYTES);
        let expected = if len % block != 0 {
            Err(Error::PartialBlock { len, block })
        } else if out_len < need {
            Err(Error::OutputTooSmall { have: out_len * 4, need: need * 4 })
        } else {
            Ok(())
        };
        prop_assert_eq!(dequantize_q4_k(&blocks, &mut out), expected.clone());
        let untouched = if expected.is_ok() { need } else { 0 };
        prop_assert!(out[untouched..].iter().all(|value| *value == 0.25));
    }
}

#[test]
fn product_over_several_tiles_is_bit_identical_to_single_rows_and_columns() {
    // Three tiles of rows and two of columns, none of them full at the end.
    let (m, k, n) = (131, 3 * QK_K, 270);
    let row = k / QK_K * Q4_K_BLOCK_BYTES;
    let (a, b) = (seeded_blocks(m * k / QK_K, 1), seeded_blocks(n * k / QK_K, 2));
    let whole = product::multiply(&HostMatmul, &a, &b, k);
    for (i, a) in a.chunks(row).enumerate() {
        let single = product::multiply(&HostMatmul, a, &b, k);
        assert_eq!(bits(&single), bits(&whole[i * n..(i + 1) * n]), "row {i}");
    }
    for (j, b) in b.chunks(row).enumerate() {
        let column: Vec<f32> = whole.iter().skip(j).step_by(n).copied().collect();
        let single = product::multiply(&HostMatmul, &a, b, k);
        assert_eq!(bits(&single), bits(&column), "column {j}");
    }
}

#[test]
fn product_with_bad_inner_dimension_is_refused() {
    for k in [0, 1, 255, 257, usize::MAX] {
        for (m, n) in [(1, 1), (0, 1), (1, 0)] {
            let refused = HostMatmul.matmul_q4_k(&[], &[], &mut [], m, k, n);
            assert_eq!(refused, Err(Error::BadDims { m, k, n, qk: 256 }));
        }
    }
}

#[test]
fn product_with_operand_of_other_length_is_refused() {
    let block = [0; Q4_K_BLOCK_BYTES];
    let long = [0; Q4_K_BLOCK_BYTES + 1];
    let refused = Err(Error::BadDims { m: 1, k: 256, n: 1, qk: 256 });
    for (a, b) in
        [(&block[1..], &block[..]), (&block, &block[1..]), (&long, &block), (&block, &long)]
    {
        assert_eq!(HostMatmul.matmul_q4_k(a, b, &mut [0; 4], 1, QK_K, 1), refused);
    }
}

#[test]
fn product_whose_sizes_overflow_is_refused() {
    for (m, k, n) in [(usize::MAX, QK_K, 1), (1, QK_K, usize::MAX), (2, usize::MAX - 255, 2)] {
        let refused = HostMatmul.matmul_q4_k(&[], &[], &mut [], m, k, n);
        assert_eq!(refused, Err(Error::BadDims { m, k, n, qk: 256 }));
    }
}

#[test]
fn product_with_short_output_says_have_and_need() {
    let (a, b) = (seeded_blocks(2, 1), seeded_blocks(3, 2));
    let mut out = [7; 2 * 3 * OUTPUT_ELEM_BYTES - 1];
    let refused = HostMatmul.matmul_q4_k(&a, &b, &mut out, 2, QK_K, 3);
    assert_eq!(refused, Err(Error::OutputTooSmall { have: 23, need: 24 }));
    assert_eq!(out, [7; 23]);
    let message = refused.expect_err("too small").to_string();
    assert_eq!(message, "output of 23 bytes is too small, 24 are needed");
}

#[test]
fn product_with_long_output_leaves_the_tail_alone() {
    let (a, b) = (seeded_blocks(2, 1), seeded_blocks(3, 2));
    let mut out = [0xA5; 2 * 3 * OUTPUT_ELEM_BYTES + 9];
    HostMatmul.matmul_q4_k(&a, &b, &mut out, 2, QK_K, 3).expect("the output is long enough");
    let (result, tail) = out.split_at(2 * 3 * OUTPUT_ELEM_BYTES);
    assert_eq!(tail, [0xA5; 9]);
    let values = result.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    assert_eq!(
        bits(&values.collect::<Vec<_>>()),
        bits(&product::multiply(&HostMatmul, &a, &b, QK_K))
    );
}

#[test]
fn product_without_rows_or_columns_writes_nothing() {
    let block = seeded_blocks(1, 1);
    let mut out = [0xA5; 8];
    for (a, b, m, n) in [(&[][..], &block[..], 0, 1), (&block, &[], 1, 0), (&[], &[], 0, 0)] {
        assert_eq!(HostMatmul.matmul_q4_k(a, b, &mut out, m, QK_K, n), Ok(()));
    }
    assert_eq!(out, [0xA5; 8]);
}
