// SPDX-License-Identifier: Apache-2.0
//! From a schedule to one program of descriptors for each card. Pure: no card is asked for anything.
//!
//! # Why no card waits for ever
//!
//! Every message is cut into segments and every segment takes one or more hops. Each such crossing of a link
//! is a *crossing* here: one send on one card and one receive on the next. All crossings of a schedule are put
//! into one order ([`spanker_plan::walk`]): by level, then by hop, then by message, then by segment. Each card's
//! program has its sends and receives in this order and nothing else decides it. Then:
//!
//! * both ends of a port have the messages of a direction in the same order, so the ports' queues match;
//! * a relay sends a segment on after a crossing of the same level and an earlier hop, which is before it in
//!   the order;
//! * a fence stands between two crossings of its card, so it waits for earlier ones only.
//!
//! Of all crossings that are not complete, take the first. All that stands before its send and before its
//! receive in their programs are earlier crossings, which are complete, and fences and local work behind
//! those. So both ends have come to it, the send is the first of its card's sends and the receive the first of
//! its port, and it completes, even if a send waits for its receive, if sends of a card wait for each other,
//! and if work that waits for a relay holds up everything after it. So all complete. Repeating the programs
//! changes nothing: crossings of a later repeat come later.

use std::ops::Range;

use spanker_collective::{
    Buffer, DType, Incoming, Local, Message, Rank, ReduceOp, Schedule, Span, levels,
};
use spanker_plan::{Action, Routes, SEGMENT_ALIGNMENT, Wiring, segments, walk};
use spanker_runtime::{BufferId, Descriptor, Fold, Landing, MAX_SOURCES, Place, Work};

use super::error::DeviceError;
use crate::execute::result_range;

/// What stands for a card's buffer of data until [`Lowered::bind`].
pub const DATA: BufferId = BufferId(1);
/// What stands for a card's working memory until [`Lowered::bind`].
pub const SCRATCH: BufferId = BufferId(2);
/// What stands for a card's memory for what it passes on, until [`Lowered::bind`].
pub const RELAY: BufferId = BufferId(3);

/// What messages that are passed on begin at a multiple of.
const ALIGNMENT: usize = SEGMENT_ALIGNMENT as usize;

/// One program of descriptors for each rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lowered {
    programs: Vec<Vec<Descriptor>>,
    relay: Vec<u64>,
    data: u64,
    scratch: u64,
}

impl Lowered {
    /// Cards that take part.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.programs.len()
    }

    /// The program of a rank, with [`DATA`], [`SCRATCH`] and [`RELAY`] for buffers.
    ///
    /// # Panics
    /// If `rank` is not in the group.
    #[must_use]
    pub fn program(&self, rank: Rank) -> &[Descriptor] {
        &self.programs[rank]
    }

    /// Bytes of every rank's data.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        self.data
    }

    /// Bytes of every rank's working memory.
    #[must_use]
    pub fn scratch_bytes(&self) -> u64 {
        self.scratch
    }

    /// Bytes that a rank needs for what it passes on.
    ///
    /// # Panics
    /// If `rank` is not in the group.
    #[must_use]
    pub fn relay_bytes(&self, rank: Rank) -> u64 {
        self.relay[rank]
    }

    /// The program of a rank on buffers of its card.
    ///
    /// # Panics
    /// If `rank` is not in the group.
    #[must_use]
    pub fn bind(
        &self,
        rank: Rank,
        data: BufferId,
        scratch: BufferId,
        relay: BufferId,
    ) -> Vec<Descriptor> {
        let bound = |place: &mut Place| {
            place.buffer = match place.buffer {
                SCRATCH => scratch,
                RELAY => relay,
                _ => data,
            };
        };
        let mut program = self.programs[rank].clone();
        for descriptor in &mut program {
            match &mut descriptor.work {
                Work::Copy { from, into, .. } => [from, into].into_iter().for_each(bound),
                Work::Reduce { into, sources, .. } => {
                    bound(into);
                    sources.iter_mut().for_each(bound);
                }
                Work::Send { from: place, .. } | Work::Receive { into: place, .. } => bound(place),
                _ => {}
            }
        }
        program
    }
}

/// Turns a schedule into programs for cards that are wired like this. An average is a sum that is divided at
/// the end, as everywhere where collectives are schedules.
///
/// A message between cards that are not neighbours is passed on by those between them, in segments, so that
/// its hops overlap. Only the last hop folds.
///
/// ```
/// use spanker_fabric::device::lower;
/// use spanker_collective::{Algorithm, Collective, DType, ReduceOp, schedule};
/// use spanker_plan::Wiring;
/// let pair = Wiring::from_links(2, &[(0, 0, 1, 0)])?;
/// let two = schedule(Collective::AllReduce, Algorithm::TwoShot, 2, 1000).unwrap();
/// let programs = lower(&two, &pair, DType::F32, ReduceOp::Sum)?;
/// assert_eq!((programs.data_bytes(), programs.relay_bytes(0)), (4000, 0));
/// assert_eq!(programs, lower(&two, &pair, DType::F32, ReduceOp::Sum)?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`super::DeviceErrorKind::Refused`] for another number of ranks, an operation that the type does not have,
/// or more operands than a card folds at once.
pub fn lower(
    schedule: &Schedule,
    wiring: &Wiring,
    dtype: DType,
    op: ReduceOp,
) -> Result<Lowered, DeviceError> {
    if schedule.ranks() != wiring.ranks() {
        let (planned, present) = (schedule.ranks(), wiring.ranks());
        return Err(DeviceError::refused(format!(
            "the schedule is for {planned} cards, the group has {present}"
        )));
    }
    let reduces = schedule.collective().reduces();
    if reduces && !op.is_defined_for(dtype) {
        return Err(DeviceError::refused(format!("operation {op} is not defined for {dtype}")));
    }
    let code = if reduces { op.code() } else { None };
    let fold = Fold { dtype: dtype.code(), op: code.or(ReduceOp::Sum.code()).unwrap_or_default() };
    check_folds(schedule)?;
    let levels = levels(schedule).map_err(DeviceError::refused)?;
    let routes = wiring.routes();
    let mut writer = Writer::new(schedule, wiring, &routes, dtype.size(), fold);
    let count = |message: &Message| segments(message.source.len as u64 * dtype.size() as u64).1;
    walk(&levels, &routes, count, |action| writer.write(action));
    if reduces && op == ReduceOp::Avg {
        for rank in 0..schedule.ranks() {
            writer.divide(rank, result_range(schedule, rank), schedule.ranks());
        }
    }
    let bytes = |elements: usize| (elements * dtype.size()) as u64;
    let (data, scratch) = (bytes(schedule.data_len()), bytes(schedule.scratch_len()));
    Ok(writer.done(data, scratch))
}

/// Refuses more operands than a card folds at once.
fn check_folds(schedule: &Schedule) -> Result<(), DeviceError> {
    let steps = (0..schedule.ranks()).flat_map(|rank| schedule.program(rank));
    for local in steps.flat_map(|step| &step.locals) {
        if let Local::Fold { sources, .. } = local
            && sources.len() > MAX_SOURCES
        {
            let count = sources.len();
            return Err(DeviceError::refused(format!(
                "a fold of {count} operands: a card takes {MAX_SOURCES} at once"
            )));
        }
    }
    Ok(())
}

/// One card's program as it grows.
#[derive(Debug, Default)]
struct Program {
    work: Vec<Descriptor>,
    /// Bytes of the relay memory in use since the last fence, and at most.
    relay: usize,
    relay_most: usize,
}

impl Program {
    fn push(&mut self, work: Work, after: Option<u32>) -> u32 {
        self.work.push(Descriptor { after, work });
        self.work.len() as u32 - 1
    }

    fn fence(&mut self) {
        self.work.push(Work::Fence { not_before_ps: 0 }.into());
        self.relay = 0;
    }

    /// Where a message lies that is passed on.
    fn reserve(&mut self, length: usize) -> u64 {
        let at = self.relay;
        self.relay += length.next_multiple_of(ALIGNMENT).max(ALIGNMENT);
        self.relay_most = self.relay_most.max(self.relay);
        at as u64
    }
}

/// A message of the level at hand with what the writer has to know about it.
struct Travel<'a> {
    message: &'a Message,
    route: &'a [Rank],
    /// Bytes of the message, and of a segment.
    length: usize,
    segment: usize,
    /// On each card that passes it on: where it lies.
    places: Vec<u64>,
    /// For each segment, its latest receive in the program of the card that it has come to.
    received: Vec<u32>,
}

struct Writer<'a> {
    schedule: &'a Schedule,
    wiring: &'a Wiring,
    routes: &'a Routes,
    size: usize,
    fold: Fold,
    programs: Vec<Program>,
    travels: Vec<Travel<'a>>,
    /// Crossings so far. Their numbers are the tags, so that a message that is lost or doubled is noticed.
    crossings: u32,
}

impl<'a> Writer<'a> {
    fn new(
        schedule: &'a Schedule,
        wiring: &'a Wiring,
        routes: &'a Routes,
        size: usize,
        fold: Fold,
    ) -> Self {
        let programs = (0..wiring.ranks()).map(|_| Program::default()).collect();
        let travels = Vec::new();
        Writer { schedule, wiring, routes, size, fold, programs, travels, crossings: 0 }
    }

    fn write(&mut self, action: Action<'a>) {
        match action {
            Action::Level { messages } => self.level(messages),
            Action::Cross { message, hop, segment } => self.cross(message, hop, segment),
            Action::Fence { rank } => self.programs[rank].fence(),
            Action::Locals { rank, step } => {
                for local in &self.schedule.program(rank)[step].locals {
                    let work = self.local(local);
                    self.programs[rank].push(work, None);
                }
            }
        }
    }

    /// Relays reserve memory for all messages of a level.
    fn level(&mut self, messages: &'a [Message]) {
        let travel = |message: &'a Message| {
            let route = self.routes.of(message.from, message.to);
            let length = message.source.len * self.size;
            let between = &route[1..route.len() - 1];
            let places = between.iter().map(|&rank| self.programs[rank].reserve(length)).collect();
            let (segment, count) = match between {
                [] => (length, 1),
                _ => {
                    let (size, count) = segments(length as u64);
                    (size as usize, count)
                }
            };
            Travel { message, route, length, segment, places, received: vec![0; count] }
        };
        self.travels = messages.iter().map(travel).collect();
    }

    /// One segment over one link.
    fn cross(&mut self, message: usize, hop: usize, segment: usize) {
        let travel = &self.travels[message];
        let Travel { message: sent, route, places, .. } = travel;
        let (here, there) = (route[hop], route[hop + 1]);
        let start = segment * travel.segment;
        let length = (travel.length - start).min(travel.segment);
        let (last, tag) = (route.len() - 2, self.crossings);
        let relay = |at: u64| Place { buffer: RELAY, offset: at + start as u64 };
        let end = |span: Span| self.place(span, start, length);
        let from = if hop == 0 { end(sent.source) } else { relay(places[hop - 1]) };
        let into = if hop == last { end(sent.target) } else { relay(places[hop]) };
        let landing = match sent.fold {
            Some(Incoming::First) if hop == last => Landing::FoldFirst(self.fold),
            Some(Incoming::Second) if hop == last => Landing::FoldSecond(self.fold),
            _ => Landing::Store,
        };
        let port = |from, to| self.wiring.port(from, to).expect("routes follow links");
        let (out, back) = (port(here, there), port(there, here));
        let after = (hop > 0).then(|| travel.received[segment]);
        let length = length as u64;
        self.crossings = self.crossings.wrapping_add(1);
        self.programs[here].push(Work::Send { from, length, port: out, tag }, after);
        let receive = Work::Receive { into, length, port: back, tag, landing };
        self.travels[message].received[segment] = self.programs[there].push(receive, None);
    }

    fn local(&self, local: &Local) -> Work {
        let whole = |span: Span| self.place(span, 0, span.len * self.size);
        match local {
            Local::Copy { from, into } => {
                let length = (from.len * self.size) as u64;
                Work::Copy { from: whole(*from), into: whole(*into), length }
            }
            Local::Fold { sources, into } => {
                let sources = sources.iter().map(|&span| whole(span)).collect();
                let (into, elements) = (whole(*into), into.len as u64);
                Work::Reduce { into, sources, elements, fold: self.fold, divisor: 0 }
            }
        }
    }

    /// Divides a sum by the number of ranks.
    fn divide(&mut self, rank: Rank, range: Range<usize>, ranks: usize) {
        if range.is_empty() {
            return;
        }
        let (elements, divisor) = (range.len() as u64, ranks as u32);
        let into = self.place(Span::data(range.clone()), 0, range.len() * self.size);
        let sources = vec![into];
        let work = Work::Reduce { into, sources, elements, fold: self.fold, divisor };
        self.programs[rank].push(work, None);
    }

    /// Where the bytes of a span begin, from byte `skip` of it. What has no bytes is at the start of the
    /// data, because a card may have no other buffer.
    fn place(&self, span: Span, skip: usize, length: usize) -> Place {
        if length == 0 {
            return Place { buffer: DATA, offset: 0 };
        }
        let buffer = match span.buffer {
            Buffer::Data => DATA,
            Buffer::Scratch => SCRATCH,
        };
        Place { buffer, offset: (span.start * self.size + skip) as u64 }
    }

    fn done(mut self, data: u64, scratch: u64) -> Lowered {
        for program in &mut self.programs {
            // A card with nothing to do still says when it was done.
            if program.work.is_empty() {
                program.work.push(Work::Fence { not_before_ps: 0 }.into());
            }
        }
        let relay = self.programs.iter().map(|program| program.relay_most as u64).collect();
        let programs = self.programs.into_iter().map(|program| program.work).collect();
        Lowered { programs, relay, data, scratch }
    }
}
