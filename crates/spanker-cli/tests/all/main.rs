// SPDX-License-Identifier: Apache-2.0
//! All tests of the command in one program: they are linked once, and share the machine's cores.

#[path = "../support/gguf.rs"]
mod gguf;
#[path = "../support/place.rs"]
mod place;
#[path = "../support/scratch.rs"]
mod scratch;

mod cards;
mod cli;
mod compare;
#[cfg(feature = "cuda")]
mod cuda;
mod eval;
mod families;
mod fit;
mod hints;
mod llm;
mod llm_cards;
mod manners;
mod models;
mod plan;
mod profile;
mod report;
mod serve;
mod steal;
mod twin;
mod workers;
