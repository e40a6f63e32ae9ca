// SPDX-License-Identifier: Apache-2.0
//! A card that is not there: it computes on the host and writes down the bus traffic that a card
//! would see. It models no time, no memory limit and no failure.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::Result;
use crate::host::HostMatmul;
use crate::matmul::MatmulInt4;

/// Buffers on the card start at multiples of this, as a DMA engine likes it.
const ALIGNMENT: u64 = 4096;

/// One transfer or command on the bus between host and card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Transaction {
    /// The host writes to the card's memory.
    Write {
        /// Where the bytes go in the card's memory.
        dev_addr: u64,
        /// How many bytes there are.
        len: usize,
        /// Which operand it is: `A` or `B`.
        label: &'static str,
    },
    /// The host makes the card compute.
    ComputeSubmit {
        /// Where the card puts the result in its memory.
        dev_addr: u64,
        /// The kind of work, such as `matmul_q4_k`.
        kind: &'static str,
        /// The rows of `A`.
        m: usize,
        /// The length of a row of either operand.
        k: usize,
        /// The rows of `B`.
        n: usize,
    },
    /// The host reads from the card's memory.
    Read {
        /// Where the bytes come from in the card's memory.
        dev_addr: u64,
        /// How many bytes there are.
        len: usize,
        /// Which operand it is: `OUT`.
        label: &'static str,
    },
}

/// A [`MatmulInt4`] with real results and a record of the traffic.
///
/// Each product that has something to compute records four transactions without a gap: write `A`,
/// write `B`, submit, read `OUT`. `A` lies at the start of the card's memory, `B` and `OUT` at the
/// next multiples of 4096. A refused or empty product records nothing.
///
/// # Examples
///
/// ```
/// use ggml_spanker::{MatmulInt4, MockSail, Q4_K_BLOCK_BYTES, QK_K, Transaction};
///
/// let sail = MockSail::new();
/// let block = [0u8; Q4_K_BLOCK_BYTES];
/// let mut out = [0u8; 4];
/// sail.matmul_q4_k(&block, &block, &mut out, 1, QK_K, 1)?;
/// let expected = Transaction::Read { dev_addr: 8192, len: 4, label: "OUT" };
/// assert_eq!(sail.transactions().last(), Some(&expected));
/// # Ok::<(), ggml_spanker::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct MockSail {
    transactions: Mutex<Vec<Transaction>>,
}

impl MockSail {
    /// A card that has seen no traffic.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The traffic so far, oldest first.
    #[must_use]
    pub fn transactions(&self) -> Vec<Transaction> {
        self.lock().clone()
    }

    /// The record. Entries are appended in one step, so a thread that panicked left it whole.
    fn lock(&self) -> MutexGuard<'_, Vec<Transaction>> {
        self.transactions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MatmulInt4 for MockSail {
    fn matmul_q4_k(
        &self,
        a: &[u8],
        b: &[u8],
        out: &mut [u8],
        m: usize,
        k: usize,
        n: usize,
    ) -> Result<()> {
        HostMatmul.matmul_q4_k(a, b, out, m, k, n)?;
        if m == 0 || n == 0 {
            return Ok(());
        }
        let b_addr = (a.len() as u64).next_multiple_of(ALIGNMENT);
        let out_addr = (b_addr + b.len() as u64).next_multiple_of(ALIGNMENT);
        self.lock().extend([
            Transaction::Write { dev_addr: 0, len: a.len(), label: "A" },
            Transaction::Write { dev_addr: b_addr, len: b.len(), label: "B" },
            Transaction::ComputeSubmit { dev_addr: out_addr, kind: "matmul_q4_k", m, k, n },
            Transaction::Read { dev_addr: out_addr, len: out.len(), label: "OUT" },
        ]);
        Ok(())
    }
}
