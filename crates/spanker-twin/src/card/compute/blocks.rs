// SPDX-License-Identifier: Apache-2.0
//! The KV cache in blocks. Positions and block tables are data: they are read when they are needed, and what they say of
//! blocks that are not there is left out.

use bytemuck::cast_slice;
use ggml_spanker::ops::{self, KvView, Queries};
use ggml_spanker::{KV_BLOCK, KvShape};
use spanker_plan::{ATTEND_ROWS, Reach};
use spanker_runtime::{KvCache, Place, ROW_BYTES, Work};

use super::{Alu, Memory, SLICE, Slice, floats, read, scratch_bytes, shared_heads, shifted};
use crate::card::check::MOST_SCORES;

/// Multiply-accumulates in the time of a byte that is copied.
const MACS_PER_BYTE: u64 = 4;

/// A row's position and the first entry of its block table.
pub(super) fn row_at(memory: &Memory, at: Place, row: u64) -> [u32; 2] {
    let bytes = read(memory, shifted(at, row * ROW_BYTES), ROW_BYTES);
    let words: &[u32] = cast_slice(bytes);
    [words[0], words[1]]
}

/// How far back the rows of work look; nothing for what is no attention over blocks.
pub(crate) fn reach(memory: &Memory, work: &Work) -> Reach {
    let Work::AttendBlocks { rows, ref cache, .. } = *work else { return Reach::default() };
    let rows: Vec<[u32; 2]> = (0..rows).map(|row| row_at(memory, cache.rows, row)).collect();
    Reach::of_rows(&rows)
}

/// The block table of a row up to its position, if all of it is there.
fn table<'m>(
    memory: &'m Memory,
    cache: &KvCache,
    [position, first]: [u32; 2],
) -> Option<&'m [u32]> {
    let blocks = KvShape::blocks_for(u64::from(position) + 1);
    let end = u64::from(first).checked_add(blocks).filter(|&end| end <= cache.entries)?;
    let start = shifted(cache.tables, u64::from(first) * 4);
    let table: &[u32] = cast_slice(read(memory, start, (end - u64::from(first)) * 4));
    table.iter().all(|&block| u64::from(block) < cache.count).then_some(table)
}

impl Alu {
    /// `done` counts rows.
    pub(super) fn keep(&mut self, memory: &mut Memory, work: &Work, done: u64) -> Slice {
        let Work::Keep { keys, values, ref cache, rows } = *work else {
            unreachable!("only keys and values come here");
        };
        let shape = cache.shape().expect("it was checked");
        let (width, bytes) = (cache.heads * cache.head_size, shape.block_bytes());
        let (mut done, mut spent) = (done, 0);
        while done < rows && spent < SLICE {
            let at = row_at(memory, cache.rows, done);
            let block = table(memory, cache, at).and_then(|table| table.last().copied());
            if let Some(block) = block {
                let place = shifted(cache.blocks, u64::from(block) * bytes);
                let out = scratch_bytes(&mut self.scratch.out, bytes as usize);
                out.copy_from_slice(read(memory, place, bytes));
                let [keys, values] = [keys, values]
                    .map(|place| floats(memory, shifted(place, done * width * 4), width));
                ops::keep(shape, at[0] as usize, keys, values, out);
                self.spoil_kept(shape, u64::from(at[0]) % KV_BLOCK, bytes);
                let out = scratch_bytes(&mut self.scratch.out, bytes as usize);
                memory.get_mut(place, bytes).expect("it was checked").copy_from_slice(out);
            }
            spent += 2 * bytes;
            done += 1;
        }
        Slice::of(done, rows, spent)
    }

    /// A wrong bit in what was just put into a block.
    fn spoil_kept(&mut self, shape: KvShape, slot: u64, bytes: u64) {
        if self.garble {
            let at = shape.numbers(0, true, slot).offset as usize;
            scratch_bytes(&mut self.scratch.out, bytes as usize)[at] ^= 0x40;
        }
    }

    /// `done` counts rows for each head of keys and values, one head after the other.
    pub(super) fn attend_blocks(&mut self, memory: &mut Memory, work: &Work, done: u64) -> Slice {
        let Work::AttendBlocks { rows, heads, group, offset, ref cache, .. } = *work else {
            unreachable!("only attention over blocks comes here");
        };
        let (first, behind) = shared_heads(heads, group, offset);
        let total = rows * (behind - first);
        let (mut done, mut spent) = (done, 0);
        while done < total && spent < SLICE {
            let (kv, row) = (first + done / rows, done % rows);
            let at = row_at(memory, cache.rows, row);
            // Rows that follow each other in a sequence take their keys and values apart once.
            let follows = |next: u64| {
                row_at(memory, cache.rows, row + next) == [at[0].wrapping_add(next as u32), at[1]]
            };
            let most = ATTEND_ROWS.min(rows - row);
            let count = (1..most).find(|&next| !follows(next)).unwrap_or(most);
            let own = [
                (kv * group).max(offset) - offset,
                ((kv + 1) * group).min(offset + heads) - offset,
            ];
            self.attend_rows(memory, work, [row, count], kv, own);
            let seen = u64::from(at[0]) + count;
            spent += 2 * seen * count * (own[1] - own[0]) * cache.head_size / MACS_PER_BYTE + 64;
            done += count;
        }
        Slice::of(done, total, spent)
    }

    /// The heads from `from` to `to` of rows that follow each other, which use head `kv`.
    fn attend_rows(
        &mut self,
        memory: &mut Memory,
        work: &Work,
        [first, count]: [u64; 2],
        kv: u64,
        [from, to]: [u64; 2],
    ) {
        let Work::AttendBlocks { queries, ref cache, into, heads, scores, .. } = *work else {
            return;
        };
        let [position, entry] = row_at(memory, cache.rows, first);
        let last = position.saturating_add(count as u32 - 1);
        if (u64::from(last) + 1) * heads > MOST_SCORES {
            return;
        }
        let Some(table) = table(memory, cache, [last, entry]) else { return };
        let shape = cache.shape().expect("it was checked");
        let (row, own) = (heads * cache.head_size * 4, (to - from) * cache.head_size * 4);
        let at = |place: Place, row_at: u64| {
            shifted(place, (first + row_at) * row + from * cache.head_size * 4)
        };
        let scratch = &mut self.scratch;
        scratch.values.clear();
        for one in 0..count {
            scratch.values.extend_from_slice(floats(memory, at(queries, one), own / 4));
        }
        let view = KvView {
            cache: read(memory, cache.blocks, cache.count * shape.block_bytes()),
            table,
            shape,
            head: kv as usize,
        };
        let given = Queries {
            rows: &scratch.values,
            heads: (to - from) as usize,
            first: position as usize,
            scale: f32::from_bits(scores.scale),
            cap: f32::from_bits(scores.cap),
            window: usize::try_from(scores.window).unwrap_or(0),
            sinks: match scores.sinks {
                None => &[],
                Some(sinks) => floats(memory, shifted(sinks, from * 4), to - from),
            },
        };
        scratch.results.resize(scratch.values.len(), 0.0);
        ops::attend(given, view, &mut scratch.attend, &mut scratch.results);
        for one in 0..count {
            let part = one as usize * own as usize / 4..(one as usize + 1) * own as usize / 4;
            let scratch = &mut self.scratch;
            let out = scratch_bytes(&mut scratch.out, own as usize);
            out.copy_from_slice(cast_slice(&scratch.results[part]));
            self.store(memory, at(into, one), own);
        }
    }
}

/// Keys and values of one head that lie position by position, as blocks.
pub(super) fn blocks_of(
    shape: KvShape,
    keys: &[u8],
    values: &[u8],
    stride: usize,
    positions: usize,
) -> Vec<u8> {
    let blocks = KvShape::blocks_for(positions as u64) as usize;
    let (block, half) = (shape.block_bytes() as usize, shape.half_bytes() as usize);
    let mut out = vec![0; blocks * block];
    let size = 2 * shape.head_size as usize;
    for position in 0..positions {
        let (at, slot) = (position / KV_BLOCK as usize, position % KV_BLOCK as usize);
        let block = &mut out[at * block..][..block];
        let key = &keys[position * stride..][..size];
        for (number, half) in key.as_chunks::<2>().0.iter().enumerate() {
            let start = 2 * (number * KV_BLOCK as usize + slot);
            block[start..start + 2].copy_from_slice(half);
        }
        let value = &values[position * stride..][..size];
        block[half + slot * size..][..size].copy_from_slice(value);
    }
    out
}
