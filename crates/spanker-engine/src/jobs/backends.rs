// SPDX-License-Identifier: Apache-2.0
//! Which backends do a job, as text: `cpu:2,emul:4x,emul:20x*7`. Nothing runs here.

use std::str::FromStr;

use spanker_steal::MOST_BACKENDS;

/// Threads of one backend, and of all together.
const MOST_THREADS: usize = 256;
const MOST_LANES: usize = 1024;
/// Tasks that a card has at a time: one is computed while another's operands come or its results go.
const CARD_LANES: usize = 2;
/// Speeds of emulated backends, in times of the base.
const SPEEDS: std::ops::RangeInclusive<f64> = 1e-3..=1e6;

/// What a backend is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum BackendKind {
    /// Threads of this processor.
    Cpu { threads: usize },
    /// An emulated backend of so many times the base speed, which sleeps for as long as its items would take.
    Emul { speed: f64 },
    /// A card behind the ABI.
    Card { index: usize },
    /// A graphics processor.
    Gpu { index: usize },
}

impl BackendKind {
    /// The kind in a word, as names have it.
    pub(super) fn id(self) -> &'static str {
        match self {
            BackendKind::Cpu { .. } => "cpu",
            BackendKind::Emul { .. } => "emul",
            BackendKind::Card { .. } => "card",
            BackendKind::Gpu { .. } => "gpu",
        }
    }

    /// Its number, if it is a card.
    pub(super) fn card(self) -> Option<usize> {
        if let BackendKind::Card { index } = self { Some(index) } else { None }
    }

    /// Tasks that it works on at a time, where every thread has its own.
    pub(super) fn lanes(self) -> usize {
        match self {
            BackendKind::Cpu { threads } => threads,
            BackendKind::Emul { .. } => 1,
            BackendKind::Card { .. } | BackendKind::Gpu { .. } => CARD_LANES,
        }
    }
}

/// The backends in the order in which they were given.
#[derive(Debug, Clone, PartialEq)]
pub struct BackendList(pub(super) Vec<BackendKind>);

impl BackendList {
    /// The kind of each and its place among those of its kind, such as `emul1`.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let name = |(place, kind): (usize, &BackendKind)| {
            let before = self.0[..place].iter().filter(|other| other.id() == kind.id()).count();
            format!("{}{before}", kind.id())
        };
        self.0.iter().enumerate().map(name).collect()
    }

    /// How many times the base speed all of them are together.
    pub(super) fn speeds(&self) -> f64 {
        let speed =
            |kind: &BackendKind| if let BackendKind::Emul { speed } = kind { *speed } else { 1.0 };
        self.0.iter().map(|kind| speed(kind) * kind.lanes() as f64).sum()
    }
}

impl FromStr for BackendList {
    type Err = String;

    fn from_str(text: &str) -> Result<BackendList, String> {
        let mut kinds = Vec::new();
        for word in text.split(',') {
            let (word, count) = match word.trim().rsplit_once('*') {
                None => (word.trim(), 1),
                Some((word, count)) => (word.trim(), copies(count.trim())?),
            };
            let kind = kind(word)?;
            if kinds.len() + count > MOST_BACKENDS {
                return Err(format!("a job has at most {MOST_BACKENDS} backends"));
            }
            if let BackendKind::Card { index } | BackendKind::Gpu { index } = kind
                && (count > 1 || kinds.contains(&kind))
            {
                let id = kind.id();
                return Err(format!("{id}:{index} is in it twice, expected each {id} once"));
            }
            kinds.extend(vec![kind; count]);
        }
        let lanes: usize = kinds.iter().map(|kind: &BackendKind| kind.lanes()).sum();
        if lanes > MOST_LANES {
            return Err(format!("{lanes} threads in all: at most {MOST_LANES}"));
        }
        Ok(BackendList(kinds))
    }
}

/// How many of the same.
fn copies(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count @ 1..) => Ok(count),
        _ => Err(format!("'*{text}': expected a number of backends, as in emul:2x*4")),
    }
}

fn kind(word: &str) -> Result<BackendKind, String> {
    let bad = || {
        format!("'{word}': expected backends such as cpu:2, card:0, gpu:0, emul:4x or emul:20x*7")
    };
    let (id, rest) = word.split_once(':').ok_or_else(bad)?;
    match id {
        "cpu" => match rest.parse() {
            Ok(threads @ 1..=MOST_THREADS) => Ok(BackendKind::Cpu { threads }),
            _ => Err(format!("'{word}': expected 1 to {MOST_THREADS} threads, as in cpu:2")),
        },
        "emul" => match rest.strip_suffix('x').unwrap_or(rest).parse() {
            Ok(speed) if SPEEDS.contains(&speed) => Ok(BackendKind::Emul { speed }),
            _ => {
                let (least, most) = (SPEEDS.start(), SPEEDS.end());
                Err(format!("'{word}': expected a speed of {least}x to {most}x, as in emul:4x"))
            }
        },
        "card" | "gpu" => match rest.parse() {
            Ok(index) if id == "card" => Ok(BackendKind::Card { index }),
            Ok(index) => Ok(BackendKind::Gpu { index }),
            Err(_) => {
                let what = if id == "card" { "card" } else { "GPU" };
                Err(format!("'{word}': expected a {what}'s number, as in {id}:0"))
            }
        },
        _ => Err(bad()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backends_of_all_kinds_are_read_and_named_by_kind_and_place() {
        let list: BackendList = "emul:4x,cpu:2, emul:0.5*2,card:1".parse().unwrap();
        let half = BackendKind::Emul { speed: 0.5 };
        let kinds = [
            BackendKind::Emul { speed: 4.0 },
            BackendKind::Cpu { threads: 2 },
            half,
            half,
            BackendKind::Card { index: 1 },
        ];
        assert_eq!(list.0, kinds);
        assert_eq!(list.names(), ["emul0", "cpu0", "emul1", "emul2", "card0"]);
    }

    #[test]
    fn backends_that_cannot_be_are_refused_with_what_was_expected() {
        let all = " cpu cpu: cpu:0 cpu:-1 cpu:257 emul emul:0x emul:-1x emul:nanx emul:infx emul:1e9x \
                   emul:1xx emul:1x*0 emul:1x*-2 emul:1x*129 emul:1x*99999999999999999999 gpu: \
                   gpu:0,gpu:0 tpu:0 card: card:-1 card:0,card:0 card:0*2 cpu:1,,cpu:1 cpu:256*5 *3";
        for bad in all.split(' ') {
            let error = bad.parse::<BackendList>().unwrap_err();
            assert!(error.contains("expected") || error.contains("at most"), "{bad}: {error}");
        }
    }
}
