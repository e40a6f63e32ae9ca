// SPDX-License-Identifier: Apache-2.0
//! Graphics processors as cards of a plan: their memory, their programs, and what passes between them.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use spanker_collective::{DType, ReduceOp};
use spanker_llm::{Capture, Captures, LlmError, Machine, Spent};
use spanker_model::Quant;
use spanker_plan::{Fold, GpuStaging, Op, Reach};
use spanker_runtime::{BufferId, Place};
use spanker_topology::Kernels;

use super::captures::{self, Taken};
use super::device::{Device, Memory, Piece, Processor};
use super::device_context::{COUNTERS, DeviceContext, Loaded, Workspace};
use super::instructions::{Part, Parts, Setting, translate};
use super::planes::in_planes;
use crate::{CudaError, Gpu};

/// Cards of a plan that are graphics processors, or logical cards that share one.
///
/// Cards that share a processor take turns on it. What cards exchange goes through the host's memory.
pub struct Processors {
    devices: Vec<DeviceContext>,
    slots: Vec<DeviceSlot>,
    planes: Vec<u8>,
}

/// A device slot: a card of the plan, and the device that runs it.
struct DeviceSlot {
    card: usize,
    device: usize,
    buffers: Vec<Memory>,
    /// The kernel's memory for it.
    work: Option<Workspace>,
}

impl DeviceSlot {
    fn work(&mut self) -> Result<&mut Workspace, CudaError> {
        let none = || CudaError::Unsupported("a card without a workspace".into());
        self.work.as_mut().ok_or_else(none)
    }
}

/// Programs of all device slots, ready to run.
pub struct Programs {
    slots: Vec<Vec<Ready>>,
    /// Where each slot has the tables of a step.
    tables: Vec<Option<Place>>,
    groups: Vec<Range<usize>>,
}

enum Ready {
    /// Instructions, and the operators of each.
    Instructions(Loaded, Vec<Range<usize>>),
    /// An exchange, and its number in the program.
    Exchange(Op, usize),
}

/// What is written down while programs run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Watch {
    Nothing,
    /// When exchanges end. Nothing waits for that.
    Exchanges,
    /// Exchanges, and every instruction by the device's clock. Devices that could work at the same time wait for each other.
    Instructions,
}

/// Something that a device slot did, in seconds since the step began.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Span {
    pub(super) slot: usize,
    /// The operators of its program.
    pub(super) ops: Range<usize>,
    pub(super) start: f64,
    pub(super) end: f64,
    /// Of an exchange, the bytes of the whole.
    pub(super) exchanged: Option<u64>,
}

impl std::fmt::Debug for Programs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Programs").field("slots", &self.slots.len()).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Processors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Processors")
            .field("gpus", &self.devices.len())
            .field("cards", &self.slots.len())
            .finish_non_exhaustive()
    }
}

impl Processors {
    /// Cards on devices: `cards` has, for each slot of a plan, the card's number in it. Card `i` is on
    /// processor `i`, and where there are fewer processors, they are gone round again.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] without processors; [`CudaError::Memory`].
    pub fn new(gpus: &[Arc<Gpu>], cards: &[usize]) -> Result<Processors, CudaError> {
        let device = |gpu: &Arc<Gpu>| -> Result<Box<dyn Device>, CudaError> {
            Ok(Box::new(Processor::new(Arc::clone(gpu))?))
        };
        Processors::of(gpus.iter().map(device).collect::<Result<_, _>>()?, cards)
    }

    /// The same on any devices.
    pub(super) fn of(
        devices: Vec<Box<dyn Device>>,
        cards: &[usize],
    ) -> Result<Processors, CudaError> {
        if devices.is_empty() {
            return Err(CudaError::NoDevice);
        }
        let devices: Vec<DeviceContext> = devices.into_iter().map(DeviceContext::new).collect();
        let slot = |&card: &usize| {
            let (device, buffers, work) = (card % devices.len(), Vec::new(), None);
            DeviceSlot { card, device, buffers, work }
        };
        let slots = cards.iter().map(slot).collect();
        Ok(Processors { devices, slots, planes: Vec::new() })
    }

    /// Has the kernels know the types of a model's weights.
    pub(super) fn know(&mut self, types: &[Quant]) {
        for device in &mut self.devices {
            types.iter().for_each(|&quant| device.knows(quant));
        }
    }

    /// The processor of a slot.
    pub(super) fn gpu_of(&self, slot: usize) -> usize {
        self.slots[slot].device
    }

    /// Waits for all processors.
    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        self.devices.iter().try_for_each(DeviceContext::synchronize)
    }

    /// Attributes an error to the card of a slot.
    fn of_card<T>(&self, slot: usize, outcome: Result<T, CudaError>) -> Result<T, LlmError> {
        let card = self.slots[slot].card;
        outcome.map_err(|error| match error {
            CudaError::Unsupported(what) => LlmError::Unsupported { what },
            error => LlmError::Card { card, what: error.to_string() },
        })
    }

    fn get(&mut self, slot: usize, place: Place, out: &mut [u8]) -> Result<(), CudaError> {
        let DeviceSlot { device, buffers, .. } = &self.slots[slot];
        self.devices[*device].read(&buffers[place.buffer.0 as usize], place.offset as usize, out)
    }

    fn put(&mut self, slot: usize, place: Place, bytes: &[u8]) -> Result<(), CudaError> {
        let DeviceSlot { device, buffers, .. } = &mut self.slots[slot];
        let memory = &mut buffers[place.buffer.0 as usize];
        self.devices[*device].write(memory, place.offset as usize, bytes)
    }

    fn copied(
        &mut self,
        slot: usize,
        from: Place,
        into: Place,
        length: u64,
    ) -> Result<(), CudaError> {
        let DeviceSlot { device, buffers, .. } = &mut self.slots[slot];
        if from.buffer != into.buffer || from.offset.abs_diff(into.offset) < length {
            let what = format!("a copy of {length} bytes from {from:?} to {into:?}");
            return Err(CudaError::Unsupported(what));
        }
        let [from, start, length] = [from.offset, into.offset, length].map(|at| at as usize);
        let memory = &mut buffers[into.buffer.0 as usize];
        self.devices[*device].copy(memory, from, start, length)
    }

    /// A slot's program for as many blocks as fit with the memory that it needs. Nothing if it does not fit the workspace.
    fn translated(
        &mut self,
        slot: usize,
        program: &[Op],
        alone: bool,
    ) -> Result<Option<Vec<Ready>>, CudaError> {
        let slot = &mut self.slots[slot];
        let counters = slot.work()?.counters();
        let DeviceSlot { device, buffers, .. } = slot;
        let device = &mut self.devices[*device];
        let bases: Vec<u64> = buffers.iter().map(Memory::base).collect();
        let place = |place: Place| bases[place.buffer.0 as usize] + place.offset;
        let mut blocks = device.blocks(0)?;
        let mut streams = device.streams(0)?;
        let Parts { parts, shared, streamed, ops } = loop {
            let setting = Setting {
                address: &place,
                blocks,
                counters,
                counted: COUNTERS,
                tile_rows: device.tile_rows(),
                streams,
            };
            let parts = translate(program, alone, &setting)?;
            let fit = device.blocks(parts.shared)?;
            let streamed = parts.parts.iter().any(|part| matches!(part, Part::Streamed(_)));
            if streamed && device.streams(parts.streamed)? < streams {
                streams = 0;
            } else if fit >= blocks {
                break parts;
            } else {
                blocks = fit;
            }
        };
        let mut ops = ops.into_iter();
        let mut own = |count: usize| ops.by_ref().take(count).collect::<Vec<Range<usize>>>();
        let work = slot.work()?;
        let mut ready = Vec::with_capacity(parts.len());
        for part in parts {
            let (loaded, instructions) = match part {
                Part::Instructions(instructions) => {
                    (device.load(work, &instructions, shared, blocks)?, instructions)
                }
                Part::Streamed(instructions) => {
                    (device.load_streamed(work, &instructions, streamed)?, instructions)
                }
                Part::Exchange(op) => {
                    let at = own(1).first().map_or(0, |ops| ops.start);
                    ready.push(Ready::Exchange(op, at));
                    continue;
                }
            };
            let Some(loaded) = loaded else { return Ok(None) };
            ready.push(Ready::Instructions(loaded, own(instructions.len())));
        }
        Ok(Some(ready))
    }

    /// What the ranks of a group give each other at this point of their programs. Returns the bytes.
    fn exchange(&mut self, group: &Range<usize>, ops: &[&Op]) -> Result<u64, CudaError> {
        let others = group.len() as u64 - 1;
        match ops[0] {
            Op::Gather { parts, rows, .. } => {
                let row = parts.last().map_or(0, |part| part.end) as usize;
                let mut whole = vec![0; row * *rows as usize];
                for ((slot, op), part) in group.clone().zip(ops).zip(parts.iter()) {
                    let Op::Gather { from, .. } = op else { return Err(astray()) };
                    let width = (part.end - part.start) as usize;
                    let mut own = vec![0; width * *rows as usize];
                    self.get(slot, *from, &mut own)?;
                    let own = own.chunks_exact(width.max(1));
                    for (whole, own) in whole.chunks_exact_mut(row).zip(own) {
                        whole[part.start as usize..part.end as usize].copy_from_slice(own);
                    }
                }
                for (slot, op) in group.clone().zip(ops) {
                    let Op::Gather { into, .. } = op else { return Err(astray()) };
                    self.put(slot, *into, &whole)?;
                }
                Ok(whole.len() as u64 * others)
            }
            Op::Fold { elements, fold, .. } => {
                let mut sum = vec![0u32; *elements as usize];
                let mut own = sum.clone();
                for (rank, (slot, op)) in group.clone().zip(ops).enumerate() {
                    let Op::Fold { data, .. } = op else { return Err(astray()) };
                    let into = if rank == 0 { &mut sum } else { &mut own };
                    self.get(slot, *data, bytemuck::cast_slice_mut(into))?;
                    if rank > 0 {
                        folded(&mut sum, &own, *fold)?;
                    }
                }
                for (slot, op) in group.clone().zip(ops) {
                    let Op::Fold { data, .. } = op else { return Err(astray()) };
                    self.put(slot, *data, bytemuck::cast_slice(&sum))?;
                }
                Ok(elements * 4 * others * group.len() as u64)
            }
            _ => Err(astray()),
        }
    }

    /// What is captured of each slot; nothing if nothing is.
    fn taken(&self, captures: &Captures) -> Result<Vec<Taken>, LlmError> {
        let of = |(slot, into): (usize, &(Place, u64))| {
            let own = captures.list.iter().filter(|capture| capture.member == slot);
            let own: Vec<&Capture> = own.collect();
            self.of_card(slot, Taken::of(&own, &self.slots[slot].buffers, *into))
        };
        captures.into.iter().enumerate().map(of).collect()
    }

    /// Captures what is there in the end, and begins to read all that was captured.
    fn fetch(&mut self, going: &Going<'_>, captures: &Captures) -> Result<(), LlmError> {
        for (slot, (taken, (place, bytes))) in going.taken.iter().zip(&captures.into).enumerate() {
            let rest = going.rest.iter().filter(|(of, _)| *of == slot);
            let mut pieces: Vec<Piece> = rest.flat_map(|(_, rest)| rest).copied().collect();
            pieces.extend(taken.last());
            let DeviceSlot { device, buffers, .. } = &self.slots[slot];
            let (device, offset) = (&mut self.devices[*device], place.offset as usize);
            let begun = device.gather(&pieces).and_then(|()| match *bytes {
                0 => Ok(()),
                bytes => {
                    let memory = &buffers[place.buffer.0 as usize];
                    device.fetch(slot, memory, offset, bytes as usize)
                }
            });
            self.of_card(slot, begun)?;
        }
        Ok(())
    }

    /// Runs programs, and writes down what is asked for. Returns the bytes that cards gave to other cards.
    pub(super) fn watched(
        &mut self,
        program: &Programs,
        tables: &[u8],
        watch: Watch,
        captures: &Captures,
    ) -> Result<(u64, Vec<Span>), LlmError> {
        let taken = self.taken(captures)?;
        for (slot, place) in program.tables.iter().enumerate() {
            if let Some(place) = *place {
                let written = self.put(slot, place, tables);
                self.of_card(slot, written)?;
            }
        }
        let slots = program.slots.len();
        let mut going = Going {
            programs: program,
            at: vec![0; slots],
            in_flight: HashMap::new(),
            sent: 0,
            watch,
            taken,
            rest: Vec::new(),
            begun: Instant::now(),
            spans: Vec::new(),
        };
        loop {
            let mut moved = false;
            for slot in 0..slots {
                let went = going.alone(self, slot);
                moved |= self.of_card(slot, went)?;
            }
            for group in &program.groups {
                let ops: Option<Vec<&Op>> =
                    group.clone().map(|slot| going.exchange(slot)).collect();
                let Some(ops) = ops.filter(|ops| {
                    ops.iter().all(|op| !matches!(op, Op::Send { .. } | Op::Receive { .. }))
                }) else {
                    continue;
                };
                let (start, whole) = (going.now(), whole_bytes(ops[0]));
                going.capture(self, group, false)?;
                let exchanged = self.exchange(group, &ops);
                going.sent += self.of_card(group.start, exchanged)?;
                going.capture(self, group, true)?;
                for slot in group.clone() {
                    going.note(slot, start, whole);
                    going.at[slot] += 1;
                }
                moved = true;
            }
            if (0..slots).all(|slot| going.at[slot] == program.slots[slot].len()) {
                self.fetch(&going, captures)?;
                return Ok((going.sent, going.spans));
            }
            if !moved {
                return self.of_card(0, Err(astray()));
            }
        }
    }
}

/// Where a program has the tables of a step.
fn tables_of(program: &[Op]) -> Option<Place> {
    program.iter().find_map(|op| match op {
        Op::Data { into, .. } => Some(*into),
        _ => None,
    })
}

/// Bytes of what a group has after an exchange.
fn whole_bytes(op: &Op) -> u64 {
    match op {
        Op::Gather { parts, rows, .. } => parts.last().map_or(0, |part| part.end) * rows,
        Op::Fold { elements, .. } => elements * 4,
        _ => 0,
    }
}

/// Folds words of a rank with those of the ranks before it.
fn folded(sum: &mut [u32], own: &[u32], fold: Fold) -> Result<(), CudaError> {
    let add = |a: u32, b: u32| (f32::from_bits(a) + f32::from_bits(b)).to_bits();
    let is = |dtype: DType, op: ReduceOp| fold.dtype == dtype.code() && Some(fold.op) == op.code();
    let pairs = sum.iter_mut().zip(own);
    if is(DType::F32, ReduceOp::Sum) {
        pairs.for_each(|(sum, own)| *sum = add(*sum, *own));
    } else if is(DType::U32, ReduceOp::BitwiseOr) {
        pairs.for_each(|(sum, own)| *sum |= *own);
    } else {
        return Err(CudaError::Unsupported(format!("{fold:?} between cards on a GPU")));
    }
    Ok(())
}

/// Programs that do not belong together.
fn astray() -> CudaError {
    CudaError::Unsupported("cards of a group have programs that do not belong together".into())
}

/// A run of programs: where each slot is, and messages between stages.
struct Going<'a> {
    programs: &'a Programs,
    at: Vec<usize>,
    in_flight: HashMap<(usize, usize), VecDeque<Vec<u8>>>,
    sent: u64,
    watch: Watch,
    taken: Vec<Taken>,
    /// Pieces that slots copy behind their last instruction.
    rest: Vec<(usize, Vec<Piece>)>,
    begun: Instant,
    spans: Vec<Span>,
}

impl Going<'_> {
    fn exchange(&self, slot: usize) -> Option<&Op> {
        match self.programs.slots[slot].get(self.at[slot]) {
            Some(Ready::Exchange(op, _)) => Some(op),
            _ => None,
        }
    }

    /// Captures what the slots of a group have before their next exchange, or after it.
    fn capture(
        &self,
        processors: &mut Processors,
        group: &Range<usize>,
        is_over: bool,
    ) -> Result<(), LlmError> {
        for slot in group.clone().take(if self.taken.is_empty() { 0 } else { group.len() }) {
            let Some(Ready::Exchange(_, op)) = self.programs.slots[slot].get(self.at[slot]) else {
                continue;
            };
            let pieces = self.taken[slot].exchange(*op, is_over);
            let device = processors.slots[slot].device;
            let gathered = processors.devices[device].gather(&pieces);
            processors.of_card(slot, gathered)?;
        }
        Ok(())
    }

    fn now(&self) -> f64 {
        self.begun.elapsed().as_secs_f64()
    }

    /// Records what a slot did since `start`.
    fn note(&mut self, slot: usize, start: f64, bytes: u64) {
        let op = match self.programs.slots[slot].get(self.at[slot]) {
            Some(Ready::Exchange(_, op)) => *op,
            _ => return,
        };
        if self.watch != Watch::Nothing {
            let (ops, end, exchanged) = (op..op + 1, self.now(), Some(bytes));
            self.spans.push(Span { slot, ops, start, end, exchanged });
        }
    }

    /// Runs a slot's instructions.
    fn instructions(
        &mut self,
        processors: &mut Processors,
        slot: usize,
        (loaded, ops): (&Loaded, &[Range<usize>]),
    ) -> Result<(), CudaError> {
        let own = &mut processors.slots[slot];
        let device = &mut processors.devices[own.device];
        let work = own.work()?;
        let is_timed = self.watch == Watch::Instructions;
        if is_timed {
            device.synchronize()?;
        }
        let (mut start, mut spans) = (self.now(), Vec::new());
        let mut go = |device: &mut DeviceContext, work: &mut Workspace, some: Range<u32>| {
            if !is_timed {
                return device.run_some(work, loaded, some);
            }
            let own = &ops[some.start as usize..some.end as usize];
            for (seconds, ops) in device.run_timed(work, loaded, some)?.into_iter().zip(own) {
                let (ops, end) = (ops.clone(), start + seconds);
                spans.push(Span { slot, ops, start, end, exchanged: None });
                start = end;
            }
            Ok(())
        };
        let taken = self.taken.get(slot).filter(|taken| taken.is_any(&captures::whole(ops)));
        let rest = match taken {
            Some(taken) => captures::run(device, work, (loaded, ops), taken, &mut go)?,
            None => {
                go(device, work, 0..loaded.count())?;
                Vec::new()
            }
        };
        self.spans.extend(spans);
        if self.at[slot] + 1 < self.programs.slots[slot].len() {
            return device.gather(&rest);
        }
        // Copied with what is there in the end.
        self.rest.push((slot, rest));
        Ok(())
    }

    /// Runs a slot's program up to its next exchange. Returns whether it got anywhere.
    fn alone(&mut self, processors: &mut Processors, slot: usize) -> Result<bool, CudaError> {
        let begun = self.at[slot];
        while let Some(ready) = self.programs.slots[slot].get(self.at[slot]) {
            match ready {
                Ready::Instructions(instructions, ops) => {
                    self.instructions(processors, slot, (instructions, ops))?;
                }
                Ready::Exchange(Op::Send { to, from, length }, _) => {
                    let start = self.now();
                    let mut bytes = vec![0; *length as usize];
                    processors.get(slot, *from, &mut bytes)?;
                    self.sent += length;
                    self.in_flight.entry((slot, *to)).or_default().push_back(bytes);
                    self.note(slot, start, 0);
                }
                Ready::Exchange(Op::Receive { from, into, .. }, _) => {
                    let waiting = self.in_flight.get_mut(&(*from, slot));
                    let Some(bytes) = waiting.and_then(VecDeque::pop_front) else { break };
                    let start = self.now();
                    processors.put(slot, *into, &bytes)?;
                    self.note(slot, start, bytes.len() as u64);
                }
                Ready::Exchange(..) => break,
            }
            self.at[slot] += 1;
        }
        Ok(self.at[slot] > begun)
    }
}

impl Machine for Processors {
    type Program = Programs;

    fn kernels(&self) -> Kernels {
        let each = self.devices.iter().map(DeviceContext::multiprocessors);
        Kernels::Gpu { multiprocessors: each.max().unwrap_or(1) }
    }

    fn keep(&mut self, slot: usize, staging: &GpuStaging) -> Result<u64, LlmError> {
        let device = &self.devices[self.slots[slot].device];
        let work = self.of_card(slot, device.workspace(staging))?;
        let bytes = work.bytes();
        self.slots[slot].work = Some(work);
        Ok(bytes)
    }

    fn allocate(&mut self, slot: usize, what: &str, bytes: u64) -> Result<BufferId, LlmError> {
        let device = &self.devices[self.slots[slot].device];
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        let buffer = self.of_card(slot, device.allocate(size, what))?;
        let buffers = &mut self.slots[slot].buffers;
        buffers.push(buffer);
        Ok(BufferId(buffers.len() as u64 - 1))
    }

    fn hold(
        &mut self,
        slot: usize,
        place: Place,
        quant: Quant,
        bytes: &[u8],
    ) -> Result<(), LlmError> {
        self.devices[self.slots[slot].device].knows(quant);
        let mut planes = std::mem::take(&mut self.planes);
        planes.clear();
        in_planes(quant, bytes, &mut planes);
        let written = self.put(slot, place, &planes);
        self.planes = planes;
        self.of_card(slot, written)
    }

    fn write(&mut self, slot: usize, place: Place, bytes: &[u8]) -> Result<(), LlmError> {
        let written = self.put(slot, place, bytes);
        self.of_card(slot, written)
    }

    fn read(&mut self, slot: usize, place: Place, out: &mut [u8]) -> Result<(), LlmError> {
        let read = self.get(slot, place, out);
        self.of_card(slot, read)
    }

    fn copy(&mut self, slot: usize, from: Place, into: Place, length: u64) -> Result<(), LlmError> {
        let copied = self.copied(slot, from, into, length);
        self.of_card(slot, copied)
    }

    fn prepare(
        &mut self,
        programs: &[Vec<Op>],
        groups: &[Range<usize>],
    ) -> Result<Option<Programs>, LlmError> {
        let mut slots = Vec::with_capacity(programs.len());
        for (slot, program) in programs.iter().enumerate() {
            let alone = groups.iter().any(|group| group.len() == 1 && group.start == slot);
            let ready = self.translated(slot, program, alone);
            let Some(ready) = self.of_card(slot, ready)? else { return Ok(None) };
            slots.push(ready);
        }
        let tables = programs.iter().map(|program| tables_of(program)).collect();
        Ok(Some(Programs { slots, tables, groups: groups.to_vec() }))
    }

    fn forget(&mut self) {
        self.slots.iter_mut().filter_map(|slot| slot.work.as_mut()).for_each(Workspace::forget);
    }

    fn runs(&self, program: &Programs, slot: usize) -> Vec<Range<usize>> {
        let lists = program.slots[slot].iter().filter_map(|ready| match ready {
            Ready::Instructions(_, ops) => Some(captures::runs(ops)),
            Ready::Exchange(..) => None,
        });
        lists.flatten().collect()
    }

    fn run(
        &mut self,
        program: &Programs,
        tables: &[u8],
        _: &Reach,
        captures: &Captures,
    ) -> Result<u64, LlmError> {
        self.watched(program, tables, Watch::Nothing, captures).map(|(sent, _)| sent)
    }

    fn captured(&mut self, slot: usize, bytes: u64) -> Result<Vec<u8>, LlmError> {
        let mut out = vec![0; bytes as usize];
        let device = self.slots[slot].device;
        let read = match bytes {
            0 => Ok(()),
            _ => self.devices[device].fetched(slot, &mut out),
        };
        self.of_card(slot, read)?;
        Ok(out)
    }

    fn run_traced(
        &mut self,
        program: &Programs,
        tables: &[u8],
        _: &Reach,
        captures: &Captures,
    ) -> Result<(u64, Vec<Spent>), LlmError> {
        let (sent, spans) = self.watched(program, tables, Watch::Instructions, captures)?;
        let spent = spans.into_iter().map(|span| {
            let Span { slot, ops, start, end, exchanged } = span;
            Spent { member: slot, ops, start, end, exchange: exchanged.is_some() }
        });
        Ok((sent, spent.collect()))
    }
}
