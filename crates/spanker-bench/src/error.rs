// SPDX-License-Identifier: Apache-2.0
//! What can go wrong with a benchmark.

use spanker_engine::EngineError;
use spanker_scheduler::{DeviceError, FabricError};

/// A benchmark that could not be made, or could not go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// Buffers that do not fit the memory.
    #[error("{0}")]
    DoesNotFit(String),
    /// Elements of results are wrong.
    #[error("{0}")]
    Wrong(String),
    /// Threads that this machine does not give, or that have ended early.
    #[error("a thread for each rank: {0}")]
    Threads(String),
    /// Cards, models and hosts.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A server that cannot be loaded.
    #[error("{0}")]
    Load(String),
    /// A group of cards.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Ranks.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// What is measured fails by itself.
    #[error(transparent)]
    Subject(Box<dyn std::error::Error + Send + Sync>),
}

macro_rules! subjects {
    ($($(#[$when:meta])? $error:ty),* $(,)?) => {
        $($(#[$when])?
        impl From<$error> for BenchError {
            fn from(error: $error) -> BenchError {
                BenchError::Subject(Box::new(error))
            }
        })*
    };
}

subjects! {
    spanker_link::sim::Flaw,
    spanker_model::ModelError,
    spanker_plan::PlanError,
    spanker_runtime::Error,
    spanker_scheduler::CollectiveError,
    spanker_scheduler::Error,
    spanker_scheduler::host::ReduceError,
    spanker_steal::StealError,
    spanker_topology::TopologyError,
    #[cfg(feature = "cuda")] spanker_cuda::CudaError,
    #[cfg(feature = "mpi")] spanker_fabric_mpi::MpiError,
}

/// What comes of a call.
pub type Result<T, E = BenchError> = std::result::Result<T, E>;
