// SPDX-License-Identifier: Apache-2.0
//! Ring algorithms: every message goes from rank `r` to rank `r + 1`.
//!
//! | collective | rounds | elements sent by a rank |
//! |---|---|---|
//! | reduce-scatter, all-gather | n - 1 | (n - 1)/n of the buffer |
//! | all-reduce | 2(n - 1) | 2(n - 1)/n of the buffer |
//! | broadcast, reduce | 2n - 2 | the buffer, in n pipelined chunks |
//! | gather, scatter | n - 1 | up to the buffer, near the root |
//! | all-to-all | n - 1 | (n - 1)/2 of the buffer |
//!
//! Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

use super::Builder;
use crate::schedule::{Incoming, Rank, Span};

/// Chunk `c` starts at rank `c + 1` and gathers a contribution at each rank until it ends at rank `c`.
pub(super) fn reduce_scatter(b: &mut Builder) {
    let n = b.ranks;
    for s in 0..n - 1 {
        b.round();
        for r in 0..n {
            let sent = b.chunk(r + 2 * n - s - 1);
            b.data(r, (r + 1) % n, sent, Some(Incoming::First));
        }
    }
}

/// Each rank passes on the chunk that it got in the round before, beginning with its own.
pub(super) fn all_gather(b: &mut Builder) {
    let n = b.ranks;
    for s in 0..n - 1 {
        b.round();
        for r in 0..n {
            let sent = b.chunk(r + n - s);
            b.data(r, (r + 1) % n, sent, None);
        }
    }
}

/// A chain from the root. Chunks follow each other, so that all links work at once.
pub(super) fn broadcast(b: &mut Builder, root: Rank) {
    pipeline(b, root, None);
}

/// A chain that ends at the root, in the same direction: the root's right-hand neighbour starts.
pub(super) fn reduce(b: &mut Builder, root: Rank) {
    pipeline(b, root + 1, Some(Incoming::First));
}

/// Sends each chunk along the whole chain that begins at rank `head`, one place a round.
fn pipeline(b: &mut Builder, head: Rank, fold: Option<Incoming>) {
    let n = b.ranks;
    if n == 1 {
        return;
    }
    for t in 0..2 * n - 2 {
        b.round();
        for place in 0..n - 1 {
            if (place..place + n).contains(&t) {
                let range = b.chunk(t - place);
                let rank = (head + place) % n;
                b.data(rank, (rank + 1) % n, range, fold);
            }
        }
    }
}

/// Every rank passes on its own chunk and then those from behind it.
pub(super) fn gather(b: &mut Builder, root: Rank) {
    let n = b.ranks;
    let rank_at = |place: usize| (root + 1 + place) % n;
    for t in 0..n - 1 {
        b.round();
        for place in t..n - 1 {
            let range = b.chunk(rank_at(place - t));
            b.data(rank_at(place), rank_at(place + 1), range, None);
        }
    }
}

/// The root sends the chunk of the farthest rank first, so that no rank waits for its neighbour's.
pub(super) fn scatter(b: &mut Builder, root: Rank) {
    let n = b.ranks;
    let rank_at = |place: usize| (root + place) % n;
    for t in 0..n - 1 {
        b.round();
        for place in 0..=t {
            let range = b.chunk(rank_at(n - 1 - t + place));
            b.data(rank_at(place), rank_at(place + 1), range, None);
        }
    }
}

/// Each rank sends all its blocks to its neighbour, which removes its own and forwards the rest.
///
/// A packet holds the blocks of one origin, nearest destination first. Two halves of the scratch take
/// turns: one is sent while the other is received.
pub(super) fn all_to_all(b: &mut Builder) {
    let (n, len) = (b.ranks, b.elements);
    b.need_scratch(2 * len);
    let half = |t: usize| (t % 2) * len;
    b.round();
    for r in 0..n {
        // The packet is laid down first: the copy of the own block overwrites the input.
        let mut at = half(0);
        for distance in 1..n {
            let block = b.chunk(r + distance);
            b.copy(r, Span::data(block.clone()), Span::scratch(at, block.len()));
            at += block.len();
        }
        let own = b.chunk(r);
        b.copy(r, Span::data(own.clone()), Span::scratch(at, own.len()));
        let home = r * own.len();
        b.copy(r, Span::scratch(at, own.len()), Span::data(home..home + own.len()));
    }
    for t in 1..n {
        b.round();
        for r in 0..n {
            let origin = r + n - (t - 1);
            let nearest = if t == 1 { 0 } else { b.chunk(origin + t - 1).len() };
            let sent: usize = (t..n).map(|d| b.chunk(origin + d).len()).sum();
            let src = Span::scratch(half(t - 1) + nearest, sent);
            b.message(r, (r + 1) % n, src, Span::scratch(half(t), sent), None);
        }
        for r in 0..n {
            let origin = (r + n - t) % n;
            let size = b.chunk(r).len();
            let home = origin * size;
            b.copy(r, Span::scratch(half(t), size), Span::data(home..home + size));
        }
    }
}
