// SPDX-License-Identifier: Apache-2.0
//! The command as one of several processes that a launcher such as `mpirun` started.

use spanker_engine::{EngineError, Fabric};

use crate::{Command, output, refuse};

/// How many processes a launcher has started of this command; nothing if it is alone.
pub(crate) fn launched() -> Option<usize> {
    spanker_scheduler::launched().filter(|&ranks| ranks > 1)
}

/// Whether this is the process that speaks for all where all say the same.
pub(crate) fn is_first() -> bool {
    launched().is_none() || spanker_scheduler::launched_rank().unwrap_or(0) == 0
}

/// Why there is no MPI in this command.
#[cfg(not(feature = "mpi"))]
pub(crate) fn without_mpi() -> anyhow::Error {
    crate::usage(
        "this spanker was built without MPI\nhint: 'scripts/with-mpi openmpi' (or mpich) builds \
         target/mpi/spanker-openmpi, which has it",
    )
}

/// This process as a rank.
#[cfg(feature = "mpi")]
pub(crate) fn world() -> anyhow::Result<spanker_fabric_mpi::World> {
    use spanker_fabric_mpi::{MpiError, World};
    World::start().map_err(|error| match error {
        // Every rank finds the same, and one says so.
        MpiError::Launcher { .. } | MpiError::Version { .. } | MpiError::Stranger { .. }
            if !is_first() =>
        {
            crate::Unspoken.into()
        }
        other => other.into(),
    })
}

/// Ends a rank that cannot go on: it says why, unless another rank does. Nothing is waited for.
pub(crate) fn leave(host: &spanker_engine::Host, error: &anyhow::Error) -> ! {
    let closed = output::is_closed_pipe(error);
    let engine = crate::engine_error(error);
    if engine.is_none_or(|error| host.speaks_for(error)) && !closed {
        let run = matches!(engine, Some(EngineError::Run(_)));
        let who = match (host.rank_place(), host.leads() || run) {
            (Some(place), false) => {
                let rank = spanker_scheduler::launched_rank().unwrap_or(0);
                let at = place.hosts.get(rank).map_or("?", String::as_str);
                format!("rank {rank} on {at}: ")
            }
            _ => String::new(),
        };
        output::failure(&who, error);
    }
    std::process::exit(if closed { 0 } else { i32::from(crate::exit_code(error)) })
}

/// Refuses to run many copies of what is one process's work.
pub(crate) fn check(command: &Command) -> anyhow::Result<()> {
    let Some(ranks) = launched() else { return Ok(()) };
    let is_for_all = match command {
        #[cfg(not(feature = "mpi"))]
        Command::Bench(args) if args.takes_ranks() => return Err(without_mpi()),
        Command::Bench(args) => args.takes_ranks(),
        // Built without MPI, it says so itself.
        Command::Steal(args) => args.takes_ranks(),
        Command::Run(args) => args.on.takes_ranks(),
        Command::Chat(args) => args.on.takes_ranks(),
        Command::Serve(args) => args.model.on.takes_ranks(),
        Command::Verify(args) => args.llm.takes_ranks(),
        Command::Eval(args) => args.on.takes_ranks(),
        Command::Probe(args) => args.fabric == Fabric::Mpi,
        Command::Plan(args) => args.fabric == Some(Fabric::Mpi),
        _ => false,
    };
    match is_for_all {
        true => Ok(()),
        false => refuse(format!(
            "a launcher started {ranks} of these, and this is one process's work\nhint: without mpirun"
        )),
    }
}
