// SPDX-License-Identifier: Apache-2.0
//! The traffic that the mock card records. Its results are those of the host, which other tests
//! compare.

use ggml_spanker::{Error, MatmulInt4, MockSail, Q4_K_BLOCK_BYTES, QK_K, Transaction};

#[test]
fn transactions_of_one_product_are_two_writes_a_submit_and_a_read() {
    let sail = MockSail::new();
    let (m, k, n) = (2, 2 * QK_K, 40);
    let a = vec![0; m * 2 * Q4_K_BLOCK_BYTES];
    let b = vec![0; n * 2 * Q4_K_BLOCK_BYTES];
    // The card fills the buffer it was given, even where that is longer than the result.
    let mut out = vec![0; m * n * 4 + 16];
    sail.matmul_q4_k(&a, &b, &mut out, m, k, n).expect("the dimensions fit");
    // A ends at 576 and B at 4096 + 11520.
    let expected = [
        Transaction::Write { dev_addr: 0, len: 576, label: "A" },
        Transaction::Write { dev_addr: 4096, len: 11_520, label: "B" },
        Transaction::ComputeSubmit { dev_addr: 16_384, kind: "matmul_q4_k", m: 2, k: 512, n: 40 },
        Transaction::Read { dev_addr: 16_384, len: 336, label: "OUT" },
    ];
    assert_eq!(sail.transactions(), expected);
}

#[test]
fn transactions_of_refused_or_empty_product_are_none() {
    let sail = MockSail::default();
    let block = [0; Q4_K_BLOCK_BYTES];
    let refused = sail.matmul_q4_k(&block, &block, &mut [0; 3], 1, QK_K, 1);
    assert_eq!(refused, Err(Error::OutputTooSmall { have: 3, need: 4 }));
    assert!(sail.matmul_q4_k(&block, &block, &mut [0; 4], 1, 100, 1).is_err());
    assert_eq!(sail.matmul_q4_k(&[], &block, &mut [0; 4], 0, QK_K, 1), Ok(()));
    assert_eq!(sail.transactions(), []);
}

#[test]
fn transactions_of_concurrent_products_stay_together() {
    let sail = MockSail::new();
    let block = [0; Q4_K_BLOCK_BYTES];
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..25 {
                    let done = sail.matmul_q4_k(&block, &block, &mut [0; 4], 1, QK_K, 1);
                    assert_eq!(done, Ok(()));
                }
            });
        }
    });
    let transactions = sail.transactions();
    assert_eq!(transactions.len(), 4 * 4 * 25);
    let (first, rest) = transactions.split_at(4);
    assert!(rest.chunks(4).all(|product| product == first));
}
