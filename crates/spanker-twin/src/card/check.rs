// SPDX-License-Identifier: Apache-2.0
//! Whether work may run: every buffer is the client's, every range is inside it, every type and operation is
//! known. Nothing of a submission runs before all of it has passed.

use ggml_spanker::{OUTPUT_ELEM_BYTES, Q4_K_BLOCK_BYTES, QK_K};
use nix::errno::Errno;
use spanker_plan::{DType, ReduceOp};
use spanker_runtime::{Descriptor, Fold, Landing, Place, Work};

use super::ClientId;
use super::memory::Memory;

/// GGML's number of the type that every card multiplies.
pub(crate) const Q4_K: u32 = 12;

/// The latest card time that a fence waits for. Half of all time is left to the work behind it, so that one
/// program cannot bring the clock to its end for all others.
const LAST_FENCE: u64 = 1 << 63;

/// Checks a whole submission.
pub(crate) fn check(
    memory: &Memory,
    client: ClientId,
    ports: usize,
    work: &[Descriptor],
) -> Result<(), Errno> {
    work.iter().try_for_each(|one| check_one(&Owned { memory, client }, ports, &one.work))
}

/// A client's view of the memory.
struct Owned<'a> {
    memory: &'a Memory,
    client: ClientId,
}

impl Owned<'_> {
    fn holds(&self, place: Place, length: u64) -> Result<(), Errno> {
        let size = self.memory.owned(self.client, place.buffer)?;
        let end = place.offset.checked_add(length).ok_or(Errno::EINVAL)?;
        require(end <= size)
    }

    /// Room for so many elements, aligned.
    fn elements(&self, place: Place, count: u64, size: usize) -> Result<(), Errno> {
        require(place.offset.is_multiple_of(size as u64))?;
        self.holds(place, count.checked_mul(size as u64).ok_or(Errno::EINVAL)?)
    }
}

fn require(holds: bool) -> Result<(), Errno> {
    if holds { Ok(()) } else { Err(Errno::EINVAL) }
}

/// The type and operation of a fold, if there is such a thing.
pub(crate) fn known(fold: Fold) -> Option<(DType, ReduceOp)> {
    let (dtype, op) = (DType::from_code(fold.dtype)?, ReduceOp::from_code(fold.op)?);
    op.is_defined_for(dtype).then_some((dtype, op))
}

fn check_one(owned: &Owned<'_>, ports: usize, work: &Work) -> Result<(), Errno> {
    match *work {
        Work::Copy { from, into, length } => {
            owned.holds(from, length)?;
            owned.holds(into, length)?;
            let apart = from.buffer != into.buffer
                || from.offset + length <= into.offset
                || into.offset + length <= from.offset;
            require(apart || length == 0)
        }
        Work::Fill { into, length, .. } => owned.holds(into, length),
        Work::Reduce { into, ref sources, elements, fold, .. } => {
            let (dtype, _) = known(fold).ok_or(Errno::EINVAL)?;
            owned.elements(into, elements, dtype.size())?;
            sources
                .iter()
                .try_for_each(|&source| owned.elements(source, elements, dtype.size()))?;
            // A source that lies across the destination would be read after it was written.
            let bytes = elements * dtype.size() as u64;
            let clear = |source: &Place| {
                source.buffer != into.buffer
                    || source.offset == into.offset
                    || source.offset + bytes <= into.offset
                    || into.offset + bytes <= source.offset
            };
            require(sources.iter().all(clear))
        }
        Work::Matmul { a, b, out, shape, types } => {
            if types != [Q4_K, Q4_K] {
                return Err(Errno::EOPNOTSUPP);
            }
            let [m, k, n] = shape;
            require(k > 0 && k.is_multiple_of(QK_K as u64))?;
            let row =
                (k / QK_K as u64).checked_mul(Q4_K_BLOCK_BYTES as u64).ok_or(Errno::EINVAL)?;
            let rows = |count: u64| count.checked_mul(row).ok_or(Errno::EINVAL);
            let product = m.checked_mul(n).ok_or(Errno::EINVAL)?;
            owned.holds(a, rows(m)?)?;
            owned.holds(b, rows(n)?)?;
            owned.elements(out, product, OUTPUT_ELEM_BYTES)?;
            require(m.checked_mul(n).and_then(|all| all.checked_mul(k)).is_some())?;
            require(out.buffer != a.buffer && out.buffer != b.buffer)
        }
        Work::Send { from, length, port, .. } => {
            require((port as usize) < ports)?;
            owned.holds(from, length)
        }
        Work::Receive { into, length, port, landing, .. } => {
            require((port as usize) < ports)?;
            owned.holds(into, length)?;
            let (Landing::FoldFirst(fold) | Landing::FoldSecond(fold)) = landing else {
                return Ok(());
            };
            let (dtype, _) = known(fold).ok_or(Errno::EINVAL)?;
            let size = dtype.size() as u64;
            require(into.offset.is_multiple_of(size) && length.is_multiple_of(size))
        }
        Work::Fence { not_before_ps } => require(not_before_ps <= LAST_FENCE),
        _ => Err(Errno::EOPNOTSUPP),
    }
}
