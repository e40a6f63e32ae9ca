// SPDX-License-Identifier: Apache-2.0
//! Work for a card as bytes: `work/encode.rs` and `work/decode.rs` turn the values of `spanker-plan` to bytes
//! and back.

mod decode;
mod encode;

pub use decode::decode_work;
pub use encode::encode_work;

pub use spanker_plan::{
    Activation, BufferId, Descriptor, Fold, KvCache, Landing, MAX_BEST, MAX_EXPERTS, MAX_SOURCES,
    MAX_WRITE, PICK_BYTES, Picks, Place, ROW_BYTES, Scores, Work,
};

/// Why bytes are no descriptors.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("descriptor {index}: {reason}")]
pub struct Malformed {
    /// Which descriptor, from 0.
    pub index: usize,
    /// What is wrong with it.
    pub reason: String,
}
