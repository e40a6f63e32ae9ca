// SPDX-License-Identifier: Apache-2.0
//! Results of a run of operators, computed element by element from what a machine captured of the run: backwards from the
//! results that are asked for, so that of a product only the rows of weights are read whose results are compared.
//!
//! The same walk says beforehand what has to be captured: then bytes from outside the run are noted, nothing is computed,
//! and all results are empty. What is looked at is chosen in `look.rs`.

use ggml_spanker::ops::{self, Pairs};
use ggml_spanker::{decode, multiply};
use spanker_model::{KV_BLOCK, KvShape, Quant};
use spanker_plan::{KvCache, Op, Part, Place, Step, Work};

use super::compute::{attended, floats, inputs_of, known, refused, rounded};
use super::{Auditor, Member};
use crate::LlmError;
use crate::machine::{Region, Role};

/// Where rows of a step lie and what their tokens are, for later than the step.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Rows {
    /// Of each row: its token, its position, and where its sequence's blocks begin.
    rows: Vec<(u32, u64, usize)>,
    blocks: Vec<u32>,
    outputs: Vec<u64>,
}

impl Rows {
    pub(crate) fn of(step: &Step<'_>) -> Rows {
        let mut all = Rows { outputs: step.output_rows().collect(), ..Rows::default() };
        for part in step.parts {
            let Part { tokens, past, blocks, .. } = *part;
            let first = all.blocks.len();
            all.rows.extend(tokens.iter().zip(past..).map(|(&token, at)| (token, at, first)));
            all.blocks.extend(blocks);
        }
        all
    }

    pub(crate) fn len(&self) -> u64 {
        self.rows.len() as u64
    }
}

/// Bytes from a place on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) at: Place,
    pub(super) bytes: u64,
}

impl Span {
    fn overlaps(&self, other: &Span) -> bool {
        self.at.buffer == other.at.buffer
            && self.at.offset < other.at.offset + other.bytes
            && other.at.offset < self.at.offset + self.bytes
    }
}

/// Numbers at equal distances, counted in numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pick {
    pub(super) at: Place,
    pub(super) count: u64,
    pub(super) stride: u64,
}

impl Pick {
    pub(super) fn all(at: Place, count: u64) -> Pick {
        Pick { at, count, stride: 1 }
    }

    fn span(&self) -> Span {
        Span { at: self.at, bytes: (self.count.max(1) - 1) * self.stride * 4 + 4 }
    }

    /// The same numbers of other rows: `from` lies to `into` as they do to these.
    fn moved(self, into: Place, from: Place) -> Pick {
        Pick { at: after(from, self.at.offset - into.offset), ..self }
    }

    /// Which these are of numbers that begin somewhere.
    pub(super) fn index(&self, into: Place) -> u64 {
        (self.at.offset - into.offset) / 4
    }

    /// These of a row that begins `start` numbers before them.
    fn of(&self, row: &[f32], start: u64) -> Vec<f32> {
        if row.is_empty() {
            return Vec::new();
        }
        let places = (0..self.count).map(|at| (start + at * self.stride) as usize);
        places.map(|at| row.get(at).copied().unwrap_or(0.0)).collect()
    }
}

pub(super) fn after(place: Place, bytes: u64) -> Place {
    Place { offset: place.offset + bytes, ..place }
}

/// What comes from outside of a run.
pub(super) enum Outside<'b> {
    /// It is only noted.
    Wanted(Vec<Region>),
    /// It was captured.
    Captured(&'b [Region], &'b [u8]),
}

/// What an operator of a run writes, in bytes; nothing for those that write no rows.
pub(super) fn written(op: &Op) -> Option<Span> {
    let span = |at: Place, bytes: u64| Some(Span { at, bytes });
    match op {
        Op::Work(work) => match *work {
            Work::Embed { into, rows, width, .. }
            | Work::Norm { into, rows, width, .. }
            | Work::AddRow { into, rows, width, .. } => span(into, rows * width * 4),
            Work::Quantize { into, rows, width, quant, .. } => {
                span(into, rows * Quant::from_ggml_id(quant)?.row_bytes(width))
            }
            Work::Matmul { out, shape: [rows, _, outs], .. } => span(out, rows * outs * 4),
            Work::RotateRows { data, rows, heads, head_size, .. } => {
                span(data, rows * heads * head_size * 4)
            }
            Work::AttendBlocks { into, rows, heads, ref cache, .. } => {
                span(into, rows * heads * cache.head_size * 4)
            }
            Work::Gate { into, elements, .. } | Work::Reduce { into, elements, .. } => {
                span(into, elements * 4)
            }
            Work::Scale { data, elements, .. } => span(data, elements * 4),
            Work::Copy { into, length, .. } | Work::Fill { into, length, .. } => span(into, length),
            _ => None,
        },
        Op::Gather { parts, rows, into, .. } => span(*into, parts.last()?.end * rows),
        _ => None,
    }
}

/// What an operator of a run reads of what others may have written.
fn reads(op: &Op) -> Vec<Span> {
    let span = |at: Place, bytes: u64| Span { at, bytes };
    match op {
        Op::Work(work) => match work {
            Work::Embed { table, width, count, quant: id, .. } => {
                let row = Quant::from_ggml_id(*id).map_or(0, |quant| quant.row_bytes(*width));
                vec![span(*table, row * u64::from(*count))]
            }
            Work::Norm { from, rows, width, .. } | Work::Quantize { from, rows, width, .. } => {
                vec![span(*from, rows * width * 4)]
            }
            Work::Matmul { a, shape: [rows, width, _], types, .. } => {
                let row = Quant::from_ggml_id(types[0]).map_or(0, |quant| quant.row_bytes(*width));
                vec![span(*a, rows * row)]
            }
            Work::RotateRows { .. } | Work::AddRow { .. } | Work::Scale { .. } => {
                written(op).into_iter().collect()
            }
            Work::AttendBlocks { queries, rows, heads, cache, .. } => {
                vec![span(*queries, rows * heads * cache.head_size * 4)]
            }
            Work::Keep { keys, values, cache, rows } => {
                let bytes = rows * cache.heads * cache.head_size * 4;
                vec![span(*keys, bytes), span(*values, bytes)]
            }
            Work::Gate { gate, up, elements, .. } => {
                vec![span(*gate, elements * 4), span(*up, elements * 4)]
            }
            Work::Reduce { sources, elements, .. } => {
                sources.iter().map(|source| span(*source, elements * 4)).collect()
            }
            Work::Copy { from, length, .. } => vec![span(*from, *length)],
            _ => Vec::new(),
        },
        Op::Gather { parts, rows, from, .. } => {
            vec![span(*from, parts.last().map_or(0, |part| part.end) * rows)]
        }
        _ => Vec::new(),
    }
}

/// Operators of a run whose results are there after it: nobody in the run reads them later. What is kept in the KV cache
/// stays there in any case.
pub(super) fn results(ops: &[Op]) -> Vec<usize> {
    let is_result = |&at: &usize| match (&ops[at], written(&ops[at])) {
        (Op::Work(Work::Keep { .. }), _) => true,
        (_, None) => false,
        (_, Some(own)) => {
            !ops[at + 1..].iter().any(|later| reads(later).iter().any(|read| read.overlaps(&own)))
        }
    };
    (0..ops.len()).filter(is_result).collect()
}

/// What the bytes are that an operator moves or makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    Numbers,
    Blocks(Quant),
    /// They come from outside as they are.
    Bytes,
}

/// Computes results of a run.
pub(super) struct Evaluate<'e, 'a> {
    pub(super) auditor: &'e Auditor<'a>,
    pub(super) member: Member<'e>,
    pub(super) ops: &'e [Op],
    pub(super) rows: &'e Rows,
    pub(super) outside: Outside<'e>,
    /// Where the next capture goes.
    pub(super) used: u64,
}

fn unknown(op: &Op) -> LlmError {
    LlmError::plan(format!("{op:?} cannot be computed again"))
}

impl Evaluate<'_, '_> {
    pub(super) fn is_dry(&self) -> bool {
        matches!(self.outside, Outside::Wanted(_))
    }

    /// Has bytes captured, or gives those that were.
    pub(super) fn captured(&mut self, piece: Region) -> Result<Vec<u8>, LlmError> {
        let same = |known: &&Region| Region { at: 0, ..**known } == Region { at: 0, ..piece };
        let bytes = piece.bytes() as usize;
        match &mut self.outside {
            Outside::Wanted(pieces) => {
                if !pieces.iter().any(|known| same(&known)) {
                    pieces.push(Region { at: self.used, ..piece });
                    self.used = (self.used + piece.bytes()).next_multiple_of(Region::ALIGNMENT);
                }
                Ok(Vec::new())
            }
            Outside::Captured(pieces, all) => {
                let at = pieces.iter().find(same).map(|piece| piece.at as usize);
                let found = at.and_then(|at| all.get(at..at + bytes)).map(<[u8]>::to_vec);
                found.ok_or_else(|| LlmError::plan(format!("{:?} was not captured", piece.from)))
            }
        }
    }

    /// Bytes that no operator of the run has written before it reads them.
    fn outside_of_run(&mut self, from: Place, strided: [u64; 3]) -> Result<Vec<u8>, LlmError> {
        let [rows, length, stride] = strided;
        let own = Span { at: from, bytes: (rows.max(1) - 1) * stride + length };
        let is_overwritten = self.ops.iter().filter_map(written).any(|other| other.overlaps(&own));
        let role = if is_overwritten { Role::Overwritten } else { Role::Read };
        self.captured(Region { from, rows, length, stride, role, at: 0 })
    }

    /// The last operator before one that writes there.
    fn writer(&self, before: usize, span: &Span) -> Option<usize> {
        let writes = |op: &Op| written(op).is_some_and(|own| own.overlaps(span));
        self.ops[..before].iter().rposition(writes)
    }

    /// What an operator's results are.
    pub(super) fn content(&self, at: usize) -> Result<Content, LlmError> {
        let from = match &self.ops[at] {
            Op::Work(Work::Quantize { quant, .. }) => {
                let quant = known(*quant)?;
                return Ok(match quant {
                    Quant::F32 => Content::Numbers,
                    quant => Content::Blocks(quant),
                });
            }
            Op::Work(Work::Copy { from, .. }) | Op::Gather { from, .. } => *from,
            _ => return Ok(Content::Numbers),
        };
        match self.writer(at, &Span { at: from, bytes: 1 }) {
            Some(writer) => self.content(writer),
            None => Ok(Content::Bytes),
        }
    }

    /// Bytes that an operator before this one has moved here from outside.
    pub(super) fn moved(
        &mut self,
        before: usize,
        own: Place,
        bytes: u64,
    ) -> Result<Vec<u8>, LlmError> {
        let span = Span { at: own, bytes };
        let Some(writer) = self.writer(before, &span) else {
            return self.outside_of_run(own, [1, bytes, bytes]);
        };
        match &self.ops[writer] {
            Op::Work(Work::Copy { from, into, .. }) | Op::Gather { from, into, .. } => {
                self.moved(writer, after(*from, own.offset - into.offset), bytes)
            }
            other => Err(unknown(other)),
        }
    }

    /// Numbers as they are before an operator.
    pub(super) fn numbers(&mut self, before: usize, pick: Pick) -> Result<Vec<f32>, LlmError> {
        match self.writer(before, &pick.span()) {
            Some(writer) => self.made(writer, pick),
            None => {
                let Pick { at, count, stride } = pick;
                let strided =
                    if stride == 1 { [1, count * 4, count * 4] } else { [count, 4, stride * 4] };
                Ok(floats(&self.outside_of_run(at, strided)?))
            }
        }
    }

    /// Numbers that an operator has written.
    fn made(&mut self, by: usize, pick: Pick) -> Result<Vec<f32>, LlmError> {
        let work = match &self.ops[by] {
            Op::Gather { from, into, .. } => return self.numbers(by, pick.moved(*into, *from)),
            Op::Work(work) => work,
            other => return Err(unknown(other)),
        };
        match *work {
            Work::Copy { from, into, .. } => self.numbers(by, pick.moved(into, from)),
            Work::Quantize { from, into, quant, .. } if known(quant)? == Quant::F32 => {
                self.numbers(by, pick.moved(into, from))
            }
            Work::Fill { .. } if self.is_dry() => Ok(Vec::new()),
            Work::Fill { pattern, .. } => Ok(vec![f32::from_bits(pattern); pick.count as usize]),
            Work::Matmul { .. } => self.product(by, pick),
            Work::Embed { .. } => self.embedded(by, pick),
            Work::Norm { from, weight, into, width, epsilon, .. } => {
                let (row, column) = (pick.index(into) / width, pick.index(into) % width);
                let from = self.numbers(by, Pick::all(after(from, row * width * 4), width))?;
                if self.is_dry() {
                    return Ok(Vec::new());
                }
                let (weights, _) = self.auditor.weights(self.member, weight, width * 4)?;
                let mut out = vec![0.0; width as usize];
                ops::norm(&from, &floats(&weights), f32::from_bits(epsilon), &mut out);
                Ok(pick.of(&out, column))
            }
            Work::AddRow { into, row, width, .. } => {
                let column = pick.index(into) % width;
                let mut sums = self.numbers(by, pick)?;
                if !self.is_dry() {
                    let (weights, _) = self.auditor.weights(self.member, row, width * 4)?;
                    ops::add(&mut sums, &pick.of(&floats(&weights), column));
                }
                Ok(sums)
            }
            Work::Gate { gate, up, into, activation, .. } => {
                let gate = self.numbers(by, pick.moved(into, gate))?;
                let up = self.numbers(by, pick.moved(into, up))?;
                let mut out = vec![0.0; gate.len()];
                ops::gate(activation, &gate, &up, &mut out);
                Ok(out)
            }
            Work::Reduce { into, ref sources, .. } => {
                let &[first, second] = &sources[..] else { return Err(unknown(&self.ops[by])) };
                let mut sums = self.numbers(by, pick.moved(into, first))?;
                let more = self.numbers(by, pick.moved(into, second))?;
                ops::add(&mut sums, &more);
                Ok(sums)
            }
            Work::RotateRows { data, table, heads, head_size, pairs, .. } => {
                let unit = pick.index(data) / head_size;
                let place = after(data, unit * head_size * 4);
                let mut head = self.numbers(by, Pick::all(place, head_size))?;
                if self.is_dry() {
                    return Ok(head);
                }
                let (_, position, _) = self.row(unit / heads)?;
                let pairs = if pairs == 0 { Pairs::Adjacent } else { Pairs::Halves };
                let turns = self.auditor.turns(position, table.offset > 0);
                ops::rotate(&mut head, head_size as usize, &turns, pairs);
                Ok(pick.of(&head, pick.index(data) % head_size))
            }
            Work::Scale { factor, cap, .. } => {
                let mut numbers = self.numbers(by, pick)?;
                ops::scale(&mut numbers, f32::from_bits(factor), f32::from_bits(cap));
                Ok(numbers)
            }
            Work::AttendBlocks { .. } => self.attention(by, pick),
            _ => Err(unknown(&self.ops[by])),
        }
    }

    fn row(&self, row: u64) -> Result<(u32, u64, usize), LlmError> {
        let known = self.rows.rows.get(row as usize).copied();
        known.ok_or_else(|| LlmError::plan(format!("a step without row {row}")))
    }

    /// A row of a product's inputs, or a part of it: blocks, or numbers.
    pub(super) fn packed(
        &mut self,
        before: usize,
        at: Place,
        (quant, width): (Quant, u64),
    ) -> Result<Vec<u8>, LlmError> {
        if quant == Quant::F32 {
            let numbers = self.numbers(before, Pick::all(at, width))?;
            return Ok(numbers.iter().flat_map(|number| number.to_le_bytes()).collect());
        }
        let bytes = quant.row_bytes(width);
        let Some(writer) = self.writer(before, &Span { at, bytes }) else {
            return self.outside_of_run(at, [1, bytes, bytes]);
        };
        match &self.ops[writer] {
            Op::Work(Work::Quantize { from, into, .. }) => {
                let first = (at.offset - into.offset) / quant.block_bytes() * quant.block();
                let from = Pick::all(after(*from, first * 4), width);
                let numbers = self.numbers(writer, from)?;
                if self.is_dry() { Ok(Vec::new()) } else { rounded(quant, &numbers) }
            }
            Op::Work(Work::Copy { from, into, .. }) | Op::Gather { from, into, .. } => {
                self.packed(writer, after(*from, at.offset - into.offset), (quant, width))
            }
            other => Err(unknown(other)),
        }
    }

    /// Elements of a row of a product.
    fn product(&mut self, by: usize, pick: Pick) -> Result<Vec<f32>, LlmError> {
        let Op::Work(Work::Matmul { a, b, out, shape: [_, width, outs], types }) = self.ops[by]
        else {
            return Err(unknown(&self.ops[by]));
        };
        let (input, quant) = (known(types[0])?, known(types[1])?);
        let (row, column) = (pick.index(out) / outs, pick.index(out) % outs);
        let place = after(a, row * input.row_bytes(width));
        let inputs = self.packed(by, place, (input, width))?;
        if self.is_dry() {
            return Ok(Vec::new());
        }
        let mut results = vec![0.0; pick.count as usize];
        let (inputs, each) = (inputs_of(input, &inputs, width)?, quant.row_bytes(width));
        for (at, result) in (0..).zip(&mut results) {
            let place = after(b, (column + at * pick.stride) * each);
            let (weights, name) = self.auditor.weights(self.member, place, each)?;
            let result = std::slice::from_mut(result);
            multiply(quant, &weights, 1, &inputs, result).map_err(refused(&name))?;
        }
        Ok(results)
    }

    /// Elements of a row of the embedding table, or of a row that is picked out of others.
    fn embedded(&mut self, by: usize, pick: Pick) -> Result<Vec<f32>, LlmError> {
        let Op::Work(Work::Embed { table, into, width, quant, first, count, .. }) = self.ops[by]
        else {
            return Err(unknown(&self.ops[by]));
        };
        let (row, column) = (pick.index(into) / width, pick.index(into) % width);
        if table.buffer != self.member.weights {
            let listed = self.rows.outputs.get(row as usize).copied();
            let from = listed.ok_or_else(|| unknown(&self.ops[by]))?;
            let at = after(table, (from * width + column) * 4);
            return self.numbers(by, Pick { at, ..pick });
        }
        let (token, ..) = self.row(row)?;
        let Some(token) = token.checked_sub(first).filter(|token| *token < count) else {
            // Another card has the token: the row stays as it was.
            return self.numbers(by, pick);
        };
        if self.is_dry() {
            return Ok(Vec::new());
        }
        let (quant, mut out) = (known(quant)?, vec![0.0; width as usize]);
        let bytes = quant.row_bytes(width);
        let place = after(table, u64::from(token) * bytes);
        let (weights, name) = self.auditor.weights(self.member, place, bytes)?;
        decode(quant, &weights, &mut out).map_err(refused(&name))?;
        Ok(pick.of(&out, column))
    }

    /// Numbers of one head of one row.
    fn attention(&mut self, by: usize, pick: Pick) -> Result<Vec<f32>, LlmError> {
        let Op::Work(Work::AttendBlocks {
            queries, cache, into, heads, group, offset, scores, ..
        }) = self.ops[by]
        else {
            return Err(unknown(&self.ops[by]));
        };
        if !scores.is_plain() {
            return Err(unknown(&self.ops[by]));
        }
        let (size, shape) = (cache.head_size, shape_of(&cache)?);
        let unit = pick.index(into) / size;
        let (row, head) = (unit / heads, unit % heads);
        let kv = (offset + head) / group.max(1);
        let query = self.numbers(by, Pick::all(after(queries, unit * size * 4), size))?;
        let (_, position, first) = self.row(row)?;
        let (last, slots) = (position / KV_BLOCK, position % KV_BLOCK + 1);
        let own = KvShape { heads: 1, ..shape };
        let block = own.block_bytes();
        let seen = if self.is_dry() { 0 } else { (last + 1) * block };
        let mut kept = vec![0; seen as usize];
        for at in 0..=last {
            let number = self.rows.blocks.get(first + at as usize).copied();
            let number = number.ok_or_else(|| unknown(&self.ops[by]))?;
            let from = u64::from(number) * shape.block_bytes() + kv * shape.head_bytes();
            let from = after(cache.blocks, from);
            let start = (at * block) as usize;
            if at < last {
                let bytes = self.cached(from, [1, block, block])?;
                if let Some(kept) = kept.get_mut(start..start + bytes.len()) {
                    kept.copy_from_slice(&bytes);
                }
                continue;
            }
            // Of the last one, what is seen.
            for piece in own.first_slots(0, slots) {
                let strided = [piece.rows, piece.length, piece.stride];
                let bytes = self.cached(after(from, piece.offset), strided)?;
                for (at, bytes) in (0..).zip(bytes.chunks(piece.length as usize)) {
                    let start = start + (piece.offset + at * piece.stride) as usize;
                    kept[start..start + bytes.len()].copy_from_slice(bytes);
                }
            }
        }
        // What the run itself has kept is computed as well.
        let keeps = |op: &Op| matches!(op, Op::Work(Work::Keep { rows: 1, .. }));
        if let Some(keep) = self.ops[..by].iter().rposition(keeps) {
            let (key, value) = self.fresh(keep, kv)?;
            if !self.is_dry() {
                let last = &mut kept[(last * block) as usize..];
                ops::keep(own, (position % KV_BLOCK) as usize, &key, &value, last);
            }
        }
        if self.is_dry() {
            return Ok(Vec::new());
        }
        let out = attended((own, position, scores), &query, &[], &kept);
        Ok(pick.of(&out, pick.index(into) % size))
    }

    /// Bytes of the KV cache. A cell that the run itself writes is computed, so that it does not matter when they are read.
    fn cached(&mut self, from: Place, strided: [u64; 3]) -> Result<Vec<u8>, LlmError> {
        let [rows, length, stride] = strided;
        self.captured(Region { from, rows, length, stride, role: Role::Read, at: 0 })
    }

    /// The key and the value of a head of the only row that an operator of the run keeps.
    fn fresh(&mut self, keep: usize, head: u64) -> Result<(Vec<f32>, Vec<f32>), LlmError> {
        let Op::Work(Work::Keep { keys, values, cache, .. }) = self.ops[keep] else {
            return Err(unknown(&self.ops[keep]));
        };
        let size = cache.head_size;
        let mut of =
            |place: Place| self.numbers(keep, Pick::all(after(place, head * size * 4), size));
        Ok((of(keys)?, of(values)?))
    }

    /// Where a cell of a key or value is, and what it has to be: numbers, and then scales.
    pub(super) fn cell(
        &mut self,
        keep: usize,
        (row, head, is_key): (u64, u64, bool),
    ) -> Result<(Vec<Region>, Vec<u8>), LlmError> {
        let Op::Work(Work::Keep { keys, values, cache, .. }) = self.ops[keep] else {
            return Err(unknown(&self.ops[keep]));
        };
        let (shape, size) = (shape_of(&cache)?, cache.head_size);
        let from = after(if is_key { keys } else { values }, (row * cache.heads + head) * size * 4);
        let numbers = self.numbers(keep, Pick::all(from, size))?;
        let (_, position, first) = self.row(row)?;
        let block = self.rows.blocks.get(first + (position / KV_BLOCK) as usize).copied();
        let block = block.ok_or_else(|| unknown(&self.ops[keep]))?;
        let place = after(cache.blocks, u64::from(block) * shape.block_bytes());
        let own = KvShape { heads: 1, ..shape };
        let mut kept = vec![0; own.block_bytes() as usize];
        if !self.is_dry() {
            ops::keep(own, 0, &numbers, &numbers, &mut kept);
        }
        let slot = position % KV_BLOCK;
        let there =
            [Some(shape.numbers(head, is_key, slot)), shape.scale_bytes(head, is_key, slot)];
        let here = [Some(own.numbers(0, is_key, 0)), own.scale_bytes(0, is_key, 0)];
        let (mut pieces, mut right) = (Vec::new(), Vec::new());
        for (there, here) in there.into_iter().flatten().zip(here.into_iter().flatten()) {
            let (rows, length, stride) = (there.rows, there.length, there.stride);
            let from = after(place, there.offset);
            pieces.push(Region { from, rows, length, stride, role: Role::Written, at: 0 });
            for row in 0..here.rows {
                let start = (here.offset + row * here.stride) as usize;
                right.extend_from_slice(&kept[start..start + here.length as usize]);
            }
        }
        Ok((pieces, right))
    }
}

fn shape_of(cache: &KvCache) -> Result<KvShape, LlmError> {
    cache.shape().ok_or_else(|| LlmError::plan(format!("keys and values of type {}", cache.quant)))
}
