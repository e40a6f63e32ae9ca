// SPDX-License-Identifier: Apache-2.0
//! The file of a link model.

use std::fmt::Write;

use serde::Deserialize;
use spanker_topology::Provenance;

use super::{Large, LinkModel, Small};
use crate::fit::LinkSample;
use crate::fit::file::{VERSION, amount, bad, parse, range, within};
use crate::{MAX_RANKS, PlanError};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(rename = "version")]
    _version: i64,
    #[serde(rename = "kind")]
    _kind: String,
    provenance: Provenance,
    small: SmallTable,
    large: Option<LargeTable>,
    residual: Residual,
    sampled: Sampled,
    rejected: Option<Rejected>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SmallTable {
    base_us: f64,
    per_rank_us: f64,
    per_byte_us: f64,
    exponent: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LargeTable {
    base_us: f64,
    per_hop_us: f64,
    per_byte_us: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Residual {
    small: f64,
    large: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Sampled {
    samples: usize,
    ranks: [usize; 2],
    bytes: [u64; 2],
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rejected {
    ranks: usize,
    bytes: u64,
    microseconds: f64,
}

impl LinkModel {
    /// The model as a file that a person can read.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let Small { base_us, per_rank_us, per_byte_us, exponent } = self.small;
        let ((small, large), (fewest, most)) = (self.scales, self.ranks);
        let (smallest, largest) = self.bytes;
        let (provenance, samples) = (self.provenance, self.samples);
        let mut text = format!(
            "# How long an all-reduce takes over these links, fitted to measurements.
version = {VERSION}
kind = \"link\"
provenance = \"{provenance}\"

# Small messages: base_us + per_rank_us (ranks - 1) + per_byte_us ranks^exponent bytes
[small]
base_us = {base_us:?}
per_rank_us = {per_rank_us:?}
per_byte_us = {per_byte_us:?}
exponent = {exponent:?} # 1 unless the links contend
"
        );
        if let Some(Large { base_us, per_hop_us, per_byte_us }) = self.large {
            text += &format!(
                "
# Large messages: base_us + 2 (ranks - 1) per_hop_us + 2 (ranks - 1) / ranks per_byte_us bytes
[large]
base_us = {base_us:?}
per_hop_us = {per_hop_us:?}
per_byte_us = {per_byte_us:?}
"
            );
        }
        text += &format!(
            "
# The scale of relative residuals, which the bands follow
[residual]
small = {small:?}
large = {large:?}

# What the fit has seen; bands widen outside
[sampled]
samples = {samples}
ranks = [{fewest}, {most}]
bytes = [{smallest}, {largest}]
"
        );
        if let Some(LinkSample { ranks, bytes, microseconds }) = self.rejected {
            let comment = "# The sample that was left out: all others agree much better without it";
            let _ = write!(
                text,
                "\n{comment}\n[rejected]\nranks = {ranks}\nbytes = {bytes}\n\
                 microseconds = {microseconds:?}\n"
            );
        }
        text
    }

    /// Reads a model from its file.
    ///
    /// # Errors
    /// [`PlanError::File`] that names the field and its value.
    pub fn from_toml(text: &str) -> Result<LinkModel, PlanError> {
        let file: File = parse(text, "link")?;
        let small = Small {
            base_us: amount("small.base_us", file.small.base_us)?,
            per_rank_us: amount("small.per_rank_us", file.small.per_rank_us)?,
            per_byte_us: amount("small.per_byte_us", file.small.per_byte_us)?,
            exponent: within("small.exponent", file.small.exponent, 0.0, 4.0)?,
        };
        if small.base_us + small.per_rank_us + small.per_byte_us <= 0.0 {
            return Err(bad("small: base_us, per_rank_us and per_byte_us are all 0"));
        }
        let large = file.large.map(LargeTable::checked).transpose()?;
        let scale = |name, value| within(name, value, 0.0, 10.0);
        let scales = (
            scale("residual.small", file.residual.small)?,
            scale("residual.large", file.residual.large)?,
        );
        let rejected = match file.rejected {
            None => None,
            Some(Rejected { ranks, bytes, microseconds }) => {
                amount("rejected.microseconds", microseconds)?;
                Some(LinkSample { ranks, bytes, microseconds })
            }
        };
        Ok(LinkModel {
            provenance: file.provenance,
            small,
            large,
            scales,
            ranks: range("sampled.ranks", file.sampled.ranks, (2, MAX_RANKS))?,
            bytes: range("sampled.bytes", file.sampled.bytes, (1, 1 << 50))?,
            samples: file.sampled.samples,
            rejected,
        })
    }
}

impl LargeTable {
    fn checked(self) -> Result<Large, PlanError> {
        let large = Large {
            base_us: amount("large.base_us", self.base_us)?,
            per_hop_us: amount("large.per_hop_us", self.per_hop_us)?,
            per_byte_us: amount("large.per_byte_us", self.per_byte_us)?,
        };
        if large.base_us + large.per_hop_us + large.per_byte_us <= 0.0 {
            return Err(bad("large: base_us, per_hop_us and per_byte_us are all 0"));
        }
        Ok(large)
    }
}
