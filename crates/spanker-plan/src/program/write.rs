// SPDX-License-Identifier: Apache-2.0
//! The operators and exchanges of a step, part by part: embedding, layers, hand-offs, head.

use std::ops::Range;
use std::sync::Arc;

use spanker_collective::{Collective, DType, ReduceOp};
use spanker_model::{KvShape, Model, Number, Quant, Turning};
use spanker_topology::ExchangeKind;

use super::buffers::result_bytes;
use super::tables::Outputs;
use super::{
    Buffer, Held, HeldFfn, HeldLayer, Member, Numerics, Op, Space, Step, StepShape, StepTables,
    WindowCache,
};
use crate::Activity;
use crate::cost::shard::{Shard, Split, len};
use crate::work::{Fold, KvCache, Place, Scores, Work};

pub(super) const F32: u64 = 4;

/// What programs of a model are written from.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) model: &'a Model,
    pub(crate) numerics: Numerics,
    pub(crate) space: Space,
    /// For each stage, how matrices are split and how ranks exchange.
    pub(crate) stages: &'a [(Split, ExchangeKind)],
    pub(crate) members: &'a [Member],
}

/// What becomes of the entries of programs: somebody keeps them, or only what they cost.
pub(crate) trait Sink {
    /// Takes the next entry of a member's program.
    fn push(&mut self, member: usize, op: Op);
}

impl Sink for Vec<Vec<Op>> {
    #[inline]
    fn push(&mut self, member: usize, op: Op) {
        self[member].push(op);
    }
}

/// Writes the programs of members side by side.
pub(crate) struct Writer<'a, S> {
    pub(super) of: Context<'a>,
    pub(super) members: &'a [Member],
    step: &'a Step<'a>,
    pub(super) rows: u64,
    shape: StepShape,
    tables: StepTables,
    /// What layers with a window keep, where these have blocks of their own.
    windows: Option<WindowCache>,
    /// For each member, the types that its normed rows are ready for.
    ready: Vec<[bool; 2]>,
    pub(crate) programs: S,
}

impl<'a, S: Sink> Writer<'a, S> {
    pub(crate) fn new(of: Context<'a>, step: &'a Step<'a>, programs: S) -> Self {
        let ready = vec![[false; 2]; of.members.len()];
        let windows = WindowCache::of(of.model, of.space);
        let (shape, tables) = (StepShape::of(step), StepTables::of(step, windows));
        let (members, rows) = (of.members, shape.rows);
        Writer { of, members, step, rows, shape, tables, windows, ready, programs }
    }

    pub(super) fn place(&self, member: usize, buffer: Buffer) -> Place {
        self.members[member].buffers.place(buffer)
    }

    #[inline(always)]
    pub(super) fn work(&mut self, member: usize, work: Work) {
        self.programs.push(member, Op::Work(work));
    }

    pub(super) fn mark(&mut self, members: Range<usize>, activity: Activity, layer: usize) {
        for member in members {
            self.programs.push(member, Op::Mark { activity, layer: layer as u32 });
        }
    }

    fn schedules(&self, stage: usize) -> bool {
        self.of.stages[stage].1 == ExchangeKind::Schedules
    }

    /// The tables of the step, on every card.
    pub(crate) fn data(&mut self, members: Range<usize>) {
        let length = StepTables::length(self.step, self.windows);
        for member in members {
            let into = self.place(member, Buffer::Step);
            self.programs.push(member, Op::Data { into, length });
            for &[from, to] in self.step.copies {
                self.copy_block(member, u64::from(from), u64::from(to), false);
            }
            for &[from, to] in self.step.windowed_copies {
                self.copy_block(member, u64::from(from), u64::from(to), true);
            }
        }
    }

    /// Whether a layer of a member has blocks of its class of layers with a window.
    fn is_windowed(&self, member: usize, layer: usize) -> bool {
        self.windows.is_some() && self.held(member, layer).window.is_some()
    }

    /// Where the KV cache of a layer of a member begins, in blocks, and how many it has.
    fn layer_blocks(&self, member: usize, layer: usize) -> (u64, u64) {
        let blocks =
            |layer: &HeldLayer| WindowCache::of_layer(self.windows, layer.window, self.of.space);
        let layers = &self.members[member].holding.layers;
        (layers[..layer].iter().map(blocks).sum(), blocks(&layers[layer]))
    }

    /// Copies a block of the KV cache, in all layers of a member that have a window, or in all others.
    fn copy_block(&mut self, member: usize, from: u64, to: u64, windowed: bool) {
        let one = &self.members[member];
        let heads = len(&one.shard.kv_heads);
        let shape = KvShape { heads, head_size: self.of.model.head_size, quant: self.of.space.kv };
        let (base, length) = (self.place(member, Buffer::Kv), shape.block_bytes());
        for layer in 0..one.holding.layers.len() {
            let (start, _) = self.layer_blocks(member, layer);
            let block = |at: u64| after(base, (start + at) * length);
            if length > 0 && self.is_windowed(member, layer) == windowed {
                self.work(member, Work::Copy { from: block(from), into: block(to), length });
            }
        }
    }

    /// Each token's row comes from the rank that has it: others have zeros, which change nothing.
    pub(crate) fn embed(&mut self, members: Range<usize>) {
        self.mark(members.clone(), Activity::Embed, 0);
        let (width, ids) = (self.of.model.hidden, self.tables.ids);
        let elements = self.rows * width;
        let shared = members.len() > 1;
        for member in members.clone() {
            let into = self.place(member, Buffer::X);
            if shared {
                self.work(member, Work::Fill { into, length: elements * F32, pattern: 0 });
            }
            let Some(table) = self.members[member].holding.embedding else { continue };
            if table.rows == 0 {
                continue;
            }
            let first = self.members[member].shard.vocab.start as u32;
            let embed = Work::Embed {
                table: table.place,
                ids: after(self.place(member, Buffer::Step), ids),
                into,
                rows: self.rows,
                width,
                quant: ggml_id(table.quant),
                first,
                count: table.rows as u32,
            };
            self.work(member, embed);
        }
        if shared {
            self.all_reduce(0, members.clone(), Buffer::X, elements, words());
        }
        for member in members {
            let x = self.place(member, Buffer::X);
            self.scale(member, x, elements, self.of.model.variant.embedding_scale, None);
        }
    }

    /// Folds a buffer of all ranks of a stage.
    fn all_reduce(
        &mut self,
        stage: usize,
        members: Range<usize>,
        buffer: Buffer,
        elements: u64,
        fold: Fold,
    ) {
        for member in members {
            let data = self.place(member, buffer);
            let collective = Collective::AllReduce;
            let op = match self.schedules(stage) {
                true => Op::Collective { collective, fold, elements, data },
                false => Op::Fold { data, elements, fold },
            };
            self.programs.push(member, op);
        }
    }

    /// Every rank of a stage gets the rows of one rank of the stage before.
    pub(crate) fn hand_over(
        &mut self,
        before: Range<usize>,
        members: Range<usize>,
        layer: usize,
        route: &dyn Fn(usize, usize) -> Vec<usize>,
    ) {
        self.mark(members.clone(), Activity::Handoff, layer);
        let length = self.rows * self.of.model.hidden * F32;
        for member in members {
            let start = member % before.len();
            let candidates =
                (0..before.len()).map(|step| before.start + (start + step) % before.len());
            let nearest = candidates.min_by_key(|&from| route(from, member).len());
            let path = route(nearest.expect("stages have cards"), member);
            for (hop, pair) in path.windows(2).enumerate() {
                let (here, there) = (pair[0], pair[1]);
                let from = self.place(here, if hop == 0 { Buffer::X } else { Buffer::Relay });
                let into =
                    self.place(there, if there == member { Buffer::X } else { Buffer::Relay });
                self.programs.push(here, Op::Send { to: there, from, length });
                self.programs.push(there, Op::Receive { from: here, into, length });
            }
        }
    }

    /// A layer of a stage: the `layer`th that its members hold, which is the model's `number`th.
    pub(crate) fn layer(
        &mut self,
        stage: usize,
        members: Range<usize>,
        layer: usize,
        number: usize,
    ) {
        self.mark(members.clone(), Activity::Attention, number);
        for member in members.clone() {
            self.project(member, layer);
        }
        if self.of.model.variant.row_norms {
            self.norm_rows(stage, members.clone(), layer);
        }
        for member in members.clone() {
            self.attend(member, layer);
        }
        self.join_heads(stage, members.clone(), layer);
        self.mark(members.clone(), Activity::Output, number);
        self.narrow(stage, members.clone(), layer, |held| held.o, |shard| &shard.output);
        self.pass_on(members.clone(), layer, |held| (held.output_bias, held.post_attention_norm));
        if let Some(mixture) = self.of.model.mixture {
            self.mixture((stage, layer, number), members.clone(), mixture);
            return self.pass_on(members, layer, |held| (None, held.post_ffn_norm));
        }
        self.mark(members.clone(), Activity::Up, number);
        for member in members.clone() {
            self.widen(member, layer);
        }
        self.join_ffn(stage, members.clone(), layer);
        self.mark(members.clone(), Activity::Down, number);
        self.narrow(stage, members.clone(), layer, |held| held.ffn.down, |shard| &shard.down);
        self.pass_on(members, layer, |held| (None, held.post_ffn_norm));
    }

    pub(super) fn held(&self, member: usize, layer: usize) -> &'a HeldLayer {
        &self.members[member].holding.layers[layer]
    }

    /// Norm, queries, keys and values of the rank's own heads.
    fn project(&mut self, member: usize, layer: usize) {
        let held = self.held(member, layer);
        let shard = &self.members[member].shard;
        let (heads, kv) = (len(&shard.heads), len(&shard.kv_heads));
        if heads == 0 {
            return;
        }
        let (size, rows) = (self.of.model.head_size, self.rows);
        self.norm(member, held.attention_norm);
        let buffers = [Buffer::Queries, Buffer::Keys, Buffer::Values];
        for held in [held.q, held.k, held.v] {
            self.input(member, held.quant);
        }
        for (held, buffer) in [held.q, held.k, held.v].into_iter().zip(buffers) {
            let a = self.input_place(member, held.quant);
            self.product(member, held, a, self.place(member, buffer), rows);
        }
        if let Some(biases) = held.biases {
            let widths = [heads * size, kv * size, kv * size];
            for ((row, buffer), width) in biases.into_iter().zip(buffers).zip(widths) {
                let into = self.place(member, buffer);
                if width > 0 {
                    self.work(member, Work::AddRow { into, row, rows, width });
                }
            }
        }
        if let Some(norms) = held.head_norms.filter(|_| !self.of.model.variant.row_norms) {
            for ((weight, buffer), count) in norms.into_iter().zip(buffers).zip([heads, kv]) {
                let data = self.place(member, buffer);
                let (epsilon, rows) = (self.of.numerics.epsilon, rows * count);
                let norm =
                    Work::Norm { from: data, weight, into: data, rows, width: size, epsilon };
                self.work(member, norm);
            }
        }
    }

    /// Rotary embedding, the KV cache and attention, of the rows of all sequences.
    fn attend(&mut self, member: usize, layer: usize) {
        let (model, space, rows) = (self.of.model, self.of.space, self.rows);
        let shard = &self.members[member].shard;
        let (heads, kv) = (len(&shard.heads), len(&shard.kv_heads));
        if heads == 0 {
            return;
        }
        let (head_size, dims) = (model.head_size, model.rope_dims);
        let shape = KvShape { heads: kv, head_size, quant: space.kv };
        let tables = self.place(member, Buffer::Step);
        let (start, count) = self.layer_blocks(member, layer);
        let (rows_at, own) = (self.tables.rows, self.is_windowed(member, layer));
        let cache = KvCache {
            blocks: after(self.place(member, Buffer::Kv), start * shape.block_bytes()),
            count,
            rows: after(tables, if own { self.tables.window_rows } else { rows_at }),
            tables: after(tables, self.tables.tables),
            entries: self.tables.entries(space, self.windows),
            heads: kv,
            head_size,
            quant: ggml_id(space.kv),
        };
        let of = |buffer: Buffer| self.place(member, buffer);
        let (queries, keys, values) = (of(Buffer::Queries), of(Buffer::Keys), of(Buffer::Values));
        let held = self.held(member, layer);
        let (table, into) = (of(Buffer::Table), of(Buffer::Heads));
        // Angles of layers with a window lie behind those of the model.
        let table = match held.turning {
            Turning::Local => after(table, space.context * dims * F32),
            Turning::Global | Turning::None => table,
        };
        let turned = if held.turning == Turning::None { 0 } else { 2 };
        for (data, heads) in [(queries, heads), (keys, kv)].into_iter().take(turned) {
            let (positions, at, pairs) =
                (space.context, after(tables, rows_at), self.of.numerics.pairs);
            let turn = Work::RotateRows {
                data,
                table,
                positions,
                at,
                rows,
                heads,
                head_size,
                dims,
                pairs,
            };
            self.work(member, turn);
        }
        self.work(member, Work::Keep { keys, values, cache, rows });
        let group = model.heads / model.kv_heads;
        let offset = self.members[member].shard.heads.start % group;
        let scores = Scores {
            scale: model.variant.score_scale(head_size),
            cap: model.variant.attention_cap.map_or(0, Number::bits),
            // What no context is longer than is no window.
            window: held.window.filter(|&window| window < space.context).unwrap_or(0),
            sinks: held.sinks,
        };
        let attend =
            Work::AttendBlocks { queries, cache, into, rows, heads, group, offset, scores };
        self.work(member, attend);
    }

    /// Puts the results of the heads together, as the next product consumes them.
    fn join_heads(&mut self, stage: usize, members: Range<usize>, layer: usize) {
        let size = self.of.model.head_size;
        let width = self.of.model.heads * size;
        let part = |shard: &Shard| shard.heads.start * size..shard.heads.end * size;
        let weights = self.held(members.start, layer).o.quant;
        self.join((stage, self.rows), members, Buffer::Heads, width, part, weights);
    }

    fn join_ffn(&mut self, stage: usize, members: Range<usize>, layer: usize) {
        let width = self.of.model.ffn;
        let weights = self.held(members.start, layer).ffn.down.quant;
        let part = |shard: &Shard| shard.ffn.clone();
        self.join((stage, self.rows), members, Buffer::Gate, width, part, weights);
    }

    /// Turns each rank's part of `rows` rows of `width` f32s into the inputs of a product: blocks of all parts, or
    /// of the rank's own part where columns are split.
    pub(super) fn join(
        &mut self,
        (stage, rows): (usize, u64),
        members: Range<usize>,
        buffer: Buffer,
        width: u64,
        part: impl Fn(&Shard) -> Range<u64>,
        weights: Quant,
    ) {
        let quant = weights.input();
        let shares: Vec<Range<u64>> =
            members.clone().map(|member| part(&self.members[member].shard)).collect();
        let block = quant.block();
        let whole = |share: &Range<u64>| {
            share.start.is_multiple_of(block) && share.end.is_multiple_of(block)
        };
        let gathers = self.of.stages[stage].0 == Split::Gather;
        // Blocks that no part cuts travel as they are, others as f32.
        let early = !gathers || shares.iter().all(whole);
        if early {
            for (member, share) in members.clone().zip(&shares) {
                let into = if gathers { Buffer::Part } else { Buffer::Whole };
                self.quantize(member, [buffer, into], rows, len(share), quant);
            }
        }
        if !gathers {
            return;
        }
        let (unit, from, into) = match early {
            true => (quant.block_bytes(), Buffer::Part, Buffer::Whole),
            false => (F32 * block, buffer, Buffer::Wide),
        };
        let bytes = |share: &Range<u64>| match early {
            true => share.start / block * unit..share.end / block * unit,
            false => share.start * F32..share.end * F32,
        };
        let parts = shares.iter().map(bytes).collect();
        self.gather_rows(stage, members.clone(), from, into, parts, rows);
        if !early {
            for member in members {
                self.quantize(member, [Buffer::Wide, Buffer::Whole], rows, width, quant);
            }
        }
    }

    /// The second product of a pair.
    fn narrow(
        &mut self,
        stage: usize,
        members: Range<usize>,
        layer: usize,
        held: impl Fn(&HeldLayer) -> Held,
        part: impl Fn(&Shard) -> &Range<u64>,
    ) {
        let (split, rows) = (self.of.stages[stage].0, self.rows);
        let elements = rows * self.of.model.hidden;
        for member in members.clone() {
            let held = held(self.held(member, layer));
            let a = self.place(member, Buffer::Whole);
            let gathers = split == Split::Gather;
            let out = self.place(member, if gathers { Buffer::Part } else { Buffer::Y });
            if held.cols == 0 {
                self.work(member, Work::Fill { into: out, length: elements * F32, pattern: 0 });
            } else {
                self.product(member, held, a, out, rows);
            }
        }
        self.spread(stage, members, part);
    }

    /// Brings every rank the results of the second products of all ranks.
    pub(super) fn spread(
        &mut self,
        stage: usize,
        members: Range<usize>,
        part: impl Fn(&Shard) -> &Range<u64>,
    ) {
        let elements = self.rows * self.of.model.hidden;
        match self.of.stages[stage].0 {
            Split::Gather => {
                let bytes = |member: usize| {
                    let share = part(&self.members[member].shard);
                    share.start * F32..share.end * F32
                };
                let parts = members.clone().map(bytes).collect();
                self.gather(stage, members.clone(), Buffer::Part, Buffer::Y, parts);
            }
            Split::Reduce => {
                self.all_reduce(stage, members.clone(), Buffer::Y, elements, sums());
            }
            Split::Whole => {}
        }
    }

    /// Adds what the second product of a pair has given to the residual stream: with its bias, normed and scaled where the
    /// family does that.
    fn pass_on(
        &mut self,
        members: Range<usize>,
        layer: usize,
        held: impl Fn(&HeldLayer) -> (Option<Place>, Option<Place>),
    ) {
        let (rows, width, epsilon) = (self.rows, self.of.model.hidden, self.of.numerics.epsilon);
        for member in members {
            let (bias, norm) = held(self.held(member, layer));
            let (x, y) = (self.place(member, Buffer::X), self.place(member, Buffer::Y));
            if let Some(row) = bias {
                self.work(member, Work::AddRow { into: y, row, rows, width });
            }
            if let Some(weight) = norm {
                self.work(member, Work::Norm { from: y, weight, into: y, rows, width, epsilon });
            }
            self.scale(member, y, rows * width, self.of.model.variant.residual_scale, None);
            self.add(member, x, y, rows * width);
        }
    }

    /// Scales numbers and caps them, where there is something to do.
    fn scale(
        &mut self,
        member: usize,
        data: Place,
        elements: u64,
        factor: Option<Number>,
        cap: Option<Number>,
    ) {
        let nothing = factor.is_none_or(|factor| factor == Number::ONE) && cap.is_none();
        if !nothing && elements > 0 {
            let (factor, cap) = (factor.unwrap_or(Number::ONE).bits(), cap.map_or(0, Number::bits));
            self.work(member, Work::Scale { data, elements, factor, cap });
        }
    }

    /// Norm, gate and up.
    fn widen(&mut self, member: usize, layer: usize) {
        let held = self.held(member, layer);
        let HeldFfn { gate, up, .. } = held.ffn;
        if gate.rows == 0 {
            return;
        }
        self.norm(member, held.ffn_norm);
        let elements = self.rows * gate.rows;
        for held in [gate, up] {
            self.input(member, held.quant);
        }
        for (held, buffer) in [(gate, Buffer::Gate), (up, Buffer::Up)] {
            let a = self.input_place(member, held.quant);
            self.product(member, held, a, self.place(member, buffer), self.rows);
        }
        let (gate, up) = (self.place(member, Buffer::Gate), self.place(member, Buffer::Up));
        let activation = self.of.model.variant.activation;
        self.work(member, Work::Gate { gate, up, into: gate, elements, activation });
    }

    /// The head for the rows that something is asked for, and what is asked.
    pub(crate) fn head(&mut self, stage: usize, members: Range<usize>) {
        self.mark(members.clone(), Activity::Head, self.of.model.layers.len());
        let width = self.of.model.hidden;
        let StepShape { rows: all, outputs: rows, which, candidates, .. } = self.shape;
        for member in members.clone() {
            let Some((weight, held)) = self.members[member].holding.head else { continue };
            let (x, into) = (self.place(member, Buffer::X), self.place(member, Buffer::H));
            let epsilon = self.of.numerics.epsilon;
            let from = match which {
                Outputs::Last => after(x, (all - rows) * width * F32),
                Outputs::Listed => {
                    let ids = after(self.place(member, Buffer::Step), self.tables.outputs);
                    let (quant, first, count) = (ggml_id(Quant::F32), 0, all as u32);
                    self.work(
                        member,
                        Work::Embed { table: x, ids, into, rows, width, quant, first, count },
                    );
                    into
                }
            };
            self.work(member, Work::Norm { from, weight, into, rows, width, epsilon });
            let quant = held.quant.input();
            if quant != Quant::F32 {
                let (from, into) = (into, self.input_place(member, held.quant));
                let quant = ggml_id(quant);
                self.work(member, Work::Quantize { from, into, rows, width, quant });
            }
            let a = self.input_place(member, held.quant);
            let logits = self.result(member, Buffer::Logits, members.len());
            self.product(member, held, a, logits, rows);
            let variant = &self.of.model.variant;
            let (factor, cap) = (variant.logit_scale, variant.logit_cap);
            self.scale(member, logits, rows * held.rows, factor, cap);
            let Some(k) = candidates else { continue };
            let first = self.members[member].shard.vocab.start as u32;
            for output in 0..rows {
                let from = after(logits, output * held.rows * F32);
                let best = self.result(member, Buffer::Best, members.len());
                let into = after(best, output * u64::from(k) * 8);
                self.work(member, Work::Best { from, into, count: held.rows, k, first });
            }
        }
        // Candidates of all outputs travel together, as many for each as any asks for.
        let Some(k) = candidates.filter(|_| members.len() > 1) else { return };
        let each = u64::from(k) * 8;
        let parts = (0..members.len() as u64).map(|rank| rank * each..(rank + 1) * each).collect();
        self.gather_rows(stage, members, Buffer::Best, Buffer::AllBest, parts, rows);
    }

    /// Where a step's results go on a card of so many ranks.
    fn result(&self, member: usize, buffer: Buffer, ranks: usize) -> Place {
        let shard = &self.members[member].shard;
        let bytes = result_bytes(buffer, self.of.space, shard, ranks as u64);
        after(self.place(member, buffer), self.shape.turn * bytes)
    }

    pub(super) fn norm(&mut self, member: usize, weight: Place) {
        let (from, into) = (self.place(member, Buffer::X), self.place(member, Buffer::H));
        let (rows, width) = (self.rows, self.of.model.hidden);
        let epsilon = self.of.numerics.epsilon;
        self.work(member, Work::Norm { from, weight, into, rows, width, epsilon });
        self.ready[member] = [false; 2];
    }

    /// Makes the normed rows ready for weights of a type, once.
    pub(super) fn input(&mut self, member: usize, weights: Quant) {
        let quant = weights.input();
        if quant == Quant::F32 {
            return;
        }
        let (from, into) = (self.place(member, Buffer::H), self.input_place(member, weights));
        let (rows, width) = (self.rows, self.of.model.hidden);
        let ready = &mut self.ready[member][usize::from(quant == Quant::Q8K)];
        if !std::mem::replace(ready, true) {
            self.work(member, Work::Quantize { from, into, rows, width, quant: ggml_id(quant) });
        }
    }

    pub(super) fn input_place(&self, member: usize, weights: Quant) -> Place {
        let buffer = match weights.input() {
            Quant::F32 => Buffer::H,
            Quant::Q8K => Buffer::InputK,
            _ => Buffer::Input,
        };
        self.place(member, buffer)
    }

    fn quantize(
        &mut self,
        member: usize,
        buffers: [Buffer; 2],
        rows: u64,
        width: u64,
        quant: Quant,
    ) {
        let [from, into] = buffers.map(|buffer| self.place(member, buffer));
        if width > 0 {
            self.work(member, Work::Quantize { from, into, rows, width, quant: ggml_id(quant) });
        }
    }

    pub(super) fn product(&mut self, member: usize, held: Held, a: Place, out: Place, rows: u64) {
        if held.rows == 0 {
            return;
        }
        let types = [ggml_id(held.quant.input()), ggml_id(held.quant)];
        let shape = [rows, held.cols, held.rows];
        self.work(member, Work::Matmul { a, b: held.place, out, shape, types });
    }

    fn add(&mut self, member: usize, into: Place, more: Place, elements: u64) {
        let fold = sums();
        let sources = vec![into, more];
        self.work(member, Work::Reduce { into, sources, elements, fold, divisor: 0 });
    }

    fn gather(
        &mut self,
        stage: usize,
        members: Range<usize>,
        from: Buffer,
        into: Buffer,
        parts: Vec<Range<u64>>,
    ) {
        self.gather_rows(stage, members, from, into, parts, self.rows);
    }

    pub(super) fn gather_rows(
        &mut self,
        stage: usize,
        members: Range<usize>,
        from: Buffer,
        into: Buffer,
        parts: Vec<Range<u64>>,
        rows: u64,
    ) {
        let ranks = members.len();
        let places: Vec<[Place; 2]> = members
            .clone()
            .map(|member| [from, into].map(|of| self.result(member, of, ranks)))
            .collect();
        if self.schedules(stage) {
            for (rank, (member, [from, into])) in members.zip(places).enumerate() {
                self.gather_padded(member, rank, &parts, rows, from, into);
            }
            return;
        }
        let parts: Arc<[Range<u64>]> = parts.into();
        for (member, [from, into]) in members.zip(places) {
            let parts = Arc::clone(&parts);
            self.programs.push(member, Op::Gather { parts, rows, from, into });
        }
    }

    /// An all-gather of parts that need not be equal: they travel padded to the longest.
    fn gather_padded(
        &mut self,
        member: usize,
        rank: usize,
        parts: &[Range<u64>],
        rows: u64,
        from: Place,
        into: Place,
    ) {
        let longest = parts.iter().map(len).max().unwrap_or(0);
        let chunk = rows * longest;
        let own = len(&parts[rank]);
        // Equal parts of one row lie in the result as they do in the schedule.
        let in_place = rows == 1 && parts.iter().all(|part| len(part) == longest);
        let data = if in_place { into } else { self.place(member, Buffer::Padded) };
        if own > 0 {
            let slot = after(data, rank as u64 * chunk);
            self.work(member, Work::Copy { from, into: slot, length: rows * own });
        }
        let (collective, elements) = (Collective::AllGather, chunk * parts.len() as u64);
        self.programs.push(member, Op::Collective { collective, fold: bytes(), elements, data });
        if in_place {
            return;
        }
        let row = parts.last().map_or(0, |part| part.end);
        for (rank, part) in parts.iter().enumerate().filter(|(_, part)| len(part) > 0) {
            let from = after(data, rank as u64 * chunk);
            let into = after(into, part.start);
            let (length, from_stride, into_stride) = (len(part), len(part), row);
            self.work(member, Work::Rows { from, into, rows, length, from_stride, into_stride });
        }
    }
}

/// Sums of f32.
fn sums() -> Fold {
    fold(DType::F32, ReduceOp::Sum)
}

/// What rows of zeros change nothing of.
fn words() -> Fold {
    fold(DType::U32, ReduceOp::BitwiseOr)
}

/// Bytes that are moved and not folded.
fn bytes() -> Fold {
    fold(DType::U8, ReduceOp::BitwiseOr)
}

fn fold(dtype: DType, op: ReduceOp) -> Fold {
    Fold { dtype: dtype.code(), op: op.code().unwrap_or_default() }
}

pub(super) fn after(place: Place, bytes: u64) -> Place {
    Place { offset: place.offset + bytes, ..place }
}

/// GGML's number of a type that weights or activations have.
pub(super) fn ggml_id(quant: Quant) -> u32 {
    quant.ggml_id().expect("types of files have numbers")
}
