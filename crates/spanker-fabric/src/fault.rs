// SPDX-License-Identifier: Apache-2.0
//! A wrapper that makes any fabric misbehave, from a seed.
//!
//! Every rank of the group is wrapped, because the wrapper also adds what lets a receiver notice: a
//! checksum against flipped bits, and a sequence number against losses that a later message would hide.
//! The same seed gives the same faults at the same messages.

use std::time::{Duration, Instant};

use rand::{Rng, RngCore, SeedableRng};
use rand_pcg::Pcg64Mcg;
use spanker_collective::Rank;

use crate::{Call, Fabric, FabricError, Message, Pool};

/// What goes wrong, and how often. Probabilities are per message, except for death, which is per step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Faults {
    /// A message is lost.
    pub drop: f64,
    /// A message is late.
    pub delay: f64,
    /// By up to this much.
    pub delay_most: Duration,
    /// A bit of a message is flipped.
    pub corrupt: f64,
    /// The rank dies in the middle of a step.
    pub kill: f64,
}

impl Faults {
    /// No faults: a start to set some.
    pub const NONE: Faults =
        Faults { drop: 0.0, delay: 0.0, delay_most: Duration::ZERO, corrupt: 0.0, kill: 0.0 };
}

/// A fabric with faults. A rank that was killed reports its own death, and so do all others of it.
#[derive(Debug)]
pub struct Faulty<F> {
    inner: F,
    faults: Faults,
    random: Pcg64Mcg,
    pool: Pool,
    dead: bool,
    /// Messages sent to and received from each rank.
    sent: Vec<u32>,
    received: Vec<u32>,
}

impl<F: Fabric> Faulty<F> {
    /// Wraps one end. All ends of a group get the same `seed`; each rank draws its own numbers.
    pub fn new(inner: F, faults: Faults, seed: u64) -> Self {
        let rank = inner.rank() as u64;
        let random = Pcg64Mcg::seed_from_u64(seed ^ rank.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let (sent, received) = (vec![0; inner.ranks()], vec![0; inner.ranks()]);
        Faulty { inner, faults, random, pool: Pool::default(), dead: false, sent, received }
    }

    fn happens(&mut self, probability: f64) -> bool {
        // Drawn whatever the probability is, so that changing one fault does not move the others.
        self.random.random::<f64>() < probability
    }

    fn die(&mut self) -> FabricError {
        self.dead = true;
        self.inner.abort(FabricError::Died { rank: self.inner.rank() })
    }

    /// The message with its number and checksum appended, and perhaps a bit flipped.
    fn with_trailer(&mut self, to: Rank, message: &Message) -> Message {
        let flip = self.happens(self.faults.corrupt).then(|| self.random.next_u64());
        let len = message.bytes().len();
        let number = self.sent[to];
        self.sent[to] += 1;
        self.pool.write(len + TRAILER, |out| {
            out[..len].copy_from_slice(message.bytes());
            out[len..len + 4].copy_from_slice(&number.to_le_bytes());
            let sum = checksum(&out[..len + 4]);
            out[len + 4..].copy_from_slice(&sum.to_le_bytes());
            if let Some(draw) = flip {
                let bit = draw as usize % (8 * out.len());
                out[bit / 8] ^= 1 << (bit % 8);
            }
        })
    }

    fn checked(&mut self, peer: Rank, message: &Message) -> Result<Message, FabricError> {
        let rank = self.inner.rank();
        let bytes = message.bytes();
        let (payload, trailer) = bytes.split_at(bytes.len().saturating_sub(TRAILER));
        let number = self.received[peer].to_le_bytes();
        self.received[peer] += 1;
        let Some((found, sum)) = trailer.split_first_chunk::<4>() else {
            return Err(self.inner.abort(FabricError::Corrupt { rank, peer }));
        };
        if checksum(&bytes[..payload.len() + 4]).to_le_bytes() != sum {
            return Err(self.inner.abort(FabricError::Corrupt { rank, peer }));
        }
        if *found != number {
            return Err(self.inner.abort(FabricError::Lost { rank, peer }));
        }
        Ok(message.part(0..payload.len()))
    }
}

/// A number and a checksum of four bytes each.
const TRAILER: usize = 8;

impl<F: Fabric> Fabric for Faulty<F> {
    fn rank(&self) -> Rank {
        self.inner.rank()
    }

    fn ranks(&self) -> usize {
        self.inner.ranks()
    }

    fn exchange(
        &mut self,
        call: &Call,
        sends: &[(Rank, Message)],
        receives: &[Rank],
        deadline: Instant,
    ) -> Result<Vec<Message>, FabricError> {
        if self.dead {
            return Err(self.die());
        }
        let mut out = Vec::with_capacity(sends.len());
        for (to, message) in sends {
            let lost = self.happens(self.faults.drop);
            if self.happens(self.faults.delay) {
                let most = self.faults.delay_most.as_secs_f64();
                std::thread::sleep(Duration::from_secs_f64(most * self.random.random::<f64>()));
            }
            let message = self.with_trailer(*to, message);
            if !lost {
                out.push((*to, message));
            }
        }
        if self.happens(self.faults.kill) {
            // Some of the step's messages still get out.
            out.truncate(self.random.random_range(0..=out.len()));
            self.inner.exchange(call, &out, &[], deadline)?;
            return Err(self.die());
        }
        let messages = self.inner.exchange(call, &out, receives, deadline)?;
        messages.iter().zip(receives).map(|(message, &peer)| self.checked(peer, message)).collect()
    }

    fn commit(&mut self, call: &Call, deadline: Instant) -> Result<(), FabricError> {
        if self.dead || self.happens(self.faults.kill) {
            return Err(self.die());
        }
        self.inner.commit(call, deadline)
    }

    fn abort(&mut self, error: FabricError) -> FabricError {
        self.inner.abort(error)
    }
}

/// CRC-32C.
fn checksum(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}
