// SPDX-License-Identifier: Apache-2.0
//! Collectives over buffers in one address space, at the speed of the memory.
//!
//! Cards whose buffers lie in host memory need no messages: an [`all_reduce`] reads each buffer once
//! and writes it once. A block of every card is folded in registers and written to every card before
//! the next block is read.
//!
//! * The bits are those of the serial fold in card order, whatever the number of threads.
//! * 16-bit floats accumulate in `f32` and are rounded once. Integers wrap. A NaN from any card reaches
//!   the result of `Max` and `Min`.
//! * Work is shared with a persistent [`Team`]; an all-reduce allocates nothing (up to 64 cards).
//!
//! The element types are those of [`Element`]; an operation that a type does not have is a typed error:
//!
//! ```
//! use spanker_collective::{DType, ReduceOp};
//! use spanker_reduce::{ReduceError, Team, Threads, all_reduce};
//!
//! let mut cards = [vec![0b001u32, 7], vec![0b100, 7], vec![0b010, 7]];
//! all_reduce(Team::global(), Threads::Auto, &mut cards, ReduceOp::BitwiseOr)?;
//! assert_eq!(cards[2], [0b111, 7]);
//!
//! let mut cards = [vec![1.0f32], vec![2.0]];
//! let error = all_reduce(Team::global(), Threads::Auto, &mut cards, ReduceOp::BitwiseOr);
//! assert_eq!(
//!     error,
//!     Err(ReduceError::Undefined { op: ReduceOp::BitwiseOr, dtype: DType::F32 }),
//! );
//! # Ok::<(), ReduceError>(())
//! ```
//!
//! Not here: messages between threads, processes or machines (`spanker-fabric`).

mod element;
mod error;
mod fused;
mod kernel;
mod team;

pub use element::Element;
pub use error::ReduceError;
pub use fused::{
    all_gather, all_reduce, all_to_all, broadcast, divide, fold, gather, memory_limit, reduce,
    reduce_scatter, scatter, threads_for,
};
pub use half::{bf16, f16};
pub use team::{Team, Threads};
