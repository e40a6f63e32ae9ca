// SPDX-License-Identifier: Apache-2.0
//! From a card's program to the instructions of the kernel. Pure: nothing is launched here.
//!
//! Every operator has an instruction of its own. Of one row of inputs, operators that follow each other are fused into
//! one instruction: the kernel has a grid barrier after each, which costs about as much as a small matrix. The results
//! have the same bits either way.

use std::ops::Range;

use spanker_model::{KV_BLOCK, Quant};
use spanker_plan::{KvCache, Op};
use spanker_runtime::{Activation, Place, Work};

use super::machine::KERNEL_KV_TYPES;
use super::operands::{self, Instruction, Matrix, keep, kind};
use super::streams::{self, Rounding, Source};
use crate::CudaError;

/// Threads of a block, as the kernel has it.
pub(super) const THREADS: u32 = 256;
/// Lanes in which squares are added.
const NORM_LANES: u32 = 128;
/// Terms of products in a block's shared memory at most, where a row has fewer.
const TERMS: u32 = 11264;
/// Rows of a tile at most.
const MOST_ROWS: u32 = 1024;
/// Rows of weights of a tile of a product of many rows, and where a block has less shared memory.
pub(crate) const TILE_ROWS: [u32; 2] = [32, 16];
/// Positions of a block of the KV cache, whose values are added up by themselves.
const BLOCK: u32 = KV_BLOCK as u32;
/// Rows from which on those of a sequence may attend together, and sizes of heads that can, as the kernel has it.
const FEWEST_QUERIES: u64 = 16;
const TILED_HEADS: [u32; 2] = [64, 128];

/// What instructions are made for.
pub(super) struct Setting<'a> {
    /// Where a place is in the processor's memory.
    pub(super) address: &'a dyn Fn(Place) -> u64,
    /// Blocks of the kernel.
    pub(super) blocks: u32,
    /// Zeroed words, one for each block of inputs that is put together by several blocks of the kernel.
    pub(super) counters: u64,
    /// How many of them there are.
    pub(super) counted: u32,
    /// Where inputs for tensor cores are put, and the bytes that there are.
    pub(super) packed: (u64, u64),
    /// Rows of weights of a tile of a product of many rows.
    pub(super) tile_rows: u32,
    /// Blocks of the kernel whose weights are prefetched, or 0 where that is not possible.
    pub(super) streams: u32,
}

/// A part of a card's program.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Part {
    /// Instructions for the kernel.
    Instructions(Vec<Instruction>),
    /// Instructions for the kernel whose weights are prefetched.
    Streamed(Vec<Instruction>),
    /// Something between cards.
    Exchange(Op),
}

/// A program as kernels run it, with the shared memory that each needs.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Parts {
    pub(super) parts: Vec<Part>,
    pub(super) shared: u32,
    /// Without the ring of prefetched weights.
    pub(super) streamed: u32,
    /// For every instruction and every exchange, in order: the operators of the program that it does. An operator without an
    /// instruction belongs to the next one, and so does rounding that is left to it. Instructions that do operators together
    /// have the same.
    pub(super) ops: Vec<Range<usize>>,
}

/// Parts at most of a program with prefetched weights: starting more kernels costs more than prefetching saves.
const MOST_PARTS: usize = 4;

/// Turns a card's program into instructions. `alone` if no other card is in its group.
pub(super) fn translate(
    program: &[Op],
    alone: bool,
    setting: &Setting<'_>,
) -> Result<Parts, CudaError> {
    // The tables of a step are there before it begins.
    let is_done = |(_, op): &(usize, &Op)| !matches!(op, Op::Mark { .. } | Op::Data { .. });
    let (numbers, ops): (Vec<usize>, Vec<&Op>) = program.iter().enumerate().filter(is_done).unzip();
    let worth =
        |op: &&Op| row_product(Some(op)).is_some_and(|product| streams::is_streamed(&product));
    if alone && setting.streams > 0 && ops.iter().any(worth) {
        let parts = written(&ops, &numbers, alone, setting, setting.streams)?;
        if parts.parts.len() <= MOST_PARTS {
            return Ok(parts);
        }
    }
    written(&ops, &numbers, alone, setting, 0)
}

/// A program as instructions, with weights prefetched in so many blocks. `numbers` are those of the operators.
fn written(
    ops: &[&Op],
    numbers: &[usize],
    alone: bool,
    setting: &Setting<'_>,
    streams: u32,
) -> Result<Parts, CudaError> {
    let parts = Parts::default();
    let (instructions, rounding, packed) = (Vec::new(), None, None);
    let mut writer = Writer { setting, parts, instructions, alone, streams, rounding, packed };
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
        // Rounding that is left to the next instruction belongs to that.
        let later = writer.rounding.map_or(0, |rounding| rounding.operators);
        let done = ops.len() - rest.len() - later;
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
    instructions: Vec<Instruction>,
    /// Whether what is exchanged within the group stays where it is.
    alone: bool,
    /// Blocks of the kernel whose weights are prefetched, or 0.
    streams: u32,
    /// What the next operator, a product, rounds by itself.
    rounding: Option<Rounding>,
    /// How inputs came to be where they are for tensor cores, while they are there.
    packed: Option<Instruction>,
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
pub(super) struct RowProduct {
    pub(super) a: Place,
    pub(super) b: Place,
    pub(super) out: Place,
    pub(super) width: u64,
    pub(super) rows: u64,
    pub(super) types: [u32; 2],
}

fn row_product(op: Option<&&Op>) -> Option<RowProduct> {
    match op {
        Some(Op::Work(Work::Matmul { a, b, out, shape: [1, width, rows], types })) => {
            let (width, rows) = (*width, *rows);
            Some(RowProduct { a: *a, b: *b, out: *out, width, rows, types: *types })
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
    let operators = 1 + usize::from(moved.is_some());
    Some((Rounding { blocks, numbers, width, quant, operators }, operators))
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

    fn push(&mut self, instruction: Instruction, shared: u32) {
        // Either kernel may run instructions that both know.
        let (plain, streamed) = match instruction.kind() {
            kind::STREAMED => (0, shared),
            kind::ATTEND => (shared, shared),
            _ => (shared, 0),
        };
        // Others may write what it was made of.
        self.packed = self.packed.filter(|_| instruction.kind() == kind::MATMUL);
        self.parts.shared = self.parts.shared.max(plain);
        self.parts.streamed = self.parts.streamed.max(streamed);
        self.parts.ops.push(0..0);
        self.instructions.push(instruction);
    }

    fn close(&mut self) {
        self.packed = None;
        let runs = streams::runs(std::mem::take(&mut self.instructions));
        self.parts.parts.extend(runs.into_iter().map(|(streamed, run)| match streamed {
            true => Part::Streamed(run),
            false => Part::Instructions(run),
        }));
    }

    /// Whether rounding is left to the product that uses the blocks: if it comes next, with prefetched weights, and
    /// nobody else reads the blocks. `rest` is what follows.
    fn is_rounded_later(&self, rounding: &Rounding, rest: &[&Op]) -> bool {
        let uses =
            |op: Option<&&Op>| row_product(op).filter(|product| product.a == rounding.blocks);
        self.streams > 0
            && Some(rounding.quant) == Quant::Q8_0.ggml_id()
            && uses(rest.first()).is_some_and(|product| {
                streams::is_streamed(&product) && product.width == rounding.width
            })
            && rest.get(1..).is_none_or(|rest| is_unread(rounding.blocks, rest))
    }

    /// Writes the instruction of products whose weights are prefetched. Returns whether they can be.
    fn streamed(
        &mut self,
        products: &[RowProduct],
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
        let op = streams::products(products, &source, keep, self.streams, self.setting.address)?;
        let Some((op, shared)) = op else { return Ok(false) };
        if normed.is_none() {
            self.rounding = None;
        }
        self.push(Instruction::new(op), shared);
        Ok(true)
    }

    /// Rounds now what was left to a product whose weights cannot be prefetched after all.
    fn round_now(&mut self) -> Result<(), CudaError> {
        if let Some(Rounding { blocks, numbers, width, quant, .. }) = self.rounding.take() {
            let round = Work::Quantize { from: numbers, into: blocks, rows: 1, width, quant };
            self.work(&round)?;
        }
        Ok(())
    }

    /// Writes one instruction for several operators. Returns how many these are.
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
            Some(Op::Work(Work::RotateRows { rows: 1, .. })) => self.rotated_attention(ops),
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
        while let Some(product) = row_product(ops.get(taken)) {
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
                self.vectors(some, Some(normed), keep::STORE, None)?;
            }
        }
        Ok(taken)
    }

    /// Gate and up, what they make together, and its blocks.
    fn gated(
        &mut self,
        rest: &[&Op],
        one: RowProduct,
        two: RowProduct,
        normed: Normed,
    ) -> Result<Option<usize>, CudaError> {
        let plain = bytes_of(one.types[1])?.block() == 1;
        let same = one.a == two.a && one.rows == two.rows && !plain;
        match rest.first() {
            Some(Op::Work(Work::Gate {
                gate,
                up,
                into,
                elements,
                activation: Activation::Silu,
            })) if same
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
        self.vectors(&[one, two], Some(normed), keep::GATED, blocks)?;
        self.rounding = later;
        Ok(Some(taken))
    }

    /// A product that is added to what is there.
    fn added_product(&mut self, ops: &[&Op]) -> Result<usize, CudaError> {
        let Some(product) = row_product(ops.first()) else { return Ok(0) };
        let moved = gathered(ops.get(1), product.out);
        let out = moved.unwrap_or(product.out);
        let taken = 1 + usize::from(moved.is_some());
        match ops.get(taken) {
            Some(Op::Work(Work::Reduce { into, sources, elements, .. }))
                if sources[..] == [*into, out] && *elements == product.rows =>
            {
                let product = RowProduct { out: *into, ..product };
                self.vectors(&[product], None, keep::INTO, None)?;
                Ok(taken + 1)
            }
            _ => Ok(0),
        }
    }

    /// One instruction for products that share their inputs.
    fn vectors(
        &mut self,
        products: &[RowProduct],
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
        let mut op =
            operands::Vector { width, input_quant: first.types[0], keep, ..Default::default() };
        match normed {
            Some(Normed { from, weight, epsilon }) => {
                (op.is_normed, op.epsilon) = (1, epsilon);
                (op.input, op.norm_weight) = (self.at(from), self.at(weight));
            }
            None => op.input = self.at(first.a),
        }
        let gated = keep == keep::GATED;
        for (at, product) in products.iter().enumerate() {
            op.matrices[at] = Matrix { quant: product.types[1], rows: small(product.rows)? };
            op.weights[at] = self.at(product.b);
            op.outs[at] = self.at(product.out);
        }
        let rows: u64 = products.iter().map(|product| product.rows).sum();
        let weights = bytes_of(first.types[1])?;
        let units = width / 32;
        let row = NORM_LANES * 8 + 2 * width * 4;
        let shared = if weights.block() == 1 {
            op.tile_rows =
                small(rows.div_ceil(u64::from(self.setting.blocks)))?.clamp(1, MOST_ROWS);
            row + op.tile_rows * 4
        } else {
            let stride = stride(if weights.block() == 256 { units / 8 } else { units });
            let each = if gated { 2 * stride } else { stride };
            let rows = if gated { small(first.rows)? } else { small(rows)? };
            op.tile_rows = tile(rows, each, self.setting.blocks);
            let terms = op.tile_rows * each * 4;
            units * 40 + 48 + terms.max(if normed.is_some() { row } else { units * 40 })
        };
        let matrices = if gated { 1 } else { products.len() };
        let mut tiles = 0;
        for (at, (matrix, end)) in op.matrices.iter().zip(&mut op.tile_ends).enumerate() {
            let rows = if at < matrices { matrix.rows } else { 0 };
            tiles += rows.div_ceil(op.tile_rows);
            *end = tiles;
        }
        let mut instruction = Instruction::new(op);
        if let Some(gated) = instruction.get_mut::<operands::GatedVector>().filter(|_| gated) {
            gated.counters = self.setting.counters;
            let (blocks, quant) = blocks.map_or((0, 0), |(place, quant)| (self.at(place), quant));
            (gated.blocks, gated.block_quant) = (blocks, quant);
        }
        self.push(instruction, shared);
        Ok(())
    }

    /// Rotary embedding, the store to the KV cache, and attention, in one instruction.
    fn rotated_attention(&mut self, ops: &[&Op]) -> Result<usize, CudaError> {
        let [
            Op::Work(Work::RotateRows { data: queries, table, dims, pairs, .. }),
            Op::Work(Work::RotateRows { data: new_keys, .. }),
            Op::Work(Work::Keep { keys, values: new_values, cache: kept, .. }),
            Op::Work(attend @ Work::AttendBlocks { queries: asked, cache, into, .. }),
            ..,
        ] = ops
        else {
            return Ok(0);
        };
        if (queries, keys, kept) != (asked, new_keys, cache) {
            return Ok(0);
        }
        let (mut op, shared) = self.attention(attend)?;
        (op.is_fresh, op.dims, op.pairs) = (1, small(*dims)?, *pairs);
        op.table = self.at(*table);
        (op.new_keys, op.new_values) = (self.at(*new_keys), self.at(*new_values));
        let mut taken = 4;
        if let Some((rounding, more)) = rounding_of(&ops[taken..], *into)
            && rounding.quant == Quant::Q8_0.ggml_id().unwrap_or_default()
            && cache.head_size.is_multiple_of(32)
        {
            taken += more;
            match self.is_rounded_later(&rounding, &ops[taken..]) {
                true => self.rounding = Some(rounding),
                false => {
                    (op.block_quant, op.blocks) = (rounding.quant, self.at(rounding.blocks));
                }
            }
        }
        self.push(Instruction::new(op), shared);
        Ok(taken)
    }

    fn attention(&self, attend: &Work) -> Result<(operands::Attend, u32), CudaError> {
        let Work::AttendBlocks { queries, ref cache, into, rows, heads, group, offset, scores } =
            *attend
        else {
            return Err(CudaError::Unsupported("attention of another kind".into()));
        };
        if !scores.is_plain() {
            return Err(CudaError::Unsupported(format!("attention with {scores:?} on a GPU")));
        }
        let scale = scores.scale;
        let size = head_size(cache)?;
        let warps = streams::THREADS.max(THREADS) / 32;
        // Blocks whose values are in shared memory: more where one has a multiprocessor for itself, fewer of large heads.
        let near = BLOCK
            * if size > 128 {
                1
            } else if self.streams > 0 {
                4
            } else {
                2
            };
        let is_tiled = rows >= FEWEST_QUERIES && TILED_HEADS.contains(&size);
        let op = operands::Attend {
            rows: small(rows)?,
            heads: small(heads)?,
            kv_heads: small(cache.heads)?,
            head_size: size,
            group: small(group)?,
            offset: small(offset)?,
            scale,
            near,
            quant: cache.quant,
            is_tiled: u32::from(is_tiled),
            queries: self.at(queries),
            cache: self.at(cache.blocks),
            at: self.at(cache.rows),
            tables: self.at(cache.tables),
            into: self.at(into),
            ..Default::default()
        };
        // A query, a new key and value, sums of blocks, values and keys that are near, weights, and what blocks come to.
        let near_keys = near / 2 / BLOCK * BLOCK;
        let row = small(bytes_of(cache.quant)?.row_bytes(cache.head_size))?;
        let sums = near / BLOCK * size * 4;
        let one = 3 * size * 4 + sums + (near + near_keys) * row + warps * (BLOCK * 4 + 16);
        // Queries and keys, number by number, and weights of a tile.
        let tile = (2 * size + BLOCK) * (BLOCK + 4) * 4;
        Ok((op, one.max(if is_tiled { tile } else { 0 })))
    }

    /// An instruction for one operator.
    fn plain(&mut self, op: &Op) -> Result<(), CudaError> {
        match op {
            Op::Work(work) => self.work(work),
            Op::Gather { parts, rows, from, into } if self.alone => {
                let row = parts.last().map_or(0, |part| part.end);
                let op = operands::CopyBytes {
                    bytes: small(row * rows)?,
                    from: self.at(*from),
                    into: self.at(*into),
                    ..Default::default()
                };
                self.push(Instruction::new(op), 0);
                Ok(())
            }
            Op::Fold { .. } if self.alone => Ok(()),
            Op::Collective { .. } | Op::Tap(_) => {
                Err(CudaError::Unsupported(format!("{op:?} on a GPU")))
            }
            exchange => {
                self.close();
                self.parts.ops.push(0..0);
                self.parts.parts.push(Part::Exchange(exchange.clone()));
                Ok(())
            }
        }
    }

    fn work(&mut self, work: &Work) -> Result<(), CudaError> {
        let (instruction, shared) = match work {
            Work::Norm { width, .. } => {
                (self.rows_of(work)?, NORM_LANES * 8 + small(*width)? * 4 + 8)
            }
            Work::Matmul { a, b, out, shape: [1, width, rows], types } => {
                let (width, rows) = (*width, *rows);
                let one = RowProduct { a: *a, b: *b, out: *out, width, rows, types: *types };
                return self.vectors(&[one], None, keep::STORE, None);
            }
            Work::Matmul { .. } => return self.rows_product(work),
            Work::AttendBlocks { .. } => {
                let (op, shared) = self.attention(work)?;
                (Instruction::new(op), shared)
            }
            Work::Embed { .. }
            | Work::Quantize { .. }
            | Work::RotateRows { .. }
            | Work::Keep { .. }
            | Work::AddRow { .. } => (self.rows_of(work)?, 0),
            _ => (self.elements_of(work)?, 0),
        };
        self.push(instruction, shared);
        Ok(())
    }

    /// An operator on rows.
    fn rows_of(&self, work: &Work) -> Result<Instruction, CudaError> {
        Ok(match work {
            Work::Embed { table, ids, into, rows, width, quant, first, count } => {
                Instruction::new(operands::Embed {
                    rows: small(*rows)?,
                    width: small(*width)?,
                    quant: *quant,
                    first: *first,
                    count: *count,
                    table: self.at(*table),
                    into: self.at(*into),
                    ids: self.at(*ids),
                    ..Default::default()
                })
            }
            Work::Norm { from, weight, into, rows, width, epsilon } => {
                Instruction::new(operands::Norm {
                    rows: small(*rows)?,
                    width: small(*width)?,
                    epsilon: *epsilon,
                    from: self.at(*from),
                    weight: self.at(*weight),
                    into: self.at(*into),
                    ..Default::default()
                })
            }
            Work::Quantize { from, into, rows, width, quant } => {
                Instruction::new(operands::Quantize {
                    rows: small(*rows)?,
                    width: small(*width)?,
                    quant: *quant,
                    from: self.at(*from),
                    into: self.at(*into),
                    ..Default::default()
                })
            }
            Work::AddRow { into, row, rows, width } => Instruction::new(operands::AddRow {
                rows: small(*rows)?,
                width: small(*width)?,
                into: self.at(*into),
                row: self.at(*row),
                ..Default::default()
            }),
            _ => self.positions_of(work)?,
        })
    }

    /// An operator on rows that depends on where they lie in their sequences.
    fn positions_of(&self, work: &Work) -> Result<Instruction, CudaError> {
        Ok(match work {
            Work::RotateRows {
                data,
                table,
                positions,
                at,
                rows,
                heads,
                head_size,
                dims,
                pairs,
            } => Instruction::new(operands::Rotate {
                rows: small(*rows)?,
                heads: small(*heads)?,
                head_size: small(*head_size)?,
                dims: small(*dims)?,
                pairs: *pairs,
                positions: small(*positions)?,
                data: self.at(*data),
                table: self.at(*table),
                at: self.at(*at),
                ..Default::default()
            }),
            Work::Keep { keys, values, cache, rows } => Instruction::new(operands::KeepKv {
                rows: small(*rows)?,
                kv_heads: small(cache.heads)?,
                head_size: head_size(cache)?,
                quant: cache.quant,
                keys: self.at(*keys),
                values: self.at(*values),
                cache: self.at(cache.blocks),
                at: self.at(cache.rows),
                tables: self.at(cache.tables),
                ..Default::default()
            }),
            other => return Err(CudaError::Unsupported(format!("{other:?} on a GPU"))),
        })
    }

    /// An operator on elements, whatever their rows.
    fn elements_of(&self, work: &Work) -> Result<Instruction, CudaError> {
        Ok(match work {
            Work::Fill { into, length, pattern } => Instruction::new(operands::Fill {
                words: small(length / 4)?,
                pattern: *pattern,
                into: self.at(*into),
                ..Default::default()
            }),
            Work::Copy { from, into, length } if length.is_multiple_of(2) => {
                Instruction::new(operands::CopyBytes {
                    bytes: small(*length)?,
                    from: self.at(*from),
                    into: self.at(*into),
                    ..Default::default()
                })
            }
            Work::Gate { gate, up, into, elements, activation: Activation::Silu } => {
                Instruction::new(operands::Gate {
                    elements: small(*elements)?,
                    gate: self.at(*gate),
                    up: self.at(*up),
                    into: self.at(*into),
                    ..Default::default()
                })
            }
            Work::Reduce { into, sources, elements, .. } => match sources[..] {
                [first, more] if first == *into => Instruction::new(operands::Add {
                    elements: small(*elements)?,
                    into: self.at(*into),
                    more: self.at(more),
                    ..Default::default()
                }),
                _ => return Err(CudaError::Unsupported("sums of other than two".into())),
            },
            other => return Err(CudaError::Unsupported(format!("{other:?} on a GPU"))),
        })
    }
}

/// Numbers of a head, as the kernel can have them.
fn head_size(cache: &KvCache) -> Result<u32, CudaError> {
    let (size, refused) = (cache.head_size, |what| Err(CudaError::Unsupported(what)));
    if size % 16 != 0 || size > u64::from(THREADS) {
        return refused(format!(
            "heads of {size} numbers: multiples of 16 up to {THREADS} can be run on a GPU"
        ));
    }
    match cache.shape().map(|shape| (shape.quant, shape.check())) {
        Some((kept, _)) if !KERNEL_KV_TYPES.contains(&kept) => {
            refused(format!("keys and values as {kept} on a GPU"))
        }
        Some((_, Ok(()))) => small(size),
        Some((_, Err(what))) => refused(what),
        None => refused(format!("keys and values of GGML's type {}", cache.quant)),
    }
}

/// How far terms of rows are apart, as the kernel has it.
fn stride(count: u32) -> u32 {
    (count.div_ceil(4) | 1) * 4
}

/// Rows of a tile: so that blocks have equally much to do, and terms fit.
fn tile(rows: u32, each: u32, blocks: u32) -> u32 {
    let most = (TERMS / each).clamp(1, MOST_ROWS);
    let rounds = rows.div_ceil(blocks).div_ceil(most).max(1);
    rows.div_ceil(blocks * rounds).max(1)
}

mod tensor;
pub(crate) use tensor::{many_rows, tile_rows};

#[cfg(test)]
mod tests;
