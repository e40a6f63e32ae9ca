// SPDX-License-Identifier: Apache-2.0
//! What the files of fitted models have in common: their first lines, and how they are refused.
//!
//! A file is hostile until it was read: every number is checked, and foreign text in a message is
//! escaped and cut.

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::PlanError;

/// The version of both formats.
pub(super) const VERSION: i64 = 1;
/// The largest parameter: with it no prediction leaves the range of numbers.
const LARGEST: f64 = 1e18;
/// The longest piece of foreign text in a message, in characters.
const SHOWN: usize = 100;

pub(super) fn bad(what: impl Into<String>) -> PlanError {
    PlanError::File { what: what.into() }
}

/// Foreign text for a message: control characters escaped, long text cut.
pub(super) fn printable(text: &str) -> String {
    let mut shown: String = text
        .chars()
        .take(SHOWN)
        .flat_map(|c| {
            let escaped = (!matches!(c, '"' | '\'' | '\\')).then(|| c.escape_debug());
            let kept = escaped.is_none().then_some(c);
            escaped.into_iter().flatten().chain(kept)
        })
        .collect();
    if text.chars().nth(SHOWN).is_some() {
        shown.push_str("...");
    }
    shown
}

/// Reads a file of the given kind.
pub(super) fn parse<T: DeserializeOwned>(text: &str, kind: &str) -> Result<T, PlanError> {
    #[derive(Deserialize)]
    struct Head {
        version: Option<i64>,
        kind: Option<String>,
    }
    let head: Head = toml::from_str(text).map_err(|error| refused(text, kind, &error))?;
    match head.kind.as_deref() {
        Some(found) if found == kind => {}
        Some(found) => {
            let found = printable(found);
            return Err(bad(format!("kind '{found}': expected a fit of kind '{kind}'")));
        }
        None => return Err(bad(format!("kind is missing: expected a fit of kind '{kind}'"))),
    }
    match head.version {
        Some(VERSION) => {}
        Some(version) => {
            return Err(bad(format!("{kind} fit: version {version}, expected {VERSION}")));
        }
        None => return Err(bad(format!("{kind} fit: version is missing, expected {VERSION}"))),
    }
    toml::from_str(text).map_err(|error| refused(text, kind, &error))
}

/// What the parser found, with the line that it found it in.
fn refused(text: &str, kind: &str, error: &toml::de::Error) -> PlanError {
    let message = printable(error.message().lines().next().unwrap_or("not TOML"));
    let start = error.span().map(|span| span.start);
    let Some(before) = start.and_then(|start| text.get(..start)) else {
        return bad(format!("{kind} fit: {message}"));
    };
    let number = before.matches('\n').count() + 1;
    let line = printable(text.lines().nth(number - 1).unwrap_or("").trim());
    bad(format!("{kind} fit: line {number} '{line}': {message}"))
}

/// A parameter that is finite and not negative.
pub(super) fn amount(name: &str, value: f64) -> Result<f64, PlanError> {
    within(name, value, 0.0, LARGEST)
}

/// A number in bounds.
pub(super) fn within(name: &str, value: f64, least: f64, most: f64) -> Result<f64, PlanError> {
    match (least..=most).contains(&value) {
        true => Ok(value),
        false => Err(bad(format!("{name} {value} is not a number from {least} to {most:e}"))),
    }
}

/// A pair of bounds of something that is counted.
pub(super) fn range<T: PartialOrd + Copy + std::fmt::Display>(
    name: &str,
    [least, most]: [T; 2],
    bounds: (T, T),
) -> Result<(T, T), PlanError> {
    if bounds.0 <= least && least <= most && most <= bounds.1 {
        return Ok((least, most));
    }
    let (low, high) = bounds;
    Err(bad(format!("{name} [{least}, {most}] is not a range within [{low}, {high}]")))
}
