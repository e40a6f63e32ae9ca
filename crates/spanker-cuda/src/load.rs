// SPDX-License-Identifier: Apache-2.0
//! Whether NVIDIA's libraries are there. Everything else here asks first: the bindings end the thread where one is
//! missing.

use std::fmt;

use crate::CudaError;

/// A library of NVIDIA's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The driver, which comes with the kernel's module.
    Driver,
    /// The compiler for kernels at run time.
    Compiler,
    /// Collectives between processors.
    Nccl,
}

impl Part {
    /// How to get it.
    pub(crate) fn hint(self) -> &'static str {
        match self {
            Part::Driver => {
                "install NVIDIA's driver (Debian: nvidia-driver, Ubuntu: nvidia-driver-580 or newer); without a GPU use --fabric inproc"
            }
            Part::Compiler => {
                "install NVRTC of CUDA 12 or 13 (Debian: libnvrtc12, PyPI: nvidia-cuda-nvrtc) and have its folder in LD_LIBRARY_PATH"
            }
            Part::Nccl => {
                "install NCCL 2 (Debian and Ubuntu: libnccl2, PyPI: nvidia-nccl-cu13) and have its folder in LD_LIBRARY_PATH"
            }
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Part::Driver => "CUDA driver",
            Part::Compiler => "CUDA compiler for kernels (NVRTC)",
            Part::Nccl => "NCCL",
        })
    }
}

/// Checks that a library is there.
///
/// # Errors
/// [`CudaError::Missing`], which says how to get it.
///
/// ```
/// use spanker_cuda::{CudaError, Part, require};
///
/// match require(Part::Driver) {
///     Ok(()) => println!("there may be a GPU"),
///     Err(CudaError::Missing { part, .. }) => assert_eq!(part, Part::Driver),
///     Err(other) => panic!("{other}"),
/// }
/// ```
pub fn require(part: Part) -> Result<(), CudaError> {
    // SAFETY: these load the library by its name, as linking to it would have, and read nothing else.
    let (present, name) = unsafe {
        match part {
            Part::Driver => (cudarc::driver::sys::is_culib_present(), "libcuda.so.1"),
            Part::Compiler => (cudarc::nvrtc::sys::is_culib_present(), "libnvrtc.so"),
            Part::Nccl => return crate::nccl::library::functions().map(|_| ()),
        }
    };
    match present {
        true => Ok(()),
        false => Err(CudaError::Missing { part, what: format!("{name} was not found") }),
    }
}
