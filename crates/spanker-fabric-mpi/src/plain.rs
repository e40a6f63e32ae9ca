// SPDX-License-Identifier: Apache-2.0
//! `MPI_Allreduce` as a C program would call it, to compare with.

use std::ffi::{c_int, c_void};
use std::time::{Duration, Instant};

use mpi::ffi;
use spanker_fabric::FabricError;

use crate::fabric::MpiFabric;
use crate::raw::{check, int};
use crate::watchdog::{Blocking, watchdog};

unsafe extern "C" {
    static spanker_in_place: *const c_void;
    fn spanker_plain_allreduce(
        data: *mut c_void,
        count: c_int,
        calls: c_int,
        comm: ffi::MPI_Comm,
        seconds: *mut f64,
    ) -> c_int;
}

/// Stands for the send buffer in an operation in place.
pub(crate) fn in_place() -> *const c_void {
    // SAFETY: a constant that the C file has from MPI's header.
    unsafe { spanker_in_place }
}

/// Runs `calls` sums of `data` over all ranks, in place, in a loop that is all C, and returns how long they took.
/// Every rank must call it, with as many elements and calls. It does not agree on that first.
///
/// # Errors
/// What MPI returns. Past `deadline` the process ends.
pub fn plain_all_reduce(
    fabric: &mut MpiFabric,
    data: &mut [f32],
    calls: usize,
    deadline: Instant,
) -> Result<Duration, FabricError> {
    let mut seconds = 0.0;
    let _guard = watchdog().arm(Blocking::Plain, deadline);
    // SAFETY: MPI reads and writes `count` floats of `data`, and the time.
    let code = unsafe {
        spanker_plain_allreduce(
            data.as_mut_ptr().cast(),
            int(data.len()),
            int(calls),
            fabric.comm.0,
            &raw mut seconds,
        )
    };
    check("MPI_Allreduce", code).map_err(|error| {
        let fault = fabric.failed(&error);
        fabric.fail(fault, None)
    })?;
    Ok(Duration::from_secs_f64(seconds.max(0.0)))
}
