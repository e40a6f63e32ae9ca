// SPDX-License-Identifier: Apache-2.0
//! A product of two Q4_K matrices as a job whose items are the rows of the left one. How rows are shared out is not
//! decided here.

use std::ops::Range;
use std::sync::Arc;

use ggml_spanker::{HostMatmul, MatmulInt4, OUTPUT_ELEM_BYTES, Q4_K_BLOCK_BYTES, QK_K};
use half::f16;
use rand::{RngCore, SeedableRng};
use rand_pcg::Pcg64Mcg;
use spanker_steal::{Backend, Cpu, Failure, Job};

use super::JobError;

/// Rows that are given out together: with fewer, reading the right operand costs more than multiplying.
pub(crate) const GRAIN: usize = 16;
/// The mean square of a random number from 0 to 15 less 7.5, times that of the scales 32 to 63.
const SQUARE: f64 = 21.25 * 2341.5;

/// `a` (m rows of k values) times the transpose of `b` (n rows of k values), both in Q4_K.
///
/// One item is a row of `a`. Its output is n f32, little endian, with the bits that
/// [`HostMatmul`] defines: they depend on the row and on `b` alone, so it does not matter who computes it.
///
/// # Examples
///
/// ```
/// use spanker_engine::jobs::Product;
///
/// let product = Product::synthetic(4, 256, 3, 7)?;
/// let (mut whole, mut last) = ([0; 4 * 3 * 4], [0; 3 * 4]);
/// product.rows(0..4, &mut whole)?;
/// product.rows(3..4, &mut last)?;
/// assert_eq!(whole[3 * 3 * 4..], last);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Product {
    a: Vec<u8>,
    b: Vec<u8>,
    m: usize,
    k: usize,
    n: usize,
}

impl Product {
    /// A product of these matrices, row by row as blocks.
    ///
    /// # Errors
    /// [`JobError::Nothing`] without rows, [`JobError::Product`] for a `k` that is no positive multiple of
    /// [`QK_K`], for operands of other lengths than the dimensions ask for, and for sizes that overflow.
    pub fn new(a: Vec<u8>, b: Vec<u8>, m: usize, k: usize, n: usize) -> Result<Product, JobError> {
        let [left, right] = sizes(m, k, n)?;
        if (a.len(), b.len()) != (left, right) {
            return Err(bad_dims(m, k, n));
        }
        Ok(Product { a, b, m, k, n })
    }

    /// Matrices of random weights: products neither grow nor vanish. The same seed gives the same ones.
    ///
    /// # Errors
    /// As [`new`](Self::new), and [`JobError::Memory`].
    pub fn synthetic(m: usize, k: usize, n: usize, seed: u64) -> Result<Product, JobError> {
        let [left, right] = sizes(m, k, n)?;
        let mut random = Pcg64Mcg::seed_from_u64(seed);
        let a = weights(left, k, "random weights", &mut random)?;
        let b = weights(right, k, "random weights", &mut random)?;
        Ok(Product { a, b, m, k, n })
    }

    /// Rows of the left operand, values of a row, rows of the right operand.
    #[must_use]
    pub fn dims(&self) -> [usize; 3] {
        [self.m, self.k, self.n]
    }

    /// The job: an item for each row of the left operand.
    #[must_use]
    pub fn job(&self) -> Job {
        Job::new(self.m, self.output_bytes()).grain(GRAIN)
    }

    /// Computes some rows on the calling thread.
    ///
    /// # Errors
    /// A passing [`Failure`] for rows that are not there, or room of another size.
    pub fn rows(&self, items: Range<usize>, out: &mut [u8]) -> Result<(), Failure> {
        let a = self.left(&items, out.len())?;
        HostMatmul
            .matmul_q4_k(a, &self.b, out, items.len(), self.k, self.n)
            .map_err(|error| Failure::passing(error.to_string()))
    }

    /// The blocks of some rows of the left operand, for outputs of so many bytes.
    ///
    /// # Errors
    /// As [`rows`](Self::rows).
    pub fn left(&self, items: &Range<usize>, out: usize) -> Result<&[u8], Failure> {
        let row = self.row_bytes();
        let wanted = items.len().checked_mul(self.output_bytes());
        if items.start > items.end || items.end > self.m || wanted != Some(out) {
            let Range { start, end } = items;
            return Err(Failure::passing(format!(
                "rows {start}..{end} of {} into {out} bytes",
                self.m
            )));
        }
        Ok(&self.a[items.start * row..items.end * row])
    }

    /// The blocks of the right operand.
    #[must_use]
    pub fn right(&self) -> &[u8] {
        &self.b
    }

    /// Bytes of a row of either operand.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        self.k / QK_K * Q4_K_BLOCK_BYTES
    }

    /// Bytes of a row of the result.
    pub(crate) fn output_bytes(&self) -> usize {
        self.n * OUTPUT_ELEM_BYTES
    }
}

impl std::fmt::Debug for Product {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Product").field("dims", &self.dims()).finish_non_exhaustive()
    }
}

/// A product on threads of this process, which are trusted where others disagree.
#[must_use]
pub fn on_threads(product: Arc<Product>, threads: usize) -> Arc<dyn Backend> {
    Arc::new(Cpu::new(threads, move |items, out: &mut [u8]| product.rows(items, out)))
}

fn bad_dims(m: usize, k: usize, n: usize) -> JobError {
    ggml_spanker::Error::BadDims { m, k, n, qk: QK_K }.into()
}

/// The bytes of both operands, if all sizes make sense.
fn sizes(m: usize, k: usize, n: usize) -> Result<[usize; 2], JobError> {
    if m == 0 || n == 0 {
        let what = format!("a product of {m} and {n} rows");
        return Err(JobError::Nothing { what });
    }
    let bytes = |rows: usize| rows.checked_mul(k / QK_K)?.checked_mul(Q4_K_BLOCK_BYTES);
    let all = m.checked_mul(n).and_then(|all| all.checked_mul(OUTPUT_ELEM_BYTES));
    match (bytes(m), bytes(n), all) {
        (Some(left), Some(right), Some(_)) if k > 0 && k.is_multiple_of(QK_K) => Ok([left, right]),
        _ => Err(bad_dims(m, k, n)),
    }
}

/// Random blocks for rows of `k` values, with a mean of 0 and a variance of `1 / k`.
fn weights(
    bytes: usize,
    k: usize,
    what: &'static str,
    random: &mut Pcg64Mcg,
) -> Result<Vec<u8>, JobError> {
    let mut blocks = Vec::new();
    let none = |_| JobError::Memory { what, bytes: bytes as u64 };
    blocks.try_reserve_exact(bytes).map_err(none)?;
    blocks.resize(bytes, 0);
    random.fill_bytes(&mut blocks);
    let scale = f16::from_f64(1.0 / (k as f64 * SQUARE).sqrt());
    let minimum = f16::from_f64(7.5 * scale.to_f64());
    for block in blocks.chunks_exact_mut(Q4_K_BLOCK_BYTES) {
        block[..2].copy_from_slice(&scale.to_le_bytes());
        block[2..4].copy_from_slice(&minimum.to_le_bytes());
        // Scales from 32 to 63, and the minimum of each is its scale's, which makes the mean 0.
        for at in 4..8 {
            block[at] |= 0xa0;
            block[at + 4] = block[at];
            let low = block[at + 8] & 0x0f;
            block[at + 8] = low | low << 4;
        }
    }
    Ok(blocks)
}
