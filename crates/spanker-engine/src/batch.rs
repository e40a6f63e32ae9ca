// SPDX-License-Identifier: Apache-2.0
//! Many sequences on one copy of a model, without clocks, threads or cards: which of them take part in the next step, with
//! which tokens, and which blocks of the KV cache they have. Whoever runs steps asks here what comes next, and says what
//! came of it.

mod blocks;
mod forecast;
mod schedule;
mod windows;

pub(crate) use blocks::BlockPool;
pub use forecast::{Arrivals, Forecast, ServiceLoad, middle_and_tail};
pub(crate) use forecast::{Pacing, forecast};
pub(crate) use schedule::{Asked, Schedule, SequenceId, StepParts};
