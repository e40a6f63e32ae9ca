// SPDX-License-Identifier: Apache-2.0
//! A persistent team of threads that shares one job at a time with its caller.
//!
//! The caller always works. Helpers that are awake join in; a helper that comes late finds its share
//! taken and goes back to sleep, and the caller never waits for one that has not begun. It does wait for
//! helpers in the middle of their last units, which takes longer when others want their core.
//!
//! Deliberately not a general thread pool: no queue, no nesting, no stealing while waiting.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{JoinHandle, Thread};

/// How many threads a call may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    /// One where waking others would cost more than it saves, else the whole team.
    Auto,
    /// This many, the caller included; no more than the team has.
    Exactly(usize),
}

/// More threads than this help no machine that people have.
const MOST: usize = 256;

impl FromStr for Threads {
    type Err = String;

    fn from_str(text: &str) -> Result<Threads, String> {
        match (text, text.parse::<usize>()) {
            ("auto", _) => Ok(Threads::Auto),
            (_, Ok(count @ 1..=MOST)) => Ok(Threads::Exactly(count)),
            _ => Err(format!("'{text}' threads: expected auto or 1 to {MOST}")),
        }
    }
}

/// Threads that wait for work. Dropping the team ends them.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// use spanker_reduce::Team;
///
/// let team = Team::new(3);
/// let done = AtomicUsize::new(0);
/// team.run(3, 100, &|_unit| {
///     done.fetch_add(1, Ordering::Relaxed);
/// });
/// assert_eq!(done.into_inner(), 100);
/// ```
#[derive(Debug)]
pub struct Team {
    shared: Arc<Shared>,
    /// Held while a job runs: a second caller finds it taken and works alone.
    turn: Mutex<()>,
    threads: usize,
    handles: Vec<JoinHandle<()>>,
}

/// A job, shared for as long as the gate says so.
#[derive(Clone, Copy)]
struct Job {
    work: *const (dyn Fn(usize) + Sync),
    participants: usize,
}

#[derive(Debug)]
struct Shared {
    /// Whether a job is open, how many helpers are inside it, and the job's number.
    gate: AtomicU64,
    job: UnsafeCell<Option<Job>>,
    /// The units left of each participant's share.
    shares: Box<[Share]>,
    sleepers: Box<[Sleeper]>,
    panicked: Mutex<Option<Box<dyn Any + Send>>>,
    ending: AtomicBool,
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Job").field("participants", &self.participants).finish_non_exhaustive()
    }
}

// SAFETY: `job` is written only by the caller that holds `turn` while the gate is shut and nobody is
// inside, and read only by helpers that are inside. What it points to is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as for `Sync`; the pointer is never used outside an open gate.
unsafe impl Send for Shared {}

/// One participant's units, on a cache line of their own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Share {
    at_work: AtomicBool,
    next: AtomicUsize,
    end: AtomicUsize,
}

#[derive(Debug)]
#[repr(align(128))]
struct Sleeper {
    asleep: AtomicBool,
    thread: OnceLock<Thread>,
}

const INSIDE: u64 = 1;
const INSIDE_MASK: u64 = 0xffff;
const OPEN: u64 = 1 << 16;
const NUMBER: u64 = 1 << 17;

/// How often an idle helper polls for work before it sleeps: about a millisecond, which is what waking
/// it can cost, and the time between two collectives of a running model.
const POLLS_BEFORE_SLEEP: usize = 80_000;

/// How often the caller polls for the end of the helpers before it gives up its core: microseconds.
const POLLS_BEFORE_YIELD: usize = 200;

/// How many units nobody steals from a participant that is at work.
const LEFT_TO_OWNER: usize = 2;

impl Team {
    /// A team of `threads`, the caller included. No thread is started for one.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        let threads = threads.clamp(1, INSIDE_MASK as usize);
        let shares = (0..threads).map(|_| Share::default()).collect();
        let sleepers = (1..threads)
            .map(|_| Sleeper { asleep: AtomicBool::new(false), thread: OnceLock::new() })
            .collect();
        let shared = Arc::new(Shared {
            gate: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            shares,
            sleepers,
            panicked: Mutex::new(None),
            ending: AtomicBool::new(false),
        });
        let handles: Vec<JoinHandle<()>> = (1..threads)
            .map_while(|place| {
                let shared = Arc::clone(&shared);
                // A machine that gives no more threads gets a smaller team, not a failure.
                std::thread::Builder::new()
                    .name(format!("spanker-team-{place}"))
                    .spawn(move || shared.help(place))
                    .ok()
            })
            .collect();
        Team { shared, turn: Mutex::new(()), threads: handles.len() + 1, handles }
    }

    /// The process's own team, one thread for each core that the process may use. It starts with the
    /// first call and sleeps when idle.
    #[must_use]
    pub fn global() -> &'static Team {
        static GLOBAL: OnceLock<Team> = OnceLock::new();
        GLOBAL.get_or_init(|| {
            Team::new(std::thread::available_parallelism().map_or(1, std::num::NonZero::get))
        })
    }

    /// Threads in the team, the caller included.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Calls `work` once for each unit of `0..units`, on up to `threads` threads.
    ///
    /// Participant `p` begins with the `p`-th part of the units, so that repeated calls find their
    /// caches warm, and then steals what others have left.
    ///
    /// # Panics
    /// If `work` panics, on any thread: the panic continues here when nobody runs `work` any more.
    pub fn run(&self, threads: usize, units: usize, work: &(dyn Fn(usize) + Sync)) {
        let participants = threads.min(self.threads).min(units);
        let turn = match participants {
            0 | 1 => None,
            _ => match self.turn.try_lock() {
                Ok(turn) => Some(turn),
                Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
                Err(std::sync::TryLockError::WouldBlock) => None,
            },
        };
        let Some(_turn) = turn else {
            (0..units).for_each(work);
            return;
        };
        // A caller that panicked itself has left its helpers' panics behind.
        self.shared.take_panic();
        self.shared.deal(participants, units);
        // SAFETY: only the lifetime changes. The gate is shut before `work` goes out of scope, on a
        // panic too (`Open` does it when dropped), and no helper is inside a shut gate.
        let work: *const (dyn Fn(usize) + Sync) =
            unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), _>(work) };
        let open = Open::new(&self.shared, Job { work, participants });
        // SAFETY: `work` is alive until `open` is dropped.
        self.shared.run_units(0, participants, unsafe { &*work });
        drop(open);
        if let Some(payload) = self.shared.take_panic() {
            resume_unwind(payload);
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.ending.store(true, Ordering::SeqCst);
        for handle in &self.handles {
            handle.thread().unpark();
        }
        for handle in self.handles.drain(..) {
            // A helper catches the panics of its work; its own loop has none to report.
            let _ = handle.join();
        }
    }
}

/// A job that helpers may enter. Dropping it shuts the gate and waits until all have left.
struct Open<'a> {
    shared: &'a Shared,
}

impl<'a> Open<'a> {
    fn new(shared: &'a Shared, job: Job) -> Self {
        // SAFETY: the gate is shut, nobody is inside, and the caller holds the turn.
        unsafe { *shared.job.get() = Some(job) };
        shared.gate.fetch_add(OPEN + NUMBER, Ordering::SeqCst);
        for sleeper in &shared.sleepers[..job.participants - 1] {
            let asleep = sleeper.asleep.load(Ordering::SeqCst);
            if let Some(thread) = sleeper.thread.get().filter(|_| asleep) {
                thread.unpark();
            }
        }
        Open { shared }
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.shared.gate.fetch_and(!OPEN, Ordering::SeqCst);
        let mut polls = 0usize;
        while self.shared.gate.load(Ordering::Acquire) & INSIDE_MASK != 0 {
            polls += 1;
            // A helper that was put off its core in the middle of a unit may need this one.
            if polls > POLLS_BEFORE_YIELD {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
    }
}

/// A helper inside the gate. Dropping it leaves, whatever happened inside.
struct Inside<'a>(&'a Shared);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.gate.fetch_sub(INSIDE, Ordering::Release);
    }
}

impl Shared {
    fn take_panic(&self) -> Option<Box<dyn Any + Send>> {
        self.panicked.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Deals `units` to `participants` in contiguous shares.
    fn deal(&self, participants: usize, units: usize) {
        for (place, share) in self.shares[..participants].iter().enumerate() {
            let range = spanker_collective::chunk(units, participants, place);
            share.at_work.store(false, Ordering::Relaxed);
            share.next.store(range.start, Ordering::Relaxed);
            share.end.store(range.end, Ordering::Relaxed);
        }
    }

    /// Runs the units of participant `place` and then those that others will not come to soon.
    fn run_units(&self, place: usize, participants: usize, work: &(dyn Fn(usize) + Sync)) {
        for turn in 0..participants {
            let share = &self.shares[(place + turn) % participants];
            let end = share.end.load(Ordering::Relaxed);
            if turn == 0 {
                share.at_work.store(true, Ordering::Relaxed);
            }
            loop {
                // The last units are left to an owner who is at work: they are in that core's cache,
                // and moving them, now and back for the next call, costs more than waiting for them.
                // Such an owner is inside the gate and does not leave before its share is done.
                let at_work = turn > 0 && share.at_work.load(Ordering::Relaxed);
                let reserved = if at_work { LEFT_TO_OWNER } else { 0 };
                if share.next.load(Ordering::Relaxed) + reserved >= end {
                    break;
                }
                let unit = share.next.fetch_add(1, Ordering::Relaxed);
                if unit >= end {
                    break;
                }
                work(unit);
            }
        }
    }

    /// A helper's life: wait for a job that it has a place in, enter, work, leave.
    fn help(&self, place: usize) {
        let sleeper = &self.sleepers[place - 1];
        sleeper.thread.get_or_init(std::thread::current);
        let mut last = 0;
        loop {
            let Some(number) = self.wait_for_job(sleeper, last) else { return };
            last = number;
            if !self.enter(number) {
                continue;
            }
            let inside = Inside(self);
            // SAFETY: inside the gate the job is set and does not change.
            let job = unsafe { *self.job.get() };
            if let Some(job) = job.filter(|job| place < job.participants) {
                // SAFETY: the caller keeps `work` alive until everyone has left.
                let work = unsafe { &*job.work };
                let outcome = catch_unwind(AssertUnwindSafe(|| {
                    self.run_units(place, job.participants, work);
                }));
                if let Err(payload) = outcome {
                    let mut slot = self.panicked.lock().unwrap_or_else(PoisonError::into_inner);
                    match *slot {
                        None => *slot = Some(payload),
                        // One panic is propagated. Dropping another's payload could panic here.
                        Some(_) => std::mem::forget(payload),
                    }
                }
            }
            drop(inside);
        }
    }

    /// Waits until a job newer than `last` is open and returns its number, or `None` at the end.
    fn wait_for_job(&self, sleeper: &Sleeper, last: u64) -> Option<u64> {
        let fresh = || {
            let gate = self.gate.load(Ordering::SeqCst);
            (gate & OPEN != 0 && gate / NUMBER != last).then_some(gate / NUMBER)
        };
        loop {
            for _ in 0..POLLS_BEFORE_SLEEP {
                if let Some(number) = fresh() {
                    return Some(number);
                }
                std::hint::spin_loop();
            }
            sleeper.asleep.store(true, Ordering::SeqCst);
            // Once woken, it polls for a while again: the job it was woken for may be over before it is
            // awake, and the next one is then likely to follow soon.
            if fresh().is_none() && !self.ending.load(Ordering::SeqCst) {
                std::thread::park();
            }
            sleeper.asleep.store(false, Ordering::SeqCst);
            if self.ending.load(Ordering::SeqCst) {
                return None;
            }
        }
    }

    /// Goes inside, unless the gate has been shut or another job has begun.
    fn enter(&self, number: u64) -> bool {
        self.gate
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |gate| {
                (gate & OPEN != 0 && gate / NUMBER == number).then_some(gate + INSIDE)
            })
            .is_ok()
    }
}
