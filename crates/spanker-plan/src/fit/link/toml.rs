// SPDX-License-Identifier: Apache-2.0
//! The file of a link model.
//!
//! `form` says which sections there are: `[small]` and perhaps `[large]` for `blended`, which is also
//! what a file without a form has; `[whole]` for one algorithm. A `[[rival]]` is another algorithm.

use std::fmt::Write;

use serde::Deserialize;
use spanker_collective::MAX_RANKS;
use spanker_topology::Provenance;

use super::LinkModel;
use super::forms::{Algorithm, BLENDED, Form, Known, Small};
use crate::PlanError;
use crate::fit::LinkSample;
use crate::fit::file::{VERSION, amount, bad, parse, printable, range, within};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(rename = "version")]
    _version: i64,
    #[serde(rename = "kind")]
    _kind: String,
    provenance: Provenance,
    form: Option<String>,
    small: Option<SmallTable>,
    large: Option<KnownTable>,
    whole: Option<KnownTable>,
    #[serde(default)]
    rival: Vec<RivalTable>,
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
struct KnownTable {
    base_us: f64,
    per_hop_us: f64,
    per_byte_us: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RivalTable {
    form: String,
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
        let ((small, large), (fewest, most)) = (self.scales, self.ranks);
        let (smallest, largest) = self.bytes;
        let (provenance, samples) = (self.provenance, self.samples);
        let mut text = format!(
            "# How long an all-reduce takes over these links, fitted to measurements.
version = {VERSION}
kind = \"link\"
provenance = \"{provenance}\"
"
        );
        text += &form_text(&self.form);
        for rival in &self.rivals {
            let (form, lines) = (rival.algorithm.name(), known_lines(rival));
            text += &format!(
                "
# Fits the samples as well, so bands cover it
[[rival]]
form = \"{form}\"
{lines}"
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
        let form = read_form(file.form.as_deref(), file.small, file.large, file.whole)?;
        let rivals: Result<Vec<Known>, PlanError> =
            file.rival.into_iter().map(RivalTable::checked).collect();
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
            form,
            rivals: rivals?,
            scales,
            ranks: range("sampled.ranks", file.sampled.ranks, (2, MAX_RANKS))?,
            bytes: range("sampled.bytes", file.sampled.bytes, (1, 1 << 50))?,
            samples: file.sampled.samples,
            rejected,
        })
    }
}

/// The lines of a file that say which form there is, and its parameters.
fn form_text(form: &Form) -> String {
    let name = form.name();
    match form {
        Form::Whole(known) => {
            let (formula, lines) = (known.algorithm.formula(), known_lines(known));
            format!(
                "form = \"{name}\" # one algorithm for all sizes

# {formula}
[whole]
{lines}"
            )
        }
        Form::Blended { small, large } => {
            let Small { base_us, per_rank_us, per_byte_us, exponent } = small;
            let mut text = format!(
                "form = \"{name}\" # small messages, and from about 512 KiB on large ones

# Small messages: base_us + per_rank_us (ranks - 1) + per_byte_us ranks^exponent bytes
[small]
base_us = {base_us:?}
per_rank_us = {per_rank_us:?}
per_byte_us = {per_byte_us:?}
exponent = {exponent:?} # 1 unless the links contend
"
            );
            if let Some(large) = large {
                let (formula, lines) = (large.algorithm.formula(), known_lines(large));
                text += &format!("\n# Large messages: {formula}\n[large]\n{lines}");
            }
            text
        }
    }
}

fn known_lines(known: &Known) -> String {
    let Known { base_us, per_hop_us, per_byte_us, .. } = known;
    format!("base_us = {base_us:?}\nper_hop_us = {per_hop_us:?}\nper_byte_us = {per_byte_us:?}\n")
}

/// The form of a file: its name and the sections that go with it.
fn read_form(
    name: Option<&str>,
    small: Option<SmallTable>,
    large: Option<KnownTable>,
    whole: Option<KnownTable>,
) -> Result<Form, PlanError> {
    let name = name.unwrap_or(BLENDED);
    let lacks = |section: &str| bad(format!("form '{name}': section [{section}] is missing"));
    let strange = |section: &str| bad(format!("form '{name}' has no section [{section}]"));
    if name == BLENDED {
        if whole.is_some() {
            return Err(strange("whole"));
        }
        let small = small.ok_or_else(|| lacks("small"))?.checked()?;
        let large = large.map(|large| large.checked("large", Algorithm::Ring)).transpose()?;
        return Ok(Form::Blended { small, large });
    }
    let algorithm = algorithm("form", name, &[BLENDED])?;
    if small.is_some() || large.is_some() {
        return Err(strange(if small.is_some() { "small" } else { "large" }));
    }
    Ok(Form::Whole(whole.ok_or_else(|| lacks("whole"))?.checked("whole", algorithm)?))
}

/// The algorithm of a name; `others` are further names that would have done.
fn algorithm(field: &str, name: &str, others: &[&str]) -> Result<Algorithm, PlanError> {
    let found = Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == name);
    found.ok_or_else(|| {
        let known = Algorithm::ALL.map(Algorithm::name);
        let names = [others, &known[..]].concat().join(", ");
        bad(format!("{field} '{}': expected one of {names}", printable(name)))
    })
}

impl SmallTable {
    fn checked(self) -> Result<Small, PlanError> {
        let small = Small {
            base_us: amount("small.base_us", self.base_us)?,
            per_rank_us: amount("small.per_rank_us", self.per_rank_us)?,
            per_byte_us: amount("small.per_byte_us", self.per_byte_us)?,
            exponent: within("small.exponent", self.exponent, 0.0, 4.0)?,
        };
        if small.base_us + small.per_rank_us + small.per_byte_us <= 0.0 {
            return Err(bad("small: base_us, per_rank_us and per_byte_us are all 0"));
        }
        Ok(small)
    }
}

impl KnownTable {
    fn checked(self, section: &str, algorithm: Algorithm) -> Result<Known, PlanError> {
        let checked = |field, value| amount(&format!("{section}.{field}"), value);
        let known = Known {
            algorithm,
            base_us: checked("base_us", self.base_us)?,
            per_hop_us: checked("per_hop_us", self.per_hop_us)?,
            per_byte_us: checked("per_byte_us", self.per_byte_us)?,
        };
        if known.base_us + known.per_hop_us + known.per_byte_us <= 0.0 {
            return Err(bad(format!("{section}: base_us, per_hop_us and per_byte_us are all 0")));
        }
        Ok(known)
    }
}

impl RivalTable {
    fn checked(self) -> Result<Known, PlanError> {
        let RivalTable { form, base_us, per_hop_us, per_byte_us } = self;
        let algorithm = algorithm("rival.form", &form, &[])?;
        KnownTable { base_us, per_hop_us, per_byte_us }.checked("rival", algorithm)
    }
}
