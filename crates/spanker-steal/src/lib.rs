// SPDX-License-Identifier: Apache-2.0
//! One job over unequal backends: each takes what suits its speed, and every item is done exactly once, whoever fails.
#![forbid(unsafe_code)]

mod backend;
mod claims;
mod cpu;
mod dispatch;
mod emulated;
mod error;
mod fault;
mod faulty;
mod job;
mod ledger;
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
pub use job::{Cancel, Job, Options};
pub use ledger::audit::unit_sum;
pub use ledger::{Ledger, Member, Token, Verdict};
pub use rate::{Implausible, Rate};
pub use report::{BackendReport, Incident, IncidentKind, Report};
pub use rule::efficiency_bound;
pub use scheduler::{Shard, WorkStealingScheduler};
pub use sim::{Origin, Scenario, SimBackend, Simulated, ideal_seconds, origin, simulate};
pub use spans::Spans;
pub use stream::{Block, Stream};
pub use task::Task;
