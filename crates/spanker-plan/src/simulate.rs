// SPDX-License-Identifier: Apache-2.0
//! The simulator: a plan in virtual time.
//!
//! `simulate` takes the plan that a run takes and returns the trace that a run returns. Where nothing is
//! shared and nothing goes wrong it gives the times of the closed formulas; beyond that it knows what they
//! do not: messages that meet on a wire, cards that are slow, frames that break, cards and links that die.
//! After a loss the survivors get a new plan, fetch what they lack, rebuild keys and values, and go on.

pub(crate) mod engine;
pub(crate) mod flow;
pub(crate) mod network;
mod program;
mod recover;
mod relay;
mod text;
mod times;

use std::collections::HashMap;

use rand::SeedableRng;
use rand_pcg::Pcg32;
use spanker_topology::{Cluster, Seconds};

use crate::cost::exchange::collective_time;
use crate::cost::{Group, Lists, Pricer};
use crate::plan::{Layout, in_flight, sequences_per_replica};
use crate::program::Step;
use crate::trace::{Incident, Mark, Parts, Trace};
use crate::{Plan, PlanError};
use engine::{Disturbance, Ended, Engine};
use network::{Errors, Speeds};
use program::{Items, What, Writer};
pub use times::{SimulationReport, TimedIncident};

/// The most tokens that one simulation may have.
pub const MAX_TOKENS: u32 = 100_000;

/// Something that dies.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Fault {
    /// A card, with everything on it.
    Card {
        /// The card.
        card: usize,
        /// When.
        at: Seconds,
    },
    /// The link between two cards, in both directions.
    Link {
        /// One end.
        from: usize,
        /// The other end.
        to: usize,
        /// When.
        at: Seconds,
    },
}

impl Fault {
    fn at(&self) -> f64 {
        match *self {
            Fault::Card { at, .. } | Fault::Link { at, .. } => at.0,
        }
    }
}

/// A card that is slower than its profile says.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Slow {
    /// The card.
    pub card: usize,
    /// How many times as long its work takes.
    pub factor: f64,
    /// From when on.
    pub from: Seconds,
}

/// Under which conditions a plan is simulated.
#[derive(Debug, Clone, PartialEq)]
pub struct Conditions {
    /// Tokens of each sequence to decode.
    pub tokens: u32,
    /// Whether the prompt comes first.
    pub prompt: bool,
    /// What chance starts from: the same seed gives the same trace.
    pub seed: u64,
    /// The largest part by which a piece of work may take longer, at random.
    pub jitter: f64,
    /// Cards that are slower than their profile says.
    pub slow: Vec<Slow>,
    /// The chance that a bit flips on a link, where frames are known.
    pub bit_error_rate: f64,
    /// What dies.
    pub faults: Vec<Fault>,
    /// How long after the last sign of life a loss is noticed.
    pub deadline: Seconds,
    /// Whether the trace has everything that every card did.
    pub record: bool,
}

impl Conditions {
    /// So many tokens without prompt or trouble.
    #[must_use]
    pub fn calm(tokens: u32) -> Conditions {
        Conditions {
            tokens,
            prompt: false,
            seed: 0,
            jitter: 0.0,
            slow: Vec::new(),
            bit_error_rate: 0.0,
            faults: Vec::new(),
            deadline: Seconds(0.010),
            record: true,
        }
    }

    fn check(&self, cluster: &Cluster) -> Result<(), PlanError> {
        let wrong = |what: String| Err(PlanError::Request { what });
        if !(1..=MAX_TOKENS).contains(&self.tokens) {
            return wrong(format!("{} tokens: 1 to {MAX_TOKENS} are possible", self.tokens));
        }
        if !(0.0..=10.0).contains(&self.jitter) {
            return wrong(format!("a jitter of {} is not between 0 and 10", self.jitter));
        }
        if !(0.0..0.01).contains(&self.bit_error_rate) {
            let rate = self.bit_error_rate;
            return wrong(format!("a bit error rate of {rate} is not between 0 and 0.01"));
        }
        let cards = cluster.cards();
        for slow in &self.slow {
            if slow.card >= cards {
                return wrong(format!("there is no card {} (the plan has {cards})", slow.card));
            }
            if !(0.01..=1000.0).contains(&slow.factor) {
                return wrong(format!(
                    "card {} cannot take {} times as long",
                    slow.card, slow.factor
                ));
            }
        }
        for fault in &self.faults {
            match *fault {
                Fault::Card { card, .. } if card >= cards => {
                    return wrong(format!("there is no card {card} (the plan has {cards})"));
                }
                Fault::Link { from, to, .. } => {
                    let joins = |wire: &spanker_topology::Wire| {
                        (wire.from, wire.to) == (from, to) || (wire.to, wire.from) == (from, to)
                    };
                    if !cluster.wires().iter().any(joins) {
                        return wrong(format!("there is no link {from}-{to}"));
                    }
                }
                Fault::Card { .. } => {}
            }
        }
        Ok(())
    }
}

/// Runs a plan in virtual time.
///
/// ```
/// use spanker_model::{Quant, builtin};
/// use spanker_plan::{Conditions, Objective, Plan, Request, choose, simulate};
/// use spanker_topology::{Cluster, Profile, Shape};
/// let model = builtin("tinyllama-1.1b", Quant::Q4_0).unwrap();
/// let ring = Cluster::uniform(Profile::builtin("rev-a")?, 4, Shape::Ring)?;
/// let request = Request::new(Objective::Latency);
/// let best = choose(&model, &ring, &[0, 1, 2, 3], &request).unwrap().candidates.remove(0);
/// let plan = Plan::new(model, ring, request, best.layout).unwrap();
/// let trace = simulate(&plan, &Conditions::calm(1)).unwrap();
/// let predicted = plan.predict().token.0;
/// assert!((trace.tokens[0] / predicted - 1.0).abs() < 0.01);
/// # Ok::<(), spanker_topology::TopologyError>(())
/// ```
///
/// # Errors
/// [`PlanError::Request`] for conditions that make no sense.
pub fn simulate(plan: &Plan, conditions: &Conditions) -> Result<Trace, PlanError> {
    conditions.check(&plan.cluster)?;
    let (request, tokens) = (&plan.request, u64::from(conditions.tokens));
    let from = if conditions.prompt { request.prompt } else { request.position };
    if from + tokens > request.context {
        let what =
            format!("{tokens} tokens after {from} exceed the context of {}", request.context);
        return Err(PlanError::Request { what });
    }
    let mut run = Run {
        plan,
        conditions,
        cluster: plan.cluster.clone(),
        layout: plan.layout.clone(),
        clock: 0.0,
        busy: vec![0.0; plan.cluster.cards()],
        dead: Vec::new(),
        cut: Vec::new(),
        trace: Trace {
            cards: plan.cluster.cards(),
            tokens: Vec::new(),
            marks: Vec::new(),
            incidents: Vec::new(),
            events: 0,
        },
        dice: Pcg32::seed_from_u64(conditions.seed),
    };
    run.go();
    run.trace.incidents.sort_by(|a, b| a.at.total_cmp(&b.at));
    Ok(run.trace)
}

/// A simulation under way: the cluster and layout as they are by now.
struct Run<'a> {
    plan: &'a Plan,
    conditions: &'a Conditions,
    cluster: Cluster,
    layout: Layout,
    /// When the next piece begins.
    clock: f64,
    /// Until when each card is busy with the piece before.
    busy: Vec<f64>,
    dead: Vec<usize>,
    cut: Vec<(usize, usize)>,
    trace: Trace,
    dice: Pcg32,
}

impl Run<'_> {
    fn go(&mut self) {
        if self.conditions.prompt {
            if !self.until_done(What::Prompt, 0) {
                return;
            }
            self.trace.incidents.push(Incident {
                at: self.clock,
                what: "the prompt is through: the first token is there".into(),
            });
            self.trace.tokens.clear();
        }
        let mut number = 0;
        while number < self.conditions.tokens {
            // Micro-batches follow each other closely only in one piece; single ones need no such care.
            let together = if self.overlaps() { self.conditions.tokens - number } else { 1 };
            let request = &self.plan.request;
            let begun = if self.conditions.prompt { request.prompt } else { request.position };
            let position = begun + u64::from(number);
            let what = What::Decode { tokens: together.min(256), number, position };
            if !self.until_done(what, position) {
                return;
            }
            number += together.min(256);
        }
    }

    fn overlaps(&self) -> bool {
        let request = &self.plan.request;
        let each = sequences_per_replica(request, &self.layout);
        let batches = |stages: usize| in_flight(request, each, stages).0;
        self.layout.replicas.len() > 1
            || self.layout.replicas.iter().any(|stages| batches(stages.len()) > 1)
    }

    /// Runs a piece of the simulation, again after each loss; false if the survivors cannot go on.
    fn until_done(&mut self, what: What, position: u64) -> bool {
        loop {
            let begun = self.clock;
            let (ended, participants) = self.piece(what);
            self.trace.events += ended.events;
            if ended.complete {
                let clocks = participants.iter().map(|&card| ended.clocks[card]);
                self.clock = clocks.fold(begun, f64::max);
                self.busy.clone_from(&ended.clocks);
                let mut done = ended.done;
                done.sort_by(|a, b| a.1.total_cmp(&b.1));
                self.collect(done);
                return true;
            }
            if !self.recover(&ended, &participants, position) {
                return false;
            }
        }
    }

    /// A token is complete when its last micro-batch is, in the last copy that has it.
    fn collect(&mut self, done: Vec<(u32, f64)>) {
        let mut tokens: Vec<(u32, f64)> = Vec::new();
        for (token, at) in done {
            match tokens.iter_mut().find(|(known, _)| *known == token) {
                Some((_, latest)) => *latest = latest.max(at),
                None => tokens.push((token, at)),
            }
        }
        tokens.sort_by_key(|(token, _)| *token);
        self.clock = tokens.last().map_or(self.clock, |(_, at)| *at);
        self.trace.tokens.extend(tokens.into_iter().map(|(_, at)| at));
    }

    fn piece(&mut self, what: What) -> (Ended, Vec<usize>) {
        let pricer = Pricer::new(&self.plan.model, &self.cluster, &self.plan.request);
        let dice = Pcg32::from_rng(&mut self.dice);
        let record = self.conditions.record;
        let items =
            Writer::new(&pricer, self.conditions.jitter, dice, record).write(&self.layout, what);
        let disturbance = self.disturbance();
        let mut marks = std::mem::take(&mut self.trace.marks);
        let speeds = Speeds::of(&self.cluster);
        let (flows, groups) = (&items.flows, &items.groups);
        let mut engine =
            Engine::new(&self.cluster, &speeds, flows, groups, &items.items).disturbed(disturbance);
        if record {
            engine = engine.recording(&mut marks);
        }
        let starts: Vec<f64> = self.busy.iter().map(|busy| busy.max(self.clock)).collect();
        let ended = engine.run(&starts);
        explain_exchanges(&self.cluster, &items, &ended, &mut marks);
        self.trace.marks = marks;
        (ended, self.layout.cards())
    }

    fn disturbance(&mut self) -> Disturbance {
        let cards = self.cluster.cards();
        let mut death = vec![f64::INFINITY; cards];
        let mut cut = Vec::new();
        for fault in &self.conditions.faults {
            match *fault {
                Fault::Card { card, at } if !self.dead.contains(&card) => {
                    death[card] = death[card].min(at.0);
                }
                Fault::Link { from, to, at } if !self.cut.contains(&(from, to)) => {
                    if cut.is_empty() {
                        cut = vec![f64::INFINITY; self.cluster.wires().len()];
                    }
                    for (index, wire) in self.cluster.wires().iter().enumerate() {
                        let ends = [(wire.from, wire.to), (wire.to, wire.from)];
                        if ends.contains(&(from, to)) {
                            cut[index] = f64::min(cut[index], at.0);
                        }
                    }
                }
                _ => {}
            }
        }
        // A dead card cannot pass messages on either.
        if self.conditions.faults.iter().any(|fault| matches!(fault, Fault::Card { .. })) {
            cut.resize(self.cluster.wires().len(), f64::INFINITY);
            for (index, wire) in self.cluster.wires().iter().enumerate() {
                let ends = [wire.from, wire.to].into_iter().filter(|&node| node < cards);
                let first = ends.map(|card| death[card]).fold(f64::INFINITY, f64::min);
                cut[index] = f64::min(cut[index], first);
            }
        }
        let mut slow = vec![(1.0, 0.0); cards];
        for s in &self.conditions.slow {
            slow[s.card] = (s.factor, s.from.0);
        }
        Disturbance { death, slow, cut, errors: self.errors() }
    }

    fn errors(&mut self) -> Option<Errors> {
        let rate = self.conditions.bit_error_rate;
        let link = self.plan.cluster.profile(0).link.as_ref()?;
        let framing = link.framing.filter(|_| rate > 0.0)?;
        let frame = (framing.payload + framing.overhead) as f64 / link.bandwidth.value.0 as f64;
        let window = 1.0 + (link.round_trip.value.0 / frame).ceil();
        Some(Errors {
            dice: Pcg32::from_rng(&mut self.dice),
            payload: framing.payload as f64,
            chance: framing.frame_error_rate(rate),
            penalty: window * frame,
        })
    }
}

/// What layers in a row take on a group, with the embedding before and the head behind them where they are given:
/// an early rank begins an exchange while others are still at work, which no sum of single exchanges knows. After
/// some layers each takes as long as those before.
pub(crate) fn in_a_row(
    pricer: &Pricer<'_>,
    group: &Group,
    step: &Step<'_>,
    embed: Option<&Lists>,
    layers: &[&Lists],
    head: Option<&Lists>,
) -> Seconds {
    let pairs = (group.cards.len() * group.cards.len()) as u64;
    let count = layers.len();
    // Long steps are mostly work, and who is early in one layer is early in the next.
    let most = match step.rows() {
        2.. if pairs >= MANY_PAIRS => FEWEST_LONG_LAYERS,
        2.. => FEWEST_LAYERS,
        _ => (MESSAGES / pairs).clamp(FEWEST_LAYERS, MOST_LAYERS),
    };
    let most = most as usize;
    let (times, before) = (count.min(most), usize::from(embed.is_some()));
    let pieces: Vec<&Lists> =
        embed.into_iter().chain(layers[..times].iter().copied()).chain(head).collect();
    let noted = [before + times / 2, before + times];
    let dice = Pcg32::seed_from_u64(0);
    let items = Writer::new(pricer, 0.0, dice, false).row(group, &pieces, step.reach(), noted);
    let (cluster, speeds) = (pricer.cluster, pricer.speeds());
    let ended = Engine::new(cluster, speeds, &items.flows, &items.groups, &items.items).run(&[]);
    if !ended.complete {
        return Seconds(f64::INFINITY);
    }
    let all = ended.clocks.iter().copied().fold(0.0, f64::max);
    let after = |pieces: usize| {
        let done = ended.done.iter().filter(|(at, _)| *at as usize + 1 == pieces);
        done.map(|&(_, at)| at).fold(0.0, f64::max)
    };
    let each = (after(noted[1]) - after(noted[0])) / (times - times / 2) as f64;
    Seconds(all + each * (count - times) as f64)
}

/// Layers that are simulated where more are priced: so many that each of their exchanges has about so many messages
/// in all, but neither fewer nor more than these.
const MESSAGES: u64 = 1000;
const FEWEST_LAYERS: u64 = 6;
/// The same for long steps of groups with so many pairs of cards, whose messages are cut into many segments.
const FEWEST_LONG_LAYERS: u64 = 3;
const MANY_PAIRS: u64 = 36;
const MOST_LAYERS: u64 = 32;

/// Says what recorded exchanges consist of: waiting for the last to come, what the collective takes without
/// bytes, and what its bytes take.
fn explain_exchanges(cluster: &Cluster, items: &Items, ended: &Ended, marks: &mut [Mark]) {
    let mut latest: HashMap<(u32, u64), f64> = HashMap::new();
    for met in &ended.collectives {
        let begun = latest.entry((met.group, met.number)).or_insert(f64::NEG_INFINITY);
        *begun = begun.max(marks[met.mark].start);
    }
    let mut without_bytes: HashMap<(u32, u32), f64> = HashMap::new();
    for met in &ended.collectives {
        let latency = *without_bytes.entry((met.group, met.flow)).or_insert_with(|| {
            let (collective, algorithm) = items.collectives[met.flow as usize];
            let cards = &items.groups[met.group as usize];
            let base = cluster.base(cards);
            (collective_time(cluster, collective, algorithm, cards, 0) - base).0
        });
        let mark = &mut marks[met.mark];
        let whole = mark.end - mark.start;
        let waiting = (latest[&(met.group, met.number)] - mark.start).clamp(0.0, whole);
        let latency = latency.min(whole - waiting);
        let bandwidth = whole - waiting - latency;
        mark.parts = Some(Parts { latency, bandwidth, waiting, ..Parts::default() });
    }
}
