// SPDX-License-Identifier: Apache-2.0
//! Expressions over contributions, each stored once, so that equal numbers mean equal bits.

use std::collections::HashMap;

use crate::schedule::Rank;

/// An expression. Two are equal if and only if they compute the same thing in the same order.
pub(super) type Value = u32;

/// Memory that nothing was written to.
pub(super) const UNDEFINED: Value = 0;

struct Node {
    /// The element that all contributions are of.
    element: usize,
    /// One bit for each rank that contributes.
    ranks: Box<[u64]>,
    /// `Some(k)`: the serial fold of ranks `0..k`.
    serial: Option<usize>,
    /// The rank of a contribution that nothing was folded into.
    leaf: Option<Rank>,
}

/// The table of expressions.
pub(super) struct Symbols {
    ranks: usize,
    nodes: Vec<Node>,
    leaves: HashMap<(Rank, usize), Value>,
    folds: HashMap<(Value, Value), Value>,
}

impl Symbols {
    pub(super) fn new(ranks: usize) -> Self {
        Symbols { ranks, nodes: Vec::new(), leaves: HashMap::new(), folds: HashMap::new() }
    }

    fn node(&self, value: Value) -> Option<&Node> {
        self.nodes.get((value as usize).checked_sub(1)?)
    }

    fn insert(&mut self, node: Node) -> Value {
        self.nodes.push(node);
        Value::try_from(self.nodes.len()).expect("fewer than 2^32 expressions")
    }

    /// The contribution of `rank` to `element`.
    pub(super) fn leaf(&mut self, rank: Rank, element: usize) -> Value {
        if let Some(&value) = self.leaves.get(&(rank, element)) {
            return value;
        }
        let mut ranks = vec![0; self.ranks.div_ceil(64)].into_boxed_slice();
        ranks[rank / 64] |= 1 << (rank % 64);
        let value = self.insert(Node {
            element,
            ranks,
            serial: (rank == 0).then_some(1),
            leaf: Some(rank),
        });
        self.leaves.insert((rank, element), value);
        value
    }

    /// `a op b`, or `None` where they share a contribution or belong to different elements.
    pub(super) fn fold(&mut self, a: Value, b: Value) -> Option<Value> {
        if let Some(&value) = self.folds.get(&(a, b)) {
            return Some(value);
        }
        let (left, right) = (self.node(a)?, self.node(b)?);
        let shared = left.ranks.iter().zip(&right.ranks).any(|(x, y)| x & y != 0);
        if shared || left.element != right.element {
            return None;
        }
        let node = Node {
            element: left.element,
            ranks: left.ranks.iter().zip(&right.ranks).map(|(x, y)| x | y).collect(),
            serial: left.serial.filter(|&count| right.leaf == Some(count)).map(|count| count + 1),
            leaf: None,
        };
        let value = self.insert(node);
        self.folds.insert((a, b), value);
        Some(value)
    }

    /// Whether `value` is a fold of every rank's contribution to `element`.
    pub(super) fn is_complete(&self, value: Value, element: usize) -> bool {
        self.node(value).is_some_and(|node| {
            let count: u32 = node.ranks.iter().map(|word| word.count_ones()).sum();
            node.element == element && count as usize == self.ranks
        })
    }

    /// Whether `value` is the serial fold of all ranks.
    pub(super) fn is_serial(&self, value: Value) -> bool {
        self.node(value).is_some_and(|node| node.serial == Some(self.ranks))
    }

    /// In words, for a flaw.
    pub(super) fn describe(&self, value: Value) -> String {
        match self.node(value) {
            None => "undefined".to_owned(),
            Some(node) => {
                let ranks: Vec<usize> = (0..self.ranks)
                    .filter(|rank| node.ranks[rank / 64] >> (rank % 64) & 1 == 1)
                    .collect();
                format!("element {} of ranks {ranks:?}", node.element)
            }
        }
    }
}
