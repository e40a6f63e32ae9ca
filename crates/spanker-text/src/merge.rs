// SPDX-License-Identifier: Apache-2.0
//! Merging neighbours, the best pair first: what both kinds of tokenizer do with their symbols.
//!
//! A heap holds the pairs and a linked list the symbols, so `n` symbols take `O(n log n)`.

use std::collections::BinaryHeap;

/// No neighbour.
const NONE: u32 = u32::MAX;

/// A pair of neighbours as it was when it was found.
///
/// The order of the fields is the order of merging: the best first, then the leftmost.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Pair<P, S> {
    best: P,
    leftmost: std::cmp::Reverse<u32>,
    right_at: u32,
    left: S,
    right: S,
    merged: S,
}

struct Node<S> {
    symbol: S,
    before: u32,
    after: u32,
    alive: bool,
}

/// Merges neighbours until no pair is left that `pair` knows, and returns what is left. `pair` says
/// how good a pair is (the greatest is merged first) and what it becomes.
pub(crate) fn merge<S, P>(
    symbols: impl IntoIterator<Item = S>,
    pair: impl Fn(S, S) -> Option<(P, S)>,
) -> impl Iterator<Item = S>
where
    S: Copy + Ord,
    P: Ord,
{
    let mut nodes: Vec<Node<S>> = Vec::new();
    for (at, symbol) in (0_u32..NONE).zip(symbols) {
        nodes.push(Node { symbol, before: at.wrapping_sub(1), after: at + 1, alive: true });
    }
    if let Some(last) = nodes.last_mut() {
        last.after = NONE;
    }
    let found = |nodes: &[Node<S>], left_at: u32, right_at: u32| {
        let (left, right) = (nodes[left_at as usize].symbol, nodes[right_at as usize].symbol);
        let leftmost = std::cmp::Reverse(left_at);
        pair(left, right).map(|(best, merged)| Pair {
            best,
            leftmost,
            right_at,
            left,
            right,
            merged,
        })
    };
    let mut pairs: BinaryHeap<Pair<P, S>> =
        (1..nodes.len() as u32).filter_map(|at| found(&nodes, at - 1, at)).collect();
    while let Some(Pair { leftmost, right_at, left, right, merged, .. }) = pairs.pop() {
        let left_at = leftmost.0;
        let is = |at: u32, symbol: S| {
            let node = &nodes[at as usize];
            node.alive && node.symbol == symbol
        };
        // A pair of which one has been merged with another meanwhile is no pair any more.
        if !is(left_at, left) || !is(right_at, right) {
            continue;
        }
        let (before, after) = (nodes[left_at as usize].before, nodes[right_at as usize].after);
        nodes[right_at as usize].alive = false;
        nodes[left_at as usize].symbol = merged;
        nodes[left_at as usize].after = after;
        if after != NONE {
            nodes[after as usize].before = left_at;
            pairs.extend(found(&nodes, left_at, after));
        }
        if before != NONE {
            pairs.extend(found(&nodes, before, left_at));
        }
    }
    nodes.into_iter().filter(|node| node.alive).map(|node| node.symbol)
}

#[cfg(test)]
mod tests {
    use super::merge;

    /// Merges spans of text whose words are in `words`, the earliest word first.
    fn words(text: &str, words: &[&str]) -> Vec<String> {
        let spans = text.char_indices().map(|(at, c)| (at, at + c.len_utf8()));
        let pair = |left: (usize, usize), right: (usize, usize)| {
            let at = words.iter().position(|word| *word == &text[left.0..right.1])?;
            Some((std::cmp::Reverse(at), (left.0, right.1)))
        };
        merge(spans, pair).map(|(from, to)| text[from..to].to_owned()).collect()
    }

    #[test]
    fn best_pair_comes_first_and_then_the_leftmost() {
        assert_eq!(words("aaa", &["aa"]), ["aa", "a"]);
        assert_eq!(words("abc", &["bc", "ab"]), ["a", "bc"]);
        assert_eq!(words("abc", &["ab", "abc"]), ["abc"]);
        assert_eq!(words("abcd", &["bc", "ab", "bcd"]), ["a", "bcd"]);
        assert_eq!(words("", &["a"]), [""; 0]);
        assert_eq!(words("x", &["a"]), ["x"]);
    }
}
