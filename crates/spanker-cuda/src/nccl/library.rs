// SPDX-License-Identifier: Apache-2.0
//! NCCL's functions, found when the program runs. The library is called `libnccl.so.2` where only programs use it and
//! `libnccl.so` where it is also built against; either will do.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::Library;

use crate::{CudaError, Part};

/// The file names of the library.
pub(crate) const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// A communicator of the library.
pub(crate) type Comm = *mut c_void;
/// A stream of the driver.
pub(crate) type Stream = *mut c_void;

type Plain = unsafe extern "C" fn() -> c_int;
type Describe = unsafe extern "C" fn(c_int) -> *const c_char;
type Version = unsafe extern "C" fn(*mut c_int) -> c_int;
type InitAll = unsafe extern "C" fn(*mut Comm, c_int, *const c_int) -> c_int;
type Destroy = unsafe extern "C" fn(Comm) -> c_int;
type Reduce =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
type Gather = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Comm, Stream) -> c_int;

/// The functions that are used.
#[derive(Debug)]
pub(crate) struct Functions {
    describe: Describe,
    version: Version,
    pub(crate) init_all: InitAll,
    pub(crate) destroy: Destroy,
    pub(crate) group_start: Plain,
    pub(crate) group_end: Plain,
    pub(crate) all_reduce: Reduce,
    pub(crate) reduce_scatter: Reduce,
    /// Its next to last number is the root.
    pub(crate) broadcast: Reduce,
    pub(crate) all_gather: Gather,
    /// Keeps the functions where they are.
    _library: Library,
}

/// The library, loaded once.
///
/// # Errors
/// [`CudaError::Missing`], which says how to get it.
pub(crate) fn functions() -> Result<&'static Functions, CudaError> {
    static LOADED: OnceLock<Result<Functions, CudaError>> = OnceLock::new();
    LOADED.get_or_init(|| load(&NAMES)).as_ref().map_err(Clone::clone)
}

fn load(names: &[&str]) -> Result<Functions, CudaError> {
    let missing = |what: String| CudaError::Missing { part: Part::Nccl, what };
    let library = names
        .iter()
        // SAFETY: the library is loaded by its name, as linking to it would have; it does nothing on its own.
        .find_map(|name| unsafe { Library::new(*name) }.ok())
        .ok_or_else(|| missing(format!("{} was not found", names.join(" or "))))?;
    let lacks =
        |error: libloading::Error| missing(format!("its library lacks a function: {error}"));
    // SAFETY: the types are those of NCCL's header, which has not changed them since version 2.
    unsafe {
        Ok(Functions {
            describe: *library.get::<Describe>(b"ncclGetErrorString\0").map_err(lacks)?,
            version: *library.get::<Version>(b"ncclGetVersion\0").map_err(lacks)?,
            init_all: *library.get::<InitAll>(b"ncclCommInitAll\0").map_err(lacks)?,
            destroy: *library.get::<Destroy>(b"ncclCommDestroy\0").map_err(lacks)?,
            group_start: *library.get::<Plain>(b"ncclGroupStart\0").map_err(lacks)?,
            group_end: *library.get::<Plain>(b"ncclGroupEnd\0").map_err(lacks)?,
            all_reduce: *library.get::<Reduce>(b"ncclAllReduce\0").map_err(lacks)?,
            reduce_scatter: *library.get::<Reduce>(b"ncclReduceScatter\0").map_err(lacks)?,
            broadcast: *library.get::<Reduce>(b"ncclBroadcast\0").map_err(lacks)?,
            all_gather: *library.get::<Gather>(b"ncclAllGather\0").map_err(lacks)?,
            _library: library,
        })
    }
}

impl Functions {
    /// The library's answer to a call as an error, if it is one.
    pub(crate) fn check(&self, what: &str, answer: c_int) -> Result<(), CudaError> {
        if answer == 0 {
            return Ok(());
        }
        // SAFETY: the library has a text, which is never freed, for every number.
        let text = unsafe { (self.describe)(answer) };
        let message = match text.is_null() {
            true => format!("NCCL error {answer}"),
            // SAFETY: it is a text that ends with a zero byte.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        };
        Err(CudaError::Call { what: format!("NCCL: {what}"), message })
    }

    /// The library's version, as in 2.27.3.
    pub(crate) fn version(&self) -> Result<String, CudaError> {
        let mut version = 0;
        // SAFETY: the library writes one number.
        self.check("version", unsafe { (self.version)(&raw mut version) })?;
        Ok(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_missing_is_named_with_what_to_install() {
        let error = load(&["libnccl-of-nobody.so.2", "libnccl-of-nobody.so"]).unwrap_err();
        let said = error.to_string();
        for part in
            ["libnccl-of-nobody.so.2 or ", "libnccl2", "nvidia-nccl-cu13", "LD_LIBRARY_PATH"]
        {
            assert!(said.contains(part), "{said}");
        }
    }

    #[test]
    fn a_library_that_is_not_nccl_is_refused() {
        let error = load(&["libc.so.6"]).unwrap_err();
        assert!(error.to_string().contains("nccl"), "{error}");
    }
}
