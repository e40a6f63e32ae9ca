// SPDX-License-Identifier: Apache-2.0
//! Programs of cards on their devices: how they are translated and loaded, how a step goes through them, and what is written
//! down meanwhile. In which order cards go on is decided by `schedule.rs`.

use std::ops::Range;
use std::time::Instant;

use spanker_llm::{Captures, LlmError};
use spanker_plan::Op;
use spanker_runtime::Place;

use super::captures::{self, Taken};
use super::device::Piece;
use super::device_context::{COUNTERS, DeviceContext, Loaded};
use super::exchange::Memories;
use super::instructions::{Part, Parts, Setting, translate};
use super::machine::Processors;
use super::operands::Instruction;
use super::schedule::{Between, Done, Entry, Listed, Task, schedule};
use crate::CudaError;

/// Programs of all device slots, ready to run.
pub struct Programs {
    actions: Vec<Action>,
    /// Where each slot has the tables of a step.
    tables: Vec<Option<Place>>,
    /// Bytes that cards give to other cards.
    sent: u64,
}

impl std::fmt::Debug for Programs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Programs").field("actions", &self.actions.len()).finish_non_exhaustive()
    }
}

impl Programs {
    /// Runs of operators that instructions of a slot do, exchanges aside, each once.
    pub(super) fn runs(&self, slot: usize) -> Vec<Range<usize>> {
        let launches = self.actions.iter().filter_map(|action| match action {
            Action::Launch { done, .. } => Some(done),
            Action::Exchange(_) => None,
        });
        let done = launches.flatten().flat_map(|(_, done)| done);
        let own = done.filter(|done| done.slot == slot && done.exchanged.is_none());
        let mut runs: Vec<Range<usize>> = own.map(|done| done.ops.clone()).collect();
        runs.dedup();
        runs
    }
}

/// What happens in a step.
enum Action {
    /// Instructions, from the workspace of a slot: how many do a thing, and what it is.
    Launch { slot: usize, loaded: Loaded, done: Vec<(usize, Vec<Done>)> },
    /// An exchange through the host.
    Exchange(Between),
}

/// What is written down while programs run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Watch {
    Nothing,
    /// When exchanges through the host end. Nothing waits for that.
    Exchanges,
    /// All exchanges, and every instruction by the device's clock. Devices that could work at the same time wait for each
    /// other.
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
    /// Whether a device did it by itself.
    pub(super) on_device: bool,
}

/// Where a program has the tables of a step.
fn tables_of(program: &[Op]) -> Option<Place> {
    program.iter().find_map(|op| match op {
        Op::Data { into, .. } => Some(*into),
        _ => None,
    })
}

/// Programs of one device's cards, each with its slot, for as many blocks as fit with the memory that they need.
struct Translated {
    cards: Vec<(usize, Parts)>,
    shared: u32,
    blocks: u32,
}

/// How many of these tasks fit in so many instructions, in whole rounds.
fn whole_rounds(tasks: &[Task], most: usize) -> usize {
    let (mut count, mut taken) = (0, 0);
    for (at, task) in tasks.iter().enumerate() {
        count += task.instructions.len();
        if count > most {
            break;
        }
        if task.instructions.last().is_none_or(|last| !last.is_joined()) {
            taken = at + 1;
        }
    }
    taken
}

impl Processors {
    /// A slot's program as instructions.
    fn parts(
        &mut self,
        slot: usize,
        program: &[Op],
        alone: bool,
        blocks: u32,
    ) -> Result<Parts, CudaError> {
        let work = self.slots[slot].work()?;
        let (counters, packed) = (work.counters(), work.packed());
        let device = &mut self.devices[self.slots[slot].device];
        let bases: Vec<u64> = self.slots[slot].buffers.iter().map(|of| of.base()).collect();
        let place = |place: Place| bases[place.buffer.0 as usize] + place.offset;
        let mut streams = device.streams(0)?;
        loop {
            let setting = Setting {
                address: &place,
                blocks,
                counters,
                counted: COUNTERS,
                packed,
                tile_rows: device.tile_rows(),
                streams,
            };
            let parts = translate(program, alone, &setting)?;
            let streamed = parts.parts.iter().any(|part| matches!(part, Part::Streamed(_)));
            if streamed && device.streams(parts.streamed)? < streams {
                streams = 0;
            } else {
                return Ok(parts);
            }
        }
    }

    /// The programs of a device's cards.
    fn translated(
        &mut self,
        device: usize,
        programs: &[Vec<Op>],
        groups: &[Range<usize>],
    ) -> Result<Translated, CudaError> {
        let own = (0..programs.len()).filter(|&slot| self.slots[slot].device == device);
        let own: Vec<usize> = own.collect();
        let mut blocks = self.devices[device].blocks(0)?;
        loop {
            let mut cards = Vec::with_capacity(own.len());
            for &slot in &own {
                let alone = groups.iter().any(|group| group.len() == 1 && group.start == slot);
                cards.push((slot, self.parts(slot, &programs[slot], alone, blocks)?));
            }
            let shared = cards.iter().map(|(_, parts)| parts.shared).max().unwrap_or(0);
            let fit = self.devices[device].blocks(shared)?;
            if fit >= blocks {
                return Ok(Translated { cards, shared, blocks });
            }
            blocks = fit;
        }
    }

    /// Makes programs ready. Nothing if they do not fit the workspaces.
    pub(super) fn ready(
        &mut self,
        programs: &[Vec<Op>],
        groups: &[Range<usize>],
    ) -> Result<Option<Programs>, CudaError> {
        let mut listed: Vec<Option<Listed>> = programs.iter().map(|_| None).collect();
        let mut sizes = Vec::with_capacity(self.devices.len());
        for device in 0..self.devices.len() {
            let Translated { cards, shared, blocks } = self.translated(device, programs, groups)?;
            let streamed = cards.iter().map(|(_, parts)| parts.streamed).max().unwrap_or(0);
            sizes.push((shared, blocks, streamed));
            for (slot, parts) in cards {
                listed[slot] = Some(Listed::new(device, parts));
            }
        }
        let slots = &self.slots;
        let address = |slot: usize, place: Place| {
            slots[slot].buffers[place.buffer.0 as usize].base() + place.offset
        };
        let entries = schedule(listed.into_iter().flatten().collect(), groups, &address)?;
        let (mut actions, mut sent) = (Vec::with_capacity(entries.len()), 0);
        for entry in entries {
            match entry {
                Entry::Launch { device, tasks } => {
                    let (shared, blocks, _) = sizes[device];
                    let Some(loaded) = self.loaded(device, tasks, shared, blocks)? else {
                        return Ok(None);
                    };
                    sent += loaded.iter().map(|(_, sent)| sent).sum::<u64>();
                    actions.extend(loaded.into_iter().map(|(action, _)| action));
                }
                Entry::Streamed { slot, instructions, done } => {
                    let own = &mut self.slots[slot];
                    let (_, _, shared) = sizes[own.device];
                    let device = &mut self.devices[own.device];
                    let loaded = device.load_streamed(own.work()?, &instructions, shared)?;
                    let Some(loaded) = loaded else { return Ok(None) };
                    let done = done.into_iter().map(|done| (1, vec![done])).collect();
                    actions.push(Action::Launch { slot, loaded, done });
                }
                Entry::Exchange(between) => {
                    sent += between.exchange.sent();
                    actions.push(Action::Exchange(between));
                }
            }
        }
        let tables = programs.iter().map(|program| tables_of(program)).collect();
        Ok(Some(Programs { actions, tables, sent }))
    }

    /// A device's list in the workspaces of its cards, in as many launches as a workspace has room to time, with the bytes
    /// that cards give each other in each. Nothing if there is no room.
    fn loaded(
        &mut self,
        device: usize,
        mut tasks: Vec<Task>,
        shared: u32,
        blocks: u32,
    ) -> Result<Option<Vec<(Action, u64)>>, CudaError> {
        let mut actions = Vec::new();
        while !tasks.is_empty() {
            let own = (0..self.slots.len()).filter(|&slot| self.slots[slot].device == device);
            let room = |slot: &usize| self.slots[*slot].work.as_ref().map(|work| work.room());
            let Some(slot) = own.max_by_key(room) else { return Ok(None) };
            let work = self.slots[slot].work()?;
            let count = whole_rounds(&tasks, work.timed());
            if count == 0 {
                let what = format!("{} instructions in a round", tasks[0].instructions.len());
                return Err(CudaError::Unsupported(what));
            }
            let rest = tasks.split_off(count);
            let instructions: Vec<Instruction> =
                tasks.iter().flat_map(|task| &task.instructions).copied().collect();
            let sent = tasks.iter().map(|task| task.sent).sum();
            let of = |task: Task| (task.instructions.len(), task.done);
            let done = std::mem::replace(&mut tasks, rest).into_iter().map(of).collect();
            if instructions.is_empty() {
                continue;
            }
            let loaded = self.devices[device].load(work, &instructions, shared, blocks)?;
            let Some(loaded) = loaded else { return Ok(None) };
            actions.push((Action::Launch { slot, loaded, done }, sent));
        }
        Ok(Some(actions))
    }

    /// Runs programs, captures what is wanted, and writes down what is asked for. Returns the bytes that cards gave to other
    /// cards.
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
        let (begun, mut spans) = (Instant::now(), Vec::new());
        // Pieces that each device copies before it does anything else.
        let mut rest: Vec<Vec<Piece>> = self.devices.iter().map(|_| Vec::new()).collect();
        for action in &program.actions {
            match action {
                Action::Launch { slot, loaded, done } => {
                    let own = std::mem::take(&mut rest[self.slots[*slot].device]);
                    let launch = (loaded, &done[..]);
                    let launched = self.launched(*slot, launch, watch, begun, (&taken, own));
                    let (own, pieces) = self.of_card(*slot, launched)?;
                    spans.extend(own);
                    rest[self.slots[*slot].device] = pieces;
                }
                Action::Exchange(between) => {
                    self.copy_all(&mut rest)?;
                    let done = between.done();
                    self.capture(&taken, &done, false)?;
                    let start = begun.elapsed().as_secs_f64();
                    let exchanged = between.exchange.through_host(&between.slots, self);
                    self.of_card(between.slots[0], exchanged)?;
                    let end = begun.elapsed().as_secs_f64();
                    self.capture(&taken, &done, true)?;
                    let own = done.into_iter().filter(|_| watch != Watch::Nothing);
                    spans.extend(own.map(|done| Span::new(done, start, end, false)));
                }
            }
        }
        self.fetch(&taken, captures, &mut rest)?;
        Ok((program.sent, spans))
    }

    /// Copies pieces, and goes through instructions. Returns what each took, if that is asked for, and the pieces that are to
    /// be copied afterwards.
    fn launched(
        &mut self,
        slot: usize,
        (loaded, done): (&Loaded, &[(usize, Vec<Done>)]),
        watch: Watch,
        begun: Instant,
        (taken, before): (&[Taken], Vec<Piece>),
    ) -> Result<(Vec<Span>, Vec<Piece>), CudaError> {
        let own = &mut self.slots[slot];
        let device = &mut self.devices[own.device];
        let work = own.work()?;
        device.gather(&before)?;
        let is_timed = watch == Watch::Instructions;
        if is_timed {
            device.synchronize()?;
        }
        let (mut start, mut seconds) = (begun.elapsed().as_secs_f64(), Vec::new());
        let mut go = |device: &mut DeviceContext, some: Range<u32>| {
            match is_timed {
                true => seconds.extend(device.run_timed(work, loaded, some)?),
                false => device.run_some(work, loaded, some)?,
            }
            Ok(())
        };
        let rest = captures::run(device, loaded, captures::wanted(taken, done), &mut go)?;
        let (mut seconds, mut spans) = (seconds.into_iter(), Vec::new());
        for (count, done) in done.iter().filter(|_| is_timed) {
            let end = start + seconds.by_ref().take(*count).sum::<f64>();
            spans.extend(done.iter().map(|done| Span::new(done.clone(), start, end, true)));
            start = end;
        }
        Ok((spans, rest))
    }
}

impl Span {
    fn new(done: Done, start: f64, end: f64, on_device: bool) -> Span {
        let Done { slot, ops, exchanged } = done;
        Span { slot, ops, start, end, exchanged, on_device }
    }
}

impl Memories for Processors {
    fn get(&mut self, slot: usize, place: Place, out: &mut [u8]) -> Result<(), CudaError> {
        Processors::get(self, slot, place, out)
    }

    fn put(&mut self, slot: usize, place: Place, bytes: &[u8]) -> Result<(), CudaError> {
        Processors::put(self, slot, place, bytes)
    }
}
