// SPDX-License-Identifier: Apache-2.0
//! Tables of measurements as CSV: spaces, empty lines and `#` comments are allowed, quotes are not.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::Arc;

use spanker_collective::MAX_RANKS;
use spanker_model::{Model, Quant, builtin};

use super::file::{bad, printable};
use crate::PlanError;

/// The most samples in a table.
const MAX_SAMPLES: usize = 1_000_000;
/// The largest message of a sample, in bytes.
const MAX_BYTES: u64 = 1 << 50;
/// Times outside of this, in the table's unit, are slips of the pen, and sums of squares of them
/// would leave the range of numbers.
const TIMES: std::ops::RangeInclusive<f64> = 1e-9..=1e15;

/// How long one all-reduce took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkSample {
    /// Ranks that took part, at least 2.
    pub ranks: usize,
    /// Bytes of each rank's buffer.
    pub bytes: u64,
    /// The time.
    pub microseconds: f64,
}

/// A table of all-reduces, at least two.
#[derive(Debug, Clone, PartialEq)]
pub struct LinkSamples(Vec<LinkSample>);

impl LinkSamples {
    /// Reads a table with the header `ranks,bytes,microseconds`.
    ///
    /// # Errors
    /// [`PlanError::File`] that names the line, the column and the value.
    pub fn from_csv(text: &str) -> Result<LinkSamples, PlanError> {
        let mut samples = Vec::new();
        for line in Lines::new(text, ["ranks", "bytes", "microseconds"])? {
            let line = line?;
            samples.push(LinkSample {
                ranks: line.whole(0, 2, MAX_RANKS as u64)? as usize,
                bytes: line.whole(1, 1, MAX_BYTES)?,
                microseconds: line.time(2)?,
            });
        }
        match samples.len() {
            2.. => Ok(LinkSamples(samples)),
            count => Err(bad(format!(
                "{count} samples: a link needs at least 2, better some sizes on each of 2 rank counts"
            ))),
        }
    }

    /// The samples, in the order of the table.
    #[must_use]
    pub fn samples(&self) -> &[LinkSample] {
        &self.0
    }
}

/// How long cards worked on a token.
#[derive(Debug, Clone, PartialEq)]
pub struct CardSample {
    /// The model as the table names it.
    pub model: String,
    /// How its matrices are stored.
    pub quant: Quant,
    /// Cards that share every matrix.
    pub cards: usize,
    /// The time per token, without communication where that is in a column of its own.
    pub milliseconds: f64,
    /// What the cards exchanged took besides, where it was measured apart.
    pub transfer_ms: Option<f64>,
    /// The model's sizes.
    pub shape: Arc<Model>,
}

/// A table of decoding times, at least one.
#[derive(Debug, Clone, PartialEq)]
pub struct CardSamples(Vec<CardSample>);

impl CardSamples {
    /// Reads a table with the header `model,quant,cards,milliseconds`, where models are
    /// [built in](spanker_model::builtin_names). With a fifth column, `transfer`, milliseconds are those of the
    /// work alone and transfer those of communication.
    ///
    /// # Errors
    /// [`PlanError::File`] that names the line, the column and the value.
    pub fn from_csv(text: &str) -> Result<CardSamples, PlanError> {
        CardSamples::from_csv_with(text, builtin)
    }

    /// Reads a table in which `find` knows the models. It is asked once for each name and type.
    ///
    /// # Errors
    /// [`PlanError::File`] that names the line, the column and the value.
    pub fn from_csv_with<E: Display>(
        text: &str,
        mut find: impl FnMut(&str, Quant) -> Result<Model, E>,
    ) -> Result<CardSamples, PlanError> {
        let mut known: BTreeMap<(&str, Quant), Arc<Model>> = BTreeMap::new();
        let mut samples = Vec::new();
        for line in card_lines(text)? {
            let (line, transfer_ms) = line?;
            let (name, cards, milliseconds) =
                (line.cells[0], line.whole(2, 1, MAX_RANKS as u64)? as usize, line.time(3)?);
            let quant: Quant = line.cells[1].parse().map_err(|error| line.refuse(1, error))?;
            let shape = match known.get(&(name, quant)) {
                Some(shape) => Arc::clone(shape),
                None => {
                    let shape = find(name, quant).map_err(|error| line.refuse(0, error))?;
                    let shape = Arc::new(shape);
                    known.insert((name, quant), Arc::clone(&shape));
                    shape
                }
            };
            let model = name.to_owned();
            samples.push(CardSample { model, quant, cards, milliseconds, transfer_ms, shape });
        }
        match samples.len() {
            1.. => Ok(CardSamples(samples)),
            _ => Err(bad("0 samples: a card needs at least 1, better 2 numbers of cards")),
        }
    }

    /// The samples, in the order of the table.
    #[must_use]
    pub fn samples(&self) -> &[CardSample] {
        &self.0
    }
}

/// The columns of a table of decoding times.
const CARD_COLUMNS: [&str; 4] = ["model", "quant", "cards", "milliseconds"];
/// The same with communication apart.
const CARD_COLUMNS_APART: [&str; 5] = ["model", "quant", "cards", "milliseconds", "transfer"];

/// A line of a table of decoding times, and its transfer where there is such a column.
type CardLine<'a> = Result<(Line<'a, 4>, Option<f64>), PlanError>;

/// The lines of a table of decoding times, with or without transfers.
fn card_lines<'a>(text: &'a str) -> Result<Box<dyn Iterator<Item = CardLine<'a>> + 'a>, PlanError> {
    if let Ok(lines) = Lines::new(text, CARD_COLUMNS_APART) {
        let apart = |line: Result<Line<'a, 5>, PlanError>| {
            let line = line?;
            let transfer = line.time_or_none(4)?;
            let [model, quant, cards, milliseconds, _] = line.cells;
            let cells = [model, quant, cards, milliseconds];
            Ok((Line { number: line.number, names: CARD_COLUMNS, cells }, Some(transfer)))
        };
        return Ok(Box::new(lines.map(apart)));
    }
    let lines = Lines::new(text, CARD_COLUMNS)?;
    Ok(Box::new(lines.map(|line| line.map(|line| (line, None)))))
}

/// The lines of a table that hold samples.
struct Lines<'a, const N: usize> {
    names: [&'static str; N],
    lines: Box<dyn Iterator<Item = (usize, &'a str)> + 'a>,
    samples: usize,
}

/// One line of a table.
struct Line<'a, const N: usize> {
    number: usize,
    names: [&'static str; N],
    cells: [&'a str; N],
}

impl<'a, const N: usize> Lines<'a, N> {
    /// Reads the header.
    fn new(text: &'a str, names: [&'static str; N]) -> Result<Self, PlanError> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let numbered = text.lines().enumerate().map(|(at, line)| (at + 1, line.trim()));
        let mut lines = numbered.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        let expected = names.join(",");
        let Some((number, header)) = lines.next() else {
            return Err(bad(format!("the table is empty: expected the header '{expected}'")));
        };
        if !header.split(',').map(str::trim).eq(names) {
            let header = printable(header);
            return Err(bad(format!("line {number}: header '{header}', expected '{expected}'")));
        }
        Ok(Lines { names, lines: Box::new(lines), samples: 0 })
    }
}

impl<'a, const N: usize> Iterator for Lines<'a, N> {
    type Item = Result<Line<'a, N>, PlanError>;

    fn next(&mut self) -> Option<Self::Item> {
        let (number, line) = self.lines.next()?;
        self.samples += 1;
        if self.samples > MAX_SAMPLES {
            return Some(Err(bad(format!("line {number}: more than {MAX_SAMPLES} samples"))));
        }
        let cells: Vec<&str> = line.split(',').map(str::trim).collect();
        Some(match <[&str; N]>::try_from(cells) {
            Ok(cells) => Ok(Line { number, names: self.names, cells }),
            Err(cells) => Err(bad(format!(
                "line {number}: '{}' has {} columns, expected {N}: {}",
                printable(line),
                cells.len(),
                self.names.join(",")
            ))),
        })
    }
}

impl<const N: usize> Line<'_, N> {
    fn refuse(&self, column: usize, reason: impl Display) -> PlanError {
        let (number, name, cell) = (self.number, self.names[column], printable(self.cells[column]));
        bad(format!("line {number}: {name} '{cell}': {reason}"))
    }

    fn whole(&self, column: usize, least: u64, most: u64) -> Result<u64, PlanError> {
        let value = self.cells[column].parse().ok().filter(|value| (least..=most).contains(value));
        value.ok_or_else(|| self.refuse(column, format!("not a whole number, {least} to {most}")))
    }

    fn time(&self, column: usize) -> Result<f64, PlanError> {
        let value = self.cells[column].parse::<f64>().ok().filter(|value| TIMES.contains(value));
        let (least, most) = (TIMES.start(), TIMES.end());
        value.ok_or_else(|| {
            self.refuse(column, format!("not a positive time, {least:e} to {most:e}"))
        })
    }

    /// A time that may be 0.
    fn time_or_none(&self, column: usize) -> Result<f64, PlanError> {
        match self.cells[column].parse::<f64>() {
            Ok(0.0) => Ok(0.0),
            _ => self.time(column),
        }
    }
}
