// SPDX-License-Identifier: Apache-2.0
//! Attention in slices: a row of queries with the heads that share a head of keys and values, or several such.

use bytemuck::cast_slice_mut;
use ggml_spanker::ops::{self, KvView, Queries};
use ggml_spanker::{KvShape, Quant};
use spanker_runtime::{Place, Work};

use super::blocks::blocks_of;
use super::{Alu, Memory, SLICE, Slice, floats, read, scratch_bytes, shifted};

/// Multiply-accumulates in the time of a byte that is copied.
const MACS_PER_BYTE: u64 = 4;

/// The heads of keys and values that heads of queries use: the first, and the one behind the last.
pub(crate) fn shared_heads(heads: u64, group: u64, offset: u64) -> (u64, u64) {
    (offset / group, (offset + heads).div_ceil(group))
}

impl Alu {
    /// `done` counts pairs of a row and a head of keys and values.
    pub(super) fn attend(&mut self, memory: &mut Memory, work: &Work, done: u64) -> Slice {
        let Work::Attend { rows, heads, head_size, group, offset, past, .. } = *work else {
            unreachable!("only attention comes here");
        };
        let (first, behind) = shared_heads(heads, group, offset);
        let kv_used = behind - first;
        let total = rows * kv_used;
        let (mut done, mut spent) = (done, 0);
        while done < total && spent < SLICE {
            let (row, kv) = (done / kv_used, first + done % kv_used);
            let from = (kv * group).max(offset) - offset;
            let to = ((kv + 1) * group).min(offset + heads) - offset;
            self.attend_heads(memory, work, row, kv, [from, to]);
            spent += 2 * (past + row + 1) * (to - from) * head_size / MACS_PER_BYTE + 64;
            done += 1;
        }
        Slice::of(done, total, spent)
    }

    /// The heads from `from` to `to` of a row, which use head `kv`.
    fn attend_heads(
        &mut self,
        memory: &mut Memory,
        work: &Work,
        row: u64,
        kv: u64,
        [from, to]: [u64; 2],
    ) {
        let Work::Attend { queries, keys, values, into, heads, kv_heads, head_size, .. } = *work
        else {
            return;
        };
        let Work::Attend { rows, past, scale, .. } = *work else { return };
        let at = (row * heads + from) * head_size * 4;
        let count = (to - from) * head_size;
        let stride = kv_heads * head_size * 2;
        let seen = |place: Place| {
            let skipped = kv * head_size * 2;
            read(memory, shifted(place, skipped), (past + rows) * stride - skipped)
        };
        let shape = KvShape { heads: 1, head_size, quant: Quant::F16 };
        let positions = (past + row + 1) as usize;
        let blocks = blocks_of(shape, seen(keys), seen(values), stride as usize, positions);
        let table: Vec<u32> = (0..KvShape::blocks_for(positions as u64) as u32).collect();
        let view = KvView { cache: &blocks, table: &table, shape, head: 0 };
        let rows = floats(memory, shifted(queries, at), count);
        let (heads, scale) = ((to - from) as usize, f32::from_bits(scale));
        let queries = Queries::plain(rows, heads, positions - 1, scale);
        let scratch = &mut self.scratch;
        let out = cast_slice_mut(scratch_bytes(&mut scratch.out, (count * 4) as usize));
        ops::attend(queries, view, &mut scratch.attend, out);
        self.store(memory, shifted(into, at), count * 4);
    }
}
