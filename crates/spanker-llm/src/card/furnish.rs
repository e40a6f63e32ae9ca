// SPDX-License-Identifier: Apache-2.0
//! The memory of the cards that this process plays, as a plan lays them out. Weights whose rows a card has
//! stay in the file; of those whose columns it has, it gets a copy.

use std::sync::Arc;

use spanker_plan::Plan;
use spanker_runtime::{BufferId, Place};

use super::memory::{self, Memory};
use crate::program::{Lowering, Room, Rooms, Space};
use crate::{Cut, LlmError, Network, Piece};

/// Lays a network out. The seats of the cards for which `ours` says so get memory, in the order of seats; of the
/// others, nothing but their place in the plan is known.
pub(crate) fn furnish<B: AsRef<[u8]>>(
    network: &Arc<Network<B>>,
    plan: &Plan,
    space: Space,
    ours: &dyn Fn(usize) -> bool,
) -> Result<(Lowering, Vec<Memory<B>>), LlmError> {
    crate::program::check_plan(network, plan)?;
    let stages = plan.layout.replicas[0].iter();
    let ours: Vec<bool> =
        stages.flat_map(|stage| &stage.group.cards).map(|&card| ours(card)).collect();
    let mut copies: Vec<Vec<u8>> = vec![Vec::new(); ours.len()];
    let mut sizes = Vec::new();
    let mut put = |seat: usize, piece: &Piece| match &piece.cut {
        Cut::Rows(rows) => {
            let offset = network.rows_at(piece, rows)?.start as u64;
            Ok(Place { buffer: memory::FILE, offset })
        }
        Cut::Columns(_) => {
            let copy = &mut copies[seat];
            let offset = copy.len() as u64;
            if ours[seat] {
                network.copy_piece(piece, copy)?;
                copy.resize(copy.len().next_multiple_of(64), 0);
            }
            Ok(Place { buffer: memory::COPIES, offset })
        }
    };
    let mut rooms = |_: usize, list: &[(Room, u64)]| {
        let first = memory::COPIES.0 + 1;
        sizes.push(list.to_vec());
        let numbered = list.iter().zip(first..);
        Ok(Rooms::new(numbered.map(|(&(room, _), id)| (room, BufferId(id)))))
    };
    let lowering = Lowering::new(network, plan, space, &mut put, &mut rooms)?;
    // Made when there is room for it: a context may be too long for that.
    let mut table = Vec::new();
    let mut memories = Vec::new();
    for (seat, sizes) in sizes.iter().enumerate().filter(|(seat, _)| ours[*seat]) {
        let mut memory = Memory::new(Arc::clone(network));
        let copy = std::mem::take(&mut copies[seat]);
        memory.add(copy.len() as u64)?;
        memory.bytes_mut(memory::COPIES, |bytes| bytes.copy_from_slice(&copy));
        sizes.iter().try_for_each(|&(_, bytes)| memory.add(bytes))?;
        if memories.is_empty() {
            table = network.rope().table(0..space.context);
        }
        let place = lowering.seats[seat].rooms.place(Room::Table);
        memory.bytes_mut(place.buffer, |bytes| {
            bytes.copy_from_slice(bytemuck::cast_slice(&table));
        });
        memories.push(memory);
    }
    Ok((lowering, memories))
}
