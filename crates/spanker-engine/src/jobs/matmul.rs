// SPDX-License-Identifier: Apache-2.0
//! The product of two Q4_K matrices on one card behind the ABI, as [`MatmulInt4`]: operands go to the card and the result
//! comes back with every call. Rows that many backends share are `card.rs`'s business.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Mutex, PoisonError};

use ggml_spanker::{
    DeviceFault, Error as MatmulError, MatmulInt4, OUTPUT_ELEM_BYTES, Quant, check_dims,
};
use nix::errno::Errno;
use spanker_fabric::device::Deadline;
use spanker_runtime::{
    BufferId, CardInfo, Descriptor, Error, Fault, FaultKind, Feature, Place, SpankerControl, Work,
};

use super::JobError;
use super::card::WEIGHTS;
use super::watch::{Unfinished, take_back, watch, words};

/// Multiply-accumulates of one descriptor, about: a card shows progress at least after each.
const MACS: usize = 1 << 28;

/// Multiplies Q4_K matrices on a card behind the ABI.
///
/// A call allocates buffers for the operands and the result, writes `a` and `b` as they are, has the card multiply them
/// (`Work::Matmul` of Q4_K by Q4_K, which every card has that does work), reads the result and frees the buffers. The bits are
/// those of [`HostMatmul`](ggml_spanker::HostMatmul). Calls of several threads take turns, so that the card needs memory for
/// one product at a time.
///
/// # Errors
///
/// Dimensions are checked before anything is asked of the card, as everywhere. What the card does wrong is
/// [`Error::Device`](ggml_spanker::Error::Device), which names the card, the step and a
/// [`DeviceFault`]. Whatever the error, `out` is unchanged. Work that makes no progress for
/// `deadline.detect`, or takes `deadline.total`, is taken back from the card, which can go on with other work;
/// `deadline.slow_after` is not looked at. After [`DeviceFault::Lost`] and [`DeviceFault::Wrong`], and
/// where a card was silent, the handle is of no more use.
#[derive(Debug)]
pub struct CardMatmul {
    card: SpankerControl,
    info: CardInfo,
    deadline: Deadline,
    /// The number of the next job. Whoever holds it has the card.
    next_job: Mutex<u64>,
}

impl CardMatmul {
    /// Asks the card who it is. No memory is taken before the first product.
    ///
    /// # Errors
    /// [`JobError::Card`] for a card that does not answer, or whose version of the ABI has no products.
    pub fn new(card: SpankerControl, deadline: Deadline) -> Result<CardMatmul, JobError> {
        let known = card.require(Feature::WorkMatmul).and_then(|()| card.info());
        let info = known.map_err(|source| {
            let name = card.path().map_or("a card".to_owned(), |path| path.display().to_string());
            JobError::Card { card: name, what: words(&source), source }
        })?;
        // A number that no other program is likely to begin with; zero stands for all jobs.
        let next_job = Mutex::new(RandomState::new().build_hasher().finish() | 1);
        Ok(CardMatmul { card, info, deadline, next_job })
    }

    /// The product of operands that fit their dimensions, of which there is something to compute.
    fn multiply(&self, job: u64, a: &[u8], b: &[u8], dims: [usize; 3]) -> Outcome<Vec<u8>> {
        let need = dims[0] * dims[2] * OUTPUT_ELEM_BYTES;
        let mut buffers = Vec::with_capacity(3);
        let outcome = self.run(&mut buffers, job, [a, b], dims, need);
        let freed =
            buffers.into_iter().map(|buffer| self.card.free(buffer)).fold(Ok(()), Result::and);
        // What went wrong first is told; what the card does not free now it frees with the handle.
        let product = outcome?;
        freed.map_err(|error| self.failed("free", &error))?;
        Ok(product)
    }

    fn run(
        &self,
        buffers: &mut Vec<BufferId>,
        job: u64,
        operands: [&[u8]; 2],
        dims: [usize; 3],
        need: usize,
    ) -> Outcome<Vec<u8>> {
        for bytes in [operands[0].len(), operands[1].len(), need] {
            buffers.push(self.allocate(bytes)?);
        }
        for (&buffer, bytes) in buffers.iter().zip(operands) {
            self.card.write(buffer, 0, bytes).map_err(|error| self.failed("write", &error))?;
        }
        let work = pieces([buffers[0], buffers[1], buffers[2]], dims);
        self.complete(job, &work)?;
        let mut product = vec![0; need];
        let read = self.card.read(buffers[2], 0, &mut product);
        read.map_err(|error| self.failed("read", &error))?;
        Ok(product)
    }

    fn allocate(&self, bytes: usize) -> Outcome<BufferId> {
        self.card.allocate(bytes as u64).map_err(|error| match error {
            Error::Ioctl { source: Errno::ENOMEM, .. } => {
                let free = self.card.info().map(|info| format!(", {} are free", info.available));
                let reason = format!("no room for {bytes} bytes{}", free.unwrap_or_default());
                self.fault("allocate", DeviceFault::Memory, reason)
            }
            error => self.failed("allocate", &error),
        })
    }

    /// Submits work and waits for it.
    fn complete(&self, job: u64, work: &[Descriptor]) -> Outcome<()> {
        let ticket = self.card.submit(job, work).map_err(|error| self.failed("submit", &error))?;
        let (kind, what) = match watch(&self.card, ticket, self.deadline, || true) {
            Ok(()) => return Ok(()),
            Err(Unfinished::Card(error)) => return Err(self.failed("wait", &error)),
            Err(Unfinished::Pending(kind, what)) => (kind, what),
        };
        let fault = Fault { kind, card: self.info.serial, peer: 0, job };
        let kind = if kind == FaultKind::Slow { DeviceFault::Slow } else { DeviceFault::Stuck };
        Err(match take_back(&self.card, ticket, fault) {
            Ok(()) => self.fault("wait", kind, what),
            Err(error) => self.fault("wait", kind, format!("{what}; {}", words(&error))),
        })
    }

    fn failed(&self, op: &'static str, error: &Error) -> MatmulError {
        self.fault(op, fault_of(error), words(error))
    }

    fn fault(&self, op: &'static str, fault: DeviceFault, reason: String) -> MatmulError {
        MatmulError::Device { device: format!("card {}", self.info.index), op, fault, reason }
    }
}

/// What a product on a card comes to.
type Outcome<T> = Result<T, MatmulError>;

impl MatmulInt4 for CardMatmul {
    fn matmul_q4_k(
        &self,
        a: &[u8],
        b: &[u8],
        out: &mut [u8],
        m: usize,
        k: usize,
        n: usize,
    ) -> ggml_spanker::Result<()> {
        let need = check_dims([a.len(), b.len(), out.len()], m, k, n)?;
        if need == 0 {
            return Ok(());
        }
        let mut next = self.next_job.lock().unwrap_or_else(PoisonError::into_inner);
        let job = *next;
        *next = job.wrapping_add(1).max(1);
        let product = self.multiply(job, a, b, [m, k, n])?;
        out[..need].copy_from_slice(&product);
        Ok(())
    }
}

/// The work of a product, some rows of `a` at a time. With the fences, an emulated card that is held to its profile's pace
/// is not done before it would be.
fn pieces([a, b, out]: [BufferId; 3], [m, k, n]: [usize; 3]) -> Vec<Descriptor> {
    let rows = (MACS / k / n).clamp(1, m);
    let row_bytes = Quant::Q4K.row_bytes(k as u64);
    let piece = |first: usize| {
        let product = Work::Matmul {
            a: Place { buffer: a, offset: first as u64 * row_bytes },
            b: Place { buffer: b, offset: 0 },
            out: Place { buffer: out, offset: (first * n * OUTPUT_ELEM_BYTES) as u64 },
            shape: [rows.min(m - first) as u64, k as u64, n as u64],
            types: [WEIGHTS, WEIGHTS],
        };
        [product.into(), Work::Fence { not_before_ps: 0 }.into()]
    };
    (0..m).step_by(rows).flat_map(piece).collect()
}

fn fault_of(error: &Error) -> DeviceFault {
    match error {
        Error::Gone { .. } => DeviceFault::Lost,
        Error::Ioctl { source: Errno::ENODEV | Errno::ENXIO | Errno::EIO, .. } => DeviceFault::Lost,
        Error::Unresponsive { .. } => DeviceFault::Stuck,
        Error::Nonsense { .. } => DeviceFault::Wrong,
        Error::Ioctl { source: Errno::EBUSY, .. } => DeviceFault::Busy,
        Error::Ioctl { source: Errno::ENOMEM, .. } => DeviceFault::Memory,
        Error::Version { .. } | Error::Unsupported { .. } => DeviceFault::Unsupported,
        Error::Fault(Fault { kind, .. }) => match kind {
            FaultKind::CardLost => DeviceFault::Lost,
            FaultKind::Stuck => DeviceFault::Stuck,
            FaultKind::Slow => DeviceFault::Slow,
            FaultKind::Wrong => DeviceFault::Wrong,
            _ => DeviceFault::Refused,
        },
        _ => DeviceFault::Refused,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_every_row_of_the_left_operand_once_and_in_order() {
        let buffers = [1, 2, 3].map(BufferId);
        // One piece; rows that are a piece each; pieces of several rows with a short one at the end.
        for (dims, count) in
            [([64, 2048, 33], 1), ([3, 1 << 20, 1 << 10], 3), ([1000, 1 << 12, 1 << 12], 63)]
        {
            let [m, k, n] = dims.map(|size| size as u64);
            let work = pieces(buffers, dims);
            assert_eq!(work.len(), 2 * count);
            let mut row = 0;
            for one in work.iter().step_by(2) {
                let Work::Matmul { a, b, out, shape, types } = &one.work else { panic!("{one:?}") };
                let places = [(a, 1, row * k / 256 * 144), (b, 2, 0), (out, 3, row * n * 4)];
                for (place, buffer, offset) in places {
                    assert_eq!(*place, Place { buffer: BufferId(buffer), offset });
                }
                assert_eq!((&shape[1..], types), (&[k, n][..], &[12, 12]));
                row += shape[0];
            }
            assert_eq!(row, m);
        }
    }

    #[test]
    fn every_failure_of_a_card_has_its_kind() {
        let refused = |source| Error::Ioctl { op: "WRITE", source };
        let faulty = |kind| Error::Fault(Fault { kind, card: 1, peer: 0, job: 1 });
        let theirs = spanker_runtime::AbiVersion { major: 1, minor: 0, patch: 0 };
        for (error, fault) in [
            (Error::Gone { op: "READ" }, DeviceFault::Lost),
            (refused(Errno::ENODEV), DeviceFault::Lost),
            (faulty(FaultKind::CardLost), DeviceFault::Lost),
            (Error::Nonsense { op: "READ", what: "one byte".into() }, DeviceFault::Wrong),
            (refused(Errno::EBUSY), DeviceFault::Busy),
            (refused(Errno::ENOMEM), DeviceFault::Memory),
            (refused(Errno::EINVAL), DeviceFault::Refused),
            (faulty(FaultKind::Slow), DeviceFault::Slow),
            (faulty(FaultKind::Stuck), DeviceFault::Stuck),
            (faulty(FaultKind::Aborted), DeviceFault::Refused),
            (Error::Version { theirs }, DeviceFault::Unsupported),
        ] {
            assert_eq!(fault_of(&error), fault, "{error}");
        }
    }
}
