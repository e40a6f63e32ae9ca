// SPDX-License-Identifier: Apache-2.0
//! The simulator: a plan in virtual time.

pub(crate) mod engine;
pub(crate) mod flow;
