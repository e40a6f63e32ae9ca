// SPDX-License-Identifier: Apache-2.0
//! Bringing a network onto cards: what each holds is listed, made room for and written, all cards at once.

use std::sync::atomic::{AtomicU64, Ordering};

use spanker_fabric::device::DeviceGroup;
use spanker_plan::Plan;
use spanker_runtime::{BufferId, Place};

use crate::cargo::{ALIGNMENT, Cargo, list};
use crate::program::{Lowering, Room, Rooms, Space};
use crate::{LlmError, Network, Piece};

/// How far loading is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loading {
    /// Bytes that cards have.
    pub done: u64,
    /// Bytes that they will have.
    pub total: u64,
}

/// Loads all cards. What was allocated is in `buffers`, also after an error.
pub(super) fn load<B: AsRef<[u8]> + Sync>(
    network: &Network<B>,
    plan: &Plan,
    space: Space,
    group: &DeviceGroup<'_>,
    buffers: &mut [Vec<BufferId>],
    loading: &(dyn Fn(Loading) + Sync),
) -> Result<Lowering, LlmError> {
    let cargo = list(network, plan)?;
    let mut allocate = |seat: usize, bytes: u64| -> Result<BufferId, LlmError> {
        let buffer = group.request(seat, |card| card.allocate(bytes.max(1)))?;
        buffers[seat].push(buffer);
        Ok(buffer)
    };
    let mut weights = Vec::with_capacity(cargo.len());
    for (seat, cargo) in cargo.iter().enumerate() {
        weights.push(allocate(seat, cargo.bytes)?);
    }
    let mut put = |seat: usize, piece: &Piece| {
        let offset = cargo[seat].places[piece];
        Ok(Place { buffer: weights[seat], offset })
    };
    let mut rooms = |seat: usize, list: &[(Room, u64)]| {
        let mut pairs = Vec::with_capacity(list.len());
        for &(room, bytes) in list {
            pairs.push((room, allocate(seat, bytes)?));
        }
        Ok(Rooms::new(pairs))
    };
    let lowering = Lowering::new(network, plan, space, &mut put, &mut rooms)?;
    write(network, &cargo, &weights, group, loading)?;
    let table = network.rope().table(0..space.context);
    for (seat, one) in lowering.seats.iter().enumerate() {
        let place = one.rooms.place(Room::Table);
        group.request(seat, |card| card.write(place.buffer, 0, bytemuck::cast_slice(&table)))?;
    }
    Ok(lowering)
}

/// Writes to all cards at once: each has a link of its own to the host.
fn write<B: AsRef<[u8]> + Sync>(
    network: &Network<B>,
    cargo: &[Cargo],
    weights: &[BufferId],
    group: &DeviceGroup<'_>,
    loading: &(dyn Fn(Loading) + Sync),
) -> Result<(), LlmError> {
    let total = cargo.iter().map(|cargo| cargo.bytes).sum();
    let done = AtomicU64::new(0);
    let one = |seat: usize| -> Result<(), LlmError> {
        let mut bytes = Vec::new();
        for (piece, offset) in &cargo[seat].pieces {
            bytes.clear();
            network.copy_piece(piece, &mut bytes)?;
            group.request(seat, |card| card.write(weights[seat], *offset, &bytes))?;
            // Counted with what lies between pieces, so that all of them together are all.
            let more = (bytes.len() as u64).next_multiple_of(ALIGNMENT);
            let before = done.fetch_add(more, Ordering::Relaxed);
            loading(Loading { done: before + more, total });
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let one = &one;
        let threads: Vec<_> = (0..cargo.len()).map(|seat| scope.spawn(move || one(seat))).collect();
        let results =
            threads.into_iter().map(|thread| thread.join().expect("writing does not panic"));
        results.collect::<Result<Vec<()>, LlmError>>().map(|_| ())
    })
}
