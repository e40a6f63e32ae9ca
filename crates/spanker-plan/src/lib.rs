// SPDX-License-Identifier: Apache-2.0
//! From profiles of cards and links to a plan, what it costs, and its run in virtual time.
//!
//! In go a model's shape, a cluster of profiled cards and a request; a fit puts measured links and
//! cards in the place of a profile's values. [`choose`] finds layouts and prices them: a collective by
//! timing its schedule (crate `spanker-collective`) on the links, the rest by what each card reads,
//! computes and holds. Out come a [`Plan`] with its [`Prediction`], the reasons for it ([`explain`]),
//! and from [`simulate`] a [`Trace`]. This crate has no I/O, no clock, no threads and no unsafe code.
#![forbid(unsafe_code)]

mod choose;
mod compare;
mod cost;
mod error;
mod explain;
mod fit;
pub mod formula;
mod given;
mod plan;
mod predict;
mod program;
mod report;
mod request;
mod simulate;
mod steps;
mod trace;
mod work;

pub use choose::{Choice, EXACT_CARDS, choose};
pub use compare::{
    CardGap, Causes, CompareError, Comparison, Gap, LeftOut, PieceGap, StepGap, compare,
    compare_pieces,
};
pub use cost::Group;
pub use cost::exchange::{Price, PriceList, cheapest, collective_time, price, prices};
pub use cost::memory::{ALIGNMENT, Allocation, Arena, Footprint};
pub use cost::method::ExchangeMethod;
pub use cost::shard::{Shard, Split};
pub use cost::table::ExchangeTable;
pub use error::PlanError;
pub use explain::{BreakEven, Explanation, Remedies, Resource, explain, remedies};
pub use fit::{
    Band, CardModel, CardSample, CardSamples, CardTime, DecodeTime, FitReport, FitRow, Line,
    LinkModel, LinkSample, LinkSamples, Parameter, decode_time,
};
pub use plan::{
    Candidate, CardMemory, Exchanged, Layout, PLAN_VERSION, Plan, Prediction, Stage, Strategy,
    steps_under_way,
};
pub use program::{
    ATTEND_ROWS, Action, Addend, Apart, Audit, Buffer, CachedCell, CardLayout, Check, Cost, Cut,
    Dice, GpuPlaces, GpuStaging, HostStaging, Load, MAX_CANDIDATES, Member, Numerics,
    OPERATORS_PER_LAYER, Op, Part, Piece, Placing, Programs, Projection, RankLink, Reach, Routes,
    SEGMENT_ALIGNMENT, Samples, Space, Step, StepShape, StepTables, Tap, Taps, Tensor, Terms,
    USUAL_AUDIT, WEIGHT_ALIGNMENT, Want, Wanted, WeightLayout, Wiring, card_layouts, load,
    segments, walk,
};
pub use report::{PlanReport, significant};
pub use request::{Objective, Request, USUAL_BATCH};
pub use simulate::{
    Conditions, Fault, MAX_TOKENS, SimulationReport, Slow, TimedIncident, simulate,
};
pub use steps::StepPrices;
pub use trace::perfetto::{Origin, TraceError, perfetto_of_both, read_perfetto};
pub use trace::{Activity, Incident, Label, Mark, Parts, Trace};
pub use work::{
    Activation, BufferId, Descriptor, Fold, KvCache, Landing, MAX_BEST, MAX_EXPERTS, MAX_SOURCES,
    MAX_WRITE, PICK_BYTES, Picks, Place, ROW_BYTES, Scores, Work,
};
