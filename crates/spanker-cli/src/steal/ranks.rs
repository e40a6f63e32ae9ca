// SPDX-License-Identifier: Apache-2.0
//! The job over ranks that are processes: each has one backend, claims for it by itself, and writes outputs straight to
//! rank 0, which looks at them in the end. Nobody gives out work.

mod board;
mod lanes;
mod table;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use spanker_fabric_mpi::World;
use spanker_steal::{Ask, Backend, RankClaims};

use super::live::Stop;
use super::prepare::{Prepared, prepare};
use super::work;
use super::{Args, JobKind, Setup};
use crate::{Interrupted, Unspoken, Usage, output, ranks};
use board::{Board, DONE, STOPPED, Seen, count};
use lanes::{Answer, Lanes};
use table::{Findings, Table};

/// How long ranks may take to get ready, beside each other's measurements.
const READY: Duration = Duration::from_secs(120);
/// How often rank 0 lets MPI get on while it works: some MPIs need it for what others want of its memory.
const POKE: Duration = Duration::from_micros(100);
/// How often a rank looks whether it is still wanted, and one that waits whether the others are done.
const LOOK: Duration = Duration::from_millis(20);
const POLL: Duration = Duration::from_micros(100);

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let world = ranks::world()?;
    let shared = || share(&checked(args, &world)?, &world);
    shared().map_err(|error| {
        // All ranks find the same wrong with flags, and leave together. Other errors are one rank's.
        if !error.is::<Usage>() {
            world.give_up();
        }
        let own = world.rank() > 0 && !error.is::<Usage>() && !error.is::<Unspoken>();
        if own { error.context(format!("rank {}", world.rank())) } else { error }
    })
}

/// Refuses what makes no sense over ranks. One backend stands for one on each rank.
fn checked(args: &Args, world: &World) -> Result<Args, Usage> {
    let (ranks, given) = (world.ranks(), args.backends.0.len());
    let flags = [
        ("--simulate", args.simulate),
        ("--corrupt", !args.corrupt.is_empty()),
        ("--audit", args.audit.is_some()),
        ("--checksums", args.checksums),
        ("--lease", args.lease.is_some()),
    ];
    if let Some((flag, _)) = flags.into_iter().find(|(_, given)| *given) {
        return Err(Usage(format!(
            "{flag} is for one process: over ranks, nobody does again what another has taken"
        )));
    }
    if args.job == JobKind::Prompts {
        return Err(Usage("--job prompts runs in one process, without --fabric mpi".into()));
    }
    let mut args = args.clone();
    if given == 1 {
        args.backends.0 = vec![args.backends.0[0]; ranks];
    } else if given != ranks {
        return Err(Usage(format!(
            "--backends lists {given}, and there are {ranks} ranks: expected one for each, or one for all"
        )));
    }
    Ok(args)
}

/// The job from beginning to end, on every rank.
fn share(args: &Args, world: &World) -> anyhow::Result<()> {
    let stop = Stop::new()?;
    let mut setup = args.setup()?;
    setup.origin = false;
    setup.quiet |= world.rank() > 0;
    let patience = args.options()?.patience;
    world.agree("the job", fingerprint(args, &setup), Instant::now() + READY)?;
    let (own, setup) = in_turn(setup, world, &stop)?;
    let (items, bytes) = (setup.job.items(), setup.material.bytes());
    let mut board = Board::open(world, items, bytes, patience)?;
    board.tell_speed(own.prepared.rates[0])?;
    if world.rank() + 1 == world.ranks() {
        // The others wait for this one at the start.
        board.measure()?;
    }
    let outcome = work_and_wait(&setup, &own, world, &mut board, &stop, patience);
    match outcome {
        Ok(()) => Ok(board.close()?),
        Err(error) => {
            // Whoever waits for the end is told that there is none.
            if world.rank() == 0 {
                let _ = board.tell_end(STOPPED);
            }
            Err(error)
        }
    }
}

/// A number that ranks have in common if they were given the same job.
fn fingerprint(args: &Args, setup: &Setup) -> u64 {
    let text = format!("{args:?} {} {}", setup.job.items(), setup.material.bytes());
    spanker_llm::fingerprint(text.bytes())
}

/// What this rank has: what the items are, how fast it is, and its backend.
struct Own {
    prepared: Prepared,
    backend: Arc<dyn Backend>,
}

/// Gets this rank's backend ready, one rank after the other, so that each is measured alone.
fn in_turn(mut setup: Setup, world: &World, stop: &Stop) -> anyhow::Result<(Own, Setup)> {
    let rank = world.rank();
    let (kinds, names) = (setup.kinds.clone(), setup.names.clone());
    let (faults, threads) = (setup.faults.clone(), setup.threads);
    let mut own = None;
    // Nobody needs the processor to get ready to sleep.
    let turns = if setup.kind == JobKind::Sleep { 1 } else { world.ranks() };
    for turn in 0..turns {
        if turn == rank || turns == 1 {
            setup.kinds = vec![kinds[rank]];
            setup.names = vec![names[rank].clone()];
            setup.faults = vec![faults[rank].clone()];
            setup.threads = if kinds[rank].is_cpu() { kinds[rank].lanes() } else { 0 };
            let prepared = prepare(&setup, stop)?;
            let backend = prepared.backends(&setup, &Arc::default())?.remove(0);
            own = Some(Own { prepared, backend });
        }
        world.agree("the turn", turn as u64, Instant::now() + READY)?;
    }
    setup = Setup { kinds, names, faults, threads, ..setup };
    Ok((own.context("no turn")?, setup))
}

/// Works, tells, and waits for the end; rank 0 makes the report of it.
fn work_and_wait(
    setup: &Setup,
    own: &Own,
    world: &World,
    board: &mut Board<'_>,
    stop: &Stop,
    patience: Duration,
) -> anyhow::Result<()> {
    let rank = world.rank();
    let kind = setup.kinds[rank];
    let Own { prepared, backend } = own;
    let capabilities = backend.capabilities();
    let claims = RankClaims::new(&setup.job, rank, world.ranks(), &capabilities)?;
    let lanes = Lanes::start(backend, setup.lanes(kind), setup.material.bytes())?;
    let pause = if rank == 0 { POKE } else { LOOK };
    wake_exactly();
    world.agree("the start", 0, Instant::now() + READY)?;
    let begun = Instant::now();
    let (hands, pokes) = (vec![Hands::default(); lanes.count()], rank == 0);
    let mut shift = Shift { board, claims, lanes, hands, begun, pause, pokes, patience };
    let stopped = shift.work(stop)?;
    let state = if stopped.is_none() { DONE } else { STOPPED };
    board.tell(state, begun.elapsed())?;
    if let Some(why) = &stopped {
        eprintln!("rank {rank}: stopped: {why}");
    }
    if rank > 0 {
        return wait_for_end(world, board, stop, patience);
    }
    let (seen, silent) = wait_for_all(world, board, stop, patience)?;
    let seconds = begun.elapsed().as_secs_f64();
    let (missing, marked) = count(&board.marks()?, world.ranks());
    let wrong_bytes = wrong_bytes(setup, prepared, board, &missing)?;
    let (seen, marked, silent) = (&seen, &marked, &silent);
    let findings = Findings { seen, seconds, missing, marked, wrong_bytes, silent };
    let table = Table::new(setup, world, findings);
    if setup.quiet {
        output::line(&table.to_json().to_string())?;
    } else {
        table.show()?;
    }
    table.end()?;
    board.tell_end(DONE)?;
    Ok(())
}

/// Has the system wake this thread when it asked for, where it grants that. By default it puts off wake-ups by 50 us, and
/// others may wait for this rank.
fn wake_exactly() {
    let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
}

/// Claims for a task's successor begin so many round trips before its end, but not before the last part of it.
const AHEAD: f64 = 2.0;
const LAST_PART: f64 = 0.25;

/// What a lane has.
#[derive(Debug, Clone, Copy, Default)]
struct Hands {
    /// Tasks: none, the one that is under way, and the one that follows.
    tasks: usize,
    /// When to claim the next one, in seconds since the start.
    claim_at: f64,
}

/// A rank at work.
struct Shift<'b, 'w> {
    board: &'b mut Board<'w>,
    claims: RankClaims,
    lanes: Lanes,
    hands: Vec<Hands>,
    begun: Instant,
    /// How long to wait for an answer before looking at something else.
    pause: Duration,
    pokes: bool,
    patience: Duration,
}

impl Shift<'_, '_> {
    fn now(&self) -> f64 {
        self.begun.elapsed().as_secs_f64()
    }

    /// Works until everything is taken and this rank's part of it is done. Returns why it has stopped before, if so.
    fn work(&mut self, stop: &Stop) -> anyhow::Result<Option<String>> {
        let (mut over, mut stopped, mut failures) = (false, None, 0);
        let mut heard = Instant::now();
        loop {
            let mut pause = self.pause;
            if !over && stopped.is_none() {
                (over, pause) = self.claim()?;
            }
            // Outputs travel while the next task is under way.
            self.board.settle()?;
            let idle = self.hands.iter().all(|hands| hands.tasks == 0);
            if idle && (over || stopped.is_some()) {
                return Ok(stopped);
            }
            let answer = self.lanes.wait(pause);
            if self.pokes {
                self.board.poke()?;
            }
            let Some(answer) = answer else {
                if stop.asked() {
                    return Err(Interrupted.into());
                }
                if !idle && heard.elapsed() > self.patience {
                    bail!("the backend has not answered for {:?}", self.patience);
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
    fn take(&mut self, answer: Answer, failures: usize) -> anyhow::Result<Option<String>> {
        let Answer { lane, items, out, took, outcome } = answer;
        if let Err(failure) = outcome {
            if failure.is_lasting() || failures >= STRIKES {
                self.hands[lane].tasks -= 1;
                return Ok(Some(format!("items {}..{} failed: {failure}", items.start, items.end)));
            }
            self.lanes.give(lane, items);
            return Ok(None);
        }
        self.hands[lane].tasks -= 1;
        self.board.busy(took);
        self.claims.timed(items.len(), took.as_secs_f64());
        self.board.deliver(items, out)?;
        Ok(None)
    }

    /// Claims for every lane that has nothing to do, or soon will. Returns whether everything is taken, and how long to
    /// wait otherwise.
    fn claim(&mut self) -> anyhow::Result<(bool, Duration)> {
        let (mut rates, mut pause) = (Vec::new(), self.pause);
        for lane in 0..self.hands.len() {
            loop {
                let (now, Hands { tasks, claim_at }) = (self.now(), self.hands[lane]);
                if tasks > 1 || (tasks == 1 && now < claim_at) {
                    let due = if tasks > 1 { f64::INFINITY } else { claim_at - now };
                    pause = pause.min(Duration::try_from_secs_f64(due).unwrap_or(pause));
                    break;
                }
                match self.claims.ask(now) {
                    Ask::Over => return Ok((true, self.pause)),
                    Ask::Later(seconds) => {
                        let later = Duration::try_from_secs_f64(seconds).unwrap_or(pause);
                        return Ok((false, pause.min(later)));
                    }
                    Ask::Add(items) => {
                        let before = self.board.claim(items, self.claims.rate(), &mut rates)?;
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
        let hands = &mut self.hands[lane];
        // The one that is under way ends when the next should have been claimed, or a little later.
        let start = if hands.tasks == 0 { now } else { now.max(hands.claim_at + ahead) };
        hands.tasks += 1;
        // Where nobody knows how long it takes, its end is awaited.
        let last = |long: f64| start + long - ahead.min(LAST_PART * long);
        hands.claim_at = long.map_or(f64::INFINITY, last);
    }
}

/// Failures in a row after which a rank stops.
const STRIKES: usize = 3;

/// Waits until every rank has told what it did. Returns that, and the ranks that have not, with why.
fn wait_for_all(
    world: &World,
    board: &mut Board<'_>,
    stop: &Stop,
    patience: Duration,
) -> anyhow::Result<(Seen, Vec<(usize, String)>)> {
    let mut last = board.look()?;
    let mut heard = Instant::now();
    loop {
        let seen = board.look()?;
        let silent = |rank: &usize| seen.accounts[*rank].state == 0;
        let mut missing: Vec<usize> = (0..world.ranks()).filter(silent).collect();
        if missing.is_empty() {
            return Ok((seen, Vec::new()));
        }
        if stop.asked() {
            return Err(Interrupted.into());
        }
        if seen != last {
            (last, heard) = (seen, Instant::now());
            continue;
        }
        let gone = missing.iter().all(|rank| world.is_dead(*rank));
        if gone || heard.elapsed() > patience {
            let why = |rank: usize| match world.is_dead(rank) {
                true => (rank, "died".to_owned()),
                false => (rank, format!("has not answered for {patience:?}")),
            };
            return Ok((last, missing.drain(..).map(why).collect()));
        }
        std::thread::sleep(POLL);
    }
}

/// Waits until rank 0 says that it is over.
fn wait_for_end(
    world: &World,
    board: &mut Board<'_>,
    stop: &Stop,
    patience: Duration,
) -> anyhow::Result<()> {
    let mut last = board.look()?;
    let mut heard = Instant::now();
    loop {
        let seen = board.look()?;
        match seen.end {
            0 => {}
            DONE => return Ok(()),
            _ => return Err(Unspoken.into()),
        }
        if stop.asked() {
            return Err(Interrupted.into());
        }
        if world.is_dead(0) {
            bail!("rank 0 died, and the outputs with it");
        }
        // Rank 0 waits for the others as long before it says so.
        if seen != last {
            (last, heard) = (seen, Instant::now());
        } else if heard.elapsed() > 2 * patience {
            bail!("rank 0 has not said for {:?} that it is over", 2 * patience);
        }
        std::thread::sleep(30 * POLL);
    }
}

/// Bytes at rank 0 that are not as they should be, without those of items that are missing; nothing if nobody knows.
fn wrong_bytes(
    setup: &Setup,
    prepared: &Prepared,
    board: &mut Board<'_>,
    missing: &[Range<usize>],
) -> anyhow::Result<Option<usize>> {
    let (work, out) = (&prepared.work, board.outputs()?);
    let expected = |items, out: &mut [u8]| work.recall(items, out);
    let (items, bytes) = (setup.job.items(), setup.material.bytes());
    let wrong = || work::wrong_bytes(items, bytes, missing, &out, expected);
    Ok(work.is_known().then(wrong))
}
