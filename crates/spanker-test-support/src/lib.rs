// SPDX-License-Identifier: Apache-2.0
//! What tests of several crates share: mock cards behind the ABI, tiny models from a seed, tables of documents.
//! Only a dev-dependency. It knows no fabric and no runner, so that unit tests of those can use it as well.
#![forbid(unsafe_code)]

pub mod cards;
mod recipe;
pub mod tables;

pub use recipe::Recipe;
