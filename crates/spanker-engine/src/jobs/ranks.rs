// SPDX-License-Identifier: Apache-2.0
//! A job over ranks that are processes: each has one backend, claims for it with one-sided MPI operations, and writes outputs
//! straight into rank 0's window. No rank gives out work; rank 0 looks at the outputs in the end.

mod lanes;
mod report;
mod window;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use spanker_fabric_mpi::World;
use spanker_steal::{Ask, Backend, RankClaims};

use super::report::JobTotals;
use super::request::{Inputs, JobRequest, PreparedJob, Workload};
use super::workers::Workers;
use super::{JobError, JobWatch};
use crate::error::{EngineError, Result};
use lanes::{Answer, Lanes};
pub use report::{ClaimTrips, RankReport, RankShare};
use window::{ClaimWindow, DONE, STOPPED, Snapshot, count};

/// How long ranks may take to get ready, beside each other's measurements.
const READY: Duration = Duration::from_secs(120);
/// How often rank 0 calls MPI while it works: some MPIs make progress with others' one-sided operations only then.
const PROGRESS: Duration = Duration::from_micros(100);
/// How often a rank looks whether it is still wanted.
const LOOK: Duration = Duration::from_millis(20);
/// How often rank 0 looks whether the others are done, and how often they look whether it is.
const POLL: Duration = Duration::from_micros(100);
const END_POLL: Duration = Duration::from_millis(3);
/// Claims for a task's successor begin so many round trips before its end, but not before the last part of it.
const AHEAD: f64 = 2.0;
const LAST_PART: f64 = 0.25;
/// Failures in a row after which a rank stops.
const STRIKES: usize = 3;

/// Runs a job on every rank of a world, each with the backend at its place; one backend stands for one on each rank. Every
/// rank must call this with the same request. No rank does again what another has taken: leases, samples and checksums are not
/// looked at, and nothing runs in virtual time.
///
/// `publish` is called on rank 0 before the other ranks leave: launchers end all ranks when one fails.
///
/// # Errors
/// [`EngineError::Request`] for what makes no sense over ranks, which all ranks find; [`JobError::Ended`] on ranks for which
/// rank 0 speaks, [`JobError::Rank`], and what `publish` says. After any error but the first kind, the world is given up.
pub fn run_on_ranks<E: From<EngineError>>(
    world: &World,
    request: JobRequest,
    watch: &JobWatch<'_>,
    publish: impl FnOnce(&RankReport) -> Result<(), E>,
) -> Result<(), E> {
    let prepared = checked(request, world).and_then(JobRequest::prepare);
    let job = prepared.inspect_err(|error| match error {
        EngineError::Request { .. } => {}
        _ => world.give_up(),
    })?;
    let run = || -> Result<(), E> {
        let mut run = RankRun::begin(&job, world, watch)?;
        let outcome = run.work().map_err(E::from).and_then(|report| {
            let Some(report) = report else { return Ok(()) };
            publish(&report)?;
            report.failure().map_or(Ok(()), |what| Err(EngineError::from(failed(what)).into()))
        });
        let closed = run.close(outcome.is_ok());
        outcome.and(closed.map_err(|error| EngineError::from(error).into()))
    };
    run().inspect_err(|_| world.give_up())
}

/// Refuses what makes no sense over ranks.
fn checked(mut request: JobRequest, world: &World) -> Result<JobRequest> {
    let (ranks, given) = (world.ranks(), request.backends.0.len());
    if matches!(request.workload, Workload::Prompts { .. }) {
        let what = "--job prompts runs in one process, without --fabric mpi";
        return Err(EngineError::request(what));
    }
    if given == 1 {
        request.backends.0 = vec![request.backends.0[0]; ranks];
    } else if given != ranks {
        return Err(EngineError::request(format!(
            "--backends lists {given}, and there are {ranks} ranks: expected one for each, or one for all"
        )));
    }
    Ok(request)
}

/// A rank that cannot go on.
fn failed(what: impl Into<String>) -> JobError {
    JobError::Rank { what: what.into() }
}

/// One rank's part of a job.
struct RankRun<'a> {
    job: &'a PreparedJob,
    world: &'a World,
    watch: &'a JobWatch<'a>,
    workers: Workers,
    window: ClaimWindow<'a>,
    timeout: Duration,
}

impl<'a> RankRun<'a> {
    /// Makes sure that all ranks have the same job, gets this rank's backend ready, and opens the window.
    fn begin(
        job: &'a PreparedJob,
        world: &'a World,
        watch: &'a JobWatch<'a>,
    ) -> Result<RankRun<'a>> {
        let (rank, timeout) = (world.rank(), job.request.options.patience);
        let text = format!("{:?} {} {}", job.request, job.job.items(), job.bytes);
        agree(world, "the job", spanker_llm::fingerprint(text.bytes()))?;
        // One rank after the other, so that each is measured alone. No rank needs the processor to get ready to sleep.
        let turns = if matches!(job.inputs, Inputs::Sleep) { 1 } else { world.ranks() };
        let mut workers = None;
        for turn in 0..turns {
            if turn == rank || turns == 1 {
                workers = Some(Workers::open(job, rank..rank + 1, watch)?);
            }
            agree(world, "the turn", turn as u64)?;
        }
        let workers = workers.ok_or_else(|| failed("this rank had no turn"))?;
        let mut window = ClaimWindow::open(world, job.job.items(), job.bytes, timeout)?;
        window.publish_speed(workers.rates[0])?;
        if rank + 1 == world.ranks() {
            // The others wait for this one at the start.
            window.measure()?;
        }
        Ok(RankRun { job, world, watch, workers, window, timeout })
    }

    /// Does this rank's part of the items and waits for the end. Rank 0 waits for all others and reports.
    fn work(&mut self) -> Result<Option<RankReport>> {
        let (job, rank, ranks) = (self.job, self.world.rank(), self.world.ranks());
        let backend: Arc<dyn Backend> = self.workers.with_faults(job, &Arc::default())?.remove(0);
        let claims = RankClaims::new(&job.job, rank, ranks, &backend.capabilities());
        let claims = claims.map_err(JobError::from)?;
        let lanes = Lanes::start(&backend, job.lanes(job.kinds()[rank]), job.bytes)?;
        // By default the system puts off wake-ups by 50 us, and others may wait for this rank.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        agree(self.world, "the start", 0)?;
        let (begun, queues) = (Instant::now(), vec![Queue::default(); lanes.count()]);
        let stopped = Claiming { run: self, claims, lanes, queues, begun }.work()?;
        let state = if stopped.is_none() { DONE } else { STOPPED };
        self.window.publish_stats(state, begun.elapsed())?;
        if let Some(why) = &stopped {
            (self.watch.note)(&format!("rank {rank}: stopped: {why}"));
        }
        if rank > 0 {
            self.wait_for_end()?;
            return Ok(None);
        }
        let (seen, silent) = self.wait_for_all()?;
        let seconds = begun.elapsed().as_secs_f64();
        let (missing, marked) = count(&self.window.marks()?, ranks);
        let (out, mut totals) = (self.window.outputs()?, JobTotals::new(job, missing));
        totals.compare(&self.workers.expected, job.bytes, &out);
        let report = RankReport::new(job, self.world, totals, seconds, &seen, &marked, &silent);
        Ok(Some(report))
    }

    /// Ends the job. If it is not done, ranks that wait for rank 0 are told so, and others are not waited for.
    fn close(mut self, is_done: bool) -> Result<(), JobError> {
        if self.world.rank() == 0 {
            self.window.publish_end(if is_done { DONE } else { STOPPED })?;
        }
        if is_done { self.window.close() } else { Ok(()) }
    }

    /// Looks at the window until `over` says what came of it. It is told whether nothing has changed there for `timeout`.
    fn poll<T>(
        &mut self,
        pause: Duration,
        timeout: Duration,
        over: impl Fn(&Snapshot, bool) -> Result<Option<T>, JobError>,
    ) -> Result<T, JobError> {
        let (mut last, mut heard) = (self.window.snapshot()?, Instant::now());
        loop {
            let seen = self.window.snapshot()?;
            if seen != last {
                (last, heard) = (seen, Instant::now());
            }
            if let Some(end) = over(&last, heard.elapsed() > timeout)? {
                return Ok(end);
            }
            self.watch.check()?;
            std::thread::sleep(pause);
        }
    }

    /// Waits until every rank has said what it did. Returns that, and the ranks that have not, with why.
    fn wait_for_all(&mut self) -> Result<(Snapshot, Vec<(usize, String)>), JobError> {
        let (world, timeout) = (self.world, self.timeout);
        self.poll(POLL, timeout, |seen, late| {
            let silent = |rank: &usize| seen.stats[*rank].state == 0;
            let missing: Vec<usize> = (0..world.ranks()).filter(silent).collect();
            if !late && !missing.iter().all(|rank| world.is_dead(*rank)) {
                return Ok(None);
            }
            let why = |rank: usize| match world.is_dead(rank) {
                true => (rank, "died".to_owned()),
                false => (rank, format!("has not answered for {timeout:?}")),
            };
            Ok(Some((seen.clone(), missing.into_iter().map(why).collect())))
        })
    }

    /// Waits until rank 0 says that it is over. Rank 0 waits for the others as long before it says so.
    fn wait_for_end(&mut self) -> Result<(), JobError> {
        let (world, timeout) = (self.world, 2 * self.timeout);
        self.poll(END_POLL, timeout, |seen, late| match seen.end {
            DONE => Ok(Some(())),
            0 if world.is_dead(0) => Err(failed("rank 0 died, and the outputs with it")),
            0 if late => {
                Err(failed(format!("rank 0 has not said for {timeout:?} that it is over")))
            }
            0 => Ok(None),
            _ => Err(JobError::Ended),
        })
    }
}

fn agree(world: &World, what: &'static str, value: u64) -> Result<(), JobError> {
    Ok(world.agree(what, value, Instant::now() + READY)?)
}

/// What a lane has to do.
#[derive(Debug, Clone, Copy, Default)]
struct Queue {
    /// Tasks: none, the one that is under way, and the one that follows.
    tasks: usize,
    /// When to claim the next one, in seconds since the start.
    claim_at: f64,
}

/// A rank that claims items for its lanes.
struct Claiming<'r, 'a> {
    run: &'r mut RankRun<'a>,
    claims: RankClaims,
    lanes: Lanes,
    queues: Vec<Queue>,
    begun: Instant,
}

impl Claiming<'_, '_> {
    /// How long to wait for an answer before looking at something else.
    fn pause(&self) -> Duration {
        if self.leads() { PROGRESS } else { LOOK }
    }

    /// Whether this is rank 0, whose window the others use.
    fn leads(&self) -> bool {
        self.run.world.rank() == 0
    }

    fn now(&self) -> f64 {
        self.begun.elapsed().as_secs_f64()
    }

    /// Works until everything is taken and this rank's part of it is done. Returns why it has stopped before, if so.
    fn work(&mut self) -> Result<Option<String>, JobError> {
        let (mut over, mut stopped, mut failures) = (false, None, 0);
        let mut heard = Instant::now();
        loop {
            let mut pause = self.pause();
            if !over && stopped.is_none() {
                (over, pause) = self.claim()?;
            }
            // Outputs travel while the next task is under way.
            self.run.window.flush()?;
            let idle = self.queues.iter().all(|queue| queue.tasks == 0);
            if idle && (over || stopped.is_some()) {
                return Ok(stopped);
            }
            let answer = self.lanes.wait(pause);
            if self.leads() {
                self.run.window.progress()?;
            }
            let Some(answer) = answer else {
                self.run.watch.check()?;
                if !idle && heard.elapsed() > self.run.timeout {
                    let timeout = self.run.timeout;
                    return Err(failed(format!("the backend has not answered for {timeout:?}")));
                }
                continue;
            };
            heard = Instant::now();
            failures = if answer.outcome.is_ok() { 0 } else { failures + 1 };
            if let Some(why) = self.take(answer, failures)? {
                stopped.get_or_insert(why);
            }
        }
    }

    /// Takes an answer. Returns why this rank stops, if it does.
    fn take(&mut self, answer: Answer, failures: usize) -> Result<Option<String>, JobError> {
        let Answer { lane, items, out, took, outcome } = answer;
        if let Err(failure) = outcome {
            if failure.is_lasting() || failures >= STRIKES {
                self.queues[lane].tasks -= 1;
                return Ok(Some(format!("items {}..{} failed: {failure}", items.start, items.end)));
            }
            self.lanes.give(lane, items);
            return Ok(None);
        }
        self.queues[lane].tasks -= 1;
        self.run.window.busy(took);
        self.claims.timed(items.len(), took.as_secs_f64());
        self.run.window.put(items, out)?;
        Ok(None)
    }

    /// Claims for every lane that has nothing to do, or soon will. Returns whether everything is taken, and how long to
    /// wait otherwise.
    fn claim(&mut self) -> Result<(bool, Duration), JobError> {
        let (mut rates, mut pause) = (Vec::new(), self.pause());
        for lane in 0..self.queues.len() {
            loop {
                let (now, Queue { tasks, claim_at }) = (self.now(), self.queues[lane]);
                if tasks > 1 || (tasks == 1 && now < claim_at) {
                    let due = if tasks > 1 { f64::INFINITY } else { claim_at - now };
                    pause = pause.min(Duration::try_from_secs_f64(due).unwrap_or(pause));
                    break;
                }
                match self.claims.ask(now) {
                    Ask::Over => return Ok((true, self.pause())),
                    Ask::Later(seconds) => {
                        let later = Duration::try_from_secs_f64(seconds).unwrap_or(pause);
                        return Ok((false, pause.min(later)));
                    }
                    Ask::Add(items) => {
                        let rate = self.claims.rate();
                        let before = self.run.window.claim(items, rate, &mut rates)?;
                        let came = self.now();
                        if let Some(items) = self.claims.answer(items, before, &rates, now, came) {
                            self.give(lane, items, came);
                        }
                    }
                }
            }
        }
        Ok((false, pause))
    }

    /// Gives a lane a task, and says when to claim the one after it.
    fn give(&mut self, lane: usize, items: Range<usize>, now: f64) {
        let ahead = AHEAD * self.claims.trip();
        let long = self.claims.expected(items.len());
        self.lanes.give(lane, items);
        let queue = &mut self.queues[lane];
        // The one that is under way ends when the next should have been claimed, or a little later.
        let start = if queue.tasks == 0 { now } else { now.max(queue.claim_at + ahead) };
        queue.tasks += 1;
        // Where nobody knows how long it takes, its end is awaited.
        let last = |long: f64| start + long - ahead.min(LAST_PART * long);
        queue.claim_at = long.map_or(f64::INFINITY, last);
    }
}
