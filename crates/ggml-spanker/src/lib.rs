// SPDX-License-Identifier: Apache-2.0
//! GGML's quantised blocks, the matrix products over them, and what a model does between products.
//!
//! - [`GgufFile`] maps a model file and finds its tensors.
//! - [`multiply`] multiplies rows of weights, in any of [`WEIGHT_TYPES`], with rows of activations
//!   ([`quantize`], [`Inputs`]); [`ops`] is the rest of a Llama-family model. [`decode()`] turns weights into f32, and
//!   [`encode()`] f32 into weights.
//! - [`synthetic`] makes models with random weights.
//! - [`Shape`] cuts quantised matrices by rows and by columns.
//! - [`MatmulInt4`] is the product of two Q4_K matrices: [`HostMatmul`] computes it on the host's processor,
//!   [`MockSail`] computes the same and records the bus traffic that a card would see.
//!   `spanker_engine::jobs::CardMatmul` has a card compute it, with the same bits.
//!
//! Every result has bits of its own that no processor, number of threads or split changes: there is one
//! definition in plain Rust, and vector instructions ([`Path`]) give exactly its bits.
//!
//! Not here: threads and real cards. Callers share out rows over threads. Where there are few
//! rows of activations, a call with 128 or more rows of weights reads memory fastest.
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

mod blocks;
#[cfg(unix)]
mod bus;
mod codebooks;
mod decode;
mod encode;
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
pub mod synthetic;

pub use decode::{WEIGHT_TYPES, decode};
pub use encode::{ENCODE_TYPES, encode};
pub use error::{DeviceFault, Error, Result};
pub use file::{GgufFile, TensorView};
pub use host::HostMatmul;
pub use input::{Inputs, quantize};
pub use matmul::{MatmulInt4, OUTPUT_ELEM_BYTES, check_dims};
pub use mock::{MockSail, Transaction};
pub use path::Path;
pub use product::{multiply, multiply_on};
pub use q4_k::{Q4_K_BLOCK_BYTES, QK_K, dequantize_q4_k};
pub use shard::Shape;
pub use spanker_model::{Gating, KV_BLOCK, KvShape, Quant};
pub use synthetic::file_type;
