// SPDX-License-Identifier: Apache-2.0
//! How long cards may be silent.

/// How long cards may be silent, as flags give it.
pub(crate) fn detect(text: &str) -> Result<std::time::Duration, String> {
    let seconds: spanker_topology::Seconds =
        text.parse().map_err(|_| "expected a time, as in 300ms or 2s".to_owned())?;
    match std::time::Duration::try_from_secs_f64(seconds.0) {
        Ok(time) if (0.01..=600.0).contains(&seconds.0) => Ok(time),
        _ => Err("expected 10ms to 600s".into()),
    }
}
