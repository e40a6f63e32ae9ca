// SPDX-License-Identifier: Apache-2.0
//! Lines to standard output, and a progress line to a terminal.

use std::io::{self, IsTerminal, Write};

/// Writes one line. A reader that has gone away is an error, not a panic.
pub(crate) fn line(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()?;
    Ok(())
}

/// Writes text as it comes, without an end of line.
pub(crate) fn text(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Whether `error` only says that nobody reads the output any more, as under `| head`.
pub(crate) fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let closed = |error: &io::Error| error.kind() == io::ErrorKind::BrokenPipe;
    error.downcast_ref::<io::Error>().is_some_and(closed)
}

/// Shows what is going on, where someone watches.
pub(crate) fn progress(text: &str) {
    if io::stderr().is_terminal() {
        eprint!("\r\x1b[2K{text}");
    }
}

/// Takes the progress line away.
pub(crate) fn progress_done() {
    progress("");
}

/// A number of bytes as people read it, in decimal units.
pub(crate) fn bytes(count: u64) -> String {
    let units = [(1_000_000_000, "GB"), (1_000_000, "MB"), (1000, "kB")];
    match units.into_iter().find(|(size, _)| count >= *size) {
        Some((size, unit)) => format!("{:.1} {unit}", count as f64 / size as f64),
        None => format!("{count} bytes"),
    }
}
