// SPDX-License-Identifier: Apache-2.0
//! From a card's program to the lines of the kernel. Pure: nothing is launched here.
//!
//! Every operator has a line of its own. Of one row of inputs, operators that follow each other become one line: blocks
//! of the kernel wait for each other after a line, and that takes about as long as a small matrix. The results have the
//! same bits either way.

use std::ops::Range;

use spanker_model::Quant;
use spanker_plan::Op;
use spanker_runtime::{Place, Work};

use super::streams::{self, Rounding, Source};
use crate::CudaError;

/// Threads of a block, as the kernel has it.
pub(super) const THREADS: u32 = 256;
/// Lanes in which squares are added.
const NORM_LANES: u32 = 128;
/// Terms of products that a block keeps at most, where a row has fewer.
const TERMS: u32 = 11264;
/// Rows of a tile at most.
const MOST_ROWS: u32 = 1024;
/// Rows of weights of a tile that meets many rows of inputs, and where a block has less shared memory.
pub(crate) const TILE_ROWS: [u32; 2] = [32, 16];
/// Positions whose values are added up by themselves.
const RUN: u32 = 64;

/// A line of the kernel.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Line {
    pub(crate) kind: u32,
    pub(crate) n: [u32; 19],
    pub(crate) p: [u64; 12],
}

/// Kinds of lines, as the kernel numbers them.
pub(crate) mod kind {
    pub(crate) const EMBED: u32 = 1;
    pub(crate) const NORM: u32 = 2;
    pub(crate) const QUANTIZE: u32 = 3;
    pub(crate) const MATMUL: u32 = 4;
    pub(crate) const ROTATE: u32 = 5;
    pub(crate) const HALVE: u32 = 6;
    pub(crate) const GATE: u32 = 7;
    pub(crate) const ADD: u32 = 8;
    pub(crate) const ATTEND: u32 = 9;
    pub(crate) const FILL: u32 = 10;
    pub(crate) const COPY: u32 = 11;
    pub(crate) const VECTOR: u32 = 12;
    pub(crate) const ROUND_Q4_K: u32 = 13;
    pub(crate) const STREAMED: u32 = 14;
}

/// How a product's results are kept.
const STORE: u32 = 0;
pub(super) const INTO: u32 = 1;
pub(super) const GATED: u32 = 2;

/// What lines are made for.
pub(super) struct Setting<'a> {
    /// Where a place is in the processor's memory.
    pub(super) address: &'a dyn Fn(Place) -> u64,
    /// Blocks of the kernel.
    pub(super) blocks: u32,
    /// Zeroed words, one for each block of inputs that is put together by several blocks of the kernel.
    pub(super) counters: u64,
    /// How many of them there are.
    pub(super) counted: u32,
    /// Positions whose scores fit into shared memory.
    pub(super) scores: u32,
    /// Rows of weights of a tile that meets many rows of inputs.
    pub(super) tile_rows: u32,
    /// Blocks of the kernel whose weights come ahead of time, or 0 where it cannot be had.
    pub(super) streams: u32,
}

/// A part of a card's program.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Part {
    /// Lines for the kernel.
    Lines(Vec<Line>),
    /// Lines for the kernel whose weights come ahead of time.
    Streamed(Vec<Line>),
    /// Something between cards.
    Exchange(Op),
}

/// A program as kernels run it, with the shared memory that each needs.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Parts {
    pub(super) parts: Vec<Part>,
    pub(super) shared: u32,
    /// Besides the weights that are on their way.
    pub(super) streamed: u32,
    /// For every line and every exchange, in order: the operators of the program that it does. What takes no line
    /// belongs to the next one.
    pub(super) ops: Vec<Range<usize>>,
}

/// Parts at most of a program with lines whose weights come ahead of time: starting a kernel takes longer than that saves.
const MOST_PARTS: usize = 4;

/// Turns a card's program into lines. `alone` if no other card is in its group.
pub(super) fn translate(
    program: &[Op],
    alone: bool,
    setting: &Setting<'_>,
) -> Result<Parts, CudaError> {
    let is_done = |(_, op): &(usize, &Op)| !matches!(op, Op::Mark { .. });
    let (numbers, ops): (Vec<usize>, Vec<&Op>) = program.iter().enumerate().filter(is_done).unzip();
    let worth = |op: &&Op| vector(Some(op)).is_some_and(|product| streams::is_streamed(&product));
    if alone && setting.streams > 0 && ops.iter().any(worth) {
        let parts = written(&ops, &numbers, alone, setting, setting.streams)?;
        if parts.parts.len() <= MOST_PARTS {
            return Ok(parts);
        }
    }
    written(&ops, &numbers, alone, setting, 0)
}

/// A program as lines, with weights ahead of time in so many blocks. `numbers` are those of the operators.
fn written(
    ops: &[&Op],
    numbers: &[usize],
    alone: bool,
    setting: &Setting<'_>,
    streams: u32,
) -> Result<Parts, CudaError> {
    let parts = Parts::default();
    let mut writer = Writer { setting, parts, lines: Vec::new(), alone, streams, rounding: None };
    let (mut rest, mut begun) = (ops, 0);
    while let Some(first) = rest.first() {
        let before = writer.parts.ops.len();
        let taken = match writer.fused(rest)? {
            0 => {
                writer.plain(first)?;
                1
            }
            taken => taken,
        };
        rest = &rest[taken..];
        let done = ops.len() - rest.len();
        if writer.parts.ops.len() > before {
            let own = numbers[begun]..numbers[done - 1] + 1;
            writer.parts.ops[before..].fill(own);
            begun = done;
        }
    }
    writer.close();
    Ok(writer.parts)
}

struct Writer<'a> {
    setting: &'a Setting<'a>,
    parts: Parts,
    lines: Vec<Line>,
    /// Whether what is exchanged within the group stays where it is.
    alone: bool,
    /// Blocks of the kernel whose weights come ahead of time, or 0.
    streams: u32,
    /// What the next operator, a product, rounds by itself.
    rounding: Option<Rounding>,
}

pub(super) fn small(number: u64) -> Result<u32, CudaError> {
    u32::try_from(number)
        .map_err(|_| CudaError::Unsupported(format!("{number} elements in one operator")))
}

fn bytes_of(type_id: u32) -> Result<Quant, CudaError> {
    Quant::from_ggml_id(type_id)
        .ok_or_else(|| CudaError::Unsupported(format!("numbers of GGML's type {type_id}")))
}

/// A product of one row of inputs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Vector {
    pub(super) a: Place,
    pub(super) b: Place,
    pub(super) out: Place,
    pub(super) width: u64,
    pub(super) rows: u64,
    pub(super) types: [u32; 2],
}

fn vector(op: Option<&&Op>) -> Option<Vector> {
    match op {
        Some(Op::Work(Work::Matmul { a, b, out, shape: [1, width, rows], types })) => {
            let (width, rows) = (*width, *rows);
            Some(Vector { a: *a, b: *b, out: *out, width, rows, types: *types })
        }
        _ => None,
    }
}

/// Where a gather of one part, or a quantisation, moves what is at a place to.
fn gathered(op: Option<&&Op>, at: Place) -> Option<Place> {
    match op {
        Some(Op::Gather { parts, rows: 1, from, into }) if parts.len() == 1 && *from == at => {
            Some(*into)
        }
        _ => None,
    }
}

fn quantized(op: Option<&&Op>, at: Place) -> Option<(Place, u64, u32)> {
    match op {
        Some(Op::Work(Work::Quantize { from, into, rows: 1, width, quant })) if *from == at => {
            Some((*into, *width, *quant))
        }
        _ => None,
    }
}

/// A quantisation of one row of numbers, with the gather that moves its blocks: what it is, and how many operators.
fn rounding_of(ops: &[&Op], numbers: Place) -> Option<(Rounding, usize)> {
    let (place, width, quant) = quantized(ops.first(), numbers)?;
    let moved = gathered(ops.get(1), place);
    let blocks = moved.unwrap_or(place);
    Some((Rounding { blocks, numbers, width, quant }, 1 + usize::from(moved.is_some())))
}

/// Whether nobody reads blocks before something else is written there.
fn is_unread(blocks: Place, rest: &[&Op]) -> bool {
    for op in rest {
        let (read, written) = match op {
            Op::Work(Work::Matmul { a, out, .. }) => (Some(*a), Some(*out)),
            Op::Work(Work::Copy { from, into, .. } | Work::Quantize { from, into, .. })
            | Op::Gather { from, into, .. } => (Some(*from), Some(*into)),
            Op::Send { from, .. } => (Some(*from), None),
            _ => (None, None),
        };
        if read == Some(blocks) {
            return false;
        }
        if written == Some(blocks) {
            return true;
        }
    }
    true
}

/// What the inputs of a product are made of.
#[derive(Clone, Copy)]
pub(super) struct Normed {
    pub(super) from: Place,
    pub(super) weight: Place,
    pub(super) epsilon: u32,
}

impl Writer<'_> {
    fn at(&self, place: Place) -> u64 {
        (self.setting.address)(place)
    }

    fn push(&mut self, line: Line, shared: u32) {
        // Either kernel may come to lines that both know.
        let (plain, streamed) = match line.kind {
            kind::STREAMED => (0, shared),
            kind::ATTEND => (shared, shared),
            _ => (shared, 0),
        };
        self.parts.shared = self.parts.shared.max(plain);
        self.parts.streamed = self.parts.streamed.max(streamed);
        self.parts.ops.push(0..0);
        self.lines.push(line);
    }

    fn close(&mut self) {
        let runs = streams::runs(std::mem::take(&mut self.lines));
        self.parts.parts.extend(runs.into_iter().map(|(streamed, run)| match streamed {
            true => Part::Streamed(run),
            false => Part::Lines(run),
        }));
    }

    /// Whether rounding is left to the product that uses the blocks: if it comes next, with weights that come ahead of
    /// time, and nobody else reads them. `rest` is what follows.
    fn is_rounded_later(&self, rounding: &Rounding, rest: &[&Op]) -> bool {
        let uses = |op: Option<&&Op>| vector(op).filter(|product| product.a == rounding.blocks);
        self.streams > 0
            && Some(rounding.quant) == Quant::Q8_0.ggml_id()
            && uses(rest.first()).is_some_and(|product| {
                streams::is_streamed(&product) && product.width == rounding.width
            })
            && rest.get(1..).is_none_or(|rest| is_unread(rounding.blocks, rest))
    }

    /// Writes the line of products whose weights come ahead of time. Says whether they can.
    fn streamed(
        &mut self,
        products: &[Vector],
        normed: Option<Normed>,
        keep: u32,
    ) -> Result<bool, CudaError> {
        if self.streams == 0 || !products.iter().all(streams::is_streamed) {
            return Ok(false);
        }
        let rounding = self.rounding.filter(|rounding| rounding.blocks == products[0].a);
        let source = match (normed, rounding) {
            (Some(normed), _) => Source::Normed(normed),
            (None, Some(rounding)) => Source::Rounded(rounding.numbers),
            (None, None) => return Ok(false),
        };
        let line = streams::line(products, &source, keep, self.streams, self.setting.address)?;
        let Some((line, shared)) = line else { return Ok(false) };
        if normed.is_none() {
            self.rounding = None;
        }
        self.push(line, shared);
        Ok(true)
    }

    /// Rounds now what was left to a product whose weights cannot come ahead of time after all.
    fn round_now(&mut self) -> Result<(), CudaError> {
        if let Some(Rounding { blocks, numbers, width, quant }) = self.rounding.take() {
            let round = Work::Quantize { from: numbers, into: blocks, rows: 1, width, quant };
            self.work(&round)?;
        }
        Ok(())
    }

    /// Writes one line for several operators. Returns how many these are.
    fn fused(&mut self, ops: &[&Op]) -> Result<usize, CudaError> {
        match ops.first() {
            Some(Op::Work(Work::Norm { from, weight, into, rows: 1, epsilon, .. }))
                if from != into =>
            {
                let normed = Normed { from: *from, weight: *weight, epsilon: *epsilon };
                self.normed_products(ops, normed, *into)
            }
            Some(Op::Work(Work::Quantize { from, rows: 1, .. })) => {
                let later = rounding_of(ops, *from)
                    .filter(|(rounding, taken)| self.is_rounded_later(rounding, &ops[*taken..]));
                let Some((rounding, taken)) = later else { return Ok(0) };
                self.rounding = Some(rounding);
                Ok(taken)
            }
            Some(Op::Work(Work::Matmul { shape: [1, ..], .. })) => self.added_product(ops),
            Some(Op::Work(Work::Rotate { rows: 1, .. })) => self.turned_attention(ops),
            _ => Ok(0),
        }
    }

    /// Norm, quantisation, and the products of what comes out.
    fn normed_products(
        &mut self,
        ops: &[&Op],
        normed: Normed,
        into: Place,
    ) -> Result<usize, CudaError> {
        let mut taken = 1;
        let mut inputs = vec![into];
        while let Some((place, _, _)) = quantized(ops.get(taken), into) {
            inputs.push(place);
            taken += 1;
        }
        let mut products = Vec::new();
        while let Some(product) = vector(ops.get(taken)) {
            if !inputs.contains(&product.a) {
                break;
            }
            products.push(product);
            taken += 1;
        }
        if products.is_empty() {
            return Ok(0);
        }
        if let [gate, up] = products[..]
            && let Some(more) = self.gated(&ops[taken..], gate, up, normed)?
        {
            return Ok(taken + more);
        }
        for run in products.chunk_by(|one, two| one.a == two.a) {
            for some in run.chunks(3) {
                self.vectors(some, Some(normed), STORE, None)?;
            }
        }
        Ok(taken)
    }

    /// Gate and up, what they make together, and its blocks.
    fn gated(
        &mut self,
        rest: &[&Op],
        one: Vector,
        two: Vector,
        normed: Normed,
    ) -> Result<Option<usize>, CudaError> {
        let plain = bytes_of(one.types[1])?.block() == 1;
        let same = one.a == two.a && one.rows == two.rows && !plain;
        match rest.first() {
            Some(Op::Work(Work::Gate { gate, up, into, elements }))
                if same
                    && (*gate, *up, *into) == (one.out, two.out, one.out)
                    && *elements == one.rows => {}
            _ => return Ok(None),
        }
        let mut taken = 1;
        let (mut blocks, mut later) = (None, None);
        if let Some((rounding, more)) = rounding_of(&rest[taken..], one.out)
            && rounding.width == one.rows
            && bytes_of(rounding.quant)?.block() > 1
            && rounding.width / 32 <= u64::from(self.setting.counted)
        {
            taken += more;
            let streamed = [one, two].iter().all(streams::is_streamed);
            match streamed && self.is_rounded_later(&rounding, &rest[taken..]) {
                true => later = Some(rounding),
                false => blocks = Some((rounding.blocks, rounding.quant)),
            }
        }
        self.vectors(&[one, two], Some(normed), GATED, blocks)?;
        self.rounding = later;
        Ok(Some(taken))
    }

    /// A product that is added to what is there.
    fn added_product(&mut self, ops: &[&Op]) -> Result<usize, CudaError> {
        let Some(product) = vector(ops.first()) else { return Ok(0) };
        let moved = gathered(ops.get(1), product.out);
        let out = moved.unwrap_or(product.out);
        let taken = 1 + usize::from(moved.is_some());
        match ops.get(taken) {
            Some(Op::Work(Work::Reduce { into, sources, elements, .. }))
                if sources[..] == [*into, out] && *elements == product.rows =>
            {
                let product = Vector { out: *into, ..product };
                self.vectors(&[product], None, INTO, None)?;
                Ok(taken + 1)
            }
            _ => Ok(0),
        }
    }

    /// One line for products that share their inputs.
    fn vectors(
        &mut self,
        products: &[Vector],
        normed: Option<Normed>,
        keep: u32,
        blocks: Option<(Place, u32)>,
    ) -> Result<(), CudaError> {
        let Some(&first) = products.first() else { return Ok(()) };
        if blocks.is_none() && self.streamed(products, normed, keep)? {
            return Ok(());
        }
        self.round_now()?;
        let width = small(first.width)?;
        let mut line = Line { kind: kind::VECTOR, ..Line::default() };
        line.n[0] = width;
        line.n[1] = first.types[0];
        line.n[4] = keep;
        match normed {
            Some(Normed { from, weight, epsilon }) => {
                line.n[2] = 1;
                line.n[3] = epsilon;
                line.p[0] = self.at(from);
                line.p[1] = self.at(weight);
            }
            None => line.p[0] = self.at(first.a),
        }
        for (at, product) in products.iter().enumerate() {
            line.n[6 + 2 * at] = product.types[1];
            line.n[7 + 2 * at] = small(product.rows)?;
            line.p[2 + at] = self.at(product.b);
            line.p[5 + at] = self.at(product.out);
        }
        let gated = keep == GATED;
        if gated {
            line.p[6] = self.setting.counters;
        }
        if let Some((place, quant)) = blocks {
            line.n[12] = quant;
            line.p[7] = self.at(place);
        }
        let rows: u64 = products.iter().map(|product| product.rows).sum();
        let weights = bytes_of(first.types[1])?;
        let units = width / 32;
        let row = NORM_LANES * 8 + 2 * width * 4;
        let shared = if weights.block() == 1 {
            let tile = small(rows.div_ceil(u64::from(self.setting.blocks)))?.clamp(1, MOST_ROWS);
            line.n[5] = tile;
            row + tile * 4
        } else {
            let stride = stride(if weights.block() == 256 { units / 8 } else { units });
            let each = if gated { 2 * stride } else { stride };
            let rows = if gated { small(first.rows)? } else { small(rows)? };
            let tile = tile(rows, each, self.setting.blocks);
            line.n[5] = tile;
            units * 40 + 48 + (tile * each * 4).max(if normed.is_some() { row } else { units * 40 })
        };
        let matrices = if gated { 1 } else { products.len() };
        let mut tiles = 0;
        for at in 0..3 {
            let rows = if at < matrices { line.n[7 + 2 * at] } else { 0 };
            tiles += rows.div_ceil(line.n[5]);
            line.n[13 + at] = tiles;
        }
        self.push(line, shared);
        Ok(())
    }

    /// Turning, keeping and looking back, in one line.
    fn turned_attention(&mut self, ops: &[&Op]) -> Result<usize, CudaError> {
        let [
            Op::Work(Work::Rotate { data: queries, table, dims, pairs, .. }),
            Op::Work(Work::Rotate { data: new_keys, .. }),
            Op::Work(Work::Halve { from: keys_from, into: keys_into, .. }),
            Op::Work(Work::Halve { from: new_values, into: values_into, .. }),
            Op::Work(attend @ Work::Attend { queries: asked, keys, values, into, head_size, .. }),
            ..,
        ] = ops
        else {
            return Ok(0);
        };
        let belong =
            (queries, keys_from, keys_into, values_into) == (asked, new_keys, keys, values);
        if !belong {
            return Ok(0);
        }
        let (mut line, shared) = self.attention(attend)?;
        line.n[7] = 1;
        line.n[8] = small(*dims)?;
        line.n[9] = *pairs;
        line.p[4] = self.at(*table);
        line.p[5] = self.at(*new_keys);
        line.p[6] = self.at(*new_values);
        let mut taken = 5;
        if let Some((rounding, more)) = rounding_of(&ops[taken..], *into)
            && rounding.quant == Quant::Q8_0.ggml_id().unwrap_or_default()
            && head_size.is_multiple_of(32)
        {
            taken += more;
            match self.is_rounded_later(&rounding, &ops[taken..]) {
                true => self.rounding = Some(rounding),
                false => {
                    line.n[10] = rounding.quant;
                    line.p[7] = self.at(rounding.blocks);
                }
            }
        }
        self.push(line, shared);
        Ok(taken)
    }

    fn attention(&self, attend: &Work) -> Result<(Line, u32), CudaError> {
        let Work::Attend {
            queries,
            keys,
            values,
            into,
            rows,
            heads,
            kv_heads,
            head_size,
            group,
            offset,
            scale,
            ..
        } = *attend
        else {
            return Err(CudaError::Unsupported("attention of another kind".into()));
        };
        if head_size % 16 != 0 || head_size > u64::from(THREADS) {
            let what = format!(
                "heads of {head_size} numbers: multiples of 16 up to {THREADS} can be run on a GPU"
            );
            return Err(CudaError::Unsupported(what));
        }
        let mut line = Line { kind: kind::ATTEND, ..Line::default() };
        for (to, from) in line.n.iter_mut().zip([rows, heads, kv_heads, head_size, group, offset]) {
            *to = small(from)?;
        }
        line.n[6] = scale;
        for (to, from) in line.p.iter_mut().zip([queries, keys, values, into]) {
            *to = self.at(from);
        }
        let size = line.n[3];
        let warps = streams::THREADS.max(THREADS) / 32;
        // Runs whose values a block has near: more where it has a multiprocessor for itself, fewer of large heads.
        let near = RUN
            * if size > 128 {
                1
            } else if self.streams > 0 {
                4
            } else {
                2
            };
        line.n[11] = near;
        let each = 10 + 2 * near + near / RUN * 4;
        let shared = size * each + warps * 4 + self.setting.scores * 4;
        Ok((line, shared))
    }

    /// A line for one operator.
    fn plain(&mut self, op: &Op) -> Result<(), CudaError> {
        match op {
            Op::Work(work) => self.work(work),
            Op::Gather { parts, rows, from, into } if self.alone => {
                let row = parts.last().map_or(0, |part| part.end);
                let mut line = Line { kind: kind::COPY, ..Line::default() };
                line.n[0] = small(row * rows)?;
                line.p[0] = self.at(*from);
                line.p[1] = self.at(*into);
                self.push(line, 0);
                Ok(())
            }
            Op::Sum { .. } | Op::Broadcast { .. } if self.alone => Ok(()),
            exchange => {
                self.close();
                self.parts.ops.push(0..0);
                self.parts.parts.push(Part::Exchange(exchange.clone()));
                Ok(())
            }
        }
    }

    fn work(&mut self, work: &Work) -> Result<(), CudaError> {
        let (kind, n, p, shared): (u32, Vec<u64>, Vec<Place>, u32) = match work {
            // Tokens are given with the step.
            Work::Fill { length: 4, .. } => return Ok(()),
            Work::Fill { into, length, pattern } => {
                (kind::FILL, vec![length / 4, u64::from(*pattern)], vec![*into], 0)
            }
            Work::Embed { table, into, rows, width, quant, first, count, .. } => {
                let n = vec![*rows, *width, (*quant).into(), (*first).into(), (*count).into()];
                (kind::EMBED, n, vec![*table, *into], 0)
            }
            Work::Norm { from, weight, into, rows, width, epsilon } => {
                let n = vec![*rows, *width, u64::from(*epsilon)];
                let shared = NORM_LANES * 8 + small(*width)? * 4 + 8;
                (kind::NORM, n, vec![*from, *weight, *into], shared)
            }
            Work::Quantize { from, into, rows, width, quant } => {
                (kind::QUANTIZE, vec![*rows, *width, u64::from(*quant)], vec![*from, *into], 0)
            }
            Work::Matmul { a, b, out, shape: [1, width, rows], types } => {
                let (width, rows) = (*width, *rows);
                let one = Vector { a: *a, b: *b, out: *out, width, rows, types: *types };
                return self.vectors(&[one], None, STORE, None);
            }
            Work::Matmul { a, b, out, shape: [rows, width, outs], types: [input, weights] } => {
                let n = vec![*rows, *width, *outs, (*input).into(), (*weights).into()];
                let shared = many_rows(bytes_of(*weights)?, small(*width)?, self.setting.tile_rows);
                (kind::MATMUL, n, vec![*a, *b, *out], shared)
            }
            Work::Rotate { data, table, rows, heads, head_size, dims, pairs } => {
                let n = vec![*rows, *heads, *head_size, *dims, u64::from(*pairs)];
                (kind::ROTATE, n, vec![*data, *table], 0)
            }
            Work::Halve { from, into, elements } => {
                // How many of them a row has is filled in by what looks back on them.
                (kind::HALVE, vec![*elements], vec![*from, *into], 0)
            }
            Work::Gate { gate, up, into, elements } => {
                (kind::GATE, vec![*elements], vec![*gate, *up, *into], 0)
            }
            Work::Reduce { into, sources, elements, .. } => match sources[..] {
                [first, more] if first == *into => {
                    (kind::ADD, vec![*elements], vec![*into, more], 0)
                }
                _ => return Err(CudaError::Unsupported("sums of other than two".into())),
            },
            Work::Attend { rows, kv_heads, head_size, .. } => {
                // Keys and values were kept just before: so many to a row.
                let row = small(kv_heads * head_size)?;
                for line in self.lines.iter_mut().filter(|line| line.kind == kind::HALVE) {
                    if line.n[1] == 0 && u64::from(line.n[0]) != u64::from(row) * rows {
                        let what = "keys that are kept in other rows than they are looked back on";
                        return Err(CudaError::Unsupported(what.into()));
                    }
                    line.n[1] = row;
                }
                let (line, shared) = self.attention(work)?;
                self.push(line, shared);
                return Ok(());
            }
            other => return Err(CudaError::Unsupported(format!("{other:?} on a GPU"))),
        };
        let mut line = Line { kind, ..Line::default() };
        for (to, from) in line.n.iter_mut().zip(n) {
            *to = small(from)?;
        }
        for (to, from) in line.p.iter_mut().zip(p) {
            *to = self.at(from);
        }
        self.push(line, shared);
        Ok(())
    }
}

/// How far terms of rows are apart, as the kernel has it.
fn stride(count: u32) -> u32 {
    (count.div_ceil(4) | 1) * 4
}

/// Shared memory of a product of many rows by tiles of so many rows: inputs twice, and terms.
pub(crate) fn many_rows(weights: Quant, width: u32, tile: u32) -> u32 {
    if weights.block() == 1 { width * 4 } else { 2 * 16 * 32 * 40 + tile * 16 * 33 * 4 }
}

/// Rows of a tile: so that blocks have equally much to do, and terms fit.
fn tile(rows: u32, each: u32, blocks: u32) -> u32 {
    let most = (TERMS / each).clamp(1, MOST_ROWS);
    let rounds = rows.div_ceil(blocks).div_ceil(most).max(1);
    rows.div_ceil(blocks * rounds).max(1)
}

#[cfg(test)]
mod tests;
