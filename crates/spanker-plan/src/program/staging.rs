// SPDX-License-Identifier: Apache-2.0
//! What kernels keep besides the buffers of a program, and how large it is. Runners allocate exactly this: what they
//! allocate is made from the numbers here, and nothing of it grows in a step.
//!
//! Programs do not name these buffers; only whoever runs a program on threads of a host or on graphics processors does.

use spanker_model::{KV_BLOCK, KvShape, Quant};
use spanker_topology::{ExchangeKind, Kernels};

use super::buffers::{Buffer, Inputs, MAX_CANDIDATES, Sizing};
use super::experts;
use crate::cost::shard::{Split, len};

/// Rows of a sequence that are attended together: keys and values are taken apart once for all of them.
pub const ATTEND_ROWS: u64 = 16;
/// Values of a run of inputs, which have one sum and, in Q8_0, one scale.
const RUN: u64 = 32;
/// Values that have one scale in Q8_K.
const LONG: u64 = 256;

/// What kernels on threads of a host keep for one card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HostStaging {
    /// Values of inputs as Q8_0, Q8_K and f32 that are taken apart at a time, of each at most.
    pub inputs: [u64; 3],
    /// Numbers of products of several rows before they are put in order, and of a sum's own part.
    pub tiles: u64,
    /// Threads that attend to heads at a time.
    pub threads: u64,
    /// Heads that share their keys and values.
    pub heads: u64,
    /// Numbers of a head.
    pub head_size: u64,
    /// Rows that are attended at a time by one thread.
    pub rows: u64,
    /// Blocks of one row, with all of the card's heads, that threads share.
    pub shared_blocks: u64,
    /// Bytes that the card gives to the others of its group in one exchange at most.
    pub given: u64,
    /// Bytes that the stage before hands over in one step at most.
    pub handed: u64,
    /// Experts that a row meets, each of which has inputs of its own in a step of one row.
    pub picks: u64,
    /// Values of the inputs of one of these, as Q8_0, Q8_K and f32.
    pub pick_inputs: [u64; 3],
}

impl HostStaging {
    /// Bytes of inputs that are taken apart into runs of values, scales and sums.
    #[must_use]
    pub fn input_bytes(&self) -> u64 {
        Self::taken_apart(self.inputs) + self.picks * Self::taken_apart(self.pick_inputs)
    }

    fn taken_apart([short, long, plain]: [u64; 3]) -> u64 {
        let runs = (short / RUN).max(long / RUN);
        let scales = (short / RUN).max(long / LONG);
        runs * 32 + scales * 4 + short / RUN * 4 + long / LONG * 32 + plain * 4
    }

    /// Bytes of what threads keep to attend.
    #[must_use]
    pub fn attention_bytes(&self) -> u64 {
        let pairs = self.rows * self.heads;
        // A slab of keys or values as numbers, and what is left out to begin with a line of 16 numbers; queries and
        // results.
        let each = 16 + 64 * KV_BLOCK + pairs * (KV_BLOCK + self.partial() + 2);
        (each + 2 * pairs * self.head_size).saturating_mul(4 * self.threads)
    }

    /// Bytes of what blocks come to that threads share.
    #[must_use]
    pub fn partial_bytes(&self) -> u64 {
        self.shared_blocks.saturating_mul(self.partial() * 4)
    }

    /// Numbers that a block of one head of one row comes to.
    fn partial(&self) -> u64 {
        16 + self.head_size.next_multiple_of(16)
    }

    /// Calls `buffer` with each that is not empty, and its bytes.
    pub(crate) fn each(&self, mut buffer: impl FnMut(Buffer, u64)) {
        let all = [
            (Buffer::KernelInputs, self.input_bytes()),
            (Buffer::Tiles, self.tiles * 4),
            (Buffer::Scores, self.attention_bytes() + self.partial_bytes()),
            // One is read while the next is written.
            (Buffer::Given, 2 * self.given),
            (Buffer::Handed, self.handed),
        ];
        all.into_iter().filter(|(_, bytes)| *bytes > 0).for_each(|(of, bytes)| buffer(of, bytes));
    }
}

/// What the kernel of a graphics processor keeps for one card, all of it in one buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuStaging {
    /// Instructions of a program at most.
    pub instructions: u64,
    /// Parts at most that exchanges divide a program into.
    pub parts: u64,
    /// Bytes of the dataflow slots of a step of one row at most.
    pub slots: u64,
    /// Bytes of the inputs of a product of many rows, as tensor cores read them.
    pub inputs: u64,
}

/// Where things lie in the buffer of a graphics processor's kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuPlaces {
    /// The counter of a grid barrier.
    pub barrier: u64,
    /// Counters of blocks of inputs that several blocks of the kernel put together.
    pub counters: u64,
    /// Inputs of products for tensor cores.
    pub inputs: u64,
    /// When instructions begin, while that is traced.
    pub times: u64,
    /// Programs and dataflow slots, up to the end.
    pub programs: u64,
    /// The end.
    pub end: u64,
}

impl GpuStaging {
    /// Counters of blocks of inputs: enough for 256 Ki values.
    pub const COUNTERS: u64 = 8192;
    /// Bytes of an instruction.
    pub const INSTRUCTION: u64 = 176;
    /// What everything begins at a multiple of.
    pub const ALIGNMENT: u64 = 128;
    /// Programs of one row that there is room for, each with dataflow slots.
    const SINGLE: u64 = 2;
    /// Programs of several rows: steps of many sequences have many shapes.
    const WHOLE: u64 = 14;

    /// Where everything lies.
    #[must_use]
    pub fn places(&self) -> GpuPlaces {
        let aligned = |bytes: u64| bytes.next_multiple_of(Self::ALIGNMENT);
        let counters = Self::ALIGNMENT;
        let inputs = counters + aligned(Self::COUNTERS * 4);
        let times = inputs + aligned(self.inputs);
        let programs = times + aligned((self.instructions + 1) * 8);
        // Dataflow slots of one step and of the next take turns, and so do the instructions that name them. Every part
        // of a program begins anew, with three things.
        let slack = 3 * self.parts * Self::ALIGNMENT;
        let bytes = self.instructions * Self::INSTRUCTION;
        let single = aligned(2 * bytes + 2 * self.slots + slack);
        let whole = aligned(bytes + slack);
        let end = programs + Self::SINGLE * single + Self::WHOLE * whole;
        GpuPlaces { barrier: 0, counters, inputs, times, programs, end }
    }

    /// Bytes at most of so many rows of inputs as tensor cores read them: a byte for each number, sums and scales of each 256
    /// of them in 48 bytes, and as much as is read beyond the last row.
    #[must_use]
    pub const fn packed_bytes(rows: u64, width: u64) -> u64 {
        rows.next_multiple_of(2) * (width + width.div_ceil(256) * 64) + 1024
    }
}

impl Sizing<'_> {
    /// What the kernel of a graphics processor keeps for a rank's card; nothing where kernels are somewhere else.
    pub(crate) fn gpu(&self, rank: usize) -> Option<GpuStaging> {
        let Kernels::Gpu { .. } = self.exchanging.kernels else { return None };
        let model = self.model;
        let shard = &self.group.shards[rank];
        let layers = self.inputs.layers;
        // Norms, quantisation, products and their inputs, sums and copies of a layer, and attention.
        let biases = if model.biases { 3 } else { 0 };
        let instructions = 8 + layers * (36 + biases);
        // Every number that an instruction writes for another has a slot.
        let (heads, kv) = (len(&shard.heads), len(&shard.kv_heads));
        let numbers = 2 * (heads + kv) * model.head_size + 2 * model.hidden + 2 * len(&shard.ffn);
        let slots = layers * (numbers * 4 + 8 * GpuStaging::ALIGNMENT)
            + (model.hidden + len(&shard.vocab)) * 4
            + 2 * GpuStaging::ALIGNMENT;
        Some(GpuStaging {
            instructions,
            parts: 8 + 5 * layers,
            slots: slots.next_multiple_of(GpuStaging::ALIGNMENT),
            inputs: self.packed_inputs(rank),
        })
    }

    /// Bytes of the largest inputs of a rank's products of many rows, as tensor cores read them.
    fn packed_inputs(&self, rank: usize) -> u64 {
        let (model, space) = (self.model, self.space);
        let shard = &self.group.shards[rank];
        let shared = model.mixture.map_or(0, |own| own.shared);
        let joined = match self.group.split {
            Split::Gather => (model.heads * model.head_size, model.ffn.max(shared)),
            _ => (len(&shard.heads) * model.head_size, len(&shard.ffn).max(len(&shard.shared))),
        };
        let [short, long, _] = self.inputs.widest(model.hidden, joined);
        let width = short.max(long);
        let head = self.ends.1 && model.head.quant.input() != Quant::F32;
        let of = |rows: u64, width: u64| match rows {
            0 | 1 => 0,
            rows if width > 0 => GpuStaging::packed_bytes(rows, width),
            _ => 0,
        };
        let outputs = of(space.outputs, if head { model.hidden } else { 0 });
        of(space.batch.max(space.sequences), width).max(outputs)
    }

    /// What kernels on threads keep for a rank's card; nothing where they are somewhere else.
    pub(crate) fn host(&self, rank: usize) -> Option<HostStaging> {
        let Kernels::Host { threads } = self.exchanging.kernels else { return None };
        let (model, space, (first, last)) = (self.model, self.space, self.ends);
        let (rows, outputs) = (space.batch.max(space.sequences), space.outputs);
        let (shard, ranks) = (&self.group.shards[rank], self.group.cards.len() as u64);
        let size = model.head_size;
        let (heads, kv) = (len(&shard.heads) * size, len(&shard.kv_heads) * size);
        let (ffn, hidden) = (len(&shard.ffn).max(len(&shard.shared)), model.hidden);
        let (used, shared) = model.mixture.map_or((0, 0), |own| (own.used, own.shared));
        let inner = experts::inner(model.mixture, shard);
        let gathers = self.group.split == Split::Gather;
        let whole = (model.heads * size, model.ffn.max(shared));
        let joined = if gathers { whole } else { (heads, ffn) };
        let narrow = if gathers { len(&shard.output).max(len(&shard.down)) } else { hidden };
        let inputs = self.inputs.widest(hidden, joined);
        let head = |quant: Quant| last && model.head.quant.input() == quant;
        let of = |width: u64, quant: Quant| {
            (rows * width).max(if head(quant) { outputs * hidden } else { 0 })
        };
        let routed = model.mixture.map_or(0, |own| own.experts);
        let products = (heads + 2 * kv).max(2 * ffn).max(narrow).max(routed);
        let mut tiles = if rows > 1 { rows * products } else { 0 };
        if last && outputs > 1 {
            tiles = tiles.max(outputs * len(&shard.vocab));
        }
        let direct = self.exchanging.kind == ExchangeKind::SharedMemory;
        let stream = rows * hidden * 4;
        let given = match self.group.split {
            _ if ranks == 1 || !direct => 0,
            Split::Gather => {
                let part = rows * heads.max(inner).max(narrow) * 4;
                let best = if last { outputs * MAX_CANDIDATES * 8 } else { 0 };
                part.max(best).max(if first { stream } else { 0 })
            }
            _ => {
                let rows_of_heads = if model.variant.row_norms { rows * heads * 4 } else { 0 };
                stream.max(if last { outputs * MAX_CANDIDATES * 8 } else { 0 }).max(rows_of_heads)
            }
        };
        let group = model.heads / model.kv_heads.max(1);
        Some(HostStaging {
            inputs: [
                of(inputs[0], Quant::Q8_0),
                of(inputs[1], Quant::Q8K),
                of(inputs[2], Quant::F32),
            ],
            tiles,
            threads: u64::from(threads),
            heads: group.min(len(&shard.heads)),
            head_size: size,
            rows: rows.min(ATTEND_ROWS),
            shared_blocks: match threads {
                0 | 1 => 0,
                _ => len(&shard.heads) * KvShape::blocks_for(space.context),
            },
            given,
            handed: if direct && !first { stream } else { 0 },
            picks: used,
            pick_inputs: self.inputs.of_down(if gathers { model.ffn } else { len(&shard.ffn) }),
        })
    }
}

impl Inputs {
    /// Values of a row of inputs of down as Q8_0, Q8_K and f32.
    fn of_down(&self, width: u64) -> [u64; 3] {
        self.used.map(|[_, _, down]| if down { width } else { 0 })
    }

    /// The widest inputs of a layer's products as Q8_0, Q8_K and f32, where normed rows have `hidden` values, and
    /// those of the second product of a pair so many.
    fn widest(&self, hidden: u64, (heads, ffn): (u64, u64)) -> [u64; 3] {
        std::array::from_fn(|of| {
            let [normed, output, down] = self.used[of];
            let width = |used: bool, width: u64| if used { width } else { 0 };
            width(normed, hidden).max(width(output, heads)).max(width(down, ffn))
        })
    }
}
