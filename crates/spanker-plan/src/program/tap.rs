// SPDX-License-Identifier: Apache-2.0
//! What a tap of an operator captures, and what has to come out of it.

use spanker_model::{Activation, KV_BLOCK, KvShape, Quant, Strided};

use super::audit::{Dice, Made, Sink};
use super::windows;
use super::{Buffer, Held, Member, Op, Part, Step};
use crate::Activity;
use crate::work::{KvCache, PICK_BYTES, Place, Scores, Work};

/// Elements of a row of results that are compared, besides its first and its last.
const SAMPLES: u64 = 14;
/// Elements of a run that is compared.
const RUN: u64 = 64;

/// Elements of a row and where their captures are.
pub type Samples = Vec<(u64, u64)>;

/// An addend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Addend {
    /// It was captured here.
    Captured(u64),
    /// It is a weight.
    Weights(Place),
}

/// An operator's inputs and outputs in the audit buffer. Numbers called after operands are offsets of captures;
/// places are places of weights, which the model's file has.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "operands have the names that they have in `Work`")]
pub enum Check {
    /// Elements of a row of a product: rows of weights times a row of inputs.
    Product { weights: Place, width: u64, types: [u32; 2], input: u64, samples: Samples },
    /// Elements of a normed row.
    Norm { weight: Place, width: u64, epsilon: u32, from: u64, samples: Samples },
    /// Blocks.
    Quantize { quant: u32, elements: u64, from: u64, into: u64 },
    /// One head, turned by the angles of the model or by those of layers with a window.
    Rotate { position: u64, local: bool, head_size: u64, pairs: u32, from: u64, into: u64 },
    /// One head of a key or value as the KV cache has it: numbers, and then scales.
    Keep { shape: KvShape, is_key: bool, from: u64, numbers: u64, scales: u64 },
    /// One head of one row, with the blocks of its head of keys and values end to end: those of which it sees something.
    /// Of the scores, `sinks` is where the head's own is.
    Attend { shape: KvShape, position: u64, scores: Scores, query: u64, blocks: u64, into: u64 },
    /// The picks of a row.
    Route { experts: u64, used: u64, gating: u32, logits: u64, picks: u64 },
    /// Elements of a row of a product with the expert of a pick.
    Expert {
        weights: Place,
        stride: u64,
        experts: u64,
        width: u64,
        types: [u32; 2],
        pick: u64,
        input: u64,
        samples: Samples,
    },
    /// Numbers of a weighed sum: those of each pick end to end, and where it is added to something, that.
    Combine { elements: u64, used: u64, from: u64, picks: u64, added: Option<u64>, into: u64 },
    /// Numbers of rows of a table that picks add, from the same column on.
    Picked {
        elements: u64,
        used: u64,
        experts: u64,
        table: Place,
        stride: u64,
        weighed: bool,
        picks: u64,
        from: u64,
        into: u64,
    },
    /// Gated numbers.
    Gate { elements: u64, activation: Activation, gate: u64, up: u64, into: u64 },
    /// Scaled and capped numbers.
    Scale { elements: u64, factor: u32, cap: u32, from: u64, into: u64 },
    /// Sums of two.
    Add { elements: u64, first: u64, second: Addend, into: u64 },
    /// Elements of a row of the embedding table, which begins at `row`.
    Embed { row: Place, width: u64, quant: u32, samples: Samples },
    /// Repeated words.
    Fill { pattern: u32, bytes: u64, into: u64 },
    /// Copied bytes.
    Copied { bytes: u64, from: u64, into: u64 },
    /// The largest of numbers.
    Best { count: u64, k: u32, first: u32, from: u64, into: u64 },
    /// Bytes that every rank of a stage has after a collective.
    Agreed { stage: usize, bytes: u64, at: u64 },
    /// Bytes of a row of weights.
    Stored { weights: Place, bytes: u64, at: u64 },
    /// Numbers of a head of a key or value in a slot of a block: what they were when they were `fresh`.
    Cached { block: u32, slot: u64, position: u64, fresh: bool, bytes: u64, at: u64 },
}

/// An operator that is checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tap {
    /// The part of the step.
    pub activity: Activity,
    /// The layer: the model's, or for [`Check::Cached`] the card's.
    pub layer: u32,
    /// What is compared.
    pub check: Check,
}

/// The taps of a member in a step.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Taps {
    /// The taps.
    pub list: Vec<Tap>,
    /// Bytes of the audit buffer that they use.
    pub bytes: u64,
}

/// Some bytes of what a collective leaves on every rank of a stage. The choice must be the same on all of them.
pub(super) fn agreed(op: &Op, stage: usize, sink: &mut Sink, dice: &mut Dice) -> Option<Made> {
    let (data, length) = match *op {
        Op::Collective { fold, elements, data, .. } | Op::Fold { data, elements, fold } => {
            (data, elements * fold.size())
        }
        Op::Gather { ref parts, rows, into, .. } => (into, rows * parts.last()?.end),
        _ => return None,
    };
    let (start, bytes) = run(dice, length, 4 * RUN)?;
    let (at, work) = sink.take(after(data, start), bytes);
    let check = Check::Agreed { stage, bytes, at };
    Some(Made { check, before: Vec::new(), after: vec![work] })
}

/// Some bytes of a row of a matrix that a card holds.
pub(super) fn stored(member: &Member, sink: &mut Sink, dice: &mut Dice) -> Option<(Check, Work)> {
    let matrices: Vec<Held> = member.holding.matrices().filter(|held| held.rows > 0).collect();
    let held = matrices.get(dice.below(matrices.len() as u64) as usize)?;
    let row = held.quant.row_bytes(held.cols);
    let (start, bytes) = run(dice, row, RUN)?;
    let weights = after(held.place, dice.below(held.rows) * row + start);
    let (at, work) = sink.take(weights, bytes);
    Some((Check::Stored { weights, bytes, at }, work))
}

fn after(place: Place, bytes: u64) -> Place {
    Place { offset: place.offset + bytes, ..place }
}

/// A run of at most `most` of `count` elements.
fn run(dice: &mut Dice, count: u64, most: u64) -> Option<(u64, u64)> {
    let length = count.min(most);
    (length > 0).then(|| (dice.below(count - length + 1), length))
}

/// The first, the last, and some at equal distances.
fn samples(
    sink: &mut Sink,
    dice: &mut Dice,
    row: Place,
    count: u64,
    works: &mut Vec<Work>,
) -> Samples {
    let mut list = Samples::new();
    for element in [0, count - 1] {
        let (at, work) = sink.take(after(row, element * 4), 4);
        works.push(work);
        list.push((element, at));
    }
    let many = SAMPLES.min(count);
    let stride = count / many;
    let phase = dice.below(stride);
    let (at, work) = sink.strided(after(row, phase * 4), many, 4, stride * 4);
    works.push(work);
    list.extend((0..many).map(|index| (phase + index * stride, at + index * 4)));
    list
}

/// Captures of operands.
struct Captures<'s> {
    sink: &'s mut Sink,
    before: Vec<Work>,
    after: Vec<Work>,
}

impl Captures<'_> {
    /// An input: captured before the operator if that overwrites it.
    fn input(&mut self, from: Place, bytes: u64, overwritten: bool) -> u64 {
        let (at, work) = self.sink.take(from, bytes);
        if overwritten { &mut self.before } else { &mut self.after }.push(work);
        at
    }

    fn output(&mut self, from: Place, bytes: u64) -> u64 {
        self.input(from, bytes, false)
    }

    /// Bytes at a stride of what begins here.
    fn strided(&mut self, from: Place, bytes: Strided) -> u64 {
        let Strided { offset, rows, length, stride } = bytes;
        let (at, work) = self.sink.strided(after(from, offset), rows, length, stride);
        self.after.push(work);
        at
    }

    fn samples(&mut self, dice: &mut Dice, row: Place, count: u64) -> Samples {
        samples(self.sink, dice, row, count, &mut self.after)
    }
}

impl Check {
    /// Whether an operator can be checked.
    pub(super) fn knows(work: &Work) -> bool {
        match work {
            Work::Send { .. } | Work::Receive { .. } | Work::Fence { .. } | Work::Write { .. } => {
                false
            }
            Work::Reduce { sources, divisor, .. } => sources.len() == 2 && *divisor <= 1,
            _ => true,
        }
    }

    /// Chooses what of an operator is checked. Nothing if there is nothing to check in it.
    pub(super) fn make(
        work: &Work,
        step: &Step<'_>,
        member: &Member,
        sink: &mut Sink,
        dice: &mut Dice,
    ) -> Option<Made> {
        let mut captures = Captures { sink, before: Vec::new(), after: Vec::new() };
        let check = match work {
            Work::Matmul { .. }
            | Work::MatmulExperts { .. }
            | Work::Norm { .. }
            | Work::Embed { .. } => rows(work, (step, member), &mut captures, dice)?,
            Work::Route { .. } | Work::Combine { .. } | Work::AddPicked { .. } => {
                picked(work, &mut captures, dice)?
            }
            Work::AttendBlocks { .. } | Work::RotateRows { .. } | Work::Keep { .. } => {
                heads(work, (step, member), &mut captures, dice)?
            }
            Work::Copy { .. } | Work::Rows { .. } | Work::Fill { .. } | Work::Best { .. } => {
                moved(work, &mut captures, dice)?
            }
            _ => runs(work, &mut captures, dice)?,
        };
        let Captures { before, after, .. } = captures;
        Some(Made { check, before, after })
    }
}

fn row_bytes(id: u32, width: u64) -> Option<u64> {
    Quant::from_ggml_id(id).map(|quant| quant.row_bytes(width))
}

/// Elements of one row of a product, a norm or an embedding.
fn rows(
    work: &Work,
    (step, member): (&Step<'_>, &Member),
    captures: &mut Captures<'_>,
    dice: &mut Dice,
) -> Option<Check> {
    match *work {
        Work::Matmul { a, b, out, shape: [m, k, n], types } => {
            let (row, bytes) = (dice.below(m), row_bytes(types[0], k)?);
            let input = captures.input(after(a, row * bytes), bytes, false);
            let samples = captures.samples(dice, after(out, row * n * 4), n);
            Some(Check::Product { weights: b, width: k, types, input, samples })
        }
        Work::MatmulExperts { a, b, out, picks, shape: [m, k, n], types, stride, apart } => {
            let (pick, bytes) = (dice.below(m * picks.used), row_bytes(types[0], k)?);
            let row = if apart { pick } else { pick / picks.used };
            let input = captures.input(after(a, row * bytes), bytes, false);
            let samples = captures.samples(dice, after(out, pick * n * 4), n);
            let pick = captures.output(after(picks.at, pick * PICK_BYTES), PICK_BYTES);
            let (weights, experts) = (b, picks.experts);
            Some(Check::Expert { weights, stride, experts, width: k, types, pick, input, samples })
        }
        Work::Norm { from, weight, into, rows, width, epsilon } => {
            let row = dice.below(rows) * width * 4;
            let from_row = captures.input(after(from, row), width * 4, from == into);
            let samples = captures.samples(dice, after(into, row), width);
            Some(Check::Norm { weight, width, epsilon, from: from_row, samples })
        }
        // Rows that are picked out of others.
        Work::Embed { table, into, rows, width, .. } if table == member.place(Buffer::X) => {
            let output = dice.below(rows);
            let row = step.output_rows().nth(output as usize)?;
            let bytes = (width * 4).min(4 * RUN);
            let from = captures.input(after(table, row * width * 4), bytes, false);
            let into = captures.output(after(into, output * width * 4), bytes);
            Some(Check::Copied { bytes, from, into })
        }
        Work::Embed { table, into, width, quant, first, count, .. } => {
            let tokens = step.parts.iter().flat_map(|part| part.tokens).enumerate();
            let own: Vec<(usize, u32)> = tokens
                .filter_map(|(row, token)| token.checked_sub(first).map(|at| (row, at)))
                .filter(|(_, at)| *at < count)
                .collect();
            let &(row, at) = own.get(dice.below(own.len() as u64) as usize)?;
            let samples = captures.samples(dice, after(into, row as u64 * width * 4), width);
            let row = after(table, u64::from(at) * row_bytes(quant, width)?);
            Some(Check::Embed { row, width, quant, samples })
        }
        _ => None,
    }
}

/// The block of a layer's KV cache in which a block of a sequence lies.
fn block_of(cache: &KvCache, (part, member): (&Part<'_>, &Member), at: u64) -> u32 {
    // Layers with a window find their rows in tables of their own, where they have them.
    match cache.rows == member.place(Buffer::Step) {
        true => part.blocks[at as usize],
        false => windows::block_of(part, at, cache.count),
    }
}

/// One head of a row.
fn heads(
    work: &Work,
    (step, member): (&Step<'_>, &Member),
    captures: &mut Captures<'_>,
    dice: &mut Dice,
) -> Option<Check> {
    match *work {
        Work::RotateRows { data, table, rows, heads, head_size, pairs, .. } => {
            let local = table != member.place(Buffer::Table);
            let (row, head) = (dice.below(rows), dice.below(heads));
            let place = after(data, (row * heads + head) * head_size * 4);
            let (_, position) = step.row(row)?;
            let from = captures.input(place, head_size * 4, true);
            let into = captures.output(place, head_size * 4);
            Some(Check::Rotate { position, local, head_size, pairs, from, into })
        }
        Work::Keep { keys, values, cache, rows } => {
            let (row, head, is_key) =
                (dice.below(rows), dice.below(cache.heads), dice.below(2) == 0);
            let (part, position) = step.row(row)?;
            let (shape, from) = (cache.shape()?, if is_key { keys } else { values });
            let size = cache.head_size * 4;
            let from = captures.input(after(from, (row * cache.heads + head) * size), size, false);
            let block = block_of(&cache, (part, member), position / KV_BLOCK);
            let block = after(cache.blocks, u64::from(block) * shape.block_bytes());
            let slot = position % KV_BLOCK;
            let numbers = captures.strided(block, shape.numbers(head, is_key, slot));
            let scales = shape.scale_bytes(head, is_key, slot);
            let scales = scales.map_or(0, |scales| captures.strided(block, scales));
            Some(Check::Keep { shape, is_key, from, numbers, scales })
        }
        Work::AttendBlocks { queries, cache, into, rows, heads, group, offset, scores } => {
            let (row, head) = (dice.below(rows), dice.below(heads));
            let (part, position) = step.row(row)?;
            let (shape, size) = (cache.shape()?, cache.head_size * 4);
            let shift = (row * heads + head) * size;
            let kv = (offset + head) / group.max(1);
            let query = captures.input(after(queries, shift), size, queries == into);
            let (last, slots) = (position / KV_BLOCK, position % KV_BLOCK + 1);
            let first = scores.first_seen(position) / KV_BLOCK;
            let place = |at: u64| {
                let block = u64::from(block_of(&cache, (part, member), at));
                after(cache.blocks, block * shape.block_bytes() + kv * shape.head_bytes())
            };
            // Whole blocks, and of the last one what is seen.
            let blocks = captures.sink.used();
            for at in first..last {
                let (_, work) = captures.sink.take(place(at), shape.head_bytes());
                captures.after.push(work);
            }
            for piece in shape.first_slots(0, slots) {
                captures.strided(place(last), piece);
            }
            let into = captures.output(after(into, shift), size);
            let shape = KvShape { heads: 1, ..shape };
            let own = scores.sinks.map(|sinks| after(sinks, head * 4));
            let scores = Scores { sinks: own, ..scores };
            Some(Check::Attend { shape, position, scores, query, blocks, into })
        }
        _ => None,
    }
}

/// What routers pick for a row, and what comes of the picks.
fn picked(work: &Work, captures: &mut Captures<'_>, dice: &mut Dice) -> Option<Check> {
    match *work {
        Work::Route { logits, picks: own, rows, gating } => {
            let (row, each) = (dice.below(rows), own.used * PICK_BYTES);
            let bytes = own.experts * 4;
            let logits = captures.input(after(logits, row * bytes), bytes, false);
            let picks = captures.output(after(own.at, row * each), each);
            Some(Check::Route { experts: own.experts, used: own.used, gating, logits, picks })
        }
        Work::Combine { from, picks: own, into, rows, width, add } => {
            let row = dice.below(rows);
            let (start, elements) = run(dice, width, RUN)?;
            let (each, bytes) = (own.used * PICK_BYTES, elements * 4);
            let place = after(into, (row * width + start) * 4);
            let added = add.then(|| captures.input(place, bytes, true));
            let first = (row * own.used * width + start) * 4;
            let pieces =
                Strided { offset: first, rows: own.used, length: bytes, stride: width * 4 };
            let from = captures.strided(from, pieces);
            let picks = captures.output(after(own.at, row * each), each);
            let into = captures.output(place, bytes);
            Some(Check::Combine { elements, used: own.used, from, picks, added, into })
        }
        Work::AddPicked { into, table, picks: own, rows, width, stride, weighed } => {
            let used = if weighed { own.used } else { 1 };
            let row = dice.below(rows * own.used / used);
            let (start, elements) = run(dice, width, RUN)?;
            let place = after(into, (row * width + start) * 4);
            let from = captures.input(place, elements * 4, true);
            let each = used * PICK_BYTES;
            let picks = captures.output(after(own.at, row * each), each);
            let into = captures.output(place, elements * 4);
            let (table, experts) = (after(table, start * 4), own.experts);
            Some(Check::Picked {
                elements,
                used,
                experts,
                table,
                stride,
                weighed,
                picks,
                from,
                into,
            })
        }
        _ => None,
    }
}

/// A run of numbers.
fn runs(work: &Work, captures: &mut Captures<'_>, dice: &mut Dice) -> Option<Check> {
    match *work {
        Work::Quantize { from, into, rows, width, quant: id } => {
            let quant = Quant::from_ggml_id(id)?;
            let block = quant.block();
            let (start, blocks) = run(dice, rows * width / block, (2 * RUN).div_ceil(block))?;
            let elements = blocks * block;
            let from = captures.input(after(from, start * block * 4), elements * 4, from == into);
            let bytes = quant.block_bytes();
            let into = captures.output(after(into, start * bytes), blocks * bytes);
            Some(Check::Quantize { quant: id, elements, from, into })
        }
        Work::AddRow { into, row, rows, width } => {
            let shift = dice.below(rows) * width * 4;
            let (start, elements) = run(dice, width, RUN)?;
            let place = after(into, shift + start * 4);
            let first = captures.input(place, elements * 4, true);
            let second = Addend::Weights(after(row, start * 4));
            let into = captures.output(place, elements * 4);
            Some(Check::Add { elements, first, second, into })
        }
        Work::Gate { gate, up, into, elements, activation } => {
            let (start, elements) = run(dice, elements, RUN)?;
            let mut input =
                |from: Place| captures.input(after(from, start * 4), elements * 4, from == into);
            let (gate, up) = (input(gate), input(up));
            let into = captures.output(after(into, start * 4), elements * 4);
            Some(Check::Gate { elements, activation, gate, up, into })
        }
        Work::Scale { data, elements, factor, cap } => {
            let (start, elements) = run(dice, elements, RUN)?;
            let place = after(data, start * 4);
            let from = captures.input(place, elements * 4, true);
            let into = captures.output(place, elements * 4);
            Some(Check::Scale { elements, factor, cap, from, into })
        }
        Work::Reduce { into, ref sources, elements, .. } => {
            let &[first, second] = &sources[..] else { return None };
            let (start, elements) = run(dice, elements, RUN)?;
            let bytes = elements * 4;
            let place = after(first, start * 4);
            let first = captures.input(place, bytes, first == into);
            let place = after(second, start * 4);
            let second = Addend::Captured(captures.input(place, bytes, second == into));
            let into = captures.output(after(into, start * 4), bytes);
            Some(Check::Add { elements, first, second, into })
        }
        _ => None,
    }
}

/// Bytes that are moved, repeated or picked.
fn moved(work: &Work, captures: &mut Captures<'_>, dice: &mut Dice) -> Option<Check> {
    match *work {
        Work::Copy { from, into, length } => {
            let (start, bytes) = run(dice, length, 4 * RUN)?;
            let from = captures.input(after(from, start), bytes, false);
            let into = captures.output(after(into, start), bytes);
            Some(Check::Copied { bytes, from, into })
        }
        Work::Rows { from, into, rows, length, from_stride, into_stride } => {
            let row = dice.below(rows);
            let (start, bytes) = run(dice, length, 4 * RUN)?;
            let from = captures.input(after(from, row * from_stride + start), bytes, false);
            let into = captures.output(after(into, row * into_stride + start), bytes);
            Some(Check::Copied { bytes, from, into })
        }
        Work::Fill { into, length, pattern } => {
            let (start, words) = run(dice, length / 4, RUN)?;
            let into = captures.output(after(into, start * 4), words * 4);
            Some(Check::Fill { pattern, bytes: words * 4, into })
        }
        Work::Best { from, into, count, k, first } if count > 0 => {
            let from = captures.input(from, count * 4, false);
            let into = captures.output(into, u64::from(k) * 8);
            Some(Check::Best { count, k, first, from, into })
        }
        _ => None,
    }
}
