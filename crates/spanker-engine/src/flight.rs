// SPDX-License-Identifier: Apache-2.0
//! What every card is doing, and what its flight recorder says happened last.

use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use spanker_runtime::{Activity, FaultKind, Record, abi};
use spanker_scheduler::{LinkState, Surveyed, survey};

use crate::directory;
use crate::error::{EngineError, Result};

/// How long a card may take to say what it is doing.
const TIMEOUT: Duration = Duration::from_millis(500);

/// What cards do, and what happened last on them.
#[derive(Debug, Serialize)]
pub struct FlightReport {
    /// Where the cards are.
    pub directory: String,
    /// Every card.
    pub cards: Vec<CardDoing>,
    /// Entries before those listed.
    pub left_out: usize,
    /// Entries of all cards, by the host's clock.
    pub records: Vec<FlightEntry>,
}

/// What a card is doing.
#[derive(Debug, Serialize)]
pub struct CardDoing {
    /// Its number.
    pub card: usize,
    /// `up`, or `down` with a reason in `doing`.
    pub state: &'static str,
    /// What it does, in words.
    pub doing: String,
    /// Descriptors that it was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub submitted: Option<u64>,
    /// Those of them that are complete.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completed: Option<u64>,
    /// What its clock shows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub card_time_us: Option<f64>,
}

/// An entry of a card's flight recorder.
#[derive(Debug, Serialize)]
pub struct FlightEntry {
    /// The card's number.
    pub card: usize,
    /// The entry's number on that card.
    pub sequence: u64,
    /// When it was made, by the host's clock.
    pub wall_ns: u64,
    /// The same by the card's clock.
    pub card_time_us: f64,
    /// What it is about, in a word.
    pub kind: &'static str,
    /// What happened.
    pub text: String,
}

/// Asks the cards of a folder what they do and what they have recorded; with `last`, that many entries at most.
///
/// # Errors
/// [`EngineError::Unavailable`] where there are no cards.
pub fn read_flight(folder: &Path, last: Option<usize>) -> Result<FlightReport> {
    let cards = survey(folder);
    if cards.is_empty() {
        let what = format!("no cards at {}", directory::first(folder).display());
        return Err(EngineError::unavailable(what, Some(directory::HINT.into())));
    }
    let doing = cards.iter().map(|card| doing(card, &cards)).collect();
    let mut records = Vec::new();
    for surveyed in &cards {
        let Ok(card) = &surveyed.card else { continue };
        // A card that dies meanwhile has nothing more to say.
        let found = card.control.records().unwrap_or_default();
        let visit = |record: &&Record| {
            record.kind == abi::RECORD_CLIENT && record.a == u64::from(std::process::id())
        };
        // That somebody looks is no news to whoever looks.
        let news = found.iter().filter(|record| !visit(record));
        records.extend(news.map(|record| entry(surveyed.index, record, &cards)));
    }
    records.sort_by_key(|entry| (entry.wall_ns, entry.card, entry.sequence));
    let left_out = last.map_or(0, |last| records.len().saturating_sub(last));
    records.drain(..left_out);
    Ok(FlightReport { directory: folder.display().to_string(), cards: doing, left_out, records })
}

/// A card by its serial, as people know it.
fn named(serial: u64, cards: &[Surveyed]) -> String {
    let is = |card: &&Surveyed| card.card.as_ref().is_ok_and(|card| card.info.serial == serial);
    match cards.iter().find(is) {
        Some(card) => format!("card {}", card.index),
        None if serial == 0 => "nobody".into(),
        None => format!("a card that does not answer (serial {serial:x})"),
    }
}

fn doing(surveyed: &Surveyed, cards: &[Surveyed]) -> CardDoing {
    let down = |doing: String| CardDoing {
        card: surveyed.index,
        state: "down",
        doing,
        submitted: None,
        completed: None,
        card_time_us: None,
    };
    let Ok(card) = &surveyed.card else { return down(directory::reason(surveyed)) };
    let state = match card.control.state(TIMEOUT) {
        Ok(state) => state,
        Err(error) => return down(error.to_string()),
    };
    let doing = match state.activity {
        Activity::Idle => "idle".into(),
        Activity::Working => "working".into(),
        Activity::Sending { port, peer } => {
            format!("sending to {} at port {port}", named(peer, cards))
        }
        Activity::Receiving { port, peer } => {
            format!("waiting for {} at port {port}", named(peer, cards))
        }
        _ => "something that this program does not know".into(),
    };
    CardDoing {
        card: surveyed.index,
        state: "up",
        doing,
        submitted: Some(state.submitted.0),
        completed: Some(state.completed.0),
        card_time_us: Some(state.clock.micros()),
    }
}

fn entry(card: usize, record: &Record, cards: &[Surveyed]) -> FlightEntry {
    let (a, b, port) = (record.a, record.b, record.port);
    let (kind, text) = match record.kind {
        abi::RECORD_SUBMITTED => ("submitted", format!("work {a} came in: {b} descriptors")),
        abi::RECORD_STARTED => ("started", format!("work {a}: {} started", work(b))),
        abi::RECORD_DONE => ("done", format!("work {a}: {} is done", work(b))),
        abi::RECORD_COMPLETE => ("complete", format!("work {a} is complete")),
        abi::RECORD_LINK => {
            ("link", format!("port {port} to {} is {}", named(b, cards), link_state(a)))
        }
        abi::RECORD_FAULT => ("fault", format!("a job failed: {}", fault(a, b, cards))),
        abi::RECORD_NOTICE => ("notice", format!("a neighbour tells: {}", fault(a, b, cards))),
        abi::RECORD_RESET => ("reset", "a program gave up a job".into()),
        abi::RECORD_CLIENT if b == 0 => ("client", format!("process {a} went away")),
        abi::RECORD_CLIENT => ("client", format!("process {a} came")),
        other => ("unknown", format!("entry of kind {other}: {a} {b}")),
    };
    let (sequence, wall_ns) = (record.sequence, record.wall_ns);
    FlightEntry {
        card,
        sequence,
        wall_ns,
        card_time_us: record.card_time_ps as f64 / 1e6,
        kind,
        text,
    }
}

fn work(kind: u64) -> &'static str {
    match u16::try_from(kind).unwrap_or(0) {
        abi::WORK_COPY => "a copy",
        abi::WORK_FILL => "a fill",
        abi::WORK_REDUCE => "a reduction",
        abi::WORK_MATMUL => "a product",
        abi::WORK_SEND => "a send",
        abi::WORK_RECEIVE => "a receive",
        abi::WORK_FENCE => "a fence",
        abi::WORK_EMBED => "an embedding",
        abi::WORK_NORM => "a norm",
        abi::WORK_QUANTIZE => "a quantization",
        abi::WORK_ROTATE => "a rotary embedding",
        abi::WORK_HALVE => "a conversion to f16",
        abi::WORK_ATTEND => "attention",
        abi::WORK_GATE => "a gate",
        abi::WORK_ROWS => "a copy of rows",
        abi::WORK_BEST => "a choice of candidates",
        _ => "unknown work",
    }
}

fn link_state(code: u64) -> String {
    let states = [LinkState::Down, LinkState::Training, LinkState::Up, LinkState::Error];
    let state = usize::try_from(code).ok().and_then(|code| states.get(code));
    state.map_or_else(|| format!("in state {code}"), |state| state.to_string())
}

fn fault(culprit: u64, kind: u64, cards: &[Surveyed]) -> String {
    let card = named(culprit, cards);
    match FaultKind::from_code(u32::try_from(kind).unwrap_or(u32::MAX)) {
        FaultKind::CardLost => format!("{card} is gone"),
        FaultKind::LinkDown => format!("a link of {card} is down"),
        FaultKind::Stuck => format!("{card} is stuck"),
        FaultKind::Slow => format!("{card} is too slow"),
        FaultKind::Mismatch => format!("{card} sent another message than was expected"),
        FaultKind::Aborted => "the program gave it up".into(),
        _ => format!("{card} gives wrong answers"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_kind_of_entry_has_words() {
        for kind in abi::RECORD_SUBMITTED..=abi::RECORD_CLIENT {
            let entry = entry(0, &Record { kind, a: 1, b: 2, ..Record::default() }, &[]);
            assert!(entry.kind != "unknown" && !entry.text.is_empty(), "{kind}");
        }
        for kind in abi::WORK_COPY..=abi::WORK_BEST {
            assert_ne!(work(u64::from(kind)), work(0), "{kind}");
        }
        let entry = entry(0, &Record { kind: 99, ..Record::default() }, &[]);
        assert_eq!((entry.kind, entry.text.as_str()), ("unknown", "entry of kind 99: 0 0"));
    }
}
