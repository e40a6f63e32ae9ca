// SPDX-License-Identifier: Apache-2.0
//! Jobs over unequal backends: products of quantised matrices and independent prompts, on threads, cards, GPUs and ranks.
//!
//! A [`JobRequest`] says what the items of a job are, which backends do them and what is made to go wrong. Prepared, it runs
//! on threads, cards and GPUs of this process or in virtual time ([`PreparedJob::run`]), or over ranks that are processes
//! (`run_on_ranks`, with the feature `mpi`). What came of it is a [`JobReport`], with the time that the job would ideally
//! have taken.
//!
//! What a job is made of can be used alone:
//!
//! - [`Product`]: an item is a row of the left operand. [`on_threads`] computes rows on threads of this process,
//!   [`CardProduct`] on a card behind the ABI.
//! - [`Prompts`]: an item is a prompt for a model, its output the tokens of the answer. A [`Replica`] of the model answers
//!   prompts on threads of this process or on a card.
//! - [`CardMatmul`] is no job: it is [`MatmulInt4`](ggml_spanker::MatmulInt4), one product at a time on one card.
//!
//! Whoever does an item, its output has the same bits. So any backends may share a job, and what one fails to do
//! another does again. How items are shared out is `spanker-steal`'s business. Nothing here prints: a [`JobWatch`] is told
//! how far a job is.
//!
//! # Cards of other versions
//!
//! A card whose version of the ABI cannot round rows gets both operands in Q4_K and multiplies them as they are, with the
//! same bits. A [`Replica`] needs all operators of a model; the error for a card without them names the first one.
//!
//! # Examples
//!
//! A product on three backends that are not equally fast, one of them an emulated card:
//!
//! ```
//! use std::sync::Arc;
//! use spanker_fabric::device::Deadline;
//! use spanker_engine::jobs::{CardProduct, Product, on_threads};
//! use spanker_steal::WorkStealingScheduler;
//! # use spanker_topology::{Cluster, Profile, Shape};
//! # use spanker_twin::{Pace, World, specs};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let pair = Cluster::uniform(Profile::builtin("rev-a")?, 2, Shape::Ring)?;
//! # let world = World::new(specs(&pair, Pace::Card, 1)?, 7);
//! # let card = world.control(0);
//! let product = Arc::new(Product::synthetic(200, 256, 32, 7)?);
//! let scheduler = WorkStealingScheduler::new(vec![
//!     on_threads(Arc::clone(&product), 2),
//!     on_threads(Arc::clone(&product), 1),
//!     Arc::new(CardProduct::new(Arc::clone(&product), card, Deadline::USUAL)?),
//! ]);
//! let mut out = vec![0; 200 * 32 * 4];
//! let report = scheduler.run(&product.job(), &mut out)?;
//! assert_eq!(report.done, 200);
//!
//! let mut alone = vec![0; out.len()];
//! product.rows(0..200, &mut alone)?;
//! assert_eq!(out, alone);
//! # Ok(())
//! # }
//! ```

mod backends;
mod card;
mod error;
mod expected;
#[cfg(feature = "cuda")]
mod gpu;
mod matmul;
pub mod notation;
mod origin;
mod product;
mod prompts;
mod questions;
#[cfg(feature = "mpi")]
mod ranks;
mod replica;
mod report;
mod request;
mod run;
mod simulated;
mod speed;
mod watch;
mod worker;
mod workers;

pub use backends::BackendList;
pub use card::CardProduct;
pub use error::JobError;
#[cfg(feature = "cuda")]
pub use gpu::GpuProduct;
pub use matmul::CardMatmul;
pub use product::{Product, on_threads};
pub use prompts::{NO_TOKEN, Prompts};
pub use questions::{PROMPTS, PromptAnswer};
#[cfg(feature = "mpi")]
pub use ranks::{ClaimTrips, RankReport, RankShare, run_on_ranks};
pub use replica::Replica;
pub use report::{BackendShare, JobReport, JobTotals};
pub use request::{JobRequest, PreparedJob, Workload};
pub use run::JobWatch;
