// SPDX-License-Identifier: Apache-2.0
//! The buffers of a card: what each is for and how large it is. A runner allocates exactly these.

use std::ops::Range;

use spanker_model::{KvShape, Layer, Model, Quant};
use spanker_topology::{ExchangeKind, Kernels};

use super::audit::{Audit, capacity};
use super::experts;
use super::tables::StepTables;
use super::windows::WindowCache;
use crate::cost::Group;
use crate::cost::shard::{Shard, Split, len};
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
    /// The tables of a step.
    Step,
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
    /// Logits of routers.
    Router,
    /// The experts that rows have picked.
    Picks,
    /// Results of these experts, pick by pick.
    Experts,
    /// The gate of the expert that every token meets.
    SharedGate,
    /// Its way up.
    SharedUp,
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
    /// Inputs as kernels of a host take them apart.
    KernelInputs,
    /// Products of several rows before they are put in order.
    Tiles,
    /// Scores of attention, thread by thread.
    Scores,
    /// What the card gives to others of its group, where they read it.
    Given,
    /// What the stage before hands over, until it is taken.
    Handed,
    /// What the kernel of a graphics processor keeps: its programs, counters, and what its blocks exchange.
    Kernel,
}

const BUFFERS: usize = Buffer::Kernel as usize + 1;

impl Buffer {
    /// The name that reports use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Buffer::Weights => "weights",
            Buffer::Kv => "KV cache",
            Buffer::Table => "positions",
            Buffer::Step => "step",
            Buffer::Audit => "audit",
            Buffer::Logits | Buffer::Best | Buffer::AllBest => "logits",
            Buffer::Relay | Buffer::Padded | Buffer::Working | Buffer::PassedOn => "messages",
            Buffer::Given | Buffer::Handed => "messages",
            Buffer::KernelInputs | Buffer::Tiles | Buffer::Scores | Buffer::Kernel => "kernels",
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
    /// Sequences of a step.
    pub sequences: u64,
    /// Rows of a step that something is asked for: one of each sequence at least, more where guesses are checked.
    pub outputs: u64,
    /// Steps that are under way at a time: what the host reads of a step is there once for each.
    pub turns: u64,
    /// Blocks of the KV cache.
    pub blocks: u64,
    /// What keys and values are stored as.
    pub kv: Quant,
    /// How much of a step is checked.
    pub audit: Audit,
}

impl Space {
    /// Room for as many sequences as go through together, each with blocks of its own for keys and values as F16.
    #[must_use]
    pub fn of(context: u64, batch: u64, sequences: u64, audit: Audit) -> Space {
        let blocks = sequences.saturating_mul(KvShape::blocks_for(context));
        let (outputs, kv) = (sequences, Quant::F16);
        Space { context, batch, sequences, outputs, turns: 1, blocks, kv, audit }
    }
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

/// What a collective of a group needs besides its data: for each byte that it carries, bytes of working memory
/// and of memory for messages that a card passes on, and a remainder for each.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Overhead {
    pub(crate) working: f64,
    pub(crate) passed_on: f64,
    pub(crate) slack: u64,
}

impl Overhead {
    fn bytes(self, carried: u64) -> (u64, u64) {
        let of = |part: f64| match part > 0.0 {
            true => ((carried as f64 * part).ceil() as u64).saturating_add(self.slack),
            false => 0,
        };
        (of(self.working), of(self.passed_on))
    }
}

/// The same for each collective of a model's exchanges.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Overheads {
    pub(crate) gather: Overhead,
    pub(crate) reduce: Overhead,
}

/// How a group exchanges.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Exchanging {
    pub(crate) kind: ExchangeKind,
    pub(crate) overheads: Overheads,
    pub(crate) kernels: Kernels,
}

/// What the types of some layers' weights ask of the buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Inputs {
    /// Layers.
    pub(super) layers: u64,
    /// Layers with a window.
    windowed: u64,
    /// Whether normed rows are needed as Q8_0, and as Q8_K.
    q8_0: bool,
    q8k: bool,
    /// The most bytes that a row of inputs of the second product of a pair has.
    whole: u64,
    /// For inputs as Q8_0, Q8_K and f32: whether normed rows are needed so, inputs of the product after attention,
    /// and of that which ends a layer.
    pub(super) used: [[bool; 3]; 3],
    /// Tables of angles that positions need.
    turnings: u64,
}

impl Inputs {
    pub(crate) fn of(model: &Model, layers: Range<usize>) -> Inputs {
        let layers = &model.layers[layers];
        let used = |quant: Quant| {
            let uses = |l: &Layer| normed(l).any(|of| of.input() == quant);
            layers.iter().any(uses)
        };
        let joined = |layer: &Layer| {
            let block = |weights: Quant, width: u64| weights.input().row_bytes(width);
            let (q, shared) = (model.heads * model.head_size, shared_down(layer));
            let own = experts::joined(model.mixture, model.ffn, layer.down.quant, shared);
            block(layer.o.quant, q).max(own)
        };
        Inputs {
            layers: layers.len() as u64,
            windowed: layers.iter().filter(|layer| layer.window.is_some()).count() as u64,
            q8_0: used(Quant::Q8_0),
            q8k: used(Quant::Q8K),
            whole: layers.iter().map(joined).max().unwrap_or(0),
            turnings: Model::turnings(layers),
            used: [Quant::Q8_0, Quant::Q8K, Quant::F32].map(|quant| {
                let any = |weights: fn(&Layer) -> Option<Quant>| {
                    let types = layers.iter().filter_map(weights);
                    types.into_iter().any(|of| of.input() == quant)
                };
                let down = any(|layer| Some(layer.down.quant)) || any(shared_down);
                [used(quant), any(|layer| Some(layer.o.quant)), down]
            }),
        }
    }
}

/// The types of the matrices that normed rows are multiplied with.
fn normed(layer: &Layer) -> impl Iterator<Item = Quant> {
    let dense = [layer.q, layer.k, layer.v, layer.gate, layer.up].map(|matrix| matrix.quant);
    let shared = layer.experts.and_then(|own| own.shared);
    let shared = shared.map(|own| [own.router, own.gate, own.up].map(|matrix| matrix.quant));
    let router = layer.experts.map(|own| own.router.quant);
    dense.into_iter().chain(router).chain(shared.into_iter().flatten())
}

fn shared_down(layer: &Layer) -> Option<Quant> {
    layer.experts.and_then(|own| own.shared).map(|own| own.down.quant)
}

/// Says how large the buffers of a group's cards are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizing<'a> {
    pub(super) model: &'a Model,
    pub(super) group: &'a Group,
    pub(super) inputs: Inputs,
    pub(super) space: Space,
    pub(super) ends: (bool, bool),
    pub(super) exchanging: Exchanging,
    /// Bytes for padded parts, working memory and messages that are passed on; nothing where no schedule runs.
    messages: Option<[u64; 3]>,
}

impl<'a> Sizing<'a> {
    pub(crate) fn new(
        model: &'a Model,
        group: &'a Group,
        inputs: Inputs,
        space: Space,
        ends: (bool, bool),
        exchanging: Exchanging,
    ) -> Sizing<'a> {
        let scheduled = group.cards.len() > 1 && exchanging.kind == ExchangeKind::Schedules;
        let messages = scheduled.then(|| messages(model, group, space, ends, exchanging.overheads));
        Sizing { model, group, inputs, space, ends, exchanging, messages }
    }

    /// Every buffer that a card's program needs besides its weights, with its bytes, in the order of allocation.
    pub(crate) fn list(&self, rank: usize) -> Vec<(Buffer, u64)> {
        let mut list = Vec::new();
        self.named(rank, |buffer, bytes| list.push((buffer, bytes)));
        list
    }

    /// The same one by one, and what kernels keep besides.
    #[inline]
    pub(crate) fn each(&self, rank: usize, mut buffer: impl FnMut(Buffer, u64)) {
        self.named(rank, &mut buffer);
        if self.exchanging.kernels != Kernels::Card {
            self.kept(rank, buffer);
        }
    }

    /// What kernels keep.
    pub(crate) fn kept(&self, rank: usize, mut buffer: impl FnMut(Buffer, u64)) {
        if let Some(host) = self.host(rank) {
            host.each(&mut buffer);
        }
        if let Some(gpu) = self.gpu(rank) {
            buffer(Buffer::Kernel, gpu.places().end);
        }
    }

    /// What programs name.
    #[inline]
    fn named(&self, rank: usize, mut buffer: impl FnMut(Buffer, u64)) {
        let (model, inputs, (first, last)) = (self.model, self.inputs, self.ends);
        let Space { context, batch, sequences, turns, blocks, kv: kept, audit, .. } = self.space;
        let shard = &self.group.shards[rank];
        let rows = batch.max(sequences);
        let (hidden, size) = (model.hidden, model.head_size);
        let (heads, kv) = (len(&shard.heads) * size, len(&shard.kv_heads) * size);
        let (mixture, used) = (model.mixture, model.mixture.map_or(1, |own| own.used));
        let ffn = used * len(&shard.ffn);
        let times = |one: u64, other: u64| one.saturating_mul(other);
        let kept = KvShape { heads: len(&shard.kv_heads), head_size: size, quant: kept };
        let windows = WindowCache::of(model, self.space);
        let (all, own) = match windows {
            Some(cache) => (inputs.layers - inputs.windowed, times(inputs.windowed, cache.blocks)),
            None => (inputs.layers, 0),
        };
        let cached = times(times(all, blocks).saturating_add(own), kept.block_bytes());
        let head = |quant: Quant| last && model.head.quant.input() == quant;
        buffer(Buffer::Table, times(context, model.rope_dims * 4 * inputs.turnings));
        buffer(Buffer::Kv, cached);
        buffer(Buffer::Step, StepTables::most(self.space, windows));
        buffer(Buffer::X, rows * hidden * 4);
        buffer(Buffer::H, rows * hidden * 4);
        buffer(Buffer::Queries, rows * heads * 4);
        buffer(Buffer::Keys, rows * kv * 4);
        buffer(Buffer::Values, rows * kv * 4);
        buffer(Buffer::Heads, rows * heads * 4);
        buffer(Buffer::Whole, rows * inputs.whole);
        buffer(Buffer::Y, rows * hidden * 4);
        buffer(Buffer::Gate, rows * ffn * 4);
        buffer(Buffer::Up, rows * ffn * 4);
        if let Some(mixture) = mixture {
            let (logits, picks) = experts::routed(mixture);
            let gathers = self.group.split == Split::Gather;
            let down = if gathers { len(&shard.down) } else { hidden };
            buffer(Buffer::Router, rows * logits * 4);
            buffer(Buffer::Picks, rows * picks);
            buffer(Buffer::Experts, times(rows * used, down * 4));
            if mixture.shared > 0 {
                buffer(Buffer::SharedGate, rows * len(&shard.shared) * 4);
                buffer(Buffer::SharedUp, rows * len(&shard.shared) * 4);
            }
        }
        if inputs.q8_0 || head(Quant::Q8_0) {
            buffer(Buffer::Input, rows * Quant::Q8_0.row_bytes(hidden));
        }
        if inputs.q8k || head(Quant::Q8K) {
            buffer(Buffer::InputK, rows * Quant::Q8K.row_bytes(hidden));
        }
        self.gathered(rank, rows, &mut buffer);
        if last {
            let ranks = self.group.cards.len() as u64;
            for results in [Buffer::Logits, Buffer::Best, Buffer::AllBest] {
                buffer(results, turns * result_bytes(results, self.space, shard, ranks));
            }
        }
        if !(first && last) {
            buffer(Buffer::Relay, rows * hidden * 4);
        }
        if let Some([padded, working, passed_on]) = self.messages {
            buffer(Buffer::Padded, padded);
            buffer(Buffer::Working, working);
            buffer(Buffer::PassedOn, passed_on);
        }
        if !audit.is_none() {
            buffer(Buffer::Audit, turns * capacity(model, shard, inputs.layers, self.space));
        }
    }

    /// A card's part of what is gathered, and all of what is gathered as f32.
    fn gathered(&self, rank: usize, rows: u64, buffer: &mut impl FnMut(Buffer, u64)) {
        let (model, shard) = (self.model, &self.group.shards[rank]);
        // Queries and keys that are normed as whole rows are brought together in any split.
        let (mut part, mut wide) = match model.variant.row_norms {
            true => (len(&shard.kv_heads) * model.head_size * 4, model.heads * model.head_size),
            false => (0, 0),
        };
        match self.group.split {
            Split::Gather => {
                let mixture = model.mixture;
                let used = mixture.map_or(1, |own| own.used);
                let inner = (used * model.ffn).max(mixture.map_or(0, |own| own.shared));
                let narrow = len(&shard.output).max(len(&shard.down)) * 4;
                part = part.max(narrow).max(self.inputs.whole);
                wide = inner.max(model.heads * model.head_size);
            }
            Split::Reduce if wide > 0 => {}
            _ => return,
        }
        buffer(Buffer::Part, rows * part);
        buffer(Buffer::Wide, rows * wide * 4);
    }
}

/// Bytes of what a step leaves for the host in a buffer.
pub(crate) fn result_bytes(buffer: Buffer, space: Space, shard: &Shard, ranks: u64) -> u64 {
    let best = space.outputs * MAX_CANDIDATES * 8;
    match buffer {
        Buffer::Logits => space.outputs * len(&shard.vocab) * 4,
        Buffer::Best => best,
        Buffer::AllBest => best * ranks,
        _ => 0,
    }
}

/// The buffers that a card's program needs besides its weights, with their bytes.
pub(crate) fn sizes(
    model: &Model,
    stage: &Stage,
    rank: usize,
    space: Space,
    ends: (bool, bool),
    exchanging: Exchanging,
) -> Vec<(Buffer, u64)> {
    sizing(model, stage, space, ends, exchanging).list(rank)
}

/// How large the buffers of a stage's cards are.
pub(crate) fn sizing<'a>(
    model: &'a Model,
    stage: &'a Stage,
    space: Space,
    ends: (bool, bool),
    exchanging: Exchanging,
) -> Sizing<'a> {
    let inputs = Inputs::of(model, stage.layers.clone());
    Sizing::new(model, &stage.group, inputs, space, ends, exchanging)
}

/// The most bytes that collectives of a group need: for parts that travel padded, working memory, and messages
/// that are passed on.
fn messages(
    model: &Model,
    group: &Group,
    space: Space,
    (first, last): (bool, bool),
    overheads: Overheads,
) -> [u64; 3] {
    let (rows, outputs) = (space.batch.max(space.sequences), space.outputs);
    let ranks = group.cards.len() as u64;
    let most = |part: fn(&Shard) -> u64| group.shards.iter().map(part).max().unwrap_or(0);
    let stream = rows * model.hidden * 4;
    let (mut gathered, mut reduced) = (0, 0);
    match group.split {
        Split::Gather => {
            let heads = most(|s| len(&s.heads)) * model.head_size;
            let inner = |s: &Shard| experts::inner(model.mixture, s);
            let ffn = group.shards.iter().map(inner).max().unwrap_or(0);
            let rows_out = most(|s| len(&s.output).max(len(&s.down)));
            // Blocks are never longer than the numbers that they stand for.
            gathered = rows * ranks * heads.max(ffn).max(rows_out) * 4;
        }
        _ => reduced = stream,
    }
    if model.variant.row_norms {
        gathered = gathered.max(rows * ranks * most(|s| len(&s.heads)) * model.head_size * 4);
    }
    // Rows of the embedding table that other ranks have.
    if first {
        reduced = reduced.max(stream);
    }
    if last {
        gathered = gathered.max(outputs * ranks * MAX_CANDIDATES * 8);
    }
    let needs = [overheads.gather.bytes(gathered), overheads.reduce.bytes(reduced)];
    let (working, passed_on) = needs
        .into_iter()
        .fold((1, 1), |most, need| (u64::max(most.0, need.0), u64::max(most.1, need.1)));
    [gathered, working, passed_on]
}
