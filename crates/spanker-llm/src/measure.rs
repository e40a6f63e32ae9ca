// SPDX-License-Identifier: Apache-2.0
//! What cards that are threads take on this machine: a profile that predictions can be made with.
//!
//! The cards themselves are measured, with the model's own weights in the order in which runs read them: real steps
//! of a few sizes go through the program that every run goes through, each operator is timed, and what its kind takes
//! is fitted kind by kind and for every number of rows. Long steps go through some layers only.
//!
//! What a step takes before its first operator and after its last (writing the program, starting cards, reading the
//! result) is the time of the host.

mod fit;
mod observe;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use spanker_model::{KvShape, Model, Quant};
use spanker_plan::{Activity, Layout, Mark, Objective, Op, Plan, Request, Want};
use spanker_topology::{
    Bytes, BytesPerSecond, Cluster, Confidence, ExchangeKind, Kernels, MacsPerSecond, OperatorKind,
    Profile, Provenance, Seconds, Shape, Value,
};

use crate::runner::{Part, Step};
use crate::{InProcess, LlmError, Network};
use fit::{Times, usual};
use observe::{Alike, Observed, Usual};

/// Tokens before the single token that is measured, as far as the model has room for them.
const POSITIONS: [usize; 4] = [16, 160, 512, 1024];
/// Single tokens one after the other at each of these positions. The first does not count: what a step finds in the
/// processor's caches is what the step before it has left there, which in runs was one token shorter.
const IN_A_ROW: usize = 4;
/// Tokens before the rows of a prompt, in turns.
const BEFORE_ROWS: [usize; 2] = [0, 512];
/// How long all steps of one number of rows may take, if they are more than a few.
const TIME: Duration = Duration::from_millis(160);
/// Rows of short prompts, between one and all of a batch. Up to so many are asked for a token each, as the rows of many
/// sequences or of guesses are: the head's weights may be of a type that no layer has.
const FEW_ROWS: usize = 16;
/// Steps of one size at least, and at most.
const STEPS: [usize; 2] = [3, 24];

/// What is measured.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// Which card holds what.
    pub layout: &'a Layout,
    /// Rows of a step at most.
    pub batch: usize,
    /// Threads of all cards together.
    pub threads: usize,
    /// The memory of the machine.
    pub memory: Bytes,
}

/// Measures cards that are threads of this process, and makes a profile of one of them. `progress` is called with
/// the number of rows that is measured next.
///
/// # Errors
/// What [`InProcess::new`] and steps fail with.
pub fn measure<B: AsRef<[u8]> + Send + Sync + 'static>(
    network: &Arc<Network<B>>,
    subject: &Subject<'_>,
    progress: &mut dyn FnMut(usize),
) -> Result<Profile, LlmError> {
    let mut measurement = Measurement::of_threads(network, subject)?;
    measurement.round(progress)?;
    Ok(measurement.profile())
}

/// A measurement in rounds: what is measured for a while, then for another, tells more about a machine that others use
/// as well than one long look.
#[derive(Debug)]
pub struct Measurement<R> {
    runner: R,
    ready: Ready,
    samples: Samples,
    kernels: Kernels,
}

impl<B: AsRef<[u8]> + Send + Sync + 'static> Measurement<InProcess<B>> {
    /// Of cards that are threads of this process.
    ///
    /// # Errors
    /// What [`InProcess::new`] fails with.
    pub fn of_threads(network: &Arc<Network<B>>, subject: &Subject<'_>) -> Result<Self, LlmError> {
        let ready = Ready::new(network.model(), subject, Cards::Threads)?;
        let Ready { plan, context, batch } = &ready;
        let network = Arc::clone(network);
        let runner = InProcess::filled(network, plan, *context, *batch, subject.threads)?;
        let kernels = crate::inproc::kernels(subject.threads, subject.layout.cards().len());
        let samples = Samples::new(Cards::Threads);
        Ok(Measurement { runner, ready, samples, kernels })
    }

    /// Measures once more. `progress` is called with the number of rows that is measured next.
    ///
    /// # Errors
    /// What steps fail with.
    pub fn round(&mut self, progress: &mut dyn FnMut(usize)) -> Result<(), LlmError> {
        self.ready.round(&mut self.runner, &mut self.samples, progress)
    }

    /// The profile of one card that follows from all rounds.
    #[must_use]
    pub fn profile(&self) -> Profile {
        Profile { kernels: self.kernels, ..self.ready.profile(&self.samples) }
    }
}

/// What was seen of cards so far.
#[derive(Debug)]
pub(crate) struct Samples {
    cards: Cards,
    observed: Observed,
    /// Seconds of steps before their first operator and after their last.
    around: Vec<f64>,
}

impl Samples {
    pub(crate) fn new(cards: Cards) -> Samples {
        Samples { cards, observed: Observed::new(cards.exchange()), around: Vec::new() }
    }

    /// What operators of a member took, or those of all where they are alike.
    fn times<'u>(&self, usual: &'u Usual<'_>, member: usize) -> &'u Times {
        let own = usual.members.get(member).filter(|_| self.cards == Cards::Workers);
        own.unwrap_or(&usual.times)
    }
}

/// What plays the cards that are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cards {
    /// Threads of this process.
    Threads,
    /// Ranks of a group.
    Ranks,
    /// Ranks of a group on machines that may differ: each has a profile of its own.
    Workers,
}

impl Cards {
    /// In words.
    fn words(self) -> &'static str {
        match self {
            Cards::Threads => "threads of this machine",
            Cards::Ranks => "ranks of a group",
            Cards::Workers => "workers",
        }
    }

    fn exchange(self) -> ExchangeKind {
        match self {
            Cards::Threads => ExchangeKind::SharedMemory,
            Cards::Ranks | Cards::Workers => ExchangeKind::Messages,
        }
    }
}

/// A plan whose steps are measured.
#[derive(Debug)]
pub(crate) struct Ready {
    pub(crate) plan: Plan,
    pub(crate) context: usize,
    pub(crate) batch: usize,
}

impl Ready {
    pub(crate) fn new(
        model: &Model,
        subject: &Subject<'_>,
        played: Cards,
    ) -> Result<Ready, LlmError> {
        let layout = subject.layout;
        let cards = layout.cards().last().map_or(1, |card| card + 1);
        let assumed = assumed(cards, subject.memory, played)?;
        let batch = subject.batch.min(model.context as usize).max(1);
        let longest = POSITIONS[POSITIONS.len() - 1] + batch;
        let context = longest.min(model.context as usize);
        let request = Request {
            context: context as u64,
            prompt: 1,
            kv: Quant::F16,
            batch: batch as u64,
            sequences: FEW_ROWS.min(batch) as u64,
            // Those of one, which others share.
            blocks: Some(KvShape::blocks_for(context as u64)),
            ..Request::new(Objective::Latency)
        };
        let refused = |error: &dyn std::fmt::Display| LlmError::plan(error.to_string());
        let cluster = Cluster::uniform(assumed, cards, Shape::Switch);
        let cluster = cluster.map_err(|error| refused(&error))?;
        let plan = Plan::new(model.clone(), cluster, request, layout.clone());
        Ok(Ready { plan: plan.map_err(|error| refused(&error))?, context, batch })
    }

    /// Measures cards on which the plan is laid out.
    pub(crate) fn round(
        &self,
        runner: &mut impl Measurable,
        samples: &mut Samples,
        progress: &mut dyn FnMut(usize),
    ) -> Result<(), LlmError> {
        let mut bench = self.bench(runner, samples);
        progress(1);
        bench.tokens(self.plan.model.vocab, 3 * TIME)?;
        let mut rows = 2;
        while rows <= self.batch {
            progress(rows);
            bench.rows(rows)?;
            rows = if rows < self.batch { (2 * rows).min(self.batch) } else { self.batch + 1 };
        }
        Ok(())
    }

    /// Profiles with what tokens, short prompts, whole batches and exchanges take now, and what a step takes besides:
    /// a few steps say so. What other numbers of rows take stays. There is one for all members, or one for each.
    pub(crate) fn refreshed(
        &self,
        runner: &mut impl Measurable,
        cards: Cards,
        mut profiles: Vec<Profile>,
    ) -> Result<Vec<Profile>, LlmError> {
        let mut samples = Samples::new(cards);
        let mut bench = self.bench(runner, &mut samples);
        bench.tokens(self.plan.model.vocab, TIME)?;
        for rows in [FEW_ROWS.min(self.batch), self.batch] {
            bench.rows(rows)?;
        }
        let seen = samples.observed.usual();
        for (member, profile) in profiles.iter_mut().enumerate() {
            for new in samples.times(&seen, member).fit() {
                let same = |old: &&mut spanker_topology::OperatorRate| {
                    (old.kind, &old.weights, old.rows) == (new.kind, &new.weights, new.rows)
                };
                if let Some(old) = profile.compute.operators.iter_mut().find(same) {
                    *old = new;
                }
            }
            set_link(profile, &seen, cards);
            set_host(profile, &samples);
        }
        Ok(profiles)
    }

    fn bench<'b, R: Measurable>(
        &self,
        runner: &'b mut R,
        samples: &'b mut Samples,
    ) -> Bench<'b, R> {
        Bench { runner, kinds: kinds(&self.plan), context: self.context, samples }
    }

    /// The profile that follows from what was seen of all members.
    pub(crate) fn profile(&self, samples: &Samples) -> Profile {
        self.profile_of(samples, 0)
    }

    /// The profile that follows from what was seen of a member, where each has one.
    pub(crate) fn profile_of(&self, samples: &Samples, member: usize) -> Profile {
        let (plan, cards) = (&self.plan, samples.cards);
        let mut profile = plan.cluster.profile(0).clone();
        let seen = samples.observed.usual();
        let times = samples.times(&seen, member);
        profile.compute.operators = times.fit();
        let reading = times.product_rate(1).max(1.0);
        measured(&mut profile.memory.bandwidth, BytesPerSecond(reading as u64), cards);
        let (model, batch) = (&plan.model, self.batch);
        // A byte of weights is multiplied with every row.
        let each = model.parameters() as f64 / model.weight_bytes().max(1) as f64;
        let multiplying = times.product_rate(batch as u64) * batch as f64 * each;
        measured(&mut profile.compute.rate, MacsPerSecond(multiplying.max(1.0)), cards);
        let product = |entry: &&spanker_topology::OperatorRate| {
            entry.kind == OperatorKind::Product && entry.rows == 1
        };
        let overhead = profile.compute.operators.iter().find(product).map(|entry| entry.overhead);
        measured(&mut profile.compute.per_operator, overhead.unwrap_or_default(), cards);
        measured(&mut profile.compute.per_token, Seconds::ZERO, cards);
        set_link(&mut profile, &seen, cards);
        set_host(&mut profile, samples);
        profile
    }
}

/// Cards whose steps can be measured.
pub(crate) trait Measurable {
    /// The members of each group.
    fn groups(&self) -> &[Range<usize>];

    /// Runs a step through some layers or all.
    fn timed(&mut self, step: &Step<'_>, layers: Option<&[u32]>) -> Result<Timed, LlmError>;
}

/// A step that was measured.
pub(crate) struct Timed {
    /// What each card had to do.
    pub(crate) programs: Arc<Vec<Vec<Op>>>,
    /// What each card did when, in seconds since the step began.
    pub(crate) marks: Vec<Vec<Mark>>,
    /// How long the step took.
    pub(crate) wall: f64,
}

impl<B: AsRef<[u8]> + Send + Sync + 'static> Measurable for InProcess<B> {
    fn groups(&self) -> &[Range<usize>] {
        self.groups()
    }

    fn timed(&mut self, step: &Step<'_>, layers: Option<&[u32]>) -> Result<Timed, LlmError> {
        let begun = Instant::now();
        let mut programs = self.programs_of(step);
        if let Some(layers) = layers {
            programs.iter_mut().for_each(|program| keep_layers(program, layers));
        }
        let programs = Arc::new(programs);
        let reports = self.go(Arc::clone(&programs), step, true, begun)?;
        let wall = begun.elapsed().as_secs_f64();
        let marks = reports.into_iter().map(|report| report.marks).collect();
        Ok(Timed { programs, marks, wall })
    }
}

/// Layers that are alike.
fn kinds(plan: &Plan) -> Vec<Vec<usize>> {
    let mut kinds: Vec<Vec<usize>> = Vec::new();
    // Layers of another stage are on other cards.
    for stage in plan.layout.stages() {
        let first = kinds.len();
        for layer in stage.layers.clone() {
            let layers = &plan.model.layers;
            match kinds[first..].iter_mut().find(|kind| layers[kind[0]] == layers[layer]) {
                Some(kind) => kind.push(layer),
                None => kinds.push(vec![layer]),
            }
        }
    }
    kinds
}

/// Cards that are measured, and what is known by now.
struct Bench<'b, R> {
    runner: &'b mut R,
    kinds: Vec<Vec<usize>>,
    context: usize,
    samples: &'b mut Samples,
}

/// What a step took, in seconds.
struct Took {
    wall: f64,
    /// Of that before the first operator and after the last.
    around: f64,
}

impl<R: Measurable> Bench<'_, R> {
    /// Single tokens through the whole model.
    fn tokens(&mut self, vocab: u64, time: Duration) -> Result<(), LlmError> {
        let in_a_row = IN_A_ROW.min(self.context);
        let last = self.context - in_a_row;
        let mut positions: Vec<usize> = POSITIONS.iter().map(|&past| past.min(last)).collect();
        positions.dedup();
        let blocks = self.blocks();
        let begun = Instant::now();
        for turn in 0..=STEPS[1] {
            let in_turn =
                positions.iter().flat_map(|first| (0..in_a_row).map(move |at| (first, at)));
            for (past, at) in in_turn.map(|(first, at)| (first + at, at)) {
                let token = [((turn * 7919 + past) as u64 % vocab) as u32];
                let counts = turn > 0 && at + 1 >= in_a_row.min(2);
                let part = Part::new(&token, past as u64, &blocks, Want::Best(1));
                let around = self.step(&[part], None, counts)?.around;
                self.samples.around.extend(counts.then_some(around));
            }
            if turn >= STEPS[0] && begun.elapsed() > time {
                break;
            }
        }
        Ok(())
    }

    /// Rows of a prompt through some layers, others in each turn: what a step reads has not been read just before. A few
    /// rows are of one sequence and of as many sequences by turns.
    fn rows(&mut self, rows: usize) -> Result<(), LlmError> {
        let before = BEFORE_ROWS.map(|past| past.min(self.context - rows));
        let tokens: Vec<u32> = vec![1; rows];
        let (mut next, mut each, blocks) = (0, 1, self.blocks());
        let is_few = rows <= FEW_ROWS;
        let want = if is_few { Want::Best(1) } else { Want::Nothing };
        // Where there are not enough blocks, sequences share some.
        let own = |row: usize| -> Vec<u32> {
            (0..blocks.len()).map(|at| blocks[(row + at * rows) % blocks.len()]).collect()
        };
        let tables: Vec<Vec<u32>> = (0..rows).map(own).collect();
        let begun = Instant::now();
        for turn in 0..=STEPS[1] {
            let some: Vec<u32> = self
                .kinds
                .iter()
                .flat_map(|kind| {
                    let count = each.min(kind.len());
                    (0..count).map(move |at| kind[(next + at) % kind.len()] as u32)
                })
                .collect();
            next += each;
            let past = before[turn % before.len()] as u64;
            let prompt = Part { outputs: rows as u64, ..Part::new(&tokens, past, &blocks, want) };
            let single = |row: usize| Part::new(&tokens[row..=row], past, &tables[row], want);
            let parts: Vec<Part<'_>> = match is_few && turn / before.len() % 2 == 1 {
                true => (0..rows).map(single).collect(),
                false => vec![prompt],
            };
            let wall = self.step(&parts, Some(&some), turn > 0)?.wall;
            if turn == 0 {
                let share = TIME.as_secs_f64() / 8.0 / wall.max(1e-6);
                each = (share as usize).clamp(1, 8);
            }
            if turn > 2 * STEPS[0] && begun.elapsed() > TIME {
                break;
            }
        }
        Ok(())
    }

    /// The blocks of the only sequence.
    fn blocks(&self) -> Vec<u32> {
        (0..KvShape::blocks_for(self.context as u64) as u32).collect()
    }

    /// One step, through some layers or all; says how long it took, and keeps how long each operator took unless
    /// it was to warm up.
    fn step(
        &mut self,
        parts: &[Part<'_>],
        layers: Option<&[u32]>,
        counts: bool,
    ) -> Result<Took, LlmError> {
        let step = &Step::of(parts);
        let Timed { programs, marks, wall } = self.runner.timed(step, layers)?;
        let marks: Vec<_> = marks.iter().map(Vec::as_slice).collect();
        if counts {
            let operators = programs.iter().map(Vec::len).sum();
            let (rows, past) = (step.rows() as usize, parts[0].past as usize);
            let alike = Alike { rows, past, sequences: parts.len(), operators };
            let groups = self.runner.groups();
            self.samples.observed.add(alike, &step.reach(), &programs, groups, &marks);
        }
        Ok(Took { wall, around: around(&marks, wall) })
    }
}

/// What a step took before its first mark and after its last. Marks of other ranks are by clocks that may be ahead.
fn around(marks: &[&[Mark]], wall: f64) -> f64 {
    let all = || marks.iter().copied().flatten();
    let first = all().map(|mark| mark.start).fold(wall, f64::min);
    let last = all().map(|mark| mark.end).fold(first, f64::max);
    (first + wall - last).max(0.0)
}

/// What exchanges take, if some were seen.
fn set_link(profile: &mut Profile, usual: &Usual<'_>, cards: Cards) {
    if let (Some(link), Some((latency, per_byte))) =
        (&mut profile.link, usual.link(cards == Cards::Workers))
    {
        let bandwidth = BytesPerSecond((1.0 / per_byte).min(1e15) as u64);
        measured(&mut link.bandwidth, bandwidth, cards);
        measured(&mut link.latency, Seconds(latency), cards);
        link.exchange = cards.exchange();
        measured(&mut link.round_trip, Seconds(2.0 * latency), cards);
    }
}

/// What a step takes besides its operators: it is started, and its result is read.
fn set_host(profile: &mut Profile, samples: &Samples) {
    measured(&mut profile.host.latency, Seconds(usual(&samples.around) / 2.0), samples.cards);
}

/// Takes the layers that are not listed out of a program. What stages hand over stays: it follows a stage's last layer.
pub(crate) fn keep_layers(program: &mut Vec<Op>, layers: &[u32]) {
    let mut kept = true;
    program.retain(|op| {
        if let Op::Mark { activity, layer } = op {
            use Activity::{Attention, Down, Output, Up};
            let inside = matches!(activity, Attention | Output | Up | Down);
            kept = !inside || layers.contains(layer);
        }
        kept || matches!(op, Op::Send { .. } | Op::Receive { .. })
    });
}

fn measured<T>(value: &mut Value<T>, found: T, cards: Cards) {
    *value = Value {
        value: found,
        low: None,
        high: None,
        provenance: Provenance::Measured,
        confidence: Confidence::Medium,
        source: format!("steps of the model on {}", cards.words()),
    };
}

/// One of `cards` equal cards that are threads of this process or ranks, of which nothing was measured: for layouts whose
/// steps are run and not timed. `memory` is that of all.
///
/// # Errors
/// [`LlmError::Plan`] for a memory that no card can have.
pub fn unmeasured(cards: usize, memory: Bytes) -> Result<Profile, LlmError> {
    assumed(cards, memory, Cards::Threads)
}

/// A card of which nothing but its part of the machine's memory is known.
fn assumed(cards: usize, memory: Bytes, played: Cards) -> Result<Profile, LlmError> {
    let words = played.words();
    let none = format!("provenance = 'assumed', confidence = 'low', source = '{words}'");
    let text = format!(
        "name = 'this-machine'
summary = 'one of {cards} cards that are {words}'
topology = 'switch'
memory.capacity = {{ value = {}, provenance = 'derived', confidence = 'high', source = 'the memory of this machine, shared by {cards} cards' }}
memory.reserved = {{ value = '0 B', {none} }}
memory.bandwidth = {{ value = '10 GB/s', {none} }}
compute.rate = {{ value = '10 GMAC/s', {none} }}
compute.per_operator = {{ value = '1 us', {none} }}
compute.per_token = {{ value = '0 us', {none} }}
host.bandwidth = {{ value = '10 GB/s', {none} }}
host.latency = {{ value = '0 us', {none} }}
[link]
exchange = '{}'
bandwidth = {{ value = '5 GB/s', {none} }}
bit_error_rate = {{ value = 0.0, {none} }}
lanes = {{ value = 1, {none} }}
ports = {{ value = 1, {none} }}
latency = {{ value = '1 us', {none} }}
base = {{ value = '0 us', {none} }}
round_trip = {{ value = '2 us', {none} }}
training = {{ value = '0 us', {none} }}
",
        (memory.0 / cards.max(1) as u64).max(1),
        played.exchange().name(),
    );
    Profile::from_toml(&text).map_err(|error| LlmError::plan(error.to_string()))
}

#[cfg(test)]
mod tests {
    use spanker_plan::{Activity, Label};

    use super::*;

    #[test]
    fn clock_of_another_rank_that_is_ahead_makes_no_time_negative() {
        let mark = |start: f64, end: f64| {
            let label = Label { activity: Activity::Embed, layer: 0, token: 0 };
            Mark { card: 0, label, op: 0, ops: 1, start, end, parts: None }
        };
        let (own, other) = ([mark(1e-6, 5e-6)], [mark(2e-6, 40e-6)]);
        assert!((around(&[&own], 8e-6) - 4e-6).abs() < 1e-12);
        assert_eq!(around(&[&own, &other], 8e-6).to_bits(), 0.0f64.to_bits());
    }
}
