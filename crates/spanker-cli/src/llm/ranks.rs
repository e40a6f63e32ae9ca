// SPDX-License-Identifier: Apache-2.0
//! A model on processes that mpirun has started: each opens its own copy of the file and plays one card. Rank 0
//! plans, reads, prints; the others follow it. What they do together is in `spanker-llm`.

use std::time::Duration;

use spanker_llm::{Front, Subject};
use spanker_plan::{Layout, Plan, Request};
use spanker_topology::{Bytes, Cluster, Profile, Shape};

use super::host::{self, Freshness};
use super::{Args, Loaded};
use crate::Usage;
use crate::directory::CardList;

/// Where the ranks are.
#[derive(Debug)]
#[cfg_attr(not(feature = "mpi"), allow(dead_code, reason = "without MPI nobody makes one"))]
pub(crate) struct Place {
    /// The host of each rank.
    pub(crate) hosts: Vec<String>,
    /// The MPI.
    pub(crate) library: String,
    /// Ranks on this rank's host.
    pub(crate) here: usize,
    /// How long ranks wait for each other.
    pub(crate) patience: Duration,
}

impl Place {
    /// In words.
    pub(crate) fn words(&self) -> String {
        let mut hosts = self.hosts.clone();
        hosts.sort_unstable();
        hosts.dedup();
        let (ranks, library) = (self.hosts.len(), &self.library);
        let many = |count: usize| if count == 1 { "" } else { "s" };
        let on = match &hosts[..] {
            [one] => format!("host {one}"),
            several => format!("{} hosts ({})", several.len(), several.join(", ")),
        };
        format!("{ranks} rank{} on {on}, {library}", many(ranks))
    }
}

/// How many cards flags ask for where each is a rank. Ranks that are too many wait.
pub(crate) fn cards(
    list: Option<&CardList>,
    shares: Option<&[f64]>,
    place: &Place,
) -> anyhow::Result<usize> {
    let ranks = place.hosts.len();
    let count = match (list, shares) {
        (None, None) => ranks,
        (None, Some(shares)) => shares.len(),
        (Some(CardList::Count(count)), _) => *count,
        (Some(CardList::Indices(_)), _) => {
            let text = "--cards takes a number for --fabric mpi, a list is for --fabric cards";
            return Err(Usage(text.into()).into());
        }
    };
    if count == 0 || count > ranks {
        let text = format!("{count} cards: mpirun has started {ranks} ranks, and each is one card");
        return Err(Usage(text).into());
    }
    Ok(count)
}

/// A layout on ranks, with prices of here: what operators and exchanges take is measured on the ranks themselves.
pub(crate) fn plan(
    loaded: &Loaded,
    front: &mut Front<'_>,
    place: &Place,
    layout: Layout,
    request: Request,
) -> anyhow::Result<Plan> {
    let profile = profile(loaded, front, place, &layout, Freshness::Kept)?;
    let cards = layout.cards().last().map_or(1, |card| card + 1);
    let cluster = Cluster::uniform(profile, cards, Shape::Switch)?;
    Ok(Plan::new(loaded.network.model().clone(), cluster, request, layout)?)
}

/// What operators take on a rank while the others compute, too, and what exchanges between them take.
pub(crate) fn profile(
    loaded: &Loaded,
    front: &mut Front<'_>,
    place: &Place,
    layout: &Layout,
    freshness: Freshness,
) -> anyhow::Result<Profile> {
    let cards = layout.cards().last().map_or(1, |card| card + 1);
    // Ranks of other hosts take nothing from this one's memory.
    let here = place.here.min(cards).max(1) as u64;
    let memory = Bytes(host::memory_of_machine() / here * cards as u64);
    let batch = host::measured_batch(loaded);
    let threads = loaded.threads;
    let key = host::key(loaded.network.model(), layout, batch, threads);
    let key = format!("{key}; {} on {}", place.library, place.hosts.join(","));
    let subject = Subject { layout, batch, threads, memory };
    let mut is_fresh = false;
    let profile = host::kept(key.replace('\n', " "), freshness, &mut |progress| {
        is_fresh = true;
        Ok(front.measure(&loaded.network, &subject, progress)?)
    })?;
    if is_fresh { Ok(profile) } else { Ok(front.refresh(&loaded.network, &subject, profile)?) }
}

/// Joins the other ranks. On rank 0 `lead` is called, with the model and the others at its command; all others follow
/// until it is done. `expected` is the plan that a rank has been given itself, if it has.
///
/// A process that cannot go on does not come back from this: it says why, unless another rank does, and ends.
#[cfg(not(feature = "mpi"))]
pub(crate) fn join(
    _: &Args,
    _: &dyn Fn(&Loaded) -> anyhow::Result<Option<Plan>>,
    _: impl FnOnce(&Loaded, &mut Front<'_>, &Place) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    Err(crate::ranks::without_mpi().into())
}

#[cfg(feature = "mpi")]
pub(crate) use with_mpi::join;

#[cfg(feature = "mpi")]
mod with_mpi {
    use std::time::Instant;

    use spanker_fabric::{Fabric, FabricError};
    use spanker_fabric_mpi::World;
    use spanker_llm::{Follower, LlmError, follow};

    use super::{Args, Duration, Front, Loaded, Place, Plan};
    use crate::output;

    /// How long a rank waits for another where no flag says so.
    const PATIENCE: Duration = Duration::from_secs(60);
    /// How long all may take to open their files.
    const OPENING: Duration = Duration::from_secs(300);

    /// The same with MPI.
    pub(crate) fn join(
        args: &Args,
        expected: &dyn Fn(&Loaded) -> anyhow::Result<Option<Plan>>,
        lead: impl FnOnce(&Loaded, &mut Front<'_>, &Place) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let world = crate::ranks::world()?;
        let hosts = world.hosts().to_vec();
        let here = hosts.iter().filter(|&host| *host == hosts[world.rank()]).count();
        let (library, patience) = (world.library().to_owned(), args.deadline.unwrap_or(PATIENCE));
        let place = Place { hosts, library, here, patience };
        let mut fabric = world.fabric(OPENING)?;
        let outcome = match world.rank() {
            0 => first(&mut fabric, args, &place, lead),
            _ => other(&mut fabric, args, &place, expected),
        };
        match outcome {
            Ok(()) => Ok(()),
            // Ending MPI could wait for ranks that never come.
            Err(error) => leave(world.rank(), &world, &place, &error),
        }
    }

    /// The model, with the threads that this rank may have.
    fn open(args: &Args, place: &Place) -> anyhow::Result<Loaded> {
        let mut loaded = Loaded::open(args)?;
        if args.threads.is_none() {
            loaded.threads = (loaded.threads / place.here).max(1);
        }
        Ok(loaded)
    }

    /// All ranks are here. Rank 0 has opened its file before it says so, so that what is wrong everywhere is
    /// said once.
    fn meet(fabric: &mut dyn Fabric) -> Result<(), FabricError> {
        fabric.barrier(Instant::now() + OPENING)
    }

    /// Tells the others why this rank cannot go on.
    fn refuse(fabric: &mut dyn Fabric, error: &anyhow::Error) {
        let (rank, reason) = (fabric.rank(), format!("{error:#}"));
        fabric.abort(FabricError::Refused { rank, reason });
    }

    fn first(
        fabric: &mut dyn Fabric,
        args: &Args,
        place: &Place,
        lead: impl FnOnce(&Loaded, &mut Front<'_>, &Place) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let loaded = open(args, place).inspect_err(|error| refuse(fabric, error))?;
        meet(fabric).map_err(LlmError::from)?;
        let mut front = Front::new(fabric, place.patience)?;
        let outcome = lead(&loaded, &mut front, place);
        outcome.inspect_err(|error| front.give_up(format!("{error:#}")))
    }

    fn other(
        fabric: &mut dyn Fabric,
        args: &Args,
        place: &Place,
        expected: &dyn Fn(&Loaded) -> anyhow::Result<Option<Plan>>,
    ) -> anyhow::Result<()> {
        meet(fabric).map_err(LlmError::from)?;
        let ready = open(args, place).and_then(|loaded| Ok((expected(&loaded)?, loaded)));
        let (plan, loaded) = ready.inspect_err(|error| refuse(fabric, error))?;
        let follower = Follower {
            network: &loaded.network,
            plan: plan.as_ref(),
            threads: loaded.threads,
            // The front opens and measures before its first word.
            patience: place.patience,
        };
        Ok(follow(fabric, &follower)?)
    }

    /// Whether this rank is the one that tells of an error: the one that found it.
    fn tells(rank: usize, world: &World, error: &anyhow::Error) -> bool {
        let Some(LlmError::Fabric(fault)) = error.downcast_ref() else { return true };
        match fault {
            FabricError::Died { rank: dead } => rank == usize::from(*dead == 0) || world.speaks(),
            FabricError::Deadline { rank: found, .. }
            | FabricError::Mismatch { rank: found, .. }
            | FabricError::Length { rank: found, .. }
            | FabricError::Corrupt { rank: found, .. }
            | FabricError::Lost { rank: found, .. }
            | FabricError::Failed { rank: found, .. }
            | FabricError::Refused { rank: found, .. } => *found == rank,
            _ => world.speaks(),
        }
    }

    /// Ends the process after an error.
    fn leave(rank: usize, world: &World, place: &Place, error: &anyhow::Error) -> ! {
        let closed = output::is_closed_pipe(error);
        if tells(rank, world, error) && !closed {
            output::progress_done();
            let own = error.downcast_ref::<LlmError>().is_none();
            match own && rank > 0 {
                true => eprintln!("error: rank {rank} on {}: {error:#}", place.hosts[rank]),
                false => eprintln!("error: {error:#}"),
            }
        }
        let code = if error.is::<crate::Usage>() { 2 } else { i32::from(!closed) };
        std::process::exit(code)
    }
}
