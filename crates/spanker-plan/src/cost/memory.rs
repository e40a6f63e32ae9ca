// SPDX-License-Identifier: Apache-2.0
//! What a card has to hold: a list of allocations, which an allocator can replay.

use serde::{Deserialize, Serialize};
use spanker_model::{Layer, Matrix, Model};
use spanker_topology::Bytes;

use super::shard::{Shard, Split, input_type, len};
use crate::request::{MAX_PREFILL, Request};

/// Allocations begin and end on multiples of this.
pub const ALIGNMENT: u64 = 4096;

/// One piece of a card's memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allocation {
    /// What it is for.
    pub name: String,
    /// How large it is, before it is rounded up to [`ALIGNMENT`].
    pub bytes: Bytes,
}

/// What a card's memory is filled with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Footprint {
    /// Weights.
    pub weights: Bytes,
    /// Keys and values.
    pub kv: Bytes,
    /// Activations and buffers for messages.
    pub buffers: Bytes,
}

impl Footprint {
    /// All of it.
    #[must_use]
    pub fn total(self) -> Bytes {
        self.weights + self.kv + self.buffers
    }
}

/// Where a stage stands in its pipeline, and for how many sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) first: bool,
    pub(crate) last: bool,
    /// Sequences whose keys and values are kept.
    pub(crate) sequences: u64,
}

/// Keeps memory for a list of allocations, first come, first placed: what an emulated card does.
///
/// ```
/// use spanker_plan::Arena;
/// use spanker_topology::Bytes;
/// let mut arena = Arena::new(Bytes(10_000));
/// assert_eq!(arena.allocate(Bytes(5_000)), Some(0));
/// assert_eq!(arena.allocate(Bytes(1)), None); // 5,000 bytes take two pages of 4,096
/// ```
#[derive(Debug, Clone)]
pub struct Arena {
    capacity: u64,
    used: u64,
}

impl Arena {
    /// An empty arena.
    #[must_use]
    pub fn new(capacity: Bytes) -> Arena {
        Arena { capacity: capacity.0, used: 0 }
    }

    /// The address of a new piece, or nothing if there is no room.
    pub fn allocate(&mut self, size: Bytes) -> Option<u64> {
        let start = self.used;
        let end = size.0.checked_next_multiple_of(ALIGNMENT)?.checked_add(start)?;
        if end > self.capacity {
            return None;
        }
        self.used = end;
        Some(start)
    }
}

fn rounded(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(ALIGNMENT).unwrap_or(u64::MAX)
}

/// Bytes of the part of a matrix that a rank holds.
fn part(matrix: &Matrix, rows: u64, cols: u64) -> u64 {
    rows.saturating_mul(matrix.quant.row_bytes(cols))
}

/// The matrices of a layer that a rank holds, in bytes, in the order of [`Layer::matrices`].
pub(crate) fn parts(model: &Model, layer: &Layer, split: Split, shard: &Shard) -> [u64; 7] {
    let heads = len(&shard.heads) * model.head_size;
    let kv = len(&shard.kv_heads) * model.head_size;
    let ffn = len(&shard.ffn);
    let (o_cols, down_cols) = match split {
        Split::Reduce => (heads, ffn),
        _ => (layer.o.cols, layer.down.cols),
    };
    [
        part(&layer.q, heads, layer.q.cols),
        part(&layer.k, kv, layer.k.cols),
        part(&layer.v, kv, layer.v.cols),
        part(&layer.o, len(&shard.output), o_cols),
        part(&layer.gate, ffn, layer.gate.cols),
        part(&layer.up, ffn, layer.up.cols),
        part(&layer.down, len(&shard.down), down_cols),
    ]
}

/// Bytes of one of the two caches of a layer.
fn cache(model: &Model, request: &Request, shard: &Shard, sequences: u64) -> u64 {
    let row = request.kv.row_bytes(len(&shard.kv_heads) * model.head_size);
    row.saturating_mul(request.context).saturating_mul(sequences)
}

/// Activations and message buffers: independent of the number of layers.
fn buffers(model: &Model, request: &Request, split: Split, shard: &Shard) -> [u64; 3] {
    let rows =
        request.prefill_tokens().max(request.sequences).min(MAX_PREFILL.max(request.sequences));
    let heads = (len(&shard.heads) + 2 * len(&shard.kv_heads)) * model.head_size;
    let narrow = model.heads * model.head_size;
    let (input, _) = model.layers.first().map_or((4.0, 1), |layer| input_type(layer.down.quant));
    let quantised = (input * model.ffn.max(narrow).max(model.hidden) as f64).ceil() as u64;
    let wide = 4 * (2 * model.hidden + heads + 2 * len(&shard.ffn)) + quantised;
    let logits = 4 * len(&shard.vocab) * request.sequences;
    // One message comes in while another goes out.
    let message = match split {
        Split::Whole => 4 * model.hidden,
        _ => (4 * model.hidden).max(quantised),
    };
    [rows.saturating_mul(wide), logits, 2 * rows.saturating_mul(message)]
}

/// The embedding table and the head, where this stage has them. A tied head is the table.
fn ends(model: &Model, shard: &Shard, place: Place) -> [u64; 2] {
    let rows = len(&shard.vocab);
    let table = if place.first { part(&model.embedding, rows, model.embedding.cols) } else { 0 };
    let head = match place.last {
        true if model.tied && place.first => 0,
        true => part(&model.head, rows, model.head.cols),
        false => 0,
    };
    [table, head]
}

/// What does not depend on the number of layers, rounded.
pub(crate) fn fixed(
    model: &Model,
    request: &Request,
    split: Split,
    shard: &Shard,
    place: Place,
) -> Footprint {
    let weights = ends(model, shard, place).map(rounded);
    let buffers = buffers(model, request, split, shard).map(rounded);
    Footprint {
        weights: Bytes(weights.iter().sum::<u64>().saturating_add(rounded(model.other_bytes))),
        kv: Bytes(0),
        buffers: Bytes(buffers.iter().fold(0, |sum: u64, &piece| sum.saturating_add(piece))),
    }
}

/// What one layer adds, rounded.
pub(crate) fn per_layer(
    model: &Model,
    layer: &Layer,
    request: &Request,
    split: Split,
    shard: &Shard,
    sequences: u64,
) -> Footprint {
    let weights = parts(model, layer, split, shard).map(rounded).iter().sum::<u64>();
    let cache = rounded(cache(model, request, shard, sequences));
    Footprint {
        weights: Bytes(weights.saturating_add(rounded(layer.other_bytes))),
        kv: Bytes(cache.saturating_mul(2)),
        buffers: Bytes(0),
    }
}

/// Everything that a card allocates, in order.
pub(crate) fn allocations(
    model: &Model,
    layers: std::ops::Range<usize>,
    request: &Request,
    split: Split,
    shard: &Shard,
    place: Place,
) -> Vec<Allocation> {
    let mut list = Vec::new();
    let mut add = |name: String, bytes: u64| {
        if bytes > 0 {
            list.push(Allocation { name, bytes: Bytes(bytes) });
        }
    };
    let [table, head] = ends(model, shard, place);
    add("embedding".into(), table);
    add("head".into(), head);
    add("norms".into(), model.other_bytes);
    for index in layers {
        let layer = &model.layers[index];
        let sizes = parts(model, layer, split, shard);
        for ((name, _), bytes) in layer.matrices().iter().zip(sizes) {
            add(format!("layer {index} {name}"), bytes);
        }
        add(format!("layer {index} norms"), layer.other_bytes);
        for name in ["keys", "values"] {
            let bytes = cache(model, request, shard, place.sequences);
            add(format!("layer {index} {name}"), bytes);
        }
    }
    let names = ["activations", "logits", "messages"];
    for (name, bytes) in names.iter().zip(buffers(model, request, split, shard)) {
        add((*name).into(), bytes);
    }
    list
}
