// SPDX-License-Identifier: Apache-2.0
//! What each card with memory of its own will hold of a network, and where. Nothing is written here.

use std::collections::HashMap;

use spanker_plan::Plan;
use spanker_runtime::{BufferId, Place};

use crate::holding::hold;
use crate::{LlmError, Network, Piece};

/// What pieces of weights begin at multiples of.
pub(crate) const ALIGNMENT: u64 = 64;

/// The weights of one card.
#[derive(Debug, Default)]
pub(crate) struct Cargo {
    pub(crate) pieces: Vec<(Piece, u64)>,
    pub(crate) places: HashMap<Piece, u64>,
    pub(crate) bytes: u64,
}

impl Cargo {
    fn add<B: AsRef<[u8]>>(
        &mut self,
        network: &Network<B>,
        piece: &Piece,
    ) -> Result<Place, LlmError> {
        let offset = match self.places.get(piece) {
            Some(&offset) => offset,
            None => {
                let offset = self.bytes;
                self.pieces.push((piece.clone(), offset));
                self.places.insert(piece.clone(), offset);
                self.bytes += network.piece_bytes(piece)?.next_multiple_of(ALIGNMENT);
                offset
            }
        };
        Ok(Place { buffer: BufferId(0), offset })
    }
}

/// What each seat will hold.
pub(crate) fn list<B: AsRef<[u8]>>(
    network: &Network<B>,
    plan: &Plan,
) -> Result<Vec<Cargo>, LlmError> {
    let stages = &plan.layout.replicas[0];
    let mut list = Vec::new();
    for (index, stage) in stages.iter().enumerate() {
        let ends = (index == 0, index + 1 == stages.len());
        for rank in 0..stage.group.cards.len() {
            let mut cargo = Cargo::default();
            hold(network, stage, rank, ends, &mut |piece| cargo.add(network, piece))?;
            list.push(cargo);
        }
    }
    Ok(list)
}
