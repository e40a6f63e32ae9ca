// SPDX-License-Identifier: Apache-2.0
//! Operators between products, on a card that this process plays. Those of many rows are shared out over the team.

use std::sync::Mutex;

use bytemuck::{cast_slice, cast_slice_mut};
use ggml_spanker::ops::{self, Pairs};
use ggml_spanker::{Quant, decode, quantize};
use spanker_runtime::{Activation, Place, Work};

use super::Card;
use super::memory::part;

/// Bytes of results below which a team costs more than it saves.
const SMALL: usize = 32 << 10;

impl<B: AsRef<[u8]> + Send + Sync> Card<B> {
    /// Does one piece of work.
    pub(super) fn operate(&mut self, work: &Work) {
        match *work {
            Work::Fill { into, length, pattern } => self.write(into, length, |_, out| {
                out.as_chunks_mut().0.iter_mut().for_each(|word| *word = pattern.to_le_bytes());
            }),
            Work::Embed { .. } => self.embed(work),
            Work::Norm { from, weight, into, rows, width, epsilon } => {
                let epsilon = f32::from_bits(epsilon);
                if from == into {
                    return self.norm_in_place(into, weight, rows, width, epsilon);
                }
                self.rows(into, rows, width * 4, |card, row, out| {
                    let from = card.memory.floats(shifted(from, row as u64 * width * 4), width);
                    let weight = card.memory.floats(weight, width);
                    ops::norm(&from, &weight, epsilon, cast_slice_mut(out));
                });
            }
            Work::Quantize { from, into, rows, width, quant } => {
                let quant = known(quant);
                self.rows(into, rows, quant.row_bytes(width), |card, row, out| {
                    let from = card.memory.floats(shifted(from, row as u64 * width * 4), width);
                    quantize(quant, &from, out).expect("programs have whole blocks");
                });
            }
            Work::RotateRows { data, table, at, rows, heads, head_size, dims, pairs, .. } => {
                let pairs = if pairs == 0 { Pairs::Adjacent } else { Pairs::Halves };
                self.rows(data, rows, heads * head_size * 4, |card, row, out| {
                    let position = u64::from(card.row_at(at, row as u64)[0]);
                    let turns = card.memory.floats(shifted(table, position * dims * 4), dims);
                    ops::rotate(cast_slice_mut(out), head_size as usize, &turns, pairs);
                });
            }
            Work::AddRow { into, row, rows, width } => {
                self.rows(into, rows, width * 4, |card, _, out| {
                    ops::add(cast_slice_mut(out), &card.memory.floats(row, width));
                });
            }
            Work::Copy { from, into, length } => self.copy(from, into, length),
            Work::Keep { .. } => self.keep(work),
            Work::Gate { gate, up, into, elements, activation } if into == gate => {
                self.gate_in_place(activation, gate, up, elements);
            }
            Work::Scale { data, elements, factor, cap } => {
                let (factor, cap) = (f32::from_bits(factor), f32::from_bits(cap));
                self.pieces(data, elements, |_, _, out| ops::scale(out, factor, cap));
            }
            Work::Reduce { into, ref sources, elements, .. } => match sources[..] {
                [first, more] if first == into => {
                    self.pieces(into, elements, |card, piece, out| {
                        let start = piece as u64 * PIECE * 4;
                        ops::add(out, &card.memory.floats(shifted(more, start), out.len() as u64));
                    })
                }
                _ => unreachable!("programs only add to what is there"),
            },
            Work::Rows { from, into, rows, length, from_stride, into_stride } => {
                let end = rows.saturating_sub(1) * into_stride + length;
                self.write(into, end, |card, out| {
                    for (row, out) in (0..rows).zip(out.chunks_mut(into_stride as usize)) {
                        let from = card.memory.get(shifted(from, row * from_stride), length);
                        out[..length as usize].copy_from_slice(from);
                    }
                });
            }
            Work::Route { .. } | Work::Combine { .. } | Work::AddPicked { .. } => {
                self.route_or_combine(work);
            }
            Work::AttendBlocks { .. } => self.attend(work),
            Work::Best { from, into, count, k, first } => self.best(from, into, count, k, first),
            ref other => unreachable!("programs do not have {other:?}"),
        }
    }

    /// Rows of a table, where this card has them.
    fn embed(&mut self, work: &Work) {
        let Work::Embed { table, ids, into, rows, width, quant, first, count } = *work else {
            return;
        };
        let quant = known(quant);
        self.rows(into, rows, width * 4, |card, row, out| {
            let id = card.memory.get(shifted(ids, row as u64 * 4), 4);
            let id = u32::from_le_bytes([id[0], id[1], id[2], id[3]]);
            let Some(at) = id.checked_sub(first).filter(|&at| at < count) else { return };
            let bytes = quant.row_bytes(width);
            let row = card.memory.get(shifted(table, u64::from(at) * bytes), bytes);
            decode(quant, row, cast_slice_mut(out)).expect("programs have whole rows");
        });
    }

    /// Writes to a place while the rest of the memory can be read.
    pub(super) fn write(&mut self, into: Place, length: u64, work: impl FnOnce(&Self, &mut [u8])) {
        let mut words = self.memory.take(into.buffer);
        work(self, part(&mut words, into, length));
        self.memory.put(into.buffer, words);
    }

    /// Copies within a buffer, or from one to another.
    fn copy(&mut self, from: Place, into: Place, length: u64) {
        let mut words = self.memory.take(into.buffer);
        let length = length as usize;
        if from.buffer == into.buffer {
            let whole = from.offset.max(into.offset) + length as u64;
            let bytes = part(&mut words, Place { offset: 0, ..into }, whole);
            let start = from.offset as usize;
            bytes.copy_within(start..start + length, into.offset as usize);
        } else {
            let out = part(&mut words, into, length as u64);
            out.copy_from_slice(self.memory.get(from, length as u64));
        }
        self.memory.put(into.buffer, words);
    }

    /// The same row by row, with the team if there is enough of it.
    pub(super) fn rows(
        &mut self,
        into: Place,
        rows: u64,
        bytes: u64,
        work: impl Fn(&Self, usize, &mut [u8]) + Sync,
    ) {
        self.write(into, rows * bytes, |card, out| {
            let small = out.len() < SMALL;
            let pieces: Vec<Mutex<&mut [u8]>> =
                out.chunks_exact_mut(bytes as usize).map(Mutex::new).collect();
            let threads = if small { 1 } else { card.threads() };
            card.team.run(threads, pieces.len(), &|row| {
                work(card, row, &mut pieces[row].lock().expect("a row is worked on once"));
            });
        });
    }

    /// Elements in pieces.
    fn pieces(
        &mut self,
        into: Place,
        elements: u64,
        work: impl Fn(&Self, usize, &mut [f32]) + Sync,
    ) {
        self.write(into, elements * 4, |card, out| {
            let small = out.len() < SMALL;
            let pieces: Vec<Mutex<&mut [f32]>> =
                cast_slice_mut(out).chunks_mut(PIECE as usize).map(Mutex::new).collect();
            let threads = if small { 1 } else { card.threads() };
            card.team.run(threads, pieces.len(), &|piece| {
                work(card, piece, &mut pieces[piece].lock().expect("a piece is worked on once"));
            });
        });
    }

    fn gate_in_place(&mut self, activation: Activation, gate: Place, up: Place, elements: u64) {
        self.pieces(gate, elements, |card, piece, out| {
            let start = piece as u64 * PIECE;
            let up = card.memory.floats(shifted(up, start * 4), out.len() as u64);
            let gate = out.to_vec();
            ops::gate(activation, &gate, &up, out);
        });
    }

    /// The best of this card, and nothing where it has fewer.
    fn best(&mut self, from: Place, into: Place, count: u64, k: u32, first: u32) {
        let best = ops::best(&self.memory.floats(from, count), k as usize);
        let found = best.into_iter().map(|(place, value)| (place + first, value));
        let none = std::iter::repeat((u32::MAX, f32::NEG_INFINITY));
        self.write(into, u64::from(k) * 8, |_, out| {
            for (out, (token, value)) in
                out.as_chunks_mut::<8>().0.iter_mut().zip(found.chain(none))
            {
                out[..4].copy_from_slice(&token.to_le_bytes());
                out[4..].copy_from_slice(&value.to_le_bytes());
            }
        });
    }

    fn norm_in_place(&mut self, data: Place, weight: Place, rows: u64, width: u64, epsilon: f32) {
        self.rows(data, rows, width * 4, |card, _, out| {
            let row: Vec<f32> = cast_slice(out).to_vec();
            ops::norm(&row, &card.memory.floats(weight, width), epsilon, cast_slice_mut(out));
        });
    }
}

/// Elements of a piece.
const PIECE: u64 = 4096;

pub(super) fn shifted(place: Place, by: u64) -> Place {
    Place { offset: place.offset + by, ..place }
}

fn known(id: u32) -> Quant {
    Quant::from_ggml_id(id).expect("programs have types of files")
}
