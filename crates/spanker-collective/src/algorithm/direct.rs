// SPDX-License-Identifier: Apache-2.0
//! Direct algorithms: every message goes straight to where it is needed, in one round.
//!
//! | collective | rounds | elements sent by a rank |
//! |---|---|---|
//! | all-reduce, one-shot | 1 | n - 1 buffers |
//! | reduce-scatter, all-gather, all-to-all | 1 | (n - 1)/n of the buffer |
//! | all-reduce, two-shot | 2 | 2(n - 1)/n of the buffer |
//! | broadcast, reduce, gather, scatter | 1 | all at the root |
//!
//! Contributions are stored separately until all have arrived and are then folded in rank order: the bits are
//! those of the serial fold.

use super::Builder;
use crate::schedule::{Rank, Span};

/// Everyone's buffer to everyone.
pub(super) fn all_reduce(b: &mut Builder) {
    let range = b.whole();
    b.round();
    for to in 0..b.ranks {
        collect(b, to, Span::data(range.clone()));
    }
}

/// Everyone's chunk `r` to rank `r`.
pub(super) fn reduce_scatter(b: &mut Builder) {
    b.round();
    for to in 0..b.ranks {
        let range = b.chunk(to);
        collect(b, to, Span::data(range));
    }
}

/// Everyone's buffer to the root.
pub(super) fn reduce(b: &mut Builder, root: Rank) {
    let range = b.whole();
    b.round();
    collect(b, root, Span::data(range));
}

/// Brings everyone's `span` to rank `to`, each into a slot of its own, and folds the slots in rank
/// order.
fn collect(b: &mut Builder, to: Rank, span: Span) {
    b.need_scratch((b.ranks - 1) * span.len);
    let mut sources = Vec::with_capacity(b.ranks);
    let mut at = 0;
    for from in 0..b.ranks {
        if from == to {
            sources.push(span);
            continue;
        }
        let slot = Span::scratch(at, span.len);
        b.message(from, to, span, slot, None);
        sources.push(slot);
        at += span.len;
    }
    if sources.len() > 1 {
        b.fold(to, sources, span);
    }
}

/// Everyone's own chunk to everyone.
pub(super) fn all_gather(b: &mut Builder) {
    b.round();
    for from in 0..b.ranks {
        for to in (0..b.ranks).filter(|&to| to != from) {
            let range = b.chunk(from);
            b.data(from, to, range, None);
        }
    }
}

/// The root's buffer to everyone.
pub(super) fn broadcast(b: &mut Builder, root: Rank) {
    b.round();
    for to in (0..b.ranks).filter(|&to| to != root) {
        let range = b.whole();
        b.data(root, to, range, None);
    }
}

/// Everyone's own chunk to the root.
pub(super) fn gather(b: &mut Builder, root: Rank) {
    b.round();
    for from in (0..b.ranks).filter(|&from| from != root) {
        let range = b.chunk(from);
        b.data(from, root, range, None);
    }
}

/// From the root, each rank's chunk.
pub(super) fn scatter(b: &mut Builder, root: Rank) {
    b.round();
    for to in (0..b.ranks).filter(|&to| to != root) {
        let range = b.chunk(to);
        b.data(root, to, range, None);
    }
}

/// Each block to its destination. Blocks land in the scratch, because the input is still being sent.
pub(super) fn all_to_all(b: &mut Builder) {
    let n = b.ranks;
    b.need_scratch(n * b.elements.div_ceil(n));
    b.round();
    for to in 0..n {
        let range = b.chunk(to);
        let size = range.len();
        for from in (0..n).filter(|&from| from != to) {
            let slot = Span::scratch(from * size, size);
            b.message(from, to, Span::data(range.clone()), slot, None);
        }
        b.copy(to, Span::data(range), Span::scratch(to * size, size));
        b.copy(to, Span::scratch(0, n * size), Span::data(0..n * size));
    }
}
