// SPDX-License-Identifier: Apache-2.0
//! The job on real threads, and an interrupt that ends the run with what was done.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use spanker_steal::WorkStealingScheduler;
use spanker_twin::Signals;

use super::material::Material;
use super::outcome::Outcome;
use super::planned::{by_rule, ideal};
use super::prepare::prepare;
use super::view::View;
use super::{Setup, origin, work};

/// The origin's rule is not run where it would take more seconds.
const MOST_ORIGIN: f64 = 60.0;

/// Whether the user has had enough.
pub(super) struct Stop {
    signals: Signals,
    asked: AtomicBool,
}

impl Stop {
    /// Threads that are started later leave interrupts to this, so it comes first.
    pub(super) fn new() -> anyhow::Result<Stop> {
        Ok(Stop { signals: Signals::take()?, asked: AtomicBool::new(false) })
    }

    pub(super) fn asked(&self) -> bool {
        if self.signals.caught().end {
            self.asked.store(true, Ordering::Relaxed);
        }
        self.asked.load(Ordering::Relaxed)
    }
}

/// Runs it on real threads, and by the origin's rule.
pub(super) fn run(setup: &Setup) -> anyhow::Result<Outcome> {
    let stop = Stop::new()?;
    let prepared = prepare(setup, &stop)?;
    let work = &prepared.work;
    let scenario = setup.scenario(&prepared.rates);
    let calls = Arc::default();
    let scheduler = WorkStealingScheduler::new(prepared.backends(setup, &calls)?);
    let items = setup.job.items();
    // Touched, so that its pages are there.
    let mut out = vec![0xff; items * work.bytes()];
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
    outcome.wrong_bytes = work.is_known().then(|| {
        let expected = |items, out: &mut [u8]| work.recall(items, out);
        work::wrong_bytes(items, work.bytes(), &outcome.missing, &out, expected)
    });
    if let Material::Prompts(questions, _) = &setup.material {
        outcome.answers = Some(questions.read(&out, &outcome.missing));
    }
    // Nobody waits for a rule that is known to take for ever.
    let worth_it = outcome.ideal_seconds.is_finite() && by_rule(&scenario).seconds <= MOST_ORIGIN;
    if setup.origin && !outcome.interrupted && worth_it {
        outcome.origin = origin::run(setup, &scenario, &prepared, &stop)?;
        outcome.interrupted = stop.asked();
    }
    Ok(outcome)
}
