// SPDX-License-Identifier: Apache-2.0
//! Collectives over buffers in one address space: no messages, each buffer read once and written once.
//!
//! This checks shapes, turns the buffers into pointers and deals chunks to the team. The arithmetic is
//! in `kernel.rs`.

use std::ops::Range;

use spanker_collective::{DType, ReduceOp, chunk};

use crate::kernel::{Kernel, read_modify_write};
use crate::{Element, ReduceError, Team, Threads};

/// Below this many bytes over all cards `Threads::Auto` uses one thread: sending work to another core
/// and back costs as much as it saves.
const AUTO_BYTES: usize = 192 * 1024;

/// What one unit of work covers over all cards: small enough to share out, large enough that claiming
/// it does not show.
const UNIT_BYTES: usize = 128 * 1024;

/// Up to this many cards a call allocates nothing.
const INLINE_CARDS: usize = 64;

/// Reduces the buffers of all cards and writes the result to each of them.
///
/// The bits are those of the serial fold in card order, whatever the number of threads. Up to 64 cards
/// nothing is allocated.
///
/// ```
/// use spanker_collective::ReduceOp;
/// use spanker_reduce::{Team, Threads, all_reduce};
///
/// let (mut a, mut b) = ([1.0f32, 2.0], [10.0, 20.0]);
/// all_reduce(Team::global(), Threads::Auto, &mut [&mut a[..], &mut b[..]], ReduceOp::Sum)?;
/// assert_eq!((a, b), ([11.0, 22.0], [11.0, 22.0]));
/// # Ok::<(), spanker_reduce::ReduceError>(())
/// ```
///
/// # Errors
/// [`ReduceError::Length`] names the first card whose length differs from card 0's,
/// [`ReduceError::Undefined`] an operation that the type does not have. Nothing has changed then.
pub fn all_reduce<T: Element, B: AsMut<[T]>>(
    team: &Team,
    threads: Threads,
    buffers: &mut [B],
    op: ReduceOp,
) -> Result<(), ReduceError> {
    let kernel = kernel_for::<T>(op, buffers.len())?;
    let (cards, len) = in_place(buffers)?;
    let cards = cards.as_slice();
    // SAFETY: each buffer is `len` long and borrowed mutably for this call.
    unsafe { run(team, threads, kernel, cards, cards, 0..len) };
    Ok(())
}

/// Reduces the buffers of all cards into `output`.
///
/// # Errors
/// As [`all_reduce`]; the output counts as one card more.
pub fn reduce<T: Element, A: AsRef<[T]>>(
    team: &Team,
    threads: Threads,
    inputs: &[A],
    output: &mut [T],
    op: ReduceOp,
) -> Result<(), ReduceError> {
    let kernel = kernel_for::<T>(op, inputs.len())?;
    let (sources, len) = read_only(inputs)?;
    check(inputs.len(), len, output.len())?;
    // SAFETY: inputs and output are `len` long and borrowed for this call.
    unsafe { run(team, threads, kernel, sources.as_slice(), &[output.as_mut_ptr()], 0..len) };
    Ok(())
}

/// Folds `other` into `into`: `into = into op other`, or `into = other op into` if `other_first`.
///
/// ```
/// use spanker_collective::ReduceOp;
/// use spanker_reduce::fold;
/// let mut into = [1u32, 7];
/// fold(&mut into, &[4, 1], ReduceOp::Max, false)?;
/// assert_eq!(into, [4, 7]);
/// # Ok::<(), spanker_reduce::ReduceError>(())
/// ```
///
/// # Errors
/// As [`all_reduce`]; `other` counts as card 1.
pub fn fold<T: Element>(
    into: &mut [T],
    other: &[T],
    op: ReduceOp,
    other_first: bool,
) -> Result<(), ReduceError> {
    let kernel = kernel_for::<T>(op, 2)?;
    check(1, into.len(), other.len())?;
    let (ours, theirs) = (into.as_mut_ptr(), other.as_ptr().cast_mut());
    let sources = if other_first { [theirs, ours] } else { [ours, theirs] };
    // SAFETY: both are `len` long and borrowed for this call, and only the one that is borrowed mutably is
    // written. A kernel reads a block of all sources before it writes it, as it does for `all_reduce`.
    unsafe { kernel(&sources, &[ours], 0..into.len()) };
    Ok(())
}

/// Reduces the buffers of all cards; card `r` gets chunk `r` of the result.
///
/// # Errors
/// As [`all_reduce`]; output `r` must have the length of [`chunk`]`(len, cards, r)`.
pub fn reduce_scatter<T: Element, A: AsRef<[T]>, B: AsMut<[T]>>(
    team: &Team,
    threads: Threads,
    inputs: &[A],
    outputs: &mut [B],
    op: ReduceOp,
) -> Result<(), ReduceError> {
    let count = inputs.len();
    let kernel = kernel_for::<T>(op, count)?;
    let (sources, len) = read_only(inputs)?;
    check_counts(count, outputs.len())?;
    let mut outputs = writable(outputs, |card| chunk(len, count, card).len())?;
    for (card, output) in outputs.iter_mut().enumerate() {
        let range = chunk(len, count, card);
        let mut parts = Pointers::new();
        for source in sources.as_slice() {
            // SAFETY: the chunk begins within the input or at its end.
            parts.push(unsafe { source.add(range.start) });
        }
        let dest = output.as_mut_ptr();
        // SAFETY: each input has the chunk's elements from there on, and the output as many. All are
        // borrowed for this call.
        unsafe { run(team, threads, kernel, parts.as_slice(), &[dest], 0..range.len()) };
    }
    Ok(())
}

/// Writes the concatenation of all inputs to each output.
///
/// # Errors
/// [`ReduceError::Length`] names the first output that is not as long as all inputs together.
pub fn all_gather<T: Element, A: AsRef<[T]>, B: AsMut<[T]>>(
    team: &Team,
    threads: Threads,
    inputs: &[A],
    outputs: &mut [B],
) -> Result<(), ReduceError> {
    let mut total = 0usize;
    let parts: Vec<Part<T>> = inputs
        .iter()
        .map(|input| {
            let part = Part::new(input.as_ref(), 0..outputs.len(), total);
            // No output is as long as what does not fit a number.
            total = total.saturating_add(part.len);
            part
        })
        .collect();
    let mut outputs = writable(outputs, |_| total)?;
    // SAFETY: every output is as long as all inputs together, and borrowed mutably for this call.
    unsafe { copy(team, threads, &parts, &mut outputs) };
    Ok(())
}

/// Writes `source` to each output.
///
/// # Errors
/// [`ReduceError::Length`] names the first output of another length.
pub fn broadcast<T: Element, B: AsMut<[T]>>(
    team: &Team,
    threads: Threads,
    source: &[T],
    outputs: &mut [B],
) -> Result<(), ReduceError> {
    all_gather(team, threads, &[source], outputs)
}

/// Writes the concatenation of all inputs to `output`.
///
/// # Errors
/// [`ReduceError::Length`] if the output is not as long as all inputs together.
pub fn gather<T: Element, A: AsRef<[T]>>(
    team: &Team,
    threads: Threads,
    inputs: &[A],
    output: &mut [T],
) -> Result<(), ReduceError> {
    all_gather(team, threads, inputs, &mut [output])
}

/// Writes chunk `r` of `source` to output `r`.
///
/// # Errors
/// [`ReduceError::Length`] names the first output that is not as long as its chunk.
pub fn scatter<T: Element, B: AsMut<[T]>>(
    team: &Team,
    threads: Threads,
    source: &[T],
    outputs: &mut [B],
) -> Result<(), ReduceError> {
    let count = outputs.len();
    let mut outputs = writable(outputs, |card| chunk(source.len(), count, card).len())?;
    let parts: Vec<Part<T>> = (0..count)
        .map(|card| Part::new(&source[chunk(source.len(), count, card)], card..card + 1, 0))
        .collect();
    // SAFETY: output `card` is as long as its chunk, and borrowed mutably for this call.
    unsafe { copy(team, threads, &parts, &mut outputs) };
    Ok(())
}

/// Writes chunk `j` of every input to output `j`, in card order.
///
/// # Errors
/// [`ReduceError::Length`] names the first input of another length than input 0, or the first output
/// that is not as long as its blocks together; [`ReduceError::Counts`] unequal numbers of buffers.
pub fn all_to_all<T: Element, A: AsRef<[T]>, B: AsMut<[T]>>(
    team: &Team,
    threads: Threads,
    inputs: &[A],
    outputs: &mut [B],
) -> Result<(), ReduceError> {
    let count = inputs.len();
    check_counts(count, outputs.len())?;
    let inputs: Vec<&[T]> = inputs.iter().map(AsRef::as_ref).collect();
    let len = inputs.first().map_or(0, |input| input.len());
    for (card, input) in inputs.iter().enumerate() {
        check(card, len, input.len())?;
    }
    let mut outputs = writable(outputs, |card| chunk(len, count, card).len() * count)?;
    let mut parts = Vec::with_capacity(count * count);
    for card in 0..count {
        let range = chunk(len, count, card);
        for (from, input) in inputs.iter().enumerate() {
            parts.push(Part::new(&input[range.clone()], card..card + 1, from * range.len()));
        }
    }
    // SAFETY: output `card` has a block of its chunk's length from every card, and is borrowed
    // mutably for this call.
    unsafe { copy(team, threads, &parts, &mut outputs) };
    Ok(())
}

/// Reads and writes every byte of every buffer once, in place, on up to `threads` threads: the limit
/// that an in-place collective over the same bytes can reach. The contents stay as they are.
///
/// # Errors
/// [`ReduceError::Length`] names the first buffer whose length differs from buffer 0's.
pub fn memory_limit<T: Element, B: AsMut<[T]>>(
    team: &Team,
    threads: Threads,
    buffers: &mut [B],
) -> Result<(), ReduceError> {
    let (cards, len) = in_place::<T, B>(buffers)?;
    let cards = Shared(cards.as_slice());
    let bytes = len.saturating_mul(cards.get().len() * size_of::<T>());
    let threads = threads_for(team, threads, bytes);
    let chunk = if threads == 1 { len.max(1) } else { UNIT_BYTES / size_of::<T>() };
    let count = cards.get().len();
    // Each thread gets the same part of every buffer that a collective would give it.
    team.run(threads, len.div_ceil(chunk) * count, &|unit| {
        let start = unit / count * chunk;
        let size = chunk.min(len - start);
        // SAFETY: units are disjoint chunks of buffers of `len` elements that the caller borrowed
        // mutably for this call.
        let part =
            unsafe { std::slice::from_raw_parts_mut(cards.get()[unit % count].add(start), size) };
        read_modify_write(bytemuck::cast_slice_mut(part));
    });
    Ok(())
}

/// The number of threads that a collective over `bytes` in all uses: no more than there are units of
/// work for.
#[must_use]
pub fn threads_for(team: &Team, threads: Threads, bytes: usize) -> usize {
    let most = match threads {
        Threads::Exactly(threads) => threads.clamp(1, team.threads()),
        Threads::Auto if bytes < AUTO_BYTES => 1,
        Threads::Auto => team.threads(),
    };
    most.min(bytes.div_ceil(UNIT_BYTES)).max(1)
}

/// Divides every element by `count`, as the last step of an average whose sum is complete.
pub fn divide<T: Element>(values: &mut [T], count: usize) {
    for value in values {
        *value = value.over(count);
    }
}

fn kernel_for<T: Element>(op: ReduceOp, sources: usize) -> Result<Kernel<T>, ReduceError> {
    let dtype: DType = T::DTYPE;
    T::kernel(op, sources).ok_or(ReduceError::Undefined { op, dtype })
}

fn check(card: usize, expected: usize, actual: usize) -> Result<(), ReduceError> {
    if expected == actual {
        return Ok(());
    }
    Err(ReduceError::Length { card, expected, actual })
}

fn check_counts(inputs: usize, outputs: usize) -> Result<(), ReduceError> {
    if inputs == outputs {
        return Ok(());
    }
    Err(ReduceError::Counts { inputs, outputs })
}

/// Elements that go to the same place in some of the destinations.
struct Part<T> {
    source: *const T,
    len: usize,
    dests: Range<usize>,
    offset: usize,
}

impl<T> Part<T> {
    fn new(source: &[T], dests: Range<usize>, offset: usize) -> Self {
        Part { source: source.as_ptr(), len: source.len(), dests, offset }
    }
}

/// Copies all parts, a chunk at a time: a chunk is still in the cache when the second destination
/// gets it.
///
/// # Safety
/// The sources are borrowed by the caller; every output of a part is long enough for it at its offset, and no
/// two parts go to the same place.
unsafe fn copy<T: Element>(
    team: &Team,
    threads: Threads,
    parts: &[Part<T>],
    outputs: &mut [&mut [T]],
) {
    let dests: Vec<*mut T> = outputs.iter_mut().map(|output| output.as_mut_ptr()).collect();
    let bytes = parts.iter().map(|part| part.len * part.dests.len() * size_of::<T>()).sum();
    let threads = threads_for(team, threads, bytes);
    let longest = parts.iter().map(|part| part.len).max().unwrap_or(0);
    let chunk = UNIT_BYTES / size_of::<T>();
    let chunks = longest.div_ceil(chunk);
    let (parts, dests) = (Shared(parts), Shared(&dests[..]));
    team.run(threads, parts.get().len() * chunks, &|unit| {
        let part = &parts.get()[unit / chunks];
        let start = unit % chunks * chunk;
        // A short part has fewer chunks than the longest.
        if start >= part.len {
            return;
        }
        let len = chunk.min(part.len - start);
        for dest in &dests.get()[part.dests.clone()] {
            // SAFETY: the caller's promise, for the elements `start..start + len` of the part.
            unsafe {
                let (from, to) = (part.source.add(start), dest.add(part.offset + start));
                to.copy_from_nonoverlapping(from, len);
            }
        }
    });
}

/// The beginnings of equally long buffers that will be read and written, and their length.
fn in_place<T: Element, B: AsMut<[T]>>(
    buffers: &mut [B],
) -> Result<(Pointers<T>, usize), ReduceError> {
    let mut pointers = Pointers::new();
    let mut expected = None;
    for (card, buffer) in buffers.iter_mut().enumerate() {
        let buffer = buffer.as_mut();
        check(card, *expected.get_or_insert(buffer.len()), buffer.len())?;
        pointers.push(buffer.as_mut_ptr());
    }
    Ok((pointers, expected.unwrap_or(0)))
}

/// The beginnings of equally long buffers that will only be read, and their length.
fn read_only<T: Element, A: AsRef<[T]>>(inputs: &[A]) -> Result<(Pointers<T>, usize), ReduceError> {
    let mut pointers = Pointers::new();
    let mut expected = None;
    for (card, input) in inputs.iter().enumerate() {
        let input = input.as_ref();
        check(card, *expected.get_or_insert(input.len()), input.len())?;
        pointers.push(input.as_ptr().cast_mut());
    }
    Ok((pointers, expected.unwrap_or(0)))
}

/// The outputs as slices, each as long as `expected` says. Every buffer is asked for its slice once: a
/// second answer might be another.
fn writable<T: Element, B: AsMut<[T]>>(
    outputs: &mut [B],
    expected: impl Fn(usize) -> usize,
) -> Result<Vec<&mut [T]>, ReduceError> {
    let outputs: Vec<&mut [T]> = outputs.iter_mut().map(AsMut::as_mut).collect();
    for (card, output) in outputs.iter().enumerate() {
        check(card, expected(card), output.len())?;
    }
    Ok(outputs)
}

/// Runs the kernel over `range` of all buffers, on as many threads as pay.
///
/// # Safety
/// Every pointer is valid for `range.end` elements and the caller borrows what it points to: mutably
/// for `dests`, at least shared for `sources`.
unsafe fn run<T: Element>(
    team: &Team,
    threads: Threads,
    kernel: Kernel<T>,
    sources: &[*mut T],
    dests: &[*mut T],
    range: Range<usize>,
) {
    if sources.is_empty() || dests.is_empty() || range.is_empty() {
        return;
    }
    let each = size_of::<T>() * sources.len().max(dests.len());
    let threads = threads_for(team, threads, each.saturating_mul(range.len()));
    if threads == 1 {
        // SAFETY: the caller's promise.
        unsafe { kernel(sources, dests, range) };
        return;
    }
    // Whole pages of 4-byte elements, so that chunks begin on a cache line where the buffers do.
    let chunk = (UNIT_BYTES / each).next_multiple_of(1024).max(1024);
    let (sources, dests) = (Shared(sources), Shared(dests));
    team.run(threads, range.len().div_ceil(chunk), &|unit| {
        let start = range.start + unit * chunk;
        let part = start..range.end.min(start + chunk);
        // SAFETY: the caller's promise; parts of different threads are disjoint.
        unsafe { kernel(sources.get(), dests.get(), part) };
    });
}

/// Pointers that threads of the team may use: the caller of the collective holds the borrows.
#[derive(Clone, Copy)]
struct Shared<'a, P>(&'a [P]);

impl<'a, P> Shared<'a, P> {
    fn get(&self) -> &'a [P] {
        self.0
    }
}

// SAFETY: the pointers come from slices of `Element`s, which are `Send` and `Sync`, and each use is
// confined to a range that no other thread touches.
unsafe impl<P> Sync for Shared<'_, P> {}
// SAFETY: as for `Sync`.
unsafe impl<P> Send for Shared<'_, P> {}

/// A list of buffers' beginnings that stays on the stack up to `INLINE_CARDS`.
struct Pointers<T> {
    few: [*mut T; INLINE_CARDS],
    len: usize,
    many: Vec<*mut T>,
}

impl<T> Pointers<T> {
    fn new() -> Self {
        Pointers { few: [std::ptr::null_mut(); INLINE_CARDS], len: 0, many: Vec::new() }
    }

    fn push(&mut self, pointer: *mut T) {
        if self.len < INLINE_CARDS {
            self.few[self.len] = pointer;
        } else {
            if self.len == INLINE_CARDS {
                self.many.extend_from_slice(&self.few);
            }
            self.many.push(pointer);
        }
        self.len += 1;
    }

    fn as_slice(&self) -> &[*mut T] {
        if self.len <= INLINE_CARDS { &self.few[..self.len] } else { &self.many }
    }
}
