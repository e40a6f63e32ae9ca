// SPDX-License-Identifier: Apache-2.0
//! What the ranks of a job share: a cursor, a rate of each, what each says of itself, outputs, and a mark for every item
//! that is done. All of it is memory of rank 0; nobody there answers for it.

use std::ops::Range;
use std::time::{Duration, Instant};

use spanker_fabric_mpi::{MpiError, Window, World};

/// What a rank says of itself, a word each.
const FIELDS: usize = 9;

/// Round trips that are measured before the start.
const BARE: usize = 201;

/// What a rank says of itself in the end. Times are in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Account {
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

impl Account {
    fn words(self) -> [u64; FIELDS] {
        let Account { state, items, chunks, busy, claims, trips, shortest, took, bare } = self;
        [state, items, chunks, busy, claims, trips, shortest, took, bare]
    }

    fn of(words: &[u64]) -> Account {
        let mut fields = [0; FIELDS];
        fields.iter_mut().zip(words).for_each(|(field, word)| *field = *word);
        let [state, items, chunks, busy, claims, trips, shortest, took, bare] = fields;
        Account { state, items, chunks, busy, claims, trips, shortest, took, bare }
    }
}

/// What everybody can see.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Seen {
    /// How far the claims have come.
    pub(super) cursor: u64,
    /// Items a second of a task of each rank, as it was measured before the start.
    pub(super) speeds: Vec<f64>,
    /// Items a second of each rank, as it told last.
    pub(super) rates: Vec<f64>,
    pub(super) accounts: Vec<Account>,
    /// What rank 0 has said about the end: nothing yet, that all is well, or not.
    pub(super) end: u64,
}

/// One rank's end of what is shared.
pub(super) struct Board<'w> {
    window: Window<'w>,
    rank: usize,
    ranks: usize,
    items: usize,
    bytes: usize,
    /// The bits of the rate that this rank told last.
    told: u64,
    /// Items whose outputs go with the next round.
    leaving: Vec<Range<usize>>,
    /// What is added to the words after the cursor.
    more: Vec<u64>,
    account: Account,
}

impl<'w> Board<'w> {
    /// Opens it. Every rank must.
    pub(super) fn open(
        world: &'w World,
        items: usize,
        bytes: usize,
        patience: Duration,
    ) -> Result<Board<'w>, MpiError> {
        let (rank, ranks) = (world.rank(), world.ranks());
        // Of each rank its rate, its speed and its account, and the end.
        let words = ranks * (2 + FIELDS) + 1;
        let window = Window::open(world, 1 + words, items * (bytes + 1), patience)?;
        let (leaving, more, account) = (Vec::new(), vec![0; words], Account::default());
        Ok(Board { window, rank, ranks, items, bytes, told: 0, leaving, more, account })
    }

    /// One round trip: takes `items` of the cursor and tells this rank's rate. Returns the cursor before, and
    /// everybody's rate in `rates`.
    pub(super) fn claim(
        &mut self,
        items: u64,
        rate: f64,
        rates: &mut Vec<f64>,
    ) -> Result<u64, MpiError> {
        self.more[..self.ranks].fill(0);
        // A rate is the bits of a number, and nobody else adds to this word: the difference makes it the new one.
        self.more[self.rank] = rate.to_bits().wrapping_sub(self.told);
        let begun = Instant::now();
        let (before, words) = self.window.round(items, &self.more[..self.ranks])?;
        let took = nanoseconds(begun.elapsed());
        rates.clear();
        rates.extend(words.iter().map(|bits| f64::from_bits(*bits)));
        self.told = rate.to_bits();
        self.account.claims += 1;
        self.account.trips += took;
        let shortest = &mut self.account.shortest;
        *shortest = if *shortest == 0 { took } else { took.min(*shortest) };
        Ok(before)
    }

    /// Measures a claim that takes nothing and sends nothing: the median of some.
    pub(super) fn measure(&mut self) -> Result<(), MpiError> {
        let mut times = [0; BARE];
        self.more[..self.ranks].fill(0);
        for time in &mut times {
            let begun = Instant::now();
            self.window.round(0, &self.more[..self.ranks])?;
            *time = nanoseconds(begun.elapsed());
        }
        times.sort_unstable();
        self.account.bare = times[BARE / 2];
        Ok(())
    }

    /// Sends outputs with the next round.
    pub(super) fn deliver(&mut self, items: Range<usize>, out: Vec<u8>) -> Result<(), MpiError> {
        self.account.items += items.len() as u64;
        self.account.chunks += 1;
        self.window.put(items.start * self.bytes, out)?;
        self.leaving.push(items);
        Ok(())
    }

    /// Adds to the time that tasks took.
    pub(super) fn busy(&mut self, time: Duration) {
        self.account.busy += nanoseconds(time);
    }

    /// Waits until the outputs that were sent are at rank 0, and then marks them: a mark is never there before its output.
    pub(super) fn settle(&mut self) -> Result<(), MpiError> {
        if self.leaving.is_empty() {
            return Ok(());
        }
        self.more.fill(0);
        self.window.round(0, &self.more[..self.ranks])?;
        for items in self.leaving.drain(..) {
            let mark = u8::try_from(self.rank + 1).unwrap_or(u8::MAX);
            self.window.put(self.items * self.bytes + items.start, vec![mark; items.len()])?;
        }
        self.window.round(0, &self.more[..self.ranks])?;
        Ok(())
    }

    /// Tells how fast a task of this rank is; once.
    pub(super) fn tell_speed(&mut self, speed: f64) -> Result<(), MpiError> {
        self.add(self.ranks + self.rank, &[speed.to_bits()])
    }

    /// Tells what this rank did; once.
    pub(super) fn tell(&mut self, state: u64, took: Duration) -> Result<(), MpiError> {
        let account = Account { state, took: nanoseconds(took), ..self.account };
        self.add(2 * self.ranks + self.rank * FIELDS, &account.words())
    }

    /// Tells how it ended; once, by rank 0.
    pub(super) fn tell_end(&mut self, state: u64) -> Result<(), MpiError> {
        self.add(self.more.len() - 1, &[state])
    }

    fn add(&mut self, at: usize, words: &[u64]) -> Result<(), MpiError> {
        self.more.fill(0);
        self.more[at..at + words.len()].copy_from_slice(words);
        self.window.round(0, &self.more)?;
        Ok(())
    }

    /// What everybody can see.
    pub(super) fn look(&mut self) -> Result<Seen, MpiError> {
        self.more.fill(0);
        let (cursor, words) = self.window.round(0, &self.more)?;
        let (rates, rest) = words.split_at(self.ranks);
        let (speeds, rest) = rest.split_at(self.ranks);
        let numbers = |words: &[u64]| words.iter().map(|bits| f64::from_bits(*bits)).collect();
        let accounts = rest.chunks_exact(FIELDS).take(self.ranks).map(Account::of).collect();
        let end = rest.last().copied().unwrap_or(0);
        Ok(Seen { cursor, speeds: numbers(speeds), rates: numbers(rates), accounts, end })
    }

    /// All outputs as far as they are there.
    pub(super) fn outputs(&mut self) -> Result<Vec<u8>, MpiError> {
        self.window.read(0, self.items * self.bytes)
    }

    /// For each item 0, or one more than the rank that did it.
    pub(super) fn marks(&mut self) -> Result<Vec<u8>, MpiError> {
        self.window.read(self.items * self.bytes, self.items)
    }

    /// Lets MPI get on with what others want of this rank.
    pub(super) fn poke(&self) -> Result<(), MpiError> {
        self.window.poke()
    }

    /// Closes it. Every rank must.
    pub(super) fn close(self) -> Result<(), MpiError> {
        self.window.close()
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
    fn accounts_read_as_they_were_told() {
        let account = Account { state: DONE, items: 5, shortest: 7, took: 8, ..Account::default() };
        assert_eq!(Account::of(&account.words()), account);
    }
}
