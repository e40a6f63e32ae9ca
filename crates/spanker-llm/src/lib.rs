// SPDX-License-Identifier: Apache-2.0
//! A Llama-family model, split over cards.
//!
//! A [`Network`] is a GGUF file's bytes with what it takes to compute with them. A plan says which card holds
//! what; `spanker-plan` turns it into one list of operators and exchanges for each card, and a [`Runner`] runs
//! the lists: [`InProcess`] on threads of this process, which read the weights where they lie, [`OnRanks`] on
//! the ranks of a fabric, which are processes on one host or several, [`OnCards`] on cards behind the ABI, and
//! [`OnMachine`] on whatever has memory of its own and goes through programs itself. All compute the same functions of
//! `ggml-spanker` in the same order, so that tokens do not depend on where they are made, and not on the number of
//! cards either, unless the plan asks
//! for sums of parts (`Split::Reduce`).
//!
//! Nothing here reads files, text or the command line.
#![forbid(unsafe_code)]

// Support of tests names this crate as tests outside of it do.
#[cfg(test)]
extern crate self as spanker_llm;

mod audit;
mod card;
mod cards;
mod error;
mod evaluator;
mod fingerprint;
mod inproc;
mod layout;
mod machine;
mod measure;
mod network;
mod pieces;
mod ranks;
mod recorder;
mod runner;
mod session;
mod twice;
mod verify;

pub use audit::{AuditLog, Found};
pub use cards::{Loading, OnCards, require_operators};
pub use error::LlmError;
pub use evaluator::{Evaluator, Rounding};
pub use fingerprint::fingerprint;
pub use inproc::InProcess;
pub use layout::check_plan;
pub use machine::{Capture, Captures, Machine, OnMachine, Region, Role, Spent};
pub use measure::{Measurement, Subject, measure, unmeasured};
pub use network::{LongRope, Network, Rope};
pub use ranks::{
    CHUNK_BYTES, Leader, NeededBytes, OnRanks, RankSamples, Store, Worker, chunk_count,
    chunk_range, fetch_chunks, needed_bytes, reading_time, run_worker, supply_chunks,
};
pub use recorder::Recorder;
pub use runner::{MemoryUse, Outcome, Output, Part, Runner, Step, Timing};
pub use session::Session;
pub use spanker_plan::{Want, WindowCache};
pub use twice::{Searched, Twice};
pub use verify::{
    Bound, Difference, Distance, Fault, RunLogits, Side, examine_reduce, run_logits,
    run_logits_guessing,
};
