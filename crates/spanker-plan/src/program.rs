// SPDX-License-Identifier: Apache-2.0
//! From a layout and a step to one program for each card. Pure: nothing is computed here.
//!
//! This is the one place that says what a layer is. A program is a list of operators and exchanges on named,
//! sized buffers; its entries are numbered by their place in the list. Prices, memory, simulation and every run
//! are folds over it.
//!
//! A layer is four phases, and the ranks of a group exchange after each: attention, output, up, down. Every
//! rank of a *gather* split has whole rows of its matrices, so what it computes are elements of the one card's
//! result; the parts are put together and nothing is added. A *reduce* split has columns of the second
//! matrix of each pair and adds partial sums in rank order.

mod audit;
mod buffers;
mod crossing;
mod experts;
mod price;
mod row_norms;
mod staging;
mod tables;
mod tap;
mod weights;
mod windows;
mod wiring;
mod write;

use std::ops::Range;
use std::sync::Arc;

use spanker_collective::Collective;
use spanker_model::{KvShape, Model};
use spanker_topology::{Cluster, ExchangeKind, Kernels};

use crate::cost::exchange;
use crate::cost::memory::Footprint;
use crate::cost::shard::{Shard, Split, len};
use crate::plan::Stage;
use crate::work::{BufferId, Fold, Place, Work};
use crate::{Activity, PlanError};
use audit::Auditing;
pub use audit::{Audit, CachedCell, Dice, USUAL_AUDIT};
pub(crate) use audit::{expected as expected_audit, expected_of_gpu};
pub use buffers::{Buffer, MAX_CANDIDATES, Space};
pub(crate) use buffers::{
    BufferIds, Exchanging, Inputs, Overhead, Overheads, Sizing, result_bytes, sizes, sizing,
};
pub use crossing::{Action, SEGMENT_ALIGNMENT, segments, walk};
pub(crate) use crossing::{Stride, stride};
pub(crate) use price::Loads;
pub use price::{Cost, Load, OPERATORS_PER_LAYER, Reach, Terms, load};
pub use staging::{ATTEND_ROWS, GpuPlaces, GpuStaging, HostStaging};
pub use tables::{Shape as StepShape, StepTables};
pub use tap::{Addend, Check, Samples, Tap, Taps};
pub use weights::{Cut, Piece, Projection, Tensor, WEIGHT_ALIGNMENT, WeightLayout};
pub(crate) use weights::{Held, HeldFfn, HeldLayer, Holder, Holding, padded};
pub use windows::WindowCache;
pub use wiring::{Apart, RankLink, Routes, Wiring};
pub(crate) use write::{Context, Sink, Writer};

/// What a step gives back for a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// Nothing: more of the prompt follows.
    Nothing,
    /// The best candidates for the next token, at most so many: from 1 to 1024.
    Best(u32),
    /// All logits.
    Logits,
}

/// Tokens of one sequence that go through the model in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part<'a> {
    /// The tokens.
    pub tokens: &'a [u32],
    /// Tokens before them.
    pub past: u64,
    /// The blocks of the KV cache that the sequence has, in order: for these tokens and all before them.
    pub blocks: &'a [u32],
    /// The same of layers with a window, where these have blocks of their own: see [`WindowCache`]. Entries of blocks that
    /// no row sees are not read. Nothing for a sequence that is alone on its cards: it goes round in the order of its blocks.
    pub windowed: &'a [u32],
    /// What is asked for after each of the last tokens.
    pub want: Want,
    /// After how many of the last tokens it is asked for; at least one, unless nothing is asked for.
    pub outputs: u64,
}

impl<'a> Part<'a> {
    /// Tokens of a sequence with its blocks, of which something is asked for after the last.
    #[must_use]
    pub fn new(tokens: &'a [u32], past: u64, blocks: &'a [u32], want: Want) -> Part<'a> {
        Part { tokens, past, blocks, windowed: &[], want, outputs: 1 }
    }

    /// Rows that something is asked for.
    #[must_use]
    pub fn asked(&self) -> u64 {
        if self.want == Want::Nothing { 0 } else { self.outputs }
    }
}

/// What goes through the model at once: tokens of any number of sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step<'a> {
    /// The sequences' parts, in the order of their rows.
    pub parts: &'a [Part<'a>],
    /// Blocks of the KV cache that are copied before: from, and to.
    pub copies: &'a [[u32; 2]],
    /// The same of layers with a window, where these have blocks of their own.
    pub windowed_copies: &'a [[u32; 2]],
    /// Where its results go: steps that are under way at a time have different numbers, from 0.
    pub turn: u64,
}

impl<'a> Step<'a> {
    /// Tokens of sequences, without copies, alone on its way.
    #[must_use]
    pub fn of(parts: &'a [Part<'a>]) -> Step<'a> {
        Step { parts, copies: &[], windowed_copies: &[], turn: 0 }
    }
}

impl Step<'_> {
    /// Whether blocks of the KV cache are copied.
    #[must_use]
    pub fn is_copying(&self) -> bool {
        !self.copies.is_empty() || !self.windowed_copies.is_empty()
    }

    /// Rows of all parts together.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.parts.iter().map(|part| part.tokens.len() as u64).sum()
    }

    /// Rows of all parts that something is asked for.
    #[must_use]
    pub fn outputs(&self) -> u64 {
        self.parts.iter().map(Part::asked).sum()
    }

    /// The most candidates that any part asks for: cards give so many for each output, and of those the best are what a
    /// part asks for.
    #[must_use]
    pub fn candidates(&self) -> Option<u32> {
        let asked = self.parts.iter().filter_map(|part| match part.want {
            Want::Best(k) => Some(k),
            _ => None,
        });
        asked.max()
    }

    /// The part that a row belongs to, and the row's position there.
    #[must_use]
    pub fn row(&self, row: u64) -> Option<(&Part<'_>, u64)> {
        let mut start = 0;
        self.parts.iter().find_map(|part| {
            let first = start;
            start += part.tokens.len() as u64;
            (row < start).then(|| (part, part.past + row - first))
        })
    }

    /// The rows that something is asked for.
    pub fn output_rows(&self) -> impl Iterator<Item = u64> + '_ {
        let mut end = 0;
        self.parts.iter().flat_map(move |part| {
            end += part.tokens.len() as u64;
            end - part.asked()..end
        })
    }

    /// How far back its rows look.
    #[must_use]
    pub fn reach(&self) -> Reach {
        Reach::of(self.parts.iter().map(|part| (part.tokens.len() as u64, part.past)))
    }
}

/// One entry of a card's program. Members are cards in the order of their stages and ranks.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Op {
    /// Work on the card's own memory.
    Work(Work),
    /// The tables of the step come: tokens, where rows lie, which of them something is asked for, and block tables. They
    /// are [`StepTables`], and no part of the program.
    Data {
        /// Where they go.
        into: Place,
        /// Bytes.
        length: u64,
    },
    /// Every rank of the card's group has a part of each of `rows` rows; afterwards each has all of them.
    Gather {
        /// The bytes of a row that each rank has.
        parts: Arc<[Range<u64>]>,
        /// Rows.
        rows: u64,
        /// This rank's part of every row, end to end.
        from: Place,
        /// Whole rows.
        into: Place,
    },
    /// Folds the words of all ranks of the group, in the order of their ranks.
    Fold {
        /// Where they are, and where the result will be.
        data: Place,
        /// How many.
        elements: u64,
        /// Their type, of 4 bytes, and the operation.
        fold: Fold,
    },
    /// A collective of the group, in place, by a schedule.
    Collective {
        /// Which.
        collective: Collective,
        /// The elements' type, and the operation of a reduction, in rank order.
        fold: Fold,
        /// Elements of the whole.
        elements: u64,
        /// Where they are and will be.
        data: Place,
    },
    /// Sends bytes to a member that is a neighbour: of the next stage, or one that passes them on.
    Send {
        /// The member.
        to: usize,
        /// Where they are.
        from: Place,
        /// How many.
        length: u64,
    },
    /// Receives bytes from a member that is a neighbour.
    Receive {
        /// The member.
        from: usize,
        /// Where they go.
        into: Place,
        /// How many.
        length: u64,
    },
    /// Keeps bytes for an audit. It is no operator of the model and has no number of its own.
    Tap(Work),
    /// What follows belongs to this part of a step.
    Mark {
        /// The part.
        activity: Activity,
        /// The layer.
        layer: u32,
    },
}

impl Op {
    /// Whether all ranks of a group take part in it together. It leaves the same bytes on all of them.
    #[must_use]
    pub fn is_exchange(&self) -> bool {
        matches!(self, Op::Gather { .. } | Op::Fold { .. } | Op::Collective { .. })
    }

    /// The bytes that an exchange of so many ranks counts for: the parts of all ranks, or what one gives to all.
    #[must_use]
    pub fn exchanged_bytes(&self, ranks: usize) -> f64 {
        let (collective, bytes) = crate::cost::method::collective_of(self, ranks);
        if collective.reduces() { bytes * ranks as f64 } else { bytes }
    }
}

/// Numbers of a model that its operators need and its shape does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Numerics {
    /// What norms add to the mean of the squares: the bits of an f32.
    pub epsilon: u32,
    /// Which numbers of a head rotary embeddings pair (`PAIRS_*` of the ABI).
    pub pairs: u32,
}

/// What one card holds and allocates.
#[derive(Debug, Clone)]
pub struct CardLayout {
    /// The card's index.
    pub card: usize,
    /// The stage.
    pub stage: usize,
    /// The rank in the stage's group.
    pub rank: usize,
    /// The weights: the card's first buffer.
    pub weights: WeightLayout,
    /// All other buffers that its program names, with their bytes, in the order in which they are allocated.
    pub buffers: Vec<(Buffer, u64)>,
    /// What its kernels keep besides, with bytes.
    pub kept: Vec<(Buffer, u64)>,
    /// The same in numbers, where kernels are threads of a host.
    pub host: Option<HostStaging>,
    /// And where they are on a graphics processor.
    pub gpu: Option<GpuStaging>,
}

impl CardLayout {
    /// Bytes that all buffers take in whole pages: what the card has less of afterwards.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let none = Footprint::default();
        let all = self.allocations().fold(none, |sum, (of, bytes)| sum.and(of, bytes));
        all.total().0
    }

    /// Bytes of a buffer that its program names; none if it does not.
    #[must_use]
    pub fn bytes_of(&self, buffer: Buffer) -> u64 {
        let known = self.buffers.iter().find(|(of, _)| *of == buffer);
        known.map_or(0, |(_, bytes)| *bytes)
    }

    /// Every buffer with its bytes. No buffer is empty.
    pub fn allocations(&self) -> impl Iterator<Item = (Buffer, u64)> + '_ {
        let weights = std::iter::once((Buffer::Weights, self.weights.bytes));
        let all = weights.chain(self.buffers.iter().chain(&self.kept).copied());
        all.map(|(buffer, bytes)| (buffer, bytes.max(1)))
    }
}

/// What every card of one copy of a model holds and allocates, stage by stage and rank by rank. Where `kind` or
/// `kernels` is nothing, cards exchange and have kernels as their profiles say.
///
/// # Panics
/// If a stage names cards that the cluster has not.
#[must_use]
pub fn card_layouts(
    model: &Model,
    cluster: &Cluster,
    stages: &[Stage],
    space: Space,
    kind: Option<ExchangeKind>,
    kernels: Option<Kernels>,
) -> Vec<CardLayout> {
    let mut list = Vec::new();
    for (index, stage) in stages.iter().enumerate() {
        let ends = (index == 0, index + 1 == stages.len());
        let mut exchanging = exchanging(cluster, stage, kind);
        exchanging.kernels = kernels.unwrap_or(exchanging.kernels);
        let sizing = sizing(model, stage, space, ends, exchanging);
        for (rank, &card) in stage.group.cards.iter().enumerate() {
            let weights = WeightLayout::of(model, stage, rank, ends);
            let (buffers, mut kept) = (sizing.list(rank), Vec::new());
            sizing.kept(rank, |buffer, bytes| kept.push((buffer, bytes)));
            let (stage, host, gpu) = (index, sizing.host(rank), sizing.gpu(rank));
            list.push(CardLayout { card, stage, rank, weights, buffers, kept, host, gpu });
        }
    }
    list
}

fn exchanging(cluster: &Cluster, stage: &Stage, kind: Option<ExchangeKind>) -> Exchanging {
    let kind = kind.unwrap_or_else(|| exchange::exchange_kind(cluster, &stage.group.cards));
    exchange::exchanging(cluster, &stage.group, kind)
}

/// A card's place in a layout.
#[derive(Debug, Clone)]
pub struct Member {
    /// The card's index.
    pub card: usize,
    /// The stage.
    pub stage: usize,
    /// The rank in the stage's group.
    pub rank: usize,
    /// What it holds of each layer.
    pub shard: Shard,
    pub(crate) buffers: BufferIds,
    pub(crate) holding: Holding,
}

impl Member {
    /// Where a buffer begins.
    #[must_use]
    pub fn place(&self, buffer: Buffer) -> Place {
        self.buffers.place(buffer)
    }

    /// Where the card's matrices begin, and their bytes.
    pub fn matrices(&self) -> impl Iterator<Item = (Place, u64)> + '_ {
        let bytes = |held: &Held| held.rows * held.quant.row_bytes(held.cols);
        self.holding.matrices().map(move |held| (held.place, bytes(&held)))
    }
}

/// Where a piece of a member's weights is, and whether rows of weights stay where the model's file has them.
pub type Placing<'w> = (&'w mut dyn FnMut(usize, &Piece) -> Place, bool);

/// Writes programs for one copy of a model that is laid out over cards.
#[derive(Debug, Clone)]
pub struct Programs {
    model: Model,
    numerics: Numerics,
    stages: Vec<Stage>,
    members: Vec<Member>,
    /// The members of each stage.
    groups: Vec<Range<usize>>,
    /// How each stage splits its matrices and exchanges.
    kinds: Vec<(Split, ExchangeKind)>,
    space: Space,
}

impl Programs {
    /// Programs on buffers that have been allocated: `weight` says where weights are, `buffer` which buffer of a member is for what, `kind`
    /// how cards exchange if not as their profiles say.
    #[must_use]
    #[allow(clippy::too_many_arguments, reason = "a layout, and where its parts are")]
    pub fn bound(
        model: &Model,
        cluster: &Cluster,
        stages: &[Stage],
        space: Space,
        numerics: Numerics,
        kind: Option<ExchangeKind>,
        (weight, in_file): Placing<'_>,
        buffer: &mut dyn FnMut(usize, Buffer) -> BufferId,
    ) -> Programs {
        let (mut members, mut groups, mut kinds) = (Vec::new(), Vec::new(), Vec::new());
        for (index, stage) in stages.iter().enumerate() {
            let ends = (index == 0, index + 1 == stages.len());
            let exchanging = exchanging(cluster, stage, kind);
            let first = members.len();
            for (rank, &card) in stage.group.cards.iter().enumerate() {
                let at = members.len();
                let (shard, split) = (&stage.group.shards[rank], stage.group.split);
                let mut put = |piece: &Piece, _: u64| weight(at, piece);
                let mut holder = Holder { model, shard, split, put: &mut put, in_file };
                let holding = holder.all(stage.layers.clone(), ends);
                let list = sizes(model, stage, rank, space, ends, exchanging);
                let buffers = BufferIds::new(list.iter().map(|&(of, _)| (of, buffer(at, of))));
                let shard = shard.clone();
                members.push(Member { card, stage: index, rank, shard, buffers, holding });
            }
            groups.push(first..members.len());
            kinds.push((stage.group.split, exchanging.kind));
        }
        let (model, stages) = (model.clone(), stages.to_vec());
        Programs { model, numerics, stages, members, groups, kinds, space }
    }

    /// Programs on symbols: buffers by [`Buffer::symbol`], weights by where they lie in the card's buffer of
    /// weights.
    #[must_use]
    pub fn symbolic(model: &Model, cluster: &Cluster, stages: &[Stage], space: Space) -> Programs {
        let layouts = card_layouts(model, cluster, stages, space, None, None);
        let places: Vec<std::collections::HashMap<&Piece, u64>> = layouts
            .iter()
            .map(|layout| layout.weights.pieces.iter().map(|(piece, at)| (piece, *at)).collect())
            .collect();
        let mut weight = |member: usize, piece: &Piece| {
            let offset = places[member].get(piece).copied().unwrap_or(0);
            Place { buffer: Buffer::Weights.symbol(), offset }
        };
        let mut buffer = |_: usize, of: Buffer| of.symbol();
        let numerics = Numerics::default();
        let weight: Placing<'_> = (&mut weight, false);
        Programs::bound(model, cluster, stages, space, numerics, None, weight, &mut buffer)
    }

    /// The cards, in the order of stages and ranks.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// The members of each stage.
    #[must_use]
    pub fn groups(&self) -> &[Range<usize>] {
        &self.groups
    }

    /// What there is room for.
    #[must_use]
    pub fn space(&self) -> Space {
        self.space
    }

    /// Members of the last stage.
    #[must_use]
    pub fn last(&self) -> Range<usize> {
        self.groups.last().cloned().unwrap_or(0..0)
    }

    /// Refuses a step that cannot be.
    ///
    /// # Errors
    /// [`PlanError::Request`] that names what is too much.
    pub fn check(&self, step: &Step<'_>) -> Result<(), PlanError> {
        let refused = |what: String| Err(PlanError::Request { what });
        let (rows, most) = (step.rows(), self.space.batch);
        if rows == 0 || rows > most || step.parts.iter().any(|part| part.tokens.is_empty()) {
            return refused(format!("a step of {rows} tokens, from 1 to {most} are possible"));
        }
        if step.turn >= self.space.turns {
            let (turn, turns) = (step.turn, self.space.turns);
            return refused(format!("a step of turn {turn}, there are {turns}"));
        }
        for part in step.parts {
            let (end, context) =
                (part.past.saturating_add(part.tokens.len() as u64), self.space.context);
            if end > context {
                return refused(format!("{end} tokens in a context of {context}"));
            }
            let (needed, blocks) = (KvShape::blocks_for(end), self.space.blocks);
            let unknown = part.blocks.iter().find(|&&block| u64::from(block) >= blocks);
            if (part.blocks.len() as u64) < needed || unknown.is_some() {
                let given = part.blocks.len();
                let what = format!("{given} blocks for {needed}, numbers up to {blocks}");
                return refused(what);
            }
            let outputs = part.asked();
            if part.want != Want::Nothing && !(1..=part.tokens.len() as u64).contains(&outputs) {
                let tokens = part.tokens.len();
                return refused(format!("{outputs} outputs of {tokens} tokens"));
            }
            if let Want::Best(k) = part.want
                && !(1..=MAX_CANDIDATES).contains(&u64::from(k))
            {
                let what = format!("{k} candidates, from 1 to {MAX_CANDIDATES} are possible");
                return refused(what);
            }
            let vocab = self.model.vocab;
            if let Some(token) = part.tokens.iter().find(|&&token| u64::from(token) >= vocab) {
                return refused(format!("token {token} of a vocabulary of {vocab}"));
            }
        }
        self.check_windows(step)?;
        let (parts, outputs) = (step.parts.len() as u64, step.outputs());
        let (most, asked) = (self.space.sequences, self.space.outputs);
        if parts > most || outputs > asked {
            let possible = format!("{most} with {asked} are possible");
            let what = format!("{parts} sequences with {outputs} outputs, {possible}");
            return refused(what);
        }
        let blocks = self.space.blocks;
        let unknown = |pair: &&[u32; 2]| pair.iter().any(|&block| u64::from(block) >= blocks);
        if let Some([from, to]) = step.copies.iter().find(unknown) {
            return refused(format!("a copy from block {from} to {to} of {blocks} blocks"));
        }
        Ok(())
    }

    /// Refuses tables of layers with a window that cannot be.
    fn check_windows(&self, step: &Step<'_>) -> Result<(), PlanError> {
        let refused = |what: String| Err(PlanError::Request { what });
        let cache = self.windows();
        let blocks = cache.map_or(0, |cache| cache.blocks);
        for part in step.parts.iter().filter(|_| cache.is_some()) {
            let (given, needed) = (part.windowed.len(), part.blocks.len());
            if given == 0 && step.parts.len() > 1 {
                return refused("several sequences without blocks for layers with windows".into());
            }
            if given != 0 && given < needed {
                return refused(format!("{given} blocks of layers with windows for {needed}"));
            }
        }
        let tables = step.parts.iter().flat_map(|part| part.windowed);
        let mut named = tables.chain(step.windowed_copies.as_flattened());
        match named.find(|&&block| u64::from(block) >= blocks && cache.is_some()) {
            Some(block) => refused(format!("block {block} of {blocks} of layers with windows")),
            None => Ok(()),
        }
    }

    /// The KV cache of layers with a window, where these have blocks of their own.
    #[must_use]
    pub fn windows(&self) -> Option<WindowCache> {
        WindowCache::of(&self.model, self.space)
    }

    /// The programs of all members for a step. `route` lists the members that a message from one to another
    /// passes, both included.
    #[must_use]
    pub fn step(
        &self,
        step: &Step<'_>,
        route: &dyn Fn(usize, usize) -> Vec<usize>,
    ) -> Vec<Vec<Op>> {
        self.audited(step, route, 0).0
    }

    /// The same with what the taps in them check, member by member. With a `salt` of 0 these are the programs of
    /// [`Programs::step`]; any other checks as many operators as there is room for, each other ones.
    #[must_use]
    pub fn audited(
        &self,
        step: &Step<'_>,
        route: &dyn Fn(usize, usize) -> Vec<usize>,
        salt: u64,
    ) -> (Vec<Vec<Op>>, Vec<Taps>) {
        let programs = self.plain(step, route);
        if self.space.audit.is_none() {
            return (programs, Vec::new());
        }
        let tapped = programs.into_iter().enumerate().map(|(at, program)| {
            let member = &self.members[at];
            let stage = &self.stages[member.stage];
            let layers = stage.layers.len() as u64;
            let capacity = audit::capacity(&self.model, &member.shard, layers, self.space);
            let (model, space) = (&self.model, self.space);
            Auditing { model, space, step, salt, capacity }.apply(at, member, program)
        });
        tapped.unzip()
    }

    /// The programs of all members without taps, whatever is checked: for runners that capture what they do themselves.
    #[must_use]
    pub fn plain(
        &self,
        step: &Step<'_>,
        route: &dyn Fn(usize, usize) -> Vec<usize>,
    ) -> Vec<Vec<Op>> {
        let of = Context {
            model: &self.model,
            numerics: self.numerics,
            space: self.space,
            stages: &self.kinds,
            members: &self.members,
        };
        let mut writer = Writer::new(of, step, vec![Vec::new(); self.members.len()]);
        writer.data(0..self.members.len());
        writer.embed(self.groups[0].clone());
        for (index, stage) in self.stages.iter().enumerate() {
            let members = self.groups[index].clone();
            if index > 0 {
                let before = self.groups[index - 1].clone();
                writer.hand_over(before, members.clone(), stage.layers.start, route);
            }
            for layer in 0..stage.layers.len() {
                writer.layer(index, members.clone(), layer, stage.layers.start + layer);
            }
        }
        if step.outputs() > 0 {
            writer.head(self.stages.len() - 1, self.last());
        }
        writer.programs
    }

    /// The tables of a step, which every card's program begins with.
    #[must_use]
    pub fn tables(&self, step: &Step<'_>) -> Vec<u8> {
        let windows = self.windows();
        StepTables::of(step, windows).bytes(step, windows)
    }

    /// What a member reads out for the host after a step, for all of its outputs: candidates, [`Step::candidates`] of each
    /// card of the last stage for each output, each card's best first; or logits, output by output.
    #[must_use]
    pub fn wanted(&self, member: usize, step: &Step<'_>) -> Wanted {
        let last = self.last();
        let one = &self.members[member];
        let outputs = step.outputs();
        let mut wanted = Wanted::default();
        if let Some(k) = step.candidates().filter(|_| member == last.start) {
            let buffer = if last.len() == 1 { Buffer::Best } else { Buffer::AllBest };
            let bytes = outputs * u64::from(k) * 8 * last.len() as u64;
            wanted.best = Some((self.result(member, buffer, step.turn), bytes));
        }
        if last.contains(&member) && step.parts.iter().any(|part| part.want == Want::Logits) {
            let bytes = outputs * len(&one.shard.vocab) * 4;
            wanted.logits = Some((self.result(member, Buffer::Logits, step.turn), bytes));
        }
        wanted
    }

    fn result(&self, member: usize, buffer: Buffer, turn: u64) -> Place {
        let one = &self.members[member];
        let ranks = self.groups[one.stage].len() as u64;
        let bytes = result_bytes(buffer, self.space, &one.shard, ranks);
        let place = one.place(buffer);
        Place { offset: place.offset + turn * bytes, ..place }
    }

    /// Where a member's logits of a step are, output by output.
    #[must_use]
    pub fn logits_place(&self, member: usize, turn: u64) -> Place {
        self.result(member, Buffer::Logits, turn)
    }

    /// What copying a block to another takes on a member, layer by layer: bytes from the start of its KV cache, where
    /// they go, and how many. Machines know no windows: layers that have blocks of their own are left out.
    pub fn block_copies(
        &self,
        member: usize,
        from: u32,
        to: u32,
    ) -> impl Iterator<Item = [u64; 3]> + use<> {
        let one = &self.members[member];
        let (heads, head_size) = (len(&one.shard.kv_heads), self.model.head_size);
        let bytes = KvShape { heads, head_size, quant: self.space.kv }.block_bytes();
        let (windows, space) = (self.windows(), self.space);
        let layers = one.holding.layers.iter().filter(|_| bytes > 0);
        // Layers with blocks of their own are copied by the tables of those.
        let starts = layers.scan(0, move |start, layer| {
            let own = *start;
            *start += WindowCache::of_layer(windows, layer.window, space);
            Some((windows.is_none() || layer.window.is_none()).then_some(own))
        });
        let starts: Vec<u64> = starts.flatten().collect();
        starts.into_iter().map(move |start| {
            let at = |block: u32| (start + u64::from(block)) * bytes;
            [at(from), at(to), bytes]
        })
    }

    /// Bytes of a member's audit buffer for one step; nothing where nothing is checked.
    #[must_use]
    pub fn audit_bytes(&self, member: usize) -> u64 {
        let one = &self.members[member];
        let layers = self.stages[one.stage].layers.len() as u64;
        match self.space.audit.is_none() {
            true => 0,
            false => audit::capacity(&self.model, &one.shard, layers, self.space),
        }
    }

    /// Bytes from which on something is looked at less often, half as often for twice as many; and bytes of which nothing
    /// that is looked at has more.
    #[must_use]
    pub fn audit_limits(&self) -> [u64; 2] {
        [audit::large(&self.model), audit::LARGEST]
    }

    /// Cells of a member's KV cache that a step looks at, of one of its sequences.
    #[must_use]
    pub fn cached_cells(&self, member: usize, step: &Step<'_>, dice: &mut Dice) -> Vec<CachedCell> {
        let parts = step.parts;
        let part = parts.get(dice.below(parts.len() as u64) as usize);
        part.map_or_else(Vec::new, |part| {
            audit::cells(&self.model, self.space, (member, &self.members[member]), part, dice)
        })
    }

    /// Where a member's taps of a step are, for the host to read.
    #[must_use]
    pub fn audit_place(&self, member: usize, turn: u64) -> Place {
        let one = &self.members[member];
        let layers = self.stages[one.stage].layers.len() as u64;
        let bytes = audit::capacity(&self.model, &one.shard, layers, self.space);
        let place = one.place(Buffer::Audit);
        Place { offset: place.offset + turn * bytes, ..place }
    }
}

/// What the host reads of a card after a step: where, and how many bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Wanted {
    /// Candidates.
    pub best: Option<(Place, u64)>,
    /// Logits.
    pub logits: Option<(Place, u64)>,
}
