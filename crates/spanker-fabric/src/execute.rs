// SPDX-License-Identifier: Apache-2.0
//! Runs one rank's part of a schedule over any fabric.

use std::marker::PhantomData;
use std::ops::Range;
use std::time::Instant;

use spanker_collective::{
    Buffer, Collective, Incoming, Local, Rank, ReduceOp, Schedule, Span, Step, Transfer, chunk,
};
use spanker_reduce::{Element, Team, Threads, divide, reduce};

use crate::letter::Pieces;
use crate::rope::Rope;
use crate::{Call, Draft, Fabric, FabricError, Letter, Pool, Registered};

/// A rank's place to work in. Kept between calls, it saves them the allocation of messages.
#[derive(Debug)]
pub struct Workspace<T> {
    data: Rope,
    scratch: Rope,
    pool: Pool,
    /// Folds run on the rank's own thread.
    solo: Team,
    element: PhantomData<T>,
}

impl<T: Element> Workspace<T> {
    /// An empty workspace.
    #[must_use]
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Workspace {
            data: Rope::default(),
            scratch: Rope::default(),
            pool: Pool::default(),
            solo: Team::new(1),
            element: PhantomData,
        }
    }
}

/// Runs this rank's part of `schedule` on `data`, which has [`Schedule::data_len`] elements.
///
/// Every rank of the group calls this with its own `fabric`, `workspace` and `data` and with equal
/// other arguments. For a collective that does not reduce, `op` is ignored. An average is a sum whose
/// complete value is divided: for 16-bit floats that sum has been rounded to 16 bits, unlike in the
/// collectives over host buffers.
///
/// ```
/// use std::time::{Duration, Instant};
/// use spanker_fabric::{Workspace, execute, inproc};
/// use spanker_collective::{Algorithm, Collective, ReduceOp, schedule};
///
/// let ring = schedule(Collective::AllReduce, Algorithm::Ring, 3, 2)?;
/// let sums: Vec<[f32; 2]> = std::thread::scope(|scope| {
///     let ranks: Vec<_> = inproc::group(3)
///         .into_iter()
///         .enumerate()
///         .map(|(rank, mut fabric)| {
///             let ring = &ring;
///             scope.spawn(move || {
///                 let mut data = [rank as f32, 1.0];
///                 let deadline = Instant::now() + Duration::from_secs(10);
///                 let mut workspace = Workspace::new();
///                 execute(&mut fabric, ring, &mut workspace, &mut data, ReduceOp::Sum, deadline)
///                     .map(|()| data)
///             })
///         })
///         .collect();
///     ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect()
/// });
/// assert_eq!(sums, [[3.0, 3.0]; 3]);
/// # Ok::<(), spanker_collective::CollectiveError>(())
/// ```
///
/// Elements of `data` outside the rank's result keep their value.
///
/// # Errors
/// The group's first fault, the same on every rank that is left, by `deadline` at the latest. `data`
/// is then as it was before the call.
///
/// # Panics
/// If a step reaches outside the schedule's buffers: schedules from elsewhere go through
/// [`spanker_collective::verify`] first.
pub fn execute<T: Element>(
    fabric: &mut dyn Fabric,
    schedule: &Schedule,
    workspace: &mut Workspace<T>,
    data: &mut [T],
    op: ReduceOp,
    deadline: Instant,
) -> Result<(), FabricError> {
    let base = Base { elements: data, letter: None };
    let result = run(fabric, schedule, workspace, base, op, deadline, None)?;
    for (range, values) in workspace.data.changes(&result) {
        data[range].copy_from_slice(values);
    }
    finish(schedule, workspace, &mut data[result], op);
    Ok(())
}

/// As [`execute`], on a buffer that peers can read where it lies: what is sent is not copied first. What comes last
/// is received where the result will be, if the fabric can do so.
///
/// # Errors
/// As [`execute`].
///
/// # Panics
/// As [`execute`].
pub fn execute_registered<T: Element>(
    fabric: &mut dyn Fabric,
    schedule: &Schedule,
    workspace: &mut Workspace<T>,
    buffer: &mut Registered<T>,
    op: ReduceOp,
    deadline: Instant,
) -> Result<(), FabricError> {
    let mut landing = Landing::new(fabric, schedule, buffer);
    let letter = buffer.letter();
    let base = Base { elements: bytemuck::cast_slice(letter.bytes()), letter: Some(&letter) };
    let result = run(fabric, schedule, workspace, base, op, deadline, landing.as_mut())?;
    drop(letter);
    match landing {
        Some(landing) => buffer.turn(landing.pieces, &mut workspace.data),
        None => buffer.update(&workspace.data, &result),
    }
    if op == ReduceOp::Avg {
        finish(schedule, workspace, &mut buffer.as_mut_slice()[result], op);
    } else {
        // The slice is not asked for: a peer may still be reading, and would be left a copy.
        finish(schedule, workspace, &mut [], op);
    }
    Ok(())
}

/// Lets go of what peers sent, and turns sums into averages.
fn finish<T: Element>(
    schedule: &Schedule,
    workspace: &mut Workspace<T>,
    result: &mut [T],
    op: ReduceOp,
) {
    workspace.data.clear();
    workspace.scratch.clear();
    if op == ReduceOp::Avg && schedule.collective().reduces() {
        divide(result, schedule.ranks());
    }
}

/// Runs the steps and commits them. Returns where the rank's result is; `workspace.data` has it.
fn run<T: Element>(
    fabric: &mut dyn Fabric,
    schedule: &Schedule,
    workspace: &mut Workspace<T>,
    base: Base<'_, T>,
    op: ReduceOp,
    deadline: Instant,
    mut landing: Option<&mut Landing>,
) -> Result<Range<usize>, FabricError> {
    let rank = fabric.rank();
    // Collectives that only move elements have no operation to disagree on.
    let op = if schedule.collective().reduces() { op } else { ReduceOp::Sum };
    if let Some(reason) = objection::<T>(fabric, schedule, base.elements, op) {
        return Err(fabric.abort(FabricError::Refused { rank, reason }));
    }
    let call = Call {
        collective: schedule.collective(),
        algorithm: schedule.algorithm(),
        elements: schedule.elements(),
        dtype: T::DTYPE,
        op,
        plan: schedule.fingerprint(),
    };
    // A call that failed has left its letters.
    workspace.data.clear();
    workspace.scratch.clear();
    let step_op = if op == ReduceOp::Avg { ReduceOp::Sum } else { op };
    let mut memory = Memory { base, workspace, op: step_op };
    let program = schedule.program(rank);
    for (at, step) in program.iter().enumerate() {
        if let Some(landing) = landing.as_deref_mut() {
            landing.is_last = at + 1 == program.len();
        }
        run_step(fabric, step, &call, &mut memory, deadline, landing.as_deref_mut())?;
    }
    // Peers may write to their buffers once the call is committed, and do so in place if nobody holds
    // letters of them any more.
    workspace.scratch.clear();
    fabric.commit(&call, deadline)?;
    Ok(result_range(schedule, rank))
}

/// What is wrong with the arguments of a call, in words.
fn objection<T: Element>(
    fabric: &dyn Fabric,
    schedule: &Schedule,
    data: &[T],
    op: ReduceOp,
) -> Option<String> {
    if schedule.ranks() != fabric.ranks() {
        let (planned, present) = (schedule.ranks(), fabric.ranks());
        return Some(format!("the schedule is for {planned} ranks, the group has {present}"));
    }
    if data.len() != schedule.data_len() {
        let (found, expected) = (data.len(), schedule.data_len());
        return Some(format!("the buffer has {found} elements, the schedule {expected}"));
    }
    if schedule.collective().reduces() && !op.is_defined_for(T::DTYPE) {
        return Some(format!("operation {op} is not defined for {}", T::DTYPE));
    }
    None
}

/// The other side of the caller's buffer while the result takes shape in it. What the last step receives is written
/// where it belongs, and before that its place holds what steps receive to fold. What this rank folds for itself
/// is written where it belongs too.
struct Landing {
    pieces: Pieces,
    /// The pieces that the last step receives, in its order.
    places: Vec<usize>,
    is_last: bool,
}

impl Landing {
    /// Nothing where there is nothing to be gained, or where more remains to be done with what comes last.
    fn new<T: Element>(
        fabric: &dyn Fabric,
        schedule: &Schedule,
        buffer: &mut Registered<T>,
    ) -> Option<Landing> {
        let (rank, len, size) = (fabric.rank(), schedule.data_len(), size_of::<T>());
        let fits = rank < schedule.ranks() && buffer.as_slice().len() == len;
        if !fits || result_range(schedule, rank) != (0..len) {
            return None;
        }
        let step = schedule.program(rank).last().filter(|step| step.locals.is_empty())?;
        let mut places = Vec::with_capacity(step.transfers.len());
        for transfer in &step.transfers {
            let Transfer::Recv { span, fold, .. } = *transfer else { continue };
            let is_final = fold.is_none() && span.buffer == Buffer::Data;
            if !is_final || span.start + span.len > len || !fabric.lands(span.len * size) {
                return None;
            }
            places.push(span.start..span.start + span.len);
        }
        let mut ends: Vec<usize> =
            places.iter().flat_map(|place| [place.start, place.end]).collect();
        ends.push(len);
        ends.sort_unstable();
        ends.dedup();
        let ends = ends.strip_prefix(&[0]).unwrap_or(&ends);
        if places.is_empty() {
            return None;
        }
        let pieces = buffer.pieces(ends)?;
        // Places that overlap have no pieces of their own.
        let piece = |place: &Range<usize>| pieces.of(&(place.start * size..place.end * size));
        let places = places.iter().map(piece).collect::<Option<Vec<usize>>>()?;
        Some(Landing { pieces, places, is_last: false })
    }

    /// A draft for `span`, which is the receive of this index of its step, and the piece that it is in.
    fn receive<T: Element>(
        &mut self,
        fabric: &dyn Fabric,
        index: usize,
        span: Span,
        fold: Option<Incoming>,
    ) -> Option<(usize, Draft)> {
        let bytes = span.len * size_of::<T>();
        if self.is_last {
            let piece = *self.places.get(index)?;
            return self.pieces.take(piece, bytes).map(|draft| (piece, draft));
        }
        if fold.is_some() || span.buffer != Buffer::Scratch || !fabric.lands(bytes) {
            return None;
        }
        let Landing { pieces, places, .. } = self;
        places.iter().find_map(|&piece| Some((piece, pieces.take(piece, bytes)?)))
    }

    /// A draft for the fold into `span`, if that is a piece, and which.
    fn fold<T: Element>(&mut self, span: Span) -> Option<(usize, Draft)> {
        let (start, bytes) = (span.start * size_of::<T>(), span.len * size_of::<T>());
        let piece =
            self.pieces.of(&(start..start + bytes)).filter(|_| span.buffer == Buffer::Data)?;
        self.pieces.take(piece, bytes).map(|draft| (piece, draft))
    }
}

fn run_step<T: Element>(
    fabric: &mut dyn Fabric,
    step: &Step,
    call: &Call,
    memory: &mut Memory<'_, T>,
    deadline: Instant,
    mut landing: Option<&mut Landing>,
) -> Result<(), FabricError> {
    if !step.transfers.is_empty() {
        exchange(fabric, step, call, memory, deadline, landing.as_deref_mut())?;
    }
    for local in &step.locals {
        match local {
            Local::Copy { from, into } => {
                let letter = memory.letter(*from);
                memory.store(*into, letter, None);
            }
            Local::Fold { sources, into } => {
                let operands: Vec<Operand<'_>> =
                    sources.iter().map(|&span| Operand::Local(span)).collect();
                let place = landing.as_deref_mut().and_then(|landing| landing.fold::<T>(*into));
                let (piece, draft) = place.unzip();
                let letter = memory.folded(&operands, into.len, draft);
                if let Some((landing, piece)) = landing.as_deref_mut().zip(piece) {
                    landing.pieces.put(piece, &letter);
                }
                memory.store(*into, letter, None);
            }
        }
    }
    Ok(())
}

/// The messages of a step.
fn exchange<T: Element>(
    fabric: &mut dyn Fabric,
    step: &Step,
    call: &Call,
    memory: &mut Memory<'_, T>,
    deadline: Instant,
    mut landing: Option<&mut Landing>,
) -> Result<(), FabricError> {
    let sends = memory.sends(step);
    if landing.as_ref().is_some_and(|landing| landing.is_last) {
        // What lies here has been folded, and its memory is where the result belongs.
        memory.workspace.scratch.clear();
    }
    let mut receives = Vec::with_capacity(step.transfers.len());
    let mut places = Vec::with_capacity(step.transfers.len());
    for transfer in &step.transfers {
        let Transfer::Recv { from, span, fold } = *transfer else { continue };
        let place = landing
            .as_deref_mut()
            .and_then(|landing| landing.receive::<T>(fabric, places.len(), span, fold));
        let (piece, draft) = place.unzip();
        receives.push((from, draft));
        places.push((from, span, fold, piece));
    }
    let letters = if places.iter().any(|(.., piece)| piece.is_some()) {
        fabric.exchange_into(call, &sends, receives, deadline)?
    } else {
        let from: Vec<Rank> = receives.iter().map(|(from, _)| *from).collect();
        fabric.exchange(call, &sends, &from, deadline)?
    };
    for ((peer, span, fold, piece), letter) in places.into_iter().zip(letters) {
        let (expected, actual) = (span.len * size_of::<T>(), letter.bytes().len());
        if expected != actual {
            let rank = fabric.rank();
            return Err(fabric.abort(FabricError::Length { rank, peer, expected, actual }));
        }
        if let Some((landing, piece)) = landing.as_deref_mut().zip(piece) {
            landing.pieces.put(piece, &letter);
        }
        memory.store(span, letter, fold);
    }
    Ok(())
}

/// Where rank `rank` has its result.
pub(crate) fn result_range(schedule: &Schedule, rank: Rank) -> Range<usize> {
    let (ranks, elements) = (schedule.ranks(), schedule.elements());
    match schedule.collective() {
        Collective::AllReduce | Collective::AllGather | Collective::Broadcast { .. } => 0..elements,
        Collective::ReduceScatter | Collective::Scatter { .. } => chunk(elements, ranks, rank),
        Collective::Reduce { root } | Collective::Gather { root } if root == rank => 0..elements,
        Collective::AllToAll => 0..ranks * chunk(elements, ranks, rank).len(),
        _ => 0..0,
    }
}

/// The caller's buffer: its elements, and a letter of them all if peers may read them in place.
struct Base<'a, T> {
    elements: &'a [T],
    letter: Option<&'a Letter>,
}

/// The caller's buffer and the scratch, as the steps of a call see them.
struct Memory<'a, T> {
    base: Base<'a, T>,
    workspace: &'a mut Workspace<T>,
    op: ReduceOp,
}

impl<T: Element> Memory<'_, T> {
    /// A letter with the elements of `span`, without a copy where that can be.
    fn letter(&mut self, span: Span) -> Letter {
        let Workspace { data, scratch, pool, .. } = &mut *self.workspace;
        let range = span.start..span.start + span.len;
        let size = size_of::<T>();
        let (rope, base) = match span.buffer {
            Buffer::Data => (data, &self.base),
            Buffer::Scratch => (scratch, &Base { elements: &[], letter: None }),
        };
        if let Some(letter) = rope.letter::<T>(&range) {
            return letter;
        }
        match base.letter {
            Some(letter) if rope.is_bare(&range) => {
                letter.part(range.start * size..range.end * size)
            }
            _ => pool.write(range.len() * size, |out| {
                rope.read(base.elements, range, bytemuck::cast_slice_mut(out));
            }),
        }
    }

    /// What a step sends. Several sends of the same elements share one letter.
    fn sends(&mut self, step: &Step) -> Vec<(Rank, Letter)> {
        let mut sends: Vec<(Rank, Letter)> = Vec::with_capacity(step.transfers.len());
        let mut last: Option<Span> = None;
        for transfer in &step.transfers {
            let Transfer::Send { to, span } = *transfer else { continue };
            let letter = match sends.last().filter(|_| last == Some(span)) {
                Some((_, same)) => same.clone(),
                None => self.letter(span),
            };
            sends.push((to, letter));
            last = Some(span);
        }
        sends
    }

    /// Takes in what was received or computed for `span`.
    fn store(&mut self, span: Span, letter: Letter, fold: Option<Incoming>) {
        let letter = match fold {
            None => letter,
            Some(order) => {
                let (local, incoming) = (Operand::Local(span), Operand::Incoming(&letter));
                match order {
                    Incoming::First => self.folded(&[incoming, local], span.len, None),
                    Incoming::Second => self.folded(&[local, incoming], span.len, None),
                }
            }
        };
        let range = span.start..span.start + span.len;
        match span.buffer {
            Buffer::Data => self.workspace.data.lay::<T>(range, letter),
            Buffer::Scratch => self.workspace.scratch.lay::<T>(range, letter),
        }
    }

    /// The fold of `operands`, in order, written to `draft` if there is one.
    fn folded(&mut self, operands: &[Operand<'_>], len: usize, draft: Option<Draft>) -> Letter {
        // Operands that lie in several pieces are joined first.
        let joined: Vec<Option<Letter>> = operands
            .iter()
            .map(|operand| match operand {
                Operand::Local(span) if self.slice(*span).is_none() => Some(self.letter(*span)),
                _ => None,
            })
            .collect();
        let Workspace { data, scratch, pool, solo, .. } = &mut *self.workspace;
        let view = View { base: self.base.elements, data, scratch };
        let slices: Vec<&[T]> = operands
            .iter()
            .zip(&joined)
            .map(|(operand, joined)| match (operand, joined) {
                (_, Some(letter)) => bytemuck::cast_slice(letter.bytes()),
                (Operand::Incoming(letter), None) => bytemuck::cast_slice(letter.bytes()),
                (Operand::Local(span), None) => view.slice(*span).expect("it is in one piece"),
            })
            .collect();
        let op = self.op;
        let fill = |out: &mut [u8]| {
            let out = bytemuck::cast_slice_mut(out);
            reduce(solo, Threads::Exactly(1), &slices, out, op)
                .expect("operation and lengths were checked");
        };
        match draft {
            None => pool.write(len * size_of::<T>(), fill),
            Some(mut draft) => {
                fill(draft.bytes_mut());
                draft.seal()
            }
        }
    }

    fn slice(&self, span: Span) -> Option<&[T]> {
        let Workspace { data, scratch, .. } = &*self.workspace;
        View { base: self.base.elements, data, scratch }.slice(span)
    }
}

/// What a fold takes: elements of this rank, or a letter.
enum Operand<'a> {
    Local(Span),
    Incoming(&'a Letter),
}

/// Both buffers, for reading.
struct View<'a, T> {
    base: &'a [T],
    data: &'a Rope,
    scratch: &'a Rope,
}

impl<'a, T: Element> View<'a, T> {
    fn slice(&self, span: Span) -> Option<&'a [T]> {
        let range = span.start..span.start + span.len;
        match span.buffer {
            Buffer::Data => self.data.slice(self.base, range),
            Buffer::Scratch => self.scratch.slice(&[], range),
        }
    }
}
