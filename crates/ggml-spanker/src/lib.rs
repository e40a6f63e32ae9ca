// SPDX-License-Identifier: Apache-2.0
//! GGML's quantised blocks and the matrix products over them.
//!
//! The crate decodes [`Q4_K`](q4_k) blocks and multiplies matrices made of them, through the trait
//! [`MatmulInt4`]. Two implementations are shipped: [`HostMatmul`] computes on the host's processor,
//! and [`MockSail`] computes the same and records the bus traffic that a card would see. The crate
//! does not read model files, does not quantise, and moves nothing to a real card.
//!
//! ```
//! use ggml_spanker::{HostMatmul, MatmulInt4, OUTPUT_ELEM_BYTES, Q4_K_BLOCK_BYTES, QK_K};
//!
//! # fn main() -> ggml_spanker::Result<()> {
//! // One block: d = 1.0, every scale 1, every quant 2, no offset.
//! let mut block = [0u8; Q4_K_BLOCK_BYTES];
//! block[..2].copy_from_slice(&0x3C00u16.to_le_bytes());
//! block[4..8].fill(1);
//! block[12..16].fill(1);
//! block[16..].fill(0x22);
//!
//! let mut out = [0u8; OUTPUT_ELEM_BYTES];
//! HostMatmul.matmul_q4_k(&block, &block, &mut out, 1, QK_K, 1)?;
//! assert!((f32::from_le_bytes(out) - 256.0 * 2.0 * 2.0).abs() < 0.01);
//! # Ok(())
//! # }
//! ```
#![deny(unsafe_code)]

mod decode;
mod error;
mod file;
mod host;
mod input;
mod kernel;
mod matmul;
pub mod mock;
pub mod ops;
mod path;
mod product;
pub mod q4_k;
mod shard;
mod simd;

pub use decode::{WEIGHT_TYPES, decode};
pub use error::{Error, Result};
pub use file::{GgufFile, TensorView};
pub use host::HostMatmul;
pub use input::{Inputs, input_type, quantize};
pub use matmul::{MatmulInt4, OUTPUT_ELEM_BYTES};
pub use mock::{MockSail, Transaction};
pub use path::Path;
pub use product::{multiply, multiply_on};
pub use q4_k::{Q4_K_BLOCK_BYTES, QK_K, dequantize_q4_k};
pub use shard::Shape;
pub use spanker_model::Quant;
