// SPDX-License-Identifier: Apache-2.0
//! Shards of quantised matrices: which bytes a run of rows is, and columns as a matrix of their own. Who gets
//! which shard is decided elsewhere.

use std::ops::Range;

use spanker_model::Quant;

use crate::error::{Error, Result};

/// The type and sizes of a matrix that is stored row by row in whole blocks.
///
/// ```
/// use ggml_spanker::{Quant, Shape};
/// let shape = Shape::new(Quant::Q4_0, 4, 64)?;
/// assert_eq!((shape.row_bytes(), shape.bytes()), (36, 144));
/// assert_eq!(shape.row_range(1..3)?, 36..108);
/// let (shape, right) = shape.copy_columns(&[0; 144], 32..64)?;
/// assert_eq!((shape.cols(), right.len()), (32, 72));
/// # Ok::<(), ggml_spanker::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    quant: Quant,
    rows: usize,
    cols: usize,
}

impl Shape {
    /// A matrix of `rows` rows of `cols` weights.
    ///
    /// # Errors
    /// [`Error::SplitBlock`] if a row does not end with a block, [`Error::Outside`] if the matrix has more bytes
    /// than can be counted.
    pub fn new(quant: Quant, rows: usize, cols: usize) -> Result<Shape> {
        let shape = Shape { quant, rows, cols };
        shape.block_of(cols)?;
        match shape.row_bytes().checked_mul(rows) {
            Some(_) if shape.row_bytes() < usize::MAX => Ok(shape),
            _ => Err(Error::Outside { what: "rows", end: rows, len: usize::MAX }),
        }
    }

    /// How weights are stored.
    #[must_use]
    pub fn quant(&self) -> Quant {
        self.quant
    }

    /// How many rows there are.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Weights of a row.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of a row.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        usize::try_from(self.quant.row_bytes(self.cols as u64)).unwrap_or(usize::MAX)
    }

    /// Bytes of the matrix.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.rows * self.row_bytes()
    }

    /// The bytes that a run of rows is.
    ///
    /// # Errors
    /// [`Error::Outside`] for rows that the matrix has not.
    pub fn row_range(&self, rows: Range<usize>) -> Result<Range<usize>> {
        if rows.start > rows.end || rows.end > self.rows {
            return Err(Error::Outside {
                what: "rows",
                end: rows.end.max(rows.start),
                len: self.rows,
            });
        }
        Ok(rows.start * self.row_bytes()..rows.end * self.row_bytes())
    }

    /// Some columns of all rows of a matrix of this shape, as a matrix of their own.
    ///
    /// # Errors
    /// [`Error::SplitBlock`] for columns that begin or end inside a block, [`Error::Outside`] for columns that the
    /// matrix has not, [`Error::PartialBlock`] if `matrix` has not the bytes of the shape.
    pub fn copy_columns(&self, matrix: &[u8], columns: Range<usize>) -> Result<(Shape, Vec<u8>)> {
        if columns.start > columns.end || columns.end > self.cols {
            let end = columns.end.max(columns.start);
            return Err(Error::Outside { what: "columns", end, len: self.cols });
        }
        if matrix.len() != self.bytes() {
            return Err(Error::PartialBlock { len: matrix.len(), block: self.bytes() });
        }
        let size = self.quant.block_bytes() as usize;
        let bytes = self.block_of(columns.start)? * size..self.block_of(columns.end)? * size;
        let mut out = Vec::with_capacity(self.rows * bytes.len());
        if !bytes.is_empty() {
            for row in matrix.chunks_exact(self.row_bytes()) {
                out.extend_from_slice(&row[bytes.clone()]);
            }
        }
        Ok((Shape { cols: columns.len(), ..*self }, out))
    }

    /// The block that begins at a column.
    fn block_of(&self, column: usize) -> Result<usize> {
        let block = self.quant.block() as usize;
        if !column.is_multiple_of(block) {
            return Err(Error::SplitBlock { column, block });
        }
        Ok(column / block)
    }
}
