// SPDX-License-Identifier: Apache-2.0
//! How long things may take, as flags give it.

use std::time::Duration;

use spanker_topology::Seconds;

/// How long cards may show no progress.
pub(crate) fn timeout(text: &str) -> Result<Duration, String> {
    within(text, 0.01, 600.0)?.ok_or_else(|| "expected 10ms to 600s".into())
}

/// How long something may take that need not take any time.
pub(crate) fn drain(text: &str) -> Result<Duration, String> {
    within(text, 0.0, 86_400.0)?.ok_or_else(|| "expected 0s to 86400s".into())
}

fn within(text: &str, least: f64, most: f64) -> Result<Option<Duration>, String> {
    let bad = |_| "expected a time, as in 500ms or 2s".to_owned();
    let time = text.parse::<Seconds>().map_err(bad)?;
    Ok((least..=most).contains(&time.0).then(|| Duration::from_secs_f64(time.0)))
}
