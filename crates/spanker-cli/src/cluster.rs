// SPDX-License-Identifier: Apache-2.0
//! A cluster as flags describe it: profiles, counts, topology, or a file; calibrated by fits if there are any.

use std::path::PathBuf;
use std::str::FromStr;

use spanker_engine::ClusterSpec;
use spanker_topology::{Cluster, Shape};

use crate::output;

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
    /// How many cards flags ask for.
    pub(crate) fn cards(&self) -> Option<usize> {
        self.cards
    }

    /// The cluster that the flags describe.
    pub(crate) fn build(&self) -> anyhow::Result<Cluster> {
        build(&ClusterSpec {
            profiles: self.profile.clone(),
            cards: self.cards,
            topology: self.topology,
            file: self.cluster.clone(),
            card_fit: self.card.clone(),
            link_fit: self.link.clone(),
        })
    }
}

/// The cluster of a description; what is assumed about it is said.
pub(crate) fn build(spec: &ClusterSpec) -> anyhow::Result<Cluster> {
    let (cluster, notes) = spec.build()?;
    notes.iter().for_each(output::note);
    Ok(cluster)
}
