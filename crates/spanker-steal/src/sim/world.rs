// SPDX-License-Identifier: Apache-2.0
//! The events of a simulated run: lanes that claim, answers that come, time that passes.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::{Scenario, Simulated, expected};
use crate::backend::{Capabilities, Failure};
use crate::claims::{Claim, Claims};
use crate::fault::Trouble;
use crate::ledger::audit::{mix, part_of, unit_sums};
use crate::ledger::{Ledger, Member, Token, Verdict};
use crate::spans::Spans;

/// The number of simulated runs; answers of the one before are those of [`Trouble::Stale`].
const EPOCH: u64 = 7;
/// More events than this for each item and backend are no end.
const MOST_EVENTS: usize = 200;
/// An answer that comes twice comes again after so many seconds.
const ECHO: f64 = 2e-4;
/// Lanes that wait look again so often.
const IDLE: f64 = 0.02;

/// What happens when.
enum Event {
    /// A lane may claim.
    Free(usize),
    /// A lane's task ends.
    Answer(Box<Answer>),
    /// An answer comes once more.
    Echo(Box<Answer>),
}

struct Answer {
    token: Token,
    items: Range<usize>,
    trouble: Option<Trouble>,
    corrupt: bool,
}

struct World<'s> {
    scenario: &'s Scenario,
    ledger: Ledger,
    claims: Arc<Claims>,
    /// The backend of each lane, and how many tasks it has had.
    lanes: Vec<(usize, u64)>,
    now: f64,
    /// By time, then in order of what was told first.
    agenda: BinaryHeap<Reverse<(u64, usize)>>,
    events: Vec<Option<Event>>,
    waiting: Vec<usize>,
    stirs: u64,
    /// Faults of each backend that have happened.
    spent: Vec<Vec<bool>>,
    launches: usize,
    kept: Spans,
    duplicated: usize,
    out: Vec<u8>,
    chance: u64,
    /// Whether the clock ever jumps.
    jumps: bool,
}

pub(super) fn run(scenario: &Scenario) -> Simulated {
    let members = scenario.backends.iter().map(|backend| Member {
        name: backend.name.clone(),
        capabilities: Capabilities {
            in_flight: backend.lanes,
            rate: backend.told.then_some(backend.rate),
            launch: backend.told.then_some(backend.launch),
            most_items: None,
            trusted: backend.trusted,
        },
    });
    let opened = scenario.job.check(scenario.backends.len()).and_then(|bytes| {
        Ledger::open(EPOCH, &scenario.job, members.collect()).map(|opened| (bytes, opened))
    });
    let (bytes, (ledger, claims)) = match opened {
        Ok(opened) => opened,
        Err(error) => {
            let outcome = Err(error);
            let lost = scenario.job.items;
            let (duplicated, launches, out) = (0, 0, Vec::new());
            return Simulated {
                outcome,
                seconds: 0.0,
                launches,
                lost,
                duplicated,
                hung: false,
                out,
            };
        }
    };
    let mut faults = scenario.backends.iter().flat_map(|backend| &backend.faults);
    let jumps = faults.any(|fault| matches!(fault.trouble, Trouble::Clock(_)));
    let lanes: Vec<_> = ledger.lanes().map(|backend| (backend, 0)).collect();
    let mut world = World {
        scenario,
        ledger,
        claims,
        now: 0.0,
        agenda: BinaryHeap::new(),
        events: Vec::new(),
        waiting: Vec::new(),
        stirs: 0,
        spent: scenario.backends.iter().map(|b| vec![false; b.faults.len()]).collect(),
        launches: 0,
        kept: Spans::new(),
        duplicated: 0,
        out: vec![0; bytes],
        chance: scenario.seed,
        jumps,
        lanes,
    };
    for lane in 0..world.lanes.len() {
        world.plan(0.0, Event::Free(lane));
    }
    let hung = world.go();
    let items = scenario.job.items;
    Simulated {
        seconds: world.now,
        launches: world.launches,
        lost: items - world.kept.len(),
        duplicated: world.duplicated,
        hung,
        out: world.out,
        outcome: world.ledger.close(),
    }
}

impl World<'_> {
    /// Lets things happen until the run is over. Returns whether there was no end to it.
    fn go(&mut self) -> bool {
        let most = MOST_EVENTS * (self.scenario.job.items.min(1 << 24) + self.lanes.len() + 1000);
        for _ in 0..most {
            if self.ledger.is_over() {
                return false;
            }
            let tick = self.real(self.ledger.next_tick()).max(self.now);
            let next = self.agenda.peek().map(|Reverse((at, _))| f64::from_bits(*at));
            if next.is_none_or(|next| tick < next) {
                // A little later, so that time goes on whatever the ledger is waiting for.
                self.now = tick + 1e-6;
                self.ledger.tick(self.stamp());
            } else if let Some(Reverse((at, place))) = self.agenda.pop() {
                self.now = f64::from_bits(at).max(self.now);
                match self.events[place].take() {
                    Some(Event::Free(lane)) => self.claim(lane),
                    Some(Event::Answer(answer)) => {
                        if answer.token.epoch == EPOCH {
                            self.plan(self.now, Event::Free(answer.token.lane));
                        }
                        self.answer(*answer);
                    }
                    Some(Event::Echo(answer)) => self.answer(*answer),
                    None => {}
                }
            }
            for items in self.ledger.drain_thrown_out() {
                self.kept.remove(items);
            }
            self.wake();
        }
        true
    }

    fn plan(&mut self, at: f64, event: Event) {
        if at.is_finite() {
            self.agenda.push(Reverse((at.to_bits(), self.events.len())));
            self.events.push(Some(event));
        }
    }

    /// Lanes that wait try again when something has changed.
    fn wake(&mut self) {
        let stirs = self.claims.stirs();
        if stirs != self.stirs {
            self.stirs = stirs;
            for lane in std::mem::take(&mut self.waiting) {
                self.plan(self.now, Event::Free(lane));
            }
        }
    }

    /// How far the clock is off.
    fn skew(&self, now: f64) -> f64 {
        if !self.jumps {
            return 0.0;
        }
        let faults = self.scenario.backends.iter().flat_map(|backend| &backend.faults);
        let jumps = faults.filter_map(|fault| match fault.trouble {
            Trouble::Clock(by) if fault.at.as_secs_f64() <= now => Some(by),
            _ => None,
        });
        jumps.sum()
    }

    /// What the clock shows.
    fn stamp(&self) -> Duration {
        Duration::try_from_secs_f64(self.now + self.skew(self.now)).unwrap_or(Duration::ZERO)
    }

    /// When the clock will show `stamp`, as far as one can know now.
    fn real(&self, stamp: Duration) -> f64 {
        stamp.as_secs_f64() - self.skew(self.now)
    }

    fn claim(&mut self, lane: usize) {
        let (backend, _) = self.lanes[lane];
        let piece = match self.claims.claim(backend) {
            Claim::Over => return,
            Claim::Wait => {
                // What is left may suit this backend later: speeds change without a word.
                if self.claims.left() > 0 {
                    self.plan(self.now + IDLE, Event::Free(lane));
                } else {
                    self.waiting.push(lane);
                }
                return;
            }
            Claim::Take(piece) => piece,
        };
        self.launches += 1;
        self.lanes[lane].1 += 1;
        let token = Token { epoch: EPOCH, lane, serial: self.lanes[lane].1 };
        let items = piece.items.clone();
        let me = &self.scenario.backends[backend];
        let begun = self.now;
        let start = begun + me.launch.as_secs_f64();
        self.chance = mix(self.chance, 1);
        let longer = 1.0 + self.scenario.jitter * part_of(self.chance);
        let cost = self.scenario.cost(&items) * longer;
        let end = me.done_at(start, cost);
        if !end.is_finite()
            && let Some(at) = me.killed_at()
        {
            // Who is killed does not answer, but that it is gone is noticed.
            self.ledger.claimed(token, piece, self.stamp());
            let answer = Answer { token, items, trouble: Some(Trouble::Kill), corrupt: false };
            return self.plan(at.max(begun), Event::Answer(Box::new(answer)));
        }
        let trouble = self.trouble(backend, end);
        if trouble == Some(Trouble::Vanish) {
            return;
        }
        self.ledger.claimed(token, piece, self.stamp());
        if trouble == Some(Trouble::Stale) {
            let token = Token { epoch: EPOCH - 1, ..token };
            let answer = Answer { token, items: items.clone(), trouble, corrupt: true };
            self.plan(begun + (end - begun) / 2.0, Event::Answer(Box::new(answer)));
        }
        let corrupt = self.corrupts(backend, end);
        self.plan(end, Event::Answer(Box::new(Answer { token, items, trouble, corrupt })));
    }

    /// A trouble that happens to the task that ends at `end`, if there is one that has not happened.
    fn trouble(&mut self, backend: usize, end: f64) -> Option<Trouble> {
        let faults = &self.scenario.backends[backend].faults;
        let spent = &mut self.spent[backend];
        for (fault, spent) in faults.iter().zip(spent) {
            let at_rest = matches!(fault.trouble, Trouble::Hang(_));
            if !*spent && fault.trouble.is_passing() && !at_rest && fault.at.as_secs_f64() <= end {
                *spent = true;
                return Some(fault.trouble);
            }
        }
        None
    }

    fn corrupts(&self, backend: usize, end: f64) -> bool {
        let faults = &self.scenario.backends[backend].faults;
        faults.iter().any(|f| f.trouble == Trouble::Corrupt && f.at.as_secs_f64() <= end)
    }

    fn answer(&mut self, answer: Answer) {
        let Answer { token, mut items, trouble, corrupt } = answer;
        let bytes = self.scenario.job.bytes;
        let grain = self.scenario.job.unit();
        let mut out = vec![0; items.len() * bytes];
        expected(items.clone(), &mut out);
        if corrupt {
            // No two are wrong in the same way.
            let wrong = 1 + self.lanes[token.lane].0 as u8;
            out.iter_mut().for_each(|byte| *byte ^= wrong);
        }
        let checksums = self.scenario.job.options.checksums;
        let sums = checksums.then(|| unit_sums(&out, items.len(), grain, bytes));
        if trouble == Some(Trouble::Garble)
            && let Some(byte) = out.last_mut()
        {
            *byte ^= 0x04;
        }
        let at = self.stamp();
        match trouble {
            Some(Trouble::Mute) => return,
            Some(Trouble::Fail) => {
                let failure = Failure::passing("rehearsed");
                return self.ledger.failed(token, &failure, at);
            }
            Some(Trouble::Kill) => {
                return self.ledger.failed(token, &Failure::lasting("killed"), at);
            }
            Some(Trouble::Lie) => {
                items.end += 1;
                out.resize(items.len() * bytes, 0);
            }
            _ => {}
        }
        if trouble == Some(Trouble::Echo) {
            // The lane has something else by then.
            let again = Answer { token, items: items.clone(), trouble: None, corrupt };
            self.plan(self.now + ECHO, Event::Echo(Box::new(again)));
        }
        self.deliver(token, &items, &out, sums.as_deref(), at);
    }

    fn deliver(
        &mut self,
        token: Token,
        items: &Range<usize>,
        out: &[u8],
        sums: Option<&[u32]>,
        at: Duration,
    ) {
        let verdict = self.ledger.completed(token, items.clone(), out, sums, at);
        for items in self.ledger.drain_thrown_out() {
            self.kept.remove(items);
        }
        if verdict == Verdict::Commit {
            let bytes = self.scenario.job.bytes;
            let end = items.end.min(self.scenario.job.items);
            let length = (end - items.start) * bytes;
            self.out[items.start * bytes..][..length].copy_from_slice(&out[..length]);
            self.duplicated += items.len() - self.kept.insert(items.clone());
        }
    }
}
