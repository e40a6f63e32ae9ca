// SPDX-License-Identifier: Apache-2.0
//! All tests of this crate in one program, which is linked once.

mod audit;
mod compare;
mod docs;
mod fit;
mod fit_exchange;
mod fit_forms;
mod fit_plan;
mod fit_tables;
mod marks;
mod memory;
mod programs;
mod python;
mod simulate;
mod trace;
