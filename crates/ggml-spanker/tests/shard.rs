// SPDX-License-Identifier: Apache-2.0
//! Shards of matrices, joined again.

use ggml_spanker::{Error, Quant, Shape, WEIGHT_TYPES};
use proptest::prelude::*;

/// A shape, its bytes, a row and a column (in blocks) to cut at.
fn cut() -> impl Strategy<Value = (Shape, Vec<u8>, usize, usize)> {
    (0..WEIGHT_TYPES.len(), 0..6usize, 0..5usize, 0..6usize, 0..5usize, any::<u8>()).prop_map(
        |(quant, rows, blocks, row, block, seed)| {
            let quant = WEIGHT_TYPES[quant];
            let cols = blocks * quant.block() as usize;
            let shape = Shape::new(quant, rows, cols).expect("whole blocks");
            let bytes = (0..shape.bytes()).map(|at| (at as u8).wrapping_mul(31) ^ seed).collect();
            (shape, bytes, row.min(rows), block.min(blocks) * quant.block() as usize)
        },
    )
}

proptest! {
    #[test]
    fn runs_of_rows_joined_are_the_matrix((shape, bytes, row, _) in cut()) {
        let first = shape.row_range(0..row).expect("rows of the matrix");
        let second = shape.row_range(row..shape.rows()).expect("rows of the matrix");
        prop_assert_eq!([&bytes[first], &bytes[second]].concat(), bytes);
    }

    #[test]
    fn runs_of_columns_joined_are_the_matrix((shape, bytes, _, column) in cut()) {
        let (left, left_bytes) = shape.copy_columns(&bytes, 0..column).expect("whole blocks");
        let rest = column..shape.cols();
        let (right, right_bytes) = shape.copy_columns(&bytes, rest).expect("whole blocks");
        prop_assert_eq!(left.bytes(), left_bytes.len());
        prop_assert_eq!(right.bytes(), right_bytes.len());
        let mut joined: Vec<u8> = Vec::new();
        for row in 0..shape.rows() {
            joined.extend(&left_bytes[left.row_range(row..row + 1).expect("a row")]);
            joined.extend(&right_bytes[right.row_range(row..row + 1).expect("a row")]);
        }
        prop_assert_eq!(joined, bytes);
    }

    #[test]
    fn columns_inside_a_block_are_refused_by_name((shape, bytes, _, column) in cut(), off in 1..31usize) {
        let (block, at) = (shape.quant().block() as usize, column + off);
        prop_assume!(block > 1 && at <= shape.cols());
        let refused = shape.copy_columns(&bytes, 0..at).map(|_| ());
        prop_assert_eq!(refused, Err(Error::SplitBlock { column: at, block }));
    }
}

#[test]
fn shards_outside_the_matrix_are_refused() {
    let shape = Shape::new(Quant::Q8_0, 3, 64).expect("whole blocks");
    let error = shape.row_range(2..4).expect_err("four rows of three");
    assert_eq!(error.to_string(), "rows up to 4 of 3");
    let error = shape.copy_columns(&[0; 204], 0..96).expect_err("96 columns of 64");
    assert_eq!(error.to_string(), "columns up to 96 of 64");
    let error = Shape::new(Quant::Q4K, 3, 128).expect_err("half a block");
    assert_eq!(error.to_string(), "column 128 is inside a block of 256");
    assert!(shape.copy_columns(&[0; 203], 0..64).is_err());
    assert!(Shape::new(Quant::F32, usize::MAX, usize::MAX).is_err());
}
