// SPDX-License-Identifier: Apache-2.0
//! A backend with troubles, to rehearse them on real threads.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::backend::{Backend, Capabilities, Failure};
use crate::fault::{Fault, Trouble};
use crate::task::Task;

/// Another backend, with faults. Their times count from its first task.
///
/// # Examples
///
/// ```
/// use spanker_steal::{Cpu, Fault, Faulty, Job, Trouble, WorkStealingScheduler};
/// use std::sync::Arc;
/// use std::time::Duration;
///
/// let cpu = || Arc::new(Cpu::new(1, |_, _: &mut [u8]| Ok(())));
/// let kill = Fault { at: Duration::ZERO, trouble: Trouble::Kill };
/// let dead = Faulty::new(cpu(), vec![kill]).expect("a trouble that threads can have");
/// let scheduler = WorkStealingScheduler::new(vec![cpu(), Arc::new(dead)]);
/// let report = scheduler.run(&Job::new(1000, 1), &mut [0; 1000])?;
/// assert_eq!(report.backends[0].items, 1000);
/// # Ok::<(), spanker_steal::StealError>(())
/// ```
pub struct Faulty {
    inner: Arc<dyn Backend>,
    faults: Vec<(Fault, AtomicBool)>,
    begun: OnceLock<Instant>,
}

impl Faulty {
    /// `inner` with faults.
    ///
    /// # Errors
    ///
    /// A trouble that exists in virtual time only: answers that get lost, come twice or from earlier runs, claims that
    /// nobody hears of, clocks that jump.
    pub fn new(inner: Arc<dyn Backend>, faults: Vec<Fault>) -> Result<Faulty, Trouble> {
        for fault in &faults {
            match fault.trouble {
                Trouble::Kill
                | Trouble::Hang(_)
                | Trouble::Slow(_)
                | Trouble::Corrupt
                | Trouble::Garble
                | Trouble::Fail
                | Trouble::Lie => {}
                other => return Err(other),
            }
        }
        let faults = faults.into_iter().map(|fault| (fault, AtomicBool::new(false))).collect();
        Ok(Faulty { inner, faults, begun: OnceLock::new() })
    }

    /// Since the first task.
    fn now(&self) -> Duration {
        self.begun.get_or_init(Instant::now).elapsed()
    }

    /// A trouble that is due and that `wanted` describes. Those that pass happen once.
    fn due(&self, wanted: impl Fn(Trouble) -> bool) -> Option<Trouble> {
        self.fault(wanted).map(|fault| fault.trouble)
    }

    /// The same, with its time.
    fn fault(&self, wanted: impl Fn(Trouble) -> bool) -> Option<Fault> {
        let now = self.now();
        let mut lasting = None;
        for (fault, spent) in &self.faults {
            if fault.at > now || !wanted(fault.trouble) {
                continue;
            }
            if !fault.trouble.is_passing() {
                lasting = Some(*fault);
            } else if !spent.swap(true, Ordering::Relaxed) {
                return Some(*fault);
            }
        }
        lasting
    }

    /// Whether the backend is gone.
    fn alive(&self) -> Result<(), Failure> {
        match self.due(|t| t == Trouble::Kill) {
            Some(_) => Err(Failure::lasting("killed")),
            None => Ok(()),
        }
    }
}

/// For as long as the process lives.
fn hang() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

impl Backend for Faulty {
    fn id(&self) -> &'static str {
        self.inner.id()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn run(&self, items: Range<usize>, out: &mut [u8]) -> Result<(), Failure> {
        let begun = self.now();
        self.alive()?;
        let outcome = self.inner.run(items, out);
        if let Some(Fault { at, trouble: Trouble::Slow(factor) }) =
            self.fault(|t| matches!(t, Trouble::Slow(_)))
        {
            // What was done before the trouble took no longer.
            let slowed = self.now().saturating_sub(begun.max(at));
            let more = slowed.as_secs_f64() * (factor - 1.0).max(0.0);
            std::thread::sleep(Duration::try_from_secs_f64(more).unwrap_or(Duration::MAX));
        }
        match self.due(|t| matches!(t, Trouble::Hang(_))) {
            Some(Trouble::Hang(Some(time))) => std::thread::sleep(time),
            Some(_) => hang(),
            None => {}
        }
        self.alive()?;
        outcome?;
        if self.due(|t| t == Trouble::Corrupt).is_some() {
            out.iter_mut().for_each(|byte| *byte ^= 0x40);
        }
        Ok(())
    }

    fn submit(&self, mut task: Task) {
        let items = task.items();
        if let Err(failure) = self.run(items.clone(), task.output()) {
            return task.fail(failure);
        }
        match self.due(|t| matches!(t, Trouble::Garble | Trouble::Fail | Trouble::Lie)) {
            Some(Trouble::Garble) => {
                let sums = task.sums();
                if let Some(byte) = task.output().last_mut() {
                    *byte ^= 0x04;
                }
                task.complete_as(items, sums);
            }
            Some(Trouble::Fail) => task.fail(Failure::passing("rehearsed")),
            Some(_) => task.complete_as(items.start..items.end + 1, None),
            None => task.complete(),
        }
    }
}

impl std::fmt::Debug for Faulty {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Faulty").field("id", &self.id()).finish_non_exhaustive()
    }
}
