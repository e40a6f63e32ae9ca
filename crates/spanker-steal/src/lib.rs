// SPDX-License-Identifier: Apache-2.0
//! One job over unequal backends: each takes what suits its speed, and every item is done exactly once, whoever fails.
//!
//! ```
//! use spanker_steal::{Cpu, Emulated, Job, WorkStealingScheduler};
//! use std::{ops::Range, sync::Arc, time::Duration};
//!
//! let work = |items: Range<usize>, out: &mut [u8]| {
//!     items.zip(out.chunks_exact_mut(8)).for_each(|(item, out)| out.copy_from_slice(&item.to_le_bytes()));
//!     Ok(())
//! };
//! let card = Emulated::new(1e6, Duration::from_micros(50), work);
//! let scheduler = WorkStealingScheduler::new(vec![Arc::new(Cpu::new(2, work)), Arc::new(card)]);
//! let mut out = vec![0; 8 * 10_000];
//! let report = scheduler.run(&Job::new(10_000, 8), &mut out)?;
//! assert_eq!((report.done, &out[8 * 9999..]), (10_000, &9999u64.to_le_bytes()[..]));
//! # Ok::<(), spanker_steal::StealError>(())
//! ```
//!
//! | to | use |
//! |---|---|
//! | run a job, into memory or in order as it comes | [`WorkStealingScheduler`], [`Job`], [`Options`] |
//! | be a backend | [`Backend`], [`Capabilities`], [`Task`], [`Failure`] |
//! | have one | [`Cpu`], [`Emulated`] |
//! | know what happened | [`Report`], [`Incident`], [`StealError`] |
//! | rehearse troubles | [`Faulty`] on threads, [`simulate`] in virtual time, [`Fault`] |
//! | write another loop | [`Claims`] and [`Ledger`], the kernel without clock and threads |
//! | share a job among processes | [`RankClaims`] in each, over words that all can add to; [`simulate_ranks`] |
//!
//! `docs/stealing.md` in the repository says how much is taken, how it is sure, and how it is tested.
#![forbid(unsafe_code)]

/// The examples of the document.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/stealing.md")]
struct Stealing;

mod backend;
mod claims;
mod cpu;
mod dispatch;
mod emulated;
mod error;
mod fault;
mod faulty;
#[cfg(feature = "async")]
mod future;
mod job;
mod ledger;
mod ranks;
mod rate;
mod report;
mod rule;
mod scheduler;
mod sim;
mod spans;
mod stream;
mod sync;
mod task;

pub use backend::{Backend, Capabilities, Failure};
pub use claims::{Claim, Claims, MOST_BACKENDS, MOST_ITEMS, Piece};
pub use cpu::Cpu;
pub use emulated::Emulated;
pub use error::{StealError, Unfinished};
pub use fault::{Fault, Trouble};
pub use faulty::Faulty;
#[cfg(feature = "async")]
pub use future::{Finished, Running};
pub use job::{Cancel, Job, Options};
pub use ledger::audit::unit_sum;
pub use ledger::{Ledger, Member, Token, Verdict};
pub use ranks::{Ask, RankClaims};
pub use rate::{Implausible, Rate};
pub use report::{BackendReport, Incident, IncidentKind, Report};
pub use rule::efficiency_bound;
pub use scheduler::{Shard, WorkStealingScheduler};
pub use sim::{
    Origin, Scenario, SimBackend, Simulated, SimulatedRanks, ideal_seconds, origin, simulate,
    simulate_ranks,
};
pub use spans::Spans;
pub use stream::{Block, Stream};
pub use task::Task;
