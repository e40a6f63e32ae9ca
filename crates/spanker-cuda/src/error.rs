// SPDX-License-Identifier: Apache-2.0
//! What can go wrong with a graphics processor, in words that say what to do about it.

use crate::Part;

/// A fault of a graphics processor or of its libraries.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// A library is not there.
    #[error("no {part}: {what}\nhint: {hint}", hint = part.hint())]
    Missing {
        /// Which.
        part: Part,
        /// What was searched for.
        what: String,
    },
    /// The driver is there and sees no processor.
    #[error(
        "the CUDA driver sees no GPU\nhint: 'nvidia-smi' lists those that the driver has; CUDA_VISIBLE_DEVICES may hide them"
    )]
    NoDevice,
    /// The driver is older than what is used of it.
    #[error(
        "the CUDA driver speaks CUDA {}, and {} is needed\nhint: install a newer driver (Ubuntu: nvidia-driver-580 or newer)",
        version(*found),
        version(*needed)
    )]
    OldDriver {
        /// The version of CUDA that it speaks, as in 11040 for 11.4.
        found: u32,
        /// The version that is needed.
        needed: u32,
    },
    /// A library refused a call.
    #[error("{what}: {message}")]
    Call {
        /// What was tried.
        what: String,
        /// What the library said.
        message: String,
    },
    /// The processor has less memory than is needed.
    #[error(
        "GPU {gpu} is out of memory: {needed} bytes for {what}, {free} of {total} are free\nhint: a smaller --ctx-size or --batch-size, fewer layers on this card, or a smaller model"
    )]
    Memory {
        /// Which processor.
        gpu: usize,
        /// What the memory was for.
        what: String,
        /// Bytes that were asked for.
        needed: u64,
        /// Bytes that are free.
        free: u64,
        /// Bytes that it has.
        total: u64,
    },
    /// Source that the compiler at run time refused.
    #[error("the kernel {name} was not compiled: {log}")]
    Compile {
        /// Which kernel.
        name: String,
        /// What the compiler said.
        log: String,
    },
    /// Something that no kernel does.
    #[error("{0}")]
    Unsupported(String),
}

impl CudaError {
    /// A call that was refused.
    pub(crate) fn call(what: impl Into<String>, error: &dyn std::fmt::Debug) -> CudaError {
        CudaError::Call { what: what.into(), message: format!("{error:?}") }
    }
}

/// 12040 as people write it: 12.4.
pub(crate) fn version(number: u32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}
