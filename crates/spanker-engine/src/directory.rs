// SPDX-License-Identifier: Apache-2.0
//! Where cards are looked for, which of them a list means, and what is said of those that do not answer.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use spanker_runtime::{CardInfo, Pace, SpankerControl};
use spanker_scheduler::{DEVICE_DIRECTORY_VARIABLE, Surveyed, Topology, survey, survey_of};
use spanker_twin::home;

use crate::error::{EngineError, Result};

/// What to do where there are no cards.
pub const HINT: &str = "rehearse with emulated cards: spanker twin up --cards 4";

/// The folder of the cards' devices: `$SPANKER_DEV_DIR` if that is set, or `/dev` if there is a card, or the
/// place of a twin if one is there.
#[must_use]
pub fn find() -> PathBuf {
    let set = std::env::var_os(DEVICE_DIRECTORY_VARIABLE).filter(|folder| !folder.is_empty());
    if let Some(folder) = set {
        return folder.into();
    }
    let system = PathBuf::from("/dev");
    let twin = home::find();
    // A place that others can write to is none that a twin was made in.
    let is_there = home::card(&twin, 0).exists() && home::check(&twin).is_ok();
    if !home::card(&system, 0).exists() && is_there { twin } else { system }
}

/// The cards that a flag names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CardList {
    /// So many, from card 0.
    Count(usize),
    /// These, in this order.
    Indices(Vec<usize>),
}

impl FromStr for CardList {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let bad = || format!("'{text}': expected a number of cards or a list as in 0,1,3");
        let number = |part: &str| part.trim().parse::<usize>().map_err(|_| bad());
        if !text.contains(',') {
            return number(text).map(CardList::Count);
        }
        // A comma at the end makes a list of one card.
        let parts = text.strip_suffix(',').unwrap_or(text).split(',');
        let indices = parts.map(number).collect::<std::result::Result<Vec<usize>, String>>()?;
        let twice = indices.iter().enumerate().find(|(at, index)| indices[..*at].contains(index));
        match twice {
            Some((_, index)) => Err(format!("'{text}': card {index} is in it twice")),
            None => Ok(CardList::Indices(indices)),
        }
    }
}

/// The indices of the cards that answer.
#[must_use]
pub fn alive(folder: &Path) -> Vec<usize> {
    answering(&survey(folder))
}

/// Those of some cards that answer. The others are not asked: one that hangs takes a second to be found out.
#[must_use]
pub fn alive_among(folder: &Path, indices: &[usize]) -> Vec<usize> {
    answering(&survey_of(folder, indices))
}

fn answering(cards: &[Surveyed]) -> Vec<usize> {
    cards.iter().filter(|card| card.card.is_ok()).map(|card| card.index).collect()
}

/// The indices of the cards that a list names, all of which answer.
///
/// # Errors
/// [`EngineError::Unavailable`] if there are none or one is down, [`EngineError::Request`] for cards that do not exist.
pub fn chosen(folder: &Path, list: Option<&CardList>) -> Result<Vec<usize>> {
    named(folder, &survey(folder), list)
}

/// Opens the cards that a list names, each once.
///
/// # Errors
/// As [`chosen`].
pub fn open_chosen(folder: &Path, list: Option<&CardList>) -> Result<Topology<SpankerControl>> {
    let cards = survey(folder);
    let indices = named(folder, &cards, list)?;
    Topology::of_surveyed(folder, cards, &indices).map_err(|error| blamed(folder, &indices, &error))
}

fn named(folder: &Path, cards: &[Surveyed], list: Option<&CardList>) -> Result<Vec<usize>> {
    if cards.is_empty() {
        let what = format!("no cards at {}", first(folder).display());
        return Err(EngineError::unavailable(what, Some(HINT.into())));
    }
    let all = cards.len();
    let indices: Vec<usize> = match list {
        None => (0..all).collect(),
        Some(CardList::Count(count)) if (1..=all).contains(count) => (0..*count).collect(),
        Some(CardList::Count(count)) => {
            return Err(EngineError::request(format!("--cards {count}: there are {all} cards")));
        }
        Some(CardList::Indices(indices)) => indices.clone(),
    };
    if let Some(index) = indices.iter().find(|&&index| index >= all) {
        let what = format!("--cards: no card {index}, there are 0 to {}", all - 1);
        return Err(EngineError::request(what));
    }
    let mut dead = indices.iter().map(|&index| &cards[index]).filter(|card| card.card.is_err());
    let Some(first) = dead.next() else { return Ok(indices) };
    let alive = indices.iter().copied().filter(|&index| cards[index].card.is_ok());
    let (index, path, reason) = (first.index, first.path.display(), reason(first));
    let what = format!("card {index} at {path} is down: {reason}");
    Err(EngineError::unavailable(what, go_on(&alive.collect::<Vec<_>>())))
}

/// Opens cards that have just answered. If one is dead by now, the error names it.
///
/// # Errors
/// As [`chosen`].
pub fn open(folder: &Path, indices: &[usize]) -> Result<Topology<SpankerControl>> {
    Topology::open_cards(folder, indices).map_err(|error| blamed(folder, indices, &error))
}

/// The card that is dead, where an error only says that one is.
#[must_use]
pub fn blamed(folder: &Path, indices: &[usize], error: &dyn std::fmt::Display) -> EngineError {
    let list = CardList::Indices(indices.to_vec());
    let other = || EngineError::unavailable(error.to_string(), None);
    chosen(folder, Some(&list)).err().unwrap_or_else(other)
}

/// The first device of a folder.
#[must_use]
pub fn first(folder: &Path) -> PathBuf {
    folder.join("spanker0")
}

/// Why a card does not answer, in a few words.
#[must_use]
pub fn reason(card: &Surveyed) -> String {
    let Err(error) = &card.card else { return String::new() };
    match error {
        spanker_runtime::Error::Open { source, .. } => match source.kind() {
            std::io::ErrorKind::ConnectionRefused => "nobody answers, its process is gone".into(),
            _ => format!("it cannot be opened ({source})"),
        },
        spanker_runtime::Error::Ioctl { op, source } => format!("{op} refused ({source})"),
        error => error.to_string(),
    }
}

/// Advice: the cards to go on with, if there are enough.
#[must_use]
pub fn go_on(left: &[usize]) -> Option<String> {
    match left {
        [] | [_] => None,
        left => Some(format!("go on without it: --cards {}", list(left))),
    }
}

/// Indices as `--cards` takes them.
#[must_use]
pub fn list(indices: &[usize]) -> String {
    indices.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

/// What a card is, in a word.
#[must_use]
pub fn kind(info: &CardInfo) -> &'static str {
    if info.emulated() { "twin" } else { "sail" }
}

/// What a card's clock shows, in a word.
#[must_use]
pub fn pace(pace: Pace) -> &'static str {
    match pace {
        Pace::Real => "real",
        Pace::CardTime => "card",
        Pace::Wall => "wall",
        Pace::Unshaped => "unshaped",
        _ => "unknown",
    }
}

/// What cards of a pace are and whose clock their times are by.
#[must_use]
pub fn nature(with: Pace) -> &'static str {
    match with {
        Pace::CardTime => "emulated, card time",
        Pace::Wall => "emulated, wall time at the profile's pace",
        Pace::Unshaped => "emulated, wall time, as fast as this host can",
        _ => "wall time",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn card_lists_are_counts_or_indices_and_nothing_else() {
        assert_eq!("4".parse(), Ok(CardList::Count(4)));
        assert_eq!("0,1,3".parse(), Ok(CardList::Indices(vec![0, 1, 3])));
        assert_eq!("2,".parse(), Ok(CardList::Indices(vec![2])));
        for bad in ["", ",", "x", "0,x", "0,,1", "-1", "1,2,1"] {
            let error = bad.parse::<CardList>().unwrap_err();
            assert!(error.contains(&format!("'{bad}'")), "{error}");
        }
    }
}
