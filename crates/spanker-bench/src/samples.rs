// SPDX-License-Identifier: Apache-2.0
//! Rows of an all-reduce as the table that a link's model is fitted to.

use std::path::{Path, PathBuf};

use spanker_engine::{EngineError, files};
use spanker_plan::LinkSamples;

use crate::row::Row;

/// The first line of the table.
const HEADER: &str = "ranks,bytes,microseconds";
/// The largest table that is added to, in bytes.
const MOST_TABLE: u64 = 16 << 20;

/// A table in a file. An existing one is added to, because a fit wants several numbers of ranks and one bench has one.
#[derive(Debug)]
pub struct SampleTable {
    path: PathBuf,
    text: String,
}

impl SampleTable {
    /// Opens a table, or begins one.
    ///
    /// # Errors
    /// [`EngineError::Request`] for a file that is no such table or cannot be written.
    pub fn open(path: &Path) -> Result<SampleTable, EngineError> {
        files::check_output(path)?;
        let mut text = format!("{HEADER}\n");
        if path.exists() {
            text = files::read(path, MOST_TABLE)?;
            let known = LinkSamples::from_csv(&text);
            if let Some(error) = known.err().filter(|_| text.trim() != HEADER) {
                let shown = path.display();
                let what = format!("--csv {shown}: not a table to add to: {error}");
                return Err(EngineError::request(what));
            }
            if !text.ends_with('\n') {
                text.push('\n');
            }
        }
        Ok(SampleTable { path: path.to_path_buf(), text })
    }

    /// Adds a row and saves the table, so that whatever comes after it cannot take it away.
    ///
    /// # Errors
    /// [`EngineError::Io`].
    pub fn add(&mut self, row: &Row) -> Result<(), EngineError> {
        let (ranks, bytes, microseconds) = (row.ranks(), row.bytes_per_card, row.time_us);
        self.text.push_str(&format!("{ranks},{bytes},{microseconds}\n"));
        files::write(&self.path, &self.text)
    }
}
