// SPDX-License-Identifier: Apache-2.0
//! The buffers of a card: what each is for and how large it is. A runner allocates exactly these.

use spanker_model::{Model, Quant};
use spanker_topology::ExchangeKind;

use super::audit::{Audit, capacity};
use crate::cost::shard::{Split, len};
use crate::plan::Stage;
use crate::work::{BufferId, Place};

/// What a buffer is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Buffer {
    /// The card's weights.
    Weights,
    /// Cosines and sines of all positions.
    Table,
    /// The KV cache of all layers.
    Kv,
    /// Token ids.
    Ids,
    /// The residual stream.
    X,
    /// Normed rows.
    H,
    /// Normed rows as Q8_0.
    Input,
    /// Normed rows as Q8_K.
    InputK,
    /// Queries.
    Queries,
    /// New keys.
    Keys,
    /// New values.
    Values,
    /// Results of the heads.
    Heads,
    /// This rank's part of what is gathered.
    Part,
    /// Inputs of the second product of a pair.
    Whole,
    /// The same as f32, where blocks would be cut.
    Wide,
    /// Results of the second product of a pair.
    Y,
    /// The gate.
    Gate,
    /// The way up.
    Up,
    /// Logits.
    Logits,
    /// Candidates of this card.
    Best,
    /// Candidates of all cards.
    AllBest,
    /// What is passed on to the next stage's cards.
    Relay,
    /// Parts of a collective, padded to the longest.
    Padded,
    /// Working memory of collectives.
    Working,
    /// Messages of collectives that are passed on.
    PassedOn,
    /// What operators read and wrote, for the host to compute again.
    Audit,
}

const BUFFERS: usize = Buffer::Audit as usize + 1;

impl Buffer {
    /// The name that reports use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Buffer::Weights => "weights",
            Buffer::Kv => "KV cache",
            Buffer::Table => "positions",
            Buffer::Ids => "tokens",
            Buffer::Audit => "audit",
            Buffer::Logits | Buffer::Best | Buffer::AllBest => "logits",
            Buffer::Relay | Buffer::Padded | Buffer::Working | Buffer::PassedOn => "messages",
            _ => "activations",
        }
    }

    /// The number that stands for the buffer in a program that is bound to no card.
    #[must_use]
    pub const fn symbol(self) -> BufferId {
        BufferId(self as u64)
    }
}

/// The most candidates that a card gives for one sequence.
pub const MAX_CANDIDATES: u64 = 1024;

/// What a card has to have room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// Tokens of a sequence.
    pub context: u64,
    /// Rows of a step.
    pub batch: u64,
    /// Sequences.
    pub sequences: u64,
    /// How much of a step is checked.
    pub audit: Audit,
}

/// The buffers of one card, by what they are for.
#[derive(Debug, Clone)]
pub(crate) struct BufferIds([BufferId; BUFFERS]);

impl BufferIds {
    /// Buffers by what they are for. What is not listed has none.
    pub(crate) fn new(buffers: impl IntoIterator<Item = (Buffer, BufferId)>) -> BufferIds {
        let mut all = [BufferId(0); BUFFERS];
        for (buffer, id) in buffers {
            all[buffer as usize] = id;
        }
        BufferIds(all)
    }

    /// Every buffer by its symbol.
    pub(crate) fn symbols() -> BufferIds {
        BufferIds(std::array::from_fn(|at| BufferId(at as u64)))
    }

    pub(crate) fn place(&self, buffer: Buffer) -> Place {
        Place { buffer: self.0[buffer as usize], offset: 0 }
    }
}

/// What exchanges of a group need besides the parts themselves: for each byte that a collective carries, bytes
/// of working memory and of memory for messages that a card passes on, and a remainder for each.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Overheads {
    pub(crate) working: f64,
    pub(crate) passed_on: f64,
    pub(crate) slack: u64,
}

impl Overheads {
    fn bytes(self, carried: u64) -> (u64, u64) {
        let of = |part: f64| match part > 0.0 {
            true => ((carried as f64 * part).ceil() as u64).saturating_add(self.slack),
            false => 0,
        };
        (of(self.working), of(self.passed_on))
    }
}

/// How a group exchanges.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Exchanging {
    pub(crate) kind: ExchangeKind,
    pub(crate) overheads: Overheads,
}

/// The buffers that a card needs besides its weights, with their bytes.
pub(crate) fn sizes(
    model: &Model,
    stage: &Stage,
    rank: usize,
    space: Space,
    (first, last): (bool, bool),
    exchanging: Exchanging,
) -> Vec<(Buffer, u64)> {
    let Space { context, batch, sequences, audit } = space;
    let shard = &stage.group.shards[rank];
    let rows = batch.max(sequences);
    let (hidden, size) = (model.hidden, model.head_size);
    let (heads, kv, ffn) = (len(&shard.heads) * size, len(&shard.kv_heads) * size, len(&shard.ffn));
    let ranks = stage.group.cards.len() as u64;
    let layers = &model.layers[stage.layers.clone()];
    let inputs = |quant: Quant| {
        let used = |weights: Quant| weights.input() == quant;
        layers.iter().any(|l| [l.q, l.k, l.v, l.gate, l.up].iter().any(|m| used(m.quant)))
            || (last && used(model.head.quant))
    };
    let block = |weights: Quant, width: u64| weights.input().row_bytes(width);
    let joined = |layer: &spanker_model::Layer| {
        let (q, f) = (model.heads * size, model.ffn);
        block(layer.o.quant, q).max(block(layer.down.quant, f))
    };
    let whole = layers.iter().map(joined).max().unwrap_or(0);
    let gathers = stage.group.split == Split::Gather;
    let times = |one: u64, other: u64| one.saturating_mul(other);
    let cached = times(times(layers.len() as u64 * 2, times(context, sequences)), kv * 2);
    let mut list = vec![
        (Buffer::Table, times(context, model.rope_dims * 4)),
        (Buffer::Kv, cached),
        (Buffer::X, rows * hidden * 4),
        (Buffer::H, rows * hidden * 4),
        (Buffer::Queries, rows * heads * 4),
        (Buffer::Keys, rows * kv * 4),
        (Buffer::Values, rows * kv * 4),
        (Buffer::Heads, rows * heads * 4),
        (Buffer::Whole, rows * whole),
        (Buffer::Y, rows * hidden * 4),
        (Buffer::Gate, rows * ffn * 4),
        (Buffer::Up, rows * ffn * 4),
    ];
    if inputs(Quant::Q8_0) {
        list.push((Buffer::Input, rows * Quant::Q8_0.row_bytes(hidden)));
    }
    if inputs(Quant::Q8K) {
        list.push((Buffer::InputK, rows * Quant::Q8K.row_bytes(hidden)));
    }
    if gathers {
        let part = len(&shard.output).max(len(&shard.down)) * 4;
        list.push((Buffer::Part, rows * part.max(whole)));
        list.push((Buffer::Wide, rows * (model.heads * size).max(model.ffn) * 4));
    }
    if first {
        list.push((Buffer::Ids, rows * 4));
    }
    if last {
        list.push((Buffer::Logits, sequences * len(&shard.vocab) * 4));
        list.push((Buffer::Best, sequences * MAX_CANDIDATES * 8));
        list.push((Buffer::AllBest, ranks * sequences * MAX_CANDIDATES * 8));
    }
    if !(first && last) {
        list.push((Buffer::Relay, rows * hidden * 4));
    }
    if ranks > 1 && exchanging.kind == ExchangeKind::Schedules {
        let carried = carried(model, stage, rows, sequences, (first, last));
        let (working, passed_on) = exchanging.overheads.bytes(carried);
        list.push((Buffer::Padded, carried));
        list.push((Buffer::Working, working.max(1)));
        list.push((Buffer::PassedOn, passed_on.max(1)));
    }
    if !audit.is_none() {
        list.push((Buffer::Audit, capacity(model, stage, rank, space)));
    }
    list
}

/// The most bytes that one collective of a stage carries.
fn carried(
    model: &Model,
    stage: &Stage,
    rows: u64,
    sequences: u64,
    (first, last): (bool, bool),
) -> u64 {
    let group = &stage.group;
    let ranks = group.cards.len() as u64;
    let most = |part: fn(&crate::Shard) -> u64| group.shards.iter().map(part).max().unwrap_or(0);
    let mut bytes = 0;
    match group.split {
        Split::Gather => {
            let heads = most(|s| len(&s.heads)) * model.head_size;
            let ffn = most(|s| len(&s.ffn));
            let rows_out = most(|s| len(&s.output).max(len(&s.down)));
            // Blocks are never longer than the numbers that they stand for.
            bytes = bytes.max(rows * ranks * heads.max(ffn).max(rows_out) * 4);
        }
        _ => bytes = bytes.max(rows * model.hidden * 4),
    }
    if first {
        bytes = bytes.max(rows * model.hidden * 4);
    }
    if last {
        bytes = bytes.max(sequences * ranks * MAX_CANDIDATES * 8);
    }
    bytes
}
