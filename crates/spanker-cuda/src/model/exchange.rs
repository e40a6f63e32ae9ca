// SPDX-License-Identifier: Apache-2.0
//! What cards give each other: as instructions for the device that all of them are on, or through the host's memory where
//! they are on several. Which of the two, and when, is not decided here.

use std::ops::Range;
use std::sync::Arc;

use spanker_collective::{DType, ReduceOp};
use spanker_plan::{Fold, Op};
use spanker_runtime::Place;

use super::operands::{self, Instruction, fold};
use crate::CudaError;

/// Cards that give or get in one instruction at most.
const ENDS: usize = 6;
/// Cards whose words one instruction folds at most.
const FOLDED: usize = 12;
/// Units that are moved at a time, the widest first.
const UNITS: [u64; 3] = [16, 4, 2];

/// An exchange between cards, with the places of each, in the order of their ranks.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Exchange {
    /// Each has a part of rows and gets whole rows.
    Gather { parts: Arc<[Range<u64>]>, rows: u64, from: Vec<Place>, into: Vec<Place> },
    /// Words of all become one, in the order of ranks.
    Fold { data: Vec<Place>, elements: u64, fold: Fold },
    /// The first hands bytes over to the second.
    Handoff { from: Place, into: Place, length: u64 },
}

/// A card's memory, while an exchange goes through the host.
pub(super) trait Memories {
    /// Reads what a card has.
    fn get(&mut self, slot: usize, place: Place, out: &mut [u8]) -> Result<(), CudaError>;
    /// Writes what a card gets.
    fn put(&mut self, slot: usize, place: Place, bytes: &[u8]) -> Result<(), CudaError>;
}

/// Programs that do not belong together.
pub(super) fn astray() -> CudaError {
    CudaError::Unsupported("cards of a group have programs that do not belong together".into())
}

impl Exchange {
    /// The exchange of a group: the operator that each of its ranks has come to.
    pub(super) fn of(ops: &[&Op]) -> Result<Exchange, CudaError> {
        match ops.first() {
            Some(Op::Gather { parts, rows, .. }) if parts.len() == ops.len() => {
                let places = |op: &&Op| match op {
                    Op::Gather { parts: own, rows: count, from, into }
                        if own == parts && count == rows =>
                    {
                        Ok((*from, *into))
                    }
                    _ => Err(astray()),
                };
                let places = ops.iter().map(places).collect::<Result<Vec<_>, _>>()?;
                let (from, into) = places.into_iter().unzip();
                Ok(Exchange::Gather { parts: Arc::clone(parts), rows: *rows, from, into })
            }
            Some(Op::Fold { elements, fold, .. }) => {
                let place = |op: &&Op| match op {
                    Op::Fold { data, elements: count, fold: own }
                        if (count, own) == (elements, fold) =>
                    {
                        Ok(*data)
                    }
                    _ => Err(astray()),
                };
                let data = ops.iter().map(place).collect::<Result<_, _>>()?;
                Ok(Exchange::Fold { data, elements: *elements, fold: *fold })
            }
            _ => Err(astray()),
        }
    }

    /// Bytes that each card has afterwards, by its rank.
    pub(super) fn whole(&self, rank: usize) -> u64 {
        match self {
            Exchange::Gather { parts, rows, .. } => parts.last().map_or(0, |part| part.end) * rows,
            Exchange::Fold { elements, .. } => elements * 4,
            // Who hands over has what it had.
            Exchange::Handoff { length, .. } => length * u64::from(rank > 0),
        }
    }

    /// Bytes that cards give to other cards.
    pub(super) fn sent(&self) -> u64 {
        match self {
            Exchange::Gather { from, .. } => self.whole(0) * (from.len() as u64 - 1),
            Exchange::Fold { data, .. } => {
                let ranks = data.len() as u64;
                self.whole(0) * ranks * (ranks - 1)
            }
            Exchange::Handoff { length, .. } => *length,
        }
    }

    /// Instructions that do it where all cards are on one device: `address` says where a rank's place is. Nothing for what
    /// the kernel cannot do: too many cards, odd bytes, or places that are not apart.
    pub(super) fn instructions(
        &self,
        address: &dyn Fn(usize, Place) -> u64,
    ) -> Option<Vec<Instruction>> {
        match self {
            Exchange::Gather { parts, rows, from, into } => {
                let ends = |places: &[Place]| -> Vec<u64> {
                    places.iter().enumerate().map(|(rank, at)| address(rank, *at)).collect()
                };
                gathers(parts, *rows, &ends(from), &ends(into))
            }
            Exchange::Fold { data, elements, fold } => {
                let all: Vec<u64> =
                    data.iter().enumerate().map(|(rank, at)| address(rank, *at)).collect();
                folds(&all, *elements, *fold)
            }
            Exchange::Handoff { from, into, length } => {
                let whole = std::iter::once(0..*length).collect::<Vec<_>>();
                gathers(&whole, 1, &[address(0, *from)], &[address(1, *into)])
            }
        }
    }

    /// Does it through the host's memory. `slots` has the card of each rank.
    pub(super) fn through_host(
        &self,
        slots: &[usize],
        memories: &mut dyn Memories,
    ) -> Result<(), CudaError> {
        match self {
            Exchange::Gather { parts, rows, from, into } => {
                let row = parts.last().map_or(0, |part| part.end) as usize;
                let mut whole = vec![0; row * *rows as usize];
                for ((&slot, from), part) in slots.iter().zip(from).zip(parts.iter()) {
                    let width = (part.end - part.start) as usize;
                    let mut own = vec![0; width * *rows as usize];
                    memories.get(slot, *from, &mut own)?;
                    let own = own.chunks_exact(width.max(1));
                    for (whole, own) in whole.chunks_exact_mut(row.max(1)).zip(own) {
                        whole[part.start as usize..part.end as usize].copy_from_slice(own);
                    }
                }
                slots
                    .iter()
                    .zip(into)
                    .try_for_each(|(&slot, into)| memories.put(slot, *into, &whole))
            }
            Exchange::Fold { data, elements, fold } => {
                let mut sum = vec![0u32; *elements as usize];
                let mut own = sum.clone();
                for (rank, (&slot, data)) in slots.iter().zip(data).enumerate() {
                    let into = if rank == 0 { &mut sum } else { &mut own };
                    memories.get(slot, *data, bytemuck::cast_slice_mut(into))?;
                    if rank > 0 {
                        folded(&mut sum, &own, *fold)?;
                    }
                }
                slots.iter().zip(data).try_for_each(|(&slot, data)| {
                    memories.put(slot, *data, bytemuck::cast_slice(&sum))
                })
            }
            Exchange::Handoff { from, into, length } => {
                let [giver, getter] = slots[..] else { return Err(astray()) };
                let mut bytes = vec![0; *length as usize];
                memories.get(giver, *from, &mut bytes)?;
                memories.put(getter, *into, &bytes)
            }
        }
    }
}

/// The kernel's number of a fold.
fn operation(of: Fold) -> Option<u32> {
    let is = |dtype: DType, op: ReduceOp| of.dtype == dtype.code() && Some(of.op) == op.code();
    if is(DType::F32, ReduceOp::Sum) {
        Some(fold::SUM_F32)
    } else if is(DType::U32, ReduceOp::BitwiseOr) {
        Some(fold::OR_U32)
    } else {
        None
    }
}

/// Folds words of a rank with those of the ranks before it.
fn folded(sum: &mut [u32], own: &[u32], of: Fold) -> Result<(), CudaError> {
    let add = |a: u32, b: u32| (f32::from_bits(a) + f32::from_bits(b)).to_bits();
    let pairs = sum.iter_mut().zip(own);
    match operation(of) {
        Some(fold::SUM_F32) => pairs.for_each(|(sum, own)| *sum = add(*sum, *own)),
        Some(fold::OR_U32) => pairs.for_each(|(sum, own)| *sum |= *own),
        _ => return Err(CudaError::Unsupported(format!("{of:?} between cards on a GPU"))),
    }
    Ok(())
}

/// Whether no two of these runs of bytes, one of each list or two of the second, share any.
fn are_apart(read: &[Range<u64>], written: &[Range<u64>]) -> bool {
    let apart = |a: &Range<u64>, b: &Range<u64>| a.end <= b.start || b.end <= a.start;
    written.iter().enumerate().all(|(at, one)| {
        let others = read.iter().chain(&written[at + 1..]);
        others.filter(|other| !other.is_empty()).all(|other| apart(one, other))
    })
}

/// Instructions that give parts of rows to everybody.
fn gathers(
    parts: &[Range<u64>],
    rows: u64,
    from: &[u64],
    into: &[u64],
) -> Option<Vec<Instruction>> {
    let row = parts.last().map_or(0, |part| part.end);
    let length = |part: &Range<u64>| part.end.saturating_sub(part.start);
    let run = |at: u64, each: u64| Some(at..at.checked_add(rows.checked_mul(each)?)?);
    let read: Option<Vec<_>> =
        parts.iter().zip(from).map(|(part, &at)| run(at, length(part))).collect();
    let written: Option<Vec<_>> = into.iter().map(|&at| run(at, row)).collect();
    if !are_apart(&read?, &written?) {
        return None;
    }
    let edges = parts.iter().flat_map(|part| [part.start, part.end]);
    let all: Vec<u64> = edges.chain(from.iter().chain(into).copied()).collect();
    let unit = UNITS.into_iter().find(|unit| all.iter().all(|at| at.is_multiple_of(*unit)))?;
    // The kernel counts what a row has, and rows, in 32 bits.
    u32::try_from(row.checked_mul(rows)?).ok()?;
    let givers: Vec<(&Range<u64>, u64)> =
        parts.iter().zip(from.iter().copied()).filter(|(part, _)| length(part) > 0).collect();
    let mut instructions = Vec::new();
    for givers in givers.chunks(ENDS) {
        for getters in into.chunks(ENDS) {
            let mut op = operands::Gather {
                rows: rows as u32,
                unit: unit as u32,
                width: (row / unit) as u32,
                givers: givers.len() as u32,
                getters: getters.len() as u32,
                ..Default::default()
            };
            for (at, (part, from)) in givers.iter().enumerate() {
                op.starts[at] = (part.start / unit) as u32;
                op.lengths[at] = (length(part) / unit) as u32;
                op.from[at] = *from;
            }
            op.into[..getters.len()].copy_from_slice(getters);
            instructions.push(Instruction::new(op));
        }
    }
    Some(instructions)
}

/// The instruction that folds words of everybody.
fn folds(data: &[u64], elements: u64, of: Fold) -> Option<Vec<Instruction>> {
    let runs: Vec<Range<u64>> = data.iter().map(|&at| at..at + elements * 4).collect();
    if data.len() > FOLDED || !are_apart(&[], &runs) {
        return None;
    }
    let mut op = operands::FoldWords {
        words: u32::try_from(elements).ok()?,
        fold: operation(of)?,
        cards: data.len() as u32,
        ..Default::default()
    };
    op.data[..data.len()].copy_from_slice(data);
    Some(vec![Instruction::new(op)])
}
