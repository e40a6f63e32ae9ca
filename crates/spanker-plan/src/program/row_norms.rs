// SPDX-License-Identifier: Apache-2.0
//! Norms of queries and keys as whole rows, of which each card of a group has some heads.

use std::ops::Range;

use super::write::{F32, after};
use super::{Buffer, Sink, Writer};
use crate::cost::shard::{Shard, len};
use crate::work::Work;

impl<S: Sink> Writer<'_, S> {
    /// Norms queries and keys as whole rows: every rank gets all heads of a row, norms them and keeps its own.
    pub(super) fn norm_rows(&mut self, stage: usize, members: Range<usize>, layer: usize) {
        let (model, rows) = (self.of.model, self.rows);
        let (size, epsilon) = (model.head_size, self.of.numerics.epsilon);
        let alone = members.len() == 1;
        let own: [fn(&Shard) -> Range<u64>; 2] = [|s| s.heads.clone(), |s| s.kv_heads.clone()];
        let buffers = [(Buffer::Queries, model.heads), (Buffer::Keys, model.kv_heads)];
        for (at, ((buffer, heads), own)) in buffers.into_iter().zip(own).enumerate() {
            let held: Vec<Range<u64>> =
                members.clone().map(|member| own(&self.members[member].shard)).collect();
            if !alone {
                self.gather_heads(stage, members.clone(), buffer, &held);
            }
            for (member, held) in members.clone().zip(held).filter(|(_, held)| len(held) > 0) {
                let Some(norms) = self.held(member, layer).head_norms else { continue };
                let place = |of: Buffer| self.place(member, of);
                let (into, width, weight) = (place(buffer), heads * size, norms[at]);
                let data = if alone { into } else { place(Buffer::Wide) };
                self.work(
                    member,
                    Work::Norm { from: data, weight, into: data, rows, width, epsilon },
                );
                if !alone {
                    let from = after(data, held.start * size * F32);
                    let (length, from_stride) = (len(&held) * size * F32, width * F32);
                    let into_stride = length;
                    let copy = Work::Rows { from, into, rows, length, from_stride, into_stride };
                    self.work(member, copy);
                }
            }
        }
    }

    /// Brings every rank the heads of all, of which neighbours may hold the same one.
    fn gather_heads(
        &mut self,
        stage: usize,
        members: Range<usize>,
        buffer: Buffer,
        held: &[Range<u64>],
    ) {
        let (rows, unit, mut known) = (self.rows, self.of.model.head_size * F32, 0);
        let parts: Vec<Range<u64>> = held
            .iter()
            .map(|held| {
                let start = known;
                known = known.max(held.end);
                start..known
            })
            .collect();
        let shared = parts.iter().zip(held).any(|(part, held)| len(part) > 0 && part != held);
        if shared {
            for (member, (part, held)) in members.clone().zip(parts.iter().zip(held)) {
                if len(part) == 0 {
                    continue;
                }
                let skipped = (part.start - held.start) * unit;
                let from = after(self.place(member, buffer), skipped);
                let into = self.place(member, Buffer::Part);
                let (length, from_stride) = (len(part) * unit, len(held) * unit);
                let into_stride = length;
                let copy = Work::Rows { from, into, rows, length, from_stride, into_stride };
                self.work(member, copy);
            }
        }
        let from = if shared { Buffer::Part } else { buffer };
        let parts = parts.iter().map(|part| part.start * unit..part.end * unit).collect();
        self.gather_rows(stage, members, from, Buffer::Wide, parts, rows);
    }
}
