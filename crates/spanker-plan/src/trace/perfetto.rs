// SPDX-License-Identifier: Apache-2.0
//! Traces as files: the JSON form that Perfetto and Chrome open, written and read back.
//!
//! Slices have a start and an end on a grid of nanoseconds; a duration is the difference of the two and is
//! never rounded itself, so a slice ends exactly where the next one begins. What a viewer has no use for (the
//! number of cards, when tokens were complete) is in `otherData`. A file holds a prediction, a measurement
//! or both, as two processes.

use std::collections::HashMap;
use std::fmt::Write;

use serde::Deserialize;

use super::{Activity, HALF_NANOSECOND, Incident, Label, Mark, Parts, Trace, in_order};

/// The version of the files.
const VERSION: u64 = 1;
/// The most cards that a file may name.
const MAX_CARDS: u64 = 4096;
/// The most operators that a card's program of a step may have.
const MAX_OPS: u32 = 1 << 24;
/// The latest time in a file, in seconds: the nanoseconds until then are whole numbers in an `f64`.
const MAX_SECONDS: f64 = 4e6;

/// Whose trace it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    /// A simulation's.
    Predicted,
    /// A run's.
    Measured,
}

impl Origin {
    /// Both, in the order in which a viewer shows them.
    pub const ALL: [Origin; 2] = [Origin::Predicted, Origin::Measured];

    /// The process's name in a file.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Origin::Predicted => "predicted",
            Origin::Measured => "measured",
        }
    }

    /// The process's number in a file.
    const fn pid(self) -> u64 {
        match self {
            Origin::Predicted => 1,
            Origin::Measured => 2,
        }
    }
}

/// Why a text is not a trace.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// It is not JSON, or not of this shape.
    #[error("not a trace: {what}")]
    Json {
        /// What the reader says.
        what: String,
    },
    /// It is a trace of something else, or of another version.
    #[error("not a trace of this version of spanker: {what}")]
    Foreign {
        /// What is missing or different.
        what: String,
    },
    /// An event makes no sense.
    #[error("event {number} ('{name}'): {what}")]
    Event {
        /// Which of `traceEvents`, from 0.
        number: usize,
        /// Its name.
        name: String,
        /// What is wrong with it.
        what: String,
    },
    /// The file has no trace of this origin.
    #[error("no {wanted} trace in it, only a {found} one")]
    Origin {
        /// The one that was asked for.
        wanted: &'static str,
        /// The one that is there.
        found: &'static str,
    },
}

impl Trace {
    /// The trace in the JSON form that Perfetto and Chrome open. Times are microseconds there, rounded to
    /// nanoseconds.
    #[must_use]
    pub fn to_perfetto(&self, origin: Origin) -> String {
        write(&[(origin, self)])
    }

    /// Reads back what [`to_perfetto`](Self::to_perfetto) or [`perfetto_of_both`] wrote.
    ///
    /// # Errors
    /// [`TraceError`] if it is no such text, or has no trace of that origin.
    pub fn from_perfetto(text: &str, origin: Origin) -> Result<Trace, TraceError> {
        let traces = read_perfetto(text)?;
        let found = traces.first().map_or("", |(found, _)| found.name());
        let mut wanted = traces.into_iter().filter(|(found, _)| *found == origin);
        let missing = TraceError::Origin { wanted: origin.name(), found };
        wanted.next().map(|(_, trace)| trace).ok_or(missing)
    }
}

/// A prediction and a measurement in one file, as two processes.
#[must_use]
pub fn perfetto_of_both(predicted: &Trace, measured: &Trace) -> String {
    write(&[(Origin::Predicted, predicted), (Origin::Measured, measured)])
}

/// Whole nanoseconds. What is not a number is 0.
fn nanoseconds(seconds: f64) -> i64 {
    (seconds * 1e9).round() as i64
}

/// Nanoseconds as microseconds in decimals, exactly.
fn microseconds(ns: i64) -> String {
    let sign = if ns < 0 { "-" } else { "" };
    let ns = ns.unsigned_abs();
    format!("{sign}{}.{:03}", ns / 1000, ns % 1000)
}

/// Start and end of every mark on the grid. Neighbours whose times differ by less than the grid, because they
/// were computed on two ways, must not overlap because one was rounded up and the other down.
fn on_grid(marks: &[Mark]) -> Vec<(i64, i64)> {
    let grid = |mark: &Mark| (nanoseconds(mark.start), nanoseconds(mark.end));
    let mut times: Vec<(i64, i64)> = marks.iter().map(grid).collect();
    let mut order: Vec<usize> = (0..marks.len()).collect();
    order.sort_by(|&a, &b| in_order(&marks[a], &marks[b]));
    for pair in order.windows(2) {
        let (before, after) = (pair[0], pair[1]);
        let end = times[before].1;
        let neighbours = marks[before].card == marks[after].card
            && marks[before].end - marks[after].start < HALF_NANOSECOND;
        if neighbours && end.saturating_sub(times[after].0) == 1 {
            times[after] = (end, times[after].1.max(end));
        }
    }
    times
}

fn write(traces: &[(Origin, &Trace)]) -> String {
    let mut other = format!("\"spanker_trace\":{VERSION}");
    let mut events = Vec::new();
    for (origin, trace) in traces {
        let tokens: Vec<String> =
            trace.tokens.iter().map(|at| microseconds(nanoseconds(*at))).collect();
        let _ = write!(
            other,
            ",\"{}\":{{\"cards\":{},\"events\":{},\"tokens_us\":[{}]}}",
            origin.name(),
            trace.cards,
            trace.events,
            tokens.join(",")
        );
        write_names(&mut events, *origin, trace.cards);
        // A span of no length that belongs to no operator says nothing.
        let shown = |mark: &&Mark| mark.ops > 0 || mark.end > mark.start;
        let marks: Vec<Mark> = trace.marks.iter().filter(shown).copied().collect();
        for (mark, times) in marks.iter().zip(on_grid(&marks)) {
            events.push(slice(*origin, mark, times));
        }
        for incident in &trace.incidents {
            let name = serde_json::to_string(&incident.what).expect("text is JSON");
            let (pid, ts) = (origin.pid(), microseconds(nanoseconds(incident.at)));
            events.push(format!(
                "{{\"ph\":\"i\",\"pid\":{pid},\"tid\":0,\"s\":\"g\",\"name\":{name},\"ts\":{ts}}}"
            ));
        }
    }
    let events = events.join(",\n");
    format!(
        "{{\"displayTimeUnit\":\"ms\",\"otherData\":{{{other}}},\"traceEvents\":[\n{events}\n]}}\n"
    )
}

/// What a viewer calls the process and its threads.
fn write_names(events: &mut Vec<String>, origin: Origin, cards: usize) {
    let (pid, name) = (origin.pid(), origin.name());
    events.push(format!(
        "{{\"ph\":\"M\",\"pid\":{pid},\"name\":\"process_name\",\"args\":{{\"name\":\"{name}\"}}}}"
    ));
    for card in 0..cards {
        events.push(format!(
            "{{\"ph\":\"M\",\"pid\":{pid},\"tid\":{card},\"name\":\"thread_name\",\"args\":{{\"name\":\"card {card}\"}}}}"
        ));
    }
}

fn slice(origin: Origin, mark: &Mark, (start, end): (i64, i64)) -> String {
    let Label { activity, layer, token } = mark.label;
    let category = match activity {
        Activity::Exchange | Activity::Handoff => "link",
        _ => "card",
    };
    let mut out = format!(
        "{{\"ph\":\"X\",\"pid\":{},\"tid\":{},\"name\":\"{}\",\"cat\":\"{category}\",\"ts\":{},\"dur\":{},\"args\":{{\"layer\":{layer},\"token\":{token},\"op\":{},\"ops\":{}",
        origin.pid(),
        mark.card,
        activity.name(),
        microseconds(start),
        microseconds(end.saturating_sub(start)),
        mark.op,
        mark.ops,
    );
    if let Some(parts) = &mark.parts {
        let named = [
            ("memory", parts.memory),
            ("compute", parts.compute),
            ("fixed", parts.fixed),
            ("latency", parts.latency),
            ("bandwidth", parts.bandwidth),
            ("waiting", parts.waiting),
        ];
        let counts = |seconds: f64| seconds.is_finite() && (seconds * 1e12).round() != 0.0;
        let some = named.iter().filter(|(_, seconds)| counts(*seconds));
        let some = some.map(|(name, seconds)| format!("\"{name}\":{:.6}", seconds * 1e6));
        let _ = write!(out, ",\"parts_us\":{{{}}}", some.collect::<Vec<_>>().join(","));
    }
    out.push_str("}}");
    out
}

/// A file, as far as it is read.
#[derive(Debug, Deserialize)]
struct File {
    #[serde(rename = "traceEvents")]
    events: Vec<Event>,
    #[serde(default, rename = "otherData")]
    other: Other,
}

#[derive(Debug, Default, Deserialize)]
struct Other {
    spanker_trace: Option<u64>,
    predicted: Option<Summary>,
    measured: Option<Summary>,
}

#[derive(Debug, Deserialize)]
struct Summary {
    cards: u64,
    events: u64,
    tokens_us: Vec<f64>,
}

#[derive(Debug, Deserialize)]
struct Event {
    ph: String,
    #[serde(default)]
    pid: u64,
    #[serde(default)]
    tid: u64,
    #[serde(default)]
    name: String,
    ts: Option<f64>,
    dur: Option<f64>,
    #[serde(default)]
    args: Args,
}

#[derive(Debug, Default, Deserialize)]
struct Args {
    layer: Option<u32>,
    token: Option<u32>,
    op: Option<u32>,
    ops: Option<u32>,
    parts_us: Option<PartsMicroseconds>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PartsMicroseconds {
    memory: f64,
    compute: f64,
    fixed: f64,
    latency: f64,
    bandwidth: f64,
    waiting: f64,
}

/// Reads every trace of a file, the prediction first.
///
/// # Errors
/// [`TraceError`] if it is not a text that [`Trace::to_perfetto`] or [`perfetto_of_both`] wrote.
pub fn read_perfetto(text: &str) -> Result<Vec<(Origin, Trace)>, TraceError> {
    let foreign = |what: String| TraceError::Foreign { what };
    let file: File =
        serde_json::from_str(text).map_err(|error| TraceError::Json { what: error.to_string() })?;
    match file.other.spanker_trace {
        Some(VERSION) => {}
        Some(other) => return Err(foreign(format!("its version is {other}, not {VERSION}"))),
        None => return Err(foreign("otherData has no spanker_trace".into())),
    }
    let mut traces = Vec::new();
    for (origin, summary) in
        [(Origin::Predicted, file.other.predicted), (Origin::Measured, file.other.measured)]
    {
        if let Some(summary) = summary {
            traces.push((origin, begun(origin, &summary)?));
        }
    }
    if traces.is_empty() {
        return Err(foreign("otherData names neither a predicted nor a measured trace".into()));
    }
    let place = |(index, (origin, _)): (usize, &(Origin, Trace))| (origin.pid(), index);
    let places: HashMap<u64, usize> = traces.iter().enumerate().map(place).collect();
    for (number, event) in file.events.iter().enumerate() {
        if !matches!(event.ph.as_str(), "X" | "i") {
            continue;
        }
        let wrong = |what| TraceError::Event { number, name: event.name.clone(), what };
        let pid = event.pid;
        let unnamed = || wrong(format!("it is of process {pid}, which otherData does not name"));
        let trace = &mut traces[*places.get(&pid).ok_or_else(unnamed)?].1;
        if event.ph == "X" {
            trace.marks.push(mark(event, trace.cards).map_err(wrong)?);
        } else {
            let at = seconds(event.ts, "ts").map_err(wrong)?;
            trace.incidents.push(Incident { at, what: event.name.clone() });
        }
    }
    Ok(traces)
}

/// A trace that has no marks yet.
fn begun(origin: Origin, summary: &Summary) -> Result<Trace, TraceError> {
    let wrong = |what| TraceError::Foreign { what: format!("{}: {what}", origin.name()) };
    if summary.cards > MAX_CARDS {
        return Err(wrong(format!("{} cards are more than {MAX_CARDS}", summary.cards)));
    }
    let times = summary.tokens_us.iter().map(|&at| seconds(Some(at), "tokens_us"));
    Ok(Trace {
        cards: summary.cards as usize,
        tokens: times.collect::<Result<_, _>>().map_err(wrong)?,
        marks: Vec::new(),
        incidents: Vec::new(),
        events: summary.events,
    })
}

/// A field in microseconds as whole nanoseconds.
fn grid(value: Option<f64>, field: &str) -> Result<f64, String> {
    let value = value.ok_or_else(|| format!("it has no {field}"))?;
    if !(0.0..=MAX_SECONDS * 1e6).contains(&value) {
        return Err(format!("{field} is {value}, which is not between 0 and {MAX_SECONDS} s"));
    }
    Ok((value * 1e3).round())
}

fn seconds(value: Option<f64>, field: &str) -> Result<f64, String> {
    Ok(grid(value, field)? / 1e9)
}

fn mark(event: &Event, cards: usize) -> Result<Mark, String> {
    let Args { layer, token, op, ops, ref parts_us } = event.args;
    let missing = |field: &str| format!("it has no args.{field}");
    let activity = Activity::ALL.into_iter().find(|activity| activity.name() == event.name);
    let activity = activity.ok_or("no such activity")?;
    let card = u32::try_from(event.tid).ok().filter(|&card| (card as usize) < cards);
    let card = card.ok_or_else(|| format!("tid is {}, and there are {cards} cards", event.tid))?;
    let layer = layer.ok_or_else(|| missing("layer"))?;
    let token = token.ok_or_else(|| missing("token"))?;
    let (op, ops) = (op.ok_or_else(|| missing("op"))?, ops.ok_or_else(|| missing("ops"))?);
    if op > MAX_OPS || ops > MAX_OPS {
        return Err(format!("op {op} and ops {ops}: a program has at most {MAX_OPS}"));
    }
    let start = grid(event.ts, "ts")?;
    let end = start + grid(event.dur, "dur")?;
    let parts = parts_us.as_ref().map(parts).transpose()?;
    let label = Label { activity, layer, token };
    Ok(Mark { card, label, op, ops, start: start / 1e9, end: end / 1e9, parts })
}

fn parts(read: &PartsMicroseconds) -> Result<Parts, String> {
    let seconds = |value: f64| {
        let sane = value.abs() <= MAX_SECONDS * 1e6;
        // On the grid of picoseconds on which it was written.
        sane.then(|| (value * 1e6).round() / 1e12).ok_or_else(|| format!("a part is {value} us"))
    };
    Ok(Parts {
        memory: seconds(read.memory)?,
        compute: seconds(read.compute)?,
        fixed: seconds(read.fixed)?,
        latency: seconds(read.latency)?,
        bandwidth: seconds(read.bandwidth)?,
        waiting: seconds(read.waiting)?,
    })
}
