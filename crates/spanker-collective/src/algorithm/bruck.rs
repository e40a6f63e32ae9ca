// SPDX-License-Identifier: Apache-2.0
//! Circulant algorithms: in round `k` every rank talks to the rank 2^k away.
//!
//! | collective | rounds | elements sent by a rank |
//! |---|---|---|
//! | all-gather, reduce-scatter | ceil(log2 n) | (n - 1)/n of the buffer |
//! | all-reduce | 2 ceil(log2 n) | 2(n - 1)/n of the buffer |
//! | all-to-all | ceil(log2 n) | about half the buffer each round |
//!
//! They need no special case for numbers of ranks that are not powers of two.
//!
//! Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in
//! multiport message-passing systems", 1997; Träff, "Optimal, non-pipelined reduce-scatter and
//! allreduce algorithms", 2023.

use super::Builder;
use crate::schedule::{Incoming, Rank, Span};

/// The distances 1, 2, 4, .. below `n`.
fn distances(n: usize) -> impl DoubleEndedIterator<Item = usize> {
    (0..usize::BITS)
        .map(|bit| 1usize << bit)
        .take_while(move |&distance| distance < n)
        .collect::<Vec<_>>()
        .into_iter()
}

/// Before the round of distance `d` a rank has the `d` chunks from its own on; it sends them to the
/// rank `d` before it.
pub(super) fn all_gather(b: &mut Builder) {
    let n = b.ranks;
    for d in distances(n) {
        b.round();
        for r in 0..n {
            b.chunks(r, (r + n - d) % n, r, d.min(n - d), None);
        }
    }
}

/// The all-gather run backwards: where that one broadcasts a chunk, this one collects contributions.
pub(super) fn reduce_scatter(b: &mut Builder) {
    let n = b.ranks;
    for d in distances(n).rev() {
        b.round();
        for r in 0..n {
            let to = (r + d) % n;
            b.chunks(r, to, to, d.min(n - d), Some(Incoming::Second));
        }
    }
}

/// All-to-all in ceil(log2 n) rounds: the block that must travel a distance `p` hops once for each bit
/// that is set in `p`.
pub(super) fn all_to_all(b: &mut Builder) {
    let (n, len) = (b.ranks, b.elements);
    let block = len.div_ceil(n);
    let (packed, arrived) = (n * block, n * block + len.div_ceil(2) + n);
    b.need_scratch(arrived + len.div_ceil(2) + n);
    // Blocks at rank `r`, by the distance they still had at the start of the journey.
    let place = |p: usize, size: usize| Span::scratch(p * block, size);
    b.round();
    for r in 0..n {
        for p in 0..n {
            let from = b.chunk(r + p);
            b.copy(r, Span::data(from.clone()), place(p, from.len()));
        }
    }
    for d in distances(n) {
        // What rank `r` holds at distance `p` before this round is meant for the rank that is the
        // remaining bits of `p` away, and that decides the block's size.
        let moving: Vec<usize> = (0..n).filter(|p| p & d != 0).collect();
        let size = |b: &Builder, r: Rank, p: usize| b.chunk(r + (p & !(d - 1))).len();
        b.round();
        for r in 0..n {
            let mut at = packed;
            for &p in &moving {
                let size = size(b, r, p);
                b.copy(r, place(p, size), Span::scratch(at, size));
                at += size;
            }
        }
        b.round();
        for r in 0..n {
            let total: usize = moving.iter().map(|&p| size(b, r, p)).sum();
            let src = Span::scratch(packed, total);
            b.message(r, (r + d) % n, src, Span::scratch(arrived, total), None);
        }
        for r in 0..n {
            let from = (r + n - d) % n;
            let mut at = arrived;
            for &p in &moving {
                let size = size(b, from, p);
                b.copy(r, Span::scratch(at, size), place(p, size));
                at += size;
            }
        }
    }
    b.round();
    for r in 0..n {
        let size = b.chunk(r).len();
        for p in 0..n {
            let home = ((r + n - p) % n) * size;
            b.copy(r, place(p, size), Span::data(home..home + size));
        }
    }
}
