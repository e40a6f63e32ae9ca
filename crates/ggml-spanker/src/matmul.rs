// SPDX-License-Identifier: Apache-2.0
//! The product of two Q4_K matrices as a trait, and the check of its arguments. How and where the
//! product is computed is the implementations' business.

use crate::error::{Error, Result};
use crate::q4_k::{Q4_K_BLOCK_BYTES, QK_K};

/// The bytes of one element of the output: an f32.
pub const OUTPUT_ELEM_BYTES: usize = 4;

/// Something that multiplies Q4_K matrices.
pub trait MatmulInt4 {
    /// Computes `out = a * transpose(b)`.
    ///
    /// `a` is `m` rows and `b` is `n` rows of `k` values each, both row by row as Q4_K blocks. `out`
    /// receives `m` rows of `n` f32 values, little-endian; bytes beyond them are left alone. With
    /// `m = 0` or `n = 0` and a valid `k` there is nothing to compute, and the call succeeds without
    /// a look at the slices.
    ///
    /// Implementations take `&self`: one that drives a card uses interior mutability.
    ///
    /// # Errors
    ///
    /// [`Error::BadDims`] when `k` is not a positive multiple of [`QK_K`], when `a` or `b` has not
    /// exactly the bytes that the dimensions ask for, or when a size overflows.
    /// [`Error::OutputTooSmall`] when `out` is shorter than `m * n * OUTPUT_ELEM_BYTES` bytes.
    /// [`Error::Device`] when the device failed that was to compute it. Then `out` has not changed.
    fn matmul_q4_k(
        &self,
        a: &[u8],
        b: &[u8],
        out: &mut [u8],
        m: usize,
        k: usize,
        n: usize,
    ) -> Result<()>;
}

/// Checks the dimensions of a product against the byte lengths of `a`, `b` and `out`, as every implementation of
/// [`MatmulInt4`] does before anything else.
///
/// Returns the number of bytes of the result, which is zero when there is nothing to compute.
///
/// # Errors
///
/// [`Error::BadDims`] and [`Error::OutputTooSmall`], as [`MatmulInt4::matmul_q4_k`] says.
pub fn check_dims(
    [a_len, b_len, out_len]: [usize; 3],
    m: usize,
    k: usize,
    n: usize,
) -> Result<usize> {
    let bad = Error::BadDims { m, k, n, qk: QK_K };
    if k == 0 || !k.is_multiple_of(QK_K) {
        return Err(bad);
    }
    if m == 0 || n == 0 {
        return Ok(0);
    }
    // A product that overflows equals no slice's length.
    let matrix_bytes = |rows: usize| rows.checked_mul(k / QK_K)?.checked_mul(Q4_K_BLOCK_BYTES);
    if matrix_bytes(m) != Some(a_len) || matrix_bytes(n) != Some(b_len) {
        return Err(bad);
    }
    let need = m.checked_mul(n).and_then(|elements| elements.checked_mul(OUTPUT_ELEM_BYTES));
    let need = need.ok_or(bad)?;
    if out_len < need {
        return Err(Error::OutputTooSmall { have: out_len, need });
    }
    Ok(need)
}
