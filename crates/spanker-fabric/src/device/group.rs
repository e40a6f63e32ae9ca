// SPDX-License-Identifier: Apache-2.0
//! A group of cards, and a collective that is ready to run on them as often as one likes.

use std::ops::Range;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use spanker_collective::{Algorithm, Collective, DType, Rank, ReduceOp, Schedule, schedule};
use spanker_runtime::{BufferId, CardTime, Descriptor, Error, Pace, SpankerControl, Ticket, Work};

use super::error::{DeviceError, DeviceErrorKind};
use super::feed::Feed;
use super::job_number;
use super::lower::{Lowered, lower};
use super::watch::{Deadline, Job, amiss, ask};
use super::wiring::{Ends, between};
use crate::execute::result_range;
use spanker_plan::Wiring;

/// Card time between the latest clock of a group and the start of its work, so that all cards have the work
/// before it begins.
const MARGIN_PS: u64 = 1_000_000_000;

/// How long a card may take to show that it is alive when a group is formed.
const ALIVE: Duration = Deadline::USUAL.detect;

/// Cards that work together, each with a rank: its place in the list.
#[derive(Debug)]
pub struct DeviceGroup<'a> {
    pub(super) members: Vec<Member<'a>>,
    wiring: Wiring,
}

/// One card of a group.
#[derive(Debug)]
pub(super) struct Member<'a> {
    pub(super) control: &'a SpankerControl,
    pub(super) index: usize,
    pub(super) serial: u64,
    pub(super) pace: Pace,
}

impl<'a> DeviceGroup<'a> {
    /// Asks the cards who they are and how they are wired.
    ///
    /// # Errors
    /// [`DeviceErrorKind::Unreachable`] if the links leave cards apart,
    /// [`DeviceErrorKind::Refused`] for the same card twice, and what requests can fail with.
    pub fn new(cards: &[&'a SpankerControl]) -> Result<Self, DeviceError> {
        if let Some(error) = amiss(&ask(cards, ALIVE, None), |rank| number(cards[rank], rank)) {
            return Err(error);
        }
        let mut members: Vec<Member<'a>> = Vec::with_capacity(cards.len());
        let mut ends = Vec::with_capacity(cards.len());
        for &control in cards {
            let (info, said) = Ends::ask(control, number(control, members.len()))?;
            let Ends { serial, index, .. } = said;
            if members.iter().any(|member| member.serial == serial) {
                let detail = "it is twice in the group".to_owned();
                return Err(DeviceError::new(DeviceErrorKind::Refused, Some(index), detail));
            }
            ends.push(said);
            members.push(Member { control, index, serial, pace: info.pace });
        }
        Ok(DeviceGroup { members, wiring: between(&ends)? })
    }

    /// Cards in the group.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.members.len()
    }

    /// How the cards are wired.
    #[must_use]
    pub fn wiring(&self) -> &Wiring {
        &self.wiring
    }

    /// The index of a rank's card, the number in its device's name.
    ///
    /// # Panics
    /// If `rank` is not in the group.
    #[must_use]
    pub fn index(&self, rank: Rank) -> usize {
        self.members[rank].index
    }

    pub(super) fn controls(&self) -> Vec<&SpankerControl> {
        self.members.iter().map(|member| member.control).collect()
    }

    /// The serial of a rank's card and its port that leads to a neighbour.
    ///
    /// # Panics
    /// If a rank is not in the group.
    #[must_use]
    pub fn end(&self, rank: Rank, neighbour: Rank) -> Option<(u64, u32)> {
        let port = self.wiring.port(rank, neighbour)?;
        Some((self.members[rank].serial, port))
    }

    pub(super) fn rank_of(&self, serial: u64) -> Option<Rank> {
        self.members.iter().position(|member| member.serial == serial)
    }

    /// Makes a collective ready: buffers on the cards, and a program for each. A run does the collective
    /// `repeats` times in place, on what the time before has left.
    ///
    /// # Errors
    /// [`DeviceErrorKind::Refused`] for a collective that cannot be, or a card without the memory for it;
    /// and what requests can fail with.
    pub fn prepare(
        &self,
        collective: Collective,
        algorithm: Algorithm,
        elements: usize,
        dtype: DType,
        op: ReduceOp,
        repeats: usize,
    ) -> Result<DeviceCall<'_>, DeviceError> {
        let schedule = schedule(collective, algorithm, self.ranks(), elements)
            .map_err(DeviceError::refused)?;
        let lowered = lower(&schedule, &self.wiring, dtype, op)?;
        let mut call = DeviceCall {
            group: self,
            schedule,
            lowered,
            cards: Vec::with_capacity(self.ranks()),
            repeats,
        };
        for rank in 0..self.ranks() {
            // What is allocated is in the call before anything can fail, so that it is freed.
            call.cards.push(OnCard::default());
            let lengths = [
                call.lowered.data_bytes().max(1),
                call.lowered.scratch_bytes(),
                call.lowered.relay_bytes(rank),
            ];
            for (kind, length) in lengths.into_iter().enumerate().filter(|&(_, length)| length > 0)
            {
                let buffer = self.request(rank, |card| card.allocate(length))?;
                call.cards[rank].buffers[kind] = Some(buffer);
            }
            let [data, scratch, relay] =
                call.cards[rank].buffers.map(|buffer| buffer.unwrap_or(BufferId(0)));
            call.cards[rank].program = call.lowered.bind(rank, data, scratch, relay);
        }
        Ok(call)
    }

    /// A moment that the clocks of these ranks have not reached yet.
    pub(super) fn common_start(&self, ranks: &[Rank]) -> Result<CardTime, DeviceError> {
        let mut latest = CardTime(0);
        for &rank in ranks {
            latest = latest.max(self.request(rank, SpankerControl::info)?.clock);
        }
        Ok(CardTime(latest.0.saturating_add(MARGIN_PS)))
    }

    /// Gives all cards their work. If a card's queue is full, what was given before is waited for.
    fn submit(
        &self,
        job: &Job<'_>,
        mut feeds: Vec<Feed<'_>>,
        start: Option<CardTime>,
    ) -> Result<Vec<Ticket>, DeviceError> {
        let mut tickets: Vec<Ticket> = Vec::with_capacity(feeds.len());
        loop {
            let complete = tickets.clone();
            let mut gave = false;
            for (rank, feed) in feeds.iter_mut().enumerate() {
                let member = &self.members[rank];
                let begin = start.filter(|_| complete.is_empty() && member.pace == Pace::CardTime);
                let fence = begin.map(|CardTime(not_before_ps)| Work::Fence { not_before_ps });
                let Some(work) = feed.next(fence) else { continue };
                gave = true;
                let ticket = match member.control.submit(job.number, &work) {
                    Err(Error::Ioctl { source: Errno::EOVERFLOW, .. }) if !complete.is_empty() => {
                        job.watch(&complete)?;
                        member.control.submit(job.number, &work)
                    }
                    other => other,
                };
                match ticket {
                    Ok(ticket) if rank < tickets.len() => tickets[rank] = ticket,
                    Ok(ticket) => tickets.push(ticket),
                    Err(error) => {
                        let error = DeviceError::request(member.index, error);
                        return Err(job.give_up(error, &[], &tickets));
                    }
                }
            }
            if !gave {
                return Ok(tickets);
            }
        }
    }

    /// Runs one program on each card, by rank, and waits for all of them. No card waits for a common start.
    /// Returns when each was done, by its own clock.
    ///
    /// A program is cut at its fences into submissions of a size that cards take.
    ///
    /// # Errors
    /// One error that names the culprit, after the job has been given up on every card that can be reached.
    ///
    /// # Panics
    /// If there are not as many programs as cards, or one is empty.
    pub fn run(
        &self,
        programs: &[Vec<Descriptor>],
        deadline: &Deadline,
    ) -> Result<Vec<CardTime>, DeviceError> {
        let begun = self.begin(programs, deadline)?;
        self.finish(&begun, deadline)
    }

    /// Gives each card its program, by rank, and does not wait. Several jobs can be under way; cards work on them in order.
    ///
    /// # Errors
    /// As [`DeviceGroup::run`].
    ///
    /// # Panics
    /// As [`DeviceGroup::run`].
    pub fn begin(
        &self,
        programs: &[Vec<Descriptor>],
        deadline: &Deadline,
    ) -> Result<BegunJob, DeviceError> {
        assert_eq!(programs.len(), self.ranks());
        assert!(programs.iter().all(|program| !program.is_empty()));
        let job = Job { group: self, number: job_number(), deadline: *deadline };
        let feeds = programs.iter().map(|program| Feed::new(program, 1)).collect();
        let tickets = self.submit(&job, feeds, None)?;
        Ok(BegunJob { number: job.number, tickets })
    }

    /// Waits for a job that has begun. Returns when each card was done, by its own clock.
    ///
    /// # Errors
    /// As [`DeviceGroup::run`].
    pub fn finish(
        &self,
        begun: &BegunJob,
        deadline: &Deadline,
    ) -> Result<Vec<CardTime>, DeviceError> {
        let job = Job { group: self, number: begun.number, deadline: *deadline };
        job.watch(&begun.tickets)
    }

    /// Gives up a job that has begun, on all cards that can be reached.
    pub fn abandon(&self, begun: &BegunJob, deadline: &Deadline) {
        let job = Job { group: self, number: begun.number, deadline: *deadline };
        let error = DeviceError::new(DeviceErrorKind::Aborted, None, "given up".to_owned());
        job.give_up(error, &[], &begun.tickets);
    }

    /// Asks a rank's card something.
    ///
    /// # Errors
    /// What requests can fail with, as an error of the group that names the card.
    ///
    /// # Panics
    /// If `rank` is not in the group.
    pub fn request<T>(
        &self,
        rank: Rank,
        ask: impl FnOnce(&SpankerControl) -> Result<T, Error>,
    ) -> Result<T, DeviceError> {
        let member = &self.members[rank];
        ask(member.control).map_err(|error| DeviceError::request(member.index, error))
    }
}

/// The index of a card that may not be able to say: the number in its device's name, or else its place.
fn number(card: &SpankerControl, place: usize) -> usize {
    let name = card.path().and_then(|path| path.file_name()?.to_str());
    name.and_then(|name| name.strip_prefix("spanker")?.parse().ok()).unwrap_or(place)
}

/// A job that cards have begun.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BegunJob {
    number: u64,
    tickets: Vec<Ticket>,
}

/// How long a run took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// By the cards' clocks, in picoseconds, from the common start until the last card was done. Only for
    /// cards whose clock shows the time that the work costs by their profile.
    pub card_ps: Option<u64>,
    /// By the host's clock, from before the first submission until after the last wait.
    pub wall: Duration,
}

impl Timing {
    /// The card time, to the nanosecond.
    #[must_use]
    pub fn card(&self) -> Option<Duration> {
        self.card_ps.map(|ps| Duration::from_nanos(ps / 1000))
    }
}

/// What a call has on one card.
#[derive(Debug, Default)]
struct OnCard {
    /// Data, scratch, relay.
    buffers: [Option<BufferId>; 3],
    program: Vec<Descriptor>,
}

/// A collective that is ready to run. Its buffers are freed when it is dropped.
#[derive(Debug)]
pub struct DeviceCall<'g> {
    group: &'g DeviceGroup<'g>,
    schedule: Schedule,
    lowered: Lowered,
    cards: Vec<OnCard>,
    repeats: usize,
}

impl DeviceCall<'_> {
    /// What is run.
    #[must_use]
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// The programs of the cards.
    #[must_use]
    pub fn lowered(&self) -> &Lowered {
        &self.lowered
    }

    /// Writes a rank's data, from its start.
    ///
    /// # Errors
    /// What requests can fail with.
    ///
    /// # Panics
    /// If `rank` is not in the group.
    pub fn write(&self, rank: Rank, bytes: &[u8]) -> Result<(), DeviceError> {
        self.write_at(rank, 0, bytes)
    }

    /// Writes a rank's data from `offset` bytes on.
    ///
    /// # Errors
    /// What requests can fail with.
    ///
    /// # Panics
    /// If `rank` is not in the group.
    pub fn write_at(&self, rank: Rank, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.group.request(rank, |card| card.write(self.data(rank), offset, bytes))
    }

    /// Reads a rank's data, from its start.
    ///
    /// # Errors
    /// What requests can fail with.
    ///
    /// # Panics
    /// If `rank` is not in the group.
    pub fn read(&self, rank: Rank, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.group.request(rank, |card| card.read(self.data(rank), 0, bytes))
    }

    /// The elements of its data in which a rank has its result. What is outside them after a run means
    /// nothing.
    ///
    /// # Panics
    /// If `rank` is not in the group.
    #[must_use]
    pub fn result(&self, rank: Rank) -> Range<usize> {
        result_range(&self.schedule, rank)
    }

    fn data(&self, rank: Rank) -> BufferId {
        self.cards[rank].buffers[0].unwrap_or(BufferId(0))
    }

    /// Runs the collective on all cards and waits for it.
    ///
    /// Cards whose clocks show the time of their profile start at the same time on these clocks.
    ///
    /// # Errors
    /// One error that names the culprit, after the job has been given up on every card that can be reached.
    pub fn run(&mut self, deadline: &Deadline) -> Result<Timing, DeviceError> {
        let group = self.group;
        let job = Job { group, number: job_number(), deadline: *deadline };
        let busy = match deadline.slow_after {
            Some(_) => self.busy()?,
            None => Vec::new(),
        };
        let start = self.start(deadline)?;
        let begun = Instant::now();
        let feeds = self.cards.iter().map(|card| Feed::new(&card.program, self.repeats)).collect();
        let tickets = group.submit(&job, feeds, start)?;
        let finished = job.watch(&tickets)?;
        let wall = begun.elapsed();
        let paced = group.members.iter().all(|member| member.pace == Pace::CardTime);
        let last = finished.into_iter().max().unwrap_or_default();
        let card_ps = start.filter(|_| paced).map(|start| last.0.saturating_sub(start.0));
        let timing = Timing { card_ps, wall };
        match (timing.card(), deadline.slow_after) {
            (Some(took), Some(most)) if took > most => Err(self.slow(&busy, took, most)?),
            _ => Ok(timing),
        }
    }

    /// When cards whose clocks show the time of their profile shall start, if there are such. All cards are
    /// asked, so that one that does not answer is found before any has work.
    fn start(&self, deadline: &Deadline) -> Result<Option<CardTime>, DeviceError> {
        let members = &self.group.members;
        let answers = ask(&self.group.controls(), deadline.detect, None);
        if let Some(error) = amiss(&answers, |rank| members[rank].index) {
            return Err(error);
        }
        let paced = members.iter().zip(answers.iter().flatten());
        let paced = paced.filter(|(member, _)| member.pace == Pace::CardTime);
        let latest = paced.map(|(_, state)| state.clock).max();
        Ok(latest.map(|CardTime(ps)| CardTime(ps.saturating_add(MARGIN_PS))))
    }

    /// How long each card has been busy since it was switched on.
    fn busy(&self) -> Result<Vec<u64>, DeviceError> {
        let busy = |rank| self.group.request(rank, |card| Ok(card.counters()?.busy_ps));
        (0..self.cards.len()).map(busy).collect()
    }

    /// Names the card that was busy the longest.
    fn slow(
        &self,
        before: &[u64],
        took: Duration,
        most: Duration,
    ) -> Result<DeviceError, DeviceError> {
        let after = self.busy()?;
        let grown = |&rank: &Rank| after[rank].saturating_sub(before[rank]);
        // The first of equals: `max_by_key` alone would take the last.
        let slowest = (0..after.len()).rev().max_by_key(grown);
        let card = slowest.map(|rank| self.group.members[rank].index);
        let detail = format!("{} us of card time, {} allowed", took.as_micros(), most.as_micros());
        Ok(DeviceError::new(DeviceErrorKind::Slow, card, detail).after_start())
    }
}

impl Drop for DeviceCall<'_> {
    fn drop(&mut self) {
        for (card, member) in self.cards.iter().zip(&self.group.members) {
            for buffer in card.buffers.iter().flatten() {
                // A card that does not answer any more takes its buffers with it.
                if let Err(Error::Gone { .. } | Error::Unresponsive { .. }) =
                    member.control.free(*buffer)
                {
                    break;
                }
            }
        }
    }
}
