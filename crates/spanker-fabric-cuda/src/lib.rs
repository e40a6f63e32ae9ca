// SPDX-License-Identifier: Apache-2.0
//! NVIDIA's graphics processors as cards. Their libraries are looked for when the program runs, so that it builds
//! and starts on machines that have none.

mod card;
mod compile;
mod error;
mod load;

pub use card::{Gpu, MemoryInfo, gpu_count};
pub use cudarc::driver::{CudaContext, CudaFunction, CudaModule, CudaSlice, CudaStream};
pub use error::CudaError;
pub use load::{Part, require};
