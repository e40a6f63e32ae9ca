// SPDX-License-Identifier: Apache-2.0
//! The KV cache in blocks on a card that this process plays, and attention over it: rows of a sequence that follow each
//! other take keys and values apart once, and where there are few of them, threads share the blocks.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use bytemuck::{cast_slice, cast_slice_mut};
use ggml_spanker::ops::{self, KvView, Queries, partial_len};
use spanker_model::{KV_BLOCK, KvShape};
use spanker_plan::{ATTEND_ROWS, KvCache, ROW_BYTES, Scores};
use spanker_runtime::{Place, Work};

use super::Card;
use super::memory::part;
use super::operate::shifted;

/// Multiply-accumulates below which a team costs more than it saves.
const SMALL: u64 = 64 << 10;
/// Blocks from which on threads share those of one row.
const MANY_BLOCKS: usize = 3;

/// Rows of one sequence that follow each other.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Tile {
    rows: Range<u64>,
    /// The first row's position.
    first: u64,
    /// Where the block table begins, in entries.
    table: u64,
}

impl Tile {
    fn count(&self) -> u64 {
        self.rows.end - self.rows.start
    }

    /// Blocks that the last row sees.
    fn blocks(&self) -> usize {
        KvShape::blocks_for(self.first + self.count()) as usize
    }

    /// Blocks of which a row sees something.
    fn seen_blocks(&self, scores: &Scores) -> Range<usize> {
        (scores.first_seen(self.first) / KV_BLOCK) as usize..self.blocks()
    }
}

impl<B: AsRef<[u8]> + Send + Sync> Card<B> {
    /// A row's position and the first entry of its block table.
    pub(super) fn row_at(&self, at: Place, row: u64) -> [u32; 2] {
        let bytes = self.memory.get(shifted(at, row * ROW_BYTES), ROW_BYTES);
        let words: &[u32] = cast_slice(bytes);
        [words[0], words[1]]
    }

    /// The rows of a step in runs of one sequence.
    fn tiles(&self, cache: &KvCache, rows: u64) -> Vec<Tile> {
        let mut tiles: Vec<Tile> = Vec::new();
        for row in 0..rows {
            let [position, table] = self.row_at(cache.rows, row).map(u64::from);
            match tiles.last_mut() {
                Some(tile)
                    if tile.table == table
                        && tile.first + tile.count() == position
                        && tile.count() < ATTEND_ROWS =>
                {
                    tile.rows.end += 1;
                }
                _ => tiles.push(Tile { rows: row..row + 1, first: position, table }),
            }
        }
        tiles
    }

    /// The block table of a tile.
    fn table(&self, cache: &KvCache, tile: &Tile) -> &[u32] {
        let start = shifted(cache.tables, tile.table * 4);
        cast_slice(self.memory.get(start, tile.blocks() as u64 * 4))
    }

    /// Puts new keys and values into their blocks.
    pub(super) fn keep(&mut self, work: &Work) {
        let Work::Keep { keys, values, ref cache, rows } = *work else { return };
        let shape = cache.shape().expect("programs have types that there are");
        let (width, bytes) = (cache.heads * cache.head_size, shape.block_bytes());
        if width == 0 {
            return;
        }
        self.write(cache.blocks, cache.count * bytes, |card, blocks| {
            for row in 0..rows {
                let [position, table] = card.row_at(cache.rows, row).map(u64::from);
                let entry = shifted(cache.tables, (table + position / KV_BLOCK) * 4);
                let block: &[u32] = cast_slice(card.memory.get(entry, 4));
                let start = block[0] as usize * bytes as usize;
                let [keys, values] = [keys, values]
                    .map(|place| card.memory.floats(shifted(place, row * width * 4), width));
                let block = &mut blocks[start..start + bytes as usize];
                ops::keep(shape, position as usize, &keys, &values, block);
            }
        });
    }

    /// Attention of all rows.
    pub(super) fn attend(&mut self, work: &Work) {
        let Work::AttendBlocks { ref cache, rows, heads, group, offset, ref scores, .. } = *work
        else {
            return;
        };
        let (tiles, shares) = (self.tiles(cache, rows), shares(heads, group, offset));
        let seen = |tile: &Tile| {
            let position = tile.first + tile.count() - 1;
            (position + 1 - scores.first_seen(position)) * tile.count()
        };
        let macs = tiles.iter().map(seen).sum::<u64>() * heads * cache.head_size;
        let threads = if macs < SMALL { 1 } else { self.threads() };
        let units = tiles.len() * shares.len();
        let uneven = !units.is_multiple_of(threads) && units < 4 * threads;
        match &tiles[..] {
            [tile]
                if tile.count() == 1 && uneven && tile.seen_blocks(scores).len() >= MANY_BLOCKS =>
            {
                self.attend_by_blocks(work, tile, &shares, threads);
            }
            _ => self.attend_by_tiles(work, &tiles, &shares, threads),
        }
    }

    /// The sinks of some heads.
    fn sinks(&self, work: &Work, own: &Range<u64>) -> Cow<'_, [f32]> {
        match work {
            Work::AttendBlocks { scores: Scores { sinks: Some(sinks), .. }, .. } => {
                self.memory.floats(shifted(*sinks, own.start * 4), own.end - own.start)
            }
            _ => Cow::Borrowed(&[]),
        }
    }

    /// The queries of some heads of a tile's rows.
    fn queries<'q>(
        &self,
        work: &Work,
        tile: &Tile,
        own: &Range<u64>,
        (rows, sinks): (&'q mut Vec<f32>, &'q [f32]),
    ) -> Queries<'q> {
        let Work::AttendBlocks { queries, ref cache, heads, scores, .. } = *work else {
            unreachable!("only attention has queries");
        };
        let size = cache.head_size;
        rows.clear();
        for row in tile.rows.clone() {
            let at = shifted(queries, (row * heads + own.start) * size * 4);
            rows.extend_from_slice(&self.memory.floats(at, (own.end - own.start) * size));
        }
        Queries {
            rows,
            heads: (own.end - own.start) as usize,
            first: tile.first as usize,
            scale: f32::from_bits(scores.scale),
            cap: f32::from_bits(scores.cap),
            window: scores.window as usize,
            sinks,
        }
    }

    /// A unit is a tile with the heads that share a head of keys and values.
    fn attend_by_tiles(
        &mut self,
        work: &Work,
        tiles: &[Tile],
        shares: &[(Range<u64>, u64)],
        threads: usize,
    ) {
        let Work::AttendBlocks { ref cache, into, rows, heads, .. } = *work else {
            return;
        };
        let shape = cache.shape().expect("programs have types that there are");
        let (size, width) = (cache.head_size, heads * cache.head_size * 4);
        self.write(into, rows * width, |card, out| {
            let mut pieces: Vec<Mutex<&mut [u8]>> =
                Vec::with_capacity(shares.len() * rows as usize);
            for mut row in out.chunks_exact_mut(width as usize) {
                for (own, _) in shares {
                    let (own, rest) = row.split_at_mut(((own.end - own.start) * size * 4) as usize);
                    pieces.push(Mutex::new(own));
                    row = rest;
                }
            }
            let blocks = card.memory.get(cache.blocks, cache.count * shape.block_bytes());
            card.team.run(threads, tiles.len() * shares.len(), &|unit| {
                let (tile, share) = (&tiles[unit / shares.len()], unit % shares.len());
                let (own, head) = (&shares[share].0, shares[share].1 as usize);
                let mut scratch = card.scratch();
                let sinks = card.sinks(work, own);
                let given = card.queries(work, tile, own, (&mut scratch.queries, &sinks));
                let table = card.table(cache, tile);
                let view = KvView { cache: blocks, table, shape, head };
                scratch.results.resize(given.rows.len(), 0.0);
                ops::attend(given, view, &mut scratch.attend, &mut scratch.results);
                let length = given.heads * size as usize;
                for (row, result) in tile.rows.clone().zip(scratch.results.chunks_exact(length)) {
                    let piece = &pieces[row as usize * shares.len() + share];
                    let mut out = piece.lock().expect("a row's heads are worked on once");
                    out.copy_from_slice(cast_slice(result));
                }
                card.give_back(scratch);
            });
        });
    }

    /// A unit is some blocks of one row, with the heads that share a head of keys and values.
    fn attend_by_blocks(
        &mut self,
        work: &Work,
        tile: &Tile,
        shares: &[(Range<u64>, u64)],
        threads: usize,
    ) {
        let Work::AttendBlocks { ref cache, into, heads, scores, .. } = *work else {
            return;
        };
        let shape = cache.shape().expect("programs have types that there are");
        let (size, length) = (cache.head_size, partial_len(cache.head_size as usize));
        let seen = tile.seen_blocks(&scores);
        let (begin, blocks) = (seen.start, seen.len());
        let mut partials = std::mem::take(&mut self.partials);
        partials.resize(heads as usize * blocks * length, 0.0);
        // Enough pieces that nobody waits long for the last one.
        let pieces = (4 * threads).div_ceil(shares.len()).min(blocks);
        let range =
            |piece: usize| begin + piece * blocks / pieces..begin + (piece + 1) * blocks / pieces;
        {
            let mut rest = &mut partials[..];
            let mut units: Vec<Mutex<&mut [f32]>> = Vec::with_capacity(shares.len() * pieces);
            for (own, _) in shares {
                for piece in 0..pieces {
                    let count = range(piece).len() * (own.end - own.start) as usize * length;
                    let (one, more) = rest.split_at_mut(count);
                    units.push(Mutex::new(one));
                    rest = more;
                }
            }
            let card = &*self;
            let cached = card.memory.get(cache.blocks, cache.count * shape.block_bytes());
            card.team.run(threads, units.len(), &|unit| {
                let (own, head) = &shares[unit / pieces];
                let mut scratch = card.scratch();
                let sinks = card.sinks(work, own);
                let given = card.queries(work, tile, own, (&mut scratch.queries, &sinks));
                let table = card.table(cache, tile);
                let view = KvView { cache: cached, table, shape, head: *head as usize };
                let mut out = units[unit].lock().expect("blocks are worked on once");
                ops::attend_blocks(
                    given,
                    view,
                    range(unit % pieces),
                    &mut scratch.attend,
                    &mut out,
                );
                card.give_back(scratch);
            });
        }
        let sinks = self.sinks(work, &(0..heads)).into_owned();
        let mut words = self.memory.take(into.buffer);
        let out =
            part(&mut words, shifted(into, tile.rows.start * heads * size * 4), heads * size * 4);
        let mut start = 0;
        let mut results = cast_slice_mut(out).chunks_exact_mut(size as usize);
        for (own, _) in shares {
            let stride = (own.end - own.start) as usize * length;
            for head in 0..(own.end - own.start) as usize {
                let first = start + head * length;
                let result = results.next().expect("as many heads as there are");
                let sink = sinks.get(own.start as usize + head).copied();
                ops::fold(&partials[first..start + blocks * stride], stride, sink, result);
            }
            start += blocks * stride;
        }
        self.memory.put(into.buffer, words);
        self.partials = partials;
    }

    fn scratch(&self) -> super::Attending {
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    fn give_back(&self, scratch: super::Attending) {
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner).push(scratch);
    }
}

/// The heads that share each head of keys and values.
fn shares(heads: u64, group: u64, offset: u64) -> Vec<(Range<u64>, u64)> {
    let mut list = Vec::new();
    let mut start = 0;
    while start < heads {
        let kv = (offset + start) / group;
        let end = heads.min((kv + 1) * group - offset);
        list.push((start..end, kv));
        start = end;
    }
    list
}
