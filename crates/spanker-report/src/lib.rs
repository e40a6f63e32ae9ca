// SPDX-License-Identifier: Apache-2.0
//! A plan and its run as one HTML page: the split, the bytes of each card, predicted and measured time beside each
//! other, where the difference comes from, and what other cards, links and weights would give.
//!
//! The page is one text without anything to fetch: data as JSON, and a script that draws it. This crate computes and
//! writes; it opens no files and measures nothing. All numbers are those of `spanker-plan`: the script adds and scales, and
//! predicts nothing by itself.
#![forbid(unsafe_code)]

mod lanes;
mod page;
mod scenarios;
mod values;

pub use page::{Report, Source};
pub use scenarios::{Axis, Scenario, Scenarios, scenarios};
