// SPDX-License-Identifier: Apache-2.0
//! A cluster as flags describe it: profiles, counts, topology, or a file; calibrated by fits if there are any.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::Context;
use spanker_plan::{CardModel, LinkModel, PlanError};
use spanker_topology::{BytesPerSecond, Cluster, MAX_CARDS, Profile, Shape, TopologyError};

use crate::Usage;
use spanker_engine::files;

/// More than any profile or cluster file has.
const MOST_TOML: u64 = 1 << 20;

/// Which cards, how they are wired, and what was measured about them.
#[derive(Debug, clap::Args)]
pub(crate) struct ClusterArgs {
    /// Kinds of cards: NAME, NAME*COUNT or NAME@MEMORY-RATE, several with commas; a name is built in
    /// (see 'spanker profiles') or the path of a .toml file
    #[arg(long, value_name = "LIST", default_value = "rev-a", conflicts_with = "cluster")]
    profile: String,
    /// How many cards of that kind
    #[arg(long, value_name = "N", conflicts_with = "cluster")]
    cards: Option<usize>,
    /// How they are wired: point-to-point, ring, mesh, star or switch [default: as the profile says]
    #[arg(long, value_parser = Shape::from_str)]
    topology: Option<Shape>,
    /// A file that lists cards and links instead
    #[arg(long, value_name = "TOML")]
    cluster: Option<PathBuf>,
    /// Calibrate all cards with a model from 'spanker fit card'
    #[arg(long, value_name = "TOML")]
    card: Option<PathBuf>,
    /// Calibrate all links with a model from 'spanker fit link'
    #[arg(long, value_name = "TOML")]
    link: Option<PathBuf>,
}

impl ClusterArgs {
    /// The flags for some kinds of cards, wired as their profile says.
    pub(crate) fn of(profile: &str, cards: Option<usize>) -> ClusterArgs {
        let profile = profile.to_owned();
        ClusterArgs { profile, cards, topology: None, cluster: None, card: None, link: None }
    }

    /// How many cards flags ask for.
    pub(crate) fn cards(&self) -> Option<usize> {
        self.cards
    }

    /// The cluster that the flags describe.
    pub(crate) fn build(&self) -> anyhow::Result<Cluster> {
        let cluster = match &self.cluster {
            Some(path) => {
                let text = files::read(path, MOST_TOML)?;
                let folder = path.parent().unwrap_or(Path::new("."));
                Cluster::from_toml(&text, self.topology, |name| profile(name, folder))
                    .with_context(|| path.display().to_string())?
            }
            None => self.by_flags()?,
        };
        self.calibrated(cluster)
    }

    fn by_flags(&self) -> anyhow::Result<Cluster> {
        let entries: Vec<Entry> = self
            .profile
            .split(',')
            .map(Entry::from_str)
            .collect::<Result<_, String>>()
            .map_err(Usage)?;
        let counted = entries.len() > 1 || entries[0].count.is_some();
        let listed: usize = entries.iter().map(|entry| entry.count.unwrap_or(1)).sum();
        let total = match (self.cards, counted) {
            (Some(cards), true) if cards != listed => {
                let text = format!("--cards {cards}: the profiles list {listed}");
                return Err(Usage(text).into());
            }
            (Some(cards), _) => cards,
            (None, _) => listed,
        };
        if total == 0 || total > MAX_CARDS {
            return Err(Usage(format!("--cards {total}: 1 to {MAX_CARDS} are possible")).into());
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
            return Err(Usage(text.into()).into());
        }
        Cluster::new(cards, shape).map_err(|error| Usage(error.to_string()).into())
    }

    fn calibrated(&self, mut cluster: Cluster) -> anyhow::Result<Cluster> {
        if let Some(path) = &self.card {
            let fit = read_fit(path, CardModel::from_toml)?;
            anyhow::ensure!(
                fit.memory_bandwidth().0 < 10u64.pow(17),
                "{}: the fit has no memory term, so it says nothing about other card counts",
                path.display()
            );
            let (calibrated, assumed) = fit.calibrate_cluster(&cluster, self.link.is_some());
            cluster = calibrated;
            let name = path.display();
            assumed
                .iter()
                .for_each(|text| crate::output::note(format_args!("not fitted by {name}: {text}")));
        }
        if let Some(path) = &self.link {
            let fit = read_fit(path, LinkModel::from_toml)?;
            cluster = fit.calibrate_cluster(&cluster);
        }
        Ok(cluster)
    }
}

/// Reads a fitted model.
pub(crate) fn read_fit<T>(
    path: &Path,
    parse: impl Fn(&str) -> Result<T, PlanError>,
) -> anyhow::Result<T> {
    let text = files::read(path, MOST_TOML)?;
    parse(&text).with_context(|| path.display().to_string())
}

/// A profile by name, or by its path from a folder.
pub(crate) fn profile(name: &str, folder: &Path) -> anyhow::Result<Profile> {
    match Profile::builtin(name) {
        Ok(profile) => Ok(profile),
        Err(TopologyError::UnknownProfile { .. }) if name.ends_with(".toml") => {
            let path = folder.join(name);
            let text = files::read(&path, MOST_TOML)?;
            Profile::from_toml(&text).with_context(|| path.display().to_string())
        }
        Err(error) => Err(Usage(error.to_string()).into()),
    }
}

/// One entry of `--profile`.
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

/// What a cluster is made of, in a few words: `2 x rev-a, 1 x rev-a@1GB/s`.
pub(crate) fn describe(cluster: &Cluster) -> String {
    let mut kinds: Vec<(&str, usize)> = Vec::new();
    for card in 0..cluster.cards() {
        let name = cluster.profile(card).name.as_str();
        match kinds.iter_mut().find(|(known, _)| *known == name) {
            Some((_, count)) => *count += 1,
            None => kinds.push((name, 1)),
        }
    }
    let listed: Vec<String> =
        kinds.iter().map(|(name, count)| format!("{count} x {name}")).collect();
    listed.join(", ")
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
