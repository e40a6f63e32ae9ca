// SPDX-License-Identifier: Apache-2.0
//! Which operators of a step are computed a second time, and what a card keeps for that.
//!
//! A *tap* copies what one operator read and some elements of what it wrote into the card's audit buffer, right
//! after the operator (what is overwritten in place: right before it). The host reads the buffer after the step,
//! computes the elements again from the weights of the model's file and compares every bit. A tap has inputs
//! and outputs of one card, so a difference names the card.
//!
//! Besides, every step looks at some bytes that a collective has left on all ranks of a stage, which must be the
//! same, at some bytes of a row of weights and at a head of a key or value that was written
//! before: what lies in a card's memory stays what it was.
//!
//! The choice is a function of the step and the member alone: a simulation writes the programs of a run.
//! Every operator is as likely as every other, so that over the steps each kind of each layer is checked.

use super::tap::{self, Check, Tap, Taps};
use super::{Buffer, HeldLayer, Member, Op, Part, Space, Step, WindowCache};
use crate::Activity;
use crate::cost::shard::Shard;
use crate::cost::shard::len;
use crate::work::{Place, Work};
use spanker_model::{KV_BLOCK, KvShape, Model, Strided};

/// The part of a step's operators that is checked where nobody asks for another.
pub const USUAL_AUDIT: f64 = 0.01;

/// No tap is larger than this.
pub(super) const LARGEST: u64 = 1 << 20;
/// Operators of a layer on one card, about: exchanges by schedules copy besides.
const OPERATORS: u64 = 28;

/// Bytes from which on a tap is made less often, half as often for twice as many: two rows of the residual stream.
pub(super) fn large(model: &Model) -> u64 {
    (model.hidden * 8).max(4 << 10)
}

/// How many of a step's operators are checked on each card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Audit {
    per_million: u32,
}

impl Audit {
    /// None.
    pub const NONE: Audit = Audit { per_million: 0 };

    /// A part of them, from 0 to 1. More than none is at least one in each step.
    #[must_use]
    pub fn of(fraction: f64) -> Audit {
        let per_million = (fraction.clamp(0.0, 1.0) * 1e6).ceil() as u32;
        Audit { per_million }
    }

    /// Whether nothing is checked.
    #[must_use]
    pub fn is_none(self) -> bool {
        self.per_million == 0
    }

    /// How many of so many operators are checked.
    #[must_use]
    pub fn count(self, operators: u64) -> u64 {
        match self.per_million {
            0 => 0,
            part => (operators * u64::from(part)).div_ceil(1_000_000).max(1),
        }
    }
}

/// Numbers of a key or value in the KV cache of a card that a step looks at, so that they stay what they were.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CachedCell {
    /// The block.
    pub block: u32,
    /// The slot in it.
    pub slot: u64,
    /// The position in its sequence.
    pub position: u64,
    /// Whether this step writes it.
    pub fresh: bool,
    /// The card's layer.
    pub layer: u64,
    /// Where the numbers lie, from the start of the KV cache on.
    pub numbers: Strided,
}

/// Operators that are checked in a step of a stage with so many layers, and the bytes that taps of them have.
pub(crate) fn expected(model: &Model, audit: Audit, layers: u64, position: u64) -> (u64, u64) {
    let taps = audit.count(layers * OPERATORS + 8);
    let Some(layer) = model.layers.first() else { return (0, 0) };
    let input = |quant: spanker_model::Quant, width: u64| quant.input().row_bytes(width);
    let (hidden, queries) = (model.hidden, model.heads * model.head_size);
    let products = 5 * input(layer.q.quant, hidden)
        + input(layer.o.quant, queries)
        + input(layer.down.quant, model.ffn);
    let attention = ((position + 1) * model.head_size * 4 + model.head_size * 8).min(large(model));
    let rotations = 4 * model.head_size * 4;
    // Norms need their whole row; runs of other operators are short.
    let layer = products + 2 * hidden * 4 + attention + rotations + 17 * 640;
    (taps, taps * (layer / OPERATORS))
}

/// Runs of operators that a graphics processor does in one go, of a layer and a row.
const RUNS: u64 = 5;

/// The same of a graphics processor in a step of one row: runs that are checked, and the bytes that are captured.
pub(crate) fn expected_of_gpu(
    model: &Model,
    audit: Audit,
    layers: u64,
    position: u64,
) -> (u64, u64) {
    let runs = audit.count(layers * RUNS + 2);
    let (hidden, queries) = (model.hidden, model.heads * model.head_size);
    // Rows of numbers that are normed or rounded there: of queries, gate and up, and both products of residual sums.
    let rows = (2 * hidden + queries + model.ffn) * 4;
    let attention = ((position + 1) * model.head_size * 4 + model.head_size * 16).min(large(model));
    let cells = 2 * model.head_size * 2;
    (runs, runs * ((rows + attention) / RUNS + 128) + cells)
}

/// Bytes of a card's audit buffer.
pub(crate) fn capacity(model: &Model, shard: &Shard, layers: u64, space: Space) -> u64 {
    let widest = model.hidden.max(model.heads * model.head_size).max(model.ffn) * 4;
    let taps = space.audit.count(layers * OPERATORS + 8);
    let kept = KvShape { heads: 1, head_size: model.head_size, quant: space.kv };
    let blocks = KvShape::blocks_for(space.context);
    let attention = blocks.saturating_mul(kept.head_bytes()) + model.head_size * 8 + 64;
    let best = len(&shard.vocab) * 4 + super::MAX_CANDIDATES * 8 + 64;
    let large = attention.max(best).min(LARGEST);
    large + (taps + 2).saturating_mul(widest * 2 + 512).min(16 << 20)
}

/// Random numbers that are the same everywhere (SplitMix64).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dice(u64);

impl Dice {
    /// Numbers that follow from these words.
    #[must_use]
    pub fn new(words: &[u64]) -> Dice {
        let mut dice = Dice(0x5350_414e_4b45_5221);
        for word in words {
            dice.0 ^= *word;
            dice.0 = dice.next();
        }
        dice
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number that is another one for another step: which positions of which blocks come next.
    #[must_use]
    pub fn seed(step: &Step<'_>) -> u64 {
        let parts = step.parts.iter();
        let words = parts.flat_map(|part| {
            let block = part.blocks.get((part.past / KV_BLOCK) as usize);
            [part.past, block.map_or(0, |&block| u64::from(block))]
        });
        Dice::new(&words.collect::<Vec<u64>>()).next()
    }

    /// A number below `end`, or 0 where there is none.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }
}

/// What taps are chosen by.
pub(super) struct Auditing<'a> {
    pub(super) model: &'a Model,
    pub(super) space: Space,
    pub(super) step: &'a Step<'a>,
    /// Another number gives another choice; any but 0 checks as many operators as the buffer has room for.
    pub(super) salt: u64,
    /// Bytes of the audit buffer.
    pub(super) capacity: u64,
}

impl Auditing<'_> {
    /// A member's program with taps, and what they check.
    pub(super) fn apply(&self, at: usize, member: &Member, program: Vec<Op>) -> (Vec<Op>, Taps) {
        let seed = Dice::seed(self.step);
        let mut dice = Dice::new(&[seed, self.step.rows(), at as u64, self.salt]);
        let works: Vec<usize> = (0..program.len())
            .filter(|&index| matches!(&program[index], Op::Work(work) if Check::knows(work)))
            .collect();
        let wanted = match self.salt {
            0 => self.space.audit.count(works.len() as u64) as usize,
            _ => works.len(),
        };
        let audit = member.place(Buffer::Audit);
        let audit = Place { offset: audit.offset + self.step.turn * self.capacity, ..audit };
        let mut sink = Sink { audit, used: 0 };
        // What is looked at in every step comes last.
        let most = self.capacity.saturating_sub(4 * self.model.head_size + 128);
        let large = large(self.model);
        let mut chosen: Vec<(usize, Made)> = Vec::new();
        // All ranks of a stage look at the same bytes of the same collective.
        let stage = member.stage;
        let mut same = Dice::new(&[seed, self.step.rows(), stage as u64, self.salt, 1]);
        let exchanges: Vec<usize> =
            (0..program.len()).filter(|&index| program[index].is_exchange()).collect();
        if let Some(&index) = exchanges.get(same.below(exchanges.len() as u64) as usize) {
            let made = tap::agreed(&program[index], stage, &mut sink, &mut same);
            chosen.extend(made.map(|made| (index, made)));
        }
        let wanted = wanted + chosen.len();
        // Some that are chosen are too large; there are as many tries as it takes for one at least.
        for _ in 0..16.max(2 * wanted) {
            if chosen.len() >= wanted || works.is_empty() {
                break;
            }
            let index = works[dice.below(works.len() as u64) as usize];
            let Op::Work(work) = &program[index] else { continue };
            if chosen.iter().any(|(known, _)| *known == index) {
                continue;
            }
            let start = sink.used;
            let Some(made) = Check::make(work, self.step, member, &mut sink, &mut dice) else {
                sink.used = start;
                continue;
            };
            let bytes = sink.used - start;
            let often = bytes <= large || dice.below(bytes) < large;
            if bytes > LARGEST || !often || sink.used > most {
                sink.used = start;
                continue;
            }
            chosen.push((index, made));
        }
        let mut taps = Taps::default();
        let mut program = spliced(program, chosen, &mut taps);
        if let Some((check, work)) = tap::stored(member, &mut sink, &mut dice) {
            program.push(Op::Tap(work));
            taps.list.push(Tap { activity: Activity::Host, layer: 0, check });
        }
        let parts = self.step.parts;
        if let Some(part) = parts.get(dice.below(parts.len() as u64) as usize) {
            self.cells(at, member, part, &mut sink, &mut dice, &mut program, &mut taps);
        }
        taps.bytes = sink.used;
        (program, taps)
    }

    /// One head of one key or value of the position that was written last, and of an older one: what is in the
    /// KV cache stays what it was.
    #[allow(clippy::too_many_arguments, reason = "where taps go")]
    fn cells(
        &self,
        at: usize,
        member: &Member,
        part: &Part<'_>,
        sink: &mut Sink,
        dice: &mut Dice,
        program: &mut Vec<Op>,
        taps: &mut Taps,
    ) {
        for cell in cells(self.model, self.space, (at, member), part, dice) {
            let CachedCell { block, slot, position, fresh, layer, numbers } = cell;
            let Strided { offset, rows, length, stride } = numbers;
            let from = member.place(Buffer::Kv);
            let from = Place { offset: from.offset + offset, ..from };
            let (captured, copy) = sink.strided(from, rows, length, stride);
            program.push(Op::Tap(copy));
            let bytes = rows * length;
            let check = Check::Cached { block, slot, position, fresh, bytes, at: captured };
            taps.list.push(Tap { activity: Activity::Attention, layer: layer as u32, check });
        }
    }
}

/// A cell of the position of a sequence that was written last, and one of an older position. Which of a position's
/// heads these are depends on its place alone.
pub(super) fn cells(
    model: &Model,
    space: Space,
    (at, member): (usize, &Member),
    part: &Part<'_>,
    dice: &mut Dice,
) -> Vec<CachedCell> {
    let (head_size, heads) = (model.head_size, len(&member.shard.kv_heads));
    let layers = member.holding.layers.len() as u64;
    let newest = part.past + part.tokens.len() as u64 - 1;
    if heads == 0 || layers == 0 {
        return Vec::new();
    }
    let mut positions = vec![(newest, true)];
    if part.past > 0 {
        positions.push((dice.below(part.past), false));
    }
    let kept = KvShape { heads, head_size, quant: space.kv };
    let windows = WindowCache::of(model, space);
    let cell = |(position, fresh): (u64, bool)| {
        let (block, slot) = (part.blocks[(position / KV_BLOCK) as usize], position % KV_BLOCK);
        let mut cell = Dice::new(&[u64::from(block), slot, at as u64]);
        let (layer, is_key, head) = (cell.below(layers), cell.below(2) == 0, cell.below(heads));
        let blocks = |of: &HeldLayer| WindowCache::of_layer(windows, of.window, space);
        let held = &member.holding.layers;
        let start: u64 = held[..layer as usize].iter().map(blocks).sum();
        let own = match windows.filter(|_| held[layer as usize].window.is_some()) {
            // What no row of the step sees may have been written over.
            Some(cache) if position + cache.window <= newest => return None,
            Some(cache) => cache.block(part, position / KV_BLOCK),
            None => block,
        };
        let mut numbers = kept.numbers(head, is_key, slot);
        numbers.offset += (start + u64::from(own)) * kept.block_bytes();
        Some(CachedCell { block, slot, position, fresh, layer, numbers })
    };
    positions.into_iter().filter_map(cell).collect()
}

/// Where captures go.
pub(super) struct Sink {
    audit: Place,
    used: u64,
}

impl Sink {
    /// Where the next capture goes.
    pub(super) fn used(&self) -> u64 {
        self.used
    }

    /// Room for pieces at a stride, and what copies them there.
    pub(super) fn strided(
        &mut self,
        from: Place,
        rows: u64,
        length: u64,
        from_stride: u64,
    ) -> (u64, Work) {
        let at = self.used;
        // Everything begins where numbers may.
        self.used = (at + rows * length).next_multiple_of(8);
        let into = Place { offset: self.audit.offset + at, ..self.audit };
        let from_stride = from_stride.max(length);
        (at, Work::Rows { from, into, rows, length, from_stride, into_stride: length })
    }

    pub(super) fn take(&mut self, from: Place, length: u64) -> (u64, Work) {
        self.strided(from, 1, length, length)
    }
}

/// A check, and what is copied before and after the operator.
pub(super) struct Made {
    pub(super) check: Check,
    pub(super) before: Vec<Work>,
    pub(super) after: Vec<Work>,
}

/// Puts taps into a program.
fn spliced(program: Vec<Op>, chosen: Vec<(usize, Made)>, taps: &mut Taps) -> Vec<Op> {
    if chosen.is_empty() {
        return program;
    }
    let mut places: Vec<(usize, Vec<Work>)> = Vec::new();
    let mut marks: Vec<(Activity, u32)> = Vec::with_capacity(program.len());
    let mut mark = (Activity::Embed, 0);
    for op in &program {
        if let Op::Mark { activity, layer } = op {
            mark = (*activity, *layer);
        }
        marks.push(mark);
    }
    for (index, made) in chosen {
        let (activity, layer) = marks[index];
        taps.list.push(Tap { activity, layer, check: made.check });
        places.push((index, made.before));
        // Products that follow each other read the same inputs once: nothing comes between them.
        let product = |at: usize| match program.get(at) {
            Some(Op::Work(work)) => {
                matches!(work, Work::Matmul { .. } | Work::MatmulExperts { .. })
            }
            _ => false,
        };
        let mut end = index + 1;
        while product(index) && product(end) {
            end += 1;
        }
        places.push((end, made.after));
    }
    places.sort_by_key(|(at, _)| *at);
    let mut places = places.into_iter().peekable();
    let mut out = Vec::with_capacity(program.len() + 64);
    for (at, op) in program.into_iter().map(Some).chain([None]).enumerate() {
        while let Some((_, works)) = places.next_if(|(place, _)| *place == at) {
            out.extend(works.into_iter().map(Op::Tap));
        }
        out.extend(op);
    }
    out
}
