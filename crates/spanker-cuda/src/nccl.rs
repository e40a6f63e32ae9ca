// SPDX-License-Identifier: Apache-2.0
//! Collectives between several graphics processors of one process, by NVIDIA's library for them. The order in which
//! it folds is its own: sums of floats have not the bits of the serial fold.

pub(crate) mod library;

use std::ffi::{c_int, c_void};

use cudarc::driver::{CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice};
use spanker_collective::{DType, ReduceOp};

use crate::{CudaError, Gpu};
use library::{Comm, Functions, functions};

/// Graphics processors that take part in collectives together, one rank each. One alone is a group as well.
///
/// Calls are put on the processors' streams; nobody waits for them.
///
/// ```no_run
/// use spanker_cuda::{Gpu, Nccl};
/// use spanker_collective::{DType, ReduceOp};
///
/// let mut group = Nccl::new(vec![Gpu::open(0)?])?;
/// let mut data = group.gpus()[0].allocate(4096, "an example")?;
/// group.all_reduce(&mut [data.as_view_mut()], DType::F32, ReduceOp::Sum)?;
/// group.gpus()[0].synchronize()?;
/// # Ok::<(), spanker_cuda::CudaError>(())
/// ```
#[derive(Debug)]
pub struct Nccl {
    functions: &'static Functions,
    gpus: Vec<Gpu>,
    /// One for each rank, used by whoever has this handle alone.
    comms: Vec<Comm>,
}

// SAFETY: communicators may be used by any thread, one at a time; calls need the handle exclusively.
unsafe impl Send for Nccl {}

/// What one rank takes part with: where it reads and where it writes.
type Ends = (*const c_void, *mut c_void);

impl Nccl {
    /// A group of these processors.
    ///
    /// # Errors
    /// [`CudaError::Missing`] without NCCL; [`CudaError::Unsupported`] without processors; [`CudaError::Call`] if
    /// NCCL does not connect them.
    pub fn new(gpus: Vec<Gpu>) -> Result<Nccl, CudaError> {
        let functions = functions()?;
        let devices: Vec<c_int> =
            gpus.iter().filter_map(|gpu| c_int::try_from(gpu.index()).ok()).collect();
        let count = match c_int::try_from(devices.len()) {
            Ok(count) if count > 0 && devices.len() == gpus.len() => count,
            _ => return Err(CudaError::Unsupported(format!("NCCL over {} GPUs", gpus.len()))),
        };
        let mut comms: Vec<Comm> = vec![std::ptr::null_mut(); gpus.len()];
        // SAFETY: there are as many places and numbers as the count that is passed.
        let answer = unsafe { (functions.init_all)(comms.as_mut_ptr(), count, devices.as_ptr()) };
        functions.check(&format!("connect GPUs {devices:?}"), answer)?;
        Ok(Nccl { functions, gpus, comms })
    }

    /// The version of the library, as in 2.27.3.
    ///
    /// # Errors
    /// [`CudaError::Call`] if it does not say.
    pub fn version(&self) -> Result<String, CudaError> {
        self.functions.version()
    }

    /// The processors, by rank.
    #[must_use]
    pub fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }

    /// Reduces the ranks' buffers and writes the result to all of them.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for operations that NCCL has not, buffers of different lengths or of another
    /// processor; [`CudaError::Call`] if NCCL refuses.
    pub fn all_reduce(
        &mut self,
        buffers: &mut [CudaViewMut<'_, u8>],
        dtype: DType,
        op: ReduceOp,
    ) -> Result<(), CudaError> {
        let (kind, operation) = (kind(dtype), operation(op, dtype)?);
        let (ends, bytes) = self.in_place(buffers)?;
        let count = elements(bytes, dtype)?;
        let call = self.functions.all_reduce;
        // SAFETY: `grouped` vouches for the ends; each is `count` elements long.
        self.grouped("all-reduce", &ends, |(from, to), comm, stream| unsafe {
            call(from, to, count, kind, operation, comm, stream)
        })
    }

    /// Copies the buffer of rank `root` to all.
    ///
    /// # Errors
    /// As [`Nccl::all_reduce`], and for a root that is no rank.
    pub fn broadcast(
        &mut self,
        buffers: &mut [CudaViewMut<'_, u8>],
        root: usize,
    ) -> Result<(), CudaError> {
        let (ends, bytes) = self.in_place(buffers)?;
        let root = match c_int::try_from(root) {
            Ok(rank) if root < self.gpus.len() => rank,
            _ => return unsupported(format!("root {root}: there are {} ranks", self.gpus.len())),
        };
        let call = self.functions.broadcast;
        // SAFETY: as in `all_reduce`; elements are bytes.
        self.grouped("broadcast", &ends, |(from, to), comm, stream| unsafe {
            call(from, to, bytes, kind(DType::U8), root, comm, stream)
        })
    }

    /// Writes the parts of all ranks, in order, to every rank's `whole`.
    ///
    /// # Errors
    /// As [`Nccl::all_reduce`], and if the wholes are not as long as all parts.
    pub fn all_gather(
        &mut self,
        parts: &[CudaView<'_, u8>],
        wholes: &mut [CudaViewMut<'_, u8>],
    ) -> Result<(), CudaError> {
        let (ends, part, whole) = self.between(parts, wholes)?;
        self.shares(part, whole)?;
        let call = self.functions.all_gather;
        // SAFETY: `grouped` vouches for the ends; a whole is long enough for a part of each rank.
        self.grouped("all-gather", &ends, |(from, to), comm, stream| unsafe {
            call(from, to, part, kind(DType::U8), comm, stream)
        })
    }

    /// Reduces the ranks' wholes and leaves each rank its part of the result.
    ///
    /// # Errors
    /// As [`Nccl::all_reduce`], and if the wholes are not as long as all parts.
    pub fn reduce_scatter(
        &mut self,
        wholes: &[CudaView<'_, u8>],
        parts: &mut [CudaViewMut<'_, u8>],
        dtype: DType,
        op: ReduceOp,
    ) -> Result<(), CudaError> {
        let (kind, operation) = (kind(dtype), operation(op, dtype)?);
        let (ends, whole, part) = self.between(wholes, parts)?;
        self.shares(part, whole)?;
        let count = elements(part, dtype)?;
        let call = self.functions.reduce_scatter;
        // SAFETY: `grouped` vouches for the ends; a whole has a part for each rank.
        self.grouped("reduce-scatter", &ends, |(from, to), comm, stream| unsafe {
            call(from, to, count, kind, operation, comm, stream)
        })
    }

    fn shares(&self, part: usize, whole: usize) -> Result<(), CudaError> {
        let ranks = self.gpus.len();
        match part.checked_mul(ranks) == Some(whole) {
            true => Ok(()),
            false => unsupported(format!("{whole} bytes are not {ranks} parts of {part}")),
        }
    }

    /// The ends of a call in place, and the bytes of each buffer.
    fn in_place(
        &self,
        buffers: &mut [CudaViewMut<'_, u8>],
    ) -> Result<(Vec<Ends>, usize), CudaError> {
        let bytes = self.alike(buffers)?;
        let ends = buffers.iter_mut().zip(&self.gpus).map(|(buffer, gpu)| {
            let address = buffer.device_ptr_mut(gpu.stream()).0;
            (address as *const c_void, address as *mut c_void)
        });
        Ok((ends.collect(), bytes))
    }

    /// The ends of a call from buffers to others, and the bytes of each.
    fn between(
        &self,
        from: &[CudaView<'_, u8>],
        to: &mut [CudaViewMut<'_, u8>],
    ) -> Result<(Vec<Ends>, usize, usize), CudaError> {
        let (read, written) = (self.alike(from)?, self.alike(to)?);
        let pairs = from.iter().zip(to.iter_mut()).zip(&self.gpus);
        let ends = pairs.map(|((from, to), gpu)| {
            let from = from.device_ptr(gpu.stream()).0;
            let to = to.device_ptr_mut(gpu.stream()).0;
            (from as *const c_void, to as *mut c_void)
        });
        Ok((ends.collect(), read, written))
    }

    /// The bytes of each buffer, if there is one for each rank, on its processor, and all are as long.
    fn alike<B: DeviceSlice<u8>>(&self, buffers: &[B]) -> Result<usize, CudaError> {
        if buffers.len() != self.gpus.len() {
            let (given, ranks) = (buffers.len(), self.gpus.len());
            return unsupported(format!("{given} buffers for {ranks} ranks"));
        }
        let bytes = buffers.first().map_or(0, DeviceSlice::len);
        for (rank, (buffer, gpu)) in buffers.iter().zip(&self.gpus).enumerate() {
            if buffer.stream() != gpu.stream() {
                return unsupported(format!(
                    "the buffer of rank {rank} is not of its GPU's handle"
                ));
            }
            if buffer.len() != bytes {
                let length = buffer.len();
                return unsupported(format!("rank {rank} has {length} bytes and rank 0 {bytes}"));
            }
        }
        Ok(bytes)
    }

    /// Makes the call of every rank as one: none waits for a later one.
    ///
    /// The ends are addresses of buffers that are borrowed meanwhile, on the processor of their rank, and the
    /// streams are those that order everything else that is done with these buffers.
    fn grouped(
        &mut self,
        what: &str,
        ends: &[Ends],
        call: impl Fn(Ends, Comm, *mut c_void) -> c_int,
    ) -> Result<(), CudaError> {
        // SAFETY: the call has no arguments.
        self.functions.check(what, unsafe { (self.functions.group_start)() })?;
        let mut first = Ok(());
        for ((&ends, &comm), gpu) in ends.iter().zip(&self.comms).zip(&self.gpus) {
            let answer = call(ends, comm, gpu.stream().cu_stream().cast());
            first = first.and_then(|()| self.functions.check(what, answer));
        }
        // SAFETY: the call has no arguments, and ends the group that was begun above.
        let ended = self.functions.check(what, unsafe { (self.functions.group_end)() });
        first.and(ended)
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        // What is under way uses the communicators.
        for gpu in &self.gpus {
            let _ = gpu.synchronize();
        }
        for &comm in &self.comms {
            // SAFETY: the communicator was made by the library and is ended once.
            let _ = unsafe { (self.functions.destroy)(comm) };
        }
    }
}

fn unsupported<T>(text: String) -> Result<T, CudaError> {
    Err(CudaError::Unsupported(text))
}

fn elements(bytes: usize, dtype: DType) -> Result<usize, CudaError> {
    match bytes.is_multiple_of(dtype.size()) {
        true => Ok(bytes / dtype.size()),
        false => unsupported(format!("{bytes} bytes are not whole elements of {dtype}")),
    }
}

/// NCCL's number of an element type.
fn kind(dtype: DType) -> c_int {
    match dtype {
        DType::U8 => 1,
        DType::I32 => 2,
        DType::U32 => 3,
        DType::I64 => 4,
        DType::F16 => 6,
        DType::F64 => 8,
        DType::Bf16 => 9,
        _ => 7,
    }
}

/// NCCL's number of an operation, where it has it.
fn operation(op: ReduceOp, dtype: DType) -> Result<c_int, CudaError> {
    match op {
        ReduceOp::Sum => Ok(0),
        ReduceOp::Product => Ok(1),
        ReduceOp::Max => Ok(2),
        ReduceOp::Min => Ok(3),
        ReduceOp::Avg => Ok(4),
        _ => unsupported(format!("NCCL has no {op} of {dtype}: sum, product, max, min and avg")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_without_processors_or_library_is_refused() {
        let error = Nccl::new(Vec::new()).unwrap_err().to_string();
        assert!(error.contains("NCCL"), "{error}");
    }

    #[test]
    fn numbers_of_types_are_distinct_and_missing_operations_are_named() {
        let kinds: std::collections::BTreeSet<c_int> = DType::ALL.into_iter().map(kind).collect();
        assert_eq!(kinds.len(), DType::ALL.len());
        let error = operation(ReduceOp::LogSumExp, DType::F32).unwrap_err().to_string();
        assert!(error.contains("logsumexp of f32"), "{error}");
        assert_eq!(operation(ReduceOp::Avg, DType::F32), Ok(4));
    }

    #[test]
    fn bytes_that_are_not_whole_elements_are_refused() {
        assert_eq!(elements(12, DType::F32), Ok(3));
        assert!(elements(13, DType::F32).unwrap_err().to_string().contains("13 bytes"));
    }
}
