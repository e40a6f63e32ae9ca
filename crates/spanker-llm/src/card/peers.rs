// SPDX-License-Identifier: Apache-2.0
//! How a card that this process plays reaches the others. It says nothing about what is exchanged.

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

    /// Adds up the numbers of every rank of the group, in the order of ranks. Returns the bytes that it sent to others.
    fn sum(&mut self, data: &mut [f32]) -> Result<u64, Self::Fault>;

    /// Gives the bytes of rank `root` to all others of the group. Returns the bytes that it sent to others.
    fn broadcast(&mut self, root: usize, data: &mut [u8]) -> Result<u64, Self::Fault>;

    /// Hands bytes to a member of the next stage, in this step.
    fn send(&mut self, to: usize, step: u64, bytes: &[u8]) -> Result<(), Self::Fault>;

    /// Takes what a member of the stage before hands over in this step.
    fn receive(&mut self, from: usize, step: u64, into: &mut [u8]) -> Result<(), Self::Fault>;
}
