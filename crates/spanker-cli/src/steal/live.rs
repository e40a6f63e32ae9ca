// SPDX-License-Identifier: Apache-2.0
//! The job on real threads: backends as the command line describes them, and an interrupt that ends the run with
//! what was done.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use spanker_steal::{
    Backend, Capabilities, Cpu, Emulated, Failure, Fault, Faulty, Trouble, WorkStealingScheduler,
};
use spanker_twin::Signals;

use super::crew::Kind;
use super::outcome::Outcome;
use super::planned::{Pace, ideal};
use super::view::View;
use super::work::{self, BYTES, Work};
use super::{JobKind, Setup, origin};
use crate::{Interrupted, output};

/// Whether the user has had enough.
pub(super) struct Stop {
    signals: Signals,
    asked: AtomicBool,
}

impl Stop {
    /// Threads that are started later leave interrupts to this, so it comes first.
    fn new() -> anyhow::Result<Stop> {
        Ok(Stop { signals: Signals::take()?, asked: AtomicBool::new(false) })
    }

    pub(super) fn asked(&self) -> bool {
        if self.signals.caught().end {
            self.asked.store(true, Ordering::Relaxed);
        }
        self.asked.load(Ordering::Relaxed)
    }
}

/// A backend under the name and with the properties that it is given.
struct Station {
    id: &'static str,
    capabilities: Capabilities,
    inner: Arc<dyn Backend>,
    calls: Arc<AtomicUsize>,
}

impl Backend for Station {
    fn id(&self) -> &'static str {
        self.id
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn run(&self, items: Range<usize>, out: &mut [u8]) -> Result<(), Failure> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.inner.run(items, out)
    }
}

/// Fresh backends, with their faults. They count the tasks that they begin in `calls`.
pub(super) fn backends(
    setup: &Setup,
    work: &Arc<Work>,
    pace: Pace,
    calls: &Arc<AtomicUsize>,
) -> anyhow::Result<Vec<Arc<dyn Backend>>> {
    let backend = |(place, kind): (usize, &Kind)| -> anyhow::Result<Arc<dyn Backend>> {
        let (rate, launch) = (pace.lane(*kind), setup.launch(*kind));
        let told = setup.told;
        let station = Station {
            id: kind.id(),
            capabilities: Capabilities {
                in_flight: kind.lanes(),
                rate: told.then_some(rate),
                launch: told.then_some(launch),
                most_items: None,
                trusted: matches!(kind, Kind::Cpu { .. }),
            },
            inner: inner(setup, *kind, work, rate, launch),
            calls: Arc::clone(calls),
        };
        // A task hangs, and a backend does if a task of every lane does.
        let often = |fault: &Fault| match fault.trouble {
            Trouble::Hang(_) => vec![*fault; kind.lanes()],
            _ => vec![*fault],
        };
        let faults: Vec<_> = setup.faults[place].iter().flat_map(often).collect();
        if faults.is_empty() {
            return Ok(Arc::new(station));
        }
        let faulty = Faulty::new(Arc::new(station), faults);
        let refused = |trouble| anyhow::anyhow!("threads cannot have the trouble {trouble:?}");
        Ok(Arc::new(faulty.map_err(refused)?))
    };
    setup.kinds.iter().enumerate().map(backend).collect()
}

/// What computes, or pretends to.
fn inner(
    setup: &Setup,
    kind: Kind,
    work: &Arc<Work>,
    rate: f64,
    launch: Duration,
) -> Arc<dyn Backend> {
    let work = Arc::clone(work);
    if let (Kind::Cpu { threads }, JobKind::Hash) = (kind, setup.kind) {
        return Arc::new(Cpu::new(threads, move |items, out: &mut [u8]| {
            work.compute(items, out);
            Ok(())
        }));
    }
    let emulated = Emulated::new(rate, launch, move |items, out: &mut [u8]| {
        work.recall(items, out);
        Ok(())
    });
    let heat = |emulated: Emulated<_>, (items, factor): &(Range<usize>, f64)| {
        emulated.hot(items.clone(), *factor)
    };
    Arc::new(setup.hot.iter().fold(emulated, heat))
}

/// What the items are, and how fast who is.
fn prepare(setup: &Setup, stop: &Stop) -> anyhow::Result<(Arc<Work>, Pace)> {
    let progress = |text: &str| {
        if !setup.quiet {
            output::progress(text)
        }
    };
    let prepared = match setup.kind {
        JobKind::Sleep => (Work::Sleep, Pace::even(setup.base)),
        JobKind::Hash => {
            progress("computing what every output should be ..");
            let work = Work::hash(setup.job.items(), setup.hot.clone(), &|| stop.asked());
            let work = work.ok_or(Interrupted)?;
            progress("measuring how fast a thread is ..");
            let base = work::hash_rate(1);
            let thread = if setup.threads > 1 { work::hash_rate(setup.threads) } else { base };
            (work, Pace { thread, base })
        }
    };
    progress("");
    if stop.asked() {
        return Err(Interrupted.into());
    }
    Ok((Arc::new(prepared.0), prepared.1))
}

/// Runs it on real threads, and by the origin's rule.
pub(super) fn run(setup: &Setup) -> anyhow::Result<Outcome> {
    let stop = Stop::new()?;
    let (work, pace) = prepare(setup, &stop)?;
    let scenario = setup.scenario(pace);
    let calls = Arc::default();
    let scheduler = WorkStealingScheduler::new(backends(setup, &work, pace, &calls)?);
    let items = setup.job.items();
    // Touched, so that its pages are there.
    let mut out = vec![0xff; items * BYTES];
    let cancel = setup.job.canceller();
    let mut view = View::new(setup.quiet);
    let begun = Instant::now();
    let ended = scheduler.run_watched(&setup.job, &mut out, |report| {
        if stop.asked() {
            cancel.cancel();
        }
        view.show(report);
    });
    let seconds = begun.elapsed().as_secs_f64();
    view.clear();
    let mut outcome = Outcome::of(setup, ended);
    outcome.seconds = seconds;
    outcome.ideal_seconds = ideal(&scenario);
    outcome.launches = calls.load(Ordering::Relaxed);
    let expected = |items, out: &mut [u8]| work.recall(items, out);
    outcome.wrong_bytes = work::wrong_bytes(items, &outcome.missing, &out, expected);
    if setup.origin && !outcome.interrupted && outcome.ideal_seconds.is_finite() {
        outcome.origin = origin::run(setup, &scenario, &work, pace, &stop)?;
        outcome.interrupted = stop.asked();
    }
    Ok(outcome)
}
