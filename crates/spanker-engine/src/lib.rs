// SPDX-License-Identifier: Apache-2.0
//! One engine for every edge: open a model, find a place to run, plan, load, generate, survive a lost card, and lay the
//! run beside its prediction.
//!
//! A [`Host`] is a place to run: threads of this process, cards behind the ABI (real or emulated), GPUs, or ranks that a
//! launcher has started. It plans a [`Model`] with what it has measured of itself, and an [`Engine`] runs that plan: tokens
//! come out of a [`Generation`] one after the other, with the same bits wherever they are made. When a card is lost, the
//! engine lays the model out over the cards that are left and goes on; when a card was wrong, it computes everything
//! again without it and says what was wrong of what it had given out.
//!
//! [`jobs`] share the items of one job among backends of different speeds, whoever fails.
//!
//! Nothing here prints: whoever wants to know what happens gives the host an observer.
#![forbid(unsafe_code)]

mod answering;
mod batch;
mod calibration;
mod cards;
mod catalog;
mod cluster;
mod content;
mod conversation;
pub mod directory;
mod draft;
mod engine;
mod error;
pub mod eval;
mod fetch;
pub mod files;
mod flight;
mod generation;
mod given;
mod gpus;
mod host;
pub mod jobs;
mod layout;
mod machines;
pub mod memory;
mod model;
pub mod models;
mod pieces;
mod profiles;
mod quantize;
mod ranks;
mod sampling;
mod served;
mod service;
pub mod shape;
mod summary;
mod survey;
mod synth;
#[cfg(test)]
mod testing;
mod threads;
mod verify;
mod workers;

pub use batch::{Arrivals, Forecast, ServiceLoad, middle_and_tail};
pub use calibration::Calibration;
pub use cards::explain;
pub use catalog::{Fit, FitPlace, Listed, list_models};
pub use cluster::{ClusterSpec, profile, read_fit};
pub use conversation::Conversation;
pub use directory::CardList;
pub use draft::{
    DraftCounts, DraftForecast, DraftModel, DraftSource, Guess, Lookup, MOST_GUESSES,
    MOST_GUESSES_TOGETHER,
};
pub use engine::{Engine, Finished, Options};
pub use error::{EngineError, Result};
pub use fetch::{FetchEvent, FetchReport, FetchWatch, fetch};
pub use flight::{CardDoing, FlightEntry, FlightReport, read_flight};
pub use generation::{Correction, Generation, Limits, Piece, Stop};
pub use host::{Event, Fabric, Host};
pub use layout::{Split, Wish, request, serving_request};
pub use machines::{MachineSet, MachineSets};
pub use model::{ChatPrompt, Model};
pub use pieces::{Compared, Piece as RunPiece};
pub use profiles::{Freshness, cache_folder};
pub use quantize::{Quantized, quantize};
pub use ranks::RankPlace;
pub use sampling::Sampling;
pub use served::{ExpectedRate, ServedReport};
pub use service::{
    Ask, CardState, CardStatus, Chance, Constraint, Delivery, Done, KvBlocks, Refusal, ServedPiece,
    Service, ServiceOptions, ServicePlan, Status, Taken, Update,
};
pub use summary::{Answer, Drafted, FinishReason, Summary, median, off, rate};
pub use survey::{CardDetails, CardReport, CardRow, LinkRow, mock_cards, survey_cards};
pub use synth::{Synthesized, synthesize};
pub use verify::{Case, Verdict, Verifier};
pub use workers::{
    CachedModel, LinkTimes, ListedWorker, MachineInfo, WorkerEvent, WorkerKey, WorkerOptions,
    WorkerServer, list_workers, new_key, read_key, worker_addresses, write_key,
};

/// A text of somebody else's as it can be shown: without what moves the cursor or hides, and not too long.
fn printable(text: &str) -> String {
    const MOST: usize = 80;
    let shown: String = text.chars().take(MOST).flat_map(char::escape_debug).collect();
    if text.chars().nth(MOST).is_some() { format!("{shown}..") } else { shown }
}
