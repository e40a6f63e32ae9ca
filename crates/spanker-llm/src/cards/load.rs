// SPDX-License-Identifier: Apache-2.0
//! Bringing a network onto cards: what each holds is allocated and written, all cards at once.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use spanker_fabric::device::DeviceGroup;
use spanker_plan::{Buffer, BufferId, CardLayout, Piece, Place, Programs, WEIGHT_ALIGNMENT};

use crate::layout::Planned;
use crate::{LlmError, Network};

/// How far loading is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loading {
    /// Bytes that cards have.
    pub done: u64,
    /// Bytes that they will have.
    pub total: u64,
}

/// The buffers of one card, by what they are for.
pub(super) type Buffers = HashMap<Buffer, BufferId>;

/// Loads all cards. What was allocated is in `buffers`, also after an error.
pub(super) fn load<B: AsRef<[u8]> + Sync>(
    network: &Network<B>,
    planned: &Planned<'_>,
    layouts: &[CardLayout],
    group: &DeviceGroup<'_>,
    buffers: &mut [Buffers],
    loading: &(dyn Fn(Loading) + Sync),
) -> Result<Programs, LlmError> {
    for (member, layout) in layouts.iter().enumerate() {
        for (buffer, bytes) in layout.allocations() {
            let id = group.request(member, |card| card.allocate(bytes))?;
            buffers[member].insert(buffer, id);
        }
    }
    let places: Vec<HashMap<&Piece, u64>> = layouts
        .iter()
        .map(|layout| layout.weights.pieces.iter().map(|(piece, at)| (piece, *at)).collect())
        .collect();
    let mut weight = |member: usize, piece: &Piece| Place {
        buffer: buffers[member][&Buffer::Weights],
        offset: places[member].get(piece).copied().unwrap_or(0),
    };
    let mut buffer = |member: usize, of: Buffer| buffers[member][&of];
    let programs = planned.programs(network, (&mut weight, false), &mut buffer);
    write(network, layouts, buffers, group, loading)?;
    let table = network.rope().tables(planned.space.context as usize);
    for (member, one) in programs.members().iter().enumerate() {
        let place = one.place(Buffer::Table);
        let bytes = layouts[member].bytes_of(Buffer::Table) as usize;
        let table = &bytemuck::cast_slice(&table)[..bytes];
        group.request(member, |card| card.write(place.buffer, 0, table))?;
    }
    Ok(programs)
}

/// Writes to all cards at once: each has a link of its own to the host.
fn write<B: AsRef<[u8]> + Sync>(
    network: &Network<B>,
    layouts: &[CardLayout],
    buffers: &[Buffers],
    group: &DeviceGroup<'_>,
    loading: &(dyn Fn(Loading) + Sync),
) -> Result<(), LlmError> {
    let total = layouts.iter().map(|layout| layout.weights.bytes).sum();
    let done = AtomicU64::new(0);
    let one = |member: usize| -> Result<(), LlmError> {
        let weights = buffers[member][&Buffer::Weights];
        let mut bytes = Vec::new();
        for (piece, offset) in &layouts[member].weights.pieces {
            bytes.clear();
            network.copy_piece(piece, &mut bytes)?;
            group.request(member, |card| card.write(weights, *offset, &bytes))?;
            // Counted with what lies between pieces, so that all of them together are all.
            let more = (bytes.len() as u64).next_multiple_of(WEIGHT_ALIGNMENT);
            let before = done.fetch_add(more, Ordering::Relaxed);
            loading(Loading { done: before + more, total });
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let one = &one;
        let threads: Vec<_> =
            (0..layouts.len()).map(|member| scope.spawn(move || one(member))).collect();
        let results =
            threads.into_iter().map(|thread| thread.join().expect("writing does not panic"));
        results.collect::<Result<Vec<()>, LlmError>>().map(|_| ())
    })
}
