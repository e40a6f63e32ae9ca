// SPDX-License-Identifier: Apache-2.0
//! A network on cards that have memory of their own and go through programs themselves, such as graphics
//! processors. How they do it is theirs; here it is laid out, loaded and stepped.

mod audit;
mod captures;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use bytemuck::cast_slice;
use ggml_spanker::ops;
use spanker_fabric::device::DeviceErrorKind;
use spanker_model::{KvShape, Model, Quant};
use spanker_plan::{
    ALIGNMENT, Activity, Buffer, BufferId, CardLayout, GpuStaging, Label, Mark, Op, Piece, Place,
    Plan, Programs, Reach, StepShape, Want, WindowCache,
};
use spanker_topology::{ExchangeKind, Kernels};

use crate::layout::{self, Planned};
use crate::runner::{Asked, MemoryUse, Outcome, Output, Part, Runner, Step, Timing, merged};
use crate::{LlmError, Loading, Network, Recorder};
use audit::Audited;
pub use captures::{Capture, Captures, Region, Role};

/// Cards that go through programs themselves.
///
/// A member is a card's place in the plan. Whatever computes, its results have the bits that `ggml-spanker` defines.
pub trait Machine {
    /// Programs for all members, as the machine likes them.
    type Program;

    /// Where its kernels are, which says what they keep besides the buffers of programs.
    fn kernels(&self) -> Kernels {
        Kernels::Card
    }

    /// Whether its kernels compute with weights of a type.
    fn computes(&self, _: Quant) -> bool {
        true
    }

    /// Allocates on a member's card. `what` is said if there is too little.
    ///
    /// # Errors
    /// What the card says.
    fn allocate(&mut self, member: usize, what: &str, bytes: u64) -> Result<BufferId, LlmError>;

    /// Whether its kernels can run a model in a context, before anything of it is loaded.
    ///
    /// # Errors
    /// [`LlmError::Unsupported`] that names what they cannot do.
    fn check(&self, model: &Model, context: u64) -> Result<(), LlmError>;

    /// Allocates on a member's card what its kernels keep: as much as the plan says, and nothing afterwards. Says
    /// how many bytes that is.
    ///
    /// # Errors
    /// What the card says.
    fn keep(&mut self, member: usize, staging: &GpuStaging) -> Result<u64, LlmError>;

    /// Puts weights of a type somewhere, in whatever order suits the card: programs use them as a whole, from
    /// this place.
    ///
    /// # Errors
    /// What the card says.
    fn hold(
        &mut self,
        member: usize,
        place: Place,
        quant: Quant,
        bytes: &[u8],
    ) -> Result<(), LlmError>;

    /// Writes bytes as they are.
    ///
    /// # Errors
    /// What the card says.
    fn write(&mut self, member: usize, place: Place, bytes: &[u8]) -> Result<(), LlmError>;

    /// Reads bytes as they are.
    ///
    /// # Errors
    /// What the card says.
    fn read(&mut self, member: usize, place: Place, out: &mut [u8]) -> Result<(), LlmError>;

    /// Copies bytes within a member's card.
    ///
    /// # Errors
    /// What the card says.
    fn copy(
        &mut self,
        member: usize,
        from: Place,
        into: Place,
        length: u64,
    ) -> Result<(), LlmError>;

    /// Makes programs ready to be run again and again: one list for each member.
    /// `groups` are the members that exchange with each other. Nothing if there is no room for them beside those that
    /// are ready.
    ///
    /// # Errors
    /// [`LlmError::Unsupported`] for something that the machine cannot do.
    fn prepare(
        &mut self,
        programs: &[Vec<Op>],
        groups: &[Range<usize>],
    ) -> Result<Option<Self::Program>, LlmError>;

    /// All programs that were ready have been dropped: their room is free.
    fn forget(&mut self);

    /// The operators of a member that it does in one go: runs that follow each other, without exchanges. What one of them
    /// reads and leaves can be captured.
    fn runs(&self, program: &Self::Program, member: usize) -> Vec<Range<usize>>;

    /// Runs programs with the tables of a step ([`Op::Data`]), whose rows look so far back, and captures bytes meanwhile.
    /// Returns the bytes that cards gave to other cards.
    ///
    /// # Errors
    /// What the card that failed says.
    fn run(
        &mut self,
        program: &Self::Program,
        tables: &[u8],
        reach: &Reach,
        captures: &Captures,
    ) -> Result<u64, LlmError>;

    /// The bytes that were captured of a member in the last run: as many as that was told. Members are asked in order.
    ///
    /// # Errors
    /// What the card says.
    fn captured(&mut self, member: usize, bytes: u64) -> Result<Vec<u8>, LlmError>;

    /// The same, and what each card did when. Cards may wait for each other where they otherwise do not.
    ///
    /// # Errors
    /// What the card that failed says.
    fn run_traced(
        &mut self,
        program: &Self::Program,
        tables: &[u8],
        reach: &Reach,
        captures: &Captures,
    ) -> Result<(u64, Vec<Spent>), LlmError> {
        Ok((self.run(program, tables, reach, captures)?, Vec::new()))
    }
}

/// A span of time of one card, in seconds since the step began.
#[derive(Debug, Clone, PartialEq)]
pub struct Spent {
    /// The card's place in the plan.
    pub member: usize,
    /// The operators of its program that were done.
    pub ops: Range<usize>,
    /// When they began.
    pub start: f64,
    /// When they were over.
    pub end: f64,
    /// Whether they are an exchange with other cards.
    pub exchange: bool,
}

/// A network on a [`Machine`].
#[derive(Debug)]
pub struct OnMachine<M: Machine> {
    layout: Programs,
    cards: Vec<CardLayout>,
    vocab: u64,
    memory: Vec<MemoryUse>,
    machine: M,
    programs: HashMap<StepShape, Prepared<M::Program>>,
    /// Where to write what cards do, and when that began.
    trace: Option<(Recorder, Instant)>,
    /// Steps of one token since the last that was traced.
    untraced: u32,
    audited: Option<Audited>,
    /// What came of the step that is under way.
    ended: Option<Outcome>,
}

/// A program that is ready, and for each member its operators, what they belong to, and which are done in one go.
#[derive(Debug)]
struct Prepared<P> {
    program: P,
    ops: Arc<Vec<Vec<Op>>>,
    labels: Vec<Vec<Label>>,
    runs: Vec<Vec<Range<usize>>>,
}

/// Refuses what no machine has kernels for.
fn check_kinds(model: &Model, kv: Quant) -> Result<(), LlmError> {
    if model.mixture.is_some() {
        let what = format!("{}, a mixture of experts, on a GPU", model.architecture);
        return Err(LlmError::unsupported(what));
    }
    match kv {
        Quant::Q4_0 => Err(LlmError::unsupported("keys and values as q4_0 on a GPU")),
        _ => Ok(()),
    }
}

/// Programs that are kept: decoding, whole batches, and a few last ones of prompts.
const MOST_PROGRAMS: usize = 16;
/// Of so many steps of one token, one is traced: reading what a card noted takes as long as a hundredth of a small step.
const TRACED: u32 = 4;

impl<M: Machine> OnMachine<M> {
    /// Loads a network. `loading` is told how far it is.
    ///
    /// # Errors
    /// [`LlmError::Plan`] for a plan of another model or one that cannot be run, [`LlmError::Unsupported`] for weights
    /// that the machine's kernels do not compute with, and what the machine says.
    pub fn load<B: AsRef<[u8]>>(
        network: &Network<B>,
        plan: &Plan,
        context: usize,
        batch: usize,
        mut machine: M,
        loading: &dyn Fn(Loading),
    ) -> Result<Self, LlmError> {
        check_kinds(network.model(), plan.request.kv)?;
        for (name, tensor) in network.header().tensors() {
            if !machine.computes(tensor.quant) {
                let what = format!("tensor {name}: weights of type {} on this GPU", tensor.quant);
                return Err(LlmError::Unsupported { what });
            }
        }
        machine.check(network.model(), context as u64)?;
        let (kind, kernels) = (ExchangeKind::Direct, machine.kernels());
        let planned = Planned::new(network, plan, context, batch, kind, kernels)?.tapped();
        let layouts = planned.cards();
        let mut buffers: Vec<HashMap<Buffer, BufferId>> = Vec::with_capacity(layouts.len());
        let mut memory = Vec::with_capacity(layouts.len());
        for (member, layout) in layouts.iter().enumerate() {
            let (mut own, mut allocated) = (HashMap::new(), 0);
            for (buffer, bytes) in layout.allocations().filter(|(of, _)| *of != Buffer::Kernel) {
                own.insert(buffer, machine.allocate(member, buffer.name(), bytes)?);
                allocated += bytes.next_multiple_of(ALIGNMENT);
            }
            if let Some(staging) = &layout.gpu {
                allocated += machine.keep(member, staging)?.next_multiple_of(ALIGNMENT);
            }
            buffers.push(own);
            let planned = layout.bytes();
            memory.push(MemoryUse { card: layout.card, planned, allocated });
        }
        let total = layouts.iter().map(|layout| layout.weights.bytes).sum();
        let (mut done, mut bytes) = (0, Vec::new());
        let mut places: Vec<HashMap<&Piece, u64>> = vec![HashMap::new(); layouts.len()];
        for (member, layout) in layouts.iter().enumerate() {
            for (piece, offset) in &layout.weights.pieces {
                bytes.clear();
                network.copy_piece(piece, &mut bytes)?;
                let (tensor, _) = network.tensor(&network.source(piece).0)?;
                let place = Place { buffer: buffers[member][&Buffer::Weights], offset: *offset };
                machine.hold(member, place, tensor.quant, &bytes)?;
                places[member].insert(piece, *offset);
                done += bytes.len() as u64;
                loading(Loading { done, total });
            }
        }
        let mut weight = |member: usize, piece: &Piece| Place {
            buffer: buffers[member][&Buffer::Weights],
            offset: places[member].get(piece).copied().unwrap_or(0),
        };
        let mut buffer = |member: usize, of: Buffer| buffers[member][&of];
        let layout = planned.programs(network, (&mut weight, false), &mut buffer);
        let table = network.rope().tables(context);
        for (member, one) in layout.members().iter().enumerate() {
            let bytes = layouts[member].bytes_of(Buffer::Table) as usize;
            machine.write(member, one.place(Buffer::Table), &cast_slice(&table)[..bytes])?;
        }
        Ok(OnMachine {
            layout,
            cards: layouts,
            vocab: network.model().vocab,
            memory,
            machine,
            programs: HashMap::new(),
            trace: None,
            untraced: 0,
            audited: None,
            ended: None,
        })
    }

    /// What each card was planned to allocate, and what was asked of the machine for it.
    #[must_use]
    pub fn memory(&self) -> &[MemoryUse] {
        &self.memory
    }

    /// The machine.
    #[must_use]
    pub fn machine(&self) -> &M {
        &self.machine
    }

    /// Records from now on what each card does when: in every step of several tokens, and in one of a few steps of
    /// one token.
    pub fn record(&mut self, recorder: &Recorder) {
        self.trace = Some((recorder.clone(), Instant::now()));
        self.untraced = TRACED - 1;
    }

    /// Runs a step of one token and a whole batch of them, recorded and audited as those that follow will be, so that the
    /// first prompt finds programs, code and buffers in place. What they leave behind is written again before anybody
    /// reads it; what is recorded and found of them is forgotten.
    ///
    /// # Errors
    /// What the machine says.
    pub fn warm_up(&mut self) -> Result<(), LlmError> {
        let space = self.layout.space();
        let batch = space.batch.min(space.context) as usize;
        let trace = self.trace.take();
        self.trace = trace.as_ref().map(|_| (Recorder::default(), Instant::now()));
        let auditor = self.audited.as_mut().map(Audited::set_aside);
        let sizes = if batch > 1 { &[1, batch][..] } else { &[1] };
        let done = sizes.iter().try_for_each(|&rows| self.warm_up_rows(rows));
        if let (Some(audited), Some(auditor)) = (&mut self.audited, auditor) {
            audited.bring_back(auditor);
        }
        (self.trace, self.untraced) = (trace, TRACED - 1);
        done
    }

    /// Runs a step of so many tokens.
    fn warm_up_rows(&mut self, rows: usize) -> Result<(), LlmError> {
        let tokens = vec![0; rows];
        let blocks = vec![0; KvShape::blocks_for(rows as u64) as usize];
        // Of a few single tokens one is traced.
        self.untraced = TRACED - 1;
        let want = if rows == 1 { Want::Logits } else { Want::Nothing };
        let parts = [Part::new(&tokens, 0, &blocks, want)];
        let step = Step::of(&parts);
        let done = self.step(&step).and_then(|_| self.settle());
        match done {
            // A card that computes wrongly is found again, and counted, in a step that matters.
            Err(LlmError::Device(error)) if error.kind() == DeviceErrorKind::Wrong => Ok(()),
            done => done,
        }
    }

    /// Programs for a step, in place of all others where there is no room for them beside these.
    fn prepare(&mut self, step: &Step<'_>) -> Result<Prepared<M::Program>, LlmError> {
        let programs = self.layout.plain(step, &|from, to| vec![from, to]);
        let labels = programs.iter().map(|list| labels(list)).collect();
        let groups = self.layout.groups();
        let program = match self.machine.prepare(&programs, groups)? {
            Some(program) => Some(program),
            None => {
                self.programs.clear();
                self.machine.forget();
                self.machine.prepare(&programs, groups)?
            }
        };
        let rows = step.rows();
        let full =
            || LlmError::plan(format!("no room for the programs of a step of {rows} tokens"));
        let program = program.ok_or_else(full)?;
        let runs = (0..programs.len()).map(|member| self.machine.runs(&program, member)).collect();
        Ok(Prepared { program, ops: Arc::new(programs), labels, runs })
    }

    /// Whether a step is to be traced.
    fn is_traced(&mut self, step: &Step<'_>) -> bool {
        if self.trace.is_none() {
            return false;
        }
        if step.rows() > 1 {
            return true;
        }
        self.untraced = (self.untraced + 1) % TRACED;
        self.untraced == 0
    }

    /// Copies blocks of the KV cache of all members.
    fn copy_blocks(&mut self, step: &Step<'_>) -> Result<(), LlmError> {
        for &[from, to] in step.copies {
            for member in 0..self.layout.members().len() {
                for [from, into, length] in self.layout.block_copies(member, from, to) {
                    let base = self.layout.members()[member].place(Buffer::Kv);
                    let at = |offset: u64| Place { offset: base.offset + offset, ..base };
                    self.machine.copy(member, at(from), at(into), length)?;
                }
            }
        }
        Ok(())
    }

    /// Runs a step; the choice of the best tokens is left to the host. Says how many bytes were sent between cards, and
    /// if it was traced, what each card of the last stage has left to do.
    fn run(&mut self, step: &Step<'_>) -> Result<(u64, Vec<Mark>), LlmError> {
        self.copy_blocks(step)?;
        let whole = step;
        let mut parts = step.parts.to_vec();
        let asked = parts.iter_mut().filter(|part| part.want != Want::Nothing);
        asked.for_each(|part| part.want = Want::Logits);
        let step = &Step { turn: step.turn, ..Step::of(&parts) };
        let key = StepShape::of(step);
        if !self.programs.contains_key(&key) {
            if self.programs.len() >= MOST_PROGRAMS {
                self.programs.clear();
                self.machine.forget();
            }
            let program = self.prepare(step)?;
            self.programs.insert(key, program);
        }
        let traced = self.is_traced(step);
        let ready = &self.programs[&key];
        let (tables, reach) = (self.layout.tables(step), step.reach());
        let captures = audit::look(&mut self.audited, &self.layout, ready, (whole, step))?;
        let Some((recorder, origin)) = self.trace.as_ref().filter(|_| traced) else {
            let sent = self.machine.run(&ready.program, &tables, &reach, &captures)?;
            return Ok((sent, Vec::new()));
        };
        let shift = origin.elapsed().as_secs_f64();
        let (sent, spans) = self.machine.run_traced(&ready.program, &tables, &reach, &captures)?;
        let (members, token) = (self.layout.members(), Asked::of(step).past as u32);
        recorder.add(spans.iter().map(|span| {
            let mut label =
                ready.labels[span.member].get(span.ops.start).copied().unwrap_or(OUTSIDE);
            label.token = token;
            if span.exchange && label.activity != Activity::Handoff {
                label.activity = Activity::Exchange;
            }
            let (op, ops) = (span.ops.start as u32, span.ops.len() as u32);
            let (card, start, end) = (members[span.member].card as u32, span.start, span.end);
            Mark { card, label, op, ops, start: start + shift, end: end + shift, parts: None }
        }));
        let left = self.layout.last().map(|member| {
            let own = spans.iter().filter(|span| span.member == member);
            let end = shift + own.map(|span| span.end).fold(0.0, f64::max);
            let labels = &ready.labels[member];
            let mut label = labels.last().copied().unwrap_or(OUTSIDE);
            label.token = token;
            let (card, op) = (members[member].card as u32, labels.len() as u32);
            Mark { card, label, op, ops: 1, start: end, end, parts: None }
        });
        Ok((sent, left.collect()))
    }

    /// The logits of so many outputs, of all cards of the last stage, with the first token of each.
    fn logits(&mut self, outputs: u64, turn: u64) -> Result<Vec<(u32, Vec<f32>)>, LlmError> {
        let mut all = Vec::new();
        for member in self.layout.last() {
            let vocab = self.layout.members()[member].shard.vocab.clone();
            let mut logits = vec![0.0f32; ((vocab.end - vocab.start) * outputs) as usize];
            let place = self.layout.logits_place(member, turn);
            self.machine.read(member, place, bytemuck::cast_slice_mut(&mut logits))?;
            all.push((vocab.start as u32, logits));
        }
        Ok(all)
    }

    /// What a step's parts asked for.
    fn outputs(&mut self, step: &Step<'_>) -> Result<Vec<Output>, LlmError> {
        let count = step.outputs();
        if count == 0 {
            return Ok(Vec::new());
        }
        let cards = self.logits(count, step.turn)?;
        let wants = step.parts.iter().flat_map(|part| (0..part.asked()).map(|_| part.want));
        let own = |logits: &[f32], at: usize| {
            let each = logits.len() / count as usize;
            at * each..(at + 1) * each
        };
        let output = |(at, want): (usize, Want)| match want {
            Want::Best(k) => {
                let found = cards.iter().flat_map(|(first, logits)| {
                    let best = ops::best(&logits[own(logits, at)], k as usize);
                    best.into_iter().map(move |(token, value)| (token + first, value))
                });
                Output { best: merged(found.collect(), k as usize), logits: None }
            }
            _ => {
                let all = cards.iter().flat_map(|(_, logits)| &logits[own(logits, at)]);
                Output { best: Vec::new(), logits: Some(all.copied().collect()) }
            }
        };
        Ok(wants.enumerate().map(output).collect())
    }
}

const OUTSIDE: Label = Label { activity: Activity::Host, layer: 0, token: 0 };

/// What each operator of a list belongs to.
fn labels(list: &[Op]) -> Vec<Label> {
    let mut label = OUTSIDE;
    let of = |op: &Op| {
        if let Op::Mark { activity, layer } = op {
            label = Label { activity: *activity, layer: *layer, token: 0 };
        }
        label
    };
    list.iter().map(of).collect()
}

impl<M: Machine> Runner for OnMachine<M> {
    fn begin(&mut self, step: &Step<'_>) -> Result<(), LlmError> {
        layout::check(&self.layout, self.vocab, step)?;
        let begun = Instant::now();
        let (sent, left) = self.run(step)?;
        // The machine is at work meanwhile.
        self.settle()?;
        let outputs = self.outputs(step)?;
        self.collect(step)?;
        if let Some((recorder, origin)) = &self.trace {
            let now = origin.elapsed().as_secs_f64();
            let done = |mark: Mark| Mark { end: now.max(mark.start), ..mark };
            let picks = step.candidates().is_some();
            recorder.add(left.into_iter().filter(|_| picks).map(done));
        }
        let timing = Timing { wall: begun.elapsed(), sent, ..Timing::default() };
        self.ended = Some(Outcome { outputs, timing, waits: Vec::new() });
        Ok(())
    }

    fn end(&mut self) -> Result<Outcome, LlmError> {
        Ok(self.ended.take().unwrap_or_default())
    }

    fn batch(&self) -> usize {
        self.layout.space().batch as usize
    }

    fn windows(&self) -> Option<WindowCache> {
        self.layout.windows()
    }
}
