// SPDX-License-Identifier: Apache-2.0
//! How a card that this process plays reaches the others. It says nothing about what is exchanged.

use spanker_collective::DType;
use spanker_plan::Fold;

/// How words of four bytes are folded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Folding {
    /// As f32 that are added.
    Sum,
    /// Bit by bit: a word and zeros are that word.
    Or,
}

impl Folding {
    /// What a fold of a program is.
    pub(crate) fn of(fold: Fold) -> Folding {
        match DType::from_code(fold.dtype) {
            Some(DType::F32) => Folding::Sum,
            _ => Folding::Or,
        }
    }

    /// Folds words into those that are there.
    pub(crate) fn into(self, data: &mut [u8], more: &[u8]) {
        let words = data.as_chunks_mut::<4>().0.iter_mut().zip(more.as_chunks::<4>().0);
        match self {
            Folding::Sum => words.for_each(|(sum, more)| {
                *sum = (f32::from_le_bytes(*sum) + f32::from_le_bytes(*more)).to_le_bytes();
            }),
            Folding::Or => words.for_each(|(word, more)| {
                *word = (u32::from_le_bytes(*word) | u32::from_le_bytes(*more)).to_le_bytes();
            }),
        }
    }
}

/// A card's way to the others: memory that threads share, or a fabric between processes.
pub(crate) trait Peers {
    /// Why another card cannot be reached.
    type Fault;

    /// The card's rank in its group.
    fn rank(&self) -> usize;

    /// Ranks in its group.
    fn ranks(&self) -> usize;

    /// Gives bytes to every rank of the group, and calls `read` with what each has given, in the order of
    /// ranks and its own included. `bytes` says how many a rank gives. Returns the bytes that it sent to others.
    fn all_gather(
        &mut self,
        own: &[u8],
        bytes: impl Fn(usize) -> u64,
        read: impl FnMut(usize, &[u8]),
    ) -> Result<u64, Self::Fault>;

    /// Folds the words of every rank of the group, in the order of ranks. Returns the bytes that it sent to others.
    fn fold(&mut self, data: &mut [u8], folding: Folding) -> Result<u64, Self::Fault>;

    /// Hands bytes to a member of the next stage, in this step.
    fn send(&mut self, to: usize, step: u64, bytes: &[u8]) -> Result<(), Self::Fault>;

    /// Takes what a member of the stage before hands over in this step.
    fn receive(&mut self, from: usize, step: u64, into: &mut [u8]) -> Result<(), Self::Fault>;
}
