// SPDX-License-Identifier: Apache-2.0
//! Benchmarks beside what was predicted: collectives on every fabric, a model, the planner, the link's frames, the
//! claims of work stealing; and the measurements that become profiles of links and GPUs.
//!
//! A [`Case`] says which collective is measured; a target, where it runs ([`HostMemory`], [`Cards`], ranks, GPUs) measures it
//! for each size, and every target gives the same [`Row`]. What a row compares was measured in the same run, in turns,
//! and each figure is a median. Results are checked against values that are computed here from scratch.
//!
//! Nothing here prints: rows are pulled, and whoever pulls them shows them.
#![forbid(unsafe_code)]

/// An expression in which `T` is the type that a `DType` names.
macro_rules! for_type {
    ($dtype:expr, $type:ident => $call:expr) => {
        for_type!(@ $dtype, $type => $call, F64 f64, F16 spanker_scheduler::f16, Bf16 spanker_scheduler::bf16,
            I32 i32, I64 i64, U8 u8, U32 u32)
    };
    (@ $dtype:expr, $type:ident => $call:expr, $($name:ident $is:ty),*) => {
        match $dtype {
            $(spanker_scheduler::DType::$name => {
                type $type = $is;
                $call
            })*
            _ => {
                type $type = f32;
                $call
            }
        }
    };
}

mod cards;
mod claims;
mod collective;
mod drafts;
mod element;
mod error;
mod frames;
#[cfg(feature = "cuda")]
pub mod gpu;
mod host;
mod links;
mod messages;
mod model;
#[cfg(feature = "mpi")]
mod pairs;
mod planner;
#[cfg(feature = "mpi")]
pub mod ranks;
mod row;
mod samples;
mod serve;
mod sizes;
mod turns;

pub use cards::Cards;
pub use claims::{ClaimCosts, claims};
pub use collective::{BenchTarget, Case, Method, MethodChoice, rows};
pub use drafts::{DraftRow, DraftWork, KindGain, Task, drafts};
pub use element::BenchElement;
pub use error::{BenchError, Result};
pub use frames::{
    FRAMES_BAR_GBPS, FrameRow, SIMULATED_PAYLOAD, SimulatedLink, frames, simulated_link,
};
pub use host::HostMemory;
pub use links::{
    LinkProbe, LinkSample, LinkSurvey, SkippedLink, probe_links, save_links, survey_links,
};
pub use model::{Limit, Memory, ModelRow, Phase, TokenTime, Work, model};
pub use planner::{PlanTime, SimulationTime, planner, simulation};
pub use row::{Beside, Forecast, Measured, Row};
pub use samples::SampleTable;
pub use serve::{
    LoadSeen, LoadTarget, OwnServer, OwnSteps, ServeBench, ServeRow, Times, load_server,
    local_address,
};
pub use sizes::{Sizes, bytes, human};
