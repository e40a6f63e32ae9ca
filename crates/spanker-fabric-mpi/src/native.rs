// SPDX-License-Identifier: Apache-2.0
//! MPI's own collectives as one more way to run a call.
//!
//! They block, and work in the caller's buffer. So they are as fast as MPI is, and a call that fails leaves the
//! buffer in any state. Ranks agree on a call the first time that it is made, and not again.

use std::ffi::{c_int, c_void};
use std::time::Instant;

use mpi::ffi;
use spanker_collective::{Algorithm, Collective, DType, Rank, ReduceOp, chunk};
use spanker_fabric::wire::call_bytes;
use spanker_fabric::{Call, Fabric, FabricError};
use spanker_reduce::{Element, divide};

use crate::fabric::MpiFabric;
use crate::plain::in_place;
use crate::raw::{LONGEST, check, int};
use crate::watchdog::{Blocking, Watchdog, watchdog};

/// Stands for the schedule, which MPI's collectives do not have.
const NO_SCHEDULE: u64 = u64::from_be_bytes(*b"mpi's   ");

/// The type of elements, where MPI has it.
fn datatype(dtype: DType) -> Option<ffi::MPI_Datatype> {
    // SAFETY: constants of the library.
    unsafe {
        Some(match dtype {
            DType::F32 => ffi::RSMPI_FLOAT,
            DType::F64 => ffi::RSMPI_DOUBLE,
            DType::I32 => ffi::RSMPI_INT32_T,
            DType::I64 => ffi::RSMPI_INT64_T,
            DType::U8 => ffi::RSMPI_UINT8_T,
            DType::U32 => ffi::RSMPI_UINT32_T,
            _ => return None,
        })
    }
}

/// The operation, where MPI has it. An average is a sum that is divided afterwards.
fn operation(op: ReduceOp) -> Option<ffi::MPI_Op> {
    // SAFETY: constants of the library.
    unsafe {
        Some(match op {
            ReduceOp::Sum | ReduceOp::Avg => ffi::RSMPI_SUM,
            ReduceOp::Product => ffi::RSMPI_PROD,
            ReduceOp::Max => ffi::RSMPI_MAX,
            ReduceOp::Min => ffi::RSMPI_MIN,
            ReduceOp::BitwiseOr => ffi::RSMPI_BOR,
            ReduceOp::BitwiseAnd => ffi::RSMPI_BAND,
            ReduceOp::BitwiseXor => ffi::RSMPI_BXOR,
            _ => return None,
        })
    }
}

/// How many elements each rank's chunk has, and where it begins, as MPI wants them.
fn chunks(elements: usize, ranks: usize) -> (Vec<c_int>, Vec<c_int>) {
    let parts = (0..ranks).map(|rank| chunk(elements, ranks, rank));
    parts.map(|part| (int(part.len()), int(part.start))).unzip()
}

/// A call of MPI's own, as it was last agreed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Native {
    collective: Collective,
    elements: usize,
    dtype: DType,
    op: ReduceOp,
}

/// What a call needs that is like the one before: everything that can be found out once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ready {
    native: Native,
    deadline: Instant,
    /// The deadline as the watchdog counts.
    nanos: u64,
    dog: &'static Watchdog,
    comm: ffi::MPI_Comm,
    in_place: *const c_void,
    dtype: ffi::MPI_Datatype,
    op: ffi::MPI_Op,
}

impl MpiFabric {
    /// Runs MPI's own collective on `data`, which is laid out as for [`spanker_fabric::execute`], and in which it
    /// works. The first call of each kind is agreed on between the ranks; after that it costs what MPI costs.
    ///
    /// Ranks that later make different calls, all of which were agreed on before, are not detected: MPI fails
    /// or waits, and then the deadline ends the process.
    ///
    /// Floats are folded in whatever order MPI likes, and what it makes of a NaN under max and min is its own.
    ///
    /// # Errors
    /// [`FabricError::Refused`] for types and operations that MPI does not have (16-bit floats, logsumexp), for
    /// an all-to-all whose length the ranks do not divide and for more elements than MPI counts; the group's
    /// fault; and what MPI returns. After an error `data` is in any state. Past `deadline`, or when a rank of
    /// this host dies, the process ends with code 1: MPI cannot be asked to come back.
    // Where ranks share cores, every page and every branch that is touched between two calls of MPI costs what it
    // takes after a switch between processes. So the common case is inlined into the
    // caller, and everything else is out of line.
    #[inline(always)]
    #[allow(clippy::inline_always)]
    pub fn native<T: Element>(
        &mut self,
        collective: Collective,
        data: &mut [T],
        op: ReduceOp,
        deadline: Instant,
    ) -> Result<(), FabricError> {
        let op = if collective.reduces() { op } else { ReduceOp::Sum };
        let wanted = Native { collective, elements: data.len(), dtype: T::DTYPE, op };
        // Calls that are made again and again cost a comparison and three stores: a fault of the group makes what
        // is ready unready.
        let is_ready = |ready: &&Ready| ready.native == wanted && ready.deadline == deadline;
        let ready = match self.ready.as_ref().filter(is_ready) {
            Some(ready) if collective == Collective::AllReduce && op != ReduceOp::Avg => ready,
            _ => return self.native_apart(collective, data, op, wanted, deadline),
        };
        let (count, pointer) = (data.len() as c_int, data.as_mut_ptr().cast::<c_void>());
        let Ready { dog, nanos, in_place, dtype, op, comm, .. } = *ready;
        let guard = dog.arm_at(Blocking::Native, nanos);
        // SAFETY: MPI reads and writes `count` elements of this type at `pointer`, which are those of `data`, and
        // does not keep the pointer: the call blocks. The ranks have agreed on it, and MPI counts so far.
        let code = unsafe { ffi::MPI_Allreduce(in_place, pointer, count, dtype, op, comm) };
        drop(guard);
        if code == 0 { Ok(()) } else { self.native_failed("MPI_Allreduce", code) }
    }

    /// Calls that are not like the one before, or not of the most common kind.
    #[inline(never)]
    fn native_apart<T: Element>(
        &mut self,
        collective: Collective,
        data: &mut [T],
        op: ReduceOp,
        wanted: Native,
        deadline: Instant,
    ) -> Result<(), FabricError> {
        let ready = self.make_ready(wanted, deadline)?;
        let guard = ready.dog.arm_at(Blocking::Native, ready.nanos);
        let outcome = self.run_native(collective, data, ready.dtype, ready.op);
        drop(guard);
        match outcome {
            Ok(()) if op == ReduceOp::Avg => self.average(collective, data),
            Ok(()) => {}
            Err((name, code)) => return self.native_failed(name, code),
        }
        Ok(())
    }

    /// Turns sums into averages, where this rank has some.
    fn average<T: Element>(&self, collective: Collective, data: &mut [T]) {
        let (rank, ranks) = (self.rank(), self.ranks());
        match collective {
            Collective::ReduceScatter => {
                let mine = chunk(data.len(), ranks, rank);
                divide(&mut data[mine], ranks);
            }
            Collective::Reduce { root } if root != rank => {}
            _ => divide(data, ranks),
        }
    }

    /// Makes what MPI returned the group's fault.
    #[cold]
    fn native_failed(&mut self, name: &'static str, code: c_int) -> Result<(), FabricError> {
        let error = check(name, code).err();
        let fault = error.map(|error| self.failed(&error));
        fault.map_or(Ok(()), |fault| Err(self.fail(fault, None)))
    }

    /// What is not as it was in the call before: who wants what, and until when.
    fn make_ready(&mut self, wanted: Native, deadline: Instant) -> Result<Ready, FabricError> {
        if let Some(verdict) = self.notices.verdict() {
            return Err(verdict);
        }
        let dog = watchdog();
        let nanos = dog.nanos(deadline);
        let ready = match self.ready.filter(|ready| ready.native == wanted) {
            Some(ready) => Ready { deadline, nanos, ..ready },
            None => {
                self.agree_on(wanted, deadline)?;
                let (dtype, op) = (datatype(wanted.dtype), operation(wanted.op));
                let Some((dtype, op)) = dtype.zip(op) else {
                    let (rank, reason) = (self.rank(), format!("MPI has no {wanted:?}"));
                    return Err(self.abort(FabricError::Refused { rank, reason }));
                };
                let (comm, in_place) = (self.comm.0, in_place());
                Ready { native: wanted, deadline, nanos, dog, comm, in_place, dtype, op }
            }
        };
        self.ready = Some(ready);
        Ok(ready)
    }

    /// Whether MPI has what is wanted, and everyone wants it.
    fn agree_on(&mut self, wanted: Native, deadline: Instant) -> Result<(), FabricError> {
        let rank = self.rank();
        if let Some(reason) = self.objection(wanted) {
            return Err(self.abort(FabricError::Refused { rank, reason }));
        }
        let Native { collective, elements, dtype, op } = wanted;
        let algorithm = Algorithm::OneShot;
        let call = Call { collective, algorithm, elements, dtype, op, plan: NO_SCHEDULE };
        let bytes = call_bytes(&call);
        if !self.agreed.contains(&bytes) {
            self.commit(&call, deadline)?;
            self.agreed.insert(bytes);
        }
        Ok(())
    }

    /// Why MPI cannot do what is wanted.
    fn objection(&self, wanted: Native) -> Option<String> {
        let Native { collective, elements, dtype, op } = wanted;
        let ranks = self.ranks();
        if datatype(dtype).is_none() {
            return Some(format!("MPI has no elements of type {dtype}"));
        }
        if collective.reduces() && !op.is_defined_for(dtype) {
            return Some(format!("operation {op} is not defined for {dtype}"));
        }
        if collective.reduces() && operation(op).is_none() {
            return Some(format!("MPI has no operation {op}"));
        }
        if elements > LONGEST / dtype.size() {
            return Some(format!("{elements} elements of {dtype}: MPI counts to {LONGEST} bytes"));
        }
        if let Some(root) = collective.root().filter(|&root| root >= ranks) {
            return Some(format!("root {root}: the group has {ranks} ranks"));
        }
        let uneven = collective == Collective::AllToAll && !elements.is_multiple_of(ranks);
        uneven.then(|| format!("MPI's all-to-all: {ranks} ranks do not divide {elements} elements"))
    }

    /// MPI's call. The error is its name and its code.
    fn run_native<T: Element>(
        &mut self,
        collective: Collective,
        data: &mut [T],
        dtype: ffi::MPI_Datatype,
        op: ffi::MPI_Op,
    ) -> Result<(), (&'static str, c_int)> {
        let (rank, comm) = (self.life.rank, self.comm.0);
        let (count, pointer) = (int(data.len()), data.as_mut_ptr().cast::<c_void>());
        let done =
            |name: &'static str, code: c_int| if code == 0 { Ok(()) } else { Err((name, code)) };
        match collective {
            // SAFETY: here and below, MPI reads and writes `count` elements of `dtype` at `pointer`, which are
            // those of `data`, and does not keep the pointer: the calls block. The ranks have agreed on the
            // collective, the count, the type and the root.
            Collective::AllReduce => done("MPI_Allreduce", unsafe {
                ffi::MPI_Allreduce(in_place(), pointer, count, dtype, op, comm)
            }),
            Collective::Broadcast { root } => {
                // SAFETY: as above.
                let code = unsafe { ffi::MPI_Bcast(pointer, count, dtype, int(root), comm) };
                done("MPI_Bcast", code)
            }
            Collective::Reduce { root } => {
                // Not in place: MPICH 4.0 crashes on that at roots other than rank 0.
                let spare = self.scratch::<T>(data.len());
                spare.copy_from_slice(data);
                let spare = spare.as_mut_ptr().cast::<c_void>();
                let into = if root == rank { pointer } else { spare };
                let from = if root == rank { spare } else { pointer };
                // SAFETY: as above; `spare` has as many elements of the fabric's own, apart from `data`.
                done("MPI_Reduce", unsafe {
                    ffi::MPI_Reduce(from.cast_const(), into, count, dtype, op, int(root), comm)
                })
            }
            // SAFETY: a barrier has no buffer.
            Collective::Barrier => done("MPI_Barrier", unsafe { ffi::MPI_Barrier(comm) }),
            Collective::AllGather | Collective::Gather { .. } | Collective::Scatter { .. } => {
                self.move_chunks(collective, data, dtype)
            }
            Collective::ReduceScatter => self.reduce_scatter(data, dtype, op),
            Collective::AllToAll => self.all_to_all(data, dtype),
            _ => Ok(()),
        }
    }

    /// Collectives that move chunks between ranks. Chunks may differ by one element.
    fn move_chunks<T: Element>(
        &self,
        collective: Collective,
        data: &mut [T],
        dtype: ffi::MPI_Datatype,
    ) -> Result<(), (&'static str, c_int)> {
        let (rank, ranks, comm) = (self.life.rank, self.life.ranks, self.comm.0);
        let mine = chunk(data.len(), ranks, rank);
        let (counts, places) = chunks(data.len(), ranks);
        let even = data.len().is_multiple_of(ranks);
        let first = data.as_mut_ptr();
        let chunk = first.wrapping_add(mine.start).cast::<c_void>();
        let (count, all) = (int(mine.len()), first.cast::<c_void>());
        let (counts, places) = (counts.as_ptr(), places.as_ptr());
        let (name, code) = match collective {
            // SAFETY: here and below, the chunks of all ranks lie within `data`, one after the other, as `counts`
            // and `places` say, or equal ones of `count` each. The lists have an entry for each rank.
            Collective::AllGather if even => ("MPI_Allgather", unsafe {
                ffi::MPI_Allgather(in_place(), count, dtype, all, count, dtype, comm)
            }),
            // SAFETY: as above.
            Collective::AllGather => ("MPI_Allgatherv", unsafe {
                ffi::MPI_Allgatherv(in_place(), count, dtype, all, counts, places, dtype, comm)
            }),
            Collective::Gather { root } => {
                let from = if root == rank { in_place() } else { chunk.cast_const() };
                let root = int(root);
                // SAFETY: as above; only the root's buffer is written, and its own chunk is in its place.
                ("MPI_Gatherv", unsafe {
                    ffi::MPI_Gatherv(from, count, dtype, all, counts, places, dtype, root, comm)
                })
            }
            Collective::Scatter { root } => {
                let into = if root == rank { in_place().cast_mut() } else { chunk };
                let (from, root) = (all.cast_const(), int(root));
                // SAFETY: as above; the root's own chunk stays in its place.
                ("MPI_Scatterv", unsafe {
                    ffi::MPI_Scatterv(from, counts, places, dtype, into, count, dtype, root, comm)
                })
            }
            _ => return Ok(()),
        };
        if code == 0 { Ok(()) } else { Err((name, code)) }
    }

    /// `elements` of the fabric's own memory.
    fn scratch<T: Element>(&mut self, elements: usize) -> &mut [T] {
        let bytes = elements * size_of::<T>();
        let words = bytes.div_ceil(size_of::<u64>());
        if self.scratch.len() < words {
            self.scratch.resize(words, 0);
        }
        bytemuck::cast_slice_mut(
            &mut bytemuck::cast_slice_mut::<u64, u8>(&mut self.scratch)[..bytes],
        )
    }

    fn reduce_scatter<T: Element>(
        &mut self,
        data: &mut [T],
        dtype: ffi::MPI_Datatype,
        op: ffi::MPI_Op,
    ) -> Result<(), (&'static str, c_int)> {
        let (ranks, comm, mine) = (self.life.ranks, self.comm.0, self.own_chunk(data.len()));
        let (counts, _) = chunks(data.len(), ranks);
        let even = data.len().is_multiple_of(ranks);
        let from = data.as_ptr().cast();
        let result = self.scratch::<T>(mine.len());
        let into = result.as_mut_ptr().cast();
        let (name, code) = if even {
            // SAFETY: `data` has a chunk of this count for each rank, and the result is one, apart from it.
            ("MPI_Reduce_scatter_block", unsafe {
                ffi::MPI_Reduce_scatter_block(from, into, int(mine.len()), dtype, op, comm)
            })
        } else {
            // SAFETY: as above, with a count for each rank.
            ("MPI_Reduce_scatter", unsafe {
                ffi::MPI_Reduce_scatter(from, into, counts.as_ptr(), dtype, op, comm)
            })
        };
        if code != 0 {
            return Err((name, code));
        }
        data[mine].copy_from_slice(result);
        Ok(())
    }

    fn own_chunk(&self, elements: usize) -> std::ops::Range<usize> {
        let rank: Rank = self.life.rank;
        chunk(elements, self.life.ranks, rank)
    }

    fn all_to_all<T: Element>(
        &mut self,
        data: &mut [T],
        dtype: ffi::MPI_Datatype,
    ) -> Result<(), (&'static str, c_int)> {
        let (each, comm) = (int(data.len() / self.life.ranks), self.comm.0);
        let copy = self.scratch::<T>(data.len());
        copy.copy_from_slice(data);
        let (from, into) = (copy.as_ptr().cast(), data.as_mut_ptr().cast());
        // SAFETY: both buffers have a block of `each` elements for each rank, and are apart.
        let code = unsafe { ffi::MPI_Alltoall(from, each, dtype, into, each, dtype, comm) };
        if code == 0 { Ok(()) } else { Err(("MPI_Alltoall", code)) }
    }
}
