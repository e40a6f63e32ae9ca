// SPDX-License-Identifier: Apache-2.0
//! Computes a second time what cards kept of some of their operators, with the kernels of this host and the
//! weights of the model's file, and compares every bit.
//!
//! Inputs and outputs of a tap are of one card, so whatever differs names the card: one that computes, copies or
//! stores nonsense, or whose weights are not those of the file. After a collective all ranks of a stage have the same
//! bytes; who has others than most is wrong.

mod compute;
mod evaluate;
mod log;
mod look;

use std::collections::HashMap;
use std::sync::Arc;

use spanker_model::KV_BLOCK;
use spanker_plan::{Activity, BufferId, CardLayout, Check, Cut, Piece, Place, Step, Tap, Taps};

use crate::{LlmError, Network};
pub use log::{AuditLog, Found};
pub(crate) use look::{Look, Looking, Rows};

/// What a model's file has: weights and positions.
pub(crate) trait Weights: Send + Sync {
    /// Bytes of a piece of a tensor: `start` counts from the piece's.
    fn bytes(&self, piece: &Piece, start: u64, length: u64) -> Result<Vec<u8>, LlmError>;

    /// Cosines and sines of a position in a context of so many tokens, by the angles of the model or by those of layers
    /// with a window.
    fn turns(&self, context: u64, position: u64, local: bool) -> Vec<f32>;
}

impl<B: AsRef<[u8]> + Send + Sync> Weights for Network<B> {
    fn bytes(&self, piece: &Piece, start: u64, length: u64) -> Result<Vec<u8>, LlmError> {
        let (name, cut) = self.source(piece);
        let outside = || LlmError::plan(format!("tensor {name}: byte {start} is not in its part"));
        let (tensor, range) = self.tensor(&name)?;
        let file = &Network::bytes(self)[range];
        // Biases of experts are vectors that lie end to end.
        let vector = tensor.dims.len() < 2 || name.ends_with(".bias");
        let row = match vector {
            true => tensor.quant.block_bytes(),
            false => tensor.quant.row_bytes(tensor.dims[0]),
        };
        let place = |at: u64, length: u64| {
            let bytes = file.get(at as usize..(at + length) as usize);
            bytes.map(<[u8]>::to_vec).ok_or_else(outside)
        };
        match cut {
            Cut::Rows(rows) => place(rows.start * row + start, length),
            Cut::Each { rows, of, .. } => {
                // What is packed here lies apart in the file.
                let own = (rows.end - rows.start) * row;
                let (at, rest) = (start / own, start % own);
                if rest + length > own {
                    return Err(outside());
                }
                place((at * of + rows.start) * row + rest, length)
            }
            Cut::Columns(columns) => {
                // A row of columns is a piece of a row of the tensor.
                let own = tensor.quant.row_bytes(columns.end - columns.start);
                let (at, rest) = (start / own, start % own);
                if rest + length > own {
                    return Err(outside());
                }
                place(at * row + tensor.quant.row_bytes(columns.start) + rest, length)
            }
        }
    }

    fn turns(&self, context: u64, position: u64, local: bool) -> Vec<f32> {
        self.rope().table(context as usize, position as usize..position as usize + 1, local)
    }
}

/// A slot of a block.
type Cell = (u32, u64);

/// The slots that a step writes: those of its tokens, and of blocks that it copies to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Written(Vec<Cell>);

impl Written {
    pub(crate) fn of(step: &Step<'_>) -> Written {
        let copied =
            step.copies.iter().flat_map(|&[_, to]| (0..KV_BLOCK).map(move |slot| (to, slot)));
        let tokens = step.parts.iter().flat_map(|part| {
            let positions = part.past..part.past + part.tokens.len() as u64;
            positions.map(|at| (part.blocks[(at / KV_BLOCK) as usize], at % KV_BLOCK))
        });
        Written(copied.chain(tokens).collect())
    }
}

/// Checks taps.
pub(crate) struct Auditor<'a> {
    weights: Arc<dyn Weights + 'a>,
    /// Tokens of a sequence.
    context: u64,
    pub(crate) log: AuditLog,
    /// What a head of a key or value in the KV cache was when it was last looked at, for each member.
    cells: HashMap<Cell, HashMap<usize, Vec<u8>>>,
}

impl std::fmt::Debug for Auditor<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Auditor").field("log", &self.log).finish_non_exhaustive()
    }
}

/// Where a member's weights are.
#[derive(Clone, Copy)]
pub(crate) struct Member<'m> {
    pub(crate) at: usize,
    pub(crate) layout: &'m CardLayout,
    pub(crate) weights: BufferId,
}

impl<'a> Auditor<'a> {
    pub(crate) fn new(weights: Arc<dyn Weights + 'a>, context: u64, log: AuditLog) -> Self {
        Auditor { weights, context, log, cells: HashMap::new() }
    }

    fn turns(&self, position: u64, local: bool) -> Vec<f32> {
        self.weights.turns(self.context, position, local)
    }

    /// Another of the same weights that knows nothing and counts for itself.
    pub(crate) fn afresh(&self) -> Self {
        Auditor::new(Arc::clone(&self.weights), self.context, AuditLog::default())
    }

    /// What a step writes is written anew.
    pub(crate) fn forget(&mut self, written: &Written) {
        for cell in &written.0 {
            self.cells.remove(cell);
        }
    }

    /// Computes a member's taps again. What is not as it must be, in words.
    ///
    /// # Errors
    /// [`LlmError::Plan`] for weights that the file does not have.
    pub(crate) fn check(
        &mut self,
        member: Member<'_>,
        taps: &Taps,
        captured: &[u8],
    ) -> Result<Option<String>, LlmError> {
        self.log.count(taps.list.len() as u64);
        for tap in &taps.list {
            let differs = match &tap.check {
                Check::Cached { block, slot, position, fresh, bytes, at } => {
                    let now = &captured[*at as usize..(*at + *bytes) as usize];
                    self.cell(member.at, (*block, *slot), (*position, *fresh), now)
                }
                Check::Agreed { .. } => None,
                check => self.operator(member, check, captured)?,
            };
            if let Some(what) = differs {
                return Ok(Some(format!("{}: {what}", place(tap))));
            }
        }
        Ok(None)
    }

    /// What is wrong with a cell of the KV cache that was looked at before, unless the step has written it.
    fn cell(
        &mut self,
        member: usize,
        cell: Cell,
        (position, fresh): (u64, bool),
        now: &[u8],
    ) -> Option<String> {
        let cells = self.cells.entry(cell).or_default();
        let before = cells.insert(member, now.to_vec()).filter(|_| !fresh);
        let changed = before.is_some_and(|before| before != now);
        changed.then(|| format!("the KV cache of position {position} has changed"))
    }

    /// Bytes of a member's weights, from the file; and which tensor they are of.
    fn weights(
        &self,
        member: Member<'_>,
        place: Place,
        length: u64,
    ) -> Result<(Vec<u8>, String), LlmError> {
        let pieces = &member.layout.weights.pieces;
        let next = pieces.partition_point(|(_, start)| *start <= place.offset);
        let known = next.checked_sub(1).filter(|_| place.buffer == member.weights);
        let Some((piece, start)) = known.map(|at| &pieces[at]) else {
            let what = format!("no weights at {} of buffer {}", place.offset, place.buffer.0);
            return Err(LlmError::plan(what));
        };
        let name = piece.name();
        let bytes = self.weights.bytes(piece, place.offset - start, length)?;
        Ok((bytes, name))
    }
}

/// Members whose bytes after a collective are not those of the others: all of a stage, if none has most of the
/// others on its side.
pub(crate) fn disagreeing<'c>(
    taps: &[Taps],
    captured: impl IntoIterator<Item = &'c [u8]>,
) -> Vec<usize> {
    let mut stages: HashMap<usize, Vec<(usize, &[u8])>> = HashMap::new();
    for (member, (taps, captured)) in taps.iter().zip(captured).enumerate() {
        for tap in &taps.list {
            let Check::Agreed { stage, bytes, at } = tap.check else { continue };
            let bytes = &captured[at as usize..(at + bytes) as usize];
            stages.entry(stage).or_default().push((member, bytes));
        }
    }
    let mut odd = Vec::new();
    for members in stages.into_values() {
        let alike = |bytes: &[u8]| members.iter().filter(|(_, other)| *other == bytes).count();
        let lonely = |bytes: &[u8]| 2 * alike(bytes) <= members.len();
        if members.iter().any(|(_, bytes)| alike(bytes) < members.len()) {
            odd.extend(members.iter().filter(|(_, bytes)| lonely(bytes)).map(|(at, _)| *at));
        }
    }
    odd.sort_unstable();
    odd
}

/// A tap in words.
fn place(tap: &Tap) -> String {
    part_of(tap.activity, tap.layer)
}

/// A part of a step in words.
fn part_of(activity: Activity, layer: u32) -> String {
    match activity {
        Activity::Embed => "embedding".into(),
        Activity::Head => "head".into(),
        Activity::Host => "memory".into(),
        activity => format!("layer {layer}, {}", activity.name()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Members of two stages with these bytes after a collective.
    fn odd(stages: &[(usize, u8)]) -> Vec<usize> {
        let tap = |stage| Tap {
            activity: Activity::Output,
            layer: 0,
            check: Check::Agreed { stage, bytes: 1, at: 0 },
        };
        let taps: Vec<Taps> =
            stages.iter().map(|&(stage, _)| Taps { list: vec![tap(stage)], bytes: 1 }).collect();
        let captured: Vec<Vec<u8>> = stages.iter().map(|&(_, byte)| vec![byte]).collect();
        disagreeing(&taps, captured.iter().map(Vec::as_slice))
    }

    #[test]
    fn rank_with_other_bytes_than_most_is_named_and_without_a_majority_all_are() {
        assert!(odd(&[]).is_empty());
        assert!(odd(&[(0, 5), (0, 5), (1, 7), (1, 7)]).is_empty());
        assert_eq!(odd(&[(0, 5), (0, 5), (0, 6), (1, 7)]), [2]);
        assert_eq!(odd(&[(0, 5), (0, 6), (1, 7), (1, 7), (1, 7)]), [0, 1]);
        assert_eq!(odd(&[(0, 1), (0, 2), (0, 3)]), [0, 1, 2]);
    }
}
