// SPDX-License-Identifier: Apache-2.0
//! The shape of a Llama-family model, with the bytes of every matrix as stored.
//!
//! A [`Model`] says how large each matrix of each layer is and in which type ([`Quant`]) it is
//! stored: what a planner needs to lay a model over cards. It comes from one of three sources:
//! [`builtin`] models by name, a Hugging Face `config.json` ([`from_config_json`]), or the header of
//! a GGUF file ([`gguf::Header`]). Weights are never read, and nothing here computes with them. The
//! crate opens no file: a GGUF header comes through any reader.
//!
//! ```
//! use spanker_model::{Quant, builtin};
//!
//! let model = builtin("llama-2-7b", Quant::Q4_0)?;
//! assert_eq!(model.parameters(), 6_738_415_616);
//! // Decoding a token reads every weight but the embedding table: 3.7 GB.
//! assert_eq!(model.read_per_token() / 1_000_000, 3717);
//! // A token leaves a key and a value of 4096 elements in each of 32 layers.
//! assert_eq!(model.kv_bytes_per_token(Quant::F16), 32 * 2 * 4096 * 2);
//! # Ok::<(), spanker_model::ModelError>(())
//! ```
#![forbid(unsafe_code)]

mod builtin;
mod config;
mod error;
mod experts;
pub mod gguf;
mod kv;
mod layer;
mod model;
mod quant;
mod shape;
mod variant;
mod wire;

pub use builtin::{builtin, builtin_names};
pub use config::from_config_json;
pub use error::ModelError;
pub use experts::{
    Experts, Gating, MAX_EXPERTS, Mixture, SharedExpert, distinct_experts, gating_of,
};
pub use kv::{KV_BLOCK, KvShape, Strided};
pub use layer::{Layer, Matrix};
pub use model::{MAX_LAYERS, Model};
pub use quant::Quant;
pub use variant::{Activation, Number, Turning, Variant};
