// SPDX-License-Identifier: Apache-2.0
//! Ranks that share a job over a wire, in virtual time: each decides by itself what it takes, and a round trip to the
//! shared words takes time. Nobody does again what a rank took that stopped: it is named as missing.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;
use std::time::Duration;

use super::{Scenario, SimBackend};
use crate::backend::Capabilities;
use crate::error::StealError;
use crate::fault::{Fault, Trouble};
use crate::ledger::audit::{mix, part_of};
use crate::ranks::{Ask, RankClaims};
use crate::spans::Spans;

/// More events than this for each item and rank are no end.
const MOST_EVENTS: usize = 200;

/// What came of ranks that shared a job.
#[derive(Debug, Clone, PartialEq)]
pub struct SimulatedRanks {
    /// Virtual time until the last task that was completed.
    pub seconds: f64,
    /// Items that each rank completed.
    pub items: Vec<usize>,
    /// Round trips of each rank.
    pub trips: Vec<usize>,
    /// Items that nobody completed, in order.
    pub missing: Vec<Range<usize>>,
    /// Items that were completed twice.
    pub duplicated: usize,
    /// Nothing ended it.
    pub hung: bool,
}

/// What happens when, to which rank.
enum Event {
    /// It may ask.
    Ask,
    /// What it sent reaches the shared words.
    Arrive { asked: u64, sent: f64 },
    /// What came back reaches it.
    Back { asked: u64, sent: f64, before: u64, rates: Vec<f64> },
    /// A task of it ends.
    Done { items: Range<usize>, begun: f64 },
}

struct Rank {
    claims: RankClaims,
    /// Tasks that could begin.
    free: usize,
    /// It has asked, or will.
    asking: bool,
    trips: usize,
    items: usize,
}

struct World<'s> {
    scenario: &'s Scenario,
    trip: f64,
    ranks: Vec<Rank>,
    /// The shared words.
    cursor: u64,
    rates: Vec<f64>,
    /// By time, then in order of what was told first.
    agenda: BinaryHeap<Reverse<(u64, usize)>>,
    events: Vec<Option<(usize, Event)>>,
    done: Spans,
    duplicated: usize,
    last: f64,
    chance: u64,
}

/// Runs a scenario in virtual time where every backend is a rank of its own and a round trip to what they share takes
/// `trip`. Of faults, ranks can be killed, hang and slow down; nothing else happens to them.
///
/// # Errors
///
/// What is wrong with the job.
///
/// # Examples
///
/// ```
/// use spanker_steal::{Job, Scenario, SimBackend, ideal_seconds, simulate_ranks};
/// use std::time::Duration;
///
/// let launch = Duration::from_micros(50);
/// let rank = |(place, speed)| SimBackend::new(format!("rank{place}"), speed, launch);
/// let backends = [1e5, 1e5, 2e5, 4e5].into_iter().enumerate().map(rank).collect();
/// let scenario =
///     Scenario { job: Job::new(800_000, 0), backends, hot: Vec::new(), jitter: 0.0, seed: 1 };
/// let run = simulate_ranks(&scenario, Duration::from_micros(100))?;
/// assert!(run.missing.is_empty() && run.duplicated == 0);
/// assert!(ideal_seconds(&scenario) / run.seconds > 0.97);
/// # Ok::<(), spanker_steal::StealError>(())
/// ```
pub fn simulate_ranks(scenario: &Scenario, trip: Duration) -> Result<SimulatedRanks, StealError> {
    let count = scenario.backends.len();
    scenario.job.check(count)?;
    let mut ranks = Vec::new();
    for (rank, backend) in scenario.backends.iter().enumerate() {
        let capabilities = Capabilities {
            in_flight: backend.lanes,
            rate: backend.told.then_some(backend.rate),
            launch: backend.told.then_some(backend.launch),
            ..Capabilities::PLAIN
        };
        let claims = RankClaims::new(&scenario.job, rank, count, &capabilities)?;
        let free = capabilities.lanes();
        ranks.push(Rank { claims, free, asking: false, trips: 0, items: 0 });
    }
    let mut world = World {
        scenario,
        trip: trip.as_secs_f64(),
        rates: ranks.iter().map(|rank| rank.claims.rate()).collect(),
        ranks,
        cursor: 0,
        agenda: BinaryHeap::new(),
        events: Vec::new(),
        done: Spans::new(),
        duplicated: 0,
        last: 0.0,
        chance: scenario.seed,
    };
    (0..count).for_each(|rank| world.ask_at(rank, 0.0));
    let hung = world.go();
    Ok(SimulatedRanks {
        seconds: world.last,
        items: world.ranks.iter().map(|rank| rank.items).collect(),
        trips: world.ranks.iter().map(|rank| rank.trips).collect(),
        missing: world.done.gaps(0..scenario.job.items).collect(),
        duplicated: world.duplicated,
        hung,
    })
}

/// When a rank does nothing any more.
fn stops_at(backend: &SimBackend) -> f64 {
    let stops = |fault: &&Fault| matches!(fault.trouble, Trouble::Kill | Trouble::Hang(None));
    let times = backend.faults.iter().filter(stops).map(|fault| fault.at.as_secs_f64());
    times.fold(f64::INFINITY, f64::min)
}

impl World<'_> {
    /// Lets things happen until nobody does anything any more. Returns whether there was no end to it.
    fn go(&mut self) -> bool {
        let most = MOST_EVENTS * (self.scenario.job.items.min(1 << 24) + self.ranks.len() + 1000);
        for _ in 0..most {
            let Some(Reverse((at, place))) = self.agenda.pop() else { return false };
            let now = f64::from_bits(at);
            let Some((rank, event)) = self.events[place].take() else { continue };
            if let Event::Arrive { asked, sent } = event {
                // What is on its way arrives, whatever becomes of who sent it.
                let before = self.cursor;
                self.cursor += asked;
                self.rates[rank] = self.ranks[rank].claims.rate();
                let rates = self.rates.clone();
                let half = self.half_trip();
                self.plan(now + half, rank, Event::Back { asked, sent, before, rates });
            } else if now < stops_at(&self.scenario.backends[rank]) {
                self.happens(rank, now, event);
            }
        }
        true
    }

    fn plan(&mut self, at: f64, rank: usize, event: Event) {
        if at.is_finite() {
            self.agenda.push(Reverse((at.to_bits(), self.events.len())));
            self.events.push(Some((rank, event)));
        }
    }

    /// A number from 0 to 1.
    fn chance(&mut self) -> f64 {
        self.chance = mix(self.chance, 1);
        part_of(self.chance)
    }

    fn half_trip(&mut self) -> f64 {
        0.5 * self.trip * (1.0 + self.scenario.jitter * self.chance())
    }

    /// Has a rank ask, if a task of it could begin and it is not about to ask already.
    fn ask_at(&mut self, rank: usize, at: f64) {
        if self.ranks[rank].free > 0 && !self.ranks[rank].asking {
            self.ranks[rank].asking = true;
            self.plan(at, rank, Event::Ask);
        }
    }

    fn happens(&mut self, rank: usize, now: f64, event: Event) {
        match event {
            Event::Arrive { .. } => {}
            Event::Ask => match self.ranks[rank].claims.ask(now) {
                Ask::Over => {}
                Ask::Later(seconds) => self.plan(now + seconds, rank, Event::Ask),
                Ask::Add(asked) => {
                    self.ranks[rank].trips += 1;
                    let half = self.half_trip();
                    self.plan(now + half, rank, Event::Arrive { asked, sent: now });
                }
            },
            Event::Back { asked, sent, before, rates } => {
                let me = &mut self.ranks[rank];
                me.asking = false;
                if let Some(items) = me.claims.answer(asked, before, &rates, sent, now) {
                    me.free -= 1;
                    let longer = 1.0 + self.scenario.jitter * self.chance();
                    let backend = &self.scenario.backends[rank];
                    let start = now + backend.launch.as_secs_f64();
                    let end = backend.done_at(start, self.scenario.cost(&items) * longer);
                    self.plan(end, rank, Event::Done { items, begun: now });
                }
                self.ask_at(rank, now);
            }
            Event::Done { items, begun } => {
                let me = &mut self.ranks[rank];
                me.free += 1;
                me.items += items.len();
                me.claims.timed(items.len(), now - begun);
                self.duplicated += items.len() - self.done.insert(items);
                self.last = self.last.max(now);
                self.ask_at(rank, now);
            }
        }
    }
}
