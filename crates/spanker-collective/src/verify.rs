// SPDX-License-Identifier: Apache-2.0
//! Proves a schedule right by running it on symbols instead of numbers.
//!
//! Every element is the expression that produced it, so the proof covers all element types and all
//! values at once. Messages are matched as a rendezvous: a send completes only with its receive. What
//! cannot deadlock without any buffering cannot deadlock with it.
//!
//! The proof is of the schedule, not of an executor; and it costs time in proportion to the elements
//! moved, so it belongs into tests and into the reading of foreign schedules, not into a hot path.

mod symbols;

use std::fmt;

use crate::schedule::{Buffer, Incoming, Local, Rank, Schedule, Span, Step, Transfer};
use crate::{Collective, CollectiveError, MAX_RANKS, chunk};
use symbols::{Symbols, UNDEFINED, Value};

/// What is true of a schedule that passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Proof {
    /// The number of rounds if each message needs one: the factor of the latency.
    pub rounds: usize,
    /// Elements sent by the rank that sends most.
    pub sent_most: usize,
    /// Elements sent by all ranks together.
    pub sent_total: usize,
    /// Every rank that has a result computed it by the same expression: the bits are equal on all.
    pub uniform: bool,
    /// That expression is the serial fold in rank order, in one go: the bits do not depend on the
    /// algorithm.
    pub serial: bool,
}

/// Why a schedule was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Flaw {
    /// The schedule's own numbers cannot be: no ranks or too many, a root outside the group, a buffer
    /// that does not fit the collective, or more elements than the verifier accepts.
    Shape {
        /// What is wrong.
        what: &'static str,
        /// The number as found.
        found: usize,
        /// The number that it must be, or may be at most.
        bound: usize,
    },
    /// A span reaches outside its buffer.
    OutOfBounds {
        /// The rank.
        rank: Rank,
        /// Its step.
        step: usize,
        /// The span.
        span: Span,
        /// Elements that the buffer has.
        len: usize,
    },
    /// Two concurrent operations touch the same element and one of them writes.
    Conflict {
        /// The rank.
        rank: Rank,
        /// Its step.
        step: usize,
        /// One span.
        one: Span,
        /// The other.
        other: Span,
    },
    /// Spans that must be equally long are not.
    Lengths {
        /// The rank.
        rank: Rank,
        /// Its step.
        step: usize,
        /// One length.
        one: usize,
        /// The other.
        other: usize,
    },
    /// A fold in a collective that only moves elements.
    Fold {
        /// The rank.
        rank: Rank,
        /// Its step.
        step: usize,
    },
    /// A message to itself or to a rank outside the group.
    Peer {
        /// The rank.
        rank: Rank,
        /// Its step.
        step: usize,
        /// The peer as given.
        peer: Rank,
    },
    /// A rank waits for one that will never send or receive.
    Deadlock {
        /// Each rank waits for the next; the last waits for the first, or for a rank that is done.
        waiting: Vec<Rank>,
    },
    /// An element that nothing was written to is sent, folded or returned.
    Undefined {
        /// The rank.
        rank: Rank,
        /// The span that contains it.
        span: Span,
    },
    /// A fold counts a contribution twice, or mixes different elements.
    Twice {
        /// The rank.
        rank: Rank,
        /// Its step.
        step: usize,
        /// The element of the local span.
        element: usize,
    },
    /// A result is not what the collective promises.
    Wrong {
        /// The rank.
        rank: Rank,
        /// The element of its `data`.
        element: usize,
        /// What is there.
        found: String,
    },
    /// In a barrier: a rank can leave before another has entered.
    Unheard {
        /// The rank that leaves.
        rank: Rank,
        /// The one it has not heard of.
        missing: Rank,
    },
}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Flaw::Shape { what, found, bound } => write!(f, "{what}: {found}, bound is {bound}"),
            Flaw::OutOfBounds { rank, step, span, len } => {
                write!(f, "rank {rank} step {step}: {span:?} is outside a buffer of {len} elements")
            }
            Flaw::Conflict { rank, step, one, other } => {
                write!(f, "rank {rank} step {step}: {one:?} conflicts with {other:?}")
            }
            Flaw::Lengths { rank, step, one, other } => {
                write!(f, "rank {rank} step {step}: lengths {one} and {other} differ")
            }
            Flaw::Fold { rank, step } => {
                write!(f, "rank {rank} step {step}: a fold in a collective that does not reduce")
            }
            Flaw::Peer { rank, step, peer } => {
                write!(f, "rank {rank} step {step}: {peer} is not a peer")
            }
            Flaw::Deadlock { waiting } => write!(f, "ranks wait for each other: {waiting:?}"),
            Flaw::Undefined { rank, span } => {
                write!(f, "rank {rank}: {span:?} is used before it is written")
            }
            Flaw::Twice { rank, step, element } => write!(
                f,
                "rank {rank} step {step}: element {element} counts a contribution twice or mixes elements"
            ),
            Flaw::Wrong { rank, element, found } => {
                write!(f, "rank {rank}: element {element} ends as {found}")
            }
            Flaw::Unheard { rank, missing } => {
                write!(f, "rank {rank} can leave before rank {missing} has entered")
            }
        }
    }
}

/// Proves that `schedule` computes its collective.
///
/// Proved are: every contribution reaches every result exactly once, no rank waits on a cycle or for a
/// message that is never sent, no step touches memory outside its buffers, and no concurrent work
/// touches the same element.
///
/// # Errors
/// [`CollectiveError::Refused`] with the first [`Flaw`] found.
pub fn verify(schedule: &Schedule) -> Result<Proof, CollectiveError> {
    let refuse = |flaw| CollectiveError::Refused {
        collective: schedule.collective(),
        algorithm: schedule.algorithm(),
        flaw,
    };
    check_shape(schedule).map_err(refuse)?;
    for rank in 0..schedule.ranks() {
        for (index, step) in schedule.program(rank).iter().enumerate() {
            check_step(schedule, rank, index, step).map_err(refuse)?;
        }
    }
    let mut machine = Machine::new(schedule);
    machine.run().map_err(refuse)?;
    machine.check_result().map_err(refuse)
}

/// The most memory that the verifier spends on a schedule, in elements of all buffers of all ranks. A
/// contribution weighs more than an element that is still undefined.
const MOST_ELEMENTS: usize = 1 << 26;
const WEIGHT: usize = 32;

/// Whether the schedule's numbers fit each other, and the verifier.
fn check_shape(schedule: &Schedule) -> Result<(), Flaw> {
    let (ranks, elements) = (schedule.ranks(), schedule.elements());
    if ranks == 0 || ranks > MAX_RANKS {
        return Err(Flaw::Shape { what: "ranks", found: ranks, bound: MAX_RANKS });
    }
    if let Some(root) = schedule.collective().root().filter(|&root| root >= ranks) {
        return Err(Flaw::Shape { what: "root", found: root, bound: ranks - 1 });
    }
    let data = schedule.collective().data_len(ranks, elements).unwrap_or(usize::MAX);
    if schedule.data_len() != data {
        let found = schedule.data_len();
        return Err(Flaw::Shape { what: "elements of data", found, bound: data });
    }
    if schedule.collective() == Collective::Barrier && elements > 0 {
        return Err(Flaw::Shape { what: "elements of a barrier", found: elements, bound: 0 });
    }
    let symbols = elements.saturating_mul(WEIGHT + ranks.div_ceil(8));
    let all = schedule.data_len().saturating_add(schedule.scratch_len());
    let all = all.saturating_add(symbols).saturating_mul(ranks);
    if all > MOST_ELEMENTS {
        return Err(Flaw::Shape { what: "elements in all", found: all, bound: MOST_ELEMENTS });
    }
    Ok(())
}

/// Bounds, lengths, peers and conflicts of one step: all that can be seen without running it.
fn check_step(schedule: &Schedule, rank: Rank, step: usize, work: &Step) -> Result<(), Flaw> {
    let here = Place { schedule, rank, step };
    for (i, transfer) in work.transfers.iter().enumerate() {
        here.inside(transfer.span())?;
        let peer = transfer.peer();
        if peer == rank || peer >= schedule.ranks() {
            return Err(Flaw::Peer { rank, step, peer });
        }
        if matches!(transfer, Transfer::Recv { fold: Some(_), .. }) {
            here.reduces()?;
        }
        for before in &work.transfers[..i] {
            let reads = |t: &Transfer| matches!(t, Transfer::Send { .. });
            if !(reads(before) && reads(transfer)) {
                here.apart(before.span(), transfer.span())?;
            }
        }
    }
    for local in &work.locals {
        match local {
            Local::Copy { from, into } => {
                here.inside(*from)?;
                here.inside(*into)?;
                here.same(from.len, into.len)?;
                here.apart(*from, *into)?;
            }
            Local::Fold { sources, into } => {
                here.inside(*into)?;
                here.reduces()?;
                here.same(sources.len().min(1), 1)?;
                for source in sources {
                    here.inside(*source)?;
                    here.same(source.len, into.len)?;
                    // The same span in place is what a fold is for; half of it would be read after
                    // it was written.
                    if source != into {
                        here.apart(*source, *into)?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// A step under examination.
struct Place<'a> {
    schedule: &'a Schedule,
    rank: Rank,
    step: usize,
}

impl Place<'_> {
    fn inside(&self, span: Span) -> Result<(), Flaw> {
        let len = match span.buffer {
            Buffer::Data => self.schedule.data_len(),
            Buffer::Scratch => self.schedule.scratch_len(),
        };
        match span.end() {
            Some(end) if end <= len => Ok(()),
            _ => Err(Flaw::OutOfBounds { rank: self.rank, step: self.step, span, len }),
        }
    }

    fn reduces(&self) -> Result<(), Flaw> {
        if self.schedule.collective().reduces() || self.schedule.collective() == Collective::Barrier
        {
            return Ok(());
        }
        Err(Flaw::Fold { rank: self.rank, step: self.step })
    }

    fn same(&self, one: usize, other: usize) -> Result<(), Flaw> {
        if one == other {
            return Ok(());
        }
        Err(Flaw::Lengths { rank: self.rank, step: self.step, one, other })
    }

    fn apart(&self, one: Span, other: Span) -> Result<(), Flaw> {
        if !one.overlaps(other) {
            return Ok(());
        }
        Err(Flaw::Conflict { rank: self.rank, step: self.step, one, other })
    }
}

/// One rank in the middle of its program.
struct Participant {
    data: Vec<Value>,
    scratch: Vec<Value>,
    step: usize,
    matched: Vec<bool>,
    /// Ranks whose entry is known here, and what was known when the current step began.
    heard: Vec<bool>,
    heard_before: Vec<bool>,
    depth: usize,
    depth_before: usize,
    sent: usize,
}

impl Participant {
    fn at(&mut self, span: Span) -> &mut [Value] {
        let buffer = match span.buffer {
            Buffer::Data => &mut self.data,
            Buffer::Scratch => &mut self.scratch,
        };
        &mut buffer[span.start..span.start + span.len]
    }
}

struct Machine<'a> {
    schedule: &'a Schedule,
    symbols: Symbols,
    ranks: Vec<Participant>,
}

impl<'a> Machine<'a> {
    fn new(schedule: &'a Schedule) -> Self {
        let n = schedule.ranks();
        let mut symbols = Symbols::new(n);
        let ranks = (0..n)
            .map(|rank| {
                let mut data = vec![UNDEFINED; schedule.data_len()];
                for element in initial(schedule.collective(), n, schedule.elements(), rank) {
                    data[element] = symbols.leaf(rank, element);
                }
                let heard: Vec<bool> = (0..n).map(|other| other == rank).collect();
                Participant {
                    data,
                    scratch: vec![UNDEFINED; schedule.scratch_len()],
                    step: 0,
                    matched: Vec::new(),
                    heard_before: heard.clone(),
                    heard,
                    depth: 0,
                    depth_before: 0,
                    sent: 0,
                }
            })
            .collect();
        Machine { schedule, symbols, ranks }
    }

    /// Runs every rank as far as it goes, again and again, until all are done or none moves.
    fn run(&mut self) -> Result<(), Flaw> {
        let n = self.schedule.ranks();
        for rank in 0..n {
            self.enter(rank);
        }
        loop {
            let mut moved = false;
            for rank in 0..n {
                while self.advance(rank)? {
                    moved = true;
                }
            }
            if (0..n).all(|rank| self.current(rank).is_none()) {
                return Ok(());
            }
            if !moved {
                return Err(Flaw::Deadlock { waiting: self.waiting() });
            }
        }
    }

    fn current(&self, rank: Rank) -> Option<&'a Step> {
        self.schedule.program(rank).get(self.ranks[rank].step)
    }

    fn enter(&mut self, rank: Rank) {
        let transfers = self.current(rank).map_or(0, |step| step.transfers.len());
        let participant = &mut self.ranks[rank];
        participant.matched = vec![false; transfers];
        participant.heard_before.clone_from(&participant.heard);
        participant.depth_before = participant.depth;
    }

    /// Matches what rank `rank` can receive now, and finishes its step if nothing is left to match.
    /// Says whether anything happened.
    fn advance(&mut self, rank: Rank) -> Result<bool, Flaw> {
        let Some(step) = self.current(rank) else {
            return Ok(false);
        };
        let mut moved = false;
        for (index, transfer) in step.transfers.iter().enumerate() {
            let Transfer::Recv { from, span, fold } = *transfer else {
                continue;
            };
            let open = !self.ranks[rank].matched[index];
            // Messages between two ranks arrive in the order in which they were sent.
            let first = step.transfers[..index]
                .iter()
                .zip(&self.ranks[rank].matched)
                .all(|(t, done)| *done || !is_recv_from(t, from));
            if !open || !first {
                continue;
            }
            if let Some((sent, source)) = self.next_send(from, rank) {
                self.deliver(rank, index, span, fold, from, sent, source)?;
                moved = true;
            }
        }
        if self.ranks[rank].matched.iter().all(|&done| done) {
            for local in &step.locals {
                self.local(rank, local)?;
            }
            self.ranks[rank].step += 1;
            self.enter(rank);
            moved = true;
        }
        Ok(moved)
    }

    /// The first open send of `from`'s current step that goes to `to`.
    fn next_send(&self, from: Rank, to: Rank) -> Option<(usize, Span)> {
        let step = self.current(from)?;
        step.transfers.iter().enumerate().find_map(|(index, transfer)| match *transfer {
            Transfer::Send { to: receiver, span }
                if receiver == to && !self.ranks[from].matched[index] =>
            {
                Some((index, span))
            }
            _ => None,
        })
    }

    #[allow(clippy::too_many_arguments)]
    fn deliver(
        &mut self,
        rank: Rank,
        index: usize,
        span: Span,
        fold: Option<Incoming>,
        from: Rank,
        sent: usize,
        source: Span,
    ) -> Result<(), Flaw> {
        let step = self.ranks[rank].step;
        if source.len != span.len {
            return Err(Flaw::Lengths { rank, step, one: source.len, other: span.len });
        }
        let values = self.read(from, source)?;
        match fold {
            None => self.ranks[rank].at(span).copy_from_slice(&values),
            Some(order) => {
                let mine = self.read(rank, span)?;
                let folded = match order {
                    Incoming::First => self.fold(rank, &[values, mine])?,
                    Incoming::Second => self.fold(rank, &[mine, values])?,
                };
                self.ranks[rank].at(span).copy_from_slice(&folded);
            }
        }
        self.ranks[rank].matched[index] = true;
        self.ranks[from].matched[sent] = true;
        self.ranks[from].sent += span.len;
        let heard = self.ranks[from].heard_before.clone();
        // A message needs one round and starts when both ends have come to it.
        let (sender, receiver) = (&self.ranks[from], &self.ranks[rank]);
        let depth = sender.depth_before.max(receiver.depth_before) + 1;
        let sender = &mut self.ranks[from];
        sender.depth = sender.depth.max(sender.depth_before + 1);
        let receiver = &mut self.ranks[rank];
        for (known, news) in receiver.heard.iter_mut().zip(heard) {
            *known |= news;
        }
        receiver.depth = receiver.depth.max(depth);
        Ok(())
    }

    fn local(&mut self, rank: Rank, local: &Local) -> Result<(), Flaw> {
        match local {
            Local::Copy { from, into } => {
                let values = self.read(rank, *from)?;
                self.ranks[rank].at(*into).copy_from_slice(&values);
            }
            Local::Fold { sources, into } => {
                let mut operands = Vec::with_capacity(sources.len());
                for source in sources {
                    operands.push(self.read(rank, *source)?);
                }
                let folded = self.fold(rank, &operands)?;
                self.ranks[rank].at(*into).copy_from_slice(&folded);
            }
        }
        Ok(())
    }

    fn read(&mut self, rank: Rank, span: Span) -> Result<Vec<Value>, Flaw> {
        let values = self.ranks[rank].at(span).to_vec();
        if values.contains(&UNDEFINED) {
            return Err(Flaw::Undefined { rank, span });
        }
        Ok(values)
    }

    /// The fold of equally many elements of each operand, in order.
    fn fold(&mut self, rank: Rank, operands: &[Vec<Value>]) -> Result<Vec<Value>, Flaw> {
        let step = self.ranks[rank].step;
        (0..operands[0].len())
            .map(|element| {
                let column: Vec<Value> = operands.iter().map(|values| values[element]).collect();
                self.symbols.fold(&column).ok_or(Flaw::Twice { rank, step, element })
            })
            .collect()
    }

    /// Follows "waits for" from the first stuck rank until a rank repeats or is done.
    fn waiting(&self) -> Vec<Rank> {
        let n = self.schedule.ranks();
        let mut chain = Vec::new();
        let mut rank = (0..n).find(|&rank| self.current(rank).is_some());
        while let Some(at) = rank {
            if chain.contains(&at) {
                break;
            }
            chain.push(at);
            rank = self.current(at).and_then(|step| {
                step.transfers
                    .iter()
                    .zip(&self.ranks[at].matched)
                    .find(|(_, done)| !**done)
                    .map(|(transfer, _)| transfer.peer())
            });
        }
        chain
    }

    fn check_result(&mut self) -> Result<Proof, Flaw> {
        let collective = self.schedule.collective();
        let (n, len) = (self.schedule.ranks(), self.schedule.elements());
        if collective == Collective::Barrier {
            for (rank, participant) in self.ranks.iter().enumerate() {
                if let Some(missing) = participant.heard.iter().position(|heard| !heard) {
                    return Err(Flaw::Unheard { rank, missing });
                }
            }
        }
        let (mut uniform, mut serial) = (true, true);
        let mut results: Vec<Option<Value>> = vec![None; len];
        for rank in 0..n {
            for (element, expected) in expected(collective, n, len, rank) {
                let found = self.ranks[rank].data[element];
                let right = match expected {
                    Expected::Leaf(owner, index) => found == self.symbols.leaf(owner, index),
                    Expected::Everyone => self.symbols.is_complete(found, element),
                };
                if !right {
                    return Err(Flaw::Wrong { rank, element, found: self.symbols.describe(found) });
                }
                if expected == Expected::Everyone {
                    uniform &= *results[element].get_or_insert(found) == found;
                    serial &= self.symbols.is_serial(found);
                }
            }
        }
        let sent = self.ranks.iter().map(|rank| rank.sent);
        Ok(Proof {
            rounds: self.ranks.iter().map(|rank| rank.depth).max().unwrap_or(0),
            sent_most: sent.clone().max().unwrap_or(0),
            sent_total: sent.sum(),
            uniform,
            serial: uniform && serial,
        })
    }
}

fn is_recv_from(transfer: &Transfer, rank: Rank) -> bool {
    matches!(*transfer, Transfer::Recv { from, .. } if from == rank)
}

/// The elements of `data` that rank `rank` brings along.
fn initial(collective: Collective, n: usize, len: usize, rank: Rank) -> std::ops::Range<usize> {
    match collective {
        Collective::AllReduce
        | Collective::ReduceScatter
        | Collective::Reduce { .. }
        | Collective::AllToAll => 0..len,
        Collective::AllGather | Collective::Gather { .. } => chunk(len, n, rank),
        Collective::Broadcast { root } | Collective::Scatter { root } if root == rank => 0..len,
        _ => 0..0,
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expected {
    /// The contribution of one rank, untouched: (rank, element).
    Leaf(Rank, usize),
    /// Each rank's contribution to this element, exactly once.
    Everyone,
}

/// What rank `rank` must have in the end, as (element of `data`, value).
fn expected(collective: Collective, n: usize, len: usize, rank: Rank) -> Vec<(usize, Expected)> {
    let reduced = |range: std::ops::Range<usize>| range.map(|e| (e, Expected::Everyone)).collect();
    let gathered = || {
        (0..n)
            .flat_map(|owner| chunk(len, n, owner).map(move |e| (e, Expected::Leaf(owner, e))))
            .collect()
    };
    match collective {
        Collective::AllReduce => reduced(0..len),
        Collective::ReduceScatter => reduced(chunk(len, n, rank)),
        Collective::Reduce { root } if root == rank => reduced(0..len),
        Collective::AllGather => gathered(),
        Collective::Gather { root } if root == rank => gathered(),
        Collective::Broadcast { root } => (0..len).map(|e| (e, Expected::Leaf(root, e))).collect(),
        Collective::Scatter { root } => {
            chunk(len, n, rank).map(|e| (e, Expected::Leaf(root, e))).collect()
        }
        Collective::AllToAll => {
            let mine = chunk(len, n, rank);
            (0..n)
                .flat_map(|owner| {
                    let home = owner * mine.len();
                    mine.clone().enumerate().map(move |(i, e)| (home + i, Expected::Leaf(owner, e)))
                })
                .collect()
        }
        _ => Vec::new(),
    }
}
