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

use std::sync::Arc;
use std::time::{Duration, Instant};

use spanker_model::Quant;
use spanker_plan::{Activity, Layout, Objective, Op, Plan, Request, Want};
use spanker_topology::{
    Bytes, BytesPerSecond, Cluster, Confidence, ExchangeKind, MacsPerSecond, OperatorKind, Profile,
    Provenance, Seconds, Shape, Value,
};

use crate::runner::Step;
use crate::{InProcess, LlmError, Network};
use fit::usual;
use observe::{Alike, Observed};

/// Tokens before the single token that is measured, as far as the model has room for them.
const POSITIONS: [usize; 4] = [16, 160, 512, 1024];
/// Single tokens one after the other at each of these positions. The first does not count: what a step finds in the
/// processor's caches is what the step before it has left there, which in runs was one token shorter.
const IN_A_ROW: usize = 4;
/// Tokens before the rows of a prompt, in turns.
const BEFORE_ROWS: [usize; 2] = [0, 512];
/// How long all steps of one number of rows may take, if they are more than a few.
const TIME: Duration = Duration::from_millis(160);
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
    let layout = subject.layout;
    let cards = layout.cards().last().map_or(1, |card| card + 1);
    let assumed = assumed(cards, subject.memory)?;
    let model = network.model();
    let batch = subject.batch.min(model.context as usize).max(1);
    let longest = POSITIONS[POSITIONS.len() - 1] + batch;
    let context = longest.min(model.context as usize);
    let request = Request {
        context: context as u64,
        prompt: 1,
        kv: Quant::F16,
        batch: batch as u64,
        ..Request::new(Objective::Latency)
    };
    let refused = |error: &dyn std::fmt::Display| LlmError::plan(error.to_string());
    let cluster = Cluster::uniform(assumed.clone(), cards, Shape::Switch);
    let cluster = cluster.map_err(|error| refused(&error))?;
    let plan = Plan::new(model.clone(), cluster, request, layout.clone());
    let plan = plan.map_err(|error| refused(&error))?;
    let runner = InProcess::filled(Arc::clone(network), &plan, context, batch, subject.threads)?;
    let mut bench = Bench { runner, kinds: kinds(&plan), context, observed: Observed::default() };
    progress(1);
    let rest = bench.tokens(model.vocab)?;
    let mut rows = 2;
    while rows <= batch {
        progress(rows);
        bench.rows(rows)?;
        rows = if rows < batch { (2 * rows).min(batch) } else { batch + 1 };
    }
    let mut profile = bench.profile(assumed, batch);
    // A step is started and its result is read.
    measured(&mut profile.host.latency, Seconds(rest / 2.0));
    profile.kernels = crate::inproc::kernels(subject.threads, layout.cards().len());
    Ok(profile)
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
struct Bench<B> {
    runner: InProcess<B>,
    kinds: Vec<Vec<usize>>,
    context: usize,
    observed: Observed,
}

/// What a step took, in seconds.
struct Took {
    wall: f64,
    /// Of that before the first operator and after the last.
    around: f64,
}

impl<B: AsRef<[u8]> + Send + Sync + 'static> Bench<B> {
    /// Single tokens through the whole model; says how long a step takes before its first operator and after the
    /// last.
    fn tokens(&mut self, vocab: u64) -> Result<f64, LlmError> {
        let in_a_row = IN_A_ROW.min(self.context);
        let last = self.context - in_a_row;
        let mut positions: Vec<usize> = POSITIONS.iter().map(|&past| past.min(last)).collect();
        positions.dedup();
        let mut rest = Vec::new();
        let begun = Instant::now();
        for turn in 0..=STEPS[1] {
            let in_turn =
                positions.iter().flat_map(|first| (0..in_a_row).map(move |at| (first, at)));
            for (past, at) in in_turn.map(|(first, at)| (first + at, at)) {
                let token = ((turn * 7919 + past) as u64 % vocab) as u32;
                let step = Step { tokens: &[token], past, want: Want::Best(1) };
                let counts = turn > 0 && at + 1 >= in_a_row.min(2);
                let around = self.step(&step, None, counts)?.around;
                rest.extend(counts.then_some(around));
            }
            if turn >= STEPS[0] && begun.elapsed() > 6 * TIME {
                break;
            }
        }
        Ok(usual(&rest))
    }

    /// Rows of a prompt through some layers, others in each turn: what a step reads has not been read just before.
    fn rows(&mut self, rows: usize) -> Result<(), LlmError> {
        let before = BEFORE_ROWS.map(|past| past.min(self.context - rows));
        let tokens: Vec<u32> = vec![1; rows];
        let (mut next, mut each) = (0, 1);
        let begun = Instant::now();
        for turn in 0..=STEPS[1] {
            let some: Vec<usize> = self
                .kinds
                .iter()
                .flat_map(|kind| {
                    let count = each.min(kind.len());
                    (0..count).map(move |at| kind[(next + at) % kind.len()])
                })
                .collect();
            next += each;
            let past = before[turn % before.len()];
            let step = Step { tokens: &tokens, past, want: Want::Nothing };
            let wall = self.step(&step, Some(&some), turn > 0)?.wall;
            if turn == 0 {
                let share = TIME.as_secs_f64() / 8.0 / wall.max(1e-6);
                each = (share as usize).clamp(1, 8);
            }
            if turn > STEPS[0] && begun.elapsed() > TIME {
                break;
            }
        }
        Ok(())
    }

    /// One step, through some layers or all; says how long it took, and keeps how long each operator took unless
    /// it was to warm up.
    fn step(
        &mut self,
        step: &Step<'_>,
        layers: Option<&[usize]>,
        counts: bool,
    ) -> Result<Took, LlmError> {
        let begun = Instant::now();
        let mut programs = self.runner.programs_of(step);
        if let Some(layers) = layers {
            programs.iter_mut().for_each(|program| keep_layers(program, layers));
        }
        let programs = Arc::new(programs);
        let reports = self.runner.go(Arc::clone(&programs), step.want, true, begun)?;
        let wall = begun.elapsed().as_secs_f64();
        let marks: Vec<_> = reports.iter().map(|report| &report.marks[..]).collect();
        if counts {
            let operators = programs.iter().map(Vec::len).sum();
            let alike = Alike { rows: step.tokens.len(), past: step.past, operators };
            self.observed.add(alike, &programs, self.runner.groups(), &marks);
        }
        let all = || marks.iter().copied().flatten();
        let first = all().map(|mark| mark.start).fold(wall, f64::min);
        let last = all().map(|mark| mark.end).fold(first, f64::max);
        Ok(Took { wall, around: first + wall - last })
    }

    /// The profile that follows from what was seen.
    fn profile(&self, mut profile: Profile, batch: usize) -> Profile {
        let usual = self.observed.usual();
        let times = &usual.times;
        profile.compute.operators = times.fit();
        let reading = times.product_rate(1).max(1.0);
        measured(&mut profile.memory.bandwidth, BytesPerSecond(reading as u64));
        let model = self.runner.network().model();
        // A byte of weights is multiplied with every row.
        let each = model.parameters() as f64 / model.weight_bytes().max(1) as f64;
        let multiplying = times.product_rate(batch as u64) * batch as f64 * each;
        measured(&mut profile.compute.rate, MacsPerSecond(multiplying.max(1.0)));
        let product = |entry: &&spanker_topology::OperatorRate| {
            entry.kind == OperatorKind::Product && entry.rows == 1
        };
        let overhead = profile.compute.operators.iter().find(product).map(|entry| entry.overhead);
        measured(&mut profile.compute.per_operator, overhead.unwrap_or_default());
        measured(&mut profile.compute.per_token, Seconds::ZERO);
        if let (Some(link), Some((latency, per_byte))) = (&mut profile.link, usual.link()) {
            measured(&mut link.bandwidth, BytesPerSecond((1.0 / per_byte).min(1e15) as u64));
            measured(&mut link.latency, Seconds(latency));
            measured(&mut link.round_trip, Seconds(2.0 * latency));
        }
        profile
    }
}

/// Takes the layers that are not listed out of a program.
fn keep_layers(program: &mut Vec<Op>, layers: &[usize]) {
    let mut kept = true;
    program.retain(|op| {
        if let Op::Mark { activity, layer } = op {
            use Activity::{Attention, Down, Output, Up};
            let inside = matches!(activity, Attention | Output | Up | Down);
            kept = !inside || layers.contains(&(*layer as usize));
        }
        kept
    });
}

fn measured<T>(value: &mut Value<T>, found: T) {
    *value = Value {
        value: found,
        low: None,
        high: None,
        provenance: Provenance::Measured,
        confidence: Confidence::Medium,
        source: "steps of the model on threads of this machine".to_owned(),
    };
}

/// A card of which nothing but its part of the machine's memory is known.
fn assumed(cards: usize, memory: Bytes) -> Result<Profile, LlmError> {
    let none = "provenance = 'assumed', confidence = 'low', source = 'threads of one process'";
    let text = format!(
        "name = 'this-machine'
summary = 'one of {cards} cards that are threads of this machine'
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
        ExchangeKind::SharedMemory.name(),
    );
    Profile::from_toml(&text).map_err(|error| LlmError::plan(error.to_string()))
}
