// SPDX-License-Identifier: Apache-2.0
//! What a card has to hold: the buffers of its program, as an allocator of whole pages has them.

use serde::{Deserialize, Serialize};
use spanker_model::{KvShape, Model};
use spanker_topology::Bytes;

use super::shard::{Shard, Split, len};
use crate::program::{Buffer, Holder, Piece, Sizing, Space, Tensor, WindowCache, padded};
use crate::work::BufferId;

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
    /// Steps that are under way at a time.
    pub(crate) turns: u64,
}

impl Place {
    pub(crate) fn ends(self) -> (bool, bool) {
        (self.first, self.last)
    }
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
    bytes.max(1).checked_next_multiple_of(ALIGNMENT).unwrap_or(u64::MAX)
}

impl Footprint {
    /// The same with one more buffer, in whole pages.
    pub(crate) fn and(mut self, buffer: Buffer, bytes: u64) -> Footprint {
        let part = match buffer {
            Buffer::Weights => &mut self.weights,
            Buffer::Kv => &mut self.kv,
            _ => &mut self.buffers,
        };
        *part = Bytes(part.0.saturating_add(rounded(bytes)));
        self
    }
}

/// What a rank's buffers take in whole pages, apart from its weights.
pub(crate) fn buffers(sizing: &Sizing<'_>, rank: usize) -> Footprint {
    let mut sum = Footprint::default();
    sizing.each(rank, |buffer, bytes| sum = sum.and(buffer, bytes));
    sum
}

/// Bytes of the weights that a rank holds at the ends of the model; nothing is rounded.
pub(crate) fn ends(model: &Model, shard: &Shard, split: Split, ends: (bool, bool)) -> u64 {
    let (mut bytes, mut embedded) = (0u64, false);
    let mut put = |piece: &Piece, more: u64| {
        // A tied head is the embedding table, which is there once.
        let twice = piece.tensor == Tensor::Embedding && std::mem::replace(&mut embedded, true);
        bytes = bytes.saturating_add(if twice { 0 } else { padded(more) });
        crate::work::Place { buffer: BufferId(0), offset: 0 }
    };
    Holder { model, shard, split, put: &mut put, in_file: false }.all(0..0, ends);
    bytes
}

/// What one layer adds; nothing is rounded.
pub(crate) fn per_layer(
    model: &Model,
    layer: usize,
    shard: &Shard,
    split: Split,
    space: Space,
) -> Footprint {
    let mut weights = 0u64;
    let mut put = |_: &Piece, bytes: u64| {
        weights = weights.saturating_add(padded(bytes));
        crate::work::Place { buffer: BufferId(0), offset: 0 }
    };
    Holder { model, shard, split, put: &mut put, in_file: false }.layer(layer);
    let (heads, head_size) = (len(&shard.kv_heads), model.head_size);
    let kept = KvShape { heads, head_size, quant: space.kv };
    let windows = WindowCache::of(model, space);
    let blocks = WindowCache::of_layer(windows, model.layers[layer].window, space);
    Footprint {
        weights: Bytes(weights),
        kv: Bytes(kept.block_bytes().saturating_mul(blocks)),
        buffers: Bytes(0),
    }
}

/// How many layers fit into `usable` bytes, whichever of these in a row they are, where some are larger than others.
pub(crate) fn most_in_a_row(
    fixed: Footprint,
    layers: impl Iterator<Item = Footprint>,
    usable: u64,
) -> u64 {
    let each: Vec<u64> = layers.map(|layer| layer.total().0).collect();
    // Weights and keys and values are rounded up to pages.
    let taken = fixed.total().0.saturating_add(2 * ALIGNMENT);
    let rest = usable.saturating_sub(taken);
    let (mut end, mut sum, mut most) = (0, 0u64, each.len());
    for start in 0..each.len() {
        while end < each.len() && sum.saturating_add(each[end]) <= rest {
            sum += each[end];
            end += 1;
        }
        if end < each.len() {
            most = most.min(end - start);
        }
        match end > start {
            true => sum -= each[start],
            false => end = start + 1,
        }
    }
    most as u64
}

/// How many layers fit into `usable` bytes.
pub(crate) fn most_layers(fixed: Footprint, each: Footprint, usable: u64) -> u64 {
    let taken = |layers: u64| {
        let sum = |fixed: Bytes, each: Bytes| {
            rounded(fixed.0.saturating_add(each.0.saturating_mul(layers)))
        };
        let weights = sum(fixed.weights, each.weights);
        weights.saturating_add(sum(fixed.kv, each.kv)).saturating_add(fixed.buffers.0)
    };
    let rest = usable.saturating_sub(fixed.weights.0.saturating_add(fixed.buffers.0));
    let most = rest / each.total().0.max(1);
    // Rounding takes at most two pages.
    (0..=most).rev().take(4).find(|&layers| taken(layers) <= usable).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_layers_fit_as_of_the_worst_that_are_in_a_row() {
        let of = |kv: u64| Footprint { weights: Bytes(100), kv: Bytes(kv), ..Footprint::default() };
        let fit = |layers: &[u64], usable: u64| {
            let fixed = Footprint { buffers: Bytes(50), ..Footprint::default() };
            let room = usable + 50 + 2 * ALIGNMENT;
            most_in_a_row(fixed, layers.iter().map(|&kv| of(kv)), room)
        };
        // One of three layers keeps all positions.
        let layers = [10, 10, 400, 10, 10, 400];
        assert_eq!(fit(&layers, 6 * 100 + 840), 6);
        assert_eq!(
            fit(&layers, 6 * 100 + 839),
            5,
            "any five have two of the large ones, or are smaller"
        );
        assert_eq!(fit(&layers, 500 + 2), 1, "400 and 100, and what is beside it needs 110");
        assert_eq!(fit(&layers, 499), 0);
        // The largest counted for all would be two.
        assert_eq!(fit(&layers, 1100), 3);
    }
}
