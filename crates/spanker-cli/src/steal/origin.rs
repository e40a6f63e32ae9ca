// SPDX-License-Identifier: Apache-2.0
//! The same job by the first version's rule, to compare: equal units from a counter, and a plain thread for every lane
//! that takes units until none is left and stops at its first failure. Nobody does again what is lost.

use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

use spanker_steal::{Backend, Fault, Scenario, Shard, Trouble, WorkStealingScheduler};

use super::Setup;
use super::crew::Kind;
use super::live::Stop;
use super::outcome::ByOrigin;
use super::planned::by_rule;
use super::prepare::Prepared;
use super::work::{Work, Wrong};
use crate::output;

/// How often the keeper looks up.
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
    work: Arc<Work>,
    begun: Instant,
    news: Sender<News>,
}

impl Lane {
    fn work(&self) {
        let mut out = Vec::new();
        while let Some(shard) = self.shards.get(self.scheduler.claim_next_unit()) {
            let items = shard.work_range.clone();
            out.resize(items.len() * self.work.bytes(), 0);
            if self.backend.run(items.clone(), &mut out).is_err() {
                break;
            }
            let at = self.begun.elapsed();
            let wrong = self.work.wrong_in(items.clone(), &out);
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
fn hung(setup: &Setup, now: Duration) -> usize {
    let hangs = |(kind, faults): (&Kind, &Vec<Fault>)| {
        let due = |fault: &Fault| fault.trouble == Trouble::Hang(None) && fault.at + LOOK <= now;
        if faults.iter().any(due) { setup.lanes(*kind) } else { 0 }
    };
    setup.kinds.iter().zip(&setup.faults).map(hangs).sum()
}

/// Runs the job by the first version's rule over fresh backends. Nothing if the user has had enough.
pub(super) fn run(
    setup: &Setup,
    scenario: &Scenario,
    prepared: &Prepared,
    stop: &Stop,
) -> anyhow::Result<Option<ByOrigin>> {
    let foreseen = Duration::try_from_secs_f64(by_rule(scenario).seconds).unwrap_or(Duration::MAX);
    if !setup.quiet {
        output::progress(&format!("the same by the origin's rule, about {foreseen:.1?} .."));
    }
    let backends = prepared.backends(setup, &Arc::default())?;
    let scheduler = Arc::new(WorkStealingScheduler::new(backends.clone()));
    let shards = Arc::new(scheduler.try_partition(setup.job.items())?);
    let (sender, news) = mpsc::channel();
    let begun = Instant::now();
    let mut working = 0;
    for (backend, kind) in backends.into_iter().zip(&setup.kinds) {
        for _ in 0..setup.lanes(*kind) {
            let lane = Lane {
                backend: Arc::clone(&backend),
                scheduler: Arc::clone(&scheduler),
                shards: Arc::clone(&shards),
                work: Arc::clone(&prepared.work),
                begun,
                news: sender.clone(),
            };
            // A lane that hangs is left behind: it ends with the process.
            thread::Builder::new().name("origin lane".into()).spawn(move || lane.work())?;
            working += 1;
        }
    }
    let end = foreseen.saturating_mul(2).saturating_add(GRACE);
    let mut result = ByOrigin { seconds: 0.0, done: 0, wrong_bytes: None };
    let mut wrong_bytes = 0;
    while working > hung(setup, begun.elapsed()) && begun.elapsed() < end && !stop.asked() {
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
    output::progress_done();
    result.wrong_bytes = Some(wrong_bytes);
    Ok((!stop.asked()).then_some(result))
}
