// SPDX-License-Identifier: Apache-2.0
//! What MPIs with fault tolerance (ULFM) know of dead ranks, looked up when the program runs.
//!
//! MPICH 4 and Open MPI 5 have some of these functions, Open MPI 4 has none. They are asked only about ranks that
//! cannot be watched, because they are on other hosts. Nothing is revoked: the group's own notices still have to
//! pass, and nobody waits inside MPI for them.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use mpi::ffi;

use crate::raw::Comm;

unsafe extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

type Ack = unsafe extern "C" fn(ffi::MPI_Comm) -> c_int;
type Group = unsafe extern "C" fn(ffi::MPI_Comm, *mut ffi::MPI_Group) -> c_int;

/// The functions that this library has.
#[derive(Debug, Clone, Copy)]
struct Functions {
    get_failed: Option<Group>,
    acknowledge: Option<Ack>,
    get_acknowledged: Option<Group>,
}

fn find(name: &CStr) -> *mut c_void {
    // SAFETY: null stands for the libraries that the program was linked with; the name ends in a zero.
    unsafe { dlsym(std::ptr::null_mut(), name.as_ptr()) }
}

fn functions() -> &'static Functions {
    static FOUND: OnceLock<Functions> = OnceLock::new();
    FOUND.get_or_init(|| {
        let ack = |name| {
            let found = find(name);
            // SAFETY: the function of this name takes a communicator and returns a code.
            (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Ack>(found) })
        };
        let group = |name| {
            let found = find(name);
            // SAFETY: the function of this name takes a communicator and where to put a group.
            (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Group>(found) })
        };
        Functions {
            get_failed: group(c"MPIX_Comm_get_failed"),
            acknowledge: ack(c"MPIX_Comm_failure_ack"),
            get_acknowledged: group(c"MPIX_Comm_failure_get_acked"),
        }
    })
}

/// The ranks of a communicator that MPI knows to be dead. None where it does not say.
pub(crate) fn failed(comm: Comm) -> Vec<usize> {
    let Functions { get_failed, acknowledge, get_acknowledged } = *functions();
    // SAFETY: a constant of the library.
    let mut group = unsafe { ffi::RSMPI_GROUP_NULL };
    let code = match (get_failed, acknowledge, get_acknowledged) {
        // SAFETY: the communicator exists, and the group is written by MPI.
        (Some(get), _, _) => unsafe { get(comm.0, &raw mut group) },
        // SAFETY: as above; acknowledging changes nothing but what the next call returns.
        (None, Some(ack), Some(get)) => unsafe {
            match ack(comm.0) {
                0 => get(comm.0, &raw mut group),
                code => code,
            }
        },
        _ => return Vec::new(),
    };
    if code == 0 { members(comm, group) } else { Vec::new() }
}

fn members(comm: Comm, mut group: ffi::MPI_Group) -> Vec<usize> {
    let mut size = 0;
    // SAFETY: MPI has just made the group.
    if unsafe { ffi::MPI_Group_size(group, &raw mut size) } != 0 || size <= 0 {
        return Vec::new();
    }
    let from: Vec<c_int> = (0..size).collect();
    let mut into: Vec<c_int> = vec![-1; from.len()];
    // SAFETY: both lists have `size` entries; both groups exist, and are given back once.
    unsafe {
        let mut all = ffi::RSMPI_GROUP_NULL;
        if ffi::MPI_Comm_group(comm.0, &raw mut all) == 0 {
            ffi::MPI_Group_translate_ranks(group, size, from.as_ptr(), all, into.as_mut_ptr());
            ffi::MPI_Group_free(&raw mut all);
        }
        ffi::MPI_Group_free(&raw mut group);
    }
    into.into_iter().filter_map(|rank| usize::try_from(rank).ok()).collect()
}
