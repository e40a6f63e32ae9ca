// SPDX-License-Identifier: Apache-2.0
//! The messages of a schedule in an order in which they can happen: a run of the schedule on symbols, with
//! sends that wait for their receives. Neither bytes nor ports are known here.

use std::collections::{HashMap, VecDeque};

use crate::{CollectiveError, Flaw, Incoming, Rank, Schedule, Span, Step, Transfer};

/// One message of a schedule, both ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// The sender.
    pub from: Rank,
    /// The receiver.
    pub to: Rank,
    /// What the sender reads.
    pub source: Span,
    /// Where the receiver has it, equally long.
    pub target: Span,
    /// `None` stores; `Some` folds into what is there.
    pub fold: Option<Incoming>,
}

/// The messages by level, and where each rank's steps end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Levels {
    /// The messages of each level, in the order in which cards go through them.
    pub messages: Vec<Vec<Message>>,
    /// For each rank and step, how many levels have passed when its transfers are complete. Never less than
    /// for the step before.
    pub ends: Vec<Vec<usize>>,
}

/// A rank on its way through its steps.
struct Place<'a> {
    program: &'a [Step],
    step: usize,
    /// Which transfers of the step have been matched with their other end.
    matched: Vec<bool>,
}

impl<'a> Place<'a> {
    fn transfers(&self) -> &'a [Transfer] {
        self.program.get(self.step).map_or(&[], |step| &step.transfers)
    }

    /// Goes on while everything in the step is matched, and records the level at which each step ended.
    fn advance(&mut self, level: usize, ends: &mut Vec<usize>) {
        while self.step < self.program.len() && self.matched.iter().all(|&matched| matched) {
            ends.push(level);
            self.step += 1;
            self.matched = vec![false; self.transfers().len()];
        }
    }
}

/// Runs a schedule. Messages get the level at which both of their ends have come to them; a rank comes to its
/// next step one level after the last message of the step before. So for every rank, the levels of a step's
/// messages lie before those of all later steps.
///
/// ```
/// use spanker_collective::{Algorithm, Collective, levels, schedule};
/// let ring = schedule(Collective::AllGather, Algorithm::Ring, 4, 8)?;
/// let levels = levels(&ring)?;
/// // Three rounds of four messages each.
/// assert_eq!(levels.messages.iter().map(Vec::len).collect::<Vec<_>>(), [4, 4, 4]);
/// # Ok::<(), spanker_collective::CollectiveError>(())
/// ```
///
/// # Errors
/// [`CollectiveError::Refused`] if messages do not match, which those of this crate's schedules do.
pub fn levels(schedule: &Schedule) -> Result<Levels, CollectiveError> {
    let ranks = schedule.ranks();
    let mut ends = vec![Vec::new(); ranks];
    let mut places: Vec<Place<'_>> = (0..ranks)
        .map(|rank| {
            let program = schedule.program(rank);
            let matched = vec![false; program.first().map_or(0, |step| step.transfers.len())];
            Place { program, step: 0, matched }
        })
        .collect();
    let mut messages = Vec::new();
    for (place, ends) in places.iter_mut().zip(&mut ends) {
        place.advance(0, ends);
    }
    while places.iter().any(|place| place.step < place.program.len()) {
        let level = match_transfers(&mut places).map_err(|flaw| refused(schedule, flaw))?;
        if level.is_empty() {
            let waiting = (0..ranks).filter(|&rank| places[rank].step < places[rank].program.len());
            return Err(refused(schedule, Flaw::Deadlock { waiting: waiting.collect() }));
        }
        messages.push(level);
        for (place, ends) in places.iter_mut().zip(&mut ends) {
            place.advance(messages.len(), ends);
        }
    }
    Ok(Levels { messages, ends })
}

fn refused(schedule: &Schedule, flaw: Flaw) -> CollectiveError {
    let (collective, algorithm) = (schedule.collective(), schedule.algorithm());
    CollectiveError::Refused { collective, algorithm, flaw }
}

/// Matches what can be matched with every rank at its present step. Between two ranks the first send
/// belongs to the first receive.
fn match_transfers(places: &mut [Place<'_>]) -> Result<Vec<Message>, Flaw> {
    let mut receives: HashMap<(Rank, Rank), VecDeque<usize>> = HashMap::new();
    for (to, place) in places.iter().enumerate() {
        for (at, transfer) in place.transfers().iter().enumerate() {
            if let (Transfer::Recv { from, .. }, false) = (transfer, place.matched[at]) {
                receives.entry((*from, to)).or_default().push_back(at);
            }
        }
    }
    let mut found: Vec<(Rank, Message)> = Vec::new();
    for from in 0..places.len() {
        for (at, transfer) in places[from].transfers().iter().enumerate() {
            let (Transfer::Send { to, span: source }, false) =
                (*transfer, places[from].matched[at])
            else {
                continue;
            };
            let waiting = receives.get_mut(&(from, to)).and_then(VecDeque::pop_front);
            let Some(there) = waiting else { continue };
            let Transfer::Recv { span: target, fold, .. } = places[to].transfers()[there] else {
                unreachable!("only receives were listed");
            };
            if source.len != target.len {
                let (step, one, other) = (places[to].step, source.len, target.len);
                return Err(Flaw::Lengths { rank: to, step, one, other });
            }
            places[from].matched[at] = true;
            places[to].matched[there] = true;
            found.push((from, Message { from, to, source, target, fold }));
        }
    }
    // Every rank begins with the one behind it, so that not all send to the same one first, and the first sends
    // of all ranks come before anyone's second, so that relays serve all ranks in turn.
    let ranks = places.len();
    found.sort_by_key(|(from, message)| ((message.to + ranks - from) % ranks, *from));
    Ok(found.into_iter().map(|(_, message)| message).collect())
}
