// SPDX-License-Identifier: Apache-2.0
//! What one card's part of a layer costs, operator by operator.
//!
//! An operator takes the longer of its arithmetic and its memory traffic, and a fixed cost. A layer has
//! seven: norm, queries with keys and values, attention, output, norm, gate with up, down. They run in four
//! phases, because the ranks of a *gather* split meet after each.

use serde::{Deserialize, Serialize};
use spanker_model::{Layer, Model};
use spanker_topology::{Profile, Seconds};

use super::memory::parts;
use super::shard::{Shard, Split, input_type, len};
use crate::request::Request;

/// Operators of a layer in each phase.
const OPERATORS: [f64; 4] = [3.0, 1.0, 2.0, 1.0];

/// Operators of a layer.
pub const OPERATORS_PER_LAYER: u32 = 7;

/// Operators of the head: norm and product.
const HEAD_OPERATORS: f64 = 2.0;

/// Where a time goes. The parts add up to it.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Terms {
    /// Reading and writing local memory.
    pub memory: Seconds,
    /// Arithmetic, as far as it takes longer than the memory traffic that it overlaps.
    pub compute: Seconds,
    /// Collectives and hand-offs between cards.
    pub communication: Seconds,
    /// Fixed costs of operators and tokens, the host's latency.
    pub fixed: Seconds,
}

impl Terms {
    /// The whole time.
    #[must_use]
    pub fn total(&self) -> Seconds {
        self.memory + self.compute + self.communication + self.fixed
    }

    pub(crate) fn plus(self, other: Terms) -> Terms {
        Terms {
            memory: self.memory + other.memory,
            compute: self.compute + other.compute,
            communication: self.communication + other.communication,
            fixed: self.fixed + other.fixed,
        }
    }

    pub(crate) fn times(self, factor: f64) -> Terms {
        Terms {
            memory: self.memory * factor,
            compute: self.compute * factor,
            communication: self.communication * factor,
            fixed: self.fixed * factor,
        }
    }

    pub(crate) fn later(self, other: Terms) -> Terms {
        if other.total().0 > self.total().0 { other } else { self }
    }
}

/// What goes through the model at once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Pass {
    /// Sequences.
    pub(crate) sequences: f64,
    /// Tokens of each sequence.
    pub(crate) tokens: f64,
    /// Tokens of each sequence that are there already.
    pub(crate) past: f64,
}

impl Pass {
    /// One token of each sequence.
    pub(crate) fn decode(sequences: f64, position: u64) -> Pass {
        Pass { sequences, tokens: 1.0, past: position as f64 }
    }

    /// The whole prompt of each sequence in `pieces` equal pieces: the mean piece.
    pub(crate) fn prefill(sequences: u64, prompt: u64, pieces: u64) -> Pass {
        let tokens = prompt as f64 / pieces as f64;
        let past = (prompt as f64 - tokens) / 2.0;
        Pass { sequences: sequences as f64, tokens, past }
    }

    /// Rows of the products.
    pub(crate) fn rows(self) -> f64 {
        self.sequences * self.tokens
    }
}

/// A card's numbers, ready for use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Speed {
    per_byte: f64,
    per_mac: f64,
    operator: f64,
}

impl Speed {
    pub(crate) fn of(profile: &Profile) -> Speed {
        Speed {
            per_byte: 1.0 / profile.memory.bandwidth.value.0 as f64,
            per_mac: 1.0 / profile.compute.rate.value.0,
            operator: profile.compute.per_operator.value.0,
        }
    }

    /// The longer of arithmetic and memory traffic.
    fn operator(self, macs: f64, bytes: f64) -> Terms {
        let memory = bytes * self.per_byte;
        let compute = (macs * self.per_mac - memory).max(0.0);
        Terms { memory: Seconds(memory), compute: Seconds(compute), ..Terms::default() }
    }

    fn fixed(self, operators: f64) -> Terms {
        Terms { fixed: Seconds(self.operator * operators), ..Terms::default() }
    }
}

/// The four phases of a layer on one card: attention, output, up, down.
pub(crate) fn layer(
    model: &Model,
    layer: &Layer,
    split: Split,
    shard: &Shard,
    speed: Speed,
    request: &Request,
    pass: Pass,
) -> [Terms; 4] {
    let rows = pass.rows();
    let [q, k, v, o, gate, up, down] = parts(model, layer, split, shard).map(|b| b as f64);
    let heads = (len(&shard.heads) * model.head_size) as f64;
    let kv = (len(&shard.kv_heads) * model.head_size) as f64;
    let (hidden, ffn) = (model.hidden as f64, len(&shard.ffn) as f64);
    let (o_rows, down_rows) = (len(&shard.output) as f64, len(&shard.down) as f64);
    let (o_cols, down_cols) = match split {
        Split::Reduce => (heads, ffn),
        _ => (layer.o.cols as f64, layer.down.cols as f64),
    };
    // Inputs come as the kernels consume them, results are f32.
    let product = |weights: f64, outputs: f64, inputs: f64, input_bytes: f64| {
        let bytes = weights + rows * (inputs * input_bytes + outputs * 4.0);
        speed.operator(rows * outputs * inputs, bytes)
    };
    let seen = pass.past + pass.tokens / 2.0;
    let kept = request.kv.bytes_per_weight();
    let attention =
        speed.operator(2.0 * rows * seen * heads, 2.0 * pass.sequences * seen * kv * kept);
    let input = |quant| input_type(quant).0;
    let projections = product(q + k + v, heads + 2.0 * kv, hidden, input(layer.q.quant));
    let phases = [
        projections.plus(attention),
        product(o, o_rows, o_cols, input(layer.o.quant)),
        product(gate + up, 2.0 * ffn, hidden, input(layer.up.quant)),
        product(down, down_rows, down_cols, input(layer.down.quant)),
    ];
    std::array::from_fn(|phase| phases[phase].plus(speed.fixed(OPERATORS[phase])))
}

/// The head's part on one card, for the last token of each sequence.
pub(crate) fn head(model: &Model, shard: &Shard, speed: Speed, sequences: f64) -> Terms {
    let rows = len(&shard.vocab) as f64;
    let (hidden, head) = (model.hidden as f64, &model.head);
    let inputs = sequences * hidden * input_type(head.quant).0;
    let bytes = rows * head.row_bytes() as f64 + inputs + sequences * rows * 4.0;
    speed.operator(sequences * rows * hidden, bytes).plus(speed.fixed(HEAD_OPERATORS))
}
