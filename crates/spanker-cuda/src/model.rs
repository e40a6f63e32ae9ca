// SPDX-License-Identifier: Apache-2.0
//! A model on graphics processors: programs of `spanker-llm` as lists of lines that one kernel goes through.

mod lines;
mod machine;
mod planes;
mod speeds;
mod station;
mod streams;
mod told;

pub use machine::{Processors, Programs};
pub use speeds::{Speeds, Subject};

pub(crate) use lines::{Line, kind, many_rows};
pub(crate) use station::{Station, Workspace, address};
