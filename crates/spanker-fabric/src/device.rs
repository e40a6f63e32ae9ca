// SPDX-License-Identifier: Apache-2.0
//! Collectives on cards: the host gives each card a program of descriptors and waits; the data stays in the
//! cards' memory and travels over the links between them.
//!
//! * [`lower`]: a schedule as one program for each card, without a way to deadlock.
//! * [`DeviceGroup`] and [`DeviceCall`]: buffers on the cards, the run, its [`Timing`].
//! * [`Deadline`] and [`DeviceError`]: how long cards may be silent, and who is named if something fails.
//! * [`DeviceGroup::message_time`]: what one message takes from a card to its neighbour.
//! * [`examine`] and [`examine_pair`]: whether one card copies and adds as it should, and whether what two
//!   neighbours send each other arrives as it was.
//!
//! Nothing here reads a clock to decide anything: waiting is counted in the slices that cards were given. So
//! the same code runs with cards in virtual time.
//!
//! Not here: which algorithm is the best one (`spanker-plan`), and how cards are found
//! (`spanker-scheduler`).

mod error;
mod examine;
mod feed;
mod group;
mod lower;
mod probe;
mod watch;
mod wiring;

pub use error::{DeviceError, DeviceErrorKind};
pub use examine::{examine, examine_pair};
pub use group::{BegunJob, DeviceCall, DeviceGroup, Timing};
pub use lower::{DATA, Lowered, RELAY, SCRATCH, lower};
pub use watch::Deadline;

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// A job's number that no other program and no other call is likely to have.
fn job_number() -> u64 {
    static START: OnceLock<u64> = OnceLock::new();
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let start = START.get_or_init(|| RandomState::new().build_hasher().finish());
    let number = start.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
    // Zero stands for all jobs.
    if number == 0 { job_number() } else { number }
}
