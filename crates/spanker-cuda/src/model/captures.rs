// SPDX-License-Identifier: Apache-2.0
//! What an audit captures while a card goes through its instructions: pieces of memory, copied into the card's audit buffer.
//!
//! A list with grid barriers is run in parts, so that pieces can be copied before and after an instruction. Instructions
//! with dataflow slots run in one go: their slots stay as they are until a later step, and what they read at addresses of
//! the program is copied afterwards, or before all of them where one of them writes there.

use std::ops::Range;

use spanker_llm::{Capture, Region, Role};
use spanker_runtime::Place;

use super::device::{Memory, Piece};
use super::device_context::{DeviceContext, Loaded, Workspace};
use super::slots::Lies;
use crate::CudaError;

/// A piece of memory, and when it is copied.
type Wanted = (Piece, Role);

/// Runs some instructions of a list.
type Go<'g> =
    dyn FnMut(&mut DeviceContext, &mut Workspace, Range<u32>) -> Result<(), CudaError> + 'g;

/// What is captured of a card.
#[derive(Debug, Default)]
pub(super) struct Taken(Vec<(Range<usize>, Vec<Wanted>)>);

impl Taken {
    /// What a card's captures are in its memory; `into` is where they go, and how many bytes they have.
    pub(super) fn of(
        captures: &[&Capture],
        buffers: &[Memory],
        into: (Place, u64),
    ) -> Result<Taken, CudaError> {
        let pieces = |capture: &&Capture| {
            let pieces = capture.regions.iter().map(|region| piece(region, buffers, into));
            Ok((capture.ops.clone(), pieces.collect::<Result<_, CudaError>>()?))
        };
        Ok(Taken(captures.iter().map(pieces).collect::<Result<_, CudaError>>()?))
    }

    fn within(&self, ops: &Range<usize>) -> impl Iterator<Item = &(Range<usize>, Vec<Wanted>)> {
        let (start, end) = (ops.start, ops.end);
        self.0
            .iter()
            .filter(move |(own, _)| start <= own.start && own.end <= end && !own.is_empty())
    }

    /// Whether something is captured of these operators.
    pub(super) fn is_any(&self, ops: &Range<usize>) -> bool {
        self.within(ops).next().is_some()
    }

    /// Pieces that are copied before an exchange, or after it.
    pub(super) fn exchange(&self, op: usize, is_over: bool) -> Vec<Piece> {
        let ops = op..op + 1;
        let own = self.within(&ops).flat_map(|(_, pieces)| pieces);
        own.filter(|(_, role)| (*role == Role::Written) == is_over)
            .map(|(piece, _)| *piece)
            .collect()
    }

    /// Pieces that are copied after everything.
    pub(super) fn last(&self) -> Vec<Piece> {
        let last = self.0.iter().filter(|(ops, _)| ops.is_empty());
        last.flat_map(|(_, pieces)| pieces).map(|(piece, _)| *piece).collect()
    }
}

/// Bytes of a buffer as a piece of memory.
fn piece(
    region: &Region,
    buffers: &[Memory],
    (into, room): (Place, u64),
) -> Result<Wanted, CudaError> {
    let Region { from, rows, length, stride, role, at } = *region;
    let outside = || CudaError::Unsupported(format!("a capture of {region:?}"));
    let address = |place: Place, bytes: u64| {
        let memory = buffers.get(place.buffer.0 as usize)?;
        let end = place.offset.checked_add(bytes)?;
        (end <= memory.bytes as u64).then_some(memory.base() + place.offset)
    };
    let bytes = rows.max(1) - 1;
    let source = address(from, bytes * stride + length).ok_or_else(outside)?;
    let fits = at + region.bytes() <= room;
    let target = address(into, room).filter(|_| fits).ok_or_else(outside)?;
    let (rows, length) = (u32::try_from(rows).ok(), u32::try_from(length).ok());
    let (rows, length) = (rows.ok_or_else(outside)?, length.ok_or_else(outside)?);
    Ok((Piece { from: source, into: target + at, stride, rows, length }, role))
}

/// Runs a list of instructions, whose operators are `ops`, and captures what is wanted of them. `go` runs some of them.
/// Returns the pieces that are still to be copied: right after the list.
pub(super) fn run(
    device: &mut DeviceContext,
    work: &mut Workspace,
    (loaded, ops): (&Loaded, &[Range<usize>]),
    taken: &Taken,
    go: &mut Go<'_>,
) -> Result<Vec<Piece>, CudaError> {
    let all = 0..loaded.count();
    let mut wanted: Vec<(Range<u32>, &[Wanted])> = Vec::new();
    for (own, pieces) in taken.within(&whole(ops)) {
        let place = |is: &dyn Fn(&Range<usize>) -> bool| ops.iter().position(is);
        let first = place(&|ops| ops == own);
        let first = first.ok_or_else(|| CudaError::Unsupported(format!("operators {own:?}")))?;
        let count = ops[first..].iter().take_while(|ops| *ops == own).count();
        wanted.push((first as u32..(first + count) as u32, pieces));
    }
    wanted.sort_by_key(|(instructions, _)| instructions.start);
    if loaded.lies().is_some() {
        let before: Vec<Piece> =
            wanted.iter().flat_map(|(at, pieces)| early(loaded, at, pieces)).collect();
        device.gather(&before)?;
        go(device, work, all)?;
        return Ok(wanted.iter().flat_map(|(at, pieces)| late(loaded, at, pieces)).collect());
    }
    let (mut done, mut rest) = (0, Vec::new());
    for (instructions, pieces) in wanted {
        device.gather(&std::mem::take(&mut rest))?;
        let of = |is_before: bool| -> Vec<Piece> {
            let own = pieces.iter().filter(|(_, role)| (*role == Role::Overwritten) == is_before);
            own.map(|(piece, _)| *piece).collect()
        };
        let before = of(true);
        if !before.is_empty() {
            if instructions.start > done {
                go(device, work, done..instructions.start)?;
                done = instructions.start;
            }
            device.gather(&before)?;
        }
        go(device, work, done..instructions.end)?;
        done = instructions.end;
        rest = of(false);
    }
    if done < all.end {
        device.gather(&std::mem::take(&mut rest))?;
        go(device, work, done..all.end)?;
    }
    Ok(rest)
}

/// The operators of all instructions of a list.
pub(super) fn whole(ops: &[Range<usize>]) -> Range<usize> {
    let start = ops.iter().map(|ops| ops.start).min().unwrap_or(0);
    start..ops.iter().map(|ops| ops.end).max().unwrap_or(0)
}

/// The dataflow slot where numbers of some instructions lie; nothing if they lie where the program has them.
fn slot_of(lies: &[Lies], (piece, role): &Wanted) -> Option<u64> {
    let last =
        piece.from + u64::from(piece.rows.max(1) - 1) * piece.stride + u64::from(piece.length);
    let has = |(at, begins): &(Range<u64>, u64)| {
        let is = at.start <= piece.from && last <= at.end && *begins != at.start;
        is.then(|| begins + (piece.from - at.start))
    };
    match role {
        Role::Written => lies.iter().rev().flat_map(|lies| &lies.written).find_map(has),
        _ => lies.iter().flat_map(|lies| &lies.read).find_map(has),
    }
}

/// Whether a piece has to be copied before instructions with dataflow slots begin: they read it at the program's address,
/// and one of them writes there.
fn is_early(all: &[Lies], own: &[Lies], wanted: &Wanted) -> bool {
    let (piece, role) = wanted;
    let end =
        piece.from + u64::from(piece.rows.max(1) - 1) * piece.stride + u64::from(piece.length);
    let overlaps = |at: &Range<u64>| at.start < end && piece.from < at.end;
    *role != Role::Written
        && slot_of(own, wanted).is_none()
        && all.iter().flat_map(|lies| &lies.written).any(|(at, _)| overlaps(at))
}

/// Pieces that are copied before instructions with dataflow slots begin.
fn early(loaded: &Loaded, at: &Range<u32>, pieces: &[Wanted]) -> Vec<Piece> {
    let Some((lies, ..)) = loaded.lies() else { return Vec::new() };
    let own = &lies[at.start as usize..at.end as usize];
    let is_early = |wanted: &&Wanted| is_early(lies, own, wanted);
    pieces.iter().filter(is_early).map(|(piece, _)| *piece).collect()
}

/// Pieces that are copied once instructions with dataflow slots have run, from where their numbers are.
fn late(loaded: &Loaded, at: &Range<u32>, pieces: &[Wanted]) -> Vec<Piece> {
    let Some((lies, slots, shift)) = loaded.lies() else { return Vec::new() };
    let own = &lies[at.start as usize..at.end as usize];
    let late = pieces.iter().filter(|wanted| !is_early(lies, own, wanted));
    late.map(|wanted| {
        let shifted = |slot: u64| if slots.contains(&slot) { slot + shift } else { slot };
        let from = slot_of(own, wanted).map_or(wanted.0.from, shifted);
        Piece { from, ..wanted.0 }
    })
    .collect()
}

/// Runs of operators that instructions do, each once.
pub(super) fn runs(ops: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut runs = ops.to_vec();
    runs.dedup();
    runs
}
