// SPDX-License-Identifier: Apache-2.0
//! The buffers of a card: what each is for and how large it has to be.

use ggml_spanker::input_type;
use spanker_model::{Model, Quant};
use spanker_plan::{Split, Stage};
use spanker_runtime::{BufferId, Place};

use super::{Space, len};

/// What a buffer is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Room {
    /// Cosines and sines of all positions.
    Table,
    /// Keys and values of all layers.
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
    /// What the heads found.
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
}

const ROOMS: usize = Room::Relay as usize + 1;

/// The most candidates that a card gives.
pub(crate) const MOST_BEST: u64 = 1024;

/// The buffers of one card.
#[derive(Debug, Clone)]
pub(crate) struct Rooms([BufferId; ROOMS]);

impl Rooms {
    /// Buffers by what they are for. What is not listed has none.
    pub(crate) fn new(buffers: impl IntoIterator<Item = (Room, BufferId)>) -> Rooms {
        let mut all = [BufferId(0); ROOMS];
        for (room, buffer) in buffers {
            all[room as usize] = buffer;
        }
        Rooms(all)
    }

    pub(crate) fn place(&self, room: Room) -> Place {
        Place { buffer: self.0[room as usize], offset: 0 }
    }
}

/// The rooms that a card needs, with their bytes.
pub(crate) fn sizes(
    model: &Model,
    stage: &Stage,
    rank: usize,
    Space { context, batch }: Space,
    dims: u64,
    (first, last): (bool, bool),
) -> Vec<(Room, u64)> {
    let shard = &stage.group.shards[rank];
    let (rows, context) = (batch as u64, context as u64);
    let (hidden, size) = (model.hidden, model.head_size);
    let (heads, kv, ffn) = (len(&shard.heads) * size, len(&shard.kv_heads) * size, len(&shard.ffn));
    let ranks = stage.group.cards.len() as u64;
    let layers = &model.layers[stage.layers.clone()];
    let inputs = |quant: Quant| {
        let used = |weights: Quant| input_type(weights) == quant;
        layers.iter().any(|l| [l.q, l.k, l.v, l.gate, l.up].iter().any(|m| used(m.quant)))
            || (last && used(model.head.quant))
    };
    let block = |weights: Quant, width: u64| input_type(weights).row_bytes(width);
    let joined = |layer: &spanker_model::Layer| {
        let (q, f) = (model.heads * size, model.ffn);
        block(layer.o.quant, q).max(block(layer.down.quant, f))
    };
    let whole = layers.iter().map(joined).max().unwrap_or(0);
    let gathers = stage.group.split == Split::Gather;
    let mut list = vec![
        (Room::Table, context * dims * 4),
        (Room::Kv, layers.len() as u64 * 2 * context * kv * 2),
        (Room::X, rows * hidden * 4),
        (Room::H, rows * hidden * 4),
        (Room::Queries, rows * heads * 4),
        (Room::Keys, rows * kv * 4),
        (Room::Values, rows * kv * 4),
        (Room::Heads, rows * heads * 4),
        (Room::Whole, rows * whole),
        (Room::Y, rows * hidden * 4),
        (Room::Gate, rows * ffn * 4),
        (Room::Up, rows * ffn * 4),
    ];
    if inputs(Quant::Q8_0) {
        list.push((Room::Input, rows * Quant::Q8_0.row_bytes(hidden)));
    }
    if inputs(Quant::Q8K) {
        list.push((Room::InputK, rows * Quant::Q8K.row_bytes(hidden)));
    }
    if gathers {
        let part = len(&shard.output).max(len(&shard.down)) * 4;
        list.push((Room::Part, rows * part.max(whole)));
        list.push((Room::Wide, rows * (model.heads * size).max(model.ffn) * 4));
    }
    if first {
        list.push((Room::Ids, rows * 4));
    }
    if last {
        list.push((Room::Logits, len(&shard.vocab) * 4));
        list.push((Room::Best, MOST_BEST * 8));
        list.push((Room::AllBest, ranks * MOST_BEST * 8));
    }
    if !(first && last) {
        list.push((Room::Relay, rows * hidden * 4));
    }
    list
}
