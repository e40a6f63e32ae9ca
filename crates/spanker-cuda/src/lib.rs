// SPDX-License-Identifier: Apache-2.0
//! NVIDIA's graphics processors as cards. Their libraries are loaded when the program runs, so that it builds
//! and starts on machines that have none.

mod card;
mod compile;
mod discover;
mod error;
mod fabric;
mod kept;
mod load;
mod model;
mod nccl;
mod nvml;
mod probe;
mod product;
mod profile;
mod reduce;

pub use card::{Gpu, MemoryInfo, gpu_count};
pub use cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaSlice, CudaStream, CudaViewMut,
};
pub use discover::{CudaCard, Discovered, Logical, discover, discover_logical};
pub use error::CudaError;
pub use fabric::CudaFabric;
pub use load::{Part, require};
pub use model::{Processors, Programs, Speeds, Subject};
pub use nccl::Nccl;
pub use nvml::{NvLink, Pcie};
pub use probe::{Figure, GpuProbe, PeerProbe, copy_rate, probe, probe_peer};
pub use product::GpuMatmul;
pub use profile::measured;
pub use reduce::{MOST_BUFFERS, all_reduce, reduce};
#[doc(hidden)]
pub use reduce::{Tuning, all_reduce_tuned};
