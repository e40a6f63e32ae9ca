// SPDX-License-Identifier: Apache-2.0
//! Cards that are ranks of a fabric: processes, on one host or several, or threads in tests. Rank `r` plays the
//! plan's card `r`, and holds that card's part of the model alone.
//!
//! Rank 0 is the front. It gives orders ([`Front`]): lay this plan out, run this step, it is over. The others
//! [`follow`]. A step is one order; its exchanges are messages among the ranks of a stage, and at its end every
//! card tells the front what came of it.
//!
//! Every wait ends with what it waits for, with the group's fault, or when `patience` is over. So the front must
//! be heard of within that time: whoever lets the front wait for something else calls [`Front::beat`] (or
//! [`Runner::beat`]) several times as often, to which all ranks answer.

mod audit;
mod clock;
mod follow;
mod marks;
mod measure;
mod order;
mod record;
mod seated;
mod wire;

use std::ops::DerefMut;
use std::sync::Arc;
use std::time::{Duration, Instant};

use spanker_fabric::{Fabric, FabricError};
use spanker_plan::{Plan, Want};
use spanker_topology::ExchangeKind;

use crate::card::{self, Report};
use crate::layout::{self, Planned};
use crate::runner::{MemoryUse, Outcome, Runner, Step, Timing};
use crate::{LlmError, Network};
use audit::Audited;
pub use follow::{Follower, follow};
pub use measure::RankSamples;
use order::Order;
use record::Recording;
use seated::{Seated, Stepping};
use wire::{End, FRONT, Wire};

/// The number under which ranks report what they have allocated; steps count from 1.
const LAID_OUT: u64 = 0;

/// Rank 0's hold on the others. When it is dropped, they are told that it is over.
pub struct Front<'f> {
    wire: Wire<'f>,
    /// The group has a fault: nobody listens any more.
    faulty: bool,
    /// What is recorded of the layout in use.
    recording: Option<Recording>,
}

impl std::fmt::Debug for Front<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Front").field("ranks", &self.wire.ranks()).finish_non_exhaustive()
    }
}

impl<'f> Front<'f> {
    /// The front of a group whose other ranks [`follow`]. No rank is waited for longer than `patience`, which
    /// has to be more than a step takes.
    ///
    /// # Errors
    /// [`LlmError::Unsupported`] for an end that is not rank 0's.
    pub fn new(fabric: &'f mut dyn Fabric, patience: Duration) -> Result<Self, LlmError> {
        Self::of(End::Lent(fabric), patience)
    }

    /// The same with a fabric of its own.
    ///
    /// # Errors
    /// [`LlmError::Unsupported`] for an end that is not rank 0's.
    pub fn owning(fabric: Box<dyn Fabric>, patience: Duration) -> Result<Self, LlmError> {
        Self::of(End::Own(fabric), patience)
    }

    fn of(fabric: End<'f>, patience: Duration) -> Result<Self, LlmError> {
        let wire = Wire::new(fabric, patience);
        if wire.rank() != FRONT {
            let what = format!("rank {} cannot be the front, which is rank 0", wire.rank());
            return Err(LlmError::unsupported(what));
        }
        Ok(Front { wire, faulty: false, recording: None })
    }

    /// Ranks in the group.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.wire.ranks()
    }

    /// Lets the others know that there is more to come, and sees that they are all there.
    ///
    /// # Errors
    /// [`LlmError::Fabric`] if one is not.
    pub fn beat(&mut self) -> Result<(), LlmError> {
        self.ping(0).map(|_| ())
    }

    /// Sends so many bytes to each of the others, and says how long it took until all had answered.
    ///
    /// # Errors
    /// [`LlmError::Fabric`] if one does not.
    pub fn ping(&mut self, bytes: usize) -> Result<Duration, LlmError> {
        let begun = Instant::now();
        self.order(&Order::Beat { zeros: bytes })?;
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
    ) -> Result<OnRanks<&mut Front<'f>, B>, LlmError> {
        let ranks: Vec<usize> = (0..self.ranks()).collect();
        OnRanks::lay_out(self, network, plan, &ranks, (context, batch), threads)
    }

    /// Has all ranks lay a network out; `filled` with numbers, as in the midst of a run, if it is to be measured.
    fn lay<B: AsRef<[u8]> + Send + Sync>(
        &mut self,
        network: &Arc<Network<B>>,
        (plan, ranks): (&Plan, &[usize]),
        (context, batch): (usize, usize),
        threads: usize,
        filled: bool,
    ) -> Result<(Seated<B>, Vec<MemoryUse>), LlmError> {
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
        let stamp = crate::fingerprint(json.bytes());
        let (context, batch) = (context as u64, batch as u64);
        let network_stamp = network.fingerprint();
        let order = Order::Plan {
            network: network_stamp,
            context,
            batch,
            filled,
            ranks: ranks.clone(),
            json,
        };
        self.order(&order)?;
        let seated = Seated::new(network, &planned, (FRONT, &ranks), threads, filled);
        let seated = seated.inspect_err(|error| self.give_up(error.to_string()))?;
        self.heard(|wire| wire.settle(stamp))?;
        let memory = self.collect_memory(&planned, &seated)?;
        Ok((seated, memory))
    }

    /// What every card has allocated, as its rank says.
    fn collect_memory<B: AsRef<[u8]> + Send + Sync>(
        &mut self,
        planned: &Planned<'_>,
        seated: &Seated<B>,
    ) -> Result<Vec<MemoryUse>, LlmError> {
        let others = seated.ranks.iter().filter(|&&rank| rank != FRONT);
        let from: Vec<(usize, u64)> = others.map(|&rank| (rank, 16)).collect();
        let messages = self.heard(|wire| wire.reports(LAID_OUT, &from))?;
        let mut said = messages.iter().map(|message| {
            let words = message.bytes().as_chunks().0;
            [0, 1].map(|at| words.get(at).map_or(0, |&word| u64::from_le_bytes(word)))
        });
        let layouts = planned.cards();
        let list = layouts.iter().zip(&seated.ranks).map(|(layout, &rank)| {
            let card = layout.card;
            // Ranks may have other numbers of threads, for which they plan themselves.
            let [planned, allocated] = match rank {
                FRONT => [layout.bytes(), seated.allocated()],
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

impl Drop for Front<'_> {
    fn drop(&mut self) {
        if !self.faulty {
            // Who is gone need not be told.
            let _ = self.wire.order(&Order::Over).and_then(|()| self.wire.part());
        }
    }
}

/// A network on ranks, as rank 0 sees it. `F` is the hold on the front: a reference, or a guard of one that is shared.
pub struct OnRanks<F, B> {
    front: F,
    seated: Seated<B>,
    memory: Vec<MemoryUse>,
    audited: Option<Audited>,
}

impl<F, B> std::fmt::Debug for OnRanks<F, B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OnRanks")
            .field("cards", &self.seated.programs.members().len())
            .finish_non_exhaustive()
    }
}

impl<'f, F: DerefMut<Target = Front<'f>>, B: AsRef<[u8]> + Send + Sync> OnRanks<F, B> {
    /// As [`Front::lay_out`], with a hold on the front that this keeps, and the rank of each of the plan's cards.
    ///
    /// # Errors
    /// As [`Front::lay_out`].
    pub fn lay_out(
        mut front: F,
        network: &Arc<Network<B>>,
        plan: &Plan,
        ranks: &[usize],
        space: (usize, usize),
        threads: usize,
    ) -> Result<Self, LlmError> {
        let (seated, memory) = front.lay(network, (plan, ranks), space, threads, false)?;
        Ok(OnRanks { front, seated, memory, audited: None })
    }
}

impl<'f, F: DerefMut<Target = Front<'f>>, B> OnRanks<F, B> {
    /// What each card was planned to allocate, and what its rank says that it has allocated.
    #[must_use]
    pub fn memory(&self) -> &[MemoryUse] {
        &self.memory
    }

    /// Records from now on what each card does when. [`Front::marks`] gathers it, when this is over.
    ///
    /// # Errors
    /// [`LlmError::Fabric`] if a rank does not answer.
    pub fn record(&mut self) -> Result<(), LlmError> {
        self.front.record(&self.seated.ranks)
    }
}

impl<'f, F: DerefMut<Target = Front<'f>>, B: AsRef<[u8]> + Send + Sync> OnRanks<F, B> {
    /// The reports of all cards, in the order of their seats.
    fn collect(&mut self, own: Option<Report>, want: Want) -> Result<Vec<Report>, LlmError> {
        let (from, step) = (self.seated.expected(want), self.seated.steps);
        let messages = self.front.heard(|wire| wire.reports(step, &from))?;
        let mut messages = messages.into_iter();
        let mut own = own;
        let seats = self.seated.ranks.iter().enumerate();
        let reports = seats.filter_map(|(seat, &rank)| match rank {
            FRONT => own.take(),
            _ => messages.next().map(|message| self.seated.read(seat, message.bytes())),
        });
        Ok(reports.collect())
    }
}

impl<'f, F: DerefMut<Target = Front<'f>>, B: AsRef<[u8]> + Send + Sync> Runner for OnRanks<F, B> {
    fn step(&mut self, step: &Step<'_>) -> Result<Outcome, LlmError> {
        layout::check(&self.seated.programs, self.seated.vocab, step)?;
        self.attempt(step, 0)
    }

    fn batch(&self) -> usize {
        self.seated.programs.space().batch as usize
    }

    fn beat(&mut self) -> Result<(), LlmError> {
        self.front.beat()
    }
}

impl<'f, F: DerefMut<Target = Front<'f>>, B: AsRef<[u8]> + Send + Sync> OnRanks<F, B> {
    /// Runs a step. Which operators are checked depends on `salt`.
    fn attempt(&mut self, step: &Step<'_>, salt: u64) -> Result<Outcome, LlmError> {
        self.go(step, (&[], salt), Instant::now())
    }

    /// Runs a step through some layers, or all if there are none.
    fn go(
        &mut self,
        step: &Step<'_>,
        (layers, salt): (&[u32], u64),
        begun: Instant,
    ) -> Result<Outcome, LlmError> {
        self.front.order(&Order::step(step, layers, salt))?;
        let (seated, traced) = (&mut self.seated, self.front.recording.is_some());
        let of = Stepping { step, layers, salt, traced };
        let own = self.front.heard(|wire| seated.step(wire, of, begun))?;
        let number = self.seated.number();
        let since = self.front.wire.clock(begun);
        let front = &mut *self.front;
        if let (Some(recording), Some(report)) = (&mut front.recording, &own) {
            recording.keep(record::by_clock(report, number, step.past, since));
        }
        let cards = self.seated.ranks.len() as u32;
        if step.want == Want::Nothing && !self.seated.is_tapped() {
            // The others tell what they have done with the step that is asked for something.
            let (sync, sent) = own.map_or_else(Default::default, |own| (own.sync, own.sent));
            let timing = Timing { wall: begun.elapsed(), card: None, sync: sync / cards, sent };
            return Ok(Outcome { timing, ..Outcome::default() });
        }
        let reports = self.collect(own, step.want)?;
        self.compare(step, salt, &reports)?;
        Ok(card::outcome(step.want, begun.elapsed(), &reports))
    }
}

/// A plan as ranks run it. What is measured is not checked.
fn planned<'p, B: AsRef<[u8]>>(
    network: &Network<B>,
    plan: &'p Plan,
    (context, batch): (usize, usize),
    threads: usize,
    filled: bool,
) -> Result<Planned<'p>, LlmError> {
    let (kind, kernels) = (ExchangeKind::Direct, crate::inproc::kernels(threads, 1));
    let planned = Planned::new(network, plan, context, batch, kind, kernels)?;
    Ok(if filled { planned } else { planned.tapped() })
}
