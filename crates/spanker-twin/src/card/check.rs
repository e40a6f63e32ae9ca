// SPDX-License-Identifier: Apache-2.0
//! Whether work may run: every buffer is the client's, every range is inside it, every type and operation is
//! known. Nothing of a submission runs before all of it has passed.

mod model;

pub(crate) use model::MOST_SCORES;

use nix::errno::Errno;
use spanker_collective::{DType, ReduceOp};
use spanker_runtime::{AbiVersion, Descriptor, Feature, Fold, Landing, Place, Work};

use super::ClientId;
use super::memory::Memory;

/// The latest card time that a fence waits for. Half of all time is left to the work behind it, so that one
/// program cannot bring the clock to its end for all others.
const LAST_FENCE: u64 = 1 << 63;

/// Refuses work that a version of the ABI does not know: a kind, or the types of a product.
pub(crate) fn check_version(abi: AbiVersion, work: &[Descriptor]) -> Result<(), Errno> {
    let needed = work.iter().filter_map(|one| Feature::of_work(&one.work));
    match needed.into_iter().find(|&feature| !abi.has(feature)) {
        None => Ok(()),
        Some(Feature::MatmulTypes) => Err(Errno::EOPNOTSUPP),
        Some(_) => Err(Errno::EINVAL),
    }
}

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
    fn contains(&self, place: Place, length: u64) -> Result<(), Errno> {
        let size = self.memory.owned(self.client, place.buffer)?;
        let end = place.offset.checked_add(length).ok_or(Errno::EINVAL)?;
        require(end <= size)
    }

    /// Checks that so many elements fit, aligned.
    fn elements(&self, place: Place, count: u64, size: usize) -> Result<(), Errno> {
        require(place.offset.is_multiple_of(size as u64))?;
        self.contains(place, count.checked_mul(size as u64).ok_or(Errno::EINVAL)?)
    }
}

/// A product of sizes, if there is such a number.
fn product(sizes: &[u64]) -> Result<u64, Errno> {
    let all = sizes.iter().try_fold(1u64, |all, &size| all.checked_mul(size));
    all.ok_or(Errno::EINVAL)
}

/// Whether two ranges have no byte in common. Both are known to be inside their buffers.
fn apart(one: (Place, u64), other: (Place, u64)) -> bool {
    let ((one, length), (other, size)) = (one, other);
    one.buffer != other.buffer
        || length == 0
        || size == 0
        || one.offset + length <= other.offset
        || other.offset + size <= one.offset
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
            owned.contains(from, length)?;
            owned.contains(into, length)?;
            require(apart((from, length), (into, length)))
        }
        Work::Fill { into, length, .. } => owned.contains(into, length),
        Work::Write { into, ref bytes } => owned.contains(into, bytes.len() as u64),
        Work::Reduce { into, ref sources, elements, fold, .. } => {
            let (dtype, _) = known(fold).ok_or(Errno::EINVAL)?;
            owned.elements(into, elements, dtype.size())?;
            sources
                .iter()
                .try_for_each(|&source| owned.elements(source, elements, dtype.size()))?;
            // A source that lies across the destination would be read after it was written.
            let bytes = elements * dtype.size() as u64;
            let clear = |&source: &Place| source == into || apart((source, bytes), (into, bytes));
            require(sources.iter().all(clear))
        }
        Work::Send { from, length, port, .. } => {
            require((port as usize) < ports)?;
            owned.contains(from, length)
        }
        Work::Receive { into, length, port, landing, .. } => {
            require((port as usize) < ports)?;
            owned.contains(into, length)?;
            let (Landing::FoldFirst(fold) | Landing::FoldSecond(fold)) = landing else {
                return Ok(());
            };
            let (dtype, _) = known(fold).ok_or(Errno::EINVAL)?;
            let size = dtype.size() as u64;
            require(into.offset.is_multiple_of(size) && length.is_multiple_of(size))
        }
        Work::Fence { not_before_ps } => require(not_before_ps <= LAST_FENCE),
        _ => model::check(owned, work),
    }
}
