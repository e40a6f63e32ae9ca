// SPDX-License-Identifier: Apache-2.0
//! The deadline of calls that MPI does not come back from.
//!
//! MPI's own collectives block, and nothing can be done to make them return. So a thread checks every 50 ms
//! whether the call that is under way is past its deadline, or needs a rank that is dead. If so it says what it
//! knows and ends the process with code 1: the launcher cleans up the rest. Arming is two stores.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::raw::leave_at_once;
use crate::watch::Watch;

/// How often the thread checks.
const INTERVAL: Duration = Duration::from_millis(50);

/// How much longer each rank waits than the one before it, so that one speaks for all.
const TURN: Duration = Duration::from_millis(150);

/// Calls that block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Blocking {
    Start,
    Introduction,
    Duplicate,
    Finalize,
    Native,
    Plain,
    Window,
}

impl Blocking {
    const ALL: [Blocking; 7] = [
        Blocking::Start,
        Blocking::Introduction,
        Blocking::Duplicate,
        Blocking::Finalize,
        Blocking::Native,
        Blocking::Plain,
        Blocking::Window,
    ];

    fn words(self) -> &'static str {
        match self {
            Blocking::Start => "MPI_Init_thread",
            Blocking::Introduction => "the introduction of the ranks",
            Blocking::Duplicate => "MPI_Comm_dup",
            Blocking::Finalize => "MPI_Finalize",
            Blocking::Native => "a collective of MPI's own",
            Blocking::Plain => "the comparison with plain MPI",
            Blocking::Window => "an operation on rank 0's memory",
        }
    }
}

/// What the thread checks.
#[derive(Debug)]
pub(crate) struct Watchdog {
    epoch: Instant,
    /// Nanoseconds after `epoch`; nothing is under way at 0.
    deadline: AtomicU64,
    call: AtomicU8,
    watch: OnceLock<(usize, Arc<Watch>)>,
}

static WATCHDOG: OnceLock<Watchdog> = OnceLock::new();

/// Ends the guard of a call when it is dropped.
pub(crate) struct Armed(&'static Watchdog);

impl Drop for Armed {
    #[inline]
    fn drop(&mut self) {
        self.0.deadline.store(0, Ordering::Release);
    }
}

/// The process's watchdog, with its thread.
pub(crate) fn watchdog() -> &'static Watchdog {
    WATCHDOG.get_or_init(|| {
        // Without its thread there is no guard, and a machine that is out of threads soon says so elsewhere.
        let _ = std::thread::Builder::new().name("spanker-watchdog".into()).spawn(|| {
            loop {
                std::thread::sleep(INTERVAL);
                if let Some(dog) = WATCHDOG.get() {
                    dog.check();
                }
            }
        });
        Watchdog {
            epoch: Instant::now(),
            deadline: AtomicU64::new(0),
            call: AtomicU8::new(0),
            watch: OnceLock::new(),
        }
    })
}

impl Watchdog {
    /// Sets which process is which rank, as soon as that is known.
    pub(crate) fn introduce(&self, rank: usize, watch: &Arc<Watch>) {
        let _ = self.watch.set((rank, Arc::clone(watch)));
    }

    /// Guards a call that is about to block.
    pub(crate) fn arm(&'static self, call: Blocking, deadline: Instant) -> Armed {
        self.arm_at(call, self.nanos(deadline))
    }

    /// A deadline as it is stored.
    pub(crate) fn nanos(&self, deadline: Instant) -> u64 {
        let after = deadline.saturating_duration_since(self.epoch).as_nanos();
        u64::try_from(after).unwrap_or(u64::MAX).max(1)
    }

    /// As [`Watchdog::arm`], with a deadline as it is stored.
    #[inline]
    pub(crate) fn arm_at(&'static self, call: Blocking, nanos: u64) -> Armed {
        self.call.store(call as u8, Ordering::Relaxed);
        self.deadline.store(nanos, Ordering::Release);
        Armed(self)
    }

    fn check(&self) {
        let deadline = self.deadline.load(Ordering::Acquire);
        if deadline == 0 {
            return;
        }
        let call = Blocking::ALL[usize::from(self.call.load(Ordering::Relaxed))];
        // Ranks end one after the other when MPI ends, and whose memory it is matters to operations on it.
        let dead = match self.watch.get() {
            Some((_, watch)) if call == Blocking::Window => watch.check().filter(|rank| *rank == 0),
            Some((_, watch)) if call != Blocking::Finalize => watch.check(),
            _ => None,
        };
        let over = self.epoch.elapsed().as_nanos() >= u128::from(deadline);
        // What was under way may be complete by now.
        if (dead.is_none() && !over) || self.deadline.load(Ordering::Acquire) != deadline {
            return;
        }
        self.end(call, dead)
    }

    fn end(&self, call: Blocking, dead: Option<usize>) -> ! {
        let said = match self.watch.get() {
            None => format!("deadline passed in {}", call.words()),
            Some((rank, watch)) => {
                let lower = (0..*rank).filter(|&rank| !watch.is_dead(rank)).count();
                std::thread::sleep((TURN * lower as u32).min(Duration::from_secs(2)));
                // Whoever ended meanwhile has spoken.
                watch.check();
                if (0..*rank).filter(|&rank| !watch.is_dead(rank)).count() < lower {
                    leave_at_once(1);
                }
                self.findings(watch, *rank, call, dead)
            }
        };
        eprintln!("error: {said}");
        leave_at_once(1)
    }

    fn findings(&self, watch: &Watch, rank: usize, call: Blocking, dead: Option<usize>) -> String {
        if let Some(dead) = dead {
            return format!("rank {dead} died (in {})", call.words());
        }
        let stopped: Vec<String> = watch
            .stopped()
            .into_iter()
            .map(|(rank, pid)| format!("rank {rank} (process {pid}) is stopped"))
            .collect();
        let why = match (stopped.is_empty(), watch.is_partial()) {
            (false, _) => stopped.join(", "),
            (true, false) => "every rank is alive, so one of them does not take part".into(),
            (true, true) => {
                "every rank of this host is alive: one does not take part, or another host is gone"
                    .into()
            }
        };
        format!("rank {rank}: deadline passed in {}: {why}", call.words())
    }
}
