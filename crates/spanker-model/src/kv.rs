// SPDX-License-Identifier: Apache-2.0
//! How keys and values of one layer lie in memory: in blocks of [`KV_BLOCK`] positions, which a sequence finds through a
//! table of block numbers. Nothing is stored here.
//!
//! A block has each head's keys and then its values. Keys lie number by number, so that 64 positions are scored side
//! by side; values lie position by position. As Q8_0, the whole numbers come first and then the scales, one for 32
//! numbers of a position. As Q4_0 it is the same with two whole numbers in a byte: of the 32 that have one scale, the
//! first and the 17th, the second and the 18th, and so on.

use crate::Quant;

/// Positions that a block of the KV cache has room for.
pub const KV_BLOCK: u64 = 64;

/// Numbers that have one scale in Q8_0 and Q4_0.
const SCALED: u64 = 32;

/// The KV cache of one layer on one card.
///
/// ```
/// use spanker_model::{KV_BLOCK, KvShape, Quant};
///
/// let kv = KvShape { heads: 3, head_size: 64, quant: Quant::F16 };
/// assert_eq!(kv.block_bytes(), KV_BLOCK * 3 * 64 * 2 * 2);
/// assert_eq!(KvShape { quant: Quant::Q8_0, ..kv }.block_bytes(), KV_BLOCK * 3 * 2 * 68);
/// assert_eq!(KvShape { quant: Quant::Q4_0, ..kv }.block_bytes(), KV_BLOCK * 3 * 2 * 36);
/// assert!(kv.check().is_ok());
/// assert!(KvShape { quant: Quant::Q4K, ..kv }.check().is_err());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvShape {
    /// Heads of keys and of values.
    pub heads: u64,
    /// Numbers of a head.
    pub head_size: u64,
    /// What they are stored as: F16, Q8_0 or Q4_0.
    pub quant: Quant,
}

impl KvShape {
    /// The types that keys and values can be stored as.
    pub const QUANTS: [Quant; 3] = [Quant::F16, Quant::Q8_0, Quant::Q4_0];

    /// Whether keys and values can be stored so.
    ///
    /// # Errors
    /// A sentence that names what cannot be.
    pub fn check(&self) -> Result<(), String> {
        let (quant, size) = (self.quant, self.head_size);
        if !Self::QUANTS.contains(&quant) {
            return Err(format!("keys and values as {quant}: f16, q8_0 and q4_0 are possible"));
        }
        match size.is_multiple_of(quant.block()) {
            true => Ok(()),
            false => Err(format!(
                "keys and values as {quant} in heads of {size}: multiples of 32 are possible"
            )),
        }
    }

    /// Bytes of one head's keys in a block, or of its values.
    #[must_use]
    pub const fn half_bytes(&self) -> u64 {
        KV_BLOCK.saturating_mul(self.quant.row_bytes(self.head_size))
    }

    /// Bytes of one head's keys and values in a block.
    #[must_use]
    pub const fn head_bytes(&self) -> u64 {
        self.half_bytes().saturating_mul(2)
    }

    /// Bytes of a block.
    #[must_use]
    pub const fn block_bytes(&self) -> u64 {
        self.heads.saturating_mul(self.head_bytes())
    }

    /// Bytes of one position's keys and values of all heads.
    #[must_use]
    pub const fn position_bytes(&self) -> u64 {
        self.block_bytes() / KV_BLOCK
    }

    /// Where scales begin behind the whole numbers of one head's keys, or of its values.
    #[must_use]
    pub const fn scales_at(&self) -> u64 {
        KV_BLOCK * self.packed()
    }

    /// Pieces of a head's key or value that are stored by themselves: numbers, or bytes with two of them.
    const fn packed(&self) -> u64 {
        if matches!(self.quant, Quant::Q4_0) { self.head_size / 2 } else { self.head_size }
    }

    /// Scales of a position of one head's keys, or of its values.
    #[must_use]
    pub const fn scales(&self) -> u64 {
        self.head_size / SCALED
    }

    /// Blocks that so many positions take.
    #[must_use]
    pub const fn blocks_for(positions: u64) -> u64 {
        positions.div_ceil(KV_BLOCK)
    }

    /// Where the numbers of a head of a position's key lie in a block, or of its value.
    #[must_use]
    pub const fn numbers(&self, head: u64, is_key: bool, slot: u64) -> Strided {
        let start = self.half_at(head, is_key);
        let each = if matches!(self.quant, Quant::F16) { 2 } else { 1 };
        self.strided(start, each, self.packed(), is_key, slot)
    }

    /// The same for its scales, where there are any.
    #[must_use]
    pub const fn scale_bytes(&self, head: u64, is_key: bool, slot: u64) -> Option<Strided> {
        if matches!(self.quant, Quant::F16) {
            return None;
        }
        let start = self.half_at(head, is_key) + self.scales_at();
        Some(self.strided(start, 2, self.scales(), is_key, slot))
    }

    /// Where the first `slots` positions of a head's keys and values lie in a block: numbers of keys and of values, and
    /// their scales where there are any.
    pub fn first_slots(&self, head: u64, slots: u64) -> impl Iterator<Item = Strided> {
        let shape = *self;
        let wider = move |one: Strided, is_key: bool| match is_key {
            true => Strided { length: one.length * slots, ..one },
            false => Strided { length: one.length * slots, stride: one.length * slots, ..one },
        };
        [true, false].into_iter().flat_map(move |is_key| {
            let scales = shape.scale_bytes(head, is_key, 0);
            let pieces = [Some(shape.numbers(head, is_key, 0)), scales];
            pieces.into_iter().flatten().map(move |one| wider(one, is_key))
        })
    }

    const fn half_at(&self, head: u64, is_key: bool) -> u64 {
        head * self.head_bytes() + if is_key { 0 } else { self.half_bytes() }
    }

    /// So many numbers of some bytes, one for each position or one position's end to end.
    const fn strided(&self, start: u64, bytes: u64, count: u64, apart: bool, slot: u64) -> Strided {
        if apart {
            let (offset, stride) = (start + slot * bytes, KV_BLOCK * bytes);
            return Strided { offset, rows: count, length: bytes, stride };
        }
        let length = count * bytes;
        Strided { offset: start + slot * length, rows: 1, length, stride: length }
    }
}

/// Bytes at a stride.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strided {
    /// Where the first piece begins.
    pub offset: u64,
    /// Pieces.
    pub rows: u64,
    /// Bytes of a piece.
    pub length: u64,
    /// Bytes from a piece to the next.
    pub stride: u64,
}
