// SPDX-License-Identifier: Apache-2.0
//! What every fabric must do, as one suite that each backend's tests call with a constructor.
//!
//! A fabric passes if every collective gives the right result by every algorithm, if messages keep
//! their order, if a barrier holds everyone back, if ranks that disagree find out, and if a rank that dies, is silent
//! or does not reach a barrier ends the call for everyone, with the same error, in time.
//!
//! A [`Case`] is played by each rank on its own with [`play`], and [`judge`] checks all outcomes. Ranks that
//! are threads do both in [`check`]; ranks that are processes write their outcomes down for whoever judges.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use spanker_collective::{Algorithm, Collective, Rank, ReduceOp, Schedule, Step, chunk, schedule};
use spanker_reduce::Element;

use crate::{Call, Fabric, FabricError, Pool, Registered, Workspace, execute, execute_registered};

/// Runs the whole suite over groups that `group` makes. Panics with what is wrong.
///
/// # Panics
/// If the fabric does not conform.
pub fn check<F: Fabric + Send>(group: impl Fn(usize) -> Vec<F>) {
    if let Err(wrong) = run(|ranks| Ok(group(ranks))) {
        panic!("{wrong}");
    }
}

/// The same for who goes on when something is wrong. Returns how many cases were played.
///
/// # Errors
/// What is wrong, in words, or why a group cannot be made.
pub fn run<F: Fabric + Send>(
    mut group: impl FnMut(usize) -> Result<Vec<F>, String>,
) -> Result<usize, String> {
    let mut played = 0;
    for ranks in [1, 2, 3, 4, 5, 7, 8] {
        let cases = match ranks {
            4 => Case::all(ranks),
            _ => vec![Case::Collectives, Case::Order, Case::Barrier],
        };
        for case in cases {
            let settled = std::sync::Barrier::new(ranks);
            let outcomes = on_all(group(ranks)?, |fabric| {
                play(case, fabric, &|| {
                    settled.wait();
                })
            });
            judge(case, &outcomes)
                .map_err(|wrong| format!("{case:?} over {ranks} ranks: {wrong}"))?;
            played += 1;
        }
    }
    Ok(played)
}

/// Runs `work` on a thread for each rank and returns what they return, in rank order.
///
/// # Panics
/// If `work` panics.
pub fn on_all<F: Fabric + Send, R: Send>(group: Vec<F>, work: impl Fn(F) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let work = &work;
        let ranks: Vec<_> =
            group.into_iter().map(|fabric| scope.spawn(move || work(fabric))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("the rank's work panicked")).collect()
    })
}

/// One thing that a fabric must do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Case {
    /// Every collective by every algorithm gives what a plain loop gives.
    Collectives,
    /// Messages between two ranks arrive in the order in which they were sent.
    Order,
    /// Ranks that do not mean the same call find out. Three ranks or more.
    Disagreement(Odd),
    /// A rank that dies is named to all others, long before the deadline. Three ranks or more.
    Death(Algorithm),
    /// A rank that is there and says nothing ends the call at the deadline. Three ranks or more.
    Silence,
    /// No rank leaves a barrier before every rank has reached it.
    Barrier,
    /// A barrier that a rank does not reach ends at the deadline. Three ranks or more.
    MissedBarrier,
}

/// What rank 1 means that the others do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Odd {
    /// Another root. No message passes between ranks that each think they are the root.
    Root,
    /// Some elements where the others mean none.
    SomeElements,
    /// Another number of elements.
    Elements,
    /// Another schedule of the same call.
    Schedule,
    /// Another operation.
    Operation,
    /// Another algorithm.
    Algorithm,
    /// An operation that is not defined, which it is refused.
    Undefined,
}

impl Odd {
    /// Every one.
    pub const ALL: [Odd; 7] = [
        Odd::Root,
        Odd::SomeElements,
        Odd::Elements,
        Odd::Schedule,
        Odd::Operation,
        Odd::Algorithm,
        Odd::Undefined,
    ];

    /// The error that everyone must report, up to who noticed.
    const fn expected(self) -> &'static str {
        match self {
            Odd::Root => "field: \"collective\"",
            Odd::SomeElements | Odd::Elements => "field: \"number of elements\"",
            Odd::Schedule => "field: \"schedule\"",
            Odd::Operation => "field: \"operation\"",
            Odd::Algorithm => "field: \"algorithm\"",
            Odd::Undefined => "Refused { rank: 1,",
        }
    }

    /// What the others run, and what rank 1 runs.
    fn calls(self, ranks: usize) -> [(Schedule, ReduceOp); 2] {
        let plan =
            |algorithm, len| schedule(Collective::AllReduce, algorithm, ranks, len).expect("legal");
        let rooted = |root| {
            schedule(Collective::Broadcast { root }, Algorithm::OneShot, ranks, 0).expect("legal")
        };
        let (ring, sum) = (Algorithm::Ring, ReduceOp::Sum);
        let usual = (plan(ring, 9), sum);
        match self {
            Odd::Root => [(rooted(0), sum), (rooted(1), sum)],
            Odd::SomeElements => [(plan(ring, 0), sum), (plan(ring, 4), sum)],
            Odd::Elements => [usual, (plan(ring, 12), sum)],
            Odd::Schedule => {
                let program = |rank| plan(ring, 9).program(rank).to_vec();
                let mut steps: Vec<_> = (0..ranks).map(program).collect();
                steps[1].push(Step::default());
                let other = Schedule::from_parts(Collective::AllReduce, ring, 9, 9, 0, steps);
                [usual, (other, sum)]
            }
            Odd::Operation => [usual, (plan(ring, 9), ReduceOp::Max)],
            Odd::Algorithm => [usual, (plan(Algorithm::TwoShot, 9), sum)],
            Odd::Undefined => [usual, (plan(ring, 9), ReduceOp::BitwiseOr)],
        }
    }
}

impl Case {
    /// Every case that this many ranks can play.
    #[must_use]
    pub fn all(ranks: usize) -> Vec<Case> {
        let mut all = vec![Case::Collectives, Case::Order, Case::Barrier];
        if ranks >= 3 {
            all.extend(Odd::ALL.map(Case::Disagreement));
            all.extend(Algorithm::ALL.map(Case::Death));
            all.extend([Case::Silence, Case::MissedBarrier]);
        }
        all
    }

    /// The rank that dies, is silent or does not reach the barrier.
    #[must_use]
    pub fn victim(self, ranks: usize) -> Option<Rank> {
        match self {
            Case::Death(_) => Some(ranks / 2),
            Case::Silence | Case::MissedBarrier => Some(1),
            _ => None,
        }
    }
}

/// What came of a case on one rank. Its text can be read again by whoever judges.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Everything was as it must be.
    Fine,
    /// Something was not.
    Wrong(String),
    /// The fabric reported this fault, as `{:?}` prints it.
    Fault(String),
    /// The rank was to die or be silent.
    Absent,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Fine => f.write_str("fine"),
            Outcome::Wrong(what) => write!(f, "wrong {what}"),
            Outcome::Fault(fault) => write!(f, "fault {fault}"),
            Outcome::Absent => f.write_str("absent"),
        }
    }
}

impl FromStr for Outcome {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(' ').unwrap_or((text, "")) {
            ("fine", _) => Ok(Outcome::Fine),
            ("wrong", what) => Ok(Outcome::Wrong(what.to_owned())),
            ("fault", fault) => Ok(Outcome::Fault(fault.to_owned())),
            ("absent", _) => Ok(Outcome::Absent),
            _ => Err(format!("'{text}' is no outcome")),
        }
    }
}

/// Plays one rank's part of a case. Every rank calls `settled` once when it has its outcome; `settled` returns
/// when all have, so that a silent rank is there until then.
pub fn play<F: Fabric>(case: Case, mut fabric: F, settled: &dyn Fn()) -> Outcome {
    let (rank, ranks) = (fabric.rank(), fabric.ranks());
    if case.victim(ranks) == Some(rank) {
        let silent = matches!(case, Case::Silence | Case::MissedBarrier).then_some(fabric);
        settled();
        drop(silent);
        return Outcome::Absent;
    }
    let outcome = match case {
        Case::Collectives => every_collective(&mut fabric),
        Case::Order => messages_in_order(&mut fabric),
        Case::Disagreement(odd) => {
            let [usual, other] = odd.calls(ranks);
            let (schedule, op) = if rank == 1 { other } else { usual };
            unchanged(&mut fabric, &schedule, op, soon())
        }
        Case::Death(algorithm) => {
            let begun = Instant::now();
            // The back half of a long registered buffer is written to before the call is complete.
            let len = if algorithm == Algorithm::TwoShot { LONG } else { 100 };
            let plan = schedule(Collective::AllReduce, algorithm, ranks, len).expect("legal");
            let outcome = match algorithm {
                Algorithm::TwoShot => unchanged_registered(&mut fabric, &plan),
                _ => unchanged(&mut fabric, &plan, ReduceOp::Sum, soon()),
            };
            match begun.elapsed() < Duration::from_secs(30) {
                true => outcome,
                false => Outcome::Wrong("a death took until the deadline".into()),
            }
        }
        Case::Silence => {
            let ring = schedule(Collective::AllReduce, Algorithm::Ring, ranks, 100).expect("legal");
            let timeout = Duration::from_millis(100);
            unchanged(&mut fabric, &ring, ReduceOp::Sum, Instant::now() + timeout)
        }
        Case::Barrier => late_ranks_hold_a_barrier_up(&mut fabric),
        Case::MissedBarrier => match fabric.barrier(Instant::now() + Duration::from_millis(100)) {
            Ok(()) => Outcome::Wrong("a barrier ended without one of the ranks".into()),
            Err(fault) => Outcome::Fault(format!("{fault:?}")),
        },
    };
    settled();
    outcome
}

/// Whether the outcomes of all ranks, in rank order, are what the case demands.
///
/// # Errors
/// What is wrong, in words.
pub fn judge(case: Case, outcomes: &[Outcome]) -> Result<(), String> {
    let victim = case.victim(outcomes.len());
    let died = format!("{:?}", FabricError::Died { rank: victim.unwrap_or(0) });
    let mut first: Option<&str> = None;
    for (rank, outcome) in outcomes.iter().enumerate() {
        let fault = match (outcome, case) {
            (Outcome::Wrong(what), _) => return Err(format!("rank {rank}: {what}")),
            (Outcome::Fine, Case::Collectives | Case::Order | Case::Barrier) => continue,
            (Outcome::Absent, _) if victim == Some(rank) => continue,
            (Outcome::Fault(_), Case::Collectives | Case::Order | Case::Barrier) => {
                return Err(format!("rank {rank}: {outcome}"));
            }
            (Outcome::Fault(fault), _) => fault.as_str(),
            _ => return Err(format!("rank {rank}: {outcome}")),
        };
        let expected = match case {
            Case::Disagreement(odd) => odd.expected(),
            Case::Death(_) => died.as_str(),
            _ => "Deadline {",
        };
        if !fault.contains(expected) {
            return Err(format!("rank {rank}: {fault}, expected {expected}"));
        }
        let first = *first.get_or_insert(fault);
        if first != fault {
            return Err(format!("ranks report different faults: {first} and rank {rank}: {fault}"));
        }
    }
    Ok(())
}

/// Elements of a buffer that is long enough to receive its result in place, in a fabric that can do so. No number of
/// ranks divides it.
const LONG: usize = 37_399;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Runs a call that must fail, and must leave the buffer as it was.
fn unchanged<F: Fabric>(
    fabric: &mut F,
    schedule: &Schedule,
    op: ReduceOp,
    deadline: Instant,
) -> Outcome {
    let mut data = vec![1.0f32; schedule.data_len()];
    let before = data.clone();
    let outcome = execute(fabric, schedule, &mut Workspace::new(), &mut data, op, deadline);
    match outcome {
        Ok(()) => Outcome::Wrong("a call that cannot succeed did".into()),
        Err(_) if data != before => Outcome::Wrong("a failed call changed its buffer".into()),
        Err(fault) => Outcome::Fault(format!("{fault:?}")),
    }
}

/// As [`unchanged`], with a registered buffer.
fn unchanged_registered<F: Fabric>(fabric: &mut F, schedule: &Schedule) -> Outcome {
    let mut buffer = Registered::new(schedule.data_len());
    buffer.as_mut_slice().fill(1.0f32);
    let mut workspace = Workspace::new();
    let sum = ReduceOp::Sum;
    match execute_registered(fabric, schedule, &mut workspace, &mut buffer, sum, soon()) {
        Ok(()) => Outcome::Wrong("a call that cannot succeed did".into()),
        Err(_) if buffer.as_slice().iter().any(|&value| value != 1.0) => {
            Outcome::Wrong("a failed call changed its buffer".into())
        }
        Err(fault) => Outcome::Fault(format!("{fault:?}")),
    }
}

/// A small number that depends on rank and element: sums of these are exact in every type.
fn value(rank: Rank, element: usize) -> u8 {
    ((rank * 7 + element * 3) % 5) as u8
}

fn every_collective<F: Fabric>(fabric: &mut F) -> Outcome {
    let ranks = fabric.ranks();
    let (mut whole, mut real) = (Workspace::<i32>::new(), Workspace::<f32>::new());
    for collective in Collective::ALL {
        for algorithm in Algorithm::ALL {
            // Long ones do not fit where fabrics keep short messages.
            for len in [0, 1, ranks - 1, 3 * ranks + 1, 200, 5000, LONG] {
                let plan = schedule(collective, algorithm, ranks, len).expect("legal");
                let checked = check_rank::<i32>(fabric, &plan, &mut whole, i32::from)
                    .and_then(|()| check_rank::<f32>(fabric, &plan, &mut real, f32::from));
                if let Err(wrong) = checked {
                    return Outcome::Wrong(wrong);
                }
            }
        }
    }
    Outcome::Fine
}

/// Runs one rank's part and compares what it gets with what the collective promises.
fn check_rank<T: Element>(
    fabric: &mut dyn Fabric,
    schedule: &Schedule,
    workspace: &mut Workspace<T>,
    number: impl Fn(u8) -> T,
) -> Result<(), String> {
    let (rank, n, len) = (fabric.rank(), schedule.ranks(), schedule.elements());
    let collective = schedule.collective();
    let mut data: Vec<T> = (0..schedule.data_len()).map(|i| number(value(rank, i))).collect();
    let before = data.clone();
    // Plain and registered buffers take turns.
    let outcome = if T::DTYPE.is_float() {
        let mut buffer = Registered::new(data.len());
        let mut outcome = Ok(());
        // Each half of the buffer has its turn.
        for _ in 0..2 {
            buffer.as_mut_slice().copy_from_slice(&data);
            let sum = ReduceOp::Sum;
            outcome = outcome.and_then(|()| {
                execute_registered(fabric, schedule, workspace, &mut buffer, sum, soon())
            });
        }
        data.copy_from_slice(buffer.as_slice());
        outcome
    } else {
        execute(fabric, schedule, workspace, &mut data, ReduceOp::Sum, soon())
    };
    outcome.map_err(|error| format!("{} {collective}: {error}", schedule.algorithm()))?;
    let sum = |i: usize| number((0..n).map(|r| value(r, i)).sum());
    let owner = |i: usize| (0..n).find(|&r| chunk(len, n, r).contains(&i)).expect("an owner");
    for (i, &found) in data.iter().enumerate() {
        let mine = i < len && owner(i) == rank;
        let block = chunk(len, n, rank);
        let expected = match collective {
            Collective::AllReduce => sum(i),
            Collective::ReduceScatter if mine => sum(i),
            Collective::Reduce { root } if root == rank => sum(i),
            Collective::AllGather => number(value(owner(i), i)),
            Collective::Gather { root } if root == rank => number(value(owner(i), i)),
            Collective::Broadcast { root } => number(value(root, i)),
            Collective::Scatter { root } if mine => number(value(root, i)),
            Collective::AllToAll if i < n * block.len() => {
                number(value(i / block.len(), block.start + i % block.len()))
            }
            _ => before[i],
        };
        if found != expected {
            let what = (schedule.algorithm(), collective, n, len, i);
            return Err(format!("{what:?}: found {found:?}, expected {expected:?}"));
        }
    }
    Ok(())
}

/// Ranks exchange messages in pairs. Short ones and long ones take turns: they may not overtake each other.
fn messages_in_order<F: Fabric>(fabric: &mut F) -> Outcome {
    let (peer, call, mut pool) = (fabric.rank() ^ 1, Call::BARRIER, Pool::default());
    let rounds = if peer < fabric.ranks() { 50 } else { 0 };
    for round in 0..rounds {
        let sends: Vec<_> = (0..20u8)
            .map(|i| {
                let len = if i % 3 == 0 { 9000 } else { 2 };
                let message = pool.write(len, |out| {
                    out.fill(i);
                    out[0] = round;
                });
                (peer, message)
            })
            .collect();
        // Every other round, some messages are received into buffers of this rank.
        let buffer = |i: usize, pool: &mut Pool| {
            (i % 4 < 2).then(|| pool.receive_buffer(sends[i].1.bytes().len()))
        };
        let exchanged = match round % 2 {
            0 => fabric.exchange(&call, &sends, &[peer; 20], soon()),
            _ => {
                let receives = (0..20).map(|i| (peer, buffer(i, &mut pool))).collect();
                fabric.exchange_into(&call, &sends, receives, soon())
            }
        };
        let messages = match exchanged {
            Ok(messages) => messages,
            Err(fault) => return Outcome::Wrong(fault.to_string()),
        };
        for ((_, sent), message) in sends.iter().zip(&messages) {
            if message.bytes() != sent.bytes() {
                return Outcome::Wrong("messages out of order".into());
            }
        }
    }
    match fabric.commit(&call, soon()) {
        Ok(()) => Outcome::Fine,
        Err(fault) => Outcome::Wrong(fault.to_string()),
    }
}

/// One rank after the other is late for a barrier, which nobody may leave before that rank has reached it.
fn late_ranks_hold_a_barrier_up<F: Fabric>(fabric: &mut F) -> Outcome {
    const LATE: Duration = Duration::from_millis(5);
    for late in 0..fabric.ranks() {
        // The late rank leaves the first barrier after this moment, so it reaches the second one `LATE` after it.
        let begun = Instant::now();
        let first = fabric.barrier(soon());
        if fabric.rank() == late {
            std::thread::sleep(LATE);
        }
        if let Err(fault) = first.and_then(|()| fabric.barrier(soon())) {
            return Outcome::Wrong(fault.to_string());
        }
        if begun.elapsed() < LATE {
            return Outcome::Wrong(format!("left a barrier that rank {late} had not reached"));
        }
    }
    Outcome::Fine
}
