// SPDX-License-Identifier: Apache-2.0
//! Ranks that are processes, on one host or several, over the machine's MPI.
//!
//! * [`World`]: this process as a rank. It starts and ends MPI and knows the others.
//! * [`MpiFabric`]: one rank's end of a group. It runs the same schedules as every fabric, and passes the same
//!   conformance suite; [`MpiFabric::native`] runs MPI's own collectives instead.
//! * [`Window`]: memory of rank 0 that every rank adds to, reads and writes by itself.
//! * [`launched`]: whether a launcher started this process, without asking MPI.
//! * [`plain_all_reduce`]: `MPI_Allreduce` in a loop in C, to compare with.
//!
//! # When a rank dies
//!
//! Ranks of one host watch each other's processes. A rank that waits for messages sees within milliseconds that
//! another is gone, and all that are left report [`FabricError::Died`](spanker_fabric::FabricError::Died) with its
//! number. Ranks of other hosts are asked for by ULFM where the library has it (MPICH 4, Open MPI 5); else the
//! deadline ends the wait, and names the rank.
//!
//! That is, if they get to say so. `mpirun` of Open MPI 4 kills all ranks when one ends without having ended MPI,
//! unless it was started with `--enable-recovery`. That of MPICH 4.0 does so within milliseconds, with
//! `-disable-auto-cleanup` as well. Errors that MPI returns for messages to the dead are
//! [`FabricError::Failed`](spanker_fabric::FabricError::Failed), in MPI's words.
//!
//! MPI's own collectives do not come back when a rank is missing, and cannot be made to. A thread watches over
//! them: past the deadline, or when a rank of this host is dead, it says so and ends the process with code 1.

mod error;
mod fabric;
mod fault;
mod native;
mod plain;
mod raw;
mod ulfm;
mod wait;
mod watch;
mod watchdog;
mod window;
mod world;

pub use error::MpiError;
pub use fabric::MpiFabric;
pub use plain::plain_all_reduce;
pub use spanker_fabric::launched;
pub use window::Window;
pub use world::{World, library};
