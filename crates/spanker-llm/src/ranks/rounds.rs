// SPDX-License-Identifier: Apache-2.0
//! One rank's part of a schedule, over parts of any length: which parts it sends to whom, round by round, which it
//! receives, and which it adds up.
//!
//! A schedule's elements stand for parts here. A gather has one part for each rank, as long as what that rank gives, so
//! nothing is padded; sums and broadcasts are cut into as many chunks as their algorithm needs. Parts of working
//! memory are as long as what the schedule sends there. A schedule is verified before it is used, and sums must be proved
//! to be added in rank order.

use std::ops::Range;

use spanker_collective::{
    Algorithm, Buffer, Collective, Local, Rank, Schedule, Span, Transfer, schedule, verify,
};

/// Parts that a rank sends at once.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Sent {
    pub(super) to: Rank,
    /// Where they are.
    pub(super) slots: Range<usize>,
}

/// Parts that a rank receives at once.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Received {
    pub(super) from: Rank,
    /// Where they go.
    pub(super) slots: Range<usize>,
    /// The parts of the sender that they are, and as long as which they are.
    pub(super) parts: Range<usize>,
}

/// Parts that are added up, in order.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Added {
    pub(super) sources: Vec<Range<usize>>,
    pub(super) into: Range<usize>,
}

/// Messages that run concurrently, then sums.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Round {
    pub(super) sends: Vec<Sent>,
    pub(super) receives: Vec<Received>,
    pub(super) sums: Vec<Added>,
}

/// One rank's rounds of a collective.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Rounds {
    /// Parts of the data. They are the first slots; the others are working memory.
    pub(super) parts: usize,
    pub(super) slots: usize,
    pub(super) rounds: Vec<Round>,
}

/// How many parts a collective's data has: chunks where the algorithm cuts it, otherwise one.
fn parts(collective: Collective, algorithm: Algorithm, ranks: usize) -> usize {
    match (collective, algorithm) {
        (Collective::AllReduce, Algorithm::OneShot)
        | (Collective::Broadcast { .. }, Algorithm::OneShot | Algorithm::Tree) => 1,
        _ => ranks,
    }
}

impl Rounds {
    /// A rank's rounds of a collective by an algorithm.
    ///
    /// # Errors
    /// What is wrong with the schedule for a model's exchanges, in words.
    pub(super) fn new(
        collective: Collective,
        algorithm: Algorithm,
        ranks: usize,
        rank: Rank,
    ) -> Result<Rounds, String> {
        let parts = parts(collective, algorithm, ranks);
        let schedule = schedule(collective, algorithm, ranks, parts);
        Rounds::of(&schedule.map_err(|error| error.to_string())?, rank)
    }

    /// A rank's rounds of a schedule whose elements are parts.
    fn of(schedule: &Schedule, rank: Rank) -> Result<Rounds, String> {
        let proof = verify(schedule).map_err(|flaw| flaw.to_string())?;
        let (collective, algorithm) = (schedule.collective(), schedule.algorithm());
        if collective.reduces() && !proof.serial {
            return Err(format!("{algorithm} does not add in rank order"));
        }
        let (parts, refused) =
            (schedule.data_len(), || format!("{collective} by {algorithm} folds on its way"));
        let slots = |span: Span| {
            let start = match span.buffer {
                Buffer::Data => span.start,
                Buffer::Scratch => parts + span.start,
            };
            start..start + span.len
        };
        // What each rank sends to this one, in order.
        let mut coming: Vec<_> =
            (0..schedule.ranks()).map(|from| sent_to(schedule, from, rank)).collect();
        let mut rounds = Vec::new();
        for step in schedule.program(rank) {
            let mut round = Round::default();
            for transfer in &step.transfers {
                match *transfer {
                    Transfer::Send { to, span } => {
                        round.sends.push(Sent { to, slots: slots(span) });
                    }
                    Transfer::Recv { from, span, fold: None } => {
                        let source = coming[from].next().ok_or_else(refused)?;
                        if source.buffer != Buffer::Data {
                            return Err(refused());
                        }
                        let (slots, parts) = (slots(span), slots(source));
                        round.receives.push(Received { from, slots, parts });
                    }
                    Transfer::Recv { .. } => return Err(refused()),
                }
            }
            for local in &step.locals {
                let Local::Fold { sources, into } = local else { return Err(refused()) };
                let sources = sources.iter().map(|&span| slots(span)).collect();
                round.sums.push(Added { sources, into: slots(*into) });
            }
            rounds.push(round);
        }
        Ok(Rounds { parts, slots: parts + schedule.scratch_len(), rounds })
    }
}

/// What one rank sends to another, in order.
fn sent_to(schedule: &Schedule, from: Rank, to: Rank) -> impl Iterator<Item = Span> + '_ {
    let transfers = schedule.program(from).iter().flat_map(|step| &step.transfers);
    transfers.filter_map(move |transfer| match *transfer {
        Transfer::Send { to: other, span } if other == to => Some(span),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_that_are_not_in_rank_order_are_refused() {
        for algorithm in Algorithm::ALL {
            let rounds = Rounds::new(Collective::AllReduce, algorithm, 5, 2);
            let serial = matches!(algorithm, Algorithm::OneShot | Algorithm::TwoShot);
            assert_eq!(rounds.is_ok(), serial, "{algorithm}");
        }
    }

    #[test]
    fn schedule_without_one_of_its_steps_is_refused() {
        let (collective, algorithm) = (Collective::AllGather, Algorithm::Ring);
        let whole = schedule(collective, algorithm, 4, 4).unwrap();
        for dropped in 0..3 {
            let programs = (0..4).map(|rank| {
                let mut steps = whole.program(rank).to_vec();
                steps.remove(dropped);
                steps
            });
            let broken = Schedule::from_parts(collective, algorithm, 4, 4, 0, programs.collect());
            assert!(Rounds::of(&broken, 1).is_err(), "without step {dropped}");
        }
    }
}
