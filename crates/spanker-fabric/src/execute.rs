// SPDX-License-Identifier: Apache-2.0
//! Runs one rank's part of a schedule over any fabric.

use std::marker::PhantomData;
use std::ops::Range;
use std::time::Instant;

use spanker_collective::{
    Buffer, Collective, Incoming, Local, Rank, ReduceOp, Schedule, Span, Step, Transfer, chunk,
};
use spanker_reduce::{Element, Team, Threads, divide, reduce};

use crate::in_place::InPlaceResult;
use crate::overlay::Overlay;
use crate::{Call, Fabric, FabricError, Message, Pool, ReceiveBuffer, Registered};

/// A rank's working memory. Reused between calls, it saves them the allocation of messages.
#[derive(Debug)]
pub struct Workspace<T> {
    data: Overlay,
    scratch: Overlay,
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
            data: Overlay::default(),
            scratch: Overlay::default(),
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
    let base = Base { elements: data, message: None };
    let result = run(fabric, schedule, workspace, base, op, deadline, None)?;
    for (range, values) in workspace.data.changes(&result) {
        data[range].copy_from_slice(values);
    }
    finish(schedule, workspace, &mut data[result], op);
    Ok(())
}

/// As [`execute`], on a buffer that peers can read in place: what is sent is not copied first. The last step receives
/// into the result itself, if the fabric can do so.
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
    let mut in_place = InPlaceResult::new(fabric, schedule, buffer);
    let message = buffer.message();
    let base = Base { elements: bytemuck::cast_slice(message.bytes()), message: Some(&message) };
    let result = run(fabric, schedule, workspace, base, op, deadline, in_place.as_mut())?;
    drop(message);
    match in_place {
        Some(in_place) => in_place.finish(buffer, &mut workspace.data),
        None => buffer.update(&workspace.data, &result),
    }
    if op == ReduceOp::Avg {
        finish(schedule, workspace, &mut buffer.as_mut_slice()[result], op);
    } else {
        // `as_mut_slice` is not called: it would copy the buffer if a peer is still reading it.
        finish(schedule, workspace, &mut [], op);
    }
    Ok(())
}

/// Drops the messages of peers, and turns sums into averages.
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
    mut in_place: Option<&mut InPlaceResult>,
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
    // A call that failed has left its messages.
    workspace.data.clear();
    workspace.scratch.clear();
    let step_op = if op == ReduceOp::Avg { ReduceOp::Sum } else { op };
    let mut memory = Memory { base, workspace, op: step_op };
    let program = schedule.program(rank);
    for (at, step) in program.iter().enumerate() {
        if let Some(in_place) = in_place.as_deref_mut() {
            in_place.is_last_step = at + 1 == program.len();
        }
        run_step(fabric, step, &call, &mut memory, deadline, in_place.as_deref_mut())?;
    }
    // Once the call is committed, peers write to their buffers in place, provided that nobody has messages of them
    // any more.
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

fn run_step<T: Element>(
    fabric: &mut dyn Fabric,
    step: &Step,
    call: &Call,
    memory: &mut Memory<'_, T>,
    deadline: Instant,
    mut in_place: Option<&mut InPlaceResult>,
) -> Result<(), FabricError> {
    if !step.transfers.is_empty() {
        exchange(fabric, step, call, memory, deadline, in_place.as_deref_mut())?;
    }
    for local in &step.locals {
        match local {
            Local::Copy { from, into } => {
                let message = memory.message(*from);
                memory.store(*into, message, None);
            }
            Local::Fold { sources, into } => {
                let operands: Vec<Operand<'_>> =
                    sources.iter().map(|&span| Operand::Local(span)).collect();
                let target = in_place.as_deref_mut().and_then(|result| result.fold::<T>(*into));
                let (part, buffer) = target.unzip();
                let message = memory.folded(&operands, into.len, buffer);
                if let Some((result, part)) = in_place.as_deref_mut().zip(part) {
                    result.give_back(part, &message);
                }
                memory.store(*into, message, None);
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
    mut in_place: Option<&mut InPlaceResult>,
) -> Result<(), FabricError> {
    let sends = memory.sends(step);
    if in_place.as_ref().is_some_and(|result| result.is_last_step) {
        // These messages have been folded, and their memory is needed for the result.
        memory.workspace.scratch.clear();
    }
    let mut receives = Vec::with_capacity(step.transfers.len());
    let mut targets = Vec::with_capacity(step.transfers.len());
    for transfer in &step.transfers {
        let Transfer::Recv { from, span, fold } = *transfer else { continue };
        let target = in_place
            .as_deref_mut()
            .and_then(|result| result.receive::<T>(fabric, targets.len(), span, fold));
        let (part, buffer) = target.unzip();
        receives.push((from, buffer));
        targets.push((from, span, fold, part));
    }
    let messages = if targets.iter().any(|(.., part)| part.is_some()) {
        fabric.exchange_into(call, &sends, receives, deadline)?
    } else {
        let from: Vec<Rank> = receives.iter().map(|(from, _)| *from).collect();
        fabric.exchange(call, &sends, &from, deadline)?
    };
    for ((peer, span, fold, part), message) in targets.into_iter().zip(messages) {
        let (expected, actual) = (span.len * size_of::<T>(), message.bytes().len());
        if expected != actual {
            let rank = fabric.rank();
            return Err(fabric.abort(FabricError::Length { rank, peer, expected, actual }));
        }
        if let Some((result, part)) = in_place.as_deref_mut().zip(part) {
            result.give_back(part, &message);
        }
        memory.store(span, message, fold);
    }
    Ok(())
}

/// The elements of rank `rank`'s buffer that are its result.
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

/// The caller's buffer: its elements, and a message of them all if peers may read them in place.
struct Base<'a, T> {
    elements: &'a [T],
    message: Option<&'a Message>,
}

/// The caller's buffer and the scratch, as the steps of a call see them.
struct Memory<'a, T> {
    base: Base<'a, T>,
    workspace: &'a mut Workspace<T>,
    op: ReduceOp,
}

impl<T: Element> Memory<'_, T> {
    /// A message with the elements of `span`, without a copy where possible.
    fn message(&mut self, span: Span) -> Message {
        let Workspace { data, scratch, pool, .. } = &mut *self.workspace;
        let range = span.start..span.start + span.len;
        let size = size_of::<T>();
        let (overlay, base) = match span.buffer {
            Buffer::Data => (data, &self.base),
            Buffer::Scratch => (scratch, &Base { elements: &[], message: None }),
        };
        if let Some(message) = overlay.message::<T>(&range) {
            return message;
        }
        match base.message {
            Some(message) if overlay.is_bare(&range) => {
                message.part(range.start * size..range.end * size)
            }
            _ => pool.write(range.len() * size, |out| {
                overlay.read(base.elements, range, bytemuck::cast_slice_mut(out));
            }),
        }
    }

    /// What a step sends. Several sends of the same elements share one message.
    fn sends(&mut self, step: &Step) -> Vec<(Rank, Message)> {
        let mut sends: Vec<(Rank, Message)> = Vec::with_capacity(step.transfers.len());
        let mut last: Option<Span> = None;
        for transfer in &step.transfers {
            let Transfer::Send { to, span } = *transfer else { continue };
            let message = match sends.last().filter(|_| last == Some(span)) {
                Some((_, same)) => same.clone(),
                None => self.message(span),
            };
            sends.push((to, message));
            last = Some(span);
        }
        sends
    }

    /// Stores what was received or computed for `span`.
    fn store(&mut self, span: Span, message: Message, fold: Option<Incoming>) {
        let message = match fold {
            None => message,
            Some(order) => {
                let (local, incoming) = (Operand::Local(span), Operand::Incoming(&message));
                match order {
                    Incoming::First => self.folded(&[incoming, local], span.len, None),
                    Incoming::Second => self.folded(&[local, incoming], span.len, None),
                }
            }
        };
        let range = span.start..span.start + span.len;
        match span.buffer {
            Buffer::Data => self.workspace.data.lay::<T>(range, message),
            Buffer::Scratch => self.workspace.scratch.lay::<T>(range, message),
        }
    }

    /// The fold of `operands`, in order, written to `buffer` if there is one.
    fn folded(
        &mut self,
        operands: &[Operand<'_>],
        len: usize,
        buffer: Option<ReceiveBuffer>,
    ) -> Message {
        // Operands that consist of several parts are joined first.
        let joined: Vec<Option<Message>> = operands
            .iter()
            .map(|operand| match operand {
                Operand::Local(span) if self.slice(*span).is_none() => Some(self.message(*span)),
                _ => None,
            })
            .collect();
        let Workspace { data, scratch, pool, solo, .. } = &mut *self.workspace;
        let view = View { base: self.base.elements, data, scratch };
        let slices: Vec<&[T]> = operands
            .iter()
            .zip(&joined)
            .map(|(operand, joined)| match (operand, joined) {
                (_, Some(message)) => bytemuck::cast_slice(message.bytes()),
                (Operand::Incoming(message), None) => bytemuck::cast_slice(message.bytes()),
                (Operand::Local(span), None) => {
                    view.slice(*span).expect("operands of several parts were joined")
                }
            })
            .collect();
        let op = self.op;
        let fill = |out: &mut [u8]| {
            let out = bytemuck::cast_slice_mut(out);
            reduce(solo, Threads::Exactly(1), &slices, out, op)
                .expect("operation and lengths were checked");
        };
        match buffer {
            None => pool.write(len * size_of::<T>(), fill),
            Some(mut buffer) => {
                fill(buffer.bytes_mut());
                buffer.freeze()
            }
        }
    }

    fn slice(&self, span: Span) -> Option<&[T]> {
        let Workspace { data, scratch, .. } = &*self.workspace;
        View { base: self.base.elements, data, scratch }.slice(span)
    }
}

/// An operand of a fold: elements of this rank, or a message.
enum Operand<'a> {
    Local(Span),
    Incoming(&'a Message),
}

/// Both buffers, for reading.
struct View<'a, T> {
    base: &'a [T],
    data: &'a Overlay,
    scratch: &'a Overlay,
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
