// SPDX-License-Identifier: Apache-2.0
//! What a model does between its products, in slices of rows, blocks or numbers.

use bytemuck::cast_slice_mut;
use ggml_spanker::ops::{self, Pairs};
use ggml_spanker::{decode, quantize};
use spanker_runtime::{Place, Work, abi};

use super::blocks::row_at;
use super::{Alu, Memory, SLICE, Slice, floats, read, scratch_bytes, shifted};
use crate::card::traffic::quant;

/// The fixed cost of a block of a strided copy, in bytes that could be copied meanwhile.
const BLOCK_COST: u64 = 64;

/// How many of `left` units a slice takes that touches `bytes` for each.
pub(super) fn share(left: u64, bytes: u64) -> u64 {
    left.min((SLICE / bytes.max(1)).max(1))
}

impl Alu {
    pub(super) fn operator(&mut self, memory: &mut Memory, work: &Work, done: u64) -> Slice {
        match *work {
            Work::Embed { .. } => self.embed(memory, work, done),
            Work::Norm { from, weight, into, rows, width, epsilon } => {
                let (row, part) = (width * 4, share(rows - done, width * 8));
                let epsilon = f32::from_bits(epsilon);
                let weight = floats(memory, weight, width);
                let given = floats(memory, shifted(from, done * row), part * width);
                let out = scratch_bytes(&mut self.scratch.out, (part * row) as usize);
                let out: &mut [f32] = cast_slice_mut(out);
                let width = width as usize;
                for (given, out) in given.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
                    ops::norm(given, weight, epsilon, out);
                }
                self.store(memory, shifted(into, done * row), part * row);
                Slice::of(done + part, rows, 2 * part * row)
            }
            Work::Quantize { from, into, rows, width, quant: id } => {
                let input = quant(id).expect("it was checked");
                let (block, bytes) = (input.block(), input.block_bytes());
                let total = rows * width / block;
                let part = share(total - done, block * 4 + bytes);
                let values = floats(memory, shifted(from, done * block * 4), part * block);
                let out = scratch_bytes(&mut self.scratch.out, (part * bytes) as usize);
                quantize(input, values, out).expect("types and sizes were checked");
                self.store(memory, shifted(into, done * bytes), part * bytes);
                Slice::of(done + part, total, part * (block * 4 + bytes))
            }
            Work::Rotate { .. } => self.rotate(memory, work, done),
            Work::RotateRows { .. } => self.rotate_rows(memory, work, done),
            Work::AddRow { into, row, rows, width } => {
                let bytes = width * 4;
                let part = share(rows - done, bytes * 2);
                let place = shifted(into, done * bytes);
                let out = scratch_bytes(&mut self.scratch.out, (part * bytes) as usize);
                out.copy_from_slice(read(memory, place, part * bytes));
                let row = floats(memory, row, width);
                let all: &mut [f32] = cast_slice_mut(out);
                all.chunks_exact_mut(width as usize).for_each(|sum| ops::add(sum, row));
                self.store(memory, place, part * bytes);
                Slice::of(done + part, rows, 2 * part * bytes)
            }
            Work::Halve { from, into, elements } => {
                let part = share(elements - done, 6);
                let values = floats(memory, shifted(from, done * 4), part);
                ops::to_half(values, scratch_bytes(&mut self.scratch.out, (part * 2) as usize));
                self.store(memory, shifted(into, done * 2), part * 2);
                Slice::of(done + part, elements, part * 6)
            }
            Work::Gate { gate, up, into, elements, activation } => {
                let part = share(elements - done, 12);
                let [gate, up] =
                    [gate, up].map(|place| floats(memory, shifted(place, done * 4), part));
                let out = scratch_bytes(&mut self.scratch.out, (part * 4) as usize);
                ops::gate(activation, gate, up, cast_slice_mut(out));
                self.store(memory, shifted(into, done * 4), part * 4);
                Slice::of(done + part, elements, part * 12)
            }
            Work::Scale { .. } => self.scale(memory, work, done),
            Work::Rows { from, into, rows, length, from_stride, into_stride } => {
                let strides = [from_stride, into_stride];
                self.rows(memory, [from, into], rows, length, strides, done)
            }
            Work::Best { .. } => self.best(memory, work, done),
            _ => Slice::of(0, 0, 0),
        }
    }

    /// `done` counts numbers.
    fn scale(&mut self, memory: &mut Memory, work: &Work, done: u64) -> Slice {
        let Work::Scale { data, elements, factor, cap } = *work else {
            unreachable!("only scales come here");
        };
        let part = share(elements - done, 8);
        let place = shifted(data, done * 4);
        let out = scratch_bytes(&mut self.scratch.out, (part * 4) as usize);
        out.copy_from_slice(read(memory, place, part * 4));
        ops::scale(cast_slice_mut(out), f32::from_bits(factor), f32::from_bits(cap));
        self.store(memory, place, part * 4);
        Slice::of(done + part, elements, part * 8)
    }

    /// `done` counts ids. Which rows are wanted is read when it is needed: ids are data.
    fn embed(&mut self, memory: &mut Memory, work: &Work, done: u64) -> Slice {
        let Work::Embed { table, ids, into, rows, width, quant: id, first, count } = *work else {
            unreachable!("only rows of tables come here");
        };
        let kind = quant(id).expect("it was checked");
        let (row, bytes) = (width * 4, kind.row_bytes(width));
        let part = share(rows - done, row + bytes);
        for at in done..done + part {
            let id = read(memory, shifted(ids, at * 4), 4);
            let id = u32::from_le_bytes([id[0], id[1], id[2], id[3]]);
            let Some(local) = id.checked_sub(first).filter(|&local| local < count) else {
                continue;
            };
            let blocks = read(memory, shifted(table, u64::from(local) * bytes), bytes);
            let out = scratch_bytes(&mut self.scratch.out, row as usize);
            decode(kind, blocks, cast_slice_mut(out)).expect("types and sizes were checked");
            self.store(memory, shifted(into, at * row), row);
        }
        Slice::of(done + part, rows, part * (row + bytes))
    }

    /// `done` counts heads.
    fn rotate(&mut self, memory: &mut Memory, work: &Work, done: u64) -> Slice {
        let Work::Rotate { data, table, rows, heads, head_size, dims, pairs } = *work else {
            unreachable!("only rotations come here");
        };
        let pairs = if pairs == abi::PAIRS_HALVES { Pairs::Halves } else { Pairs::Adjacent };
        let total = rows * heads;
        let part = share(total - done, head_size * 8);
        let place = shifted(data, done * head_size * 4);
        let bytes = part * head_size * 4;
        let out = scratch_bytes(&mut self.scratch.out, bytes as usize);
        out.copy_from_slice(read(memory, place, bytes));
        let all: &mut [f32] = cast_slice_mut(out);
        for (at, head) in (done..).zip(all.chunks_exact_mut(head_size as usize)) {
            let turns = floats(memory, shifted(table, at / heads * dims * 4), dims);
            ops::rotate(head, head_size as usize, turns, pairs);
        }
        self.store(memory, place, bytes);
        Slice::of(done + part, total, 2 * bytes)
    }

    /// `done` counts rows. Where they lie is read when it is needed: positions are data.
    fn rotate_rows(&mut self, memory: &mut Memory, work: &Work, done: u64) -> Slice {
        let Work::RotateRows { data, table, positions, at, rows, heads, head_size, dims, pairs } =
            *work
        else {
            unreachable!("only rotations come here");
        };
        let pairs = if pairs == abi::PAIRS_HALVES { Pairs::Halves } else { Pairs::Adjacent };
        let bytes = heads * head_size * 4;
        let part = share(rows - done, 2 * bytes);
        for row in done..done + part {
            let position = u64::from(row_at(memory, at, row)[0]);
            if position >= positions {
                continue;
            }
            let place = shifted(data, row * bytes);
            let out = scratch_bytes(&mut self.scratch.out, bytes as usize);
            out.copy_from_slice(read(memory, place, bytes));
            let turns = floats(memory, shifted(table, position * dims * 4), dims);
            ops::rotate(cast_slice_mut(out), head_size as usize, turns, pairs);
            self.store(memory, place, bytes);
        }
        Slice::of(done + part, rows, 2 * part * bytes)
    }

    /// `done` counts bytes of blocks.
    fn rows(
        &mut self,
        memory: &mut Memory,
        [from, into]: [Place; 2],
        rows: u64,
        length: u64,
        [from_stride, into_stride]: [u64; 2],
        done: u64,
    ) -> Slice {
        let total = rows * length;
        let (mut done, mut spent) = (done, 0);
        while done < total && spent < SLICE {
            let (row, at) = (done / length, done % length);
            let part = (length - at).min(SLICE);
            let source = read(memory, shifted(from, row * from_stride + at), part);
            scratch_bytes(&mut self.scratch.out, part as usize).copy_from_slice(source);
            self.store(memory, shifted(into, row * into_stride + at), part);
            done += part;
            spent += 2 * part + BLOCK_COST;
        }
        Slice::of(done, total, spent)
    }

    /// `done` counts numbers. The best of what came before compete with the next ones.
    fn best(&mut self, memory: &mut Memory, work: &Work, done: u64) -> Slice {
        let Work::Best { from, into, count, k, first } = *work else {
            unreachable!("only choices come here");
        };
        let scratch = &mut self.scratch;
        if done == 0 {
            scratch.best.clear();
        }
        let part = share(count - done, 8);
        scratch.values.clear();
        scratch.values.extend(scratch.best.iter().map(|(_, value)| value));
        let before = scratch.values.len();
        scratch.values.extend_from_slice(floats(memory, shifted(from, done * 4), part));
        let known = |at: u32| match scratch.best.get(at as usize) {
            Some((place, _)) => *place,
            None => (done + u64::from(at) - before as u64) as u32,
        };
        let found = ops::best(&scratch.values, k as usize);
        scratch.best = found.into_iter().map(|(at, value)| (known(at), value)).collect();
        let spent = part * 8 + u64::from(k) * 64;
        if done + part < count {
            return Slice::of(done + part, count, spent);
        }
        let out = scratch_bytes(&mut scratch.out, k as usize * 8);
        let found = scratch.best.iter().map(|&(place, value)| (place + first, value));
        let pairs = found.chain(std::iter::repeat((u32::MAX, f32::NEG_INFINITY)));
        for (out, (place, value)) in out.chunks_exact_mut(8).zip(pairs) {
            out[..4].copy_from_slice(&place.to_le_bytes());
            out[4..].copy_from_slice(&value.to_le_bytes());
        }
        self.store(memory, into, u64::from(k) * 8);
        Slice::of(count, count, spent)
    }
}
