// SPDX-License-Identifier: Apache-2.0
//! Graphics processors as cards of a plan: their memory, their programs, and what passes between them.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::CudaSlice;
use spanker_llm::{LlmError, Machine, Spent};
use spanker_model::Quant;
use spanker_plan::{GpuStaging, Op};
use spanker_runtime::{BufferId, Place};
use spanker_topology::Kernels;

use super::lines::{Part, Parts, Setting, translate};
use super::planes::in_planes;
use super::station::{COUNTERS, Loaded, Station, Workspace, address};
use crate::{CudaError, Gpu};

/// Cards of a plan that are graphics processors, or logical cards that share one.
///
/// Cards that share a processor take turns on it. What cards exchange goes through the host's memory.
pub struct Processors {
    stations: Vec<Station>,
    seats: Vec<Seat>,
    planes: Vec<u8>,
}

/// A card's place in the plan.
struct Seat {
    card: usize,
    station: usize,
    buffers: Vec<CudaSlice<u8>>,
    /// What the kernel keeps for it.
    work: Option<Workspace>,
}

impl Seat {
    fn work(&mut self) -> Result<&mut Workspace, CudaError> {
        let none = || CudaError::Unsupported("a card that no memory was kept for".into());
        self.work.as_mut().ok_or_else(none)
    }
}

/// Programs of all seats, ready to run.
pub struct Programs {
    seats: Vec<Vec<Ready>>,
    groups: Vec<Range<usize>>,
}

enum Ready {
    /// Lines, and the operators of each.
    Lines(Loaded, Vec<Range<usize>>),
    /// An exchange, and its number in the program.
    Exchange(Op, usize),
}

/// What is written down while programs run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Watch {
    Nothing,
    /// When exchanges end. Nothing waits for that.
    Exchanges,
    /// Exchanges, and every line by the processor's clock. Processors that could work at the same time wait for each other.
    Lines,
}

/// Something that a seat did, in seconds since the step began.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Span {
    pub(super) seat: usize,
    /// The operators of its program.
    pub(super) ops: Range<usize>,
    pub(super) start: f64,
    pub(super) end: f64,
    /// Of an exchange, the bytes of the whole.
    pub(super) exchanged: Option<u64>,
}

impl std::fmt::Debug for Programs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Programs").field("seats", &self.seats.len()).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Processors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Processors")
            .field("gpus", &self.stations.len())
            .field("cards", &self.seats.len())
            .finish_non_exhaustive()
    }
}

impl Processors {
    /// Cards on processors: `cards` has, for each seat of a plan, the card's number in it. Card `i` is on
    /// processor `i`, and where there are fewer processors, they are gone round again.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] without processors; [`CudaError::Memory`].
    pub fn new(
        gpus: &[Arc<Gpu>],
        cards: &[usize],
        context: usize,
    ) -> Result<Processors, CudaError> {
        if gpus.is_empty() {
            return Err(CudaError::NoDevice);
        }
        let stations = gpus.iter().map(|gpu| Station::new(Arc::clone(gpu), context));
        let stations = stations.collect::<Result<Vec<Station>, CudaError>>()?;
        let seat = |&card: &usize| {
            let (station, buffers, work) = (card % gpus.len(), Vec::new(), None);
            Seat { card, station, buffers, work }
        };
        Ok(Processors { stations, seats: cards.iter().map(seat).collect(), planes: Vec::new() })
    }

    /// Has the kernels know the types of a model's weights.
    pub(super) fn know(&mut self, types: &[Quant]) {
        for station in &mut self.stations {
            types.iter().for_each(|&quant| station.knows(quant));
        }
    }

    /// The processor of a seat.
    pub(super) fn gpu_of(&self, seat: usize) -> usize {
        self.seats[seat].station
    }

    /// Waits for all processors.
    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        self.stations.iter().try_for_each(|station| station.gpu().synchronize())
    }

    /// What a seat's card says, in the words of a model.
    fn told<T>(&self, seat: usize, outcome: Result<T, CudaError>) -> Result<T, LlmError> {
        let card = self.seats[seat].card;
        outcome.map_err(|error| match error {
            CudaError::Unsupported(what) => LlmError::Unsupported { what },
            error => LlmError::Card { card, what: error.to_string() },
        })
    }

    fn get(&mut self, seat: usize, place: Place, out: &mut [u8]) -> Result<(), CudaError> {
        let Seat { station, buffers, .. } = &self.seats[seat];
        self.stations[*station].read(&buffers[place.buffer.0 as usize], place.offset as usize, out)
    }

    fn put(&mut self, seat: usize, place: Place, bytes: &[u8]) -> Result<(), CudaError> {
        let Seat { station, buffers, .. } = &mut self.seats[seat];
        let memory = &mut buffers[place.buffer.0 as usize];
        self.stations[*station].write(memory, place.offset as usize, bytes)
    }

    /// A seat's program for as many blocks as fit with the memory that it needs. Nothing if there is no room for it.
    fn translated(
        &mut self,
        seat: usize,
        program: &[Op],
        alone: bool,
    ) -> Result<Option<Vec<Ready>>, CudaError> {
        let seat = &mut self.seats[seat];
        let counters = seat.work()?.counters();
        let Seat { station, buffers, .. } = seat;
        let station = &mut self.stations[*station];
        let gpu = Arc::clone(station.gpu());
        let bases: Vec<u64> = buffers.iter().map(|buffer| address(buffer, &gpu)).collect();
        let place = |place: Place| bases[place.buffer.0 as usize] + place.offset;
        let mut blocks = station.blocks(0)?;
        let mut streams = station.streams(0)?;
        let Parts { parts, shared, streamed, ops } = loop {
            let setting = Setting {
                address: &place,
                blocks,
                counters,
                counted: COUNTERS,
                scores: station.scores(),
                tile_rows: station.tile_rows(),
                streams,
            };
            let parts = translate(program, alone, &setting)?;
            let fit = station.blocks(parts.shared)?;
            let streamed = parts.parts.iter().any(|part| matches!(part, Part::Streamed(_)));
            if streamed && station.streams(parts.streamed)? < streams {
                streams = 0;
            } else if fit >= blocks {
                break parts;
            } else {
                blocks = fit;
            }
        };
        let mut ops = ops.into_iter();
        let mut own = |count: usize| ops.by_ref().take(count).collect::<Vec<Range<usize>>>();
        let work = seat.work()?;
        let mut ready = Vec::with_capacity(parts.len());
        for part in parts {
            let (loaded, lines) = match part {
                Part::Lines(lines) => (station.load(work, &lines, shared, blocks)?, lines),
                Part::Streamed(lines) => (station.load_streamed(work, &lines, streamed)?, lines),
                Part::Exchange(op) => {
                    let at = own(1).first().map_or(0, |ops| ops.start);
                    ready.push(Ready::Exchange(op, at));
                    continue;
                }
            };
            let Some(loaded) = loaded else { return Ok(None) };
            ready.push(Ready::Lines(loaded, own(lines.len())));
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
                for ((seat, op), part) in group.clone().zip(ops).zip(parts.iter()) {
                    let Op::Gather { from, .. } = op else { return Err(astray()) };
                    let width = (part.end - part.start) as usize;
                    let mut own = vec![0; width * *rows as usize];
                    self.get(seat, *from, &mut own)?;
                    let own = own.chunks_exact(width.max(1));
                    for (whole, own) in whole.chunks_exact_mut(row).zip(own) {
                        whole[part.start as usize..part.end as usize].copy_from_slice(own);
                    }
                }
                for (seat, op) in group.clone().zip(ops) {
                    let Op::Gather { into, .. } = op else { return Err(astray()) };
                    self.put(seat, *into, &whole)?;
                }
                Ok(whole.len() as u64 * others)
            }
            Op::Sum { elements, .. } => {
                let mut sum = vec![0.0f32; *elements as usize];
                let mut own = sum.clone();
                for (rank, (seat, op)) in group.clone().zip(ops).enumerate() {
                    let Op::Sum { data, .. } = op else { return Err(astray()) };
                    let into = if rank == 0 { &mut sum } else { &mut own };
                    self.get(seat, *data, bytemuck::cast_slice_mut(into))?;
                    if rank > 0 {
                        sum.iter_mut().zip(&own).for_each(|(sum, own)| *sum += own);
                    }
                }
                for (seat, op) in group.clone().zip(ops) {
                    let Op::Sum { data, .. } = op else { return Err(astray()) };
                    self.put(seat, *data, bytemuck::cast_slice(&sum))?;
                }
                Ok(elements * 4 * others * group.len() as u64)
            }
            Op::Broadcast { root, length, data } => {
                let mut bytes = vec![0; *length as usize];
                let from = match ops[*root] {
                    Op::Broadcast { data, .. } => *data,
                    _ => *data,
                };
                self.get(group.start + root, from, &mut bytes)?;
                for (seat, op) in group.clone().zip(ops) {
                    let Op::Broadcast { data, .. } = op else { return Err(astray()) };
                    self.put(seat, *data, &bytes)?;
                }
                Ok(length * others)
            }
            _ => Err(astray()),
        }
    }

    /// Runs programs, and writes down what is asked for. Returns the bytes that cards gave to other cards.
    pub(super) fn watched(
        &mut self,
        program: &Programs,
        tokens: &[u32],
        past: usize,
        watch: Watch,
    ) -> Result<(u64, Vec<Span>), LlmError> {
        let (token, past) = (tokens.first().copied().unwrap_or(0), past as u32);
        if tokens.len() > 1 {
            for seat in 0..self.seats.len() {
                let Seat { station, work, .. } = &mut self.seats[seat];
                let station = &mut self.stations[*station];
                let given = work.as_mut().map_or(Ok(()), |work| station.tokens(work, tokens));
                self.told(seat, given)?;
            }
        }
        let seats = program.seats.len();
        let mut going = Going {
            programs: program,
            at: vec![0; seats],
            handed: HashMap::new(),
            sent: 0,
            watch,
            begun: Instant::now(),
            spans: Vec::new(),
        };
        loop {
            let mut moved = false;
            for seat in 0..seats {
                let went = going.alone(self, seat, token, past);
                moved |= self.told(seat, went)?;
            }
            for group in &program.groups {
                let ops: Option<Vec<&Op>> =
                    group.clone().map(|seat| going.exchange(seat)).collect();
                let Some(ops) = ops.filter(|ops| {
                    ops.iter().all(|op| !matches!(op, Op::Send { .. } | Op::Receive { .. }))
                }) else {
                    continue;
                };
                let (start, whole) = (going.now(), whole_bytes(ops[0]));
                let exchanged = self.exchange(group, &ops);
                going.sent += self.told(group.start, exchanged)?;
                for seat in group.clone() {
                    going.note(seat, start, whole);
                    going.at[seat] += 1;
                }
                moved = true;
            }
            if (0..seats).all(|seat| going.at[seat] == program.seats[seat].len()) {
                return Ok((going.sent, going.spans));
            }
            if !moved {
                return self.told(0, Err(astray()));
            }
        }
    }
}

/// Bytes of what a group has after an exchange.
fn whole_bytes(op: &Op) -> u64 {
    match op {
        Op::Gather { parts, rows, .. } => parts.last().map_or(0, |part| part.end) * rows,
        Op::Sum { elements, .. } => elements * 4,
        Op::Broadcast { length, .. } => *length,
        _ => 0,
    }
}

/// Programs that do not belong together.
fn astray() -> CudaError {
    CudaError::Unsupported("cards of a group have programs that do not belong together".into())
}

/// A run of programs: where each seat is, and what is on its way between stages.
struct Going<'a> {
    programs: &'a Programs,
    at: Vec<usize>,
    handed: HashMap<(usize, usize), VecDeque<Vec<u8>>>,
    sent: u64,
    watch: Watch,
    begun: Instant,
    spans: Vec<Span>,
}

impl Going<'_> {
    fn exchange(&self, seat: usize) -> Option<&Op> {
        match self.programs.seats[seat].get(self.at[seat]) {
            Some(Ready::Exchange(op, _)) => Some(op),
            _ => None,
        }
    }

    fn now(&self) -> f64 {
        self.begun.elapsed().as_secs_f64()
    }

    /// Writes down what a seat did since `start`.
    fn note(&mut self, seat: usize, start: f64, bytes: u64) {
        let op = match self.programs.seats[seat].get(self.at[seat]) {
            Some(Ready::Exchange(_, op)) => *op,
            _ => return,
        };
        if self.watch != Watch::Nothing {
            let (ops, end, exchanged) = (op..op + 1, self.now(), Some(bytes));
            self.spans.push(Span { seat, ops, start, end, exchanged });
        }
    }

    /// Runs a seat's lines.
    fn lines(
        &mut self,
        processors: &mut Processors,
        seat: usize,
        (loaded, ops): (&Loaded, &[Range<usize>]),
        (token, past): (u32, u32),
    ) -> Result<(), CudaError> {
        let own = &mut processors.seats[seat];
        let station = &mut processors.stations[own.station];
        let work = own.work()?;
        if self.watch != Watch::Lines {
            return station.run(work, loaded, token, past);
        }
        station.gpu().synchronize()?;
        let mut start = self.now();
        for (seconds, ops) in station.run_timed(work, loaded, token, past)?.into_iter().zip(ops) {
            let (ops, end) = (ops.clone(), start + seconds);
            self.spans.push(Span { seat, ops, start, end, exchanged: None });
            start = end;
        }
        Ok(())
    }

    /// Goes as far as a seat gets by itself. Says whether it got anywhere.
    fn alone(
        &mut self,
        processors: &mut Processors,
        seat: usize,
        token: u32,
        past: u32,
    ) -> Result<bool, CudaError> {
        let begun = self.at[seat];
        while let Some(ready) = self.programs.seats[seat].get(self.at[seat]) {
            match ready {
                Ready::Lines(lines, ops) => {
                    self.lines(processors, seat, (lines, ops), (token, past))?;
                }
                Ready::Exchange(Op::Send { to, from, length }, _) => {
                    let start = self.now();
                    let mut bytes = vec![0; *length as usize];
                    processors.get(seat, *from, &mut bytes)?;
                    self.sent += length;
                    self.handed.entry((seat, *to)).or_default().push_back(bytes);
                    self.note(seat, start, 0);
                }
                Ready::Exchange(Op::Receive { from, into, .. }, _) => {
                    let waiting = self.handed.get_mut(&(*from, seat));
                    let Some(bytes) = waiting.and_then(VecDeque::pop_front) else { break };
                    let start = self.now();
                    processors.put(seat, *into, &bytes)?;
                    self.note(seat, start, bytes.len() as u64);
                }
                Ready::Exchange(..) => break,
            }
            self.at[seat] += 1;
        }
        Ok(self.at[seat] > begun)
    }
}

impl Machine for Processors {
    type Program = Programs;

    fn kernels(&self) -> Kernels {
        let each = self.stations.iter().map(|station| station.gpu().multiprocessors());
        Kernels::Gpu { multiprocessors: each.max().unwrap_or(1) }
    }

    fn keep(&mut self, seat: usize, staging: &GpuStaging) -> Result<u64, LlmError> {
        let gpu = Arc::clone(self.stations[self.seats[seat].station].gpu());
        let work = self.told(seat, Workspace::new(&gpu, staging))?;
        let bytes = work.bytes();
        self.seats[seat].work = Some(work);
        Ok(bytes)
    }

    fn allocate(&mut self, seat: usize, what: &str, bytes: u64) -> Result<BufferId, LlmError> {
        let gpu = Arc::clone(self.stations[self.seats[seat].station].gpu());
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        let buffer = self.told(seat, gpu.allocate(size, what))?;
        let buffers = &mut self.seats[seat].buffers;
        buffers.push(buffer);
        Ok(BufferId(buffers.len() as u64 - 1))
    }

    fn hold(
        &mut self,
        seat: usize,
        place: Place,
        quant: Quant,
        bytes: &[u8],
    ) -> Result<(), LlmError> {
        self.stations[self.seats[seat].station].knows(quant);
        let mut planes = std::mem::take(&mut self.planes);
        planes.clear();
        in_planes(quant, bytes, &mut planes);
        let written = self.put(seat, place, &planes);
        self.planes = planes;
        self.told(seat, written)
    }

    fn write(&mut self, seat: usize, place: Place, bytes: &[u8]) -> Result<(), LlmError> {
        let written = self.put(seat, place, bytes);
        self.told(seat, written)
    }

    fn read(&mut self, seat: usize, place: Place, out: &mut [u8]) -> Result<(), LlmError> {
        let read = self.get(seat, place, out);
        self.told(seat, read)
    }

    fn prepare(
        &mut self,
        programs: &[Vec<Op>],
        groups: &[Range<usize>],
    ) -> Result<Option<Programs>, LlmError> {
        let mut seats = Vec::with_capacity(programs.len());
        for (seat, program) in programs.iter().enumerate() {
            let alone = groups.iter().any(|group| group.len() == 1 && group.start == seat);
            let ready = self.translated(seat, program, alone);
            let Some(ready) = self.told(seat, ready)? else { return Ok(None) };
            seats.push(ready);
        }
        Ok(Some(Programs { seats, groups: groups.to_vec() }))
    }

    fn forget(&mut self) {
        self.seats.iter_mut().filter_map(|seat| seat.work.as_mut()).for_each(Workspace::forget);
    }

    fn run(&mut self, program: &Programs, tokens: &[u32], past: usize) -> Result<u64, LlmError> {
        self.watched(program, tokens, past, Watch::Nothing).map(|(sent, _)| sent)
    }

    fn run_traced(
        &mut self,
        program: &Programs,
        tokens: &[u32],
        past: usize,
    ) -> Result<(u64, Vec<Spent>), LlmError> {
        let (sent, spans) = self.watched(program, tokens, past, Watch::Lines)?;
        let spent = spans.into_iter().map(|span| {
            let Span { seat, ops, start, end, exchanged } = span;
            Spent { seat, ops, start, end, exchange: exchanged.is_some() }
        });
        Ok((sent, spent.collect()))
    }
}
