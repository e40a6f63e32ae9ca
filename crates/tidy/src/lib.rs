// SPDX-License-Identifier: Apache-2.0
//! Checks of the source tree itself. What can be tested with planted faults is here; what reads the tree is in
//! `tests/`. Nothing depends on this crate.
#![forbid(unsafe_code)]

mod commands;
mod dependencies;
mod includes;
mod spdx;

pub use commands::{listed_commands, recipes};
pub use dependencies::{Metadata, Package, Rules};
pub use includes::includes_of_other_crates;
pub use spdx::is_allowed;
