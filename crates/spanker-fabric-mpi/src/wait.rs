// SPDX-License-Identifier: Apache-2.0
//! How a rank waits: it asks MPI again and again, gives up its core in between, and checks now and then whether the
//! others are alive and in the same call.

use std::time::{Duration, Instant};

use spanker_fabric::FabricError;
use spanker_fabric::wire::{CALL, Notice};

use crate::fabric::MpiFabric;
use crate::ulfm;

/// How often a rank with a core of its own asks before it gives that up.
const SPINS: u32 = 500;
/// How often it asks before it reads the clock again.
const BETWEEN: u32 = 16;
/// Between checks for notices.
const NOTICES: Duration = Duration::from_millis(1);
/// Between checks of the processes of this host.
const PROCESSES: Duration = Duration::from_millis(5);
/// Between questions to MPI about ranks of other hosts.
const ELSEWHERE: Duration = Duration::from_secs(1);
/// After this, a rank reports to rank 0 which call it is waiting in.
const STUCK: Duration = Duration::from_millis(10);

/// The state of a rank's wait in one call.
#[derive(Debug)]
pub(crate) struct Wait {
    deadline: Instant,
    polls: u32,
    begun: Option<Instant>,
    next_notices: Option<Instant>,
    next_processes: Option<Instant>,
    next_elsewhere: Option<Instant>,
    has_reported: bool,
    /// Somebody is dead. What it had sent before may still have to be read.
    last_poll: bool,
}

impl Wait {
    pub(crate) fn until(deadline: Instant) -> Wait {
        Wait {
            deadline,
            polls: 0,
            begun: None,
            next_notices: None,
            next_processes: None,
            next_elsewhere: None,
            has_reported: false,
            last_poll: false,
        }
    }
}

/// Whether it is time, and when next.
fn is_due(next: &mut Option<Instant>, now: Instant, between: Duration) -> bool {
    let due = next.is_some_and(|next| now >= next);
    if due || next.is_none() {
        *next = Some(now + between);
    }
    due
}

impl MpiFabric {
    /// Nothing has come. Returns false when the deadline has passed.
    pub(crate) fn idle(&mut self, wait: &mut Wait, call: &[u8; CALL]) -> Result<bool, FabricError> {
        wait.polls = wait.polls.wrapping_add(1);
        let is_turn = wait.polls.is_multiple_of(self.life.polls_per_yield);
        if is_turn && (self.life.crowded || wait.polls > SPINS) {
            std::thread::yield_now();
        }
        if !wait.polls.is_multiple_of(BETWEEN) {
            return Ok(true);
        }
        let now = Instant::now();
        let begun = *wait.begun.get_or_insert(now);
        let is_over = now >= wait.deadline;
        if !is_due(&mut wait.next_notices, now, NOTICES) && !is_over {
            return Ok(true);
        }
        self.push_outgoing();
        self.check_notices(call)?;
        let dead = self.notices.dead(&self.life.watch).filter(|_| wait.last_poll);
        if let Some(rank) = dead {
            return Err(FabricError::Died { rank });
        }
        if is_due(&mut wait.next_processes, now, PROCESSES) || is_over {
            if is_due(&mut wait.next_elsewhere, now, ELSEWHERE) || is_over {
                self.ask_elsewhere();
            }
            wait.last_poll = self.dead().is_some();
        }
        if is_over {
            return match self.dead() {
                Some(rank) => Err(FabricError::Died { rank }),
                None => Ok(false),
            };
        }
        if now >= begun + STUCK && !wait.has_reported && self.life.rank > 0 {
            wait.has_reported = true;
            self.notify(0, &Notice::At { number: self.number, call: *call });
        }
        Ok(true)
    }

    /// A rank that is known to be dead, by its process or because it has left.
    pub(crate) fn dead(&self) -> Option<usize> {
        self.life.watch.check();
        self.notices.dead(&self.life.watch)
    }

    /// Asks MPI for the dead among the ranks that cannot be watched.
    fn ask_elsewhere(&self) {
        if self.life.watch.is_partial() {
            for rank in ulfm::failed(self.comm) {
                self.life.watch.bury(rank);
            }
        }
    }
}
