// SPDX-License-Identifier: Apache-2.0
//! What each card holds of a model: pieces of tensors, and where they are once somebody has put them there.
//! Nothing is read here.

use std::ops::Range;

use spanker_model::{Experts, Matrix, Model, Quant, Turning};

use crate::cost::shard::{Shard, Split};
use crate::plan::Stage;
use crate::work::{BufferId, Place};

/// What pieces of weights begin at multiples of.
pub const WEIGHT_ALIGNMENT: u64 = 64;

/// Which tensor of a layer, or of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Tensor {
    /// The norm before attention.
    AttentionNorm,
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// The biases of queries, keys and values.
    Bias(Projection),
    /// The norms of the heads of queries and keys.
    HeadNorm(Projection),
    /// What every head of queries has as a score without a position.
    Sinks,
    /// The product after attention.
    Output,
    /// Its bias.
    OutputBias,
    /// The norm of what attention gives.
    PostAttentionNorm,
    /// The norm before the feed-forward network.
    FfnNorm,
    /// The gate.
    Gate,
    /// The way up.
    Up,
    /// The way down.
    Down,
    /// The router of a mixture of experts.
    Router,
    /// The gates of all experts.
    ExpertGate,
    /// Their ways up.
    ExpertUp,
    /// Their ways down.
    ExpertDown,
    /// What is added to a router's logits.
    RouterBias,
    /// What is added to gates of experts, a row for each.
    ExpertGateBias,
    /// To their ways up.
    ExpertUpBias,
    /// To their ways down.
    ExpertDownBias,
    /// How much the expert counts that every token meets.
    SharedRouter,
    /// Its gate.
    SharedGate,
    /// Its way up.
    SharedUp,
    /// Its way down.
    SharedDown,
    /// The norm of what the feed-forward network gives.
    PostFfnNorm,
    /// The embedding table, which is the head of a model with tied weights.
    Embedding,
    /// The norm before the head.
    FinalNorm,
    /// The head.
    Head,
}

/// Queries, keys or values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Projection {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
}

impl Projection {
    const fn letter(self) -> char {
        match self {
            Projection::Q => 'q',
            Projection::K => 'k',
            Projection::V => 'v',
        }
    }
}

/// Which part of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Cut {
    /// These rows. Of a vector, these elements.
    Rows(Range<u64>),
    /// These columns of every row.
    Columns(Range<u64>),
    /// These rows of each of `count` matrices of `of` rows, which lie end to end.
    Each {
        /// The rows.
        rows: Range<u64>,
        /// Rows of a matrix.
        of: u64,
        /// Matrices.
        count: u64,
    },
}

/// A part of a tensor that a card holds.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Piece {
    /// The tensor.
    pub tensor: Tensor,
    /// The layer; nothing means for tensors of the model itself.
    pub layer: usize,
    /// Its part.
    pub cut: Cut,
}

impl Piece {
    /// The tensor's name in a GGUF file that has each matrix by itself. Some have several in one.
    #[must_use]
    pub fn name(&self) -> String {
        let layer = self.layer;
        let rest = match self.tensor {
            Tensor::Embedding => return "token_embd.weight".into(),
            Tensor::FinalNorm => return "output_norm.weight".into(),
            Tensor::Head => return "output.weight".into(),
            Tensor::Bias(of) => return format!("blk.{layer}.attn_{}.bias", of.letter()),
            Tensor::HeadNorm(of) => return format!("blk.{layer}.attn_{}_norm.weight", of.letter()),
            Tensor::OutputBias => return format!("blk.{layer}.attn_output.bias"),
            Tensor::RouterBias => return format!("blk.{layer}.ffn_gate_inp.bias"),
            Tensor::ExpertGateBias => return format!("blk.{layer}.ffn_gate_exps.bias"),
            Tensor::ExpertUpBias => return format!("blk.{layer}.ffn_up_exps.bias"),
            Tensor::ExpertDownBias => return format!("blk.{layer}.ffn_down_exps.bias"),
            Tensor::Sinks => "attn_sinks",
            Tensor::PostAttentionNorm => "post_attention_norm",
            Tensor::PostFfnNorm => "post_ffw_norm",
            Tensor::AttentionNorm => "attn_norm",
            Tensor::Q => "attn_q",
            Tensor::K => "attn_k",
            Tensor::V => "attn_v",
            Tensor::Output => "attn_output",
            Tensor::FfnNorm => "ffn_norm",
            Tensor::Gate => "ffn_gate",
            Tensor::Up => "ffn_up",
            Tensor::Down => "ffn_down",
            Tensor::Router => "ffn_gate_inp",
            Tensor::ExpertGate => "ffn_gate_exps",
            Tensor::ExpertUp => "ffn_up_exps",
            Tensor::ExpertDown => "ffn_down_exps",
            Tensor::SharedRouter => "ffn_gate_inp_shexp",
            Tensor::SharedGate => "ffn_gate_shexp",
            Tensor::SharedUp => "ffn_up_shexp",
            Tensor::SharedDown => "ffn_down_shexp",
        };
        format!("blk.{layer}.{rest}.weight")
    }
}

/// A piece of a matrix on a card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) place: Place,
    pub(crate) rows: u64,
    pub(crate) cols: u64,
    pub(crate) quant: Quant,
}

impl Held {
    /// The same so many bytes further on.
    fn shifted(mut self, bytes: u64) -> Held {
        self.place.offset += bytes;
        self
    }
}

/// A gated feed-forward network, or a card's part of one; of experts, of the first.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeldFfn {
    pub(crate) gate: Held,
    pub(crate) up: Held,
    pub(crate) down: Held,
}

impl HeldFfn {
    fn matrices(&self) -> [Held; 3] {
        [self.gate, self.up, self.down]
    }
}

/// What a card holds of a mixture besides its first expert.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeldExperts {
    pub(crate) count: u64,
    /// Bytes from an expert's gate, up and down to the next one's.
    pub(crate) strides: [u64; 3],
    pub(crate) router: Held,
    /// Biases of the router, and of gate, up and down with the bytes from an expert's to the next one's. Those of down
    /// are whole.
    pub(crate) biases: Option<(Place, [(Place, u64); 3])>,
    /// The expert that every token meets, and its router.
    pub(crate) shared: Option<(Held, HeldFfn)>,
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
    pub(crate) sinks: Option<Place>,
    pub(crate) o: Held,
    pub(crate) output_bias: Option<Place>,
    pub(crate) post_attention_norm: Option<Place>,
    pub(crate) ffn_norm: Place,
    pub(crate) ffn: HeldFfn,
    pub(crate) experts: Option<HeldExperts>,
    pub(crate) post_ffn_norm: Option<Place>,
    /// How many positions a row sees, if not all.
    pub(crate) window: Option<u64>,
    pub(crate) turning: Turning,
}

impl HeldLayer {
    /// All matrices, each expert's by itself.
    fn matrices(&self) -> impl Iterator<Item = Held> + '_ {
        let (count, strides) = self.experts.map_or((1, [0; 3]), |own| (own.count, own.strides));
        let experts = (0..count).flat_map(move |expert| {
            let matrices = self.ffn.matrices().into_iter().zip(strides);
            matrices.map(move |(held, stride)| held.shifted(expert * stride))
        });
        let routed = self.experts.iter().flat_map(|own| {
            let shared = own
                .shared
                .iter()
                .flat_map(|(router, ffn)| std::iter::once(*router).chain(ffn.matrices()));
            std::iter::once(own.router).chain(shared)
        });
        [self.q, self.k, self.v, self.o].into_iter().chain(experts).chain(routed)
    }
}

/// What a card holds of a model.
#[derive(Debug, Clone)]
pub(crate) struct Holding {
    pub(crate) layers: Vec<HeldLayer>,
    /// On the first stage.
    pub(crate) embedding: Option<Held>,
    /// On the last stage: the final norm and the head.
    pub(crate) head: Option<(Place, Held)>,
}

impl Holding {
    /// All matrices.
    pub(crate) fn matrices(&self) -> impl Iterator<Item = Held> + '_ {
        let layers = self.layers.iter();
        let matrices = layers.flat_map(HeldLayer::matrices);
        matrices.chain(self.embedding).chain(self.head.map(|(_, head)| head))
    }
}

/// Lists what a rank holds of a model.
pub(crate) struct Holder<'a, P> {
    pub(crate) model: &'a Model,
    pub(crate) shard: &'a Shard,
    pub(crate) split: Split,
    /// Says where a piece is; the number are its bytes as stored. Where nobody looks at pieces, none is made.
    pub(crate) put: &'a mut P,
    /// Whether rows stay where the model's file has them: then rows of experts lie as far apart as there.
    pub(crate) in_file: bool,
}

impl<P: FnMut(&Piece, u64) -> Place> Holder<'_, P> {
    fn rows(&mut self, tensor: Tensor, layer: usize, matrix: Matrix, rows: Range<u64>) -> Held {
        let count = rows.end - rows.start;
        let bytes = count * matrix.row_bytes();
        let place = (self.put)(&Piece { tensor, layer, cut: Cut::Rows(rows) }, bytes);
        Held { place, rows: count, cols: matrix.cols, quant: matrix.quant }
    }

    fn columns(&mut self, tensor: Tensor, layer: usize, matrix: Matrix, cut: Range<u64>) -> Held {
        let cols = cut.end - cut.start;
        let bytes = matrix.rows * matrix.quant.row_bytes(cols);
        let place = (self.put)(&Piece { tensor, layer, cut: Cut::Columns(cut) }, bytes);
        Held { place, rows: matrix.rows, cols, quant: matrix.quant }
    }

    fn vector(&mut self, tensor: Tensor, layer: usize, elements: Range<u64>) -> Place {
        let bytes = (elements.end - elements.start) * 4;
        (self.put)(&Piece { tensor, layer, cut: Cut::Rows(elements) }, bytes)
    }

    pub(crate) fn layer(&mut self, at: usize) -> HeldLayer {
        let (model, shard) = (self.model, self.shard);
        let content = model.layers[at];
        let (hidden, size) = (model.hidden, model.head_size);
        let heads = shard.heads.start * size..shard.heads.end * size;
        let kv = shard.kv_heads.start * size..shard.kv_heads.end * size;
        let reduce = self.split == Split::Reduce;
        let attention_norm = self.vector(Tensor::AttentionNorm, at, 0..hidden);
        let q = self.rows(Tensor::Q, at, content.q, heads.clone());
        let k = self.rows(Tensor::K, at, content.k, kv.clone());
        let v = self.rows(Tensor::V, at, content.v, kv.clone());
        let biases = model.biases.then(|| {
            let parts = [(Projection::Q, &heads), (Projection::K, &kv), (Projection::V, &kv)];
            parts.map(|(of, part)| self.vector(Tensor::Bias(of), at, part.clone()))
        });
        let variant = &model.variant;
        let head_norms = model.head_norms.then(|| {
            // Norms of whole rows are whole on every card.
            let widths = match variant.row_norms {
                true => [model.heads * size, model.kv_heads * size],
                false => [size; 2],
            };
            let norms = [(Projection::Q, widths[0]), (Projection::K, widths[1])];
            norms.map(|(of, width)| self.vector(Tensor::HeadNorm(of), at, 0..width))
        });
        let own = shard.heads.clone();
        let sinks = variant.sinks.then(|| self.vector(Tensor::Sinks, at, own));
        let o = match reduce {
            true => self.columns(Tensor::Output, at, content.o, heads),
            false => self.rows(Tensor::Output, at, content.o, shard.output.clone()),
        };
        let mut row =
            |tensor: Tensor, there: bool| there.then(|| self.vector(tensor, at, 0..hidden));
        let output_bias = row(Tensor::OutputBias, variant.output_bias);
        let post_attention_norm = row(Tensor::PostAttentionNorm, variant.post_norms);
        let ffn_norm = self.vector(Tensor::FfnNorm, at, 0..hidden);
        let (ffn, experts) = match content.experts {
            None => {
                let tensors = [Tensor::Gate, Tensor::Up, Tensor::Down];
                let matrices = [content.gate, content.up, content.down];
                (self.ffn(tensors, at, matrices, &shard.ffn), None)
            }
            Some(experts) => {
                let (ffn, experts) = self.experts(at, experts);
                (ffn, Some(experts))
            }
        };
        let post_ffn_norm =
            variant.post_norms.then(|| self.vector(Tensor::PostFfnNorm, at, 0..hidden));
        let (window, turning) = (content.window, content.turning);
        HeldLayer {
            attention_norm,
            q,
            k,
            v,
            biases,
            head_norms,
            sinks,
            o,
            output_bias,
            post_attention_norm,
            ffn_norm,
            ffn,
            experts,
            post_ffn_norm,
            window,
            turning,
        }
    }

    /// A dense feed-forward network: rows of gate and up, and of down rows or, in a reduce split, columns.
    fn ffn(
        &mut self,
        [gate, up, down]: [Tensor; 3],
        layer: usize,
        matrices: [Matrix; 3],
        own: &Range<u64>,
    ) -> HeldFfn {
        HeldFfn {
            gate: self.rows(gate, layer, matrices[0], own.clone()),
            up: self.rows(up, layer, matrices[1], own.clone()),
            down: match self.split {
                Split::Reduce => self.columns(down, layer, matrices[2], own.clone()),
                _ => self.rows(down, layer, matrices[2], self.shard.down.clone()),
            },
        }
    }

    /// The same parts of every expert, its router, and the shared expert.
    fn experts(&mut self, at: usize, experts: Experts) -> (HeldFfn, HeldExperts) {
        let (content, count) = (self.model.layers[at], experts.count);
        let (ffn, shard) = (self.shard.ffn.clone(), self.shard);
        let (gate, first) = self.each(Tensor::ExpertGate, at, content.gate, (ffn.clone(), count));
        let (up, second) = self.each(Tensor::ExpertUp, at, content.up, (ffn.clone(), count));
        let (down, third) = match self.split {
            Split::Reduce => {
                // Columns of all experts, as if they were one matrix.
                let rows = content.down.rows;
                let all = Matrix { rows: rows * count, ..content.down };
                let held = self.columns(Tensor::ExpertDown, at, all, ffn);
                (Held { rows, ..held }, rows * held.quant.row_bytes(held.cols))
            }
            _ => self.each(Tensor::ExpertDown, at, content.down, (shard.down.clone(), count)),
        };
        let router = self.rows(Tensor::Router, at, experts.router, 0..count);
        let biases = self.model.variant.expert_biases.then(|| {
            let router = self.vector(Tensor::RouterBias, at, 0..count);
            // An element is a row.
            let column = |rows: u64| Matrix { rows, cols: 1, quant: Quant::F32 };
            let (own, all) = (shard.ffn.clone(), 0..content.down.rows);
            let biases = [
                (Tensor::ExpertGateBias, column(content.gate.rows), own.clone()),
                (Tensor::ExpertUpBias, column(content.up.rows), own),
                (Tensor::ExpertDownBias, column(content.down.rows), all),
            ];
            let biases = biases.map(|(tensor, column, rows)| {
                let (held, stride) = self.each(tensor, at, column, (rows, count));
                (held.place, stride)
            });
            (router, biases)
        });
        let shared = experts.shared.map(|own| {
            // Files have its one row as a vector.
            let (cols, quant) = (own.router.cols, own.router.quant);
            let place = self.vector(Tensor::SharedRouter, at, 0..cols);
            let router = Held { place, rows: 1, cols, quant };
            let tensors = [Tensor::SharedGate, Tensor::SharedUp, Tensor::SharedDown];
            let matrices = [own.gate, own.up, own.down];
            (router, self.ffn(tensors, at, matrices, &shard.shared))
        });
        let strides = [first, second, third];
        (HeldFfn { gate, up, down }, HeldExperts { count, strides, router, biases, shared })
    }

    /// Rows of each of some matrices that lie end to end: those of the first, and bytes from each to the next.
    fn each(
        &mut self,
        tensor: Tensor,
        layer: usize,
        matrix: Matrix,
        (rows, count): (Range<u64>, u64),
    ) -> (Held, u64) {
        let (own, row) = (rows.end - rows.start, matrix.row_bytes());
        let cut = Cut::Each { rows, of: matrix.rows, count };
        let place = (self.put)(&Piece { tensor, layer, cut }, count * own * row);
        let apart = if self.in_file { matrix.rows } else { own };
        (Held { place, rows: own, cols: matrix.cols, quant: matrix.quant }, apart * row)
    }

    pub(crate) fn embedding(&mut self) -> Held {
        self.rows(Tensor::Embedding, 0, self.model.embedding, self.shard.vocab.clone())
    }

    pub(crate) fn head(&mut self) -> (Place, Held) {
        let norm = self.vector(Tensor::FinalNorm, 0, 0..self.model.hidden);
        let tensor = if self.model.tied { Tensor::Embedding } else { Tensor::Head };
        (norm, self.rows(tensor, 0, self.model.head, self.shard.vocab.clone()))
    }

    /// Everything that a rank of a stage holds.
    pub(crate) fn all(&mut self, layers: Range<usize>, (first, last): (bool, bool)) -> Holding {
        let layers = layers.map(|at| self.layer(at)).collect();
        let embedding = first.then(|| self.embedding());
        let head = last.then(|| self.head());
        Holding { layers, embedding, head }
    }
}

/// The weights of one card, end to end in one buffer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WeightLayout {
    /// The pieces, each once, and where each begins.
    pub pieces: Vec<(Piece, u64)>,
    /// Bytes of all, with what lies between them.
    pub bytes: u64,
}

impl WeightLayout {
    /// What a rank of a stage holds, in the order of the model.
    pub(crate) fn of(model: &Model, stage: &Stage, rank: usize, ends: (bool, bool)) -> Self {
        let mut layout = WeightLayout::default();
        let mut put = |piece: &Piece, bytes: u64| {
            layout.add(piece, bytes);
            Place { buffer: BufferId(0), offset: 0 }
        };
        let (shard, split) = (&stage.group.shards[rank], stage.group.split);
        Holder { model, shard, split, put: &mut put, in_file: false }
            .all(stage.layers.clone(), ends);
        layout
    }

    /// Every piece and the bytes that it takes.
    fn sized(&self) -> impl Iterator<Item = (&Piece, u64)> {
        let ends = self.pieces.iter().skip(1).map(|(_, offset)| *offset);
        let pieces = self.pieces.iter().zip(ends.chain([self.bytes]));
        pieces.map(|((piece, start), end)| (piece, end - start))
    }

    /// Bytes of this that somebody who holds `other` lacks. Columns are of no use to who needs rows.
    pub(crate) fn missing_in(&self, other: &WeightLayout) -> u64 {
        let lacks = |(piece, bytes): (&Piece, u64)| {
            let same = |known: &&(Piece, u64)| {
                known.0.tensor == piece.tensor && known.0.layer == piece.layer
            };
            let had = other.pieces.iter().find(same).map(|(piece, _)| &piece.cut);
            let (wanted, had) = match (&piece.cut, had) {
                (Cut::Rows(wanted), Some(Cut::Rows(had)))
                | (Cut::Columns(wanted), Some(Cut::Columns(had)))
                | (Cut::Each { rows: wanted, .. }, Some(Cut::Each { rows: had, .. })) => {
                    (wanted, had)
                }
                _ => return bytes,
            };
            let all = wanted.end - wanted.start;
            let both = wanted.end.min(had.end).saturating_sub(wanted.start.max(had.start));
            (bytes as f64 * (all - both.min(all)) as f64 / all.max(1) as f64).round() as u64
        };
        self.sized().map(lacks).sum()
    }

    fn add(&mut self, piece: &Piece, bytes: u64) {
        // Only a tied head is named twice.
        let twice = piece.tensor == Tensor::Embedding
            && self.pieces.iter().any(|(known, _)| known.tensor == Tensor::Embedding);
        if !twice {
            self.pieces.push((piece.clone(), self.bytes));
            self.bytes += padded(bytes);
        }
    }
}

/// Bytes that a piece takes in a card's buffer of weights.
pub(crate) fn padded(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(WEIGHT_ALIGNMENT).unwrap_or(u64::MAX)
}
