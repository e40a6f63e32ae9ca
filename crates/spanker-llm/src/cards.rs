// SPDX-License-Identifier: Apache-2.0
//! A network on cards behind the ABI: its weights in the cards' memory, its steps as work descriptors, its
//! exchanges over the links. The host sends token ids and control, and reads candidates back.

mod exchange;
mod load;
mod log;

use std::ops::Range;
use std::time::{Duration, Instant};

use spanker_fabric::device::{Deadline, DeviceGroup};
use spanker_plan::Plan;
use spanker_runtime::abi::Counters;
use spanker_runtime::{BufferId, Descriptor, Pace, SpankerControl, Work};

use crate::program::{Lowering, Room, Space};
use crate::runner::{Outcome, Runner, Step, Timing, Want, candidates};
use crate::{LlmError, Network, Op, Recorder};
use exchange::Exchanges;
pub use load::Loading;
use log::Log;

/// A network on cards.
///
/// Buffers on the cards are freed when it is dropped.
#[derive(Debug)]
pub struct OnCards<'a> {
    lowering: Lowering,
    group: DeviceGroup<'a>,
    exchanges: Exchanges,
    deadline: Deadline,
    /// Every buffer on every seat.
    buffers: Vec<Vec<BufferId>>,
    /// Whether all clocks show what work costs.
    shaped: bool,
    /// The latest clock after the last step, in picoseconds.
    clock: u64,
    counted: Vec<Counters>,
    log: Option<Log>,
}

impl<'a> OnCards<'a> {
    /// Loads a network onto cards: `card` gives the handle of each card of the plan. `loading` is told how far
    /// it is.
    ///
    /// # Errors
    /// [`LlmError::Plan`] for a plan of another model or one that cannot be run, [`LlmError::Device`] for a
    /// card that has not the memory, or fails.
    pub fn load<B: AsRef<[u8]> + Sync>(
        network: &Network<B>,
        plan: &Plan,
        context: usize,
        batch: usize,
        card: &dyn Fn(usize) -> Option<&'a SpankerControl>,
        loading: &(dyn Fn(Loading) + Sync),
    ) -> Result<Self, LlmError> {
        crate::program::check_plan(network, plan)?;
        let stages = &plan.layout.replicas[0];
        let mut controls = Vec::new();
        for &index in stages.iter().flat_map(|stage| &stage.group.cards) {
            let missing = || LlmError::plan(format!("it uses card {index}, which is not there"));
            controls.push(card(index).ok_or_else(missing)?);
        }
        let group = DeviceGroup::new(&controls)?;
        let mut buffers = vec![Vec::new(); controls.len()];
        let space = Space { context, batch };
        let loaded = load::load(network, plan, space, &group, &mut buffers, loading);
        let exchanges = loaded.and_then(|lowering| {
            let exchanges = Exchanges::new(&lowering, plan, &controls)?;
            Ok((lowering, exchanges))
        });
        let (lowering, exchanges) = match exchanges {
            Ok(both) => both,
            Err(error) => {
                free(&group, &buffers);
                return Err(error);
            }
        };
        let deadline = Deadline { total: Duration::from_secs(3600), ..Deadline::USUAL };
        // From here on, dropping it frees the buffers.
        let mut loaded = OnCards {
            lowering,
            group,
            exchanges,
            deadline,
            buffers,
            shaped: true,
            clock: 0,
            counted: Vec::new(),
            log: None,
        };
        for rank in 0..loaded.group.ranks() {
            let info = loaded.group.request(rank, SpankerControl::info)?;
            loaded.shaped &= matches!(info.pace, Pace::CardTime | Pace::Wall);
            loaded.clock = loaded.clock.max(info.clock.0);
            loaded.counted.push(loaded.group.request(rank, SpankerControl::counters)?);
        }
        Ok(loaded)
    }

    /// How long cards may take.
    pub fn set_deadline(&mut self, deadline: Deadline) {
        self.deadline = deadline;
    }

    /// Records from now on what each card does when, by its own clock.
    ///
    /// # Errors
    /// [`LlmError::Device`] if a card cannot be asked.
    pub fn record(&mut self, recorder: &Recorder) -> Result<(), LlmError> {
        self.log = Some(Log::new(&self.group, recorder, self.clock)?);
        Ok(())
    }

    /// The descriptors of every seat for a step.
    fn lower(&mut self, programs: &[Vec<Op>]) -> Result<Vec<Vec<Descriptor>>, LlmError> {
        let mut out = Vec::with_capacity(programs.len());
        for (seat, program) in programs.iter().enumerate() {
            let mut work: Vec<Descriptor> = Vec::with_capacity(2 * program.len());
            for op in program {
                match *op {
                    Op::Work(ref one) => work.push(one.clone().into()),
                    Op::Mark { activity, layer } => {
                        let log = self.log.as_mut();
                        log.into_iter().for_each(|log| log.mark(seat, work.len(), activity, layer));
                    }
                    Op::Hand { to, from, length } => {
                        let port = self.port(seat, to);
                        work.push(Work::Send { from, length, port, tag: 0 }.into());
                        work.push(Work::Fence { not_before_ps: 0 }.into());
                    }
                    Op::Take { from, into, length } => {
                        let port = self.port(seat, from);
                        let landing = spanker_runtime::Landing::Store;
                        work.push(Work::Receive { into, length, port, tag: 0, landing }.into());
                        work.push(Work::Fence { not_before_ps: 0 }.into());
                    }
                    ref exchange => {
                        let buffers = &mut self.buffers[seat];
                        self.exchanges.lower(&self.group, seat, exchange, buffers, &mut work)?;
                    }
                }
            }
            out.push(work);
        }
        Ok(out)
    }

    fn port(&self, seat: usize, neighbour: usize) -> u32 {
        self.group.wiring().port(seat, neighbour).expect("routes follow links")
    }

    fn read(&self, seat: usize, room: Room, bytes: u64) -> Result<Vec<u8>, LlmError> {
        let mut out = vec![0; bytes as usize];
        let place = self.lowering.seats[seat].rooms.place(room);
        self.group.request(seat, |card| card.read(place.buffer, place.offset, &mut out))?;
        Ok(out)
    }

    fn collect(&self, want: Want, outcome: &mut Outcome) -> Result<(), LlmError> {
        let last: Range<usize> = self.lowering.last();
        match want {
            Want::Nothing => {}
            Want::Best(k) => {
                let room = if last.len() == 1 { Room::Best } else { Room::AllBest };
                let bytes = self.read(last.start, room, last.len() as u64 * u64::from(k) * 8)?;
                outcome.best = candidates(&bytes, k as usize);
            }
            Want::Logits => {
                let mut logits = Vec::new();
                for seat in last {
                    let vocab = &self.lowering.seats[seat].shard.vocab;
                    let bytes = self.read(seat, Room::Logits, (vocab.end - vocab.start) * 4)?;
                    logits.extend(bytes.as_chunks().0.iter().map(|&word| f32::from_le_bytes(word)));
                }
                outcome.logits = Some(logits);
            }
        }
        Ok(())
    }

    /// Card time since the last step, the mean card's time without work, bytes over links.
    fn measure(&mut self, finished: u64) -> Result<Timing, LlmError> {
        let mut latest = finished;
        let (mut busy, mut sent) = (0, 0);
        for rank in 0..self.group.ranks() {
            let now = self.group.request(rank, SpankerControl::counters)?;
            let before = std::mem::replace(&mut self.counted[rank], now);
            busy += now.busy_ps.saturating_sub(before.busy_ps);
            sent += now.sent.saturating_sub(before.sent);
        }
        for seat in self.lowering.last() {
            latest = latest.max(self.group.request(seat, SpankerControl::info)?.clock.0);
        }
        let took = latest.saturating_sub(self.clock);
        self.clock = self.clock.max(latest);
        let nanos = |ps: u64| Duration::from_nanos(ps / 1000);
        let card = self.shaped.then_some(nanos(took));
        // What a card's operators do not take goes to links, to waiting and to the host.
        let sync = nanos(took.saturating_sub(busy / self.group.ranks() as u64));
        Ok(Timing { wall: Duration::ZERO, card, sync, sent })
    }
}

impl Runner for OnCards<'_> {
    fn step(&mut self, step: &Step<'_>) -> Result<Outcome, LlmError> {
        self.lowering.check(step)?;
        let begun = Instant::now();
        let wiring = self.group.wiring();
        let programs = self.lowering.programs(step, &|from, to| wiring.route(from, to));
        let programs = self.lower(&programs)?;
        let finished = self.group.run(&programs, &self.deadline)?;
        let mut outcome = Outcome::default();
        self.collect(step.want, &mut outcome)?;
        let finished = finished.into_iter().map(|time| time.0).max().unwrap_or(0);
        if let Some(log) = &mut self.log {
            log.keep(&self.group, &self.lowering, &programs, step.past)?;
        }
        outcome.timing = Timing { wall: begun.elapsed(), ..self.measure(finished)? };
        Ok(outcome)
    }

    fn batch(&self) -> usize {
        self.lowering.batch
    }
}

impl Drop for OnCards<'_> {
    fn drop(&mut self) {
        free(&self.group, &self.buffers);
    }
}

/// Gives buffers back. A card that does not answer any more takes its buffers with it.
fn free(group: &DeviceGroup<'_>, buffers: &[Vec<BufferId>]) {
    for (rank, buffers) in buffers.iter().enumerate() {
        for &buffer in buffers {
            if group.request(rank, |card| card.free(buffer)).is_err() {
                break;
            }
        }
    }
}
