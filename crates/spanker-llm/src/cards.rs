// SPDX-License-Identifier: Apache-2.0
//! A network on cards behind the ABI: its weights in the cards' memory, its steps as work descriptors, its
//! exchanges over the links. The host sends token ids and control, and reads candidates back.

mod exchange;
mod load;
mod log;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use spanker_fabric::device::{BegunJob, Deadline, DeviceError, DeviceGroup};
use spanker_model::{Model, Quant};
use spanker_plan::{Buffer, CardLayout, Op, Place, Plan, Programs, Taps, Wanted, WindowCache};
use spanker_runtime::abi::Counters;
use spanker_runtime::{Activation, Descriptor, Feature, Pace, SpankerControl, Work};
use spanker_topology::{Cluster, ExchangeKind, Kernels};

use crate::audit::{AuditLog, Auditor, Found, Member, Written, disagreeing};
use crate::layout::{self, Planned};
use crate::runner::{Asked, Given, MemoryUse, Outcome, Runner, Step, Timing};
use crate::twice::Searched;
use crate::{LlmError, Network, Recorder};
use exchange::Exchanges;
use load::Buffers;
pub use load::Loading;
use log::{Log, StepLog};

/// What a card must have for a model.
const OPERATORS: [Feature; 12] = [
    Feature::WorkEmbed,
    Feature::WorkNorm,
    Feature::WorkQuantize,
    Feature::MatmulTypes,
    Feature::WorkGate,
    Feature::WorkRows,
    Feature::WorkBest,
    Feature::WorkWrite,
    Feature::WorkAddRow,
    Feature::WorkRotateRows,
    Feature::WorkKeep,
    Feature::WorkAttendBlocks,
];

/// What it must have besides for a mixture of experts.
const EXPERTS: [Feature; 3] =
    [Feature::WorkRoute, Feature::WorkMatmulExperts, Feature::WorkCombine];

/// A step that is under way.
#[derive(Debug)]
struct Begun {
    job: BegunJob,
    asked: Asked,
    /// What the host reads of each member.
    wanted: Vec<Wanted>,
    taps: Vec<Taps>,
    turn: u64,
    written: Written,
    log: Option<StepLog>,
    since: Instant,
}

/// What a card must have besides for a model of a family that is no plain Llama.
fn more_operators(model: &Model) -> impl Iterator<Item = Feature> {
    let variant = &model.variant;
    let scores = variant.attention_cap.is_some()
        || variant.sinks
        || model.layers.iter().any(|layer| layer.window.is_some());
    let scale =
        [variant.embedding_scale, variant.residual_scale, variant.logit_scale, variant.logit_cap];
    let needed = [
        (variant.activation != Activation::Silu, Feature::WorkActivate),
        (scores, Feature::WorkAttendScores),
        (scale.iter().any(Option::is_some), Feature::WorkScale),
        (variant.expert_biases, Feature::WorkAddPicked),
    ];
    needed.into_iter().filter(|(needed, _)| *needed).map(|(_, feature)| feature)
}

/// Whether a card's version of the ABI has all operators of a model.
///
/// # Errors
/// [`spanker_runtime::Error::Unsupported`] for the first that it does not have.
pub fn require_operators(
    card: &SpankerControl,
    model: &Model,
) -> Result<(), spanker_runtime::Error> {
    let mut all = OPERATORS.into_iter().chain(more_operators(model));
    all.try_for_each(|feature| card.require(feature))
}

/// The same with what its experts and the type of its keys and values need.
fn require_all(
    card: &SpankerControl,
    model: &Model,
    kv: Quant,
) -> Result<(), spanker_runtime::Error> {
    require_operators(card, model)?;
    if kv == Quant::Q4_0 {
        card.require(Feature::KvQ4)?;
    }
    let experts = EXPERTS.iter().filter(|_| model.mixture.is_some());
    experts.copied().try_for_each(|feature| card.require(feature))
}

/// A network on cards.
///
/// Buffers on the cards are freed when it is dropped.
#[derive(Debug)]
pub struct OnCards<'a> {
    programs: Programs,
    vocab: u64,
    layouts: Vec<CardLayout>,
    /// Bytes that each card had free before.
    free_before: Vec<u64>,
    group: DeviceGroup<'a>,
    exchanges: Exchanges,
    cluster: Cluster,
    deadline: Deadline,
    /// The buffers of every card.
    buffers: Vec<Buffers>,
    /// Whether all clocks show what work costs.
    shaped: bool,
    /// When the host knew the result of the last step, by the cards' clocks, in picoseconds.
    clock: u64,
    /// For cards whose clocks show nothing but the time of their work: what a word from the host takes to each.
    told_after: Vec<Option<u64>>,
    counted: Vec<Counters>,
    log: Option<Log>,
    auditor: Option<Auditor<'a>>,
    begun: VecDeque<Begun>,
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
        let (kind, kernels) = (ExchangeKind::Schedules, Kernels::Card);
        let planned = Planned::new(network, plan, context, batch, kind, kernels)?.tapped();
        let mut controls = Vec::new();
        for &index in planned.stages().iter().flat_map(|stage| &stage.group.cards) {
            let missing = || LlmError::plan(format!("it uses card {index}, which is not there"));
            controls.push(card(index).ok_or_else(missing)?);
        }
        let group = DeviceGroup::new(&controls)?;
        let layouts = planned.cards();
        let mut free_before = Vec::with_capacity(controls.len());
        for (member, layout) in layouts.iter().enumerate() {
            // Found out before the weights are on their way.
            let (model, kv) = (network.model(), planned.space.kv);
            group.request(member, |card| require_all(card, model, kv))?;
            let available = group.request(member, SpankerControl::info)?.available;
            let (card, needed) = (group.index(member), layout.bytes());
            if needed > available {
                return Err(LlmError::Memory { card, needed, available });
            }
            free_before.push(available);
        }
        let mut buffers = vec![HashMap::new(); controls.len()];
        let loaded = load::load(network, &planned, &layouts, &group, &mut buffers, loading);
        let exchanges = loaded.and_then(|programs| {
            let sizes = layouts.iter().map(|layout| layout.allocations().collect()).collect();
            let exchanges = Exchanges::new(&programs, plan, &controls, sizes)?;
            Ok((programs, exchanges))
        });
        let (programs, exchanges) = match exchanges {
            Ok(both) => both,
            Err(error) => {
                free(&group, &buffers);
                return Err(error);
            }
        };
        let deadline = Deadline { total: Duration::from_secs(3600), ..Deadline::USUAL };
        // From here on, dropping it frees the buffers.
        let mut loaded = OnCards {
            programs,
            vocab: network.model().vocab,
            layouts,
            free_before,
            group,
            exchanges,
            cluster: plan.cluster.clone(),
            deadline,
            buffers,
            shaped: true,
            clock: 0,
            told_after: Vec::new(),
            counted: Vec::new(),
            log: None,
            auditor: None,
            begun: VecDeque::new(),
        };
        for rank in 0..loaded.group.ranks() {
            let info = loaded.group.request(rank, SpankerControl::info)?;
            loaded.shaped &= matches!(info.pace, Pace::CardTime | Pace::Wall);
            let card = loaded.programs.members()[rank].card;
            let latency = plan.cluster.profile(card).host.latency.value.0 * 1e12;
            let paced = info.pace == Pace::CardTime;
            loaded.told_after.push(paced.then_some(latency.round() as u64));
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

    /// What each card was planned to allocate, and what it has less of since.
    ///
    /// # Errors
    /// [`LlmError::Device`] if a card does not answer.
    pub fn memory(&self) -> Result<Vec<MemoryUse>, LlmError> {
        let mut list = Vec::with_capacity(self.layouts.len());
        for (member, layout) in self.layouts.iter().enumerate() {
            let available = self.group.request(member, SpankerControl::info)?.available;
            let allocated = self.free_before[member].saturating_sub(available);
            list.push(MemoryUse { card: layout.card, planned: layout.bytes(), allocated });
        }
        Ok(list)
    }

    /// Compares from now on what cards keep of their operators with what this host makes of it: the part of them
    /// that the plan's request says. `log` gets what is found.
    pub fn audit<B: AsRef<[u8]> + Send + Sync + 'a>(
        &mut self,
        network: &Arc<Network<B>>,
        log: &AuditLog,
    ) {
        let network: Arc<Network<B>> = Arc::clone(network);
        self.auditor = Some(Auditor::new(network, self.programs.space().context, log.clone()));
    }

    /// Where a buffer of a card begins, for tests that change what is in it.
    #[must_use]
    pub fn place(&self, card: usize, buffer: Buffer) -> Option<Place> {
        let member = self.programs.members().iter().position(|member| member.card == card)?;
        let id = self.buffers[member].get(&buffer)?;
        Some(Place { buffer: *id, offset: 0 })
    }

    /// Tells the log of a card that was found wrong, and makes the error.
    fn blame(&self, member: usize, past: usize, what: String) -> LlmError {
        let card = self.group.index(member);
        if let Some(auditor) = &self.auditor {
            auditor.log.add(Found { card, past, what: what.clone() });
        }
        DeviceError::wrong(card, what).into()
    }

    /// Members whose cards do not copy and add as they should, when they are tried one by one.
    fn examined(&self) -> Vec<usize> {
        let wrong = |&member: &usize| {
            !self.group.request(member, spanker_fabric::device::examine).unwrap_or(false)
        };
        (0..self.group.ranks()).filter(wrong).collect()
    }

    /// Reads what cards kept of their operators in a step, and compares it.
    fn compare(&mut self, begun: &Begun) -> Result<(), LlmError> {
        let Some(mut auditor) = self.auditor.take() else { return Ok(()) };
        auditor.forget(&begun.written);
        let (taps, past) = (&begun.taps, begun.asked.past);
        let mut all = Vec::with_capacity(taps.len());
        let found = taps.iter().enumerate().find_map(|(at, taps)| {
            let place = self.programs.audit_place(at, begun.turn);
            let captured = match self.read(at, (place, taps.bytes)) {
                Ok(captured) => captured,
                Err(error) => return Some(Err(error)),
            };
            let weights = self.buffers[at][&Buffer::Weights];
            let member = Member { at, layout: &self.layouts[at], weights };
            let wrong = auditor.check(member, taps, &captured).transpose();
            all.push(captured);
            wrong.map(|wrong| wrong.map(|what| (at, what)))
        });
        self.auditor = Some(auditor);
        match found {
            None => self.agreement(past, &disagreeing(taps, all.iter().map(Vec::as_slice))),
            Some(Err(error)) => Err(error),
            Some(Ok((member, what))) => Err(self.blame(member, past, what)),
        }
    }

    /// Names the one that has other bytes than the rest, or whoever fails when tried alone.
    fn agreement(&self, past: usize, odd: &[usize]) -> Result<(), LlmError> {
        let what = "after a collective it has other bytes than the rest".to_owned();
        match *odd {
            [] => Ok(()),
            [member] => Err(self.blame(member, past, what)),
            _ => match self.examined()[..] {
                [member] => Err(self.blame(member, past, what)),
                _ => Err(LlmError::Unsure { past }),
            },
        }
    }

    /// Bytes that each card has allocated for the model: card, then bytes.
    #[must_use]
    pub fn allocated(&self) -> Vec<(usize, u64)> {
        let bytes = |layout: &CardLayout| layout.allocations().map(|(_, bytes)| bytes).sum();
        self.layouts.iter().map(|layout| (layout.card, bytes(layout))).collect()
    }

    /// The descriptors of every member for a step with these tables, and what is noted of them.
    fn lower(
        &mut self,
        programs: &[Vec<Op>],
        tables: &Arc<[u8]>,
    ) -> Result<(Vec<Vec<Descriptor>>, Option<StepLog>), LlmError> {
        let mut out = Vec::with_capacity(programs.len());
        let mut log = self.log.as_ref().map(|_| StepLog::new(programs.len()));
        for (member, program) in programs.iter().enumerate() {
            let mut work: Vec<Descriptor> = Vec::with_capacity(2 * program.len());
            // What the host has learned from one card, no other card hears before the host knew it.
            if let Some(after) = self.told_after[member] {
                let not_before_ps = self.clock.saturating_add(after);
                work.push(Work::Fence { not_before_ps }.into());
            }
            let (stage, rank) = {
                let place = &self.programs.members()[member];
                (place.stage, place.rank)
            };
            // Taps belong to the operator before them.
            let mut next = 0;
            for op in program {
                let number = if matches!(op, Op::Tap(_)) { next - 1 } else { next };
                next = number + 1;
                if let Some(log) = &mut log {
                    log.op(member, work.len(), number, op);
                }
                match *op {
                    Op::Work(ref one) | Op::Tap(ref one) => work.push(one.clone().into()),
                    Op::Data { into, .. } => {
                        let bytes = Arc::clone(tables);
                        work.push(Work::Write { into, bytes }.into());
                    }
                    Op::Send { to, from, length } => {
                        let port = self.port(member, to);
                        work.push(Work::Send { from, length, port, tag: 0 }.into());
                        work.push(Work::Fence { not_before_ps: 0 }.into());
                    }
                    Op::Receive { from, into, length } => {
                        let port = self.port(member, from);
                        let landing = spanker_runtime::Landing::Store;
                        work.push(Work::Receive { into, length, port, tag: 0, landing }.into());
                        work.push(Work::Fence { not_before_ps: 0 }.into());
                    }
                    Op::Collective { collective, fold, elements, data } => {
                        let key = (stage, collective, elements, fold);
                        let (place, buffers) = ((member, rank), &self.buffers[member]);
                        self.exchanges.lower(place, key, data, buffers, &mut work)?;
                    }
                    Op::Mark { .. } => {}
                    ref other => unreachable!("cards exchange by schedules, not by {other:?}"),
                }
            }
            if let Some(log) = &mut log {
                log.program(member, &work);
            }
            out.push(work);
        }
        Ok((out, log))
    }

    fn port(&self, member: usize, neighbour: usize) -> u32 {
        self.group.wiring().port(member, neighbour).expect("routes follow links")
    }

    fn read(&self, member: usize, (place, bytes): (Place, u64)) -> Result<Vec<u8>, LlmError> {
        let mut out = vec![0; bytes as usize];
        self.group.request(member, |card| card.read(place.buffer, place.offset, &mut out))?;
        Ok(out)
    }

    /// What a step gives the host.
    fn collect(&self, wanted: &[Wanted]) -> Result<Given, LlmError> {
        let mut given = Given::default();
        for (member, wanted) in wanted.iter().enumerate() {
            if let Some(best) = wanted.best {
                given.best = self.read(member, best)?;
            }
            if let Some(logits) = wanted.logits {
                given.logits.push(self.read(member, logits)?);
            }
        }
        Ok(given)
    }

    /// When the host knows what came of a step whose members were done at these times, in picoseconds.
    fn known(&self, begun: &Begun, finished: &[u64]) -> Result<u64, LlmError> {
        let mut latest = finished.iter().copied().max().unwrap_or(0);
        if self.depth() == 1 {
            // Cards show on their clocks what reading took. Those that are read for an audit keep the host waiting, too.
            let read = match self.auditor.is_some() {
                true => 0..self.group.ranks(),
                false => self.programs.last(),
            };
            for member in read {
                latest = latest.max(self.group.request(member, SpankerControl::info)?.clock.0);
            }
            return Ok(latest);
        }
        // They go on with the next step meanwhile.
        for (member, &at) in finished.iter().enumerate() {
            let wanted = &begun.wanted[member];
            let tapped = begun.taps.get(member).map_or(0, |taps| taps.bytes);
            let read = [wanted.best, wanted.logits].into_iter().flatten();
            let bytes = read.map(|(_, bytes)| bytes).sum::<u64>() + tapped;
            if bytes > 0 {
                let card = self.programs.members()[member].card;
                let host = &self.cluster.profile(card).host;
                let seconds = host.latency.value.0 + bytes as f64 / host.bandwidth.value.0 as f64;
                latest = latest.max(at.saturating_add((seconds * 1e12).round() as u64));
            }
        }
        Ok(latest)
    }

    /// Card time since the last step, the mean card's time without work, bytes over links.
    fn measure(&mut self, known: u64) -> Result<(Timing, Vec<(usize, Duration)>), LlmError> {
        let took = known.saturating_sub(self.clock);
        self.clock = self.clock.max(known);
        let nanos = |ps: u64| Duration::from_nanos(ps / 1000);
        let (mut busy, mut sent, mut waits) = (0, 0, Vec::new());
        for rank in 0..self.group.ranks() {
            let now = self.group.request(rank, SpankerControl::counters)?;
            let before = std::mem::replace(&mut self.counted[rank], now);
            let own = now.busy_ps.saturating_sub(before.busy_ps);
            busy += own;
            sent += now.sent.saturating_sub(before.sent);
            let card = self.programs.members()[rank].card;
            waits.push((card, nanos(took.saturating_sub(own))));
        }
        let card = self.shaped.then_some(nanos(took));
        // What a card's operators do not take goes to links, to waiting and to the host.
        let sync = nanos(took.saturating_sub(busy / self.group.ranks() as u64));
        Ok((Timing { wall: Duration::ZERO, card, sync, sent }, waits))
    }

    /// Begins a step. Which operators are checked depends on `salt`.
    fn attempt(&mut self, step: &Step<'_>, salt: u64) -> Result<(), LlmError> {
        layout::check(&self.programs, self.vocab, step)?;
        let since = Instant::now();
        let wiring = self.group.wiring();
        let route = |from, to| wiring.route(from, to);
        let (programs, taps) = self.programs.audited(step, &route, salt);
        let tables: Arc<[u8]> = self.programs.tables(step).into();
        let (programs, log) = self.lower(&programs, &tables)?;
        let job = self.group.begin(&programs, &self.deadline)?;
        let members = 0..self.group.ranks();
        let wanted = members.map(|member| self.programs.wanted(member, step)).collect();
        let (asked, written, turn) = (Asked::of(step), Written::of(step), step.turn);
        self.begun.push_back(Begun { job, asked, wanted, taps, turn, written, log, since });
        Ok(())
    }

    /// Waits for the step that began first, and reads what came of it.
    fn conclude(&mut self) -> Result<Outcome, LlmError> {
        let nothing = || LlmError::unsupported("no step has begun");
        let mut begun = self.begun.pop_front().ok_or_else(nothing)?;
        let finished = self.group.finish(&begun.job, &self.deadline)?;
        let finished: Vec<u64> = finished.into_iter().map(|time| time.0).collect();
        let given = self.collect(&begun.wanted)?;
        self.compare(&begun)?;
        if let (Some(log), Some(step)) = (&mut self.log, begun.log.take()) {
            log.keep(&self.group, &self.programs, step, begun.asked.past)?;
        }
        let known = self.known(&begun, &finished)?;
        let (timing, waits) = self.measure(known)?;
        let timing = Timing { wall: begun.since.elapsed(), ..timing };
        Ok(Outcome { outputs: given.outputs(&begun.asked), timing, waits })
    }

    /// Gives up what is under way: whatever comes of it is of no more use.
    fn abandon(&mut self) {
        for begun in std::mem::take(&mut self.begun) {
            self.group.abandon(&begun.job, &self.deadline);
        }
    }
}

impl Searched for OnCards<'_> {
    fn attempt(&mut self, step: &Step<'_>, salt: u64) -> Result<(), LlmError> {
        OnCards::attempt(self, step, salt)?;
        self.conclude().map(|_| ())
    }

    fn examine(&self, past: usize) -> LlmError {
        let what = "its results are not those of this host".to_owned();
        match self.examined()[..] {
            [member] => self.blame(member, past, what),
            _ => LlmError::Unsure { past },
        }
    }
}

impl Runner for OnCards<'_> {
    fn begin(&mut self, step: &Step<'_>) -> Result<(), LlmError> {
        self.attempt(step, 0).inspect_err(|_| self.abandon())
    }

    fn end(&mut self) -> Result<Outcome, LlmError> {
        self.conclude().inspect_err(|_| self.abandon())
    }

    fn batch(&self) -> usize {
        self.programs.space().batch as usize
    }

    fn windows(&self) -> Option<WindowCache> {
        self.programs.windows()
    }

    fn depth(&self) -> usize {
        self.programs.space().turns as usize
    }
}

impl Drop for OnCards<'_> {
    fn drop(&mut self) {
        self.abandon();
        free(&self.group, &self.buffers);
    }
}

/// Gives buffers back. A card that does not answer any more takes its buffers with it.
fn free(group: &DeviceGroup<'_>, buffers: &[Buffers]) {
    for (rank, buffers) in buffers.iter().enumerate() {
        for &buffer in buffers.values() {
            if group.request(rank, |card| card.free(buffer)).is_err() {
                break;
            }
        }
    }
}
