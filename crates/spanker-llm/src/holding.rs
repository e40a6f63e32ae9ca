// SPDX-License-Identifier: Apache-2.0
//! What each card holds of a network: pieces of tensors, and where they are once somebody has put them there.

use std::ops::Range;

use ggml_spanker::Shape;
use spanker_model::Quant;
use spanker_model::gguf::Tensor;
use spanker_plan::{Shard, Split, Stage};
use spanker_runtime::Place;

use crate::card::memory::FILE;
use crate::{LlmError, Network};

/// Which part of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Cut {
    /// These rows. Of a vector, these elements.
    Rows(Range<u64>),
    /// These columns of every row.
    Columns(Range<u64>),
}

/// A part of a tensor that a card holds.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Piece {
    /// The tensor's name.
    pub tensor: String,
    /// Its part.
    pub cut: Cut,
}

/// A piece of a matrix on a card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) place: Place,
    pub(crate) rows: u64,
    pub(crate) cols: u64,
    pub(crate) quant: Quant,
}

/// What a card holds of one layer.
#[derive(Debug, Clone)]
pub(crate) struct HeldLayer {
    pub(crate) attention_norm: Place,
    pub(crate) q: Held,
    pub(crate) k: Held,
    pub(crate) v: Held,
    pub(crate) biases: Option<[Place; 3]>,
    pub(crate) head_norms: Option<[Place; 2]>,
    pub(crate) o: Held,
    pub(crate) ffn_norm: Place,
    pub(crate) gate: Held,
    pub(crate) up: Held,
    pub(crate) down: Held,
}

/// What a card holds of a network.
#[derive(Debug, Clone)]
pub(crate) struct Holding {
    pub(crate) layers: Vec<HeldLayer>,
    /// On the first stage.
    pub(crate) embedding: Option<Held>,
    /// On the last stage: the final norm and the head.
    pub(crate) head: Option<(Place, Held)>,
}

impl Holding {
    /// Reads a byte of every page of the matrices that lie in the file, which brings them into memory.
    pub(crate) fn touch<B: AsRef<[u8]>>(&self, network: &Network<B>) {
        let layers = self.layers.iter();
        let matrices = layers.flat_map(|l| [l.q, l.k, l.v, l.o, l.gate, l.up, l.down]);
        let ends = self.embedding.into_iter().chain(self.head.map(|(_, head)| head));
        for held in matrices.chain(ends).filter(|held| held.place.buffer == FILE) {
            let start = held.place.offset as usize;
            let end = start + (held.rows * held.quant.row_bytes(held.cols)) as usize;
            let pages = network.bytes()[start..end].iter().step_by(4096);
            std::hint::black_box(pages.fold(0u8, |sum, byte| sum ^ byte));
        }
    }
}

/// Lists what a rank of a stage holds. `put` says where a piece is.
pub(crate) fn hold<B: AsRef<[u8]>>(
    network: &Network<B>,
    stage: &Stage,
    rank: usize,
    (first, last): (bool, bool),
    put: &mut dyn FnMut(&Piece) -> Result<Place, LlmError>,
) -> Result<Holding, LlmError> {
    let shard = &stage.group.shards[rank];
    let mut holder = Holder { network, shard, split: stage.group.split, put };
    let layers = stage.layers.clone().map(|at| holder.layer(at)).collect::<Result<_, _>>()?;
    let model = network.model();
    let embedding = match first {
        true => Some(holder.rows("token_embd.weight", shard.vocab.clone())?),
        false => None,
    };
    let head = match last {
        true => {
            let name = if model.tied { "token_embd.weight" } else { "output.weight" };
            let norm = holder.vector("output_norm.weight", 0..model.hidden)?;
            Some((norm, holder.rows(name, shard.vocab.clone())?))
        }
        false => None,
    };
    Ok(Holding { layers, embedding, head })
}

struct Holder<'a, B> {
    network: &'a Network<B>,
    shard: &'a Shard,
    split: Split,
    put: &'a mut dyn FnMut(&Piece) -> Result<Place, LlmError>,
}

impl<B: AsRef<[u8]>> Holder<'_, B> {
    fn rows(&mut self, name: &str, rows: Range<u64>) -> Result<Held, LlmError> {
        let (tensor, _) = self.network.tensor(name)?;
        let (quant, cols) = (tensor.quant, tensor.dims[0]);
        let place = (self.put)(&Piece { tensor: name.to_owned(), cut: Cut::Rows(rows.clone()) })?;
        Ok(Held { place, rows: rows.end - rows.start, cols, quant })
    }

    fn columns(&mut self, name: &str, columns: Range<u64>) -> Result<Held, LlmError> {
        let (tensor, _) = self.network.tensor(name)?;
        let (quant, rows) = (tensor.quant, tensor.dims[1]);
        let piece = Piece { tensor: name.to_owned(), cut: Cut::Columns(columns.clone()) };
        let place = (self.put)(&piece)?;
        Ok(Held { place, rows, cols: columns.end - columns.start, quant })
    }

    fn vector(&mut self, name: &str, elements: Range<u64>) -> Result<Place, LlmError> {
        (self.put)(&Piece { tensor: name.to_owned(), cut: Cut::Rows(elements) })
    }

    fn layer(&mut self, at: usize) -> Result<HeldLayer, LlmError> {
        let name = |rest: &str| format!("blk.{at}.{rest}");
        let model = self.network.model();
        let (hidden, size) = (model.hidden, model.head_size);
        let shard = self.shard;
        let heads = shard.heads.start * size..shard.heads.end * size;
        let kv = shard.kv_heads.start * size..shard.kv_heads.end * size;
        let reduce = self.split == Split::Reduce;
        Ok(HeldLayer {
            attention_norm: self.vector(&name("attn_norm.weight"), 0..hidden)?,
            q: self.rows(&name("attn_q.weight"), heads.clone())?,
            k: self.rows(&name("attn_k.weight"), kv.clone())?,
            v: self.rows(&name("attn_v.weight"), kv.clone())?,
            biases: match self.network.biases {
                true => Some([
                    self.vector(&name("attn_q.bias"), heads.clone())?,
                    self.vector(&name("attn_k.bias"), kv.clone())?,
                    self.vector(&name("attn_v.bias"), kv)?,
                ]),
                false => None,
            },
            head_norms: match self.network.head_norms {
                true => Some([
                    self.vector(&name("attn_q_norm.weight"), 0..size)?,
                    self.vector(&name("attn_k_norm.weight"), 0..size)?,
                ]),
                false => None,
            },
            o: match reduce {
                true => self.columns(&name("attn_output.weight"), heads)?,
                false => self.rows(&name("attn_output.weight"), shard.output.clone())?,
            },
            ffn_norm: self.vector(&name("ffn_norm.weight"), 0..hidden)?,
            gate: self.rows(&name("ffn_gate.weight"), shard.ffn.clone())?,
            up: self.rows(&name("ffn_up.weight"), shard.ffn.clone())?,
            down: match reduce {
                true => self.columns(&name("ffn_down.weight"), shard.ffn.clone())?,
                false => self.rows(&name("ffn_down.weight"), shard.down.clone())?,
            },
        })
    }
}

impl<B: AsRef<[u8]>> Network<B> {
    /// Bytes of a piece.
    ///
    /// # Errors
    /// [`LlmError::Unsupported`] for a tensor that is not there, [`LlmError::Plan`] for a piece that it has
    /// not, or a cut through a block.
    pub fn piece_bytes(&self, piece: &Piece) -> Result<u64, LlmError> {
        let (tensor, _) = self.tensor(&piece.tensor)?;
        let shape = shape(tensor).map_err(|error| refused(piece, &error))?;
        let bytes = match &piece.cut {
            Cut::Rows(rows) => shape.row_range(usizes(rows)).map(|range| range.len()),
            Cut::Columns(columns) => Shape::new(tensor.quant, shape.rows(), usizes(columns).len())
                .map(|part| part.bytes()),
        };
        bytes.map(|bytes| bytes as u64).map_err(|error| refused(piece, &error))
    }

    /// Where a run of rows lies in the file.
    pub(crate) fn rows_at(
        &self,
        piece: &Piece,
        rows: &Range<u64>,
    ) -> Result<Range<usize>, LlmError> {
        let (tensor, range) = self.tensor(&piece.tensor)?;
        let rows = shape(tensor).and_then(|shape| shape.row_range(usizes(rows)));
        let rows = rows.map_err(|error| refused(piece, &error))?;
        Ok(range.start + rows.start..range.start + rows.end)
    }

    /// Appends the bytes of a piece.
    ///
    /// # Errors
    /// As [`Network::piece_bytes`].
    pub fn copy_piece(&self, piece: &Piece, out: &mut Vec<u8>) -> Result<(), LlmError> {
        match &piece.cut {
            Cut::Rows(rows) => out.extend_from_slice(&self.bytes()[self.rows_at(piece, rows)?]),
            Cut::Columns(columns) => {
                let (tensor, range) = self.tensor(&piece.tensor)?;
                let matrix = &self.bytes()[range];
                let part =
                    shape(tensor).and_then(|shape| shape.take_columns(matrix, usizes(columns)));
                out.extend_from_slice(&part.map_err(|error| refused(piece, &error))?.1);
            }
        }
        Ok(())
    }
}

fn usizes(run: &Range<u64>) -> Range<usize> {
    run.start as usize..run.end as usize
}

fn refused(piece: &Piece, error: &ggml_spanker::Error) -> LlmError {
    LlmError::plan(format!("tensor {}: {error}", piece.tensor))
}

/// A tensor as a matrix; an element of a vector is a row, and so is a number without dimensions.
fn shape(tensor: &Tensor) -> Result<Shape, ggml_spanker::Error> {
    match tensor.dims[..] {
        [] => Shape::new(tensor.quant, 1, 1),
        [length] => Shape::new(tensor.quant, length as usize, 1),
        _ => Shape::new(tensor.quant, tensor.dims[1] as usize, tensor.dims[0] as usize),
    }
}
