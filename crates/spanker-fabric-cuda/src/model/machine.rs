// SPDX-License-Identifier: Apache-2.0
//! Graphics processors as cards of a plan: their memory, their programs, and what passes between them.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::CudaSlice;
use spanker_llm::{LlmError, Machine};
use spanker_model::Quant;
use spanker_plan::Op;
use spanker_runtime::{BufferId, Place};

use super::lines::{Part, Parts, Setting, translate};
use super::planes::in_planes;
use super::station::{COUNTERS, Loaded, Station, address};
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
}

/// Programs of all seats, ready to run.
pub struct Programs {
    seats: Vec<Vec<Ready>>,
    groups: Vec<Range<usize>>,
}

enum Ready {
    Lines(Loaded),
    Exchange(Op),
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
        batch: usize,
    ) -> Result<Processors, CudaError> {
        if gpus.is_empty() {
            return Err(CudaError::NoDevice);
        }
        let stations = gpus.iter().map(|gpu| Station::new(Arc::clone(gpu), context, batch));
        let stations = stations.collect::<Result<Vec<Station>, CudaError>>()?;
        let seat = |&card: &usize| Seat { card, station: card % gpus.len(), buffers: Vec::new() };
        Ok(Processors { stations, seats: cards.iter().map(seat).collect(), planes: Vec::new() })
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

    /// A seat's program for as many blocks as fit with the memory that it needs.
    fn translated(
        &mut self,
        seat: usize,
        program: &[Op],
        alone: bool,
    ) -> Result<Vec<Ready>, CudaError> {
        let Seat { station, buffers, .. } = &self.seats[seat];
        let station = &mut self.stations[*station];
        let gpu = Arc::clone(station.gpu());
        let bases: Vec<u64> = buffers.iter().map(|buffer| address(buffer, &gpu)).collect();
        let place = |place: Place| bases[place.buffer.0 as usize] + place.offset;
        let mut blocks = station.blocks(0)?;
        let mut streams = station.streams(0)?;
        let Parts { parts, shared, streamed } = loop {
            let setting = Setting {
                address: &place,
                blocks,
                counters: station.counters(),
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
        let ready = parts.into_iter().map(|part| match part {
            Part::Lines(lines) => station.load(&lines, shared, blocks).map(Ready::Lines),
            Part::Streamed(lines) => station.load_streamed(&lines, streamed).map(Ready::Lines),
            Part::Exchange(op) => Ok(Ready::Exchange(op)),
        });
        ready.collect()
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
}

impl Going<'_> {
    fn exchange(&self, seat: usize) -> Option<&Op> {
        match self.programs.seats[seat].get(self.at[seat]) {
            Some(Ready::Exchange(op)) => Some(op),
            _ => None,
        }
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
                Ready::Lines(lines) => {
                    let station = processors.seats[seat].station;
                    processors.stations[station].run(lines, token, past)?;
                }
                Ready::Exchange(Op::Send { to, from, length }) => {
                    let mut bytes = vec![0; *length as usize];
                    processors.get(seat, *from, &mut bytes)?;
                    self.sent += length;
                    self.handed.entry((seat, *to)).or_default().push_back(bytes);
                }
                Ready::Exchange(Op::Receive { from, into, .. }) => {
                    let waiting = self.handed.get_mut(&(*from, seat));
                    let Some(bytes) = waiting.and_then(VecDeque::pop_front) else { break };
                    processors.put(seat, *into, &bytes)?;
                }
                Ready::Exchange(_) => break,
            }
            self.at[seat] += 1;
        }
        Ok(self.at[seat] > begun)
    }
}

impl Machine for Processors {
    type Program = Programs;

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
    ) -> Result<Programs, LlmError> {
        let mut seats = Vec::with_capacity(programs.len());
        for (seat, program) in programs.iter().enumerate() {
            let alone = groups.iter().any(|group| group.len() == 1 && group.start == seat);
            let ready = self.translated(seat, program, alone);
            seats.push(self.told(seat, ready)?);
        }
        Ok(Programs { seats, groups: groups.to_vec() })
    }

    fn run(&mut self, program: &Programs, tokens: &[u32], past: usize) -> Result<u64, LlmError> {
        let (token, past) = (tokens.first().copied().unwrap_or(0), past as u32);
        if tokens.len() > 1 {
            for station in 0..self.stations.len() {
                let seat = self.seats.iter().position(|seat| seat.station == station).unwrap_or(0);
                let given = self.stations[station].tokens(tokens);
                self.told(seat, given)?;
            }
        }
        let seats = program.seats.len();
        let mut going =
            Going { programs: program, at: vec![0; seats], handed: HashMap::new(), sent: 0 };
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
                let exchanged = self.exchange(group, &ops);
                going.sent += self.told(group.start, exchanged)?;
                group.clone().for_each(|seat| going.at[seat] += 1);
                moved = true;
            }
            if (0..seats).all(|seat| going.at[seat] == program.seats[seat].len()) {
                return Ok(going.sent);
            }
            if !moved {
                return self.told(0, Err(astray()));
            }
        }
    }
}
