// SPDX-License-Identifier: Apache-2.0
//! Expressions over contributions, each stored once, so that equal numbers mean equal bits.
//!
//! A fold of several operands at once is an expression of its own: it rounds once, where a chain of pairs
//! rounds after each pair if the type is narrower than what folds accumulate in.

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
    /// The fold of all ranks in order, in one go.
    serial: bool,
    /// The rank of a contribution that nothing was folded into.
    leaf: Option<Rank>,
}

/// The table of expressions.
pub(super) struct Symbols {
    ranks: usize,
    nodes: Vec<Node>,
    leaves: HashMap<(Rank, usize), Value>,
    folds: HashMap<Box<[Value]>, Value>,
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
        let value = self.insert(Node { element, ranks, serial: self.ranks == 1, leaf: Some(rank) });
        self.leaves.insert((rank, element), value);
        value
    }

    /// `operands[0] op operands[1] op ..` in one go, or `None` where two share a contribution or belong
    /// to different elements.
    pub(super) fn fold(&mut self, operands: &[Value]) -> Option<Value> {
        if let [alone] = operands {
            return Some(*alone);
        }
        if let Some(&value) = self.folds.get(operands) {
            return Some(value);
        }
        let first = self.node(*operands.first()?)?;
        let element = first.element;
        let mut ranks = first.ranks.clone();
        for &operand in &operands[1..] {
            let next = self.node(operand)?;
            let shared = ranks.iter().zip(&next.ranks).any(|(x, y)| x & y != 0);
            if shared || next.element != element {
                return None;
            }
            ranks.iter_mut().zip(&next.ranks).for_each(|(x, y)| *x |= y);
        }
        let in_order = |(rank, &operand): (usize, &Value)| {
            self.node(operand).is_some_and(|node| node.leaf == Some(rank))
        };
        let serial = operands.len() == self.ranks && operands.iter().enumerate().all(in_order);
        let value = self.insert(Node { element, ranks, serial, leaf: None });
        self.folds.insert(operands.into(), value);
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
        self.node(value).is_some_and(|node| node.serial)
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
