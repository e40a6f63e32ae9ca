// SPDX-License-Identifier: Apache-2.0
//! What an audit captures while a card goes through its instructions: pieces of memory, copied into the card's audit buffer.
//!
//! A list with grid barriers is run in parts, so that pieces can be copied before and after an instruction. Instructions
//! with dataflow slots run in one go: their slots stay as they are until a later step, and what they read at addresses of
//! the program is copied afterwards, or before all of them where one of them writes there.

use std::collections::BTreeMap;
use std::ops::Range;

use spanker_llm::{Capture, Captures, LlmError, Region, Role};
use spanker_runtime::Place;

use super::device::{Memory, Piece};
use super::device_context::{DeviceContext, Loaded};
use super::machine::{DeviceSlot, Processors};
use super::schedule::Done;
use super::slots::Lies;
use crate::CudaError;

/// A piece of memory, and when it is copied.
type Wanted = (Piece, Role);

/// Runs some instructions of a list.
type Go<'g> = dyn FnMut(&mut DeviceContext, Range<u32>) -> Result<(), CudaError> + 'g;

/// Instructions of a list of which something is captured.
type Watched<'t> = (Range<u32>, &'t [Wanted]);

/// What is captured of a card.
#[derive(Debug, Default)]
pub(super) struct Taken(Vec<(Range<usize>, Vec<Wanted>)>);

impl Taken {
    /// What a card's captures are in its memory; `into` is where they go, and how many bytes they have.
    fn of(
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

    /// Pieces that are copied before an exchange, or after it.
    fn exchange(&self, ops: &Range<usize>, is_over: bool) -> Vec<Piece> {
        let own = self.0.iter().filter(|(own, _)| own == ops).flat_map(|(_, pieces)| pieces);
        own.filter(|(_, role)| (*role == Role::Written) == is_over)
            .map(|(piece, _)| *piece)
            .collect()
    }

    /// Pieces that are copied after everything.
    fn last(&self) -> Vec<Piece> {
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

/// Instructions of a list of which slots want something, where `done` has what each of them does.
pub(super) fn wanted<'t>(taken: &'t [Taken], done: &[(usize, Vec<Done>)]) -> Vec<Watched<'t>> {
    let mut wanted: Vec<Watched<'t>> = Vec::new();
    for (slot, taken) in taken.iter().enumerate() {
        for (ops, pieces) in taken.0.iter().filter(|(ops, _)| !ops.is_empty()) {
            let (mut at, mut own) = (0, None::<Range<u32>>);
            for (count, done) in done {
                let end = at + *count as u32;
                if done.iter().any(|done| done.slot == slot && done.ops == *ops) {
                    own = Some(own.map_or(at, |own| own.start)..end);
                }
                at = end;
            }
            wanted.extend(own.map(|own| (own, &pieces[..])));
        }
    }
    wanted
}

/// Runs a list of instructions, and captures what is wanted of them. `go` runs some of them. Returns the pieces that are
/// still to be copied: right after the list.
pub(super) fn run(
    device: &mut DeviceContext,
    loaded: &Loaded,
    wanted: Vec<Watched<'_>>,
    go: &mut Go<'_>,
) -> Result<Vec<Piece>, CudaError> {
    let all = 0..loaded.count();
    if loaded.lies().is_some() {
        let before: Vec<Piece> =
            wanted.iter().flat_map(|(at, pieces)| early(loaded, at, pieces)).collect();
        device.gather(&before)?;
        go(device, all)?;
        return Ok(wanted.iter().flat_map(|(at, pieces)| late(loaded, at, pieces)).collect());
    }
    // What is copied when so many instructions have run.
    let mut copied: BTreeMap<u32, Vec<Piece>> = BTreeMap::new();
    for (instructions, pieces) in wanted {
        for &(piece, role) in pieces {
            let at = match role {
                Role::Overwritten => instructions.start,
                _ => instructions.end,
            };
            copied.entry(at).or_default().push(piece);
        }
    }
    let (mut done, rest) = (0, copied.remove(&all.end));
    for (at, pieces) in copied {
        if at > done {
            go(device, done..at)?;
            done = at;
        }
        device.gather(&pieces)?;
    }
    go(device, done..all.end)?;
    Ok(rest.unwrap_or_default())
}

impl Processors {
    /// What is captured of each slot; nothing if nothing is.
    pub(super) fn taken(&self, captures: &Captures) -> Result<Vec<Taken>, LlmError> {
        let of = |(slot, into): (usize, &(Place, u64))| {
            let own = captures.list.iter().filter(|capture| capture.member == slot);
            let own: Vec<&Capture> = own.collect();
            self.of_card(slot, Taken::of(&own, &self.slots[slot].buffers, *into))
        };
        captures.into.iter().enumerate().map(of).collect()
    }

    /// Captures what cards have before an exchange through the host, or after it.
    pub(super) fn capture(
        &mut self,
        taken: &[Taken],
        done: &[Done],
        is_over: bool,
    ) -> Result<(), LlmError> {
        for Done { slot, ops, .. } in done {
            let Some(taken) = taken.get(*slot) else { continue };
            let device = self.slots[*slot].device;
            let gathered = self.devices[device].gather(&taken.exchange(ops, is_over));
            self.of_card(*slot, gathered)?;
        }
        Ok(())
    }

    /// Has devices copy pieces, and forgets these.
    pub(super) fn copy_all(&mut self, pieces: &mut [Vec<Piece>]) -> Result<(), LlmError> {
        for (device, pieces) in pieces.iter_mut().enumerate() {
            let gathered = self.devices[device].gather(&std::mem::take(pieces));
            let slot = self.slots.iter().position(|slot| slot.device == device);
            self.of_card(slot.unwrap_or(0), gathered)?;
        }
        Ok(())
    }

    /// Captures what is there in the end, after the pieces that devices have still to copy, and begins to read all that was
    /// captured.
    pub(super) fn fetch(
        &mut self,
        taken: &[Taken],
        captures: &Captures,
        rest: &mut [Vec<Piece>],
    ) -> Result<(), LlmError> {
        for (slot, taken) in taken.iter().enumerate() {
            rest[self.slots[slot].device].extend(taken.last());
        }
        self.copy_all(rest)?;
        for (slot, &(place, bytes)) in captures.into.iter().enumerate() {
            if bytes == 0 {
                continue;
            }
            let DeviceSlot { device, buffers, .. } = &self.slots[slot];
            let (device, offset) = (&mut self.devices[*device], place.offset as usize);
            let memory = &buffers[place.buffer.0 as usize];
            let begun = device.fetch(slot, memory, offset, bytes as usize);
            self.of_card(slot, begun)?;
        }
        Ok(())
    }
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
