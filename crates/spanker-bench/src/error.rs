// SPDX-License-Identifier: Apache-2.0
//! What can go wrong with a benchmark.

use spanker_engine::EngineError;
use spanker_plan::PlanError;
use spanker_scheduler::host::ReduceError;
use spanker_scheduler::{CollectiveError, DeviceError, FabricError};

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
    /// There is no thread for every rank.
    #[error("a thread for each rank: {0}")]
    Threads(std::io::Error),
    /// A thread of a rank has ended early.
    #[error("the thread of rank {0} is gone")]
    Lost(usize),
    /// Claims that got no work.
    #[error("{0} claims of the bench got nothing")]
    Claims(usize),
    /// Cards, models and hosts.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A group of cards.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A topology.
    #[error(transparent)]
    Scheduler(#[from] spanker_scheduler::Error),
    /// A card.
    #[error(transparent)]
    Runtime(#[from] spanker_runtime::Error),
    /// Ranks.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// Buffers in host memory.
    #[error(transparent)]
    Reduce(#[from] ReduceError),
    /// A schedule.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// A plan.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A model's shape.
    #[error(transparent)]
    Model(#[from] spanker_model::ModelError),
    /// A cluster.
    #[error(transparent)]
    Topology(#[from] spanker_topology::TopologyError),
    /// The link's protocol in virtual time.
    #[error(transparent)]
    Link(#[from] spanker_link::sim::Flaw),
    /// A job over backends.
    #[error(transparent)]
    Steal(#[from] spanker_steal::StealError),
    /// A graphics processor.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] spanker_cuda::CudaError),
    /// MPI itself.
    #[cfg(feature = "mpi")]
    #[error(transparent)]
    Mpi(#[from] spanker_fabric_mpi::MpiError),
}

/// What comes of a call.
pub type Result<T, E = BenchError> = std::result::Result<T, E>;
