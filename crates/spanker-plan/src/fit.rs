// SPDX-License-Identifier: Apache-2.0
//! Models of links and cards, fitted to measurements, and what they predict.
//!
//! A [`LinkModel`] tells how long an all-reduce takes, a [`CardModel`] how long cards work on a
//! token, and what they exchange for it if the samples show that. Both are fitted to a table of samples, predict a [`Band`] rather than a number, and are
//! kept as TOML that a person can read. Nothing here measures, and nothing here opens a file.
//!
//! ```
//! use spanker_plan::{LinkModel, LinkSamples};
//!
//! let table = "ranks,bytes,microseconds
//! 2,8192,6.8
//! 2,65536,9.2
//! 4,8192,13.5
//! 4,65536,16.9";
//! let model = LinkModel::fit(&LinkSamples::from_csv(table)?)?;
//! let time = model.predict(8, 8192);
//! assert!((time.value / 26.7 - 1.0).abs() < 0.05); // measured: 26.7 us
//! assert!(time.low < 26.7 && 26.7 < time.high);
//! # Ok::<(), spanker_plan::PlanError>(())
//! ```
//!
//! # How wide a band is
//!
//! A band is meant to hold nine of ten measurements. Its ends are the value divided and multiplied
//! by `exp(1.645 s (1 + d))`.
//!
//! *s* is the robust scale of the fit's relative residuals: 1.4826 times their weighted median,
//! corrected for the number of parameters. It is not less than 5 %, which is how far published
//! measurements of the same thing differ; for large messages, where libraries change algorithms, not
//! less than 12 %, or 15 % if none was sampled. That does not hold for a link whose samples show one
//! algorithm at all sizes. Where there are no more samples than parameters, the
//! residuals tell nothing, and it is 10 % for a link and 5 % for a card.
//!
//! *d* is how far the prediction leaves what was sampled, in doublings: 0 inside, and 2 at four times
//! the largest sampled rank count, for example. Doublings of ranks and of bytes add up. Ranks count
//! twice where links contend; a size below the smallest one counts a quarter, because it is all
//! latency.
//!
//! Where several algorithms fit the samples of a link equally well, or several ways in which exchanges
//! grow those of cards, the band is that of all of them together.
//!
//! Where all samples agree in what the prediction varies (one rank count, one size, one share of one
//! model, one number of cards), the fit knows nothing about it: *s* is not less than 25 % outside, and
//! [`LinkModel::caveats`] or [`CardModel::caveats`] say so. No band is wider than a factor of 1000
//! each way.
//!
//! How often that held, for links fitted to published all-reduces on 2 and 4 ranks and asked about 8
//! ranks at 8 to 128 KiB: 85 % of the measurements were inside. It was 96 % for calls recorded in
//! graphs and 77 % for calls launched one by one, both without the one kind of card whose links
//! contend from 8 ranks on; of that card's it was 43 %. So a band does not foresee what begins beyond
//! the sampled ranks. The constants above were chosen with these measurements in sight.

mod band;
mod card;
mod decode;
mod file;
mod line;
mod link;
mod report;
mod samples;
mod solve;

pub use band::{Band, Parameter};
pub use card::{CardModel, CardTime};
pub use decode::{DecodeTime, decode_time};
pub use line::Line;
pub use link::LinkModel;
pub use report::{FitReport, FitRow};
pub use samples::{CardSample, CardSamples, LinkSample, LinkSamples};
