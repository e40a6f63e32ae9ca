// SPDX-License-Identifier: Apache-2.0
//! From a plan and a step to one program for each card. Pure: nothing is computed here.
//!
//! A layer is four phases, and the ranks of a group meet after each: attention, output, up, down. Every rank
//! of a *gather* split has whole rows of its matrices, so what it computes are elements of the one card's
//! result; the parts are put together and nothing is added. A *reduce* split has columns of the second
//! matrix of each pair and adds partial sums in rank order.

mod rooms;

use std::ops::Range;
use std::sync::Arc;

use ggml_spanker::input_type;
use ggml_spanker::ops::Pairs;
use spanker_collective::{DType, ReduceOp};
use spanker_model::{Model, Quant};
use spanker_plan::{Activity, Plan, Shard, Split, Stage};
use spanker_runtime::{Fold, Place, Work};

use crate::holding::{Held, HeldLayer, Holding, hold};
use crate::{LlmError, Network, Op, Piece, Step, Want};
pub use rooms::Room;
pub(crate) use rooms::{MOST_BEST, Rooms, sizes};

/// A card's place in a plan.
#[derive(Debug, Clone)]
pub(crate) struct Seat {
    /// The card's index.
    pub(crate) card: usize,
    pub(crate) stage: usize,
    pub(crate) rank: usize,
    pub(crate) shard: Shard,
    pub(crate) rooms: Rooms,
    pub(crate) holding: Holding,
}

/// Numbers of a network that programs need.
#[derive(Debug, Clone)]
struct Numbers {
    epsilon: u32,
    dims: u64,
    pairs: u32,
    scale: u32,
}

/// Makes programs for a network that is laid out over cards.
#[derive(Debug, Clone)]
pub struct Lowering {
    model: Model,
    numbers: Numbers,
    stages: Vec<Stage>,
    pub(crate) seats: Vec<Seat>,
    /// The seats of each stage.
    pub(crate) members: Vec<Range<usize>>,
    /// Tokens that there is room for.
    pub(crate) context: usize,
    /// Tokens that a step takes at most.
    pub(crate) batch: usize,
}

/// Says where a seat's piece of a tensor is.
pub(crate) type Put<'p> = dyn FnMut(usize, &Piece) -> Result<Place, LlmError> + 'p;

/// Makes the buffers of a seat: what each is for, and its bytes.
pub(crate) type Furnish<'f> = dyn FnMut(usize, &[(Room, u64)]) -> Result<Rooms, LlmError> + 'f;

/// What a card has to have room for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Space {
    pub(crate) context: usize,
    pub(crate) batch: usize,
}

/// Whether a plan is one for this model.
pub(crate) fn check_plan<B: AsRef<[u8]>>(
    network: &Network<B>,
    plan: &Plan,
) -> Result<(), LlmError> {
    let (ours, theirs) = (network.model(), &plan.model);
    let same = ours.layers == theirs.layers
        && ours.architecture == theirs.architecture
        && (ours.hidden, ours.heads, ours.kv_heads, ours.ffn, ours.vocab)
            == (theirs.hidden, theirs.heads, theirs.kv_heads, theirs.ffn, theirs.vocab)
        && (ours.embedding, ours.head, ours.tied) == (theirs.embedding, theirs.head, theirs.tied);
    if !same {
        let what = format!("it is for another model: {} and not {}", theirs.name, ours.name);
        return Err(LlmError::plan(what));
    }
    if plan.layout.replicas.len() != 1 {
        let copies = plan.layout.replicas.len();
        return Err(LlmError::plan(format!("it has {copies} copies of the model, a run uses one")));
    }
    if plan.request.kv != Quant::F16 {
        let kv = plan.request.kv;
        return Err(LlmError::plan(format!("keys and values as {kv}: f16 can be run")));
    }
    Ok(())
}

impl Lowering {
    /// Lays a network out. `put` is asked for the place of each piece, `rooms` for the buffers of each seat.
    ///
    /// # Errors
    /// [`LlmError::Plan`] for a plan of another model or one that cannot be run; what `put` and `rooms` say.
    pub(crate) fn new<B: AsRef<[u8]>>(
        network: &Network<B>,
        plan: &Plan,
        space: Space,
        put: &mut Put<'_>,
        rooms: &mut Furnish<'_>,
    ) -> Result<Lowering, LlmError> {
        check_plan(network, plan)?;
        let model = network.model();
        let stages = plan.layout.replicas[0].clone();
        let (mut seats, mut members) = (Vec::new(), Vec::new());
        for (index, stage) in stages.iter().enumerate() {
            let ends = (index == 0, index + 1 == stages.len());
            let first = seats.len();
            for (rank, &card) in stage.group.cards.iter().enumerate() {
                let seat = seats.len();
                let holding = hold(network, stage, rank, ends, &mut |piece| put(seat, piece))?;
                let shard = stage.group.shards[rank].clone();
                let dims = network.rope().dims as u64;
                let sizes = sizes(model, stage, rank, space, dims, ends);
                let rooms = rooms(seat, &sizes)?;
                seats.push(Seat { card, stage: index, rank, shard, rooms, holding });
            }
            members.push(first..seats.len());
        }
        let numbers = Numbers {
            epsilon: network.epsilon.to_bits(),
            dims: network.rope().dims as u64,
            pairs: u32::from(network.rope().pairs == Pairs::Halves),
            scale: (1.0 / (model.head_size as f32).sqrt()).to_bits(),
        };
        let Space { context, batch } = space;
        Ok(Lowering { model: model.clone(), numbers, stages, seats, members, context, batch })
    }

    /// Refuses a step that cannot be.
    pub(crate) fn check(&self, step: &Step<'_>) -> Result<(), LlmError> {
        let tokens = step.past + step.tokens.len();
        if tokens > self.context {
            return Err(LlmError::Context { tokens, context: self.context });
        }
        if step.tokens.is_empty() || step.tokens.len() > self.batch {
            let (got, most) = (step.tokens.len(), self.batch);
            return Err(LlmError::plan(format!(
                "a step of {got} tokens, from 1 to {most} are possible"
            )));
        }
        if let Want::Best(k) = step.want
            && !(1..=MOST_BEST).contains(&u64::from(k))
        {
            let what = format!("{k} candidates, from 1 to {MOST_BEST} are possible");
            return Err(LlmError::unsupported(what));
        }
        let vocab = self.model.vocab;
        match step.tokens.iter().find(|&&token| u64::from(token) >= vocab) {
            Some(&token) => Err(LlmError::Token { token, vocab }),
            None => Ok(()),
        }
    }

    /// The programs of all seats for a step. `route` lists the seats that a message from one seat to
    /// another passes, both included.
    #[must_use]
    pub(crate) fn programs(
        &self,
        step: &Step<'_>,
        route: &dyn Fn(usize, usize) -> Vec<usize>,
    ) -> Vec<Vec<Op>> {
        let rows = step.tokens.len() as u64;
        let mut writer =
            Writer { lowering: self, programs: vec![Vec::new(); self.seats.len()], rows };
        writer.embed(step.tokens);
        for index in 0..self.stages.len() {
            if index > 0 {
                writer.hand_over(index, route);
            }
            for layer in 0..self.stages[index].layers.len() {
                writer.layer(index, layer, step.past as u64);
            }
        }
        if step.want != Want::Nothing {
            writer.head(step.want);
        }
        writer.programs
    }

    /// What a seat reads out for the host after a step.
    pub(crate) fn wanted(&self, seat: usize, want: Want) -> Option<(Place, u64)> {
        let last = self.last();
        let rooms = &self.seats[seat].rooms;
        match want {
            Want::Best(k) if seat == last.start => {
                let (room, cards) =
                    if last.len() == 1 { (Room::Best, 1) } else { (Room::AllBest, last.len()) };
                Some((rooms.place(room), u64::from(k) * 8 * cards as u64))
            }
            Want::Logits if last.contains(&seat) => {
                let vocab = &self.seats[seat].shard.vocab;
                Some((rooms.place(Room::Logits), (vocab.end - vocab.start) * 4))
            }
            _ => None,
        }
    }

    /// Seats of the last stage.
    pub(crate) fn last(&self) -> Range<usize> {
        self.members.last().cloned().unwrap_or(0..0)
    }
}

const F32: u64 = 4;

struct Writer<'a> {
    lowering: &'a Lowering,
    programs: Vec<Vec<Op>>,
    rows: u64,
}

impl<'a> Writer<'a> {
    fn seat(&self, seat: usize) -> &'a Seat {
        &self.lowering.seats[seat]
    }

    fn room(&self, seat: usize, room: Room) -> Place {
        self.seat(seat).rooms.place(room)
    }

    fn work(&mut self, seat: usize, work: Work) {
        self.programs[seat].push(Op::Work(work));
    }

    fn mark(&mut self, stage: usize, activity: Activity, layer: u32) {
        for seat in self.lowering.members[stage].clone() {
            self.programs[seat].push(Op::Mark { activity, layer });
        }
    }

    /// Each token's row comes from the rank that has it.
    fn embed(&mut self, tokens: &[u32]) {
        self.mark(0, Activity::Embed, 0);
        let members = self.lowering.members[0].clone();
        let width = self.lowering.model.hidden;
        for seat in members.clone() {
            let Some(table) = self.seat(seat).holding.embedding else { continue };
            if table.rows == 0 {
                continue;
            }
            let ids = self.room(seat, Room::Ids);
            for (at, &token) in tokens.iter().enumerate() {
                let into = after(ids, at as u64 * 4);
                self.work(seat, Work::Fill { into, length: 4, pattern: token });
            }
            let first = self.seat(seat).shard.vocab.start as u32;
            let embed = Work::Embed {
                table: table.place,
                ids,
                into: self.room(seat, Room::X),
                rows: self.rows,
                width,
                quant: ggml_id(table.quant),
                first,
                count: table.rows as u32,
            };
            self.work(seat, embed);
        }
        if members.len() == 1 {
            return;
        }
        let owner = |token: u32| {
            let holds = |seat: usize| self.seat(seat).shard.vocab.contains(&u64::from(token));
            members.clone().position(holds).unwrap_or(0)
        };
        let owners: Vec<usize> = tokens.iter().map(|&token| owner(token)).collect();
        let mut start = 0;
        for run in owners.chunk_by(|a, b| a == b) {
            let length = run.len() as u64 * width * F32;
            for seat in members.clone() {
                let data = after(self.room(seat, Room::X), start * width * F32);
                self.programs[seat].push(Op::Spread { root: run[0], data, length });
            }
            start += run.len() as u64;
        }
    }

    /// Every rank of a stage gets the rows of one rank of the stage before.
    fn hand_over(&mut self, stage: usize, route: &dyn Fn(usize, usize) -> Vec<usize>) {
        self.mark(stage, Activity::Handoff, self.lowering.stages[stage].layers.start as u32);
        let before = self.lowering.members[stage - 1].clone();
        let length = self.rows * self.lowering.model.hidden * F32;
        for seat in self.lowering.members[stage].clone() {
            let start = seat % before.len();
            let candidates =
                (0..before.len()).map(|step| before.start + (start + step) % before.len());
            let nearest = candidates.min_by_key(|&from| route(from, seat).len());
            let path = route(nearest.expect("stages have cards"), seat);
            for (hop, pair) in path.windows(2).enumerate() {
                let (here, there) = (pair[0], pair[1]);
                let from = self.room(here, if hop == 0 { Room::X } else { Room::Relay });
                let into = self.room(there, if there == seat { Room::X } else { Room::Relay });
                self.programs[here].push(Op::Hand { to: there, from, length });
                self.programs[there].push(Op::Take { from: here, into, length });
            }
        }
    }

    fn layer(&mut self, stage: usize, layer: usize, past: u64) {
        let members = self.lowering.members[stage].clone();
        let number = (self.lowering.stages[stage].layers.start + layer) as u32;
        self.mark(stage, Activity::Attention, number);
        for seat in members.clone() {
            self.attention(seat, layer, past);
        }
        self.join_heads(stage, layer);
        self.mark(stage, Activity::Output, number);
        self.narrow(stage, layer, |held| held.o, |shard| &shard.output);
        self.mark(stage, Activity::Up, number);
        for seat in members.clone() {
            self.widen(seat, layer);
        }
        self.join_ffn(stage, layer);
        self.mark(stage, Activity::Down, number);
        self.narrow(stage, layer, |held| held.down, |shard| &shard.down);
    }

    fn held(&self, seat: usize, layer: usize) -> &'a HeldLayer {
        &self.seat(seat).holding.layers[layer]
    }

    /// Norm, queries, keys, values, and attention of the rank's own heads.
    fn attention(&mut self, seat: usize, layer: usize, past: u64) {
        let held = self.held(seat, layer);
        let (model, rows) = (&self.lowering.model, self.rows);
        let size = model.head_size;
        let shard = self.seat(seat).shard.clone();
        let (heads, kv) = (len(&shard.heads), len(&shard.kv_heads));
        if heads == 0 {
            return;
        }
        self.norm(seat, held.attention_norm);
        let rooms = [Room::Queries, Room::Keys, Room::Values];
        for held in [held.q, held.k, held.v] {
            self.input(seat, held.quant);
        }
        for (held, room) in [held.q, held.k, held.v].into_iter().zip(rooms) {
            let a = self.input_place(seat, held.quant);
            self.product(seat, held, a, self.room(seat, room), rows);
        }
        if let Some(biases) = held.biases {
            let widths = [heads * size, kv * size, kv * size];
            for ((bias, room), width) in biases.into_iter().zip(rooms).zip(widths) {
                for row in 0..rows {
                    let into = after(self.room(seat, room), row * width * F32);
                    self.add(seat, into, bias, width);
                }
            }
        }
        if let Some(norms) = held.head_norms {
            for ((weight, room), count) in norms.into_iter().zip(rooms).zip([heads, kv]) {
                let data = self.room(seat, room);
                let epsilon = self.lowering.numbers.epsilon;
                let rows = rows * count;
                let norm =
                    Work::Norm { from: data, weight, into: data, rows, width: size, epsilon };
                self.work(seat, norm);
            }
        }
        let Numbers { dims, pairs, scale, .. } = self.lowering.numbers;
        let table = after(self.room(seat, Room::Table), past * dims * F32);
        for (room, heads) in [(Room::Queries, heads), (Room::Keys, kv)] {
            let data = self.room(seat, room);
            self.work(
                seat,
                Work::Rotate { data, table, rows, heads, head_size: size, dims, pairs },
            );
        }
        let row = kv * size * 2;
        let cache = self.lowering.context as u64 * row;
        let keys = after(self.room(seat, Room::Kv), 2 * layer as u64 * cache);
        let values = after(keys, cache);
        for (room, cache) in [(Room::Keys, keys), (Room::Values, values)] {
            let (from, into) = (self.room(seat, room), after(cache, past * row));
            self.work(seat, Work::Halve { from, into, elements: rows * kv * size });
        }
        let group = model.heads / model.kv_heads;
        let attend = Work::Attend {
            queries: self.room(seat, Room::Queries),
            keys,
            values,
            into: self.room(seat, Room::Heads),
            rows,
            heads,
            kv_heads: kv,
            head_size: size,
            group,
            offset: shard.heads.start % group,
            past,
            scale,
        };
        self.work(seat, attend);
    }

    /// Puts what the heads found together, as the next product consumes it.
    fn join_heads(&mut self, stage: usize, layer: usize) {
        let size = self.lowering.model.head_size;
        let width = self.lowering.model.heads * size;
        let part = |shard: &Shard| shard.heads.start * size..shard.heads.end * size;
        self.join(stage, Room::Heads, width, part, |seat, writer| writer.held(seat, layer).o.quant);
    }

    fn join_ffn(&mut self, stage: usize, layer: usize) {
        let width = self.lowering.model.ffn;
        let part = |shard: &Shard| shard.ffn.clone();
        self.join(stage, Room::Gate, width, part, |seat, writer| {
            writer.held(seat, layer).down.quant
        });
    }

    /// Turns each rank's part of rows of `width` f32s into the inputs of a product: blocks of all parts, or
    /// of the rank's own part where columns are split.
    fn join(
        &mut self,
        stage: usize,
        room: Room,
        width: u64,
        part: impl Fn(&Shard) -> Range<u64>,
        weights: impl Fn(usize, &Self) -> Quant,
    ) {
        let members = self.lowering.members[stage].clone();
        let split = self.lowering.stages[stage].group.split;
        let quant = input_type(weights(members.start, self));
        let shares: Vec<Range<u64>> = members.clone().map(|s| part(&self.seat(s).shard)).collect();
        let block = quant.block();
        let whole = |share: &Range<u64>| {
            share.start.is_multiple_of(block) && share.end.is_multiple_of(block)
        };
        let gathers = split == Split::Gather;
        // Blocks that no part cuts travel as they are, others as f32.
        let early = !gathers || shares.iter().all(whole);
        if early {
            for (seat, share) in members.clone().zip(&shares) {
                let into = if gathers { Room::Part } else { Room::Whole };
                self.quantize(seat, room, into, len(share), quant);
            }
        }
        if !gathers {
            return;
        }
        let (unit, from, into) = match early {
            true => (quant.block_bytes(), Room::Part, Room::Whole),
            false => (F32 * block, room, Room::Wide),
        };
        let bytes = |share: &Range<u64>| match early {
            true => share.start / block * unit..share.end / block * unit,
            false => share.start * F32..share.end * F32,
        };
        self.gather(stage, from, into, shares.iter().map(bytes).collect());
        if !early {
            for seat in members {
                self.quantize(seat, Room::Wide, Room::Whole, width, quant);
            }
        }
    }

    /// The second product of a pair, and its result added to the residual stream.
    fn narrow(
        &mut self,
        stage: usize,
        layer: usize,
        held: impl Fn(&HeldLayer) -> Held,
        part: impl Fn(&Shard) -> &Range<u64>,
    ) {
        let members = self.lowering.members[stage].clone();
        let (split, rows) = (self.lowering.stages[stage].group.split, self.rows);
        let elements = rows * self.lowering.model.hidden;
        for seat in members.clone() {
            let held = held(self.held(seat, layer));
            let a = self.room(seat, Room::Whole);
            let gathers = split == Split::Gather;
            let out = self.room(seat, if gathers { Room::Part } else { Room::Y });
            if held.cols == 0 {
                self.work(seat, Work::Fill { into: out, length: elements * F32, pattern: 0 });
            } else {
                self.product(seat, held, a, out, rows);
            }
        }
        match split {
            Split::Gather => {
                let bytes = |seat: usize| {
                    let share = part(&self.seat(seat).shard);
                    share.start * F32..share.end * F32
                };
                self.gather(stage, Room::Part, Room::Y, members.clone().map(bytes).collect());
            }
            Split::Reduce => {
                for seat in members.clone() {
                    let data = self.room(seat, Room::Y);
                    self.programs[seat].push(Op::Sum { data, elements });
                }
            }
            _ => {}
        }
        for seat in members {
            let (x, y) = (self.room(seat, Room::X), self.room(seat, Room::Y));
            self.add(seat, x, y, elements);
        }
    }

    /// Norm, gate and up.
    fn widen(&mut self, seat: usize, layer: usize) {
        let held = self.held(seat, layer);
        if held.gate.rows == 0 {
            return;
        }
        self.norm(seat, held.ffn_norm);
        for held in [held.gate, held.up] {
            self.input(seat, held.quant);
        }
        for (held, room) in [(held.gate, Room::Gate), (held.up, Room::Up)] {
            let a = self.input_place(seat, held.quant);
            self.product(seat, held, a, self.room(seat, room), self.rows);
        }
        let (gate, up) = (self.room(seat, Room::Gate), self.room(seat, Room::Up));
        let elements = self.rows * held.gate.rows;
        self.work(seat, Work::Gate { gate, up, into: gate, elements });
    }

    /// The head for the last token, and what is asked of it.
    fn head(&mut self, want: Want) {
        let stage = self.lowering.stages.len() - 1;
        let members = self.lowering.last();
        self.mark(stage, Activity::Head, self.lowering.model.layers.len() as u32);
        let width = self.lowering.model.hidden;
        let row = (self.rows - 1) * width * F32;
        for seat in members.clone() {
            let Some((weight, held)) = self.seat(seat).holding.head else { continue };
            let (from, into) = (after(self.room(seat, Room::X), row), self.room(seat, Room::H));
            let epsilon = self.lowering.numbers.epsilon;
            self.work(seat, Work::Norm { from, weight, into, rows: 1, width, epsilon });
            let quant = input_type(held.quant);
            if quant != Quant::F32 {
                let into = self.input_place(seat, held.quant);
                let from = self.room(seat, Room::H);
                self.work(
                    seat,
                    Work::Quantize { from, into, rows: 1, width, quant: ggml_id(quant) },
                );
            }
            let a = self.input_place(seat, held.quant);
            self.product(seat, held, a, self.room(seat, Room::Logits), 1);
            if let Want::Best(k) = want {
                let (from, into) = (self.room(seat, Room::Logits), self.room(seat, Room::Best));
                let first = self.seat(seat).shard.vocab.start as u32;
                self.work(seat, Work::Best { from, into, count: held.rows, k, first });
            }
        }
        if let (Want::Best(k), 2..) = (want, members.len()) {
            let each = u64::from(k) * 8;
            let parts: Arc<[Range<u64>]> =
                (0..members.len() as u64).map(|rank| rank * each..(rank + 1) * each).collect();
            for seat in members {
                let (from, into) = (self.room(seat, Room::Best), self.room(seat, Room::AllBest));
                let parts = Arc::clone(&parts);
                self.programs[seat].push(Op::Gather { parts, rows: 1, from, into });
            }
        }
    }

    fn norm(&mut self, seat: usize, weight: Place) {
        let (from, into) = (self.room(seat, Room::X), self.room(seat, Room::H));
        let (rows, width) = (self.rows, self.lowering.model.hidden);
        let epsilon = self.lowering.numbers.epsilon;
        self.work(seat, Work::Norm { from, weight, into, rows, width, epsilon });
    }

    /// Makes the normed rows ready for weights of a type, once.
    fn input(&mut self, seat: usize, weights: Quant) {
        let quant = input_type(weights);
        if quant == Quant::F32 {
            return;
        }
        let (from, into) = (self.room(seat, Room::H), self.input_place(seat, weights));
        let (rows, width) = (self.rows, self.lowering.model.hidden);
        let op = Op::Work(Work::Quantize { from, into, rows, width, quant: ggml_id(quant) });
        let normed =
            self.programs[seat].iter().rposition(|op| matches!(op, Op::Work(Work::Norm { .. })));
        let fresh = &self.programs[seat][normed.unwrap_or(0)..];
        if !fresh.contains(&op) {
            self.programs[seat].push(op);
        }
    }

    fn input_place(&self, seat: usize, weights: Quant) -> Place {
        self.room(
            seat,
            match input_type(weights) {
                Quant::F32 => Room::H,
                Quant::Q8K => Room::InputK,
                _ => Room::Input,
            },
        )
    }

    fn quantize(&mut self, seat: usize, from: Room, into: Room, width: u64, quant: Quant) {
        let (from, into, rows) = (self.room(seat, from), self.room(seat, into), self.rows);
        if width > 0 {
            self.work(seat, Work::Quantize { from, into, rows, width, quant: ggml_id(quant) });
        }
    }

    fn product(&mut self, seat: usize, held: Held, a: Place, out: Place, rows: u64) {
        if held.rows == 0 {
            return;
        }
        let types = [ggml_id(input_type(held.quant)), ggml_id(held.quant)];
        let shape = [rows, held.cols, held.rows];
        self.work(seat, Work::Matmul { a, b: held.place, out, shape, types });
    }

    fn add(&mut self, seat: usize, into: Place, more: Place, elements: u64) {
        let fold = Fold { dtype: DType::F32.code(), op: ReduceOp::Sum.code().unwrap_or_default() };
        let sources = vec![into, more];
        self.work(seat, Work::Reduce { into, sources, elements, fold, divisor: 0 });
    }

    fn gather(&mut self, stage: usize, from: Room, into: Room, parts: Vec<Range<u64>>) {
        let parts: Arc<[Range<u64>]> = parts.into();
        let rows = self.rows;
        for seat in self.lowering.members[stage].clone() {
            let (from, into) = (self.room(seat, from), self.room(seat, into));
            self.programs[seat].push(Op::Gather { parts: Arc::clone(&parts), rows, from, into });
        }
    }
}

fn after(place: Place, bytes: u64) -> Place {
    Place { offset: place.offset + bytes, ..place }
}

fn len(run: &Range<u64>) -> u64 {
    run.end - run.start
}

/// GGML's number of a type that weights or activations have.
fn ggml_id(quant: Quant) -> u32 {
    quant.ggml_id().expect("types of files have numbers")
}
