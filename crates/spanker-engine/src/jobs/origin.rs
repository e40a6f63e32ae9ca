// SPDX-License-Identifier: Apache-2.0
//! The same job by the first version's rule, to compare: equal units from a counter, and a plain thread for every lane
//! that takes units until none is left and stops at its first failure. Nobody does again what is lost.

use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use spanker_steal::{Fault, Scenario, Trouble, WorkStealingScheduler};

use super::backends::BackendKind;
use super::expected::Wrong;
use super::report::JobReport;
use super::request::PreparedJob;
use super::simulated::by_rule;
use super::workers::Workers;
use super::{JobError, JobWatch};
use crate::error::Result;

/// How often it is looked at whether the run is over.
const LOOK: Duration = Duration::from_millis(50);
/// Lanes that do not end are given up this long after the end that virtual time gives, and as much again as that takes.
const GRACE: Duration = Duration::from_secs(1);

/// What a lane has done: a unit of so many items, what is wrong with them, and when; or nothing, and it takes no more.
type News = Option<(usize, Wrong, Duration)>;

/// Lanes that will not end, as far as one knows at some time.
fn hung(job: &PreparedJob, now: Duration) -> usize {
    let hangs = |(kind, faults): (&BackendKind, &Vec<Fault>)| {
        let due = |fault: &Fault| fault.trouble == Trouble::Hang(None) && fault.at + LOOK <= now;
        if faults.iter().any(due) { job.lanes(*kind) } else { 0 }
    };
    job.kinds().iter().zip(&job.faults).map(hangs).sum()
}

/// Runs the job by the first version's rule over fresh backends, and adds to its report what came of that.
pub(super) fn run(
    job: &PreparedJob,
    scenario: &Scenario,
    workers: &Workers,
    watch: &JobWatch<'_>,
    report: &mut JobReport,
) -> Result<()> {
    let foreseen = Duration::try_from_secs_f64(by_rule(scenario).seconds).unwrap_or(Duration::MAX);
    (watch.progress)(&format!("the same by the origin's rule, about {foreseen:.1?} .."));
    let backends = workers.with_faults(job, &Arc::default())?;
    let scheduler = Arc::new(WorkStealingScheduler::new(backends.clone()));
    let shards = Arc::new(scheduler.try_partition(job.job.items()).map_err(JobError::from)?);
    let (sender, news) = mpsc::channel();
    let begun = Instant::now();
    let mut working = 0;
    for (backend, kind) in backends.into_iter().zip(job.kinds()) {
        for _ in 0..job.lanes(*kind) {
            let (backend, expected) = (Arc::clone(&backend), Arc::clone(&workers.expected));
            let (scheduler, shards) = (Arc::clone(&scheduler), Arc::clone(&shards));
            let (bytes, sender) = (job.bytes, sender.clone());
            // Nobody listens after the end, and that is fine.
            let tell = move |news: News| sender.send(news).unwrap_or(());
            let work = move || {
                let mut out = Vec::new();
                while let Some(shard) = shards.get(scheduler.claim_next_unit()) {
                    let items = shard.work_range.clone();
                    out.resize(items.len() * bytes, 0);
                    if backend.run(items.clone(), &mut out).is_err() {
                        break;
                    }
                    let (at, count) = (begun.elapsed(), items.len());
                    tell(Some((count, expected.wrong_in(items, bytes, &out), at)));
                }
                tell(None);
            };
            // A lane that hangs is left behind: it ends with the process.
            let thread = thread::Builder::new().name("origin lane".into()).spawn(work);
            thread.map_err(|error| JobError::thread("a lane", &error))?;
            working += 1;
        }
    }
    let end = foreseen.saturating_mul(2).saturating_add(GRACE);
    let (mut seconds, mut right, mut wrong_bytes) = (0.0, 0, 0);
    while working > hung(job, begun.elapsed()) && begun.elapsed() < end && !(watch.stop)() {
        match news.recv_timeout(LOOK) {
            Ok(Some((items, wrong, at))) => {
                right += items - wrong.items;
                seconds = at.as_secs_f64().max(seconds);
                wrong_bytes += wrong.bytes;
            }
            Ok(None) => working -= 1,
            Err(_) => {}
        }
    }
    (watch.progress)("");
    report.interrupted = (watch.stop)();
    if !report.interrupted {
        report.compare(seconds, right, Some(wrong_bytes));
    }
    Ok(())
}
