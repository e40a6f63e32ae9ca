// SPDX-License-Identifier: Apache-2.0
//! Parts of a network's tensors, by the names that its file has for them.

use std::ops::Range;

use ggml_spanker::Shape;
use ggml_spanker::ops::Pairs;
use spanker_model::gguf::{Tensor, ffn_norm};
use spanker_plan::{Cut, Numerics, Piece, Tensor as Part};

use crate::{LlmError, Network};

impl<B: AsRef<[u8]>> Network<B> {
    /// Where a run of rows of a tensor lies in the file.
    pub(crate) fn rows_at(&self, name: &str, rows: &Range<u64>) -> Result<Range<usize>, LlmError> {
        let (tensor, range) = self.tensor(name)?;
        let rows = shape(name, tensor).and_then(|shape| shape.row_range(usizes(rows)));
        let rows = rows.map_err(|error| refused(name, &error))?;
        Ok(range.start + rows.start..range.start + rows.end)
    }

    /// Where the file has a piece: the tensor, and the part of it. Some families have several matrices in one.
    pub(crate) fn source(&self, piece: &Piece) -> (String, Cut) {
        let model = self.model();
        let (q, kv) = (model.heads * model.head_size, model.kv_heads * model.head_size);
        if piece.tensor == Part::FfnNorm {
            let name = format!("blk.{}.{}", piece.layer, ffn_norm(&model.architecture));
            return (name, piece.cut.clone());
        }
        let (fused, skipped) = match piece.tensor {
            Part::Q if model.variant.fused_qkv => ("attn_qkv", 0),
            Part::K if model.variant.fused_qkv => ("attn_qkv", q),
            Part::V if model.variant.fused_qkv => ("attn_qkv", q + kv),
            Part::Gate if model.variant.fused_gate_up => ("ffn_up", 0),
            Part::Up if model.variant.fused_gate_up => ("ffn_up", model.ffn),
            _ => return (piece.name(), piece.cut.clone()),
        };
        let cut = match &piece.cut {
            Cut::Rows(rows) => Cut::Rows(rows.start + skipped..rows.end + skipped),
            columns => columns.clone(),
        };
        (format!("blk.{}.{fused}.weight", piece.layer), cut)
    }

    /// Appends the bytes of a piece.
    pub(crate) fn copy_piece(&self, piece: &Piece, out: &mut Vec<u8>) -> Result<(), LlmError> {
        let (name, cut) = self.source(piece);
        self.copy_part(&name, &cut, out)
    }

    /// Appends the bytes of a part of a tensor.
    ///
    /// # Errors
    /// [`LlmError::Unsupported`] for a tensor that is not there, [`LlmError::Plan`] for a part that it has
    /// not, or a cut through a block.
    pub fn copy_part(&self, name: &str, cut: &Cut, out: &mut Vec<u8>) -> Result<(), LlmError> {
        match cut {
            Cut::Rows(rows) => out.extend_from_slice(&self.bytes()[self.rows_at(name, rows)?]),
            Cut::Columns(columns) => {
                let (tensor, range) = self.tensor(name)?;
                let matrix = &self.bytes()[range];
                let part = shape(name, tensor)
                    .and_then(|shape| shape.copy_columns(matrix, usizes(columns)));
                out.extend_from_slice(&part.map_err(|error| refused(name, &error))?.1);
            }
            Cut::Each { rows, of, count } => {
                for first in (0..*count).map(|at| at * of) {
                    let rows = first + rows.start..first + rows.end;
                    out.extend_from_slice(&self.bytes()[self.rows_at(name, &rows)?]);
                }
            }
        }
        Ok(())
    }

    /// What programs need to know of the network besides its shape.
    pub(crate) fn numerics(&self) -> Numerics {
        let pairs = u32::from(self.rope().pairs == Pairs::Halves);
        Numerics { epsilon: self.epsilon.to_bits(), pairs }
    }
}

fn usizes(run: &Range<u64>) -> Range<usize> {
    run.start as usize..run.end as usize
}

fn refused(name: &str, error: &ggml_spanker::Error) -> LlmError {
    LlmError::plan(format!("tensor {name}: {error}"))
}

/// A tensor as a matrix; an element of a vector is a row, and so is a number without dimensions. Matrices that lie end to
/// end are one. Biases of experts lie end to end, and each of their elements is a row.
fn shape(name: &str, tensor: &Tensor) -> Result<Shape, ggml_spanker::Error> {
    match tensor.dims[..] {
        _ if name.ends_with(".bias") => {
            let elements: u64 = tensor.dims.iter().product();
            Shape::new(tensor.quant, elements as usize, 1)
        }
        [] => Shape::new(tensor.quant, 1, 1),
        [length] => Shape::new(tensor.quant, length as usize, 1),
        _ => {
            let rows: u64 = tensor.dims[1..].iter().product();
            Shape::new(tensor.quant, rows as usize, tensor.dims[0] as usize)
        }
    }
}
