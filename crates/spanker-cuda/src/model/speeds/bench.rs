// SPDX-License-Identifier: Apache-2.0
//! A few layers of a model on processors, whose steps are timed: instruction by instruction, and exchange by exchange.

use std::collections::HashMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use ggml_spanker::ops;
use spanker_llm::{Captures, LlmError, Machine};
use spanker_model::{KvShape, Model, Quant};
use spanker_plan::{
    Audit, Buffer, CardLayout, Cut, Layout, Load, Numerics, Op, Part, Piece, Place, Programs,
    Reach, Space, Step, Tensor, Want, card_layouts, load,
};
use spanker_runtime::BufferId;
use spanker_topology::{Cluster, ExchangeKind};

use super::Subject;
use super::fit::{Timed, TimedExchange};
use crate::CudaError;
use crate::model::machine::Processors;
use crate::model::programs::{self, Span, Watch};

/// Bytes of weights and of the KV cache at least, where there are so many: several times the size of caches.
const BYTES: u64 = 512 << 20;
/// Bytes of the KV cache for each position that are enough, and from which context on they count.
const CACHE_BYTES: u64 = 64 << 10;
const MANY_POSITIONS: u64 = 256;
/// Layers at least, where there are so many.
const LAYERS: usize = 2;
/// Runs of a step, of which the medians count, and after what time fewer are enough.
const RUNS: usize = 7;
const ENOUGH: Duration = Duration::from_millis(60);
/// How long work goes on before it is timed: an idle device needs a while to reach its clock rate.
const WARM_UP: Duration = Duration::from_millis(150);
/// A byte that weights of any type may consist of: none of their numbers is zero or very large.
const SOME_WEIGHTS: u8 = 0x11;
/// The same for numbers of 32 bits, which are then about 0.75.
const SOME_NUMBERS: u8 = 0x3f;

/// Steps of a model that can be timed.
pub(super) struct Bench {
    processors: Processors,
    programs: Programs,
    prepared: HashMap<u64, programs::Programs>,
    /// Layers of the whole model for each that is here.
    pub(super) left_out: f64,
    /// Seconds to prepare the last program.
    pub(super) preparing: f64,
}

/// What a step took.
pub(super) struct Stepped {
    pub(super) instructions: Vec<Timed>,
    /// Every exchange: on a device what it took there, through the host with what it takes to start instructions after it.
    pub(super) exchanges: Vec<TimedExchange>,
    /// Seconds until the host knows the best token, besides instructions and exchanges.
    pub(super) besides: f64,
}

pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// A model with as many layers as it takes to read the weights from memory, at least one of every kind.
fn shortened(model: &Model, stages: usize, context: u64, most: u64) -> Model {
    let mut layers: Vec<spanker_model::Layer> = Vec::new();
    for layer in &model.layers {
        if !layers.contains(layer) {
            layers.push(*layer);
        }
    }
    let least = LAYERS.max(stages);
    let cached = context * 4 * model.kv_heads * model.head_size;
    let is_enough = |layers: &[spanker_model::Layer]| {
        let weights: u64 = layers.iter().map(spanker_model::Layer::bytes).sum();
        let cached = cached * layers.len() as u64;
        let most_cached =
            if context < MANY_POSITIONS { 0 } else { BYTES.min(context * CACHE_BYTES) };
        let is_most = weights.saturating_add(cached) >= most;
        layers.len() >= least && (is_most || weights >= BYTES && cached >= most_cached)
    };
    for layer in &model.layers {
        let enough = is_enough(&layers);
        if enough || layers.len() >= model.layers.len() {
            break;
        }
        layers.push(*layer);
    }
    Model { layers, ..model.clone() }
}

fn failed(error: LlmError) -> CudaError {
    match error {
        LlmError::Unsupported { what } => CudaError::Unsupported(what),
        error => CudaError::Unsupported(format!("the model's programs: {error}")),
    }
}

impl Bench {
    /// Steps of the subject's model with its layout, on processors that `on` makes for cards: as many layers as have this many
    /// bytes at most.
    pub(super) fn new(
        on: &dyn Fn(&[usize]) -> Result<Processors, CudaError>,
        cluster: &Cluster,
        subject: &Subject<'_>,
        most: u64,
    ) -> Result<Bench, CudaError> {
        let Subject { model, split, groups, context, batch, kv } = *subject;
        let short = shortened(model, groups.len(), context as u64, most);
        let unplanned = |error: spanker_plan::PlanError| CudaError::Unsupported(error.to_string());
        let layout = Layout::of_groups(&short, split, groups).map_err(unplanned)?;
        let stages = &layout.replicas[0];
        let space = Space { kv, ..Space::of(context as u64, batch as u64, 1, Audit::NONE) };
        let kind = Some(ExchangeKind::Direct);
        let cards: Vec<usize> = groups.iter().flatten().map(|card| card.0).collect();
        let mut processors = on(&cards)?;
        let kernels = Some(processors.kernels());
        let layouts = card_layouts(&short, cluster, stages, space, kind, kernels);
        processors.know(&types(&short))?;
        let mut buffers: Vec<HashMap<Buffer, BufferId>> = Vec::with_capacity(layouts.len());
        for (slot, layout) in layouts.iter().enumerate() {
            buffers.push(laid_out(&mut processors, slot, layout).map_err(failed)?);
        }
        let mut weight = |slot: usize, piece: &Piece| {
            let pieces = &layouts[slot].weights.pieces;
            let offset = pieces.iter().find(|(known, _)| known == piece).map_or(0, |(_, at)| *at);
            Place { buffer: buffers[slot][&Buffer::Weights], offset }
        };
        let mut buffer = |slot: usize, of: Buffer| buffers[slot][&of];
        let numerics = Numerics { epsilon: 1e-5f32.to_bits(), ..Numerics::default() };
        let programs = Programs::bound(
            &short,
            cluster,
            stages,
            space,
            numerics,
            kind,
            (&mut weight, false),
            &mut buffer,
        );
        let left_out = model.layers.len() as f64 / short.layers.len() as f64;
        let (prepared, preparing) = (HashMap::new(), 0.0);
        let mut bench = Bench { processors, programs, prepared, left_out, preparing };
        let begun = Instant::now();
        while begun.elapsed() < WARM_UP {
            bench.once(1, 0, Watch::Nothing)?;
        }
        Ok(bench)
    }

    /// The programs of a step of one sequence, its tables and how far back it looks.
    fn lists(&self, rows: u64, past: u64) -> (Vec<Vec<Op>>, Vec<u8>, Reach) {
        let tokens = vec![0; rows as usize];
        let blocks: Vec<u32> = (0..KvShape::blocks_for(past + rows) as u32).collect();
        let want = if rows == 1 { Want::Logits } else { Want::Nothing };
        let parts = [Part::new(&tokens, past, &blocks, want)];
        let step = Step::of(&parts);
        let lists = self.programs.step(&step, &|from, to| vec![from, to]);
        (lists, self.programs.tables(&step), step.reach())
    }

    /// One step: what was written down, and seconds until the host has its result.
    fn once(&mut self, rows: u64, past: u64, watch: Watch) -> Result<(Vec<Span>, f64), CudaError> {
        if !self.prepared.contains_key(&rows) {
            let (lists, ..) = self.lists(rows, 0);
            let begun = Instant::now();
            let groups = self.programs.groups();
            let mut ready = self.processors.prepare(&lists, groups).map_err(failed)?;
            if ready.is_none() {
                self.prepared.clear();
                self.processors.forget();
                ready = self.processors.prepare(&lists, groups).map_err(failed)?;
            }
            let full = || CudaError::Unsupported(format!("no memory for programs of {rows} rows"));
            self.preparing = begun.elapsed().as_secs_f64();
            self.prepared.insert(rows, ready.ok_or_else(full)?);
        }
        let (_, tables, _) = self.lists(rows, past);
        let program = &self.prepared[&rows];
        let begun = Instant::now();
        let ran = self.processors.watched(program, &tables, watch, &Captures::default());
        let (_, spans) = ran.map_err(failed)?;
        if rows == 1 {
            for slot in self.programs.last() {
                let vocab = self.programs.members()[slot].shard.vocab.clone();
                let mut logits = vec![0.0f32; (vocab.end - vocab.start) as usize];
                let place = self.programs.logits_place(slot, 0);
                let out = bytemuck::cast_slice_mut(&mut logits);
                self.processors.read(slot, place, out).map_err(failed)?;
                std::hint::black_box(ops::best(&logits, 1));
            }
        } else {
            self.processors.synchronize()?;
        }
        Ok((spans, begun.elapsed().as_secs_f64()))
    }

    /// Several steps: the spans of one, with the medians of their lengths or ends, and the median of the seconds.
    fn several(
        &mut self,
        rows: u64,
        past: u64,
        watch: Watch,
    ) -> Result<(Vec<Span>, f64), CudaError> {
        self.once(rows, past, watch)?;
        let begun = Instant::now();
        let mut runs = Vec::with_capacity(RUNS);
        while runs.len() < RUNS && (runs.len() < 2 || begun.elapsed() < ENOUGH) {
            runs.push(self.once(rows, past, watch)?);
        }
        let mut spans = runs[0].0.clone();
        for (at, span) in spans.iter_mut().enumerate() {
            let each = runs.iter().filter_map(|(spans, _)| spans.get(at));
            match watch {
                Watch::Instructions => {
                    span.end =
                        span.start + median(each.map(|span| span.end - span.start).collect());
                }
                _ => span.end = median(each.map(|span| span.end).collect()),
            }
        }
        Ok((spans, median(runs.iter().map(|run| run.1).collect())))
    }

    /// What a step of so many rows takes after so many tokens.
    pub(super) fn step(&mut self, rows: u64, past: u64) -> Result<Stepped, CudaError> {
        let (spans, _) = self.several(rows, past, Watch::Instructions)?;
        let through_host = |span: &Span| span.exchanged.is_some() && !span.on_device;
        let has_exchanges = rows == 1 || spans.iter().any(through_host);
        let (ends, wall) = match has_exchanges {
            true => self.several(rows, past, Watch::Exchanges)?,
            false => (Vec::new(), 0.0),
        };
        let (lists, _, reach) = self.lists(rows, past);
        let loads: Vec<Vec<Option<Load>>> = lists.iter().map(|list| loads(list, &reach)).collect();
        let instructions = timed(rows, &spans, &loads);
        let (between, after) = self.between(&spans);
        let mut exchanges = Vec::new();
        let timed = |exchange: &Span, seconds: f64| {
            let op = lists[exchange.slot].get(exchange.ops.start);
            let hop = matches!(op, Some(Op::Receive { .. }));
            TimedExchange { rows, hop, bytes: exchange.exchanged.unwrap_or(0), seconds }
        };
        // Devices say what their own take.
        let own = exchanges_of(&spans).into_iter().filter(|span| span.on_device);
        exchanges.extend(own.map(|span| timed(span, span.end - span.start)));
        let mut last = 0.0;
        for (exchange, instructions) in exchanges_of(&ends).into_iter().zip(&between) {
            exchanges.push(timed(exchange, exchange.end - last - instructions));
            last = exchange.end;
        }
        Ok(Stepped { instructions, exchanges, besides: (wall - last - after).max(0.0) })
    }

    /// How long processors are at work before each exchange through the host, and after the last.
    fn between(&self, spans: &[Span]) -> (Vec<f64>, f64) {
        let mut each: HashMap<usize, f64> = HashMap::new();
        let mut between = Vec::new();
        let longest = |each: &HashMap<usize, f64>| each.values().copied().fold(0.0, f64::max);
        let (mut last, mut counted) = (None, None);
        for span in spans {
            match span.exchanged {
                // Cards that exchange on their device do it together.
                Some(_) if span.on_device && counted == Some((span.start, span.end)) => {}
                _ if span.on_device => {
                    *each.entry(self.processors.gpu_of(span.slot)).or_default() +=
                        span.end - span.start;
                    counted = span.exchanged.map(|_| (span.start, span.end));
                }
                None | Some(0) => {}
                Some(_) if last == Some(span.start) => {}
                Some(_) => {
                    between.push(longest(&each));
                    each.clear();
                    last = Some(span.start);
                }
            }
        }
        (between, longest(&each))
    }
}

/// What instructions took, slot by slot, in the order of their programs.
fn timed(rows: u64, spans: &[Span], loads: &[Vec<Option<Load>>]) -> Vec<Timed> {
    let mut instructions = Vec::new();
    for slot in 0..loads.len() {
        let mut before: Option<&Range<usize>> = None;
        for span in spans.iter().filter(|span| span.slot == slot && span.exchanged.is_none()) {
            let seconds = span.end - span.start;
            // Several instructions for the same operators are one.
            match instructions.last_mut() {
                Some(Timed { seconds: sum, .. }) if before == Some(&span.ops) => *sum += seconds,
                _ => {
                    let loads = loads[slot][span.ops.clone()].iter().flatten().copied();
                    instructions.push(Timed { rows, loads: loads.collect(), seconds });
                }
            }
            before = Some(&span.ops);
        }
    }
    instructions
}

/// Exchanges of groups and what arrives from other stages, each once.
fn exchanges_of(spans: &[Span]) -> Vec<&Span> {
    let mut exchange: Vec<&Span> = Vec::new();
    for span in spans.iter().filter(|span| span.exchanged.is_some_and(|bytes| bytes > 0)) {
        if exchange.last().is_none_or(|last| last.start != span.start) {
            exchange.push(span);
        }
    }
    exchange
}

/// What every operator of a list counts for, as prices count it.
fn loads(list: &[Op], reach: &Reach) -> Vec<Option<Load>> {
    let mut before = None;
    let mut loads = Vec::with_capacity(list.len());
    for op in list {
        match op {
            Op::Work(work) => {
                loads.push(load(work, before, reach));
                before = Some(work);
            }
            Op::Mark { .. } => loads.push(None),
            _ => {
                loads.push(None);
                before = None;
            }
        }
    }
    loads
}

/// Allocates what a card has, and writes numbers into it with which work takes as long as with a model's.
fn laid_out(
    processors: &mut Processors,
    slot: usize,
    layout: &CardLayout,
) -> Result<HashMap<Buffer, BufferId>, LlmError> {
    let mut own = HashMap::new();
    let some = vec![SOME_WEIGHTS; 16 << 20];
    if let Some(staging) = &layout.gpu {
        processors.keep(slot, staging)?;
    }
    for (buffer, bytes) in layout.allocations().filter(|(of, _)| *of != Buffer::Kernel) {
        let id = processors.allocate(slot, buffer.name(), bytes)?;
        own.insert(buffer, id);
        // Zeros are a rare case, which is slower.
        let numbers;
        let with = match buffer {
            Buffer::Weights | Buffer::Kv => &some,
            _ => {
                numbers = vec![SOME_NUMBERS; bytes.min(16 << 20) as usize];
                &numbers
            }
        };
        let mut at = 0;
        while at < bytes && buffer != Buffer::Step {
            let length = (bytes - at).min(with.len() as u64);
            let place = Place { buffer: id, offset: at };
            processors.write(slot, place, &with[..length as usize])?;
            at += length;
        }
    }
    for (piece, offset) in &layout.weights.pieces {
        let is_vector = matches!(
            piece.tensor,
            Tensor::AttentionNorm
                | Tensor::FfnNorm
                | Tensor::FinalNorm
                | Tensor::Bias(_)
                | Tensor::HeadNorm(_)
        );
        if let (true, Cut::Rows(part)) = (is_vector, &piece.cut) {
            let ones = vec![1.0f32; (part.end - part.start) as usize];
            let place = Place { buffer: own[&Buffer::Weights], offset: *offset };
            processors.write(slot, place, bytemuck::cast_slice(&ones))?;
        }
    }
    Ok(own)
}

/// The types of weights that a model has, and of its norms.
fn types(model: &Model) -> Vec<Quant> {
    let layers = model.layers.iter().flat_map(|layer| layer.matrices().map(|(_, matrix)| matrix));
    let matrices = layers.chain([&model.embedding, &model.head]);
    let mut types = vec![Quant::F32];
    for matrix in matrices {
        if !types.contains(&matrix.quant) {
            types.push(matrix.quant);
        }
    }
    types
}
