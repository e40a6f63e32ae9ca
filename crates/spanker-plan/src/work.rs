// SPDX-License-Identifier: Apache-2.0
//! What a card does, operator by operator: the words in which programs are written, priced and run. How work
//! becomes bytes for a device is `spanker-runtime`'s; whether a place lies inside a buffer is the card's to know.

use std::sync::Arc;

use spanker_collective::DType;
pub use spanker_model::{Activation, MAX_EXPERTS};
use spanker_model::{KvShape, Quant};

/// A buffer in a card's memory. Handles are numbers that the card gives out once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub u64);

/// A byte of a buffer, from which something begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// The buffer.
    pub buffer: BufferId,
    /// Bytes from its start.
    pub offset: u64,
}

/// An element type and an operation, in the ABI's numbers (`TYPE_*` and `OP_*` of its header).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fold {
    /// The type.
    pub dtype: u16,
    /// The operation.
    pub op: u16,
}

impl Fold {
    /// Bytes of an element; none for a type that is unknown.
    #[must_use]
    pub fn size(self) -> u64 {
        DType::from_code(self.dtype).map_or(0, DType::size) as u64
    }
}

/// What a receive does with what comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Landing {
    /// Stores it.
    Store,
    /// `local = incoming op local`.
    FoldFirst(Fold),
    /// `local = local op incoming`.
    FoldSecond(Fold),
}

/// The most sources that one reduction takes.
pub const MAX_SOURCES: usize = 256;

/// The most bytes that one [`Work::Write`] stores.
pub const MAX_WRITE: u64 = 1 << 20;

/// The most numbers that [`Work::Best`] picks.
pub const MAX_BEST: u32 = 4096;

/// Where a row of a step lies in its sequence: 8 bytes, its position and the first entry of its block table, both u32.
pub const ROW_BYTES: u64 = 8;

/// The KV cache of one layer, in blocks of [`spanker_model::KV_BLOCK`] positions, and how rows find theirs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvCache {
    /// The first block.
    pub blocks: Place,
    /// Blocks that there are.
    pub count: u64,
    /// Where each row of the step lies: [`ROW_BYTES`] for each.
    pub rows: Place,
    /// Block tables: a u32 for each block of a sequence.
    pub tables: Place,
    /// Entries of all tables.
    pub entries: u64,
    /// Heads of keys and of values.
    pub heads: u64,
    /// Numbers of a head.
    pub head_size: u64,
    /// GGML's number of the type that they are stored as: F16, Q8_0 or Q4_0.
    pub quant: u32,
}

impl KvCache {
    /// How blocks lie in memory; nothing for a type that is unknown.
    #[must_use]
    pub fn shape(&self) -> Option<KvShape> {
        let (heads, head_size) = (self.heads, self.head_size);
        Quant::from_ggml_id(self.quant).map(|quant| KvShape { heads, head_size, quant })
    }
}

/// Bytes of a pick: the number of an expert, u32, and its weight, f32.
pub const PICK_BYTES: u64 = 8;

/// Which experts the rows of a step meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Picks {
    /// For each row its picks, [`PICK_BYTES`] each.
    pub at: Place,
    /// Picks of a row.
    pub used: u64,
    /// Experts that there are.
    pub experts: u64,
}

/// How products of queries and keys become weights of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Scores {
    /// What products are multiplied with: the bits of an f32.
    pub scale: u32,
    /// What they come near to and never pass, `cap * tanh(score / cap)`: the bits of an f32; 0 is none.
    pub cap: u32,
    /// How many positions a row sees, its own included; 0 is all up to it.
    pub window: u64,
    /// A score of each head of a row that no position has, f32: its weight is lost.
    pub sinks: Option<Place>,
}

impl Scores {
    /// Of all positions up to the row's, and only multiplied.
    #[must_use]
    pub const fn plain(scale: u32) -> Scores {
        Scores { scale, cap: 0, window: 0, sinks: None }
    }

    /// The first position that a row sees.
    #[must_use]
    pub const fn first_seen(&self, position: u64) -> u64 {
        match self.window {
            0 => 0,
            window => (position + 1).saturating_sub(window),
        }
    }

    /// Whether they are.
    #[must_use]
    pub const fn is_plain(&self) -> bool {
        self.cap == 0 && self.window == 0 && self.sinks.is_none()
    }
}

/// One thing that a card does.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Work {
    /// Copies bytes within the card's memory.
    Copy {
        /// The source.
        from: Place,
        /// The destination, which does not overlap the source.
        into: Place,
        /// Bytes.
        length: u64,
    },
    /// Repeats four bytes.
    Fill {
        /// The destination.
        into: Place,
        /// Bytes, a multiple of 4.
        length: u64,
        /// What is repeated.
        pattern: u32,
    },
    /// `into = sources[0] op sources[1] op ..`, in that order.
    Reduce {
        /// The destination; it may be one of the sources.
        into: Place,
        /// The operands.
        sources: Vec<Place>,
        /// Elements of each.
        elements: u64,
        /// Type and operation.
        fold: Fold,
        /// What the result is divided by, if more than 1.
        divisor: u32,
    },
    /// `out (m x n, f32) = a (m rows of k) times the transpose of b (n rows of k)`.
    Matmul {
        /// The rows of a.
        a: Place,
        /// The rows of b.
        b: Place,
        /// The product.
        out: Place,
        /// Rows of a, columns of both, rows of b.
        shape: [u64; 3],
        /// GGML's numbers of the types of a and b. Every card knows Q4_K for both, and weights b with inputs
        /// a as GGML's kernels take them: Q8_0 for blocks of 32, Q8_K for blocks of 256, f32 for plain ones.
        types: [u32; 2],
    },
    /// Rows of a table of weights as f32: for each id from `first` to `first + count - 1`, its row of the
    /// table. Rows of other ids are left alone.
    Embed {
        /// `count` rows of weights.
        table: Place,
        /// The ids, u32.
        ids: Place,
        /// One row for each id.
        into: Place,
        /// Ids.
        rows: u64,
        /// Numbers of a row.
        width: u64,
        /// GGML's number of the table's type.
        quant: u32,
        /// The id of the table's first row.
        first: u32,
        /// Rows of the table.
        count: u32,
    },
    /// Root-mean-square norm of rows of f32.
    Norm {
        /// The rows.
        from: Place,
        /// One row, which every result is multiplied with.
        weight: Place,
        /// The result; it may be `from`.
        into: Place,
        /// Rows.
        rows: u64,
        /// Numbers of a row.
        width: u64,
        /// What is added to the mean of the squares: the bits of an f32.
        epsilon: u32,
    },
    /// Rows of f32 as what weights are multiplied with.
    Quantize {
        /// The rows.
        from: Place,
        /// Their blocks.
        into: Place,
        /// Rows.
        rows: u64,
        /// Numbers of a row, whole blocks.
        width: u64,
        /// GGML's number of the blocks' type: Q8_0, Q8_K or, unchanged, F32.
        quant: u32,
    },
    /// Rotates the heads of rows of f32 by the rows' positions, in place.
    Rotate {
        /// The rows.
        data: Place,
        /// `dims` f32 for each row: cosine and sine of each pair.
        table: Place,
        /// Rows.
        rows: u64,
        /// Heads of a row.
        heads: u64,
        /// Numbers of a head.
        head_size: u64,
        /// Of these, the first that are rotated; an even number.
        dims: u64,
        /// Which numbers are pairs (`PAIRS_*` of the ABI's header).
        pairs: u32,
    },
    /// Rounds f32 to f16.
    Halve {
        /// The f32s.
        from: Place,
        /// The f16s.
        into: Place,
        /// How many.
        elements: u64,
    },
    /// Attention of rows of queries over the positions up to each.
    Attend {
        /// Rows of `heads` heads of f32.
        queries: Place,
        /// A row of `kv_heads` heads of f16 for each of `past + rows` positions.
        keys: Place,
        /// Likewise.
        values: Place,
        /// Rows as those of the queries; it may be `queries`.
        into: Place,
        /// Rows of queries. Row `i` sees positions 0 to `past + i`.
        rows: u64,
        /// Heads of a row.
        heads: u64,
        /// Heads of a position.
        kv_heads: u64,
        /// Numbers of a head.
        head_size: u64,
        /// Head `h` uses head `(offset + h) / group` of keys and values.
        group: u64,
        /// See `group`.
        offset: u64,
        /// Positions before the first row.
        past: u64,
        /// What products of queries and keys are multiplied with: the bits of an f32.
        scale: u32,
    },
    /// What the gate of a feed-forward network opens, of f32: see [`Activation`].
    Gate {
        /// What opens.
        gate: Place,
        /// What passes.
        up: Place,
        /// The result; it may be `gate` or `up`.
        into: Place,
        /// How many.
        elements: u64,
        /// What it does.
        activation: Activation,
    },
    /// Multiplies f32 in place, and then has them come near to a cap and never pass it, `cap * tanh(x / cap)`.
    Scale {
        /// The numbers.
        data: Place,
        /// How many.
        elements: u64,
        /// What they are multiplied with: the bits of an f32.
        factor: u32,
        /// The cap: the bits of an f32; 0 is none.
        cap: u32,
    },
    /// Copies pieces at a stride.
    Rows {
        /// The first piece of the source.
        from: Place,
        /// The first piece of the destination. From their first byte to their last, source and destination
        /// do not overlap.
        into: Place,
        /// Pieces.
        rows: u64,
        /// Bytes of a piece.
        length: u64,
        /// Bytes from a piece of the source to the next, at least `length`.
        from_stride: u64,
        /// The same for the destination.
        into_stride: u64,
    },
    /// The largest of some f32, each as its place (u32) and itself, the largest first.
    Best {
        /// The numbers.
        from: Place,
        /// 8 bytes for each of `k`. If there are not so many, the rest is place `u32::MAX` with minus
        /// infinity.
        into: Place,
        /// How many there are.
        count: u64,
        /// How many are wanted, from 1 to [`MAX_BEST`].
        k: u32,
        /// What is added to places.
        first: u32,
    },
    /// Stores bytes that came with the work.
    Write {
        /// The destination.
        into: Place,
        /// The bytes, a multiple of 4, at most [`MAX_WRITE`].
        bytes: Arc<[u8]>,
    },
    /// Adds one row of f32 to every row.
    AddRow {
        /// The rows, which become the sums.
        into: Place,
        /// What is added.
        row: Place,
        /// Rows.
        rows: u64,
        /// Numbers of a row.
        width: u64,
    },
    /// Rotates the heads of rows of f32 by positions that lie in memory, in place.
    RotateRows {
        /// The rows.
        data: Place,
        /// `dims` f32 for each position: cosine and sine of each pair.
        table: Place,
        /// Positions of the table. Rows of later ones are left alone.
        positions: u64,
        /// Where each row lies: [`ROW_BYTES`] for each.
        at: Place,
        /// Rows.
        rows: u64,
        /// Heads of a row.
        heads: u64,
        /// Numbers of a head.
        head_size: u64,
        /// Of these, the first that are rotated; an even number.
        dims: u64,
        /// Which numbers are pairs (`PAIRS_*` of the ABI's header).
        pairs: u32,
    },
    /// Puts keys and values of rows into the blocks of their sequences. Rows whose block is not there are left out.
    Keep {
        /// Rows of f32, the cache's heads each.
        keys: Place,
        /// Likewise.
        values: Place,
        /// Where they go.
        cache: KvCache,
        /// Rows.
        rows: u64,
    },
    /// Attention of rows of queries over the blocks of their sequences, up to each row's position. Rows of which a block
    /// is not there are left alone.
    AttendBlocks {
        /// Rows of `heads` heads of f32.
        queries: Place,
        /// Keys and values.
        cache: KvCache,
        /// Rows as those of the queries; it may be `queries`.
        into: Place,
        /// Rows of queries.
        rows: u64,
        /// Heads of a row.
        heads: u64,
        /// Head `h` uses head `(offset + h) / group` of keys and values.
        group: u64,
        /// See `group`.
        offset: u64,
        /// How products of queries and keys become weights.
        scores: Scores,
    },
    /// Picks experts for rows by the logits of a router: those with the largest, among equals the lowest number first.
    /// What is not a number comes last.
    Route {
        /// A row of f32 for each row, one for each expert.
        logits: Place,
        /// Where the picks go, the one with the largest logit first.
        picks: Picks,
        /// Rows.
        rows: u64,
        /// How they are weighed: the code of a [`spanker_model::Gating`].
        gating: u32,
    },
    /// Products with the experts that rows have picked: for each pick a row of results. Results of experts that are
    /// not there are left alone.
    MatmulExperts {
        /// The rows of a: one for each row, or one for each pick.
        a: Place,
        /// The rows of the first expert's b.
        b: Place,
        /// A row of `n` f32 for each pick, row by row.
        out: Place,
        /// The picks.
        picks: Picks,
        /// Rows, columns of both, rows of an expert's b.
        shape: [u64; 3],
        /// GGML's numbers of the types of a and b, as those of a [`Work::Matmul`].
        types: [u32; 2],
        /// Bytes from an expert's b to the next one's.
        stride: u64,
        /// Whether each pick has a row of a of its own.
        apart: bool,
    },
    /// Sums of rows of f32, each times the weight of its pick, in the order of the picks.
    Combine {
        /// A row for each pick.
        from: Place,
        /// The picks, of which the weights count.
        picks: Picks,
        /// A row for each row.
        into: Place,
        /// Rows.
        rows: u64,
        /// Numbers of a row.
        width: u64,
        /// Whether the sums are added to what is there.
        add: bool,
    },
    /// Adds rows of a table, one for each expert, to rows of f32: to a row of each pick that of its expert, or to a row
    /// of each row those of all its picks, each times its weight, in the order of the picks. Experts that are not there
    /// add nothing.
    AddPicked {
        /// A row for each pick, or for each row.
        into: Place,
        /// The row of the first expert.
        table: Place,
        /// The picks.
        picks: Picks,
        /// Rows.
        rows: u64,
        /// Numbers of a row.
        width: u64,
        /// Bytes from an expert's row to the next one's, a multiple of 4.
        stride: u64,
        /// Whether there is one row for all picks of a row, to which weighed rows are added.
        weighed: bool,
    },
    /// Sends bytes to the card at a port.
    Send {
        /// The source.
        from: Place,
        /// Bytes.
        length: u64,
        /// The port.
        port: u32,
        /// What the receiver must expect.
        tag: u32,
    },
    /// Receives bytes from the card at a port.
    Receive {
        /// The destination.
        into: Place,
        /// Bytes.
        length: u64,
        /// The port.
        port: u32,
        /// What the sender must say.
        tag: u32,
        /// What becomes of the bytes.
        landing: Landing,
    },
    /// Waits for everything before it.
    Fence {
        /// And for this card time, in picoseconds, at most 2^63; 0 is any.
        not_before_ps: u64,
    },
}

/// Work and what it waits for.
///
/// Descriptors start in order. All are complete before the next one starts, except sends and receives: these
/// run beside what follows, until a fence.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Descriptor {
    /// The place, from 0, of an earlier send or receive of the same submission that must be complete
    /// first.
    pub after: Option<u32>,
    /// The work.
    pub work: Work,
}

impl From<Work> for Descriptor {
    fn from(work: Work) -> Self {
        Descriptor { after: None, work }
    }
}

impl Work {
    /// Every place that the work names.
    pub fn places_mut(&mut self) -> Vec<&mut Place> {
        match self {
            Work::Copy { from, into, .. }
            | Work::Quantize { from, into, .. }
            | Work::Halve { from, into, .. }
            | Work::Rows { from, into, .. }
            | Work::Best { from, into, .. } => vec![from, into],
            Work::Fill { into, .. } | Work::Receive { into, .. } | Work::Write { into, .. } => {
                vec![into]
            }
            Work::AddRow { into, row, .. } => vec![into, row],
            Work::RotateRows { data, table, at, .. } => vec![data, table, at],
            Work::Keep { keys, values, cache, .. } => {
                vec![keys, values, &mut cache.blocks, &mut cache.rows, &mut cache.tables]
            }
            Work::AttendBlocks { queries, cache, into, scores, .. } => {
                let places = [queries, &mut cache.blocks, &mut cache.rows, &mut cache.tables, into];
                places.into_iter().chain(&mut scores.sinks).collect()
            }
            Work::Route { logits, picks, .. } => vec![logits, &mut picks.at],
            Work::MatmulExperts { a, b, out, picks, .. } => vec![a, b, out, &mut picks.at],
            Work::Combine { from, picks, into, .. } => vec![from, &mut picks.at, into],
            Work::AddPicked { into, table, picks, .. } => vec![into, table, &mut picks.at],
            Work::Scale { data, .. } => vec![data],
            Work::Reduce { into, sources, .. } => {
                sources.iter_mut().chain(std::iter::once(into)).collect()
            }
            Work::Matmul { a, b, out, .. } => vec![a, b, out],
            Work::Send { from, .. } => vec![from],
            Work::Embed { table, ids, into, .. } => vec![table, ids, into],
            Work::Norm { from, weight, into, .. } => vec![from, weight, into],
            Work::Rotate { data, table, .. } => vec![data, table],
            Work::Attend { queries, keys, values, into, .. } => vec![queries, keys, values, into],
            Work::Gate { gate, up, into, .. } => vec![gate, up, into],
            Work::Fence { .. } => Vec::new(),
        }
    }
}
