// SPDX-License-Identifier: Apache-2.0
//! Claims of ranks that share no memory but a few words: one cursor, to which all of them add, and one rate for each of
//! them. No rank gives out work: what a rank takes is decided here, by the rule of [`Claims`](crate::Claims), from
//! what it saw last.
//! There is no clock, no wire and no record of what is done here: whoever has them says what came back and when.

use std::ops::Range;

use crate::backend::Capabilities;
use crate::error::StealError;
use crate::job::Job;
use crate::rate::Rate;
use crate::rule;

/// A rank that leaves the rest to others looks so many times in the longest time of a chunk whether they take it.
const LOOKS: f64 = 8.0;
/// It takes some itself if nobody has for so many times what a chunk takes.
const STILL: f64 = 4.0;
/// Seconds that are not worth waiting for.
const SOON: f64 = 1e-9;
/// The part of the mean that a round trip's time moves it by.
const NEWEST: f64 = 0.25;

/// What a rank should do next.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Ask {
    /// Add so many items to the shared cursor, in one round trip that also tells this rank's rate and reads all rates.
    /// Nothing is added where it only wants to look.
    Add(u64),
    /// Nothing for so many seconds; then ask again.
    Later(f64),
    /// Everything is taken.
    Over,
}

/// What one rank knows of a job that it shares with others, and how much it takes of it.
///
/// # Examples
///
/// ```
/// use spanker_steal::{Ask, Capabilities, Job, RankClaims};
///
/// let (mut cursor, mut rates) = (0, [0.0; 2]); // what two ranks share
/// let mut rank = RankClaims::new(&Job::new(1000, 8), 0, 2, &Capabilities::PLAIN)?;
/// let Ask::Add(items) = rank.ask(0.0) else { panic!("nothing is taken yet") };
/// let before = cursor;
/// cursor += items;
/// rates[0] = rank.rate();
/// assert_eq!(rank.answer(items, before, &rates, 0.0, 3e-6), Some(0..1));
/// rank.timed(1, 1e-3);
/// assert_eq!(rank.rate(), 1000.0);
/// # Ok::<(), spanker_steal::StealError>(())
/// ```
#[derive(Debug, Clone)]
pub struct RankClaims {
    rank: usize,
    lanes: f64,
    items: usize,
    unit: usize,
    most: usize,
    cap: f64,
    rate: Rate,
    /// The largest task that this rank completed.
    largest: usize,
    /// Items a second of all tasks of each rank, as they told last.
    rates: Vec<f64>,
    /// The cursor as it was seen last, when that was, and since when it has been there.
    cursor: usize,
    seen: f64,
    moved: f64,
    /// Seconds of a round trip.
    trip: f64,
}

impl RankClaims {
    /// A rank of so many that share `job`, with a backend of these capabilities.
    ///
    /// # Errors
    ///
    /// What is wrong with the job, or that it has priorities: there is one cursor.
    pub fn new(
        job: &Job,
        rank: usize,
        ranks: usize,
        capabilities: &Capabilities,
    ) -> Result<RankClaims, StealError> {
        job.check(ranks)?;
        let bad = |what: String| Err(StealError::Job { what });
        if !job.urgent.is_empty() {
            return bad("a job over several ranks has no priorities".into());
        }
        if rank >= ranks {
            return bad(format!("rank {rank}: there are {ranks}"));
        }
        let launch = capabilities.launch.map(|launch| launch.as_secs_f64());
        let unit = job.unit();
        let most = capabilities.most_items.unwrap_or(usize::MAX).min(job.most_items());
        Ok(RankClaims {
            rank,
            lanes: capabilities.lanes() as f64,
            items: job.items,
            unit,
            most: (most / unit).max(1).saturating_mul(unit),
            cap: job.options.cap.as_secs_f64(),
            rate: Rate::told(capabilities.rate, launch),
            largest: 0,
            rates: vec![0.0; ranks],
            cursor: 0,
            seen: 0.0,
            moved: 0.0,
            trip: 0.0,
        })
    }

    /// Items a second of all tasks of this rank together, to tell the others; zero while it is unknown.
    #[must_use]
    pub fn rate(&self) -> f64 {
        self.rate.items_per_second() * self.lanes
    }

    /// Seconds of a round trip, as a mean in which the last ones weigh most.
    #[must_use]
    pub fn trip(&self) -> f64 {
        self.trip
    }

    /// Seconds that a task of so many items will take, as far as that is known.
    #[must_use]
    pub fn expected(&self, items: usize) -> Option<f64> {
        let rate = self.rate.items_per_second();
        (rate > 0.0).then(|| self.rate.launch() + items as f64 / rate)
    }

    /// What this rank should do at `now`, in seconds since the start, where one of its tasks could begin.
    #[must_use]
    pub fn ask(&self, now: f64) -> Ask {
        let left = self.items.saturating_sub(self.cursor);
        if left == 0 {
            return Ask::Over;
        }
        match self.chunk(now) {
            // Beyond what was seen to be left nobody adds, so that the cursor never goes far past the end.
            Some(items) => Ask::Add(items.min(left) as u64),
            None => {
                let due = self.seen + self.cap / LOOKS - now;
                if due > SOON { Ask::Later(due) } else { Ask::Add(0) }
            }
        }
    }

    /// How many items to take, in whole units; none where the others would be through with everything before.
    fn chunk(&self, now: f64) -> Option<usize> {
        let unit = self.unit as f64;
        let rate = self.rate.items_per_second() / unit;
        let most = rule::most(self.largest, rate > 0.0, self.unit).min(self.most);
        if rate <= 0.0 {
            return Some(self.unit);
        }
        let others = self.rates.iter().enumerate().filter(|(rank, _)| *rank != self.rank);
        let (mut sum, mut fastest) = (0.0, self.rate());
        for (_, rate) in others {
            sum += rate;
            fastest = rate.max(fastest);
        }
        // The others have gone on since.
        let gone = sum * (now - self.seen).max(0.0);
        let left = ((self.items - self.cursor) as f64 - gone).max(0.0);
        let all = sum + self.rate();
        let launch = (self.rate.launch() + self.trip).max(rule::LEAST_LAUNCH);
        let floor = rule::floor_seconds(launch, now + left / all);
        let cap = rule::cap_seconds(self.cap, floor);
        let pace = rule::Pace { rate, launch, floor, cap };
        let still = now - self.moved > STILL * cap.max(unit / fastest);
        // Whoever is as fast as the fastest rank must not decline, nor anybody where nobody takes anything.
        let fastest = if still || self.rate() >= 0.5 * fastest { 0.0 } else { fastest / unit };
        let part = left * rule::part_seconds(all);
        let units = rule::units(&pace, part, left / unit, all / unit, fastest)?;
        Some(units.saturating_mul(self.unit).min(most))
    }

    /// Takes what came back at `now` from a round trip that began at `sent`: the cursor before `asked` was added, and
    /// what all ranks told of their rates. Returns the items that this rank has to do.
    pub fn answer(
        &mut self,
        asked: u64,
        before: u64,
        rates: &[f64],
        sent: f64,
        now: f64,
    ) -> Option<Range<usize>> {
        for (known, told) in self.rates.iter_mut().zip(rates) {
            *known = if told.is_finite() { told.max(0.0) } else { 0.0 };
        }
        let trip = (now - sent).max(0.0);
        self.trip = if self.trip > 0.0 { self.trip + NEWEST * (trip - self.trip) } else { trip };
        let place = |cursor: u64| usize::try_from(cursor).unwrap_or(self.items).min(self.items);
        let (start, end) = (place(before), place(before.saturating_add(asked)));
        if end > self.cursor {
            self.moved = now;
        }
        self.cursor = self.cursor.max(end);
        self.seen = now;
        (start < end).then_some(start..end)
    }

    /// Takes how long one of this rank's tasks took. A timing that cannot be true is not believed.
    pub fn timed(&mut self, items: usize, seconds: f64) {
        self.largest = self.largest.max(items);
        let _ = self.rate.sample(items, seconds);
    }
}
