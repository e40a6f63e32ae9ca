// SPDX-License-Identifier: Apache-2.0
//! The run as it goes, where someone watches: a line for every backend, drawn over the ones before.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};

use spanker_steal::{BackendReport, Report};

use crate::output;

/// So many backends are shown.
const MOST_LINES: usize = 20;

/// Lines on a terminal.
pub(super) struct View {
    watched: bool,
    lines: usize,
}

impl View {
    /// Nothing is shown if `quiet`, or if nobody watches.
    pub(super) fn new(quiet: bool) -> View {
        View { watched: !quiet && !output::is_quiet() && io::stderr().is_terminal(), lines: 0 }
    }

    /// Shows how far the run is.
    pub(super) fn show(&mut self, report: &Report) {
        if !self.watched {
            return;
        }
        let part = 100.0 * report.done as f64 / report.items.max(1) as f64;
        let time = report.elapsed.as_secs_f64();
        let mut text = self.back();
        // Writing to a string does not fail.
        let _ = writeln!(text, "{part:5.1} % of {} items, {time:.1} s", report.items);
        for backend in report.backends.iter().take(MOST_LINES) {
            let _ = writeln!(text, "{}", line(backend));
        }
        self.lines = 1 + report.backends.len().min(MOST_LINES);
        if report.backends.len() > MOST_LINES {
            let _ = writeln!(text, "and {} more", report.backends.len() - MOST_LINES);
            self.lines += 1;
        }
        // Nobody misses what a terminal does not show.
        let _ = io::stderr().write_all(text.as_bytes());
    }

    /// Takes the lines away.
    pub(super) fn clear(&mut self) {
        let back = self.back();
        let _ = io::stderr().write_all(back.as_bytes());
        self.lines = 0;
    }

    /// To the first line, with everything from there on gone.
    fn back(&self) -> String {
        if self.lines == 0 { String::new() } else { format!("\x1b[{}A\r\x1b[J", self.lines) }
    }
}

/// Less than 80 columns.
fn line(backend: &BackendReport) -> String {
    let BackendReport { name, items, rate, last_chunk, benched, .. } = backend;
    let state = match benched {
        Some(why) => format!("benched: {why}"),
        None if *rate > 0.0 => "working".to_owned(),
        None => "starting".to_owned(),
    };
    let state: String = state.chars().take(20).collect();
    format!(
        "{name:<8}{:>14}/s  chunk {last_chunk:>9}  {items:>12} items  {state}",
        super::table::rate(*rate)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_terminal_do_not_wrap() {
        let backend = BackendReport {
            name: "emul127".into(),
            items: 999_999_999_999,
            chunks: 1,
            rate: 1e13,
            last_chunk: 999_999_999,
            benched: Some("a very long story about what went wrong here".into()),
        };
        assert!(line(&backend).len() < 90, "{}", line(&backend).len());
    }
}
