// SPDX-License-Identifier: Apache-2.0
//! Collectives as data: what a group of ranks sends, receives, folds and copies, step by step.
//!
//! An algorithm is a function from (ranks, elements) to a [`Schedule`]. One verifier proves that a
//! schedule is right, whoever wrote it; executors run it over any fabric. This crate has no I/O, no
//! clock, no threads and no unsafe code: it runs the same under simulation. What a schedule costs on
//! given cards and links is in the crate `spanker-plan`; what a value does under an operation is in
//! `spanker-reduce`.
//!
//! ```
//! use spanker_collective::{Algorithm, Collective, schedule, verify};
//!
//! // Five ranks, a thousand elements, everyone ends with the reduction.
//! let plan = schedule(Collective::AllReduce, Algorithm::HalvingDoubling, 5, 1000)?;
//! let proof = verify(&plan)?;
//! assert_eq!(proof.rounds, 6); // 2 ceil(log2 5)
//! assert_eq!(proof.sent_most, 2 * 800); // 2 (n - 1) / n of the buffer
//! assert!(proof.uniform); // every rank computes the same bits
//! # Ok::<(), spanker_collective::CollectiveError>(())
//! ```
//!
//! # Levels of determinism
//!
//! 1. *Serial*: the bits of the serial fold in rank order, whatever the length and the number of
//!    ranks. [`Algorithm::OneShot`] and [`Algorithm::TwoShot`] give it ([`Proof::serial`]), and so do
//!    collectives over buffers in one address space (crate `spanker-reduce`).
//!    An average is a sum that is divided when it is complete.
//! 2. *Repeatable*: the same schedule gives the same bits on every run and on every rank
//!    ([`Proof::uniform`]). Every algorithm here gives it: the order of a fold is written in the
//!    schedule and never depends on which message came first.
//! 3. *Any order*: a vendor's own collective may promise less than this.
#![forbid(unsafe_code)]

mod algorithm;
mod collective;
mod element;
mod error;
mod level;
mod op;
mod schedule;
mod verify;

pub use collective::{Algorithm, Collective, chunk};
pub use element::DType;
pub use error::CollectiveError;
pub use level::{Levels, Message, levels};
pub use op::ReduceOp;
pub use schedule::{Buffer, Incoming, Local, Rank, Schedule, Span, Step, Transfer, schedule};
pub use verify::{Flaw, Proof, verify};

/// The largest group. The bound keeps schedules, which hold steps for every rank, a sane size.
pub const MAX_RANKS: usize = 1024;
