// SPDX-License-Identifier: Apache-2.0
//! What the ranks of a job share in an MPI window of rank 0: a cursor, a rate of each rank, what each says of itself, outputs,
//! and a mark for every item that is done. Ranks read and write it with one-sided operations; rank 0 serves no requests.

use std::ops::Range;
use std::time::{Duration, Instant};

use spanker_fabric_mpi::{Window, World};

use super::JobError;

/// Words of a rank's statistics.
const FIELDS: usize = 9;

/// Round trips that are measured before the start.
const BARE: usize = 201;

/// What a rank did, as it says in the end. Times are in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct RankStats {
    /// 0 while it is at work, 1 if it is done, 2 if it has stopped before.
    pub(super) state: u64,
    pub(super) items: u64,
    pub(super) chunks: u64,
    /// Its tasks, one after the other.
    pub(super) busy: u64,
    pub(super) claims: u64,
    /// All round trips, and the shortest.
    pub(super) trips: u64,
    pub(super) shortest: u64,
    /// Until its last output was at rank 0.
    pub(super) took: u64,
    /// A round trip that carries nothing, before the start; 0 if this rank has not measured it.
    pub(super) bare: u64,
}

/// A rank is done.
pub(super) const DONE: u64 = 1;
/// A rank has stopped before the end.
pub(super) const STOPPED: u64 = 2;

impl RankStats {
    fn words(self) -> [u64; FIELDS] {
        let RankStats { state, items, chunks, busy, claims, trips, shortest, took, bare } = self;
        [state, items, chunks, busy, claims, trips, shortest, took, bare]
    }

    fn of(words: &[u64]) -> RankStats {
        let mut fields = [0; FIELDS];
        fields.iter_mut().zip(words).for_each(|(field, word)| *field = *word);
        let [state, items, chunks, busy, claims, trips, shortest, took, bare] = fields;
        RankStats { state, items, chunks, busy, claims, trips, shortest, took, bare }
    }
}

/// What all ranks can see.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Snapshot {
    /// How far the claims have come.
    pub(super) cursor: u64,
    /// Items a second of a task of each rank, as it was measured before the start.
    pub(super) speeds: Vec<f64>,
    /// Items a second of each rank, as it published last.
    pub(super) rates: Vec<f64>,
    pub(super) stats: Vec<RankStats>,
    /// What rank 0 has said about the end: 0 for nothing yet, [`DONE`] or [`STOPPED`].
    pub(super) end: u64,
}

/// One rank's handle of the window.
pub(super) struct ClaimWindow<'w> {
    window: Window<'w>,
    rank: usize,
    ranks: usize,
    items: usize,
    bytes: usize,
    /// The bits of this rank's rate in the window.
    own_rate: u64,
    /// Items whose outputs go with the next round trip, and are marked after it.
    unmarked: Vec<Range<usize>>,
    /// What a round trip adds to the words after the cursor.
    addends: Vec<u64>,
    stats: RankStats,
}

impl<'w> ClaimWindow<'w> {
    /// Opens it. Every rank must.
    pub(super) fn open(
        world: &'w World,
        items: usize,
        bytes: usize,
        timeout: Duration,
    ) -> Result<ClaimWindow<'w>, JobError> {
        let (rank, ranks) = (world.rank(), world.ranks());
        // Of each rank its rate, its speed and its stats, and the end.
        let words = ranks * (2 + FIELDS) + 1;
        let window = Window::open(world, 1 + words, items * (bytes + 1), timeout)?;
        let (unmarked, addends, stats) = (Vec::new(), vec![0; words], RankStats::default());
        Ok(ClaimWindow { window, rank, ranks, items, bytes, own_rate: 0, unmarked, addends, stats })
    }

    /// One round trip: takes `items` of the cursor and publishes this rank's rate. Returns the cursor before, and
    /// everybody's rate in `rates`.
    pub(super) fn claim(
        &mut self,
        items: u64,
        rate: f64,
        rates: &mut Vec<f64>,
    ) -> Result<u64, JobError> {
        self.addends[..self.ranks].fill(0);
        // A rate is the bits of a number, and nobody else adds to this word: the difference makes it the new one.
        self.addends[self.rank] = rate.to_bits().wrapping_sub(self.own_rate);
        let begun = Instant::now();
        let (before, words) = self.window.round(items, &self.addends[..self.ranks])?;
        let took = nanoseconds(begun.elapsed());
        rates.clear();
        rates.extend(words.iter().map(|bits| f64::from_bits(*bits)));
        self.own_rate = rate.to_bits();
        self.stats.claims += 1;
        self.stats.trips += took;
        let shortest = &mut self.stats.shortest;
        *shortest = if *shortest == 0 { took } else { took.min(*shortest) };
        Ok(before)
    }

    /// Measures a claim that takes nothing and sends nothing: the median of some.
    pub(super) fn measure(&mut self) -> Result<(), JobError> {
        let mut times = [0; BARE];
        self.addends[..self.ranks].fill(0);
        for time in &mut times {
            let begun = Instant::now();
            self.window.round(0, &self.addends[..self.ranks])?;
            *time = nanoseconds(begun.elapsed());
        }
        times.sort_unstable();
        self.stats.bare = times[BARE / 2];
        Ok(())
    }

    /// Sends outputs with the next round trip.
    pub(super) fn put(&mut self, items: Range<usize>, out: Vec<u8>) -> Result<(), JobError> {
        self.stats.items += items.len() as u64;
        self.stats.chunks += 1;
        self.window.put(items.start * self.bytes, out)?;
        self.unmarked.push(items);
        Ok(())
    }

    /// Adds to the time that tasks took.
    pub(super) fn busy(&mut self, time: Duration) {
        self.stats.busy += nanoseconds(time);
    }

    /// Waits until the outputs that were sent are at rank 0, and then marks them: a mark is never there before its output.
    pub(super) fn flush(&mut self) -> Result<(), JobError> {
        if self.unmarked.is_empty() {
            return Ok(());
        }
        self.addends.fill(0);
        self.window.round(0, &self.addends[..self.ranks])?;
        for items in self.unmarked.drain(..) {
            let mark = u8::try_from(self.rank + 1).unwrap_or(u8::MAX);
            self.window.put(self.items * self.bytes + items.start, vec![mark; items.len()])?;
        }
        self.window.round(0, &self.addends[..self.ranks])?;
        Ok(())
    }

    /// Publishes how fast a task of this rank is; once.
    pub(super) fn publish_speed(&mut self, speed: f64) -> Result<(), JobError> {
        self.add(self.ranks + self.rank, &[speed.to_bits()])
    }

    /// Publishes what this rank did; once.
    pub(super) fn publish_stats(&mut self, state: u64, took: Duration) -> Result<(), JobError> {
        let stats = RankStats { state, took: nanoseconds(took), ..self.stats };
        self.add(2 * self.ranks + self.rank * FIELDS, &stats.words())
    }

    /// Publishes how the job ended; once, by rank 0.
    pub(super) fn publish_end(&mut self, state: u64) -> Result<(), JobError> {
        self.add(self.addends.len() - 1, &[state])
    }

    fn add(&mut self, at: usize, words: &[u64]) -> Result<(), JobError> {
        self.addends.fill(0);
        self.addends[at..at + words.len()].copy_from_slice(words);
        self.window.round(0, &self.addends)?;
        Ok(())
    }

    /// Reads what all ranks can see.
    pub(super) fn snapshot(&mut self) -> Result<Snapshot, JobError> {
        self.addends.fill(0);
        let (cursor, words) = self.window.round(0, &self.addends)?;
        let (rates, rest) = words.split_at(self.ranks);
        let (speeds, rest) = rest.split_at(self.ranks);
        let numbers = |words: &[u64]| words.iter().map(|bits| f64::from_bits(*bits)).collect();
        let stats = rest.chunks_exact(FIELDS).take(self.ranks).map(RankStats::of).collect();
        let end = rest.last().copied().unwrap_or(0);
        Ok(Snapshot { cursor, speeds: numbers(speeds), rates: numbers(rates), stats, end })
    }

    /// All outputs as far as they are there.
    pub(super) fn outputs(&mut self) -> Result<Vec<u8>, JobError> {
        Ok(self.window.read(0, self.items * self.bytes)?)
    }

    /// For each item 0, or one more than the rank that did it.
    pub(super) fn marks(&mut self) -> Result<Vec<u8>, JobError> {
        Ok(self.window.read(self.items * self.bytes, self.items)?)
    }

    /// Lets MPI get on with what others want of this rank.
    pub(super) fn progress(&self) -> Result<(), JobError> {
        Ok(self.window.poke()?)
    }

    /// Closes it. Every rank must.
    pub(super) fn close(self) -> Result<(), JobError> {
        Ok(self.window.close()?)
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The items that nobody has marked, and how many each rank has.
pub(super) fn count(marks: &[u8], ranks: usize) -> (Vec<Range<usize>>, Vec<usize>) {
    let (mut missing, mut done, mut start) = (Vec::new(), vec![0; ranks], 0);
    for run in marks.chunk_by(|one, next| one == next) {
        match usize::from(run[0]).checked_sub(1).filter(|rank| *rank < ranks) {
            Some(rank) => done[rank] += run.len(),
            None => missing.push(start..start + run.len()),
        }
        start += run.len();
    }
    (missing, done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_without_a_mark_are_missing_and_the_others_are_counted_by_rank() {
        let (missing, done) = count(&[1, 1, 0, 0, 3, 3, 3, 0, 1, 9], 3);
        assert_eq!(missing, [2..4, 7..8, 9..10]);
        assert_eq!(done, [3, 0, 3]);
        assert_eq!(count(&[], 2), (Vec::new(), vec![0, 0]));
    }

    #[test]
    fn statistics_read_as_they_were_written() {
        let stats =
            RankStats { state: DONE, items: 5, shortest: 7, took: 8, ..RankStats::default() };
        assert_eq!(RankStats::of(&stats.words()), stats);
    }
}
