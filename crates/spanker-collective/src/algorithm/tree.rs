// SPDX-License-Identifier: Apache-2.0
//! Binomial trees.
//!
//! With `v` a rank's distance from the root, `v`'s parent is `v` without its lowest set bit. Each tree
//! takes ceil(log2 n) rounds. Broadcast and reduce move the whole buffer over each edge; gather and
//! scatter move only the chunks of the subtree.
//!
//! Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.

use super::Builder;
use crate::schedule::{Incoming, Rank};

/// Rounds of a binomial tree over `n` ranks.
fn depth(n: usize) -> u32 {
    n.next_power_of_two().trailing_zeros()
}

/// The edges of round `level`, as distances (child, parent) from the root.
fn edges(n: usize, level: u32) -> impl Iterator<Item = (usize, usize)> {
    let bit = 1usize << level;
    (bit..n).step_by(2 * bit).map(move |child| (child, child - bit))
}

/// Children fold into parents, leaves first. A parent's own contributions come before the child's, so
/// that from root 0 the order is that of the ranks.
pub(super) fn reduce(b: &mut Builder, root: Rank) {
    let n = b.ranks;
    for level in 0..depth(n) {
        b.round();
        for (child, parent) in edges(n, level) {
            let range = b.whole();
            let (child, parent) = ((root + child) % n, (root + parent) % n);
            b.data(child, parent, range, Some(Incoming::Second));
        }
    }
}

/// Parents send to children, the root's farthest child first.
pub(super) fn broadcast(b: &mut Builder, root: Rank) {
    let n = b.ranks;
    for level in (0..depth(n)).rev() {
        b.round();
        for (child, parent) in edges(n, level) {
            let range = b.whole();
            b.data((root + parent) % n, (root + child) % n, range, None);
        }
    }
}

/// Children send the chunks of their subtree.
pub(super) fn gather(b: &mut Builder, root: Rank) {
    let n = b.ranks;
    for level in 0..depth(n) {
        b.round();
        for (child, parent) in edges(n, level) {
            let chunks = (1usize << level).min(n - child);
            b.chunks((root + child) % n, (root + parent) % n, root + child, chunks, None);
        }
    }
}

/// Parents send the chunks of the child's subtree.
pub(super) fn scatter(b: &mut Builder, root: Rank) {
    let n = b.ranks;
    for level in (0..depth(n)).rev() {
        b.round();
        for (child, parent) in edges(n, level) {
            let chunks = (1usize << level).min(n - child);
            b.chunks((root + parent) % n, (root + child) % n, root + child, chunks, None);
        }
    }
}
