// SPDX-License-Identifier: Apache-2.0
//! A cluster by names: profiles, counts, topology, or a file; calibrated by fits if there are any.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use spanker_plan::{CardModel, LinkModel, PlanError};
use spanker_topology::{BytesPerSecond, Cluster, MAX_CARDS, Profile, Shape, TopologyError};

use crate::error::{EngineError, Result};
use crate::files;

/// More than any profile or cluster file has.
const MOST_TOML: u64 = 1 << 20;

/// Which cards, how they are wired, and what was measured about them.
#[derive(Debug, Clone, Default)]
pub struct ClusterSpec {
    /// Kinds of cards: `NAME`, `NAME*COUNT` or `NAME@MEMORY-RATE`, several with commas; a name is built in or the path of
    /// a `.toml` file.
    pub profiles: String,
    /// How many cards of that kind.
    pub cards: Option<usize>,
    /// How they are wired, where that is not as the profile says.
    pub topology: Option<Shape>,
    /// A file that lists cards and links instead.
    pub file: Option<PathBuf>,
    /// A fitted model that calibrates all cards.
    pub card_fit: Option<PathBuf>,
    /// A fitted model that calibrates all links.
    pub link_fit: Option<PathBuf>,
}

impl ClusterSpec {
    /// The cluster that this describes, and what is assumed about its cards because no fit says it.
    ///
    /// # Errors
    /// [`EngineError::Request`] for names and numbers that make no sense, [`EngineError::File`] for files that do not.
    pub fn build(&self) -> Result<(Cluster, Vec<String>)> {
        let cluster = match &self.file {
            Some(path) => {
                let text = files::read(path, MOST_TOML)?;
                let folder = path.parent().unwrap_or(Path::new("."));
                Cluster::from_toml(&text, self.topology, |name| profile(name, folder))
                    .map_err(|error: EngineError| error.in_file(path))?
            }
            None => self.by_names()?,
        };
        self.calibrated(cluster)
    }

    fn by_names(&self) -> Result<Cluster> {
        let entries = self.profiles.split(',').map(Entry::from_str);
        let entries: Vec<Entry> =
            entries.collect::<Result<_, String>>().map_err(EngineError::request)?;
        let counted = entries.len() > 1 || entries[0].count.is_some();
        let listed: usize = entries.iter().map(|entry| entry.count.unwrap_or(1)).sum();
        let total = match (self.cards, counted) {
            (Some(cards), true) if cards != listed => {
                let text = format!("--cards {cards}: the profiles list {listed}");
                return Err(EngineError::request(text));
            }
            (Some(cards), _) => cards,
            (None, _) => listed,
        };
        if total == 0 || total > MAX_CARDS {
            let text = format!("--cards {total}: 1 to {MAX_CARDS} are possible");
            return Err(EngineError::request(text));
        }
        let mut cards = Vec::new();
        for entry in &entries {
            let mut kind = profile(&entry.name, Path::new("."))?;
            if let Some(rate) = entry.rate {
                kind = kind.with_memory_bandwidth(rate, "given on the command line");
            }
            let count = if counted { entry.count.unwrap_or(1) } else { total };
            cards.extend(std::iter::repeat_n(kind, count));
        }
        let default = cards[0].topology;
        let shape = self.topology.unwrap_or(if total == 1 { Shape::Switch } else { default });
        if shape == Shape::Links {
            let text = "--topology links: the links are listed in a file, given with --cluster";
            return Err(EngineError::request(text));
        }
        Cluster::new(cards, shape).map_err(|error| EngineError::request(error.to_string()))
    }

    fn calibrated(&self, mut cluster: Cluster) -> Result<(Cluster, Vec<String>)> {
        let mut notes = Vec::new();
        if let Some(path) = &self.card_fit {
            let fit = read_fit(path, CardModel::from_toml)?;
            if fit.memory_bandwidth().0 >= 10u64.pow(17) {
                let what = "the fit has no memory term, so it says nothing about other card counts";
                return Err(EngineError::file(path, what));
            }
            let (calibrated, assumed) = fit.calibrate_cluster(&cluster, self.link_fit.is_some());
            cluster = calibrated;
            let note = |text: &String| format!("not fitted by {}: {text}", path.display());
            notes.extend(assumed.iter().map(note));
        }
        if let Some(path) = &self.link_fit {
            let fit = read_fit(path, LinkModel::from_toml)?;
            cluster = fit.calibrate_cluster(&cluster);
        }
        Ok((cluster, notes))
    }
}

/// Reads a fitted model.
///
/// # Errors
/// [`EngineError::File`] for a file that is none.
pub fn read_fit<T>(path: &Path, parse: impl Fn(&str) -> Result<T, PlanError>) -> Result<T> {
    let text = files::read(path, MOST_TOML)?;
    parse(&text).map_err(|error| EngineError::file(path, error))
}

/// A profile by name, or by its path from a folder.
///
/// # Errors
/// [`EngineError::Request`] for a name that no profile has, [`EngineError::File`] for a file that is none.
pub fn profile(name: &str, folder: &Path) -> Result<Profile> {
    match Profile::builtin(name) {
        Ok(profile) => Ok(profile),
        Err(TopologyError::UnknownProfile { .. }) if name.ends_with(".toml") => {
            let path = folder.join(name);
            let text = files::read(&path, MOST_TOML)?;
            Profile::from_toml(&text).map_err(|error| EngineError::file(&path, error))
        }
        Err(error) => Err(EngineError::request(error.to_string())),
    }
}

/// One entry of the list of profiles.
#[derive(Debug, PartialEq)]
struct Entry {
    name: String,
    count: Option<usize>,
    rate: Option<BytesPerSecond>,
}

impl FromStr for Entry {
    type Err = String;

    fn from_str(text: &str) -> Result<Entry, String> {
        let (rest, count) = match text.rsplit_once('*') {
            None => (text, None),
            Some((rest, count)) => match count.trim().parse() {
                Ok(count @ 1..=MAX_CARDS) => (rest, Some(count)),
                _ => return Err(format!("'{text}': '{count}' is not a number of cards")),
            },
        };
        let (name, rate) = match rest.split_once('@') {
            None => (rest, None),
            Some((name, rate)) => {
                let rate = rate.parse::<BytesPerSecond>();
                (name, Some(rate.map_err(|error| format!("'{text}': {error}"))?))
            }
        };
        match name.trim() {
            "" => Err(format!("'{text}' names no profile")),
            name => Ok(Entry { name: name.to_owned(), count, rate }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_the_profile_list_are_read_as_people_write_them() {
        let entry = |name: &str, count, rate: Option<u64>| {
            Ok(Entry { name: name.into(), count, rate: rate.map(BytesPerSecond) })
        };
        assert_eq!("rev-a".parse(), entry("rev-a", None, None));
        assert_eq!("rev-a*3".parse(), entry("rev-a", Some(3), None));
        assert_eq!("rev-a@1GB/s*2".parse(), entry("rev-a", Some(2), Some(1_000_000_000)));
        for bad in ["", "*2", "rev-a*0", "rev-a*x", "rev-a@fast", "rev-a@-1GB/s", "rev-a*9999"] {
            assert!(bad.parse::<Entry>().is_err(), "{bad}");
        }
    }
}
