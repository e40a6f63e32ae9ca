// SPDX-License-Identifier: Apache-2.0
//! How long one message takes from a card to its neighbour. What that says about the link is not decided here.

use std::time::{Duration, Instant};

use spanker_collective::Rank;
use spanker_runtime::{BufferId, Descriptor, Landing, Pace, Place, Ticket, Work};

use super::error::DeviceError;
use super::group::DeviceGroup;
use super::job_number;
use super::watch::{Deadline, Job};

/// How long ping-pong is played for one figure, at most as many times as [`MOST_ROUNDS`].
const PLAY: Duration = Duration::from_millis(20);
/// Rounds of ping-pong in one run at most.
const MOST_ROUNDS: usize = 64;
/// Runs of which the median is taken.
const RUNS: usize = 5;

/// One end of a message: the port to the other, and a buffer.
#[derive(Clone, Copy)]
struct End {
    port: u32,
    buffer: BufferId,
}

/// A group of two, of which rank 0 sends to rank 1.
struct Pair<'g> {
    group: &'g DeviceGroup<'g>,
    from: End,
    to: End,
    bytes: u64,
}

impl DeviceGroup<'_> {
    /// How long a message of `bytes` takes from one rank to its neighbour.
    ///
    /// Cards whose clocks show the time of their profile start together, behind a fence, and the receiver's
    /// clock says when the message had come. Clocks of other cards are not known to agree: there it is half a
    /// round of ping-pong, as the median of several runs, so both directions of a link count as equal. The
    /// clock is the sender's or, where that shows what should be and not what is, the host's.
    ///
    /// # Errors
    /// [`DeviceErrorKind::Unreachable`](super::DeviceErrorKind::Unreachable) if the two are not neighbours, and what a run can fail with.
    ///
    /// # Panics
    /// If a rank is not in the group.
    pub fn message_time(
        &self,
        from: Rank,
        to: Rank,
        bytes: u64,
        deadline: &Deadline,
    ) -> Result<Duration, DeviceError> {
        // A group of their own: the others have no part in it, and a route through them would not be the link.
        let group = DeviceGroup::new(&[self.members[from].control, self.members[to].control])?;
        let (Some((_, out)), Some((_, back))) = (group.end(0, 1), group.end(1, 0)) else {
            return Err(DeviceError::refused("a group of two has a link"));
        };
        let here = group.request(0, |card| card.allocate(bytes.max(1)))?;
        let there = group.request(1, |card| card.allocate(bytes.max(1)));
        let time = there.and_then(|there| {
            let (from, to) = (End { port: out, buffer: here }, End { port: back, buffer: there });
            let time = Pair { group: &group, from, to, bytes }.time(deadline);
            // What cannot be freed goes with the handle.
            let _ = group.request(1, |card| card.free(there));
            time
        });
        let _ = group.request(0, |card| card.free(here));
        time
    }
}

impl Pair<'_> {
    fn time(&self, deadline: &Deadline) -> Result<Duration, DeviceError> {
        let paced = |rank: Rank| self.group.members[rank].pace == Pace::CardTime;
        if paced(0) && paced(1) {
            return self.one_way(deadline);
        }
        let once = self.ping_pong(1, deadline)?.max(Duration::from_nanos(1));
        let rounds = (PLAY.as_nanos() / once.as_nanos() / RUNS as u128) as usize;
        let rounds = rounds.clamp(1, MOST_ROUNDS);
        let mut times = Vec::with_capacity(RUNS);
        for _ in 0..RUNS {
            times.push(self.ping_pong(rounds, deadline)?);
        }
        times.sort_unstable();
        Ok(times[RUNS / 2])
    }

    fn send(&self, end: End) -> Work {
        let from = Place { buffer: end.buffer, offset: 0 };
        Work::Send { from, length: self.bytes, port: end.port, tag: 0 }
    }

    fn receive(&self, end: End) -> Work {
        let into = Place { buffer: end.buffer, offset: 0 };
        let (length, port, landing) = (self.bytes, end.port, Landing::Store);
        Work::Receive { into, length, port, tag: 0, landing }
    }

    fn job(&self, deadline: &Deadline) -> Job<'_> {
        Job { group: self.group, number: job_number(), deadline: *deadline }
    }

    /// Gives a card work; if it does not take it, the job is over for those that did.
    fn submit(&self, job: &Job<'_>, rank: Rank, work: Vec<Work>) -> Result<Ticket, DeviceError> {
        let work: Vec<Descriptor> = work.into_iter().map(Descriptor::from).collect();
        let given = self.group.request(rank, |card| card.submit(job.number, &work));
        given.map_err(|error| job.give_up(error, &[], &[]))
    }

    fn one_way(&self, deadline: &Deadline) -> Result<Duration, DeviceError> {
        let job = self.job(deadline);
        let start = self.group.common_start(&[0, 1])?;
        let fence = Work::Fence { not_before_ps: start.0 };
        let sent = self.submit(&job, 0, vec![fence.clone(), self.send(self.from)])?;
        let came = self.submit(&job, 1, vec![fence, self.receive(self.to)])?;
        let finished = job.watch(&[sent, came])?;
        Ok(finished[1].since(start))
    }

    /// Half of the mean of some rounds. A first round brings the cards together and does not count.
    fn ping_pong(&self, rounds: usize, deadline: &Deadline) -> Result<Duration, DeviceError> {
        let job = self.job(deadline);
        let fence = Work::Fence { not_before_ps: 0 };
        let ping = [self.send(self.from), fence.clone(), self.receive(self.from), fence.clone()];
        let pong = [self.receive(self.to), fence.clone(), self.send(self.to), fence];
        // The sender has all of its work before the other end has any, so nothing waits for the host.
        let begun = self.submit(&job, 0, ping.to_vec())?;
        let many = |round: &[Work], count: usize| {
            (0..count).flat_map(|_| round.to_vec()).collect::<Vec<Work>>()
        };
        let sent = self.submit(&job, 0, many(&ping, rounds))?;
        let submitted = Instant::now();
        let came = self.submit(&job, 1, many(&pong, rounds + 1))?;
        job.watch(&[sent, came])?;
        let pace = self.group.members[0].pace;
        if !matches!(pace, Pace::Real | Pace::Unshaped) {
            return Ok(submitted.elapsed() / (2 * (rounds + 1)) as u32);
        }
        let at = |ticket| self.group.request(0, |card| card.wait(ticket, deadline.detect));
        let took = at(sent)?.since(at(begun)?);
        Ok(took / (2 * rounds) as u32)
    }
}
