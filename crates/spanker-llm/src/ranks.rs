// SPDX-License-Identifier: Apache-2.0
//! Cards that are ranks of a fabric: processes, on one host or several, or threads in tests. Rank `r` plays the
//! plan's card `r`, and holds that card's part of the model alone.
//!
//! Rank 0 is the leader. It gives orders ([`Leader`]): lay this plan out, run this step, it is over. The others
//! are workers ([`run_worker`]). A step is one order; its exchanges are messages among the ranks of a stage, and at its end every
//! card tells the leader what came of it.
//!
//! Every wait ends with what it waits for, with the group's fault, or when `timeout` is over. So the leader must
//! be heard of within that time: whoever lets the leader wait for something else calls [`Leader::heartbeat`] (or
//! [`Runner::heartbeat`]) several times as often, to which all ranks answer.

mod audit;
mod clock;
mod exchange;
mod marks;
mod measure;
mod order;
mod part;
mod record;
mod rounds;
mod supply;
mod wire;
mod worker;

use std::collections::VecDeque;
use std::ops::{DerefMut, Range};
use std::sync::Arc;
use std::time::{Duration, Instant};

use spanker_fabric::{Fabric, FabricError};
use spanker_plan::{ExchangeTable, Plan, WindowCache};
use spanker_topology::ExchangeKind;

use crate::card::{self, Report};
use crate::layout::{self, Planned};
use crate::runner::{Asked, MemoryUse, Outcome, Runner, Step, Timing};
use crate::{LlmError, Network};
use audit::{Audited, Checked};
pub use measure::RankSamples;
use order::Order;
use part::{Ran, RankPart, Stepping};
use record::Recording;
pub use supply::{
    CHUNK_BYTES, Store, chunk_count, chunk_range, fetch_chunks, reading_time, supply_chunks,
};
use wire::{End, LEADER, Wire};
pub use worker::{Worker, run_worker};

/// The number under which ranks report what they have allocated; steps count from 1.
const LAID_OUT: u64 = 0;

/// Why a network is laid out.
enum Laying<'p> {
    /// To run it: ranks without the file get their part of it, and this is told how far that is.
    Out(&'p mut dyn FnMut(u64, u64)),
    /// To be measured, with buffers that are filled with numbers, as in the midst of a run.
    Filled,
}

/// Rank 0's hold on the others. When it is dropped, they are told that it is over.
pub struct Leader<'f> {
    wire: Wire<'f>,
    /// The group has a fault: nobody listens any more.
    faulty: bool,
    /// What is recorded of the layout in use.
    recording: Option<Recording>,
    /// When the first recording began: the times of all count from there.
    origin: Option<f64>,
    /// The others may lack the file, and get what they need of it.
    supplies: bool,
}

impl std::fmt::Debug for Leader<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Leader").field("ranks", &self.wire.ranks()).finish_non_exhaustive()
    }
}

impl<'f> Leader<'f> {
    /// The leader of a group whose other ranks are workers. No rank is waited for longer than `timeout`, which
    /// has to be more than a step takes.
    ///
    /// # Errors
    /// [`LlmError::Unsupported`] for an end that is not rank 0's.
    pub fn new(fabric: &'f mut dyn Fabric, timeout: Duration) -> Result<Self, LlmError> {
        Self::of(End::Lent(fabric), timeout)
    }

    /// The same with a fabric of its own.
    ///
    /// # Errors
    /// [`LlmError::Unsupported`] for an end that is not rank 0's.
    pub fn owning(fabric: Box<dyn Fabric>, timeout: Duration) -> Result<Self, LlmError> {
        Self::of(End::Own(fabric), timeout)
    }

    fn of(fabric: End<'f>, timeout: Duration) -> Result<Self, LlmError> {
        let wire = Wire::new(fabric, timeout);
        if wire.rank() != LEADER {
            let what = format!("rank {} cannot be the leader, which is rank 0", wire.rank());
            return Err(LlmError::unsupported(what));
        }
        Ok(Leader { wire, faulty: false, recording: None, origin: None, supplies: false })
    }

    /// The same for ranks that all have a [`Store`]: they ask this one for the bytes of the file that they lack.
    #[must_use]
    pub fn supplying(mut self) -> Self {
        self.supplies = true;
        self
    }

    /// Ranks in the group.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.wire.ranks()
    }

    /// Whether the group has had a fault, so that nobody listens any more.
    #[must_use]
    pub fn is_faulty(&self) -> bool {
        self.faulty
    }

    /// Lets the others know that there is more to come, and sees that they are all there.
    ///
    /// # Errors
    /// [`LlmError::Fabric`] if one is not.
    pub fn heartbeat(&mut self) -> Result<(), LlmError> {
        self.ping(0).map(|_| ())
    }

    /// Sends so many bytes to each of the others, and says how long it took until all had answered.
    ///
    /// # Errors
    /// [`LlmError::Fabric`] if one does not.
    pub fn ping(&mut self, bytes: usize) -> Result<Duration, LlmError> {
        let begun = Instant::now();
        self.order(&Order::Heartbeat { zeros: bytes })?;
        Ok(begun.elapsed())
    }

    /// Gives the group up because of something that only this rank knows: the others end with these words.
    pub fn give_up(&mut self, reason: impl Into<String>) {
        if !self.faulty {
            self.wire.refuse(reason.into());
            self.faulty = true;
        }
    }

    /// Lays a network out over the ranks, as a plan says. This rank's part is shared by `threads`. Ranks that are no
    /// card of the plan wait until it is over.
    ///
    /// # Errors
    /// [`LlmError::Plan`] for a plan of another model, for more ranks than there are, or one that cannot be run;
    /// [`LlmError::Unsupported`] if this rank has not the memory; [`LlmError::Fabric`] if another rank has not,
    /// has another model or plan, or is gone.
    pub fn lay_out<B: AsRef<[u8]> + Send + Sync>(
        &mut self,
        network: &Arc<Network<B>>,
        plan: &Plan,
        context: usize,
        batch: usize,
        threads: usize,
    ) -> Result<OnRanks<&mut Leader<'f>, B>, LlmError> {
        let ranks: Vec<usize> = (0..self.ranks()).collect();
        let space = (context, batch);
        OnRanks::lay_out(self, network, plan, &ranks, space, threads, &mut |_, _| {})
    }

    /// Gives ranks that have a [`Store`] what they lack of some bytes of the file, for a plan to come. `progress` gets the
    /// bytes that were sent, and those of all.
    ///
    /// # Errors
    /// [`LlmError::Fabric`] if one has no store, or is gone.
    pub fn prefetch(
        &mut self,
        file: &[u8],
        ranges: &[Range<u64>],
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), LlmError> {
        let ranges = ranges.iter().map(|range| [range.start, range.end]).collect();
        self.order(&Order::Fetch { ranges })?;
        self.heard(|wire| wire.supply(file, progress))
    }

    /// Has all ranks lay a network out.
    fn lay<B: AsRef<[u8]> + Send + Sync>(
        &mut self,
        network: &Arc<Network<B>>,
        (plan, ranks): (&Plan, &[usize]),
        (context, batch): (usize, usize),
        threads: usize,
        how: Laying<'_>,
    ) -> Result<(RankPart<B>, Vec<MemoryUse>), LlmError> {
        let filled = matches!(how, Laying::Filled);
        let planned = planned(network, plan, (context, batch), threads, filled)?;
        let known = |card: &usize| ranks.get(*card).is_some_and(|&rank| rank < self.ranks());
        if let Some(card) = plan.layout.cards().into_iter().find(|card| !known(card)) {
            let count = ranks.len();
            return Err(LlmError::plan(format!(
                "it uses card {card}, and there are {count} ranks"
            )));
        }
        let ranks: Vec<u32> = ranks.iter().map(|&rank| rank as u32).collect();
        self.recording = None;
        let json = plan.to_json();
        let exchanges = match filled {
            // What a link takes is fitted to messages from everybody to everybody.
            true => ExchangeTable::one_shot(planned.stages().len()),
            false => ExchangeTable::of(plan),
        };
        let stamp = plan_stamp(&json, &exchanges.to_bytes());
        let (context, batch) = (context as u64, batch as u64);
        let network_stamp = network.fingerprint();
        // What is measured takes the same time with zeros for weights.
        let supplied = self.supplies && !filled;
        let order = Order::Plan {
            network: network_stamp,
            context,
            batch,
            filled,
            supplied,
            ranks: ranks.clone(),
            exchanges: exchanges.to_bytes(),
            json,
        };
        self.order(&order)?;
        if let (true, Laying::Out(progress)) = (supplied, how) {
            self.heard(|wire| wire.supply(network.bytes(), progress))?;
        }
        let rank_part =
            RankPart::new(network, &planned, (LEADER, &ranks), exchanges, threads, filled);
        let rank_part = rank_part.inspect_err(|error| self.give_up(error.to_string()))?;
        let file = network.bytes().len() as u64;
        self.heard(|wire| wire.settle(stamp, file))?;
        let memory = self.collect_memory(&planned, &rank_part)?;
        Ok((rank_part, memory))
    }

    /// What every card has allocated, as its rank says.
    fn collect_memory<B: AsRef<[u8]> + Send + Sync>(
        &mut self,
        planned: &Planned<'_>,
        rank_part: &RankPart<B>,
    ) -> Result<Vec<MemoryUse>, LlmError> {
        let others = rank_part.ranks.iter().filter(|&&rank| rank != LEADER);
        let from: Vec<(usize, u64)> = others.map(|&rank| (rank, 16)).collect();
        let messages = self.heard(|wire| wire.reports(LAID_OUT, &from))?;
        let mut said = messages.iter().map(|message| {
            let words = message.bytes().as_chunks().0;
            [0, 1].map(|at| words.get(at).map_or(0, |&word| u64::from_le_bytes(word)))
        });
        let layouts = planned.cards();
        let list = layouts.iter().zip(&rank_part.ranks).map(|(layout, &rank)| {
            let card = layout.card;
            // Ranks may have other numbers of threads, for which they plan themselves.
            let [planned, allocated] = match rank {
                LEADER => [layout.bytes(), rank_part.allocated()],
                _ => said.next().unwrap_or_default(),
            };
            MemoryUse { card, planned, allocated }
        });
        Ok(list.collect())
    }

    fn order(&mut self, order: &Order) -> Result<(), LlmError> {
        self.heard(|wire| wire.order(order))
    }

    /// Remembers that the group has a fault.
    fn heard<R>(
        &mut self,
        what: impl FnOnce(&mut Wire<'f>) -> Result<R, FabricError>,
    ) -> Result<R, LlmError> {
        let outcome = what(&mut self.wire);
        self.faulty |= outcome.is_err();
        Ok(outcome?)
    }
}

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        if !self.faulty {
            // Who is gone need not be told.
            let _ = self.wire.order(&Order::Over).and_then(|()| self.wire.part());
        }
    }
}

/// A network on ranks, as rank 0 sees it. `F` is the hold on the leader: a reference, or a guard of one that is shared.
pub struct OnRanks<F, B> {
    leader: F,
    rank_part: RankPart<B>,
    memory: Vec<MemoryUse>,
    audited: Option<Audited>,
    begun: VecDeque<Begun>,
}

/// A step that is under way.
struct Begun {
    number: u64,
    asked: Asked,
    since: Instant,
    /// What this rank's own card says.
    own: Option<Report>,
    /// What each member's card reports, if it does.
    expected: Option<Vec<[u64; 3]>>,
    checked: Option<Checked>,
}

impl<F, B> std::fmt::Debug for OnRanks<F, B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OnRanks")
            .field("cards", &self.rank_part.programs.members().len())
            .finish_non_exhaustive()
    }
}

impl<'f, F: DerefMut<Target = Leader<'f>>, B: AsRef<[u8]> + Send + Sync> OnRanks<F, B> {
    /// As [`Leader::lay_out`], with a hold on the leader that this keeps, and the rank of each of the plan's cards.
    /// `progress` gets the bytes that were sent to ranks without the file, and those of all.
    ///
    /// # Errors
    /// As [`Leader::lay_out`].
    pub fn lay_out(
        mut leader: F,
        network: &Arc<Network<B>>,
        plan: &Plan,
        ranks: &[usize],
        space: (usize, usize),
        threads: usize,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, LlmError> {
        let how = Laying::Out(progress);
        let (rank_part, memory) = leader.lay(network, (plan, ranks), space, threads, how)?;
        Ok(OnRanks { leader, rank_part, memory, audited: None, begun: VecDeque::new() })
    }
}

impl<'f, F: DerefMut<Target = Leader<'f>>, B> OnRanks<F, B> {
    /// What each card was planned to allocate, and what its rank says that it has allocated.
    #[must_use]
    pub fn memory(&self) -> &[MemoryUse] {
        &self.memory
    }

    /// Records from now on what each card does when. [`Leader::marks`] gathers it, when this is over.
    ///
    /// # Errors
    /// [`LlmError::Fabric`] if a rank does not answer.
    pub fn record(&mut self) -> Result<(), LlmError> {
        self.leader.record(&self.rank_part.ranks)
    }
}

impl<'f, F: DerefMut<Target = Leader<'f>>, B: AsRef<[u8]> + Send + Sync> OnRanks<F, B> {
    /// The reports of all cards on a step, in the order of their members.
    fn collect(
        &mut self,
        number: u64,
        own: Option<Report>,
        expected: &[[u64; 3]],
    ) -> Result<Vec<Report>, LlmError> {
        let ranks = &self.rank_part.ranks;
        let others = ranks.iter().zip(expected).filter(|&(&rank, _)| rank != LEADER);
        let from: Vec<(usize, u64)> =
            others.map(|(&rank, &parts)| (rank, part::length(parts))).collect();
        let messages = self.leader.heard(|wire| wire.reports(number, &from))?;
        let (mut messages, mut own) = (messages.into_iter(), own);
        let members = self.rank_part.ranks.iter().zip(expected);
        let reports = members.filter_map(|(&rank, &parts)| match rank {
            LEADER => own.take(),
            _ => messages.next().map(|message| part::read(message.bytes(), parts)),
        });
        Ok(reports.collect())
    }

    /// Takes the reports on all steps that are under way, which would be in the way of the next plan's.
    fn drain(&mut self) {
        while let Some(Begun { number, own, expected, .. }) = self.begun.pop_front() {
            let Some(expected) = expected else { continue };
            if self.collect(number, own, &expected).is_err() {
                // The group has a fault: nothing of it is read any more.
                self.begun.clear();
            }
        }
    }

    /// Gives the order for a step through some layers, or all if there are none, and runs this rank's part of it.
    fn go(
        &mut self,
        step: &Step<'_>,
        (layers, salt): (&[u32], u64),
        since: Instant,
    ) -> Result<(), LlmError> {
        self.leader.order(&Order::step(step, layers, salt))?;
        let (rank_part, traced) = (&mut self.rank_part, self.leader.recording.is_some());
        let of = Stepping { step, layers, salt, traced };
        let Ran { report: own, tapped } =
            self.leader.heard(|wire| rank_part.step(wire, of, since))?;
        let (card, by_clock) = (self.rank_part.number(), self.leader.wire.clock(since));
        let asked = Asked::of(step);
        let leader = &mut *self.leader;
        if let (Some(recording), Some(report)) = (&mut leader.recording, &own) {
            recording.keep(record::by_clock(report, card, asked.past, by_clock));
        }
        // Without outputs the others tell what they have done with the step that is asked for something.
        let reported = step.outputs() > 0 || self.rank_part.is_tapped();
        let expected = reported.then(|| self.rank_part.expected(step, &tapped));
        let (number, checked) = (self.rank_part.steps, self.checked(step, salt));
        if expected.is_some() {
            self.leader.wire.await_reports(number);
        }
        self.begun.push_back(Begun { number, asked, since, own, expected, checked });
        Ok(())
    }

    /// What came of the step that began first.
    fn conclude(&mut self) -> Result<Outcome, LlmError> {
        let nothing = || LlmError::unsupported("no step has begun");
        let Begun { number, asked, since, own, expected, checked } =
            self.begun.pop_front().ok_or_else(nothing)?;
        let Some(expected) = expected else {
            let cards = self.rank_part.ranks.len() as u32;
            let (sync, sent) = own.map_or_else(Default::default, |own| (own.sync, own.sent));
            let timing = Timing { wall: since.elapsed(), card: None, sync: sync / cards, sent };
            return Ok(Outcome { timing, ..Outcome::default() });
        };
        let reports = self.collect(number, own, &expected)?;
        if let Some(checked) = checked
            && let Err(error) = self.compare(&checked, &reports)
        {
            // The group is sound and goes on without the rank that was wrong.
            self.drain();
            return Err(error);
        }
        let members = self.rank_part.programs.members();
        Ok(card::outcome(&asked, since.elapsed(), members, reports))
    }
}

impl<'f, F: DerefMut<Target = Leader<'f>>, B: AsRef<[u8]> + Send + Sync> Runner for OnRanks<F, B> {
    fn begin(&mut self, step: &Step<'_>) -> Result<(), LlmError> {
        layout::check(&self.rank_part.programs, self.rank_part.vocab, step)?;
        self.go(step, (&[], 0), Instant::now())
    }

    fn end(&mut self) -> Result<Outcome, LlmError> {
        self.conclude()
    }

    fn batch(&self) -> usize {
        self.rank_part.programs.space().batch as usize
    }

    fn windows(&self) -> Option<WindowCache> {
        self.rank_part.programs.windows()
    }

    fn depth(&self) -> usize {
        self.rank_part.programs.space().turns as usize
    }

    fn heartbeat(&mut self) -> Result<(), LlmError> {
        self.leader.heartbeat()
    }
}

/// A member, and the bytes of a model's file that it needs.
pub type NeededBytes = (usize, Vec<Range<u64>>);

/// The cards of a plan, each with the bytes of the file that it needs where ranks get them one by one.
///
/// # Errors
/// [`LlmError::Plan`] for a plan of another model, or one that cannot be run.
pub fn needed_bytes<B: AsRef<[u8]>>(
    network: &Network<B>,
    plan: &Plan,
    space: (usize, usize),
) -> Result<Vec<NeededBytes>, LlmError> {
    let planned = planned(network, plan, space, 1, false)?;
    let cards = plan.layout.cards().into_iter();
    let needed = cards.map(|card| Ok((card, card::needed(network, &planned, &|one| one == card)?)));
    needed.collect()
}

/// What a plan's messages are stamped with: ranks that have another plan, or other algorithms for its exchanges, find
/// out from the first message between them.
fn plan_stamp(json: &str, exchanges: &[u8]) -> u64 {
    crate::fingerprint(json.bytes().chain(exchanges.iter().copied()))
}

/// A plan as ranks run it. What is measured is not checked.
fn planned<'p, B: AsRef<[u8]>>(
    network: &Network<B>,
    plan: &'p Plan,
    (context, batch): (usize, usize),
    threads: usize,
    filled: bool,
) -> Result<Planned<'p>, LlmError> {
    let (kind, kernels) = (ExchangeKind::Messages, crate::inproc::kernels(threads, 1));
    let planned = Planned::new(network, plan, context, batch, kind, kernels)?;
    Ok(if filled { planned } else { planned.tapped() })
}
