// SPDX-License-Identifier: Apache-2.0
//! Split one model over several cards: the topology of the cards, the collectives between them, and the
//! decision how to split.
//!
//! This crate is the face of the project. Everything a runtime needs is here by name; the crates behind
//! it can be used on their own.
//!
//! # The whole idea in one example
//!
//! ```
//! use std::time::{Duration, Instant};
//! use spanker_scheduler::{
//!     Algorithm, AllReduce, Collective, MockSail, ReduceOp, Topology, Workspace, execute, inproc,
//!     schedule, verify,
//! };
//!
//! // Four cards. These are mocks: their buffers are in host memory.
//! let cards = Topology::<MockSail>::with_mock(4);
//! assert_eq!(cards.links().len(), 12);
//!
//! // In one address space a collective needs no messages: it runs at the speed of the memory.
//! let mut buffers = vec![vec![1.0f32; 1000], vec![2.0; 1000], vec![3.0; 1000], vec![4.0; 1000]];
//! cards.all_reduce_f32(&mut buffers, ReduceOp::Sum)?;
//! assert!(buffers.iter().flatten().all(|&sum| sum == 10.0));
//!
//! // Between cards it is a schedule: data that can be proved before it runs ..
//! let ring = schedule(Collective::AllReduce, Algorithm::Ring, 4, 1000)?;
//! let proof = verify(&ring)?;
//! assert_eq!((proof.rounds, proof.sent_most), (6, 1500));
//!
//! // .. and that runs over any fabric, here one whose ranks are threads.
//! let sums = std::thread::scope(|scope| {
//!     let ring = &ring;
//!     let ranks: Vec<_> = inproc::group(4)
//!         .into_iter()
//!         .zip(1u8..)
//!         .map(|(mut fabric, card)| {
//!             scope.spawn(move || {
//!                 let mut data = vec![f32::from(card); 1000];
//!                 let deadline = Instant::now() + Duration::from_secs(10);
//!                 let mut workspace = Workspace::new();
//!                 execute(&mut fabric, ring, &mut workspace, &mut data, ReduceOp::Sum, deadline)?;
//!                 Ok::<_, spanker_scheduler::FabricError>(data)
//!             })
//!         })
//!         .collect();
//!     ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Result<Vec<_>, _>>()
//! })?;
//! assert_eq!(sums, buffers);
//! # Ok::<(), spanker_scheduler::Error>(())
//! ```
//!
//! # What is where
//!
//! | to | use |
//! |---|---|
//! | find cards, or make some up | [`Topology`], [`survey`], [`MockSail`] |
//! | reduce and gather over a topology | [`AllReduce`], [`AllGather`], the methods of [`Topology`] |
//! | say how much of a result on cards is checked | [`ResultCheck`], [`Topology::with_result_check`] |
//! | do so with a chosen number of threads | [`host`], [`Team`], [`Threads`] |
//! | build and prove schedules | [`schedule`], [`verify`], [`Collective`], [`Algorithm`] |
//! | run them on cards, with deadlines | [`device`], [`Topology::group`] |
//! | run them between threads, with deadlines | [`execute`], [`inproc`], [`Fabric`] |
//! | rehearse faults | [`Faulty`], [`Faults`] |
//! | find the best split of a model, predict and simulate it | [`planner`] |
//! | split one job over backends of unequal speed | [`stealing`], [`WorkStealingScheduler`] |
//! | know the reference card's numbers | [`bandwidth`], [`intercard`] |
//! | decide as the first version did | [`decision`] |
//!
//! # Bits
//!
//! Collectives over host buffers and on cards, and the one-shot and two-shot schedules, give the bits of the serial
//! fold in card order, whatever the length, the number of threads and the order of arrival. Every other
//! schedule gives the same bits on every run and on every rank. (An average of 16-bit floats over a
//! schedule or on cards divides a sum that was rounded to 16 bits; over host buffers it rounds once.)
#![forbid(unsafe_code)]

pub mod bandwidth;
mod blame;
mod cards;
mod choice;
mod cluster;
pub mod collective;
pub mod decision;
pub mod discover;
mod error;
mod expected;
pub mod intercard;
pub mod probed;
mod sample;
pub mod topology;

/// Collectives over buffers in host memory, with a chosen team and number of threads.
pub mod host {
    pub use spanker_reduce::{
        ReduceError, all_gather, all_reduce, all_to_all, broadcast, gather, memory_limit, reduce,
        reduce_scatter, scatter, threads_for,
    };
}

/// From a model and a cluster to a plan, its prediction, the reason, and its run in virtual time.
pub mod planner {
    pub use spanker_model::{Model, ModelError, Quant, builtin, from_config_json, gguf};
    pub use spanker_plan::{
        Candidate, Choice, Conditions, Explanation, Fault, Layout, Objective, Plan, Prediction,
        Remedies, Request, Stage, Trace, choose, explain, remedies, simulate,
    };
    pub use spanker_topology::{Cluster, Profile, Shape, TopologyError};
}

/// One job over unequal backends: each takes what suits its speed, and every item is done exactly once.
pub mod stealing {
    pub use spanker_steal::{
        Backend, BackendReport, Block, Cancel, Capabilities, Claim, Claims, Cpu, Emulated, Failure,
        Fault, Faulty, Incident, IncidentKind, Job, Ledger, Member, Options, Origin, Piece, Report,
        Scenario, Shard, SimBackend, Simulated, Spans, StealError, Stream, Task, Token, Trouble,
        Unfinished, Verdict, WorkStealingScheduler, efficiency_bound, ideal_seconds, origin,
        simulate, unit_sum,
    };
}

pub use bandwidth::{
    HOST_LINK_BW_BYTES_PER_SEC, INTERCARD_BW_BYTES_PER_SEC, LOCAL_DDR_BW_BYTES_PER_SEC,
};
pub use collective::{AllGather, AllReduce, ModelParallel, TensorParallel};
pub use decision::{Strategy, TileShape, pick_strategy};
pub use discover::{
    DEVICE_DIRECTORY_VARIABLE, Surveyed, SurveyedCard, device_directory, is_without_discovery,
    survey, survey_of, surveyed_links,
};
pub use error::{Error, Result};
pub use intercard::{INTERCARD_BUS_WIDTH, INTERCARD_LANE_WIDTH, INTERCARD_LANES, Link, LinkState};
pub use probed::{LinkEnd, ProbedLink, load_links, save_links};
pub use sample::ResultCheck;
pub use spanker_collective::{
    Algorithm, Collective, CollectiveError, DType, MAX_RANKS, Proof, Rank, ReduceOp, Schedule,
    chunk, schedule, verify,
};
pub use spanker_fabric::device::{Deadline, DeviceError, DeviceErrorKind, DeviceGroup};
pub use spanker_fabric::{
    Fabric, FabricError, Faults, Faulty, Registered, Workspace, conformance, device, execute,
    execute_registered, inproc, launched, launched_rank,
};
pub use spanker_plan::PlanError;
pub use spanker_reduce::{Element, Team, Threads, bf16, f16};
pub use spanker_runtime::SpankerControl;
pub use spanker_steal::{Backend, Shard, WorkStealingScheduler};
pub use spanker_topology::BytesPerSecond;
pub use topology::{MockSail, Topology};
