// SPDX-License-Identifier: Apache-2.0
//! The same job by the first version's rule, to compare: equal units from a counter, and a plain thread for every lane
//! that takes units until none is left and stops at its first failure. Nobody does again what is lost.

use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

use spanker_steal::{Backend, Fault, Scenario, Shard, Trouble, WorkStealingScheduler};

use super::backends::BackendKind;
use super::expected::{Expected, Wrong, wrong_in};
use super::report::ByOrigin;
use super::request::PreparedJob;
use super::simulated::by_rule;
use super::workers::Workers;
use super::{JobError, JobWatch};
use crate::error::Result;

/// How often it is looked at whether the run is over.
const LOOK: Duration = Duration::from_millis(50);
/// Lanes that do not end are given up this long after the end that virtual time gives, and as much again as that takes.
const GRACE: Duration = Duration::from_secs(1);

/// What lanes tell.
enum News {
    /// A unit is done.
    Done { items: usize, wrong: Wrong, at: Duration },
    /// The lane takes no more.
    Ended,
}

/// A lane, as the first version would have had it.
struct Lane {
    backend: Arc<dyn Backend>,
    scheduler: Arc<WorkStealingScheduler>,
    shards: Arc<Vec<Shard>>,
    expected: Arc<Expected>,
    bytes: usize,
    begun: Instant,
    news: Sender<News>,
}

impl Lane {
    fn work(&self) {
        let mut out = Vec::new();
        while let Some(shard) = self.shards.get(self.scheduler.claim_next_unit()) {
            let items = shard.work_range.clone();
            out.resize(items.len() * self.bytes, 0);
            if self.backend.run(items.clone(), &mut out).is_err() {
                break;
            }
            let at = self.begun.elapsed();
            let expected = |items, out: &mut [u8]| self.expected.write(items, out);
            let wrong = wrong_in(items.clone(), self.bytes, &out, expected);
            self.tell(News::Done { items: items.len(), wrong, at });
        }
        self.tell(News::Ended);
    }

    /// Nobody listens after the end, and that is fine.
    fn tell(&self, news: News) {
        let _ = self.news.send(news);
    }
}

/// Lanes that will not end, as far as one knows at some time.
fn hung(job: &PreparedJob, now: Duration) -> usize {
    let hangs = |(kind, faults): (&BackendKind, &Vec<Fault>)| {
        let due = |fault: &Fault| fault.trouble == Trouble::Hang(None) && fault.at + LOOK <= now;
        if faults.iter().any(due) { job.lanes(*kind) } else { 0 }
    };
    job.kinds().iter().zip(&job.faults).map(hangs).sum()
}

/// Runs the job by the first version's rule over fresh backends. Nothing if it was stopped.
pub(super) fn run(
    job: &PreparedJob,
    scenario: &Scenario,
    workers: &Workers,
    watch: &JobWatch<'_>,
) -> Result<Option<ByOrigin>> {
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
            let lane = Lane {
                backend: Arc::clone(&backend),
                scheduler: Arc::clone(&scheduler),
                shards: Arc::clone(&shards),
                expected: Arc::clone(&workers.expected),
                bytes: job.bytes,
                begun,
                news: sender.clone(),
            };
            // A lane that hangs is left behind: it ends with the process.
            let thread = thread::Builder::new().name("origin lane".into());
            thread
                .spawn(move || lane.work())
                .map_err(|error| JobError::thread("a lane", &error))?;
            working += 1;
        }
    }
    let end = foreseen.saturating_mul(2).saturating_add(GRACE);
    let mut result = ByOrigin { seconds: 0.0, done: 0, wrong_bytes: None };
    let mut wrong_bytes = 0;
    while working > hung(job, begun.elapsed()) && begun.elapsed() < end && !(watch.stop)() {
        match news.recv_timeout(LOOK) {
            Ok(News::Done { items, wrong, at }) => {
                result.done += items - wrong.items;
                result.seconds = result.seconds.max(at.as_secs_f64());
                wrong_bytes += wrong.bytes;
            }
            Ok(News::Ended) => working -= 1,
            Err(_) => {}
        }
    }
    (watch.progress)("");
    result.wrong_bytes = Some(wrong_bytes);
    Ok((!(watch.stop)()).then_some(result))
}
