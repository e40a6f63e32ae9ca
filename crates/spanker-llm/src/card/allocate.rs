// SPDX-License-Identifier: Apache-2.0
//! The memory of the cards that this process plays, as a plan lays them out. Weights whose rows a card has
//! stay in the file; of those whose columns it has, it gets a copy.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use spanker_plan::{Buffer, BufferId, Cut, Piece, Place, Programs};

use super::memory::{self, Memory};
use crate::layout::Planned;
use crate::{LlmError, Network};

/// Lays a network out. The members of the cards for which `ours` says so get memory, in the order of members; of the
/// others, nothing but their place in the plan is known.
pub(crate) fn allocate<B: AsRef<[u8]>>(
    network: &Arc<Network<B>>,
    planned: &Planned<'_>,
    ours: &dyn Fn(usize) -> bool,
) -> Result<(Programs, Vec<Memory<B>>), LlmError> {
    let layouts = planned.cards();
    let mut places: Vec<HashMap<Piece, Place>> = Vec::with_capacity(layouts.len());
    let mut memories = Vec::new();
    // Made when there is room for it: a context may be too long for that.
    let mut table = Vec::new();
    for layout in &layouts {
        let mut copies = Vec::new();
        let mut held = HashMap::new();
        let mut weights = Vec::new();
        for (piece, _) in &layout.weights.pieces {
            let (name, cut) = network.source(piece);
            let place = match &cut {
                Cut::Rows(rows) => {
                    let range = network.rows_at(&name, rows)?;
                    weights.push(range.len() as u64);
                    Place { buffer: memory::FILE, offset: range.start as u64 }
                }
                Cut::Each { rows, of, count } => {
                    // As far apart as in the file.
                    let first = network.rows_at(&name, rows)?;
                    network.rows_at(&name, &(0..of * count))?;
                    weights.push(first.len() as u64 * count);
                    Place { buffer: memory::FILE, offset: first.start as u64 }
                }
                Cut::Columns(_) => {
                    let offset = copies.len() as u64;
                    if ours(layout.card) {
                        network.copy_part(&name, &cut, &mut copies)?;
                        weights.push(copies.len() as u64 - offset);
                        copies.resize(copies.len().next_multiple_of(64), 0);
                    }
                    Place { buffer: memory::COPIES, offset }
                }
            };
            held.insert(piece.clone(), place);
        }
        places.push(held);
        if !ours(layout.card) {
            continue;
        }
        let mut memory = Memory::new(Arc::clone(network));
        weights.into_iter().for_each(|bytes| memory.add_weights(bytes));
        memory.add(copies.len() as u64)?;
        memory.bytes_mut(memory::COPIES, |bytes| bytes.copy_from_slice(&copies));
        layout.buffers.iter().try_for_each(|&(_, bytes)| memory.add(bytes.max(1)))?;
        memory.room_for(layout.kept.iter().map(|(_, bytes)| bytes).sum())?;
        if memories.is_empty() {
            table = network.rope().tables(planned.space.context as usize);
        }
        let at = layout.buffers.iter().position(|(buffer, _)| *buffer == Buffer::Table);
        if let Some(at) = at {
            memory.bytes_mut(number(at), |bytes| {
                // Only some cards have layers with angles of their own.
                let table: &[u8] = bytemuck::cast_slice(&table);
                let length = table.len().min(bytes.len());
                bytes[..length].copy_from_slice(&table[..length]);
            });
        }
        memories.push(memory);
    }
    let mut weight = |member: usize, piece: &Piece| {
        let nowhere = Place { buffer: memory::FILE, offset: 0 };
        places[member].get(piece).copied().unwrap_or(nowhere)
    };
    let mut buffer = |member: usize, of: Buffer| {
        let at = layouts[member].buffers.iter().position(|(buffer, _)| *buffer == of);
        at.map_or(memory::FILE, number)
    };
    let programs = planned.programs(network, (&mut weight, true), &mut buffer);
    Ok((programs, memories))
}

/// The bytes of the file that the cards for which `ours` says so need.
pub(crate) fn needed<B: AsRef<[u8]>>(
    network: &Network<B>,
    planned: &Planned<'_>,
    ours: &dyn Fn(usize) -> bool,
) -> Result<Vec<Range<u64>>, LlmError> {
    let mut ranges = Vec::new();
    let mut add = |range: Range<usize>| ranges.push(range.start as u64..range.end as u64);
    for layout in planned.cards().iter().filter(|layout| ours(layout.card)) {
        for (piece, _) in &layout.weights.pieces {
            let (name, cut) = network.source(piece);
            match &cut {
                Cut::Rows(rows) => add(network.rows_at(&name, rows)?),
                Cut::Each { rows, of, count } => {
                    for first in (0..*count).map(|at| at * of) {
                        add(network.rows_at(&name, &(first + rows.start..first + rows.end))?);
                    }
                }
                Cut::Columns(_) => add(network.tensor(&name)?.1),
            }
        }
    }
    Ok(ranges)
}

/// Reads a byte of every page of the matrices of a member that lie in the file, which brings them into memory: a
/// page costs most when it is first read, and that is no part of a step.
pub(crate) fn touch<B: AsRef<[u8]>>(network: &Network<B>, programs: &Programs, member: usize) {
    let matrices = programs.members()[member].matrices();
    for (place, bytes) in matrices.filter(|(place, _)| place.buffer == memory::FILE) {
        let start = place.offset as usize;
        let pages = network.bytes()[start..start + bytes as usize].iter().step_by(4096);
        std::hint::black_box(pages.fold(0u8, |sum, byte| sum ^ byte));
    }
}

/// The buffers of a plan come behind the file and the copies.
fn number(at: usize) -> BufferId {
    BufferId(memory::COPIES.0 + 1 + at as u64)
}
