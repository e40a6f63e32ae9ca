// SPDX-License-Identifier: Apache-2.0
//! Recursive doubling: partners exchange everything and both fold.
//!
//! With p the largest power of two up to n: log2 p rounds in which each rank sends the whole buffer,
//! and two more rounds for the n - p ranks beyond the power of two, which send their contribution to a
//! neighbour and receive the result.
//!
//! Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.

use super::Builder;
use crate::schedule::{Incoming, Span};

/// All-reduce. Neighbours merge first and the lower half of a pair is always the first operand, so the
/// contributions stay in rank order and both partners compute the same bits.
pub(super) fn all_reduce(b: &mut Builder) {
    let (n, len) = (b.ranks, b.elements);
    let power = 1usize << n.ilog2();
    let extra = n - power;
    let rank_at = |place: usize| {
        if place < extra { 2 * place } else { place + extra }
    };
    let range = b.whole();
    if extra > 0 {
        b.round();
        for pair in 0..extra {
            b.data(2 * pair + 1, 2 * pair, range.clone(), Some(Incoming::Second));
        }
    }
    if power > 1 {
        b.need_scratch(len);
    }
    let (mine, theirs) = (Span::data(range.clone()), Span::scratch(0, len));
    for level in 0..power.ilog2() {
        b.round();
        for place in 0..power {
            let partner = place ^ (1 << level);
            b.message(rank_at(place), rank_at(partner), mine, theirs, None);
        }
        for place in 0..power {
            let low = place & (1 << level) == 0;
            let sources = if low { vec![mine, theirs] } else { vec![theirs, mine] };
            b.fold(rank_at(place), sources, mine);
        }
    }
    if extra > 0 {
        b.round();
        for pair in 0..extra {
            b.data(2 * pair, 2 * pair + 1, range.clone(), None);
        }
    }
}
