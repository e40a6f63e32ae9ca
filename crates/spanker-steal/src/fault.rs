// SPDX-License-Identifier: Apache-2.0
//! Things that go wrong with backends, to rehearse them: in virtual time ([`simulate`](crate::simulate)) and on real threads
//! ([`Faulty`](crate::Faulty)).

use std::time::Duration;

/// Something that goes wrong with one backend.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fault {
    /// Since the start of the run.
    pub at: Duration,
    /// What it is.
    pub trouble: Trouble,
}

/// What can go wrong. Some troubles stay; the others happen to the first task that they meet.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Trouble {
    /// The backend is gone, and what it had with it; that it is gone is noticed. One that is gone without a word hangs.
    Kill,
    /// The task that meets this takes so much longer; without a time, it never ends.
    Hang(Option<Duration>),
    /// Everything takes so many times as long from then on.
    Slow(f64),
    /// Every byte that the backend computes is wrong from then on.
    Corrupt,
    /// A task's bytes change on their way, after their sums were made.
    Garble,
    /// A task fails.
    Fail,
    /// A task's answer is for other items.
    Lie,
    /// A task's answer gets lost.
    Mute,
    /// A task is answered twice.
    Echo,
    /// A task is claimed, and nothing is heard of it ever after.
    Vanish,
    /// An answer of an earlier run comes in the middle of a task.
    Stale,
    /// The clock by which tasks are timed jumps by so many seconds, for everybody.
    Clock(f64),
}

impl Trouble {
    /// Whether it happens to one task only.
    #[must_use]
    pub fn is_passing(self) -> bool {
        !matches!(self, Trouble::Kill | Trouble::Slow(_) | Trouble::Corrupt | Trouble::Clock(_))
    }
}
