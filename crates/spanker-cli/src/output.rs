// SPDX-License-Identifier: Apache-2.0
//! What people see: results on standard output; notes, progress and errors on standard error.
//!
//! A reader that goes away is no error of the command: what is printed after that is dropped, the work goes on and
//! the exit code is that of the work. Loops that do nothing but print ask [`is_unread`] and end early.

use std::fmt::Display;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use spanker_engine::EngineError;
use spanker_twin::Signals;

/// Writes a line to standard output: `format!` and [`line()`].
macro_rules! say {
    ($($text:tt)*) => { $crate::output::line(&format!($($text)*)) };
}

/// Writes a line to standard error, as [`said_line`] does.
macro_rules! log {
    ($($text:tt)*) => { $crate::output::said_line(format_args!($($text)*)) };
}

/// Flags that every command has.
#[derive(Debug, clap::Args)]
pub(crate) struct Manner {
    /// Print results and errors only: no progress, no notes
    #[arg(long, global = true, conflicts_with = "verbose", display_order = 1000)]
    quiet: bool,
    /// Say also what was chosen and how long things took
    #[arg(long, global = true, display_order = 1000)]
    verbose: bool,
    /// Colours: auto (on a terminal, unless NO_COLOR is set), always or never
    #[arg(
        long = "color",
        global = true,
        value_enum,
        default_value_t,
        value_name = "WHEN",
        display_order = 1000
    )]
    _color: clap::ColorChoice,
}

/// Makes the colours that arguments ask for those of the process. They are not parsed yet: also a message about wrong ones
/// has or has not colours.
pub(crate) fn set_colours(arguments: &[std::ffi::OsString]) {
    let texts: Vec<&str> = arguments.iter().filter_map(|argument| argument.to_str()).collect();
    let mut value = texts.iter().filter_map(|text| text.strip_prefix("--color="));
    let mut apart = texts.windows(2).filter(|two| two[0] == "--color").map(|two| two[1]);
    match value.next_back().or_else(|| apart.next_back()) {
        Some("always") => anstream::ColorChoice::Always,
        Some("never") => anstream::ColorChoice::Never,
        _ => anstream::ColorChoice::Auto,
    }
    .write_global();
}

static QUIET: AtomicBool = AtomicBool::new(false);
static VERBOSE: AtomicBool = AtomicBool::new(false);
/// Whether a reader of standard output has gone away.
static UNREAD: AtomicBool = AtomicBool::new(false);

impl Manner {
    /// Makes these flags those of the process.
    pub(crate) fn set(&self) {
        QUIET.store(self.quiet, Ordering::Relaxed);
        VERBOSE.store(self.verbose, Ordering::Relaxed);
    }
}

/// Whether nothing but results and errors is wanted.
pub(crate) fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// Writes one line to standard output. A reader that has gone away is no error, a full disk is one.
pub(crate) fn line(text: &str) -> anyhow::Result<()> {
    write(text, "\n")
}

/// Writes lines to standard output.
pub(crate) fn lines(lines: &[String]) -> anyhow::Result<()> {
    lines.iter().try_for_each(|text| line(text))
}

/// Writes one line of JSON to standard output.
pub(crate) fn json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    line(&serde_json::to_string(value)?)
}

/// Prints a report as its JSON, or as `show` shows it.
pub(crate) fn report<T: serde::Serialize>(
    as_json: bool,
    report: &T,
    show: impl FnOnce(&T) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    if as_json { json(report) } else { show(report) }
}

/// Writes a piece of text to standard output, as [`line()`] does and without an end of line.
pub(crate) fn text(text: &str) -> anyhow::Result<()> {
    write(text, "")
}

fn write(text: &str, end: &str) -> anyhow::Result<()> {
    if is_unread() {
        return Ok(());
    }
    let mut out = io::stdout().lock();
    let written = write!(out, "{text}{end}").and_then(|()| out.flush());
    match written {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => {
            UNREAD.store(true, Ordering::Relaxed);
            Ok(())
        }
        other => Ok(other?),
    }
}

/// Whether nobody reads standard output any more, as under `| head`.
pub(crate) fn is_unread() -> bool {
    UNREAD.load(Ordering::Relaxed)
}

/// Whether `error` only says that nobody reads standard output any more. Other pipes that break are failures.
pub(crate) fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let broken = |error: &io::Error| error.kind() == ErrorKind::BrokenPipe;
    error.downcast_ref::<io::Error>().is_some_and(broken) && (is_unread() || reader_is_gone())
}

/// Whether standard output is a pipe or socket whose other end is closed.
fn reader_is_gone() -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let out = io::stdout();
    let mut fds = [PollFd::new(&out, PollFlags::empty())];
    let polled = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    polled.is_ok() && fds[0].revents().intersects(PollFlags::ERR | PollFlags::HUP)
}

/// Says something that is no result on standard error, in a line that begins with `note:`; not with `--quiet`.
pub(crate) fn note(text: impl Display) {
    if !is_quiet() {
        said("note", "33", &text);
    }
}

/// As [`note`], and only with `--verbose`: what was chosen, how long something took.
pub(crate) fn detail(text: impl Display) {
    if VERBOSE.load(Ordering::Relaxed) {
        said("note", "33", &text);
    }
}

/// Says why the command fails, and what to do about it where that is known.
pub(crate) fn failure(who: &str, error: &anyhow::Error) {
    said("error", "1;31", &format_args!("{who}{error:#}"));
    hint(error);
}

/// What to do about an error, where that is known.
pub(crate) fn hint(error: &anyhow::Error) {
    if let Some(hint) = crate::engine_error(error).and_then(EngineError::hint) {
        log!("hint: {hint}");
    }
}

/// Writes a line to standard error. That nobody reads it is nobody's fault.
pub(crate) fn said_line(text: impl Display) {
    progress_done();
    let _ = writeln!(io::stderr(), "{text}");
}

/// Asks for input on standard error.
pub(crate) fn prompt(text: &str) {
    let _ = write!(io::stderr(), "{text}");
}

/// Writes a labelled line to standard error, in colours where they are wanted.
fn said(label: &str, colour: &str, text: &dyn Display) {
    progress_done();
    let _ = writeln!(anstream::stderr(), "\x1b[{colour}m{label}:\x1b[0m {text}");
}

/// The line of progress, where there is one.
static PROGRESS: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Shows what is going on, where someone watches.
pub(crate) fn progress(text: &str) {
    show_progress(None, text);
}

/// Shows that `done` of `all` is done, and when the rest will be, where someone watches.
pub(crate) fn progress_of(done: u64, all: u64, text: &str) {
    show_progress(Some((done, all)), text);
}

fn show_progress(of: Option<(u64, u64)>, text: &str) {
    if is_quiet() || !io::stderr().is_terminal() {
        return;
    }
    let mut progress = PROGRESS.lock().unwrap_or_else(PoisonError::into_inner);
    let bar = progress.get_or_insert_with(|| {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        bar.enable_steady_tick(Duration::from_millis(200));
        bar
    });
    let template = match of {
        Some((done, all)) => {
            bar.set_length(all);
            bar.set_position(done);
            "{msg} {wide_bar} {percent:>3} %, {eta} left"
        }
        None => "{msg} {elapsed}",
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_message(text.to_owned());
}

/// What watches work: it shows how much is done now and then, and says whether to go on, until a signal ends it.
pub(crate) fn watch(signals: &Signals, text: String) -> impl FnMut(u64, u64) -> bool {
    let mut shown = Instant::now();
    move |done, all| {
        if shown.elapsed() > Duration::from_millis(500) {
            shown = Instant::now();
            progress_of(done, all, &text);
        }
        !signals.caught().end
    }
}

/// Takes the progress line away.
pub(crate) fn progress_done() {
    let bar = PROGRESS.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
}

/// Prints columns under their names, two spaces apart; those in `right` stand at their right ends.
pub(crate) fn table(header: &[&str], rows: Vec<Vec<String>>, right: &[&str]) -> anyhow::Result<()> {
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING).set_header(header.to_vec()).add_rows(rows);
    for (at, name) in header.iter().enumerate() {
        align(&mut table, at, right.contains(name), None);
    }
    line(&table.trim_fmt())
}

fn align(table: &mut comfy_table::Table, at: usize, right: bool, least: Option<u16>) {
    let Some(column) = table.column_mut(at) else { return };
    column.set_padding((0, 2));
    if right {
        column.set_cell_alignment(comfy_table::CellAlignment::Right);
    }
    if let Some(least) = least {
        let width = comfy_table::Width::Fixed(least + 2);
        column.set_constraint(comfy_table::ColumnConstraint::LowerBoundary(width));
    }
}

/// A cell with its column: name, unit below it, least width.
pub(crate) struct Cell {
    name: &'static str,
    unit: &'static str,
    width: u16,
    right: bool,
    text: String,
}

impl Cell {
    /// A figure, which stands at the right end of its column.
    pub(crate) fn of(
        name: &'static str,
        unit: &'static str,
        width: u16,
        text: impl Display,
    ) -> Cell {
        let least = name.len().max(unit.len()) as u16;
        Cell { name, unit, width: width.max(least), right: true, text: text.to_string() }
    }

    /// Words, which stand at the left end.
    pub(crate) fn words(name: &'static str, width: u16, text: impl Display) -> Cell {
        Cell { right: false, ..Cell::of(name, "", width, text) }
    }
}

/// Rows that are shown as they come: as JSON objects, or as a table whose header comes with the first.
pub(crate) struct Rows {
    as_json: bool,
    begun: bool,
}

impl Rows {
    pub(crate) fn new(as_json: bool) -> Rows {
        Rows { as_json, begun: false }
    }

    /// A line that people read and programs do not.
    pub(crate) fn line(&self, text: &str) -> anyhow::Result<()> {
        if self.as_json { Ok(()) } else { line(text) }
    }

    pub(crate) fn add<T: serde::Serialize>(
        &mut self,
        row: &T,
        cells: impl FnOnce(&T) -> Vec<Cell>,
    ) -> anyhow::Result<()> {
        if self.as_json { json(row) } else { self.cells(&cells(row)) }
    }

    pub(crate) fn cells(&mut self, cells: &[Cell]) -> anyhow::Result<()> {
        let mut table = comfy_table::Table::new();
        table.load_style(comfy_table::presets::NOTHING);
        if !std::mem::replace(&mut self.begun, true) {
            table.add_row(cells.iter().map(|cell| cell.name));
            if cells.iter().any(|cell| !cell.unit.is_empty()) {
                table.add_row(cells.iter().map(|cell| cell.unit));
            }
        }
        table.add_row(cells.iter().map(|cell| cell.text.as_str()));
        for (at, cell) in cells.iter().enumerate() {
            align(&mut table, at, cell.right, Some(cell.width));
        }
        line(&table.trim_fmt())
    }
}

/// A figure with so many digits and its unit, or a dash.
pub(crate) fn figure(value: Option<f64>, digits: usize, unit: &str) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}{unit}"))
}

/// A difference in per cent, or a dash.
pub(crate) fn percent(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:+.1} %"))
}

/// A number of things.
pub(crate) fn count(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// A number of bytes as people read it, in decimal units.
pub(crate) fn bytes(count: u64) -> String {
    let units = [(1_000_000_000, "GB"), (1_000_000, "MB"), (1000, "kB")];
    match units.into_iter().find(|(size, _)| count >= *size) {
        Some((size, unit)) => format!("{:.1} {unit}", count as f64 / size as f64),
        None => format!("{count} bytes"),
    }
}
