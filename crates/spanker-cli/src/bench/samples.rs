// SPDX-License-Identifier: Apache-2.0
//! `spanker bench all-reduce --csv`: the rows as the table that `spanker fit link` reads.

use std::path::PathBuf;

use spanker_bench::Row;
use spanker_plan::LinkSamples;

use super::{Args, refuse};
use spanker_engine::files;

/// The first line of the table.
const HEADER: &str = "ranks,bytes,microseconds";
/// The largest table that is added to, in bytes.
const MOST_TABLE: u64 = 16 << 20;

/// The table, if one is wanted.
pub(super) struct Samples {
    path: Option<PathBuf>,
    text: String,
}

impl Samples {
    /// Refuses a path or a collective for which there is no such table. An existing one is added to, because a fit
    /// wants several numbers of ranks and one bench has one.
    pub(super) fn begin(args: &Args) -> anyhow::Result<Samples> {
        let mut text = format!("{HEADER}\n");
        let Some(path) = &args.csv else { return Ok(Samples { path: None, text }) };
        if args.name() != "all-reduce" || args.check {
            let name = args.name();
            return refuse(format!("--csv is for all-reduce, which is fitted, not for {name}"));
        }
        files::check_output(path)?;
        if path.exists() {
            text = files::read(path, MOST_TABLE)?;
            let table = LinkSamples::from_csv(&text);
            if text.trim() != HEADER
                && let Err(error) = table
            {
                let shown = path.display();
                return refuse(format!("--csv {shown}: not a table to add to: {error}"));
            }
            if !text.ends_with('\n') {
                text.push('\n');
            }
        }
        Ok(Samples { path: Some(path.clone()), text })
    }

    /// Adds a row and saves the table, so that whatever comes after it cannot take it away.
    pub(super) fn add(&mut self, row: &Row) -> anyhow::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        let (ranks, bytes, microseconds) = (row.ranks(), row.bytes_per_card, row.time_us);
        self.text.push_str(&format!("{ranks},{bytes},{microseconds}\n"));
        Ok(files::write(path, &self.text)?)
    }

    /// Whether further rows are of use to nobody: no table is wanted and nobody reads the output.
    pub(super) fn is_useless(&self) -> bool {
        self.path.is_none() && crate::output::is_unread()
    }
}
