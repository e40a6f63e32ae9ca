// SPDX-License-Identifier: Apache-2.0
//! How keys and values of one layer lie in memory: in blocks of [`KV_BLOCK`] positions, which a sequence finds through a
//! table of block numbers. Nothing is stored here.
//!
//! A block has each head's keys and then its values. Keys lie number by number, so that 64 positions are scored side
//! by side; values lie position by position. As Q8_0, the whole numbers come first and then the scales, one for 32
//! numbers of a position.

use crate::Quant;

/// Positions that a block of the KV cache has room for.
pub const KV_BLOCK: u64 = 64;

/// Numbers that have one scale in Q8_0.
const SCALED: u64 = 32;

/// The KV cache of one layer on one card.
///
/// ```
/// use spanker_model::{KV_BLOCK, KvShape, Quant};
///
/// let kv = KvShape { heads: 3, head_size: 64, quant: Quant::F16 };
/// assert_eq!(kv.block_bytes(), KV_BLOCK * 3 * 64 * 2 * 2);
/// assert_eq!(KvShape { quant: Quant::Q8_0, ..kv }.block_bytes(), KV_BLOCK * 3 * 2 * 68);
/// assert!(kv.check().is_ok());
/// assert!(KvShape { quant: Quant::Q4K, ..kv }.check().is_err());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvShape {
    /// Heads of keys and of values.
    pub heads: u64,
    /// Numbers of a head.
    pub head_size: u64,
    /// What they are stored as: F16 or Q8_0.
    pub quant: Quant,
}

impl KvShape {
    /// The types that keys and values can be stored as.
    pub const QUANTS: [Quant; 2] = [Quant::F16, Quant::Q8_0];

    /// Whether keys and values can be stored so.
    ///
    /// # Errors
    /// A sentence that names what cannot be.
    pub fn check(&self) -> Result<(), String> {
        let (quant, size) = (self.quant, self.head_size);
        if !Self::QUANTS.contains(&quant) {
            return Err(format!("keys and values as {quant}: f16 and q8_0 are possible"));
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
        KV_BLOCK * self.head_size
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
}
