// SPDX-License-Identifier: Apache-2.0
//! The same job by the first version's rule, to compare: equal units from a counter, and a plain thread for every lane
//! that takes units until none is left and stops at its first failure. Nobody does again what is lost.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use spanker_steal::{Scenario, WorkStealingScheduler};

use super::Setup;
use super::live::{Stop, backends};
use super::outcome::ByOrigin;
use super::planned::{Pace, by_rule};
use super::work::{BYTES, Work, Wrong};
use crate::output;

/// How often the keeper looks up.
const LOOK: Duration = Duration::from_millis(50);
/// Lanes that hang are given up this long after the end that virtual time gives, and as much again as that takes.
const GRACE: Duration = Duration::from_secs(1);

/// A unit that was done.
struct Done {
    items: usize,
    wrong: Wrong,
    at: Duration,
}

/// Runs the job by the first version's rule over fresh backends. Nothing if the user has had enough.
pub(super) fn run(
    setup: &Setup,
    scenario: &Scenario,
    work: &Arc<Work>,
    pace: Pace,
    stop: &Stop,
) -> anyhow::Result<Option<ByOrigin>> {
    let foreseen = Duration::try_from_secs_f64(by_rule(scenario).seconds).unwrap_or(Duration::MAX);
    if !setup.quiet {
        output::progress(&format!("the same by the origin's rule, about {foreseen:.1?} .."));
    }
    let (backends, _) = backends(setup, work, pace)?;
    let scheduler = Arc::new(WorkStealingScheduler::new(backends.clone()));
    let shards = Arc::new(scheduler.try_partition(setup.job.items())?);
    let (sender, done) = mpsc::channel();
    let begun = Instant::now();
    for (backend, kind) in backends.into_iter().zip(&setup.kinds) {
        for _ in 0..kind.lanes() {
            let (backend, scheduler, shards) =
                (Arc::clone(&backend), Arc::clone(&scheduler), Arc::clone(&shards));
            let (work, sender) = (Arc::clone(work), sender.clone());
            // A lane that hangs is left behind: it ends with the process.
            thread::Builder::new().name("origin lane".into()).spawn(move || {
                let mut out = Vec::new();
                while let Some(shard) = shards.get(scheduler.claim_next_unit()) {
                    let items = shard.work_range.clone();
                    out.resize(items.len() * BYTES, 0);
                    if backend.run(items.clone(), &mut out).is_err() {
                        return;
                    }
                    let at = begun.elapsed();
                    let wrong = work.wrong_in(items.clone(), &out);
                    if sender.send(Done { items: items.len(), wrong, at }).is_err() {
                        return;
                    }
                }
            })?;
        }
    }
    drop(sender);
    let end = foreseen.saturating_mul(2).saturating_add(GRACE);
    let mut result = ByOrigin { seconds: 0.0, done: 0, wrong_bytes: None };
    let mut wrong_bytes = 0;
    while begun.elapsed() < end {
        if stop.asked() {
            output::progress_done();
            return Ok(None);
        }
        match done.recv_timeout(LOOK) {
            Ok(unit) => {
                result.done += unit.items - unit.wrong.items;
                result.seconds = result.seconds.max(unit.at.as_secs_f64());
                wrong_bytes += unit.wrong.bytes;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    output::progress_done();
    result.wrong_bytes = Some(wrong_bytes);
    Ok(Some(result))
}
