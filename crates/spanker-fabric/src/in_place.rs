// SPDX-License-Identifier: Apache-2.0
//! Receiving a result where it belongs: the back half of the caller's registered buffer, cut into parts, each of which
//! a message can be received into. It is not used where the result needs further work after the last step.

use std::ops::Range;
use std::sync::Arc;

use spanker_collective::{Buffer, Incoming, Schedule, Span, Transfer};
use spanker_reduce::Element;

use crate::block::Block;
use crate::execute::result_range;
use crate::overlay::Overlay;
use crate::{Fabric, Message, ReceiveBuffer, Registered};

/// A result that is assembled in the back half of the caller's buffer.
///
/// The last step receives into the parts where its elements belong. Until then these parts serve as receive buffers
/// for what earlier steps fold. Folds of this rank's own elements are written in place too.
pub(crate) struct InPlaceResult {
    parts: Vec<Part>,
    /// The parts that the last step receives, in its order.
    last_receives: Vec<usize>,
    pub(crate) is_last_step: bool,
}

/// A part of the back half.
struct Part {
    /// The part's place in the buffer, in bytes.
    range: Range<usize>,
    /// Its memory, unless a receive buffer has it.
    block: Option<Arc<Block>>,
    address: *const u8,
}

impl InPlaceResult {
    /// `None` where nothing is gained, or where the result needs further work after the last step.
    pub(crate) fn new<T: Element>(
        fabric: &dyn Fabric,
        schedule: &Schedule,
        buffer: &mut Registered<T>,
    ) -> Option<InPlaceResult> {
        let (rank, len, size) = (fabric.rank(), schedule.data_len(), size_of::<T>());
        let fits = rank < schedule.ranks() && buffer.as_slice().len() == len;
        if !fits || result_range(schedule, rank) != (0..len) {
            return None;
        }
        let step = schedule.program(rank).last().filter(|step| step.locals.is_empty())?;
        let mut received = Vec::with_capacity(step.transfers.len());
        for transfer in &step.transfers {
            let Transfer::Recv { span, fold, .. } = *transfer else { continue };
            let is_final = fold.is_none() && span.buffer == Buffer::Data;
            let in_place = fabric.receives_in_place(span.len * size);
            if !is_final || span.start + span.len > len || !in_place {
                return None;
            }
            received.push(span.start * size..(span.start + span.len) * size);
        }
        if received.is_empty() {
            return None;
        }
        let mut ends: Vec<usize> =
            received.iter().flat_map(|range| [range.start, range.end]).collect();
        ends.push(len * size);
        ends.sort_unstable();
        ends.dedup();
        let ends = ends.strip_prefix(&[0]).unwrap_or(&ends);
        let parts = parts(buffer.split_back(ends)?);
        // Ranges that overlap have no parts of their own.
        let last_receives =
            received.iter().map(|range| part_of(&parts, range)).collect::<Option<Vec<usize>>>()?;
        Some(InPlaceResult { parts, last_receives, is_last_step: false })
    }

    /// A buffer for receive number `index` of the current step, which is of `span`, and the part that it is in.
    pub(crate) fn receive<T: Element>(
        &mut self,
        fabric: &dyn Fabric,
        index: usize,
        span: Span,
        fold: Option<Incoming>,
    ) -> Option<(usize, ReceiveBuffer)> {
        let bytes = span.len * size_of::<T>();
        if self.is_last_step {
            let part = *self.last_receives.get(index)?;
            return self.parts[part].buffer(bytes).map(|buffer| (part, buffer));
        }
        if fold.is_some() || span.buffer != Buffer::Scratch || !fabric.receives_in_place(bytes) {
            return None;
        }
        let InPlaceResult { parts, last_receives, .. } = self;
        last_receives.iter().find_map(|&part| Some((part, parts[part].buffer(bytes)?)))
    }

    /// A buffer for the fold into `span`, if `span` is a part, and which.
    pub(crate) fn fold<T: Element>(&mut self, span: Span) -> Option<(usize, ReceiveBuffer)> {
        let (start, bytes) = (span.start * size_of::<T>(), span.len * size_of::<T>());
        let part = part_of(&self.parts, &(start..start + bytes))
            .filter(|_| span.buffer == Buffer::Data)?;
        self.parts[part].buffer(bytes).map(|buffer| (part, buffer))
    }

    /// Gives a part's memory back, as the message that was received into it. A message that is elsewhere in memory
    /// is ignored.
    pub(crate) fn give_back(&mut self, part: usize, message: &Message) {
        let (part, block) = (&mut self.parts[part], message.block());
        if block.as_ptr() == part.address && block.len() == part.range.len() {
            part.block = Some(Arc::clone(block));
        }
    }

    /// Makes the back half the front half of `buffer`, with the elements that `overlay` has, and clears `overlay`.
    /// Messages of the overlay that were received in place are not copied.
    pub(crate) fn finish<T: Element>(self, buffer: &mut Registered<T>, overlay: &mut Overlay) {
        let old = buffer.as_slice();
        let block = self.assemble(old, overlay).unwrap_or_else(|| {
            let mut block = Block::new(size_of_val(old));
            overlay.read(old, 0..old.len(), bytemuck::cast_slice_mut(&mut block));
            block
        });
        overlay.clear();
        buffer.replace_front(block);
    }

    /// All parts as one block with the elements that `overlay` has over `old`, and `overlay` cleared; `None` if
    /// somebody still reads a part.
    fn assemble<T: Element>(mut self, old: &[T], overlay: &mut Overlay) -> Option<Block> {
        for Part { range, block, .. } in &mut self.parts {
            let elements = range.start / size_of::<T>()..range.end / size_of::<T>();
            let block = block.as_mut()?;
            let message = overlay.message::<T>(&elements);
            match message.filter(|message| message.is_all_of(block, range.len())) {
                Some(_message) => {
                    // Three owners: this message, the overlay's and the part.
                    if Arc::strong_count(block) > 3 {
                        return None;
                    }
                }
                None => {
                    let out = bytemuck::cast_slice_mut(Arc::get_mut(block)?);
                    overlay.read(old, elements, out);
                }
            }
        }
        overlay.clear();
        let blocks: Option<Vec<Block>> =
            self.parts.into_iter().map(|part| Arc::try_unwrap(part.block?).ok()).collect();
        Some(blocks.and_then(Block::join).expect("no part is shared"))
    }
}

impl Part {
    /// A receive buffer of `len` bytes in this part, if that is long enough and nobody has a message of it.
    fn buffer(&mut self, len: usize) -> Option<ReceiveBuffer> {
        match ReceiveBuffer::new(self.block.take()?, len) {
            Ok(buffer) => Some(buffer),
            Err(block) => {
                self.block = Some(block);
                None
            }
        }
    }
}

fn parts(blocks: Vec<Block>) -> Vec<Part> {
    let mut start = 0;
    let part = |block: Block| {
        let range = start..start + block.len();
        start = range.end;
        Part { range, address: block.as_ptr(), block: Some(Arc::new(block)) }
    };
    blocks.into_iter().map(part).collect()
}

/// The part that has exactly the bytes `range`.
fn part_of(parts: &[Part], range: &Range<usize>) -> Option<usize> {
    let index = parts.partition_point(|part| part.range.end < range.end);
    parts.get(index).is_some_and(|part| part.range == *range).then_some(index)
}
